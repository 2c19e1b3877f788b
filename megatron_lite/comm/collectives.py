"""All that ranks say to each other but pipeline messages (comm/p2p.py). A size-1 axis is a no-op here, nowhere else.

Raw operations, without autograd (`start_*` give a handle whose `wait()` returns the tensor):

    all_reduce  all_gather  reduce_scatter  all_to_all  broadcast  barrier  gather_objects
    all_gather_into  reduce_scatter_into                     into a buffer of the caller's (gradient engine)
    start_exchange_rows                                      all-to-all of unequal parts (experts, parallel/expert.py)

Dual pairs with autograd; each backward is its partner's forward:

    op                        forward              backward             who uses it
    copy_to                   identity             all-reduce           input of a column-cut linear
    reduce_from               all-reduce           identity             output of a row-cut linear, vocabulary embedding
    gather_sequence           all-gather dim 0     reduce-scatter       input of a column-cut linear, sequence parallel
    reduce_scatter_sequence   reduce-scatter       all-gather dim 0     output of a row-cut linear, sequence parallel
    split_sequence            own slice of dim 0   all-gather dim 0     replicated activations into sequence parallel
    gather_replicated         all-gather dim 0     own slice of dim 0   and out of it, to where ranks do the same
    all_to_all_autograd       all-to-all           all-to-all           expert dispatch and return

Which form runs: CUDA tensors take NCCL's own collectives; CPU tensors shared memory between ranks of one host
(comm/exchanges.py) or gloo (comm/pairwise.py). On CPU sums are in rank order, half precision is
accumulated in fp32 and rounded once, and both forms give every rank the same bits.
All ranks of an axis start its operations in the same order. What `start_*` was given must not change before `wait()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_lite.comm.exchanges import Rows, Shared
from megatron_lite.comm.mesh import Axis
from megatron_lite.comm.pairwise import ALL_GATHER, Pairwise

# torch 2.13 renamed this one; the old name warns there.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NCCL_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Handle(Protocol):
    """An operation in flight."""

    def wait(self) -> torch.Tensor: ...


class Done:
    """The handle of an operation that had nothing to do."""

    def __init__(self, result: torch.Tensor):
        self.result = result

    def wait(self) -> torch.Tensor:
        return self.result


class _Started:
    """A torch.distributed work and its result; for CUDA tensors `wait` makes the current stream wait, not the host."""

    def __init__(self, work: dist.Work, result: torch.Tensor):
        self.work, self.result = work, result

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.result


class _CopyBack:
    """Writes the result of an operation on a contiguous copy back into the caller's strided tensor."""

    def __init__(self, handle: Handle, x: torch.Tensor):
        self.handle, self.x = handle, x

    def wait(self) -> torch.Tensor:
        if self.handle is not None:
            self.x.detach().copy_(self.handle.wait())
            self.handle = None
        return self.x


class _Narrowed:
    """out = my part of a sum whose other parts travelled in a narrower dtype; added in rank order, in out's dtype.

    `mine` is my own contribution, which did not travel; `arrived` [n, len] holds everyone's, once `handle` is done.
    """

    def __init__(self, handle: Handle, out: torch.Tensor, mine: torch.Tensor, arrived: torch.Tensor, rank: int):
        self.handle, self.out, self.mine, self.arrived, self.rank = handle, out, mine, arrived, rank

    def wait(self) -> torch.Tensor:
        if self.handle is not None:
            self.handle.wait()
            wide = [self.mine if r == self.rank else part for r, part in enumerate(self.arrived)]
            total = wide[0].to(self.out.dtype, copy=True)
            for part in wide[1:]:
                total += part
            self.out.view(-1).copy_(total)
            self.handle = self.mine = self.arrived = None
        return self.out


class _NarrowedAllReduce:
    """In place: a narrowed reduce-scatter, started at once, then an all-gather of its sums in the narrow dtype."""

    def __init__(self, x: torch.Tensor, axis: Axis, wire_dtype: torch.dtype):
        self.x, self.axis, self.wire_dtype = x, axis, wire_dtype
        self.mine = x.view(axis.size, -1)[axis.rank]
        self.handle: Handle | None = start_reduce_scatter_into(self.mine, x.view(-1), axis, wire_dtype)

    def wait(self) -> torch.Tensor:
        if self.handle is not None:
            self.handle.wait()
            self.x.view(-1).copy_(all_gather(self.mine.to(self.wire_dtype), self.axis))
            self.handle = None
        return self.x


class Native:
    """The backend's own collectives (NCCL)."""

    def __init__(self, axis: Axis):
        self.rank, self.group = axis.rank, axis.group

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        return _Started(ALL_GATHER(out, x, group=self.group, async_op=True), out)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        return _Started(REDUCE_SCATTER(out, x, group=self.group, async_op=True), out)

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, op: str) -> Handle:
        if out is not x:
            out.copy_(x)
        return _Started(dist.all_reduce(out, op=NCCL_OPS[op], group=self.group, async_op=True), out)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        return _Started(dist.all_to_all_single(out, x, group=self.group, async_op=True), out)

    def exchange_rows(self, out: torch.Tensor, x: torch.Tensor, rows: Rows) -> Handle:
        give, take = list(rows[self.rank]), [row[self.rank] for row in rows]
        return _Started(dist.all_to_all_single(out, x, take, give, group=self.group, async_op=True), out)

    def broadcast(self, x: torch.Tensor, src: int) -> Handle:
        return _Started(dist.broadcast(x, group_src=src, group=self.group, async_op=True), x)


def _transport(x: torch.Tensor, axis: Axis) -> Native | Shared | Pairwise:
    if x.device.type != "cpu":
        return Native(axis)
    if axis.board is not None:
        return Shared(axis.board)
    return Pairwise(axis.rank, axis.size, axis.group, axis.tags)


# Into the caller's buffers.


@torch.no_grad()
def start_all_gather_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> Handle:
    """out [n*d0, ...] from everyone's x [d0, ...], both contiguous; x may be this rank's own part of out."""
    _check(out, x, out.numel() == axis.size * x.numel(), f"all_gather over {axis.name} of {axis.size}")
    if axis.size == 1 or x.numel() == 0:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done(out)
    return _transport(x, axis).all_gather(out, x)


@torch.no_grad()
def start_reduce_scatter_into(out: torch.Tensor, x: torch.Tensor, axis: Axis, wire_dtype: torch.dtype | None = None) -> Handle:
    """out [d0/n, ...] = this rank's part of the sum of everyone's x [d0, ...]; out may be that part of x.

    `wire_dtype`: parts travel in it, and are summed in x's dtype after `wait`.
    """
    _check(out, x, out.numel() * axis.size == x.numel(), f"reduce_scatter over {axis.name} of {axis.size}")
    if axis.size == 1 or x.numel() == 0:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done(out)
    if wire_dtype not in (None, x.dtype):
        parts = x.view(axis.size, -1)
        narrow = parts.to(wire_dtype)
        arrived = torch.empty_like(narrow)
        return _Narrowed(_transport(narrow, axis).all_to_all(arrived, narrow), out, parts[axis.rank], arrived, axis.rank)
    return _transport(x, axis).reduce_scatter(out, x)


def _check(out: torch.Tensor, x: torch.Tensor, sizes_fit: bool, what: str) -> None:
    if not sizes_fit or out.dtype != x.dtype or not (out.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"{what}: out {list(out.shape)} {out.dtype} stride {out.stride()} does not fit "
                         f"x {list(x.shape)} {x.dtype} stride {x.stride()}; both must be contiguous")  # fmt: skip


def all_gather_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return start_all_gather_into(out, x, axis).wait()


def reduce_scatter_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return start_reduce_scatter_into(out, x, axis).wait()


# Raw operations that allocate their result, or work in place.


@torch.no_grad()
def start_all_gather(x: torch.Tensor, axis: Axis) -> Handle:
    if axis.size == 1:
        return Done(x)
    x = x.contiguous()
    return start_all_gather_into(x.new_empty(_scaled(x, axis.size, 1)), x, axis)


@torch.no_grad()
def start_reduce_scatter(x: torch.Tensor, axis: Axis) -> Handle:
    if axis.size == 1:
        return Done(x)
    x = x.contiguous()
    return start_reduce_scatter_into(x.new_empty(_scaled(x, 1, axis.size, axis)), x, axis)


@torch.no_grad()
def start_all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum", wire_dtype: torch.dtype | None = None) -> Handle:
    """In place: after `wait`, x holds the result.

    `wire_dtype`: all that travels is in it (half the bytes of fp32 in bf16), each sum is added up in x's dtype by one
    rank and rounded once, whatever n is. x must be contiguous, its size a multiple of n. `wait` talks, too: in the same
    order on all ranks.
    """
    if axis.size == 1 or x.numel() == 0:
        return Done(x)
    if wire_dtype not in (None, x.dtype):
        if op != "sum" or x.numel() % axis.size or not x.is_contiguous():
            raise ValueError(f"{op} of {list(x.shape)} stride {x.stride()} over {axis.name} of {axis.size} does not travel in "
                             f"{wire_dtype}: only a sum of a contiguous tensor whose size {axis.size} divides")  # fmt: skip
        return _NarrowedAllReduce(x.detach(), axis, wire_dtype)
    if not x.is_contiguous():
        flat = x.contiguous()
        return _CopyBack(_transport(x, axis).all_reduce(flat, flat, op), x)
    x = x.detach()
    return _transport(x, axis).all_reduce(x, x, op)


def _scaled(x: torch.Tensor, times: int, over: int, axis: Axis | None = None) -> tuple[int, ...]:
    """x's shape with dim 0 multiplied or divided."""
    if x.dim() == 0 or x.shape[0] % over:
        raise ValueError(f"dim 0 of {list(x.shape)} cannot be cut into {over} equal parts over {axis and axis.name}")
    return (x.shape[0] * times // over, *x.shape[1:])


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """x = op over everyone's x, in place. op: sum, max, min."""
    if axis.size > 1:
        start_all_reduce(x, axis, op).wait()
    return x


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[d0, ...] -> [n*d0, ...]"""
    return start_all_gather(x, axis).wait()


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[d0, ...] -> [d0/n, ...]"""
    return start_reduce_scatter(x, axis).wait()


@torch.no_grad()
def all_to_all(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[d0, ...] -> [d0, ...]: part q of dim 0 goes to rank q; part q of the result came from rank q."""
    if axis.size == 1:
        return x
    _scaled(x, 1, axis.size, axis)
    x = x.contiguous()
    out = torch.empty_like(x)
    return _transport(x, axis).all_to_all(out, x).wait() if x.numel() else out


@torch.no_grad()
def start_exchange_rows(x: torch.Tensor, axis: Axis, rows: Rows) -> Handle:
    """[sum of rows[r], ...] -> [sum over p of rows[p][r], ...] on rank r: `rows[p][q]` rows of p's dim 0 go to q.

    All ranks know all of `rows`. Both sides lie in rank order.
    """
    if axis.size == 1:
        return Done(x)
    x = x.contiguous()
    out = x.new_empty(sum(row[axis.rank] for row in rows), *x.shape[1:])
    if not any(map(any, rows)):
        return Done(out)
    return _transport(x, axis).exchange_rows(out, x, rows)


@torch.no_grad()
def broadcast(x: torch.Tensor, axis: Axis, src: int = 0) -> torch.Tensor:
    """x of rank `src` (its index in the axis) into everyone's x, in place."""
    if axis.size == 1 or x.numel() == 0:
        return x
    if x.is_contiguous():
        _transport(x, axis).broadcast(x.detach(), src).wait()
        return x
    return _CopyBack(_transport(x, axis).broadcast(x.contiguous(), src), x).wait()


def barrier(axis: Axis) -> None:
    """Nobody leaves before everybody has come."""
    if axis.size == 1:
        return
    if axis.board is not None:
        Shared(axis.board).barrier().wait()
    else:
        dist.barrier(group=axis.group)


def gather_objects(obj: object, axis: Axis) -> list:
    """Everyone's small Python object, in rank order. For control, not for data."""
    if axis.size == 1:
        return [obj]
    found: list = [None] * axis.size
    dist.all_gather_object(found, obj, group=axis.group)
    return found


# Dual pairs.


class _Dual(torch.autograd.Function):
    """`forward` and `backward` are functions (tensor, axis) -> tensor that leave their argument unchanged."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, axis: Axis, forward: Callable, backward: Callable) -> torch.Tensor:
        ctx.axis, ctx.dual = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        return ctx.dual(grad, ctx.axis), None, None, None


def _identity(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.view_as(x)


def _reduced(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """all_reduce into a new tensor: autograd may hand the same gradient to several functions."""
    x = x.contiguous()
    out = torch.empty_like(x)
    return _transport(x, axis).all_reduce(out, x, "sum").wait() if x.numel() else out


def _own_slice(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[d0, ...] -> [d0/n, ...], a copy, so that the whole tensor can be freed."""
    length = _scaled(x, 1, axis.size, axis)[0]
    return x.narrow(0, axis.rank * length, length).clone()


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, _identity, _reduced)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, _reduced, _identity)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, all_gather, reduce_scatter)


def reduce_scatter_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, reduce_scatter, all_gather)


def split_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, _own_slice, all_gather)


def gather_replicated(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, all_gather, _own_slice)


def all_to_all_autograd(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x if axis.size == 1 else _Dual.apply(x, axis, all_to_all, all_to_all)
