"""Where a step that is not finite went wrong: rank, microbatch, and the first bad weight, activation, loss or gradient.

A step that is finite pays nothing for this. One that is not is run again, which gives the same values: weights have not
changed and dropout has no state. This time every layer's output, every loss and every gradient contribution is looked at
as it arises; contributions go to a scratch buffer one at a time, so the sums of the step stay as they are and nothing is
reduced. The first fault in the order of the computation is the cause: its microbatch, forward before backward, stages in
the order in which they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.pipeline.executor import Microbatch, Result, Watch
from megatron_lite.schedules.actions import Action
from megatron_lite.training.setup import Trainer

FINITE_AGAIN = "run again, every microbatch is finite on every rank: suspect a sum over microbatches or ranks, or the hardware"


class Fault(NamedTuple):
    """A value that is not finite. Compared field by field: the least is the first in the order of the computation."""

    microbatch: int
    backward: bool
    stage: int  # counted down in the backward
    position: int  # within the action that computed it, the same on tensor-parallel ranks
    rank: int
    what: str
    where: str

    def __str__(self) -> str:
        microbatch = f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        first = "; every loss and activation of it is finite" if self.backward else ""
        return f"the first value that is not finite is {self.what}{microbatch}, on {self.where}{first}"


def first_fault(trainer: Trainer, microbatches: Sequence[Microbatch]) -> str:
    """One line about the first value of the step that is not finite; the same on every rank. Collective."""
    world = trainer.mesh.world
    for look in (_bad_weight, _bad_value):
        found = [fault for fault in comm.gather_objects(look(trainer, microbatches), world) if fault is not None]
        if found:
            return str(min(found))
    return FINITE_AGAIN


def _where(trainer: Trainer) -> str:
    mesh = trainer.mesh
    context = f"cp {mesh.cp.rank}, " if mesh.cp.size > 1 else ""
    return f"rank {mesh.rank} (tp {mesh.tp.rank}, {context}dp {mesh.dp.rank}, pp {mesh.pp.rank})"


def _bad_piece(param: nn.Parameter, values: torch.Tensor) -> str | None:
    """The canonical name of the first full tensor whose block in `values`, of the parameter's shape, is not finite."""
    if bool(torch.isfinite(values).all()):
        return None
    return next((box.name for box in param.shard.boxes if not torch.isfinite(box.of_local(values)).all()), param.shard.name)


def _bad_weight(trainer: Trainer, _: Sequence[Microbatch]) -> Fault | None:
    found = None
    for number, chunk in enumerate(trainer.chunks):
        stage = trainer.executor.placement.stage(trainer.mesh.pp.rank, number)
        for _, unit in chunk.units():
            with trainer.engine.gathered(unit[0]):  # all ranks take part, whatever they find
                names = [_bad_piece(param, param.data) for param in unit]
            if found is None and any(names):
                name = next(filter(None, names))
                found = Fault(-1, False, stage, 0, trainer.mesh.rank, f"the weight {name}", _where(trainer))
    return found


class _Look(Watch):
    """After an action: the first of the values it has `seen` that is not finite goes to `found`."""

    def __init__(self, trainer: Trainer, seen: list[str | None], found: list[Fault]):
        self.trainer, self.seen, self.found = trainer, seen, found

    def after(self, action: Action, result: Result) -> None:
        mesh, placement, backward = self.trainer.mesh, self.trainer.executor.placement, action.kind != "F"
        stage = placement.stage(mesh.pp.rank, action.chunk)
        position = next((i for i, what in enumerate(self.seen) if what), None)
        if position is not None:
            self.found.append(Fault(action.microbatch, backward, -stage if backward else stage, position, mesh.rank,
                                    self.seen[position], _where(self.trainer)))  # fmt: skip
        self.seen.clear()


def _bad_value(trainer: Trainer, microbatches: Sequence[Microbatch]) -> Fault | None:
    """Run the step again; this rank's first fault."""
    seen: list[str | None] = []  # one entry for every value of the action that runs: what it is if it is not finite
    found: list[Fault] = []

    with _watched_outputs(trainer, seen), _watched_gradients(trainer, seen):
        actions = trainer.actions_for(len(microbatches))
        trainer.executor.run(actions, microbatches, trainer.loss_scale.scale, _Look(trainer, seen, found))
    return min(found, default=None)


@contextmanager
def _watched_outputs(trainer: Trainer, seen: list[str | None]) -> Iterator[None]:
    """Every output of a layer, and every loss, enters `seen`."""

    def watch(module: nn.Module, what: str):
        def look(_module, _inputs, out) -> None:
            seen.append(None if torch.isfinite(out).all() else what)

        return module.register_forward_hook(look)

    hooks = []
    for chunk in trainer.chunks:
        hooks += [watch(layer, f"the output of layers.{layer.layer}") for layer in chunk.layers]
        hooks += [watch(chunk.embedding, "the output of embed_tokens")] if chunk.first else []
        hooks += [watch(chunk, "the loss")] if chunk.last else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watched_gradients(trainer: Trainer, seen: list[str | None]) -> Iterator[None]:
    """Every gradient contribution goes to a scratch buffer, and enters `seen`."""
    params = [param for chunk in trainer.chunks for param in chunk.parameters()]
    scratch = params[0].main_grad.new_zeros(max(param.numel() for param in params))
    before = [(param.main_grad, param.grad_arrived, getattr(param, "grad_comes", None)) for param in params]

    def arrived(param: nn.Parameter) -> None:
        name = _bad_piece(param, param.main_grad)
        seen.append(name and f"the gradient of {name}")
        param.main_grad.zero_()

    for param in params:
        param.main_grad = scratch[: param.numel()].view(param.shape)
        param.grad_arrived, param.grad_comes = arrived, None
    try:
        yield
    finally:
        for param, (grad, told, comes) in zip(params, before, strict=True):
            param.main_grad, param.grad_arrived, param.grad_comes = grad, told, comes
