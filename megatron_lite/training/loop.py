"""The training loop: steps, log lines, evaluations, checkpoints, and the reasons to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.config import Config
from megatron_lite.data.loader import BatchLoader, Samples
from megatron_lite.data.streaming import StreamedSamples
from megatron_lite.errors import ReportedError, peer_gone
from megatron_lite.pipeline.recorder import phase
from megatron_lite.training.asynchronous import steps_to_drain, train_window
from megatron_lite.training.data import Splits, build_evaluation, build_loader
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.ledger import Ledger
from megatron_lite.training.logging import Interval, Sinks, evaluation_lines, log_line
from megatron_lite.training.profile import Profiler
from megatron_lite.training.saving import Saver
from megatron_lite.training.setup import Trainer
from megatron_lite.training.signals import StopSignal
from megatron_lite.training.state import Home, Progress
from megatron_lite.training.step import StepReport, train_step
from megatron_lite.training.trace import Tracer


class TrainingError(ReportedError):
    """The run cannot go on."""


class Run:
    """A trainer with its data, its log and its progress."""

    def __init__(self, trainer: Trainer, splits: Splits, sinks: Sinks, interval: Interval, progress: Progress,
                 stop: StopSignal, say: Callable[[str], None], home: Home | None = None):  # fmt: skip
        self.trainer, self.splits, self.sinks, self.interval = trainer, splits, sinks, interval
        self.progress, self.stop, self.say = progress, stop, say
        self.saver = Saver(trainer, progress, say, home)
        self.started = time.monotonic()
        self.tracer = Tracer(trainer, progress.iteration) if self.config.logging.trace_dir else None
        self.profiler = Profiler(trainer, progress.iteration, say) if self.config.logging.profile else None
        self.ledger = Ledger(trainer) if trainer.config.logging.log_memory else None  # until the first step is over

    @property
    def config(self) -> Config:
        return self.trainer.config

    def train(self) -> None:
        """Train from where the progress stands to the end, or until something says stop; then save."""
        try:
            self._train()
        except RuntimeError as error:
            if not peer_gone(error):
                raise
            last = self.saver.saved_iteration
            saved = f"saved last: iteration {last}" if last else "nothing was saved yet"
            raise TrainingError(f"after iteration {self.progress.iteration}: another rank is gone, and has said why unless "
                                f"the system killed it; {saved}") from error  # fmt: skip
        finally:
            self.saver.home.leave()

    def _train(self) -> None:
        loader = self._loader()
        try:
            reason = None
            while self.progress.iteration < self.config.train.train_iters and reason is None:
                if self.progress.iteration + 1 in (self.config.train.iterations_to_skip or ()):
                    self._leave_out(loader)
                else:
                    self._step(loader)
                self.saver.poll()
                self._evaluate_if_due()
                reason = self._stop_reason()
                if reason:
                    self.stop.finished()
                self._save(last=False)
        finally:
            loader.close()
            if self.profiler:
                self.profiler.close()
        if reason:
            self.say(f"stopping after iteration {self.progress.iteration}: {reason}")
            self.sinks.event(self.progress.iteration, "stop", reason)
        self._save(last=True)
        if self.splits.test is not None and reason is None:
            self._evaluate(self.splits.test, "test", " on test set")

    def _loader(self) -> BatchLoader:
        """The training batches from where the progress stands."""
        samples, progress = self.splits.train, self.progress
        if isinstance(samples, StreamedSamples):
            note = samples.seek(progress.consumed_samples, progress.data_position)
            if note:
                self.say(note)
        return build_loader(self.trainer, self.splits, samples, progress.consumed_samples)

    def _leave_out(self, loader: BatchLoader) -> None:
        """An iteration of --iterations-to-skip: its samples are consumed, nothing is trained, the learning rate stands still."""
        loader.next_step()
        loader.take_wait_seconds()
        self._advance(stepped=False)
        self.progress = replace(self.progress, data_position=loader.position)
        self.say(f"iteration {self.progress.iteration} is left out: --iterations-to-skip")
        self._log_if_due()

    def _step(self, loader: BatchLoader) -> None:
        """One step; of an asynchronous pipeline all steps to its next drain, which are logged one by one when it is there."""
        if self.profiler:
            self.profiler.begin(self.progress.iteration + 1)
        started = time.perf_counter()
        with self.ledger.watching() if self.ledger else nullcontext():
            reports = self._run_steps(loader)
        seconds, waited = time.perf_counter() - started, loader.take_wait_seconds()
        if self.profiler:
            self.profiler.end(self.progress.iteration + 1)
        for report in reports:
            self._account(report, seconds / len(reports), waited / len(reports))
        self.progress = replace(self.progress, data_position=loader.position)

    def _run_steps(self, loader: BatchLoader) -> list[StepReport]:
        iteration, scheduled = self.progress.iteration, self.progress.scheduled_samples
        if self.trainer.settled.pipeline.asynchronous:
            steps = steps_to_drain(self.config, iteration)
            return train_window(self.trainer, loader.next_step, iteration, scheduled, steps)
        with phase(self.trainer.recorder, "data"):
            batches = loader.next_step()
        if self.tracer:
            self.tracer.begin(iteration + 1)
        report = train_step(self.trainer, batches, iteration, scheduled)
        if self.tracer:
            self.tracer.end(report.result)
        return [report]

    def _account(self, report: StepReport, seconds: float, data_wait_seconds: float) -> None:
        """Progress and log of one finished step."""
        samples = self._advance(report.stepped)
        self.interval.add(report, seconds, data_wait_seconds, samples)
        self._log_if_due()
        if self.ledger:
            self.say("\n".join(self.ledger.lines()))
            self.ledger = None
        if report.fault is not None:
            self._skipped(report)

    def _advance(self, stepped: bool) -> int:
        """Progress by one step; its samples."""
        progress = self.progress
        batch = self.config.train.batch_sizes.at(progress.consumed_samples)
        skipped = progress.skipped_samples + (0 if stepped else batch)
        wandb_id = self.sinks.wandb_id or progress.wandb_id
        self.progress = Progress(progress.iteration + 1, progress.consumed_samples + batch, wandb_id, skipped)
        return batch

    def _log_if_due(self) -> None:
        every, iteration = self.config.logging.log_interval, self.progress.iteration
        if self.interval.steps and (iteration % every == 0 or iteration in (1, self.config.train.train_iters)):
            norm = self._params_norm() if self.config.logging.log_params_norm else None
            metrics = self.interval.metrics(iteration, self.progress.consumed_samples, norm)
            self.say(log_line(metrics))
            self.sinks.write_metrics(metrics)

    def _skipped(self, report: StepReport) -> None:
        """Say where the first of some skipped steps went wrong; end the run when there are too many in a row."""
        number, most, last = self.interval.skipped_in_a_row, self.config.train.max_consecutive_skips, self.progress.iteration
        if number == 1:
            self._warn(f"iteration {last} is skipped: {report.fault}")
        if number >= most:
            self.saver.drain()
            message = (
                f"iterations {last + 1 - most} to {last} had no finite gradient (last loss {report.loss}, norm "
                f"{report.grad_norm}; {report.fault}): stopping without saving, as --max-consecutive-skips {most} says; "
                "the last checkpoint is untouched. A smaller --lr, or --clip-grad, may help")
            self.sinks.event(last, "warning", message)
            raise TrainingError(message)

    def _warn(self, text: str) -> None:
        """Say it, and leave it in the log."""
        self.say(text)
        self.sinks.event(self.progress.iteration, "warning", text)

    def _params_norm(self) -> float:
        return float(self.trainer.square_sum("param").sqrt())

    def _evaluate_if_due(self) -> None:
        every = self.config.train.eval_interval
        if every and (self.progress.iteration % every == 0 or self.progress.iteration == self.config.train.train_iters):
            for name, samples in self.splits.valid.items():
                if name:
                    self._evaluate(samples, f"validation-{name}", f" on validation set {name}")
                else:
                    self._evaluate(samples, "validation")

    def _evaluate(self, samples: Samples, split: str, where: str = "") -> None:
        """Score a set and report it as `split`; nothing is said where a signal came first."""
        whole = self.config.train.full_validation and split != "test"
        loader, batches = build_evaluation(self.trainer, self.splits, samples, whole)
        loss = evaluate(self.trainer, loader, batches, self._signalled)
        if loss is None:
            return
        self.say(evaluation_lines(self.progress.iteration, loss, where))
        self.sinks.write_evaluation(self.progress.iteration, self.progress.consumed_samples, loss, split)

    def _any_rank(self, yes: bool) -> bool:
        """Whether it is true on some rank: a signal or a clock may reach only one, but all must leave together."""
        flag = torch.tensor([yes], dtype=torch.float32, device=self.trainer.mesh.device)
        return bool(comm.all_reduce(flag, self.trainer.mesh.world, op="max"))

    def _signalled(self) -> bool:
        return self._any_rank(self.stop.received)

    def _stop_reason(self) -> str | None:
        """Why to leave the loop early; the same on every rank."""
        train = self.config.train
        if self._signalled():
            return "a signal asked for it"
        minutes = (time.monotonic() - self.started) / 60
        if train.exit_duration_in_mins is not None and self._any_rank(minutes > train.exit_duration_in_mins):
            return f"--exit-duration-in-mins {train.exit_duration_in_mins:g} is over"
        if train.exit_interval and self.progress.iteration % train.exit_interval == 0:
            return f"--exit-interval {train.exit_interval}"
        return None

    def _save(self, last: bool) -> None:
        """Save what is due; at the end of a run the last iteration, and wait for what is still being written."""
        full, weights = self.saver.due(self.progress, last)
        copy = self.saver.copy_due(self.progress, last)
        if full or weights or copy:
            if self.interval.skipped_in_a_row or not math.isfinite(self._params_norm()):
                self._warn(f"iteration {self.progress.iteration} is not saved: its gradient or its weights are not finite")
            else:
                self.saver.save(self.progress, full, weights)
                if copy:
                    self.saver.copy(self.progress)
        if last:
            self.saver.finish(self.progress)
