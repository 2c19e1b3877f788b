"""Runs any list of pipeline actions. Knows no schedule by name, and is the only place that talks between stages.

    F    take the input (tokens, a received activation, or one made by another chunk of this rank), run the chunk,
         hand the output to the next stage
    B    backward to the input with weight gradients queued; hand the input gradient to the previous stage
    W    run the weight gradients that the matching B queued
    BW   both at once

Receives are posted AHEAD messages early and waited on just before use; every message is tagged (kind, chunk, microbatch),
so early posting cannot swap them. Of an output only its gradient edge is kept: once sent, its storage is free while its
graph lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.comm.p2p import P2P
from megatron_lite.models.packing import NOT_PACKED, Packing
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.wgrad import add_now
from megatron_lite.pipeline.recorder import Clock, HostClock, Recorder, clock_of
from megatron_lite.rng import DropoutKey
from megatron_lite.schedules.actions import Action, Message, Placement, received, sent

AHEAD = 2  # receives posted before they are needed


@dataclass(frozen=True)
class Microbatch:
    """What one microbatch brings to the first and last stage: tokens, labels [b, s], mask [b, s]; `key` None = no dropout.
    `packing` is of use to every stage: each rank has read it with the tokens."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    key: DropoutKey | None = None
    packing: Packing = NOT_PACKED


@dataclass
class Result:
    """What a run of the list gave this rank. `loss` is the sum of token losses and `tokens` the count of unmasked
    tokens, both fp64 scalars, zero on ranks without the last stage. Stamps of `clock`: read them when the step is over."""

    loss: torch.Tensor
    tokens: torch.Tensor
    peak_live: int = 0  # most forwards whose backward had not run yet
    peak_held: int = 0  # most forwards whose weight gradients had not run yet
    clock: Clock = field(default_factory=HostClock)
    started: object = 0.0
    ended: object = 0.0
    waits: list[tuple[Action | None, object, object]] = field(default_factory=list)  # for a message; None: for sends to leave

    @property
    def wait_seconds(self) -> float:
        """Time in which this rank could not go on: the bubble, and the wires."""
        return sum(self.clock.between(start, end) for _, start, end in self.waits)

    @property
    def total_seconds(self) -> float:
        return self.clock.between(self.started, self.ended)


class Watch:
    """Acts between the actions of a run: an asynchronous pipeline changes weights there, a search for faults looks."""

    def before(self, action: Action) -> None:
        """About to run `action`."""

    def after(self, action: Action, result: Result) -> None:
        """`action` has run."""


class _Step(NamedTuple):
    """An action and the ways of what it takes and makes, found once for a list and not in every step of training."""

    action: Action
    takes: Message | None  # from another rank
    gives: Message | None  # to another rank
    keeps: tuple[str, int, int] | None  # (kind, chunk, microbatch) for which another chunk of this rank takes it


def _plan(actions: Sequence[Action], rank: int, placement: Placement) -> list[_Step]:
    steps = []
    for action in actions:
        kind, neighbour = ("activation", placement.next) if "F" in action.parts else ("gradient", placement.previous)
        place = neighbour(rank, action.chunk)
        keeps = (kind, place.chunk, action.microbatch) if place and place.rank == rank else None
        steps.append(_Step(action, received(action, rank, placement), sent(action, rank, placement), keeps))
    return steps


@dataclass
class _Run:
    """State of one pass over the action list."""

    microbatches: Sequence[Microbatch]
    result: Result
    receives: deque[Message]
    posted: dict[Message, object] = field(default_factory=dict)
    local: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)  # handed over between chunks of this rank
    scale: float = 1.0
    live: dict[tuple[int, int], tuple[torch.Tensor, GradientEdge]] = field(default_factory=dict)
    queued: dict[tuple[int, int], list] = field(default_factory=dict)  # weight gradients between B and W


class Executor:
    """Executes action lists over this rank's chunks. `shape` and `dtype` are those of a stage's output."""

    def __init__(self, chunks: list[TransformerStage], placement: Placement, rank: int, p2p: P2P | None,
                 shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device,
                 recorder: Recorder | None = None):  # fmt: skip
        self.chunks, self.placement, self.rank, self.p2p = chunks, placement, rank, p2p
        self.shape, self.dtype, self.device = shape, dtype, device
        self.clock, self.recorder = recorder.clock if recorder else clock_of(device), recorder
        self.planned: tuple[Sequence[Action], list[_Step]] = ((), [])  # the list last run, and its steps

    def run(self, actions: Sequence[Action], microbatches: Sequence[Microbatch], scale: float = 1.0,
            watch: Watch | None = None) -> Result:  # fmt: skip
        """Forward and backward of a step; gradients, times `scale`, land in the parameters' `main_grad`. `watch` acts between
        actions."""
        started = self.clock.stamp()
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        if actions is not self.planned[0]:
            self.planned = (actions, _plan(actions, self.rank, self.placement))
        steps = self.planned[1]
        result = Result(zero, zero.clone(), clock=self.clock, started=started)
        run = _Run(microbatches, result, deque(step.takes for step in steps if step.takes), scale=scale)
        recorder = self.recorder if self.recorder and self.recorder.recording else None
        naming = self.recorder is not None and self.recorder.naming
        for step in steps:
            action = step.action
            begun = self.clock.stamp() if recorder else None
            self._post(run)
            if watch is not None:
                watch.before(action)
            with self.recorder.action(action) if naming else nullcontext():
                self._act(step, run)
            if watch is not None:
                watch.after(action, run.result)
            if recorder:
                recorder.actions.append((action, begun, self.clock.stamp()))
            if self.p2p is not None:
                self.p2p.sweep()
        if self.p2p is not None:
            begun = self.clock.stamp()
            self.p2p.flush()
            result.waits.append((None, begun, self.clock.stamp()))
        result.ended = self.clock.stamp()
        return result

    @torch.no_grad()
    def evaluate(self, actions: Sequence[Action], microbatches: Sequence[Microbatch]) -> Result:
        """The forwards of the list alone, without graphs."""
        return self.run([action for action in actions if action.kind == "F"], microbatches)

    def _act(self, step: _Step, run: _Run) -> None:
        if step.action.kind == "F":
            self._forward(step, run)
        elif step.action.kind == "W":
            self._weight_grads(step.action, run)
        else:
            self._backward(step, run)

    def _forward(self, step: _Step, run: _Run) -> None:
        action, training = step.action, torch.is_grad_enabled()
        chunk, batch = self.chunks[action.chunk], run.microbatches[action.microbatch]
        x = batch.tokens if chunk.first else self._take("activation", step, run)
        if not chunk.first and training:
            x.requires_grad_()
        out = chunk(x, batch.labels, batch.mask, batch.key, batch.packing)
        if not chunk.last:
            self._give(step, out.detach(), run)  # first of all: the next stage waits for it
        if training:
            run.live[action.chunk, action.microbatch] = (x, get_gradient_edge(out))
            run.result.peak_live = max(run.result.peak_live, len(run.live))
            run.result.peak_held = max(run.result.peak_held, len(run.live) + len(run.queued))
        if chunk.last:
            run.result.loss += out.detach()
            run.result.tokens += batch.mask.sum(dtype=torch.float64)

    def _backward(self, step: _Step, run: _Run) -> None:
        """B or BW. The last stage starts from dloss = the loss scale: divisions come at the end of the step."""
        action, chunk = step.action, self.chunks[step.action.chunk]
        x, edge = run.live.pop((action.chunk, action.microbatch))
        if chunk.last:
            # Without a scale autograd starts from its own 1; handed one it imports sympy to compare shapes, which takes a second.
            exact = torch.promote_types(self.dtype, torch.float32)
            grad = None if run.scale == 1.0 else torch.full((), run.scale, dtype=exact, device=self.device)
        else:
            grad = self._take("gradient", step, run)
        chunk.wgrad_queue.deferring = action.kind == "B"
        torch.autograd.backward(edge, grad)
        chunk.wgrad_queue.deferring = False
        if not chunk.first:
            self._give(step, x.grad, run)  # first of all: the previous stage waits for it
        if action.kind == "B":
            run.queued[action.chunk, action.microbatch] = chunk.wgrad_queue.take()

    @torch.no_grad()
    def _weight_grads(self, action: Action, run: _Run) -> None:
        for param, add in run.queued.pop((action.chunk, action.microbatch)):
            add_now(param, add)

    def _post(self, run: _Run) -> None:
        """Keep AHEAD receives posted, in the order in which they will be needed."""
        while run.receives and len(run.posted) < AHEAD:
            message = run.receives.popleft()
            run.posted[message] = self.p2p.irecv(
                self.shape, self.dtype, message.source.rank, message.kind, message.target.chunk, message.microbatch)

    def _take(self, kind: str, step: _Step, run: _Run) -> torch.Tensor:
        """The activation or gradient that the action needs."""
        if step.takes is None:
            return run.local.pop((kind, step.action.chunk, step.action.microbatch))
        self._post(run)
        started = self.clock.stamp()
        tensor = run.posted.pop(step.takes).wait()
        run.result.waits.append((step.action, started, self.clock.stamp()))
        return tensor

    def _give(self, step: _Step, tensor: torch.Tensor, run: _Run) -> None:
        """Hand the result of the action on: to another rank, or to another chunk of this one."""
        if step.gives is None:
            run.local[step.keeps] = tensor
        else:
            kind, _, target, microbatch = step.gives
            self.p2p.send(tensor, target.rank, kind, target.chunk, microbatch)
