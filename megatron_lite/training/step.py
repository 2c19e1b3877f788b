"""One training step. The order of what happens in it is written here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh
from megatron_lite.data.loader import Batch
from megatron_lite.models.packing import packing_of
from megatron_lite.optim.clip import clip_coefficient
from megatron_lite.optim.lr import learning_rate
from megatron_lite.parallel.context import own_part
from megatron_lite.pipeline.executor import Microbatch, Result
from megatron_lite.pipeline.recorder import phase
from megatron_lite.rng import DropoutKey
from megatron_lite.training.loads import Load
from megatron_lite.training.nonfinite import first_fault
from megatron_lite.training.setup import Trainer


@dataclass(frozen=True)
class StepReport:
    """The same on every rank. `loss` is the mean over the global batch's unmasked tokens, `grad_norm` of its gradient
    before clipping; `stepped` is False when a non-finite norm or loss made all ranks skip the update. `loss_scale` is that
    of this step; `fault` says where the first value that is not finite arose, and is None where the step was taken or
    where the loss scale, too high, is the cause. `load`: of experts."""

    loss: float
    tokens: int
    grad_norm: float
    lr: float
    stepped: bool
    result: Result
    loss_scale: float = 1.0
    fault: str | None = None
    load: Load | None = None


def train_step(trainer: Trainer, batches: Sequence[Batch], iteration: int, scheduled_samples: int) -> StepReport:
    """Forward, backward and update with this rank's microbatches of the global batch. `iteration` counts from 0;
    `scheduled_samples` are those of the steps that were taken, by which the learning rate goes."""
    config, mesh, engine, recorder = trainer.config, trainer.mesh, trainer.engine, trainer.recorder
    lr = learning_rate(scheduled_samples, config.optimizer, config.train)
    scale = trainer.loss_scale.scale

    each = len(trainer.executor.placement.microbatches(0, len(batches)))  # as many on every other chunk
    engine.begin_step(each, iteration, scale)
    if trainer.loads:
        trainer.loads.begin(scale)
    microbatches = with_keys(batches, mesh, config.train.seed, iteration)
    result = trainer.executor.run(trainer.actions_for(len(batches)), microbatches, scale)
    with phase(recorder, "reduce"):
        engine.finish()  # sums over dp x cp, mirror ranks, over tp where partial, over the two copies of a tied embedding
    with phase(recorder, "norm"):
        loss, tokens = total(result, mesh)
        norm = trainer.square_sum("grad").sqrt() / (tokens * scale)
        stepped = bool(torch.isfinite(norm) & torch.isfinite(loss))  # every rank sees the same sums, so all decide alike
    fault, load = None, trainer.loads and trainer.loads.end(tokens, move=stepped)
    if stepped:
        with phase(recorder, "optimizer"):
            trainer.optimizer.step(lr, clip_coefficient(norm, config.optimizer.clip_grad) / (tokens * scale))
            engine.parameters_changed()  # ZeRO: all-gathered from here on, each unit ahead of its use
    elif not (torch.isfinite(loss) and trainer.scaler.can_fall(trainer.loss_scale)):
        fault = first_fault(trainer, microbatches)
    trainer.loss_scale = trainer.scaler.after(trainer.loss_scale, found_inf=not stepped)
    return StepReport(float(loss / tokens), int(tokens), float(norm), lr, stepped, result, scale, fault, load)


def total(result: Result, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of token losses, number of unmasked tokens, at least 1) over the global batch, on every rank."""
    sums = comm.all_reduce(torch.stack([result.loss, result.tokens]), mesh.dp_cp)
    sums = comm.all_reduce(sums, mesh.pp)  # only last stages have something to add
    return sums[0], sums[1].clamp(min=1.0)


def with_keys(batches: Sequence[Batch], mesh: Mesh, seed: int, iteration: int | None) -> list[Microbatch]:
    """This rank's part of each sequence of the batches, on the device, with the key of its dropout; `iteration` None
    (evaluation) gives no key. Labels have been shifted and positions counted, so here a sequence may be cut; where documents
    start stays whole, since queries see keys of other ranks."""
    out = []
    for j, batch in enumerate(batches):
        key = None
        if iteration is not None:
            key = DropoutKey(seed, iteration, j * mesh.dp.size + mesh.dp.rank, mesh.tp.rank, mesh.cp.rank)
        whole = (batch.tokens, batch.labels, batch.loss_mask, batch.positions)
        *mine, positions = (t if t is None else own_part(t, mesh.cp) for t in whole)
        tensors = (t.to(mesh.device, non_blocking=True) for t in mine)
        out.append(Microbatch(*tensors, key, packing_of(positions, batch.starts, mesh.device)))
    return out
