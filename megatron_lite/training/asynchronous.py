"""Training through an asynchronous pipeline: steps without a flush, from one drain to the next.

`train_step` gives way to `train_window`: the action list of a rank runs over the microbatches of many steps, and after the
last backward of each global batch this rank, alone, does what is left of the step:

    finish the dp x cp reduction, sum partial gradients over tp -> token count -> norm of this stage -> clip -> optimizer

No message about a step crosses stages, for every one of them would be a barrier. Therefore:

    clipping     each of the p stages clips its own norm to clip_grad / sqrt(p), so that the global norm of what is applied
                 never exceeds clip_grad
    skipping     a stage whose norm is not finite skips its update alone; a step counts as skipped if one stage skipped it
    reporting    losses and norms of all steps are summed over the stages once, when the pipeline has drained

A drain comes every --pipeline-drain-interval steps, counted from step 0, and wherever the run evaluates, saves, exits or
ends. There all stages hold the same number of updates and nothing is in flight, so a checkpoint needs no more than it does
elsewhere, and a run that is resumed goes on as one that drained at the same steps. Signals are looked at there, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.config import Config
from megatron_lite.data.loader import Batch
from megatron_lite.optim.clip import clip_coefficient, square_sum
from megatron_lite.optim.lr import learning_rate, lengths
from megatron_lite.optim.versions import WeightVelocity, WeightVersions
from megatron_lite.pipeline.executor import Microbatch, Result, Watch
from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.asynchronous import annealed, delay, last_uses, weight_uses
from megatron_lite.training.setup import Trainer, num_microbatches
from megatron_lite.training.step import StepReport, with_keys

UNKNOWN = "on some stage; in an asynchronous pipeline the place is not looked for, as its weights have changed since"


def steps_to_drain(config: Config, iteration: int) -> int:
    """Steps from `iteration` (finished ones) to the next drain of an asynchronous pipeline."""
    train = config.train
    every = [config.parallel.pipeline_drain_interval, train.eval_interval, train.exit_interval]
    if config.checkpoint.save:
        saves = config.checkpoint
        every += [saves.save_interval, saves.save_weights_only_interval, saves.peer_checkpoint_interval]
    points = [n - iteration % n for n in every if n]
    return min([*points, max(train.train_iters - iteration, 1)])


def train_window(trainer: Trainer, next_step: Callable[[], Sequence[Batch]], iteration: int, scheduled_samples: int,
                 steps: int) -> list[StepReport]:  # fmt: skip
    """`steps` training steps through a pipeline that is empty before and after; a report for each. `next_step` gives this
    rank's microbatches of one step and is called `steps` times. `iteration` counts from 0."""
    stream = _Stream(trainer, next_step, iteration)
    window = _Window(trainer, stream, iteration, scheduled_samples, steps)
    trainer.engine.begin_step(stream.per_step)
    result = trainer.executor.run(window.actions, stream, watch=window)
    window.versions.bind(window.versions.newest)
    trainer.optimizer.steps = int(_over_stages(trainer, torch.tensor([float(trainer.optimizer.steps)]), "max"))
    sums = _over_stages(trainer, torch.stack(window.sums))  # [steps, 3]: the loss of the last stage, norms of all
    reports = []
    for (loss, squares, skipped), tokens, lr in zip(sums.tolist(), window.tokens, window.rates, strict=True):
        reports.append(StepReport(loss / tokens, int(tokens), math.sqrt(squares) if squares >= 0 else math.nan, lr,
                                  not skipped, result, fault=UNKNOWN if skipped else None))  # fmt: skip
    return reports


def _over_stages(trainer: Trainer, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return comm.all_reduce(tensor.double().to(trainer.mesh.device), trainer.mesh.pp, op=op)


class _Stream(Sequence[Microbatch]):
    """The microbatches of many steps, numbered on from step to step. Forwards take them in order, so one step is held."""

    def __init__(self, trainer: Trainer, next_step: Callable[[], Sequence[Batch]], iteration: int):
        self.trainer, self.next_step, self.iteration = trainer, next_step, iteration
        config, self.taken, self.held = trainer.config, -1, []
        self.per_step = num_microbatches(config, trainer.mesh.dp.size)
        self.unmasked: dict[int, torch.Tensor] = {}  # tokens of a step in this rank's microbatches

    def __len__(self) -> int:
        return (self.taken + 1) * self.per_step

    def __getitem__(self, number: int) -> Microbatch:
        step, within = divmod(number, self.per_step)
        if step != self.taken:
            seed, mesh = self.trainer.config.train.seed, self.trainer.mesh
            self.held, self.taken = with_keys(self.next_step(), mesh, seed, self.iteration + step), step
            self.unmasked[step] = sum(batch.mask.sum(dtype=torch.float64) for batch in self.held)
        return self.held[within]


class _Window(Watch):
    """What happens between the actions from one drain to the next: binds the weights that each uses, and updates them."""

    def __init__(self, trainer: Trainer, stream: _Stream, iteration: int, scheduled_samples: int, steps: int):
        config, mesh, pipeline = trainer.config, trainer.mesh, trainer.settled.pipeline
        self.trainer, self.stream, self.iteration, self.scheduled = trainer, stream, iteration, scheduled_samples
        self.actions = pipeline.actions(stream.per_step * steps)[mesh.pp.rank]
        self.uses = weight_uses(pipeline.schedule, self.actions, stream.per_step)
        self.last, self.at, self.steps = last_uses(self.uses), 0, steps
        self.versions = WeightVersions(trainer.engine.buckets)
        self.tau = delay(mesh.pp.size, mesh.pp.rank, stream.per_step) if pipeline.schedule == "pipemare" else 0.0
        decay = config.parallel.pipemare_correction_decay
        self.velocity = WeightVelocity(trainer.optimizer.states, decay ** (1 / self.tau)) if self.tau and decay else None
        self.estimated: tuple[int, int] | None = None  # (newest version, lag) of the estimate that is bound
        self.sums: list[torch.Tensor] = []  # per step: loss, squared norm, skipped
        self.tokens: list[float] = []
        self.rates: list[float] = []

    def before(self, action: Action) -> None:
        use = self.uses[self.at]
        if not use.lag or self.velocity is None:
            self.versions.bind(use.version)
            self.estimated = None
        elif self.estimated != (use.version, use.lag):
            self.versions.point(self.velocity.earlier(use.lag))
            self.estimated = use.version, use.lag

    def after(self, action: Action, result: Result) -> None:
        use = self.uses[self.at]
        if self.last[use.version] == self.at:
            self.versions.drop(use.version)
        if use.update:
            self._update(result)
        self.at += 1

    def _update(self, result: Result) -> None:
        """The rest of the step whose last backward has just run; everything here stays within the stage."""
        trainer, config, versions = self.trainer, self.trainer.config, self.versions
        mesh, engine, step = trainer.mesh, trainer.engine, len(self.rates)
        engine.finish()
        sums = torch.stack([result.loss, self.stream.unmasked.pop(step)])
        loss, tokens = comm.all_reduce(sums, mesh.dp_cp)
        tokens = tokens.clamp(min=1.0)
        norm = square_sum(engine.buckets, "grad", mesh.tp).sqrt() / tokens
        scheduled = self.scheduled + step * config.train.global_batch_size
        lr = learning_rate(scheduled, config.optimizer, config.train)
        stepped = bool(torch.isfinite(norm) & torch.isfinite(loss))
        if self.last.get(versions.newest, -1) > self.at:
            versions.keep_newest()
        if self.velocity is not None:
            self.velocity.before_update()
        if stepped:
            rate = annealed(lr, self.tau, self.iteration + step, annealing_length(config))
            most = config.optimizer.clip_grad / math.sqrt(mesh.pp.size)
            trainer.optimizer.step(rate, clip_coefficient(norm, most) / tokens)
        if self.velocity is not None:
            self.velocity.after_update()
        versions.updated()
        self.sums.append(torch.stack([loss, norm.square(), torch.full_like(loss, float(not stepped))]))
        self.tokens.append(float(tokens))
        self.rates.append(lr)
        result.loss, result.tokens = torch.zeros_like(loss), torch.zeros_like(loss)  # the next step's
        if step + 1 < self.steps:
            engine.begin_step(self.stream.per_step)


def annealing_length(config: Config) -> int:
    """Steps over which PipeMare's rates rise to the others'."""
    length = config.parallel.pipemare_annealing_iters
    if length is not None:
        return length
    warmup, total, _ = lengths(config.optimizer, config.train)
    return round((5 * warmup or total / 4) / config.train.global_batch_size)
