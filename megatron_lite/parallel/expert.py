"""Expert parallelism: tokens travel to the ranks that hold their experts, and what the experts make of them travels back.

    tokens of this rank   t0  t1  t2            each goes to its k experts (here 2 of 4, on two ranks)
    chosen                1,3 0,1 1,2
    sorted by expert      t1 | t0 t1 t2 | t2 | t0
                          e0   e1         e2   e3
                          `--- rank 0 ---´`- rank 1 -´       all-to-all over ep: counts first, then rows
    on the expert's rank  its rows from rank 0, from rank 1, ...; grouped by expert, through the experts
    and home              the same way back; a token's k rows are summed

A row's weight travels with it and is multiplied in between the expert's two matrices, so that on the way home rows are only
summed, and neither the backward nor a recomputation needs what the experts gave out.

`there` and `home` are duals: each one's backward is the other's forward. `there` is cut in two, `leave` and `arrive`; what is
computed in between (shared experts) hides the journey, in the forward, and by autograd's order in the backward too.

Source of the idea: Lepikhin et al. 2020 (arXiv 2006.16668), Gale et al. 2022 (arXiv 2211.15841, dropless by grouping).
Shapes: T tokens of this rank, k experts of each, R rows that arrived here, h hidden, f width of an expert's part here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.parallel import grouped
from megatron_lite.parallel.grouped import Groups
from megatron_lite.parallel.wgrad import give

Kernels = tuple[Callable, Callable]  # activation [R, 2f or f] -> [R, f]; (dy, its input) -> the input's gradient


@dataclass(frozen=True)
class ExpertParallel:
    """Who shares the experts (`axis`) and the sequence (`cp`); `cut`: each expert's matrices are cut over tp (etp = tp), else
    every tp rank holds whole experts and works on tokens of its own."""

    axis: Axis = field(default_factory=lambda: Axis("ep"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    cut: bool = True


class Dispatch:
    """Which row of which rank goes where, for the tokens of one layer and microbatch.

    chosen      int64 [T, k], the experts of each token
    kept        bool [T, k] where some are dropped, else None
    """

    def __init__(self, chosen: torch.Tensor, kept: torch.Tensor | None, num_experts: int, axis: Axis):
        self.axis, (self.tokens, self.k) = axis, chosen.shape
        flat = chosen.flatten()
        self.order = flat.argsort(stable=True)  # of the rows that go: indices into T x k
        if kept is not None:
            self.order = self.order[kept.flatten()[self.order]]
        self.token = self.order // self.k
        self.index, self.offsets = self._by_token(kept)
        counts = torch.bincount(flat[self.order] if kept is not None else flat, minlength=num_experts)
        if axis.size == 1:
            self.groups, self.rows, self.segments = Groups(counts), [[len(self.order)]], None
            return
        everyone = comm.all_gather(counts, axis).view(axis.size, axis.size, -1)  # [from, to, expert of the rank]
        self.rows = everyone.sum(2).tolist()
        mine = everyone[:, axis.rank]
        self.groups, self.segments = Groups(mine.sum(0)), mine.tolist()

    def _by_token(self, kept: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(places of the rows among the sorted ones, token after token; where each token's begin)."""
        if kept is not None:
            number = kept.sum(1)
            return self.order.argsort(), number.cumsum(0) - number
        index = torch.empty_like(self.order)
        index[self.order] = torch.arange(len(index), device=index.device)
        return index, torch.arange(0, len(index), self.k, device=index.device)

    def start_there(self, rows: torch.Tensor) -> comm.Handle:
        """Sorted rows to the experts' ranks."""
        return comm.start_exchange_rows(rows, self.axis, self.rows)

    def start_home(self, rows: torch.Tensor) -> comm.Handle:
        """Rows by expert back to where they came from."""
        back = [list(column) for column in zip(*self.rows, strict=True)]
        return comm.start_exchange_rows(self._by_source(rows), self.axis, back)

    def by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that arrived source by source, grouped by expert."""
        return rows if self.segments is None else _transposed(rows, self.segments)

    def _by_source(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.segments is None else _transposed(rows, list(zip(*self.segments, strict=True)))

    def of_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[T, h] -> a sorted row for each of a token's experts"""
        return x.index_select(0, self.token)

    def sum_of_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Its dual: sorted rows -> [T, h], summed over each token's experts."""
        if self.tokens == 0 or rows.shape[0] == 0:
            return rows.new_zeros(self.tokens, rows.shape[1])
        return nn.functional.embedding_bag(self.index, rows, self.offsets, mode="sum")

    def of_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """[T, k] -> one for each sorted row"""
        return weights.flatten().index_select(0, self.order)

    def to_weights(self, rows: torch.Tensor) -> torch.Tensor:
        """Its dual: -> [T, k], zero where a token was dropped"""
        out = rows.new_zeros(self.tokens * self.k)
        out[self.order] = rows
        return out.view(self.tokens, self.k)


def _transposed(rows: torch.Tensor, segments: list) -> torch.Tensor:
    """Segments of rows, lengths [a][b], from the order a, b to the order b, a."""
    parts, inner = rows.split([n for line in segments for n in line]), len(segments[0])
    return torch.cat([parts[a * inner + b] for b in range(inner) for a in range(len(segments))])


class _Leave(torch.autograd.Function):
    """What it returns is being filled; in the backward the gradients that it is handed only tell that they were sent."""

    @staticmethod
    def forward(ctx, x, weights, dispatch: Dispatch, journey: list):
        ctx.dispatch, ctx.journey = dispatch, journey
        sent = (dispatch.of_tokens(x), dispatch.of_weights(weights))
        journey[:] = [dispatch.start_there(rows) for rows in sent]
        return journey[0].result.view(-1, x.shape[1]), journey[1].result.view(-1)

    @staticmethod
    def backward(ctx, _rows, _weights):
        dispatch, (rows, weights) = ctx.dispatch, ctx.journey
        return dispatch.sum_of_tokens(rows.wait()), dispatch.to_weights(weights.wait()), None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, dispatch: Dispatch, journey: list):
        ctx.dispatch, ctx.journey = dispatch, journey
        arrived = [dispatch.by_expert(handle.wait()) for handle in journey]
        journey.clear()
        return arrived[0].view_as(rows), arrived[1].view_as(weights)

    @staticmethod
    def backward(ctx, d_rows, d_weights):
        ctx.journey[:] = [ctx.dispatch.start_home(grad) for grad in (d_rows, d_weights)]
        return d_rows, d_weights, None, None


class _Home(torch.autograd.Function):
    """rows by expert -> `shape` [s, b, h], each token's rows summed. In a replay only the graph is needed."""

    @staticmethod
    def forward(ctx, rows, dispatch: Dispatch, shape: torch.Size, replay: bool):
        ctx.dispatch = dispatch
        if replay:
            return rows.new_zeros(shape)
        total = dispatch.sum_of_tokens(dispatch.start_home(rows).wait())
        return torch.ops.aten._unsafe_view(total, shape)  # not tracked as a view, so that the residual may be added in place

    @staticmethod
    def backward(ctx, dy):
        dispatch = ctx.dispatch
        return dispatch.by_expert(dispatch.start_there(dispatch.of_tokens(dy.flatten(0, 1))).wait()), None, None, None


class _Experts(torch.autograd.Function):
    """y_e = (act(x_e U_e^T) * weight) D_e^T.   Only x, U's product and the weights are kept; the activation is made again."""

    @staticmethod
    def forward(ctx, rows, weights, up, down, groups: Groups, kernels: Kernels, replay: bool):
        ctx.up, ctx.down, ctx.groups, ctx.kernels = up, down, groups, kernels
        wide = grouped.linear(rows, per_expert(up, groups), groups)  # [R, 2f] gated, [R, f] otherwise
        ctx.save_for_backward(rows, weights, wide)
        if replay:
            return torch.zeros_like(rows)
        return grouped.linear(_weighted(kernels[0](wide), weights), per_expert(down, groups), groups)

    @staticmethod
    def backward(ctx, dy):
        (rows, weights, wide), up, down, groups = ctx.saved_tensors, ctx.up, ctx.down, ctx.groups
        narrow = ctx.kernels[0](wide)  # [R, f]
        d_narrow = grouped.input_grad(dy, per_expert(down, groups), groups)
        d_weights = (d_narrow * narrow).sum(1, dtype=weights.dtype)
        if down.requires_grad:
            product = _weighted(narrow, weights)
            give(down, lambda grad: grouped.add_weight_grad(per_expert(grad, groups), dy, product, groups))
        d_wide = ctx.kernels[1](_weighted(d_narrow, weights), wide)
        d_rows = grouped.input_grad(d_wide, per_expert(up, groups), groups)
        if up.requires_grad:
            give(up, lambda grad: grouped.add_weight_grad(per_expert(grad, groups), d_wide, rows, groups))
        return d_rows, d_weights, None, None, None, None, None


def per_expert(matrix: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Matrices one under the other, [E o, i] -> [E, o, i]"""
    return matrix.view(len(groups.counts), -1, matrix.shape[1])


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In place."""
    return rows.mul_(weights.to(rows.dtype).unsqueeze(1))


def through_experts(x: torch.Tensor, weights: torch.Tensor, dispatch: Dispatch, up: nn.Parameter, down: nn.Parameter,
                    kernels: Kernels, meanwhile: Callable[[], torch.Tensor | None], replay: bool = False):  # fmt: skip
    """(sum over each token's experts of weight x expert(token), what `meanwhile` gives, which runs while rows travel).

    x [s, b, h] -> [s, b, h], weights [s b, k]; up [E/ep o, h], down [E/ep h, f]: this rank's experts one under the other.
    In a replay (recompute.py) the values of the result are not needed.
    """
    journey: list = []
    rows, own = _Leave.apply(x.flatten(0, 1), weights, dispatch, journey)
    beside = meanwhile()
    rows, own = _Arrive.apply(rows, own, dispatch, journey)
    y = _Experts.apply(rows, own, up, down, dispatch.groups, kernels, replay)
    return _Home.apply(y, dispatch, x.shape, replay), beside
