"""Causal attention over a sequence that ranks share (--cp-comm-type), each holding two chunks of it (parallel/context.py).

    p2p         keys and values go around a ring: while a rank works on those it has, the next are on their way
    allgather   every rank gathers all keys and values for its own queries; their gradients are summed and scattered
    a2a         sequence for heads: a rank gets the whole sequence of 1/c of the heads, attention is the ordinary one, and its
                output goes back (Ulysses)
    a2a+p2p     a2a among u neighbours, then the ring around c/u

    ring of 3, keys at step   0  1  2        gradients of 0's keys: begun by rank 1, added to by 2, and home, where 0 adds those
        rank 0                0  2  1        of its own queries. These are worked on in two halves: the first chunk of queries
        rank 1                1  0  2        while the first keys come, the second while the last sums do, so that no hop of a
        rank 2                2  1  0        backward is without work beside it

Elements that a rank sends per layer and forward, with a queries, k keys and values of size d: ring 2 b s k d (c-1)/c, Ulysses
(b s/c)(2 a d + 2 k d)(c-1)/c. The ring's backward sends the keys again, and as many elements of their gradients in fp32.

Shapes: s the whole sequence, c ranks, m = s/c a rank's part, b rows, k key/value heads, g queries for each of them, d head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.comm.ring import start_shift
from megatron_lite.models.packing import Documents
from megatron_lite.models.partial_attention import Grads, Kernel, Sums, Whole, exact, kernel_for
from megatron_lite.parallel.context import ContextParallel, Places, in_order, in_parts, zigzag

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def context_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ContextParallel, layer: int,
                      documents: Documents | None, core: Core) -> torch.Tensor:  # fmt: skip
    """Scaled q [m, b, k, g, d], k and v [m, b, k, 1, d] -> [m, b, k, g, d]. `core` is attention of whole sequences."""
    kind = context.kind(layer)
    if kind == "p2p":
        return _Ring.apply(q, k, v, context.axis, documents)
    if kind == "allgather":
        return _Gathered.apply(q, k, v, context.axis, documents)
    axis = context.axis if kind == "a2a" else context.a2a
    whole = to_heads(q, k, v, axis)
    out = core(*whole) if kind == "a2a" else _Ring.apply(*whole, context.ring, documents)
    return to_sequence(out, axis).reshape(q.shape)


def to_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One all-to-all of what all ranks have of some heads.   [m, b, k, g or 1, d] -> [c m, b, k/c, g or 1, d]

    Fewer key/value heads than ranks: each is sent to the c/k ranks that share out its queries, and autograd sums what comes back.
    """
    m, b, groups, per_group, d = q.shape
    copies = max(1, axis.size // groups)
    if copies > 1:
        q = q.reshape(m, b, groups * copies, per_group // copies, d)
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    qkv = torch.cat([q, k, v], 3).unflatten(2, (axis.size, -1))  # [m, b, c, k/c, g + 2, d]
    parts = comm.all_to_all_autograd(qkv.movedim(2, 0), axis)  # [c, m, b, k/c, g + 2, d]
    return in_order(parts, 1).split([q.shape[3], 1, 1], 3)


def to_sequence(out: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All heads of this rank's part of the sequence.   [c m, b, k/c, g, d] -> [m, b, k, g, d]"""
    parts = comm.all_to_all_autograd(in_parts(out, 1, axis.size), axis)  # [c, m, b, k/c, g, d]
    return parts.movedim(0, 2).flatten(2, 3)


class _Ring(torch.autograd.Function):
    """q [m, b, k, g, d], k and v [m, b, k, 1, d] -> [m, b, k, g, d]"""

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, documents: Documents | None):
        kernel, places = _begin(ctx, q, axis, documents)
        queries, kv = kernel.fold(q), kernel.fold_keys(k, v)
        sums, held, lent = kernel.sums(queries), kv, None
        for step in range(axis.size):
            coming = start_shift(held, axis) if step + 1 < axis.size else None
            kernel.add(sums, queries, held, places[axis.rank], places[axis.rank - step], documents)
            if lent is not None:
                lent.let_go()
            if coming is not None:
                held, lent = coming.wait(), coming
        return _finish(ctx, queries, kv, sums, q)

    @staticmethod
    def backward(ctx, dout):
        kernel, places, axis, documents = ctx.kernel, ctx.places, ctx.axis, ctx.documents
        queries, kv, whole = _whole(ctx, dout)
        own, wide = places[axis.rank], exact(queries.dtype)
        grads = Grads(torch.zeros_like(queries, dtype=wide), torch.zeros_like(kv, dtype=wide))

        def own_keys(chunk: int) -> None:
            """The part of this rank's keys, for its first or second chunk of queries."""
            rows = [x.chunk(2, -2)[chunk] for x in (grads.dq, queries, whole.dout, whole.rest)]
            theirs = Whole(rows[2], whole.lse.chunk(2, -1)[chunk], rows[3])
            kernel.differentiate(Grads(rows[0], grads.dkv), theirs, rows[1], kv, Places((own.runs[chunk],)), own, documents)

        held, lent, sums = kv, None, None
        for step in range(axis.size):
            coming = start_shift(held, axis) if step + 1 < axis.size else None
            if step == 0:
                own_keys(0)  # while the first keys come
            else:
                dkv = torch.zeros_like(kv, dtype=wide)
                kernel.differentiate(Grads(grads.dq, dkv), whole, queries, held, own, places[axis.rank - step], documents)
                lent.let_go()
                if sums is not None:  # of the same keys, from the rank that had them before
                    dkv += sums.wait()
                    sums.let_go()
                sums = start_shift(dkv, axis)
            if coming is not None:
                held, lent = coming.wait(), coming
        own_keys(1)  # while the last sums come home
        grads.dkv.add_(sums.wait())
        sums.let_go()
        dk, dv = kernel.unfold_keys(grads.dkv, queries.dtype, dout.shape[1])
        return kernel.unfold(grads.dq, queries.dtype, dout.shape), dk, dv, None, None


class _Gathered(torch.autograd.Function):
    """q [m, b, k, g, d], k and v [m, b, k, 1, d] -> [m, b, k, g, d]"""

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, documents: Documents | None):
        kernel, places = _begin(ctx, q, axis, documents)
        queries, kv = kernel.fold(q), kernel.fold_keys(k, v)
        sums = kernel.sums(queries)
        kernel.add(sums, queries, _gather(kv, axis), places[axis.rank], _all(places), documents)
        return _finish(ctx, queries, kv, sums, q)

    @staticmethod
    def backward(ctx, dout):
        kernel, places, axis = ctx.kernel, ctx.places, ctx.axis
        queries, kv, whole = _whole(ctx, dout)
        everyone, wide = _gather(kv, axis), exact(queries.dtype)
        grads = Grads(torch.zeros_like(queries, dtype=wide), torch.zeros_like(everyone, dtype=wide))
        kernel.differentiate(grads, whole, queries, everyone, places[axis.rank], _all(places), ctx.documents)
        mine = comm.reduce_scatter(in_parts(grads.dkv, grads.dkv.dim() - 1, axis.size).flatten(0, 1), axis)
        dk, dv = kernel.unfold_keys(mine, queries.dtype, dout.shape[1])
        return kernel.unfold(grads.dq, queries.dtype, dout.shape), dk, dv, None, None


def _begin(ctx, q: torch.Tensor, axis: Axis, documents: Documents | None) -> tuple[Kernel, list[Places]]:
    """The kernel, and the places of every rank."""
    ctx.axis, ctx.documents, ctx.kernel = axis, documents, kernel_for(q, q.shape[3], documents)
    ctx.places = [zigzag(rank, axis.size, q.shape[0] * axis.size) for rank in range(axis.size)]
    return ctx.kernel, ctx.places


def _finish(ctx, queries: torch.Tensor, kv: torch.Tensor, sums: Sums, q: torch.Tensor) -> torch.Tensor:
    """The output as q, kept with what the backward needs besides."""
    out = ctx.kernel.unfold(sums.out, q.dtype, q.shape)
    ctx.save_for_backward(queries, kv, out, sums.lse)
    return out


def _whole(ctx, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Whole]:
    """Folded queries and keys, and what the backward of every part needs."""
    queries, kv, out, lse = ctx.saved_tensors
    return queries, kv, ctx.kernel.whole(ctx.kernel.fold(dout), ctx.kernel.fold(out), lse)


def _all(places: list[Places]) -> Places:
    """The whole sequence."""
    return Places(((0, sum(each.count for each in places)),))


def _gather(kv: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Everyone's keys and values, in order.   [2, ..., m, d] -> [2, ..., s, d]"""
    parts = comm.all_gather(kv, axis).unflatten(0, (axis.size, 2))
    return in_order(parts, parts.dim() - 2).contiguous()
