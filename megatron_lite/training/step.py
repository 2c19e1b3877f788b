"""One training step. The order of what happens in it is written here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh
from megatron_lite.data.loader import Batch
from megatron_lite.optim.clip import clip_coefficient, square_sum
from megatron_lite.optim.lr import learning_rate
from megatron_lite.pipeline.executor import Microbatch, Result
from megatron_lite.rng import DropoutKey
from megatron_lite.training.setup import Trainer


@dataclass(frozen=True)
class StepReport:
    """The same on every rank. `loss` is the mean over the global batch's unmasked tokens, `grad_norm` of its gradient
    before clipping; `stepped` is False when a non-finite norm or loss made all ranks skip the update."""

    loss: float
    tokens: int
    grad_norm: float
    lr: float
    stepped: bool
    result: Result


def train_step(trainer: Trainer, batches: Sequence[Batch], iteration: int, consumed_samples: int) -> StepReport:
    """Forward, backward and update with this rank's microbatches of the global batch. `iteration` counts from 0."""
    config, mesh, engine = trainer.config, trainer.mesh, trainer.engine
    lr = learning_rate(consumed_samples, config.optimizer, config.train)

    engine.begin_step(len(batches))
    result = trainer.executor.run(trainer.actions, with_keys(batches, mesh, config.train.seed, iteration))
    engine.finish()  # sums over dp x cp, over tp where partial, over the two copies of a tied embedding
    loss, tokens = total(result, mesh)

    norm = square_sum(engine.buckets, "grad", mesh.tp_pp, engine.shard).sqrt() / tokens
    stepped = bool(torch.isfinite(norm) & torch.isfinite(loss))  # every rank sees the same sums, so all decide alike
    if stepped:
        trainer.optimizer.step(lr, clip_coefficient(norm, config.optimizer.clip_grad) / tokens)
        engine.parameters_changed()  # ZeRO: all-gathered from here on, each unit ahead of its use
    return StepReport(float(loss / tokens), int(tokens), float(norm), lr, stepped, result)


def total(result: Result, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of token losses, number of unmasked tokens, at least 1) over the global batch, on every rank."""
    sums = comm.all_reduce(torch.stack([result.loss, result.tokens]), mesh.dp_cp)
    sums = comm.all_reduce(sums, mesh.pp)  # only the last stage has something to add
    return sums[0], sums[1].clamp(min=1.0)


def with_keys(batches: Sequence[Batch], mesh: Mesh, seed: int, iteration: int | None) -> list[Microbatch]:
    """Batches on the device, each with the key of its dropout; `iteration` None (evaluation) gives no key."""
    out = []
    for j, batch in enumerate(batches):
        key = None
        if iteration is not None:
            key = DropoutKey(seed, iteration, j * mesh.dp.size + mesh.dp.rank, mesh.tp.rank)
        tensors = (t.to(mesh.device, non_blocking=True) for t in (batch.tokens, batch.labels, batch.loss_mask))
        out.append(Microbatch(*tensors, key))
    return out
