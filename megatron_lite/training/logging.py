"""What a run says about itself: one line per log interval, and the same numbers to JSONL, TensorBoard and W&B.

    train_step -> StepReport -> Interval.add        every step; floats only, nothing is read from the device here
                                Interval.metrics    every log interval, on all ranks; starts the next one
    Metrics -> log_line                             one line in Megatron's form and field order, ours appended
            -> Sinks.write_metrics                  Megatron's keys

One rank prints and holds the sinks; the others get an empty `Sinks`, and never import W&B or TensorBoard.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

import megatron_lite
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.errors import ReportedError
from megatron_lite.planner.flops import flops_per_token
from megatron_lite.training.loads import Load
from megatron_lite.training.peak import matmul_peak_tflops
from megatron_lite.training.setup import peak_memory
from megatron_lite.training.step import StepReport
from megatron_lite.training.trace import bubble_share
from megatron_lite.training.tracking import WandbSink, finite, login_missing, without_secrets

MFU_FORMULA = "model FLOPs, causal half"  # planner.flops: no recomputation counted, attention at half of its square

# What Megatron draws against consumed samples too: keys that begin so.
VERSUS_SAMPLES = ("lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "params-norm")


class LoggingError(ReportedError):
    """A sink that was asked for cannot work; the message is one line that names the flag and what to do."""


@dataclass(frozen=True)
class Metrics:
    """What one log interval knows. Times in seconds, memory in bytes, shares in percent."""

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    seconds_per_iteration: float  # mean
    learning_rate: float  # of the last step
    global_batch_size: int  # samples of the last step
    lm_loss: float  # mean over the iterations that were not skipped; nan if all were
    loss_scale: float  # of the last step
    grad_norm: float  # of the last step, before clipping
    params_norm: float | None
    skipped: int  # iterations without an update
    nan_iterations: int  # iterations with a loss that is not finite
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float | None  # model TFLOP/s
    mfu: float | None  # percent of the device's peak, None where that is unknown
    bubble_percent: float | None  # of the pipeline's time (training/trace.py); None without a pipeline
    data_wait_percent: float  # of the ranks' time
    peak_memory_bytes: int  # of the rank with most
    eta_seconds: float
    load: Load | None = None  # of experts, in the last step
    mfu_formula: str = MFU_FORMULA


class Interval:
    """Adds up the steps between two log lines.

    A step that was skipped enters the counters and the time, never the loss. `skipped_in_a_row` lives on over the
    lines: a run whose last steps were all skipped is lost (NaN weights do not heal), and its loop can say so and stop.
    Overflows for which there is a lower loss scale to try are not among them.
    """

    def __init__(self, config: Config, mesh: Mesh):
        """Measures the peak that MFU needs, where it is not known. Collective, so that all ranks measure together."""
        self.config, self.mesh = config, mesh
        comm.barrier(mesh.world)
        dtype = getattr(torch, config.precision.dtype_name)
        self.peak_tflops = matmul_peak_tflops(dtype, mesh.device, config.logging.peak_tflops)  # of one device
        self.skipped_in_a_row = 0
        self.reset()

    def reset(self) -> None:
        self.steps = self.samples = self.skipped = self.nan_iterations = 0
        self.loss_sum = self.seconds = self.data_wait_seconds = 0.0
        self.pipeline_seconds: list[tuple[float, float]] = []  # per step: of the whole action list, and waiting in it
        self.last: StepReport | None = None
        self.last_samples = 0

    def add(self, report: StepReport, seconds: float, data_wait_seconds: float = 0.0, samples: int | None = None) -> None:
        """One step. `seconds`: wall time of the whole iteration, the wait for its data included; `samples`: its batch, where it
        is not the full one."""
        self.last_samples = self.config.train.global_batch_size if samples is None else samples
        self.samples += self.last_samples
        self.steps += 1
        self.seconds += seconds
        self.data_wait_seconds += data_wait_seconds
        self.pipeline_seconds.append((report.result.total_seconds, report.result.wait_seconds))
        self.nan_iterations += not math.isfinite(report.loss)
        if report.stepped:
            self.loss_sum += report.loss
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += report.fault is not None
        self.last = report

    def metrics(self, iteration: int, consumed_samples: int, params_norm: float | None = None) -> Metrics:
        """The interval that ends with `iteration` (from 1), and a fresh start. At least one step must have been added.

        Collective: waiting times are the ranks' mean, memory is that of the rank with most.
        """
        train, seq = self.config.train, self.config.model.seq_length
        seconds = max(self.seconds / self.steps, 1e-9)
        updates = self.steps - self.skipped
        world, device = self.mesh.world, self.mesh.device
        samples_per_second, sizes = self.samples / max(self.seconds, 1e-9), train.batch_sizes
        tokens_per_second = samples_per_second * seq
        tflops = flops_per_token(self.config) * tokens_per_second / (1e12 * world.size)
        data_wait = torch.tensor(self.data_wait_seconds, dtype=torch.float64, device=device)
        data_wait = float(comm.all_reduce(data_wait, world)) / (world.size * self.steps * seconds)
        memory = torch.tensor(peak_memory(device), dtype=torch.float64, device=device)
        metrics = Metrics(
            iteration=iteration,
            train_iters=train.train_iters,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * seq,
            seconds_per_iteration=seconds,
            learning_rate=self.last.lr,
            global_batch_size=self.last_samples,
            lm_loss=self.loss_sum / updates if updates else math.nan,
            loss_scale=self.last.loss_scale,
            grad_norm=self.last.grad_norm,
            params_norm=params_norm,
            skipped=self.skipped,
            nan_iterations=self.nan_iterations,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_device=tokens_per_second / world.size,
            tflops_per_device=tflops,
            mfu=100.0 * tflops / self.peak_tflops if self.peak_tflops else None,
            bubble_percent=100.0 * bubble_share(self.pipeline_seconds, self.mesh) if self.config.parallel.pp > 1 else None,
            data_wait_percent=100.0 * data_wait,
            peak_memory_bytes=int(comm.all_reduce(memory, world, op="max")),
            eta_seconds=max(0, sizes.samples(train.train_iters) - sizes.samples(iteration)) / samples_per_second,
            load=self.last.load,
        )
        self.reset()
        return metrics


def log_line(metrics: Metrics, now: datetime | None = None) -> str:
    """Megatron's line, field by field in its order (people's parsers read it), then what it leaves out."""
    m = metrics
    digits = 1 if (m.tflops_per_device or 0) >= 10 else 3  # Megatron's one digit would show a CPU's rate as 0.0
    fields = [
        f" [{now or datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {m.iteration:8d}/{m.train_iters:8d}",
        f"consumed samples: {m.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {m.seconds_per_iteration * 1000.0:.1f}",
        m.tflops_per_device is not None and f"throughput per GPU (TFLOP/s/GPU): {m.tflops_per_device:.{digits}f}",
        f"learning rate: {m.learning_rate:.6E}",
        f"global batch size: {m.global_batch_size:5d}",
        f"lm loss: {m.lm_loss:.6E}",
        f"loss scale: {m.loss_scale:.1f}",
        f"grad norm: {m.grad_norm:.3f}",
        m.params_norm is not None and f"params norm: {m.params_norm:.3f}",
        f"number of skipped iterations: {m.skipped:3d}",
        f"number of nan iterations: {m.nan_iterations:3d}",
        f"tokens/s: {m.tokens_per_second:.0f}",
        f"tokens/s/device: {m.tokens_per_second_per_device:.0f}",
        m.mfu is not None and f"MFU ({m.mfu_formula}): {m.mfu:.1f}%",
        m.bubble_percent is not None and f"bubble: {m.bubble_percent:.1f}%",
        f"data wait: {m.data_wait_percent:.1f}%",
        f"peak memory (GB): {m.peak_memory_bytes / 1e9:.2f}",
        f"consumed tokens: {m.consumed_tokens}",
        f"ETA: {duration(m.eta_seconds)}",
        *(m.load.fields() if m.load else ()),
    ]
    return " | ".join(field for field in fields if field) + " |"


def duration(seconds: float) -> str:
    """`0:02:05`, `3d 4:00:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour}:{minute:02d}:{second:02d}" if days else f"{hour}:{minute:02d}:{second:02d}"


def perplexity(loss: float) -> float:
    """exp(loss), with Megatron's ceiling."""
    return math.exp(min(loss, 20.0))  # in this order NaN stays NaN


def evaluation_lines(iteration: int, loss: float, where: str = "") -> str:
    """Megatron's three lines. `where`: " on test set", or " on validation set NAME" where sets have names."""
    line = f" validation loss at iteration {iteration}{where} | lm loss value: {loss:.6E} | "
    line += f"lm loss PPL: {perplexity(loss):.6E} | "
    ruler = "-" * (len(line) + 1)
    return f"{ruler}\n{line}\n{ruler}"


def values_of(metrics: Metrics) -> dict[str, float]:
    """A log interval under Megatron's keys; ours are named alike. What is not known is left out."""
    m = metrics
    values = {
        "lm loss": m.lm_loss, "learning-rate": m.learning_rate, "batch-size": m.global_batch_size,
        "loss-scale": m.loss_scale, "grad-norm": m.grad_norm, "params-norm": m.params_norm,
        "iteration-time": m.seconds_per_iteration, "throughput": m.tflops_per_device,
        "skipped-iterations": m.skipped, "nan-iterations": m.nan_iterations, "tokens-per-second": m.tokens_per_second,
        "tokens-per-second-per-device": m.tokens_per_second_per_device, "mfu-percent": m.mfu,
        "bubble-percent": m.bubble_percent, "data-wait-percent": m.data_wait_percent,
        "mem-max-allocated-bytes": m.peak_memory_bytes, "consumed-samples": m.consumed_samples,
        "consumed-tokens": m.consumed_tokens, "eta-seconds": m.eta_seconds,
    }  # fmt: skip
    return {key: value for key, value in values.items() if value is not None} | (m.load.values() if m.load else {})


class Sink(Protocol):
    """Where numbers go. `iteration` counts from 1; a run may write several times at one iteration."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None: ...

    def event(self, iteration: int, kind: str, text: str) -> None: ...

    def close(self) -> None: ...


class JSONLSink:
    """One JSON object per line, appended, on the disk as far as this process can see to it. NaN becomes null.

    Every process that writes begins with `{"event": "start", "settings": {...}}`, so that the file says what was run and
    how often it started again (tools/report.py). Warnings are `{"event": "warning", "text": ...}`.
    """

    def __init__(self, path: str, start: Mapping[str, Any]):
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a+b", buffering=0)  # noqa: SIM115 - lives as long as the run
        if self.file.seek(0, os.SEEK_END):
            self.file.seek(-1, os.SEEK_END)
            if self.file.read(1) != b"\n":  # a run killed in the middle of a line
                self.file.write(b"\n")
        self.start: Mapping[str, Any] | None = start  # until it is written, before the first row

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        self._append({"iteration": iteration, **finite(values)})

    def event(self, iteration: int, kind: str, text: str) -> None:
        self._append({"event": kind, "iteration": iteration, "text": text})

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.start is not None:
            start, self.start = self.start, None
            self._append({"event": "start", **start})
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self.file.write((json.dumps({**row, "time": now}) + "\n").encode())

    def close(self) -> None:
        self.file.close()


class TensorBoardSink:
    """Scalars over iterations; Megatron's favourites over consumed samples as well."""

    def __init__(self, directory: str):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(directory)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, iteration)
            if key.startswith(VERSUS_SAMPLES) and "consumed-samples" in values:
                self.writer.add_scalar(f"{key} vs samples", value, int(values["consumed-samples"]))
        self.writer.flush()

    def event(self, iteration: int, kind: str, text: str) -> None:
        self.writer.add_text(kind, text, iteration)

    def close(self) -> None:
        self.writer.close()


class Sinks:
    """All sinks of this rank, as one. A sink that fails is given up with one line: a full disk must not end the run."""

    def __init__(self, sinks: list[Sink], seq_length: int):
        self.sinks, self.seq_length = sinks, seq_length

    @property
    def wandb_id(self) -> str | None:
        """W&B's id of the run, for the checkpoint; None without W&B and on the ranks that do not log."""
        return next((sink.run.id for sink in self.sinks if isinstance(sink, WandbSink)), None)

    def write_metrics(self, metrics: Metrics) -> None:
        self.write(metrics.iteration, values_of(metrics))

    def write_evaluation(self, iteration: int, consumed_samples: int, loss: float, split: str = "validation") -> None:
        """`split`: "validation" or "test", or "validation-NAME" where sets have names."""
        values = {f"lm loss {split}": loss, f"lm loss {split} ppl": perplexity(loss)}
        position = {"consumed-samples": consumed_samples, "consumed-tokens": consumed_samples * self.seq_length}
        self.write(iteration, values | position)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        self._each(iteration, lambda sink: sink.write(iteration, values))

    def event(self, iteration: int, kind: str, text: str) -> None:
        """Something that happened, in words. `kind`: "warning", which W&B raises an alert for, or "stop"."""
        self._each(iteration, lambda sink: sink.event(iteration, kind, text))

    def _each(self, iteration: int, act: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                act(sink)
            except OSError as error:
                print(f"{type(sink).__name__} stops at iteration {iteration}: {error}", file=sys.stderr)
                self.sinks.remove(sink)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def check_sinks(config: Config, tell: Callable[[str], None] = print) -> None:
    """Raise LoggingError, naming flag and package, if a sink that was asked for is not installed; tell where nobody is logged
    in. The same on every rank, so it is asked before any process group or model exists."""
    asked = {"wandb": ("--wandb-project", config.logging.wandb_project),
             "tensorboard": ("--tensorboard-dir", config.logging.tensorboard_dir)}  # fmt: skip
    missing = [f"{flag} {value} needs the package {package}: pip install {package}, or leave {flag} out"
               for package, (flag, value) in asked.items() if value and not installed(package)]  # fmt: skip
    if missing:
        raise LoggingError("; ".join(missing))
    note = login_missing() if config.logging.wandb_project else None
    if note:
        tell(note)


def installed(package: str) -> bool:
    """A folder of that name (W&B makes one called `wandb`) is importable too, but has no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def build_sinks(config: Config, is_logging_rank: bool, wandb_id: str | None = None, iteration: int = 0) -> Sinks:
    """The sinks that the flags ask for, on the one rank that logs. `wandb_id`: of the W&B run to go on with; `iteration`:
    done before.

    Raises LoggingError, naming flag and path, where a file or folder cannot be written.
    """
    c = config.logging
    if not is_logging_rank:
        return Sinks([], config.model.seq_length)
    start = {"iteration": iteration, "version": megatron_lite.__version__, "settings": without_secrets(config.as_dict())}
    makers: list[tuple[str, str | None, Callable[[], Sink]]] = [
        ("--jsonl", c.jsonl, lambda: JSONLSink(c.jsonl, start)),
        ("--tensorboard-dir", c.tensorboard_dir, lambda: TensorBoardSink(c.tensorboard_dir)),
        ("--wandb-project", c.wandb_project, lambda: WandbSink(c.wandb_project, c.wandb_exp_name, c.wandb_entity,
            c.wandb_save_dir or config.checkpoint.save, config.as_dict(), wandb_id, c.wandb_group, c.wandb_tags)),
    ]  # fmt: skip
    sinks = []
    for flag, value, make in makers:
        try:
            if value:
                sinks.append(make())
        except (OSError, ImportError) as error:
            raise LoggingError(f"{flag} {value}: {error}") from error
    return Sinks(sinks, config.model.seq_length)
