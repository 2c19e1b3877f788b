"""The training loop: steps, log lines, evaluations, checkpoints, and the reasons to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.config import Config
from megatron_lite.data.loader import BatchLoader
from megatron_lite.errors import ReportedError, peer_gone
from megatron_lite.optim.clip import square_sum
from megatron_lite.training.data import Splits, build_loader
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.logging import Interval, Sinks, evaluation_lines, log_line
from megatron_lite.training.setup import Trainer
from megatron_lite.training.signals import StopSignal
from megatron_lite.training.state import Progress, save
from megatron_lite.training.step import train_step

MAX_SKIPS = 10  # steps without an update in a row: NaN weights do not heal


class TrainingError(ReportedError):
    """The run cannot go on."""


class Run:
    """A trainer with its data, its log and its progress."""

    def __init__(self, trainer: Trainer, splits: Splits, sinks: Sinks, interval: Interval, progress: Progress,
                 stop: StopSignal, say: Callable[[str], None]):  # fmt: skip
        self.trainer, self.splits, self.sinks, self.interval = trainer, splits, sinks, interval
        self.progress, self.stop, self.say = progress, stop, say
        resumed = trainer.config.checkpoint.load == trainer.config.checkpoint.save and progress.iteration > 0
        self.saved_iteration = progress.iteration if resumed else None
        self.started = time.monotonic()

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
            saved = f"saved last: iteration {self.saved_iteration}" if self.saved_iteration else "nothing was saved yet"
            raise TrainingError(f"after iteration {self.progress.iteration}: another rank is gone, and has said why unless "
                                f"the system killed it; {saved}") from error  # fmt: skip

    def _train(self) -> None:
        loader = build_loader(self.config, self.trainer.mesh, self.splits, self.splits.train, self.progress.consumed_samples)
        try:
            reason = None
            while self.progress.iteration < self.config.train.train_iters and reason is None:
                self._step(loader)
                self._evaluate_if_due()
                reason = self._stop_reason()
                if reason:
                    self.stop.finished()
                every = self.config.checkpoint.save_interval
                if every and self.progress.iteration % every == 0:
                    self._save()
        finally:
            loader.close()
        if reason:
            self.say(f"stopping after iteration {self.progress.iteration}: {reason}")
        self._save()

    def _step(self, loader: BatchLoader) -> None:
        started = time.perf_counter()
        iteration, consumed = self.progress.iteration, self.progress.consumed_samples
        report = train_step(self.trainer, loader.next_step(), iteration, consumed)
        seconds = time.perf_counter() - started
        wandb_id = self.sinks.wandb_id or self.progress.wandb_id
        self.progress = Progress(iteration + 1, consumed + self.config.train.global_batch_size, wandb_id)
        self.interval.add(report, seconds, loader.take_wait_seconds())
        every = self.config.logging.log_interval
        if self.progress.iteration % every == 0 or self.progress.iteration in (1, self.config.train.train_iters):
            norm = self._params_norm() if self.config.logging.log_params_norm else None
            metrics = self.interval.metrics(self.progress.iteration, self.progress.consumed_samples, norm)
            self.say(log_line(metrics))
            self.sinks.write_metrics(metrics)
        if self.interval.skipped_in_a_row >= MAX_SKIPS:
            raise TrainingError(
                f"iterations {iteration + 2 - MAX_SKIPS} to {iteration + 1} had no finite gradient (last loss {report.loss}, "
                f"norm {report.grad_norm}): stopping without saving; the last checkpoint is untouched. A smaller --lr, or "
                "--clip-grad, may help")

    def _params_norm(self) -> float:
        engine = self.trainer.engine
        return float(square_sum(engine.buckets, "param", self.trainer.mesh.tp_pp, engine.shard).sqrt())

    def _evaluate_if_due(self) -> None:
        every = self.config.train.eval_interval
        if not every or (self.progress.iteration % every and self.progress.iteration != self.config.train.train_iters):
            return

        def from_the_start() -> BatchLoader:
            return build_loader(self.config, self.trainer.mesh, self.splits, self.splits.valid, 0)

        loss = evaluate(self.trainer, from_the_start, self.config.train.eval_iters, self._signalled)
        if loss is None:
            return
        self.say(evaluation_lines(self.progress.iteration, loss))
        self.sinks.write_evaluation(self.progress.iteration, self.progress.consumed_samples, loss)

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

    def _save(self) -> None:
        if self.config.checkpoint.save is None or self.saved_iteration == self.progress.iteration:
            return
        if self.interval.skipped_in_a_row or not math.isfinite(self._params_norm()):
            self.say(f"iteration {self.progress.iteration} is not saved: its gradient or its weights are not finite")
            return
        started = time.perf_counter()
        folder = save(self.trainer, self.progress)
        self.saved_iteration = self.progress.iteration
        self.say(f"saved {folder} in {time.perf_counter() - started:.1f} s")
