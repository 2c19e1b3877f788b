"""Attention to a part of the keys, and what the parts come to.

A part gives each query out_i, normalised over the part alone, and lse_i = log sum exp of its scores there. Two parts merge to

    lse = log(e^lse_1 + e^lse_2)        out = out_1 + sigmoid(lse_2 - lse_1) (out_2 - out_1)

The backward of a part needs the lse and out of the whole, nothing of other parts:

    P_ij = e^(q_i k_j - lse_i)    D_i = dO_i O_i    dS_ij = P_ij (dO_i V_j - D_i)
    dV_j += P_ij dO_i             dQ_i += dS_ij K_j      dK_j += dS_ij Q_i

Sums are kept in fp32 (fp64 for fp64). Two kernels:

    Blocks   batched matmuls over blocks of queries, as attention.py's core on CPU: every dtype, documents
    Flash    torch's flash kernels, which give lse and take that of the whole in their backward: no fp64, no documents, on CUDA
             16 bits alone. On CPU 1.1 to 1.6 x as fast as Blocks without probabilities kept (benchmarks/context.py kernels)

Both assign where queries see their own keys and merge elsewhere: a rank's own keys come first, and no query is without them,
so nothing empty is ever merged.

Shapes: m queries, n keys, b rows, k key/value heads, g queries per key/value head, a = k g, d head size, h = b k.
Sources: Dao et al. 2022 (arXiv 2205.14135), Liu et al. 2023 (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from megatron_lite.models.packing import Documents
from megatron_lite.parallel.context import Places, pieces

# the fastest measured: benchmarks/attention.py
BLOCK_ROWS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 64, torch.float64: 64}
FLASH_SIZES = range(8, 257, 8)  # of a head


def exact(dtype: torch.dtype) -> torch.dtype:
    """What sums of parts are kept in."""
    return torch.promote_types(dtype, torch.float32)


def future(block: int, per_group: int, like: torch.Tensor) -> torch.Tensor:
    """-inf where row (i, g) of a block may not see key j > i of it, else 0.   -> [block g, block]"""
    mask = torch.full((block, block), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)
    return mask.repeat_interleave(per_group, 0)


class Sums(NamedTuple):
    """What the parts have come to: out and lse in a kernel's layout, not filled before the first part."""

    out: torch.Tensor
    lse: torch.Tensor

    def put(self, where: tuple, out: torch.Tensor, lse: torch.Tensor, first: bool) -> None:
        """One more part for the queries at `where`; `first`: their first."""
        if first:
            self.out[where], self.lse[where] = out, lse
            return
        mine, before = self.out[where], self.lse[where]
        mine += torch.sigmoid(lse - before).unsqueeze(-1) * (out - mine)
        self.lse[where] = torch.logaddexp(before, lse)


class Whole(NamedTuple):
    """Of all parts together, in a kernel's layout; `rest` is D [..., 1] for Blocks, out for Flash."""

    dout: torch.Tensor
    lse: torch.Tensor
    rest: torch.Tensor


class Grads(NamedTuple):
    """Sums of gradients, exact, as q and kv."""

    dq: torch.Tensor
    dkv: torch.Tensor


class Kernel(Protocol):
    """Attention of folded queries to folded keys at given places. Layouts are the kernel's own."""

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, outputs or their gradients [m, b, k, g, d] in the kernel's layout."""

    def unfold(self, x: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """`fold` undone, in memory of its own."""

    def fold_keys(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys and values [n, b, k, 1, d] as one contiguous tensor [2, ..., n, d]."""

    def unfold_keys(self, kv: torch.Tensor, dtype: torch.dtype, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`fold_keys` undone, in memory of its own."""

    def sums(self, q: torch.Tensor) -> Sums:
        """Room for the sums of queries q."""

    def add(self, sums: Sums, q: torch.Tensor, kv: torch.Tensor, queries: Places, keys: Places,
            documents: Documents | None) -> None:  # fmt: skip
        """The part of kv in the attention of q."""

    def whole(self, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Whole:
        """What the backward of every part needs."""

    def differentiate(self, grads: Grads, whole: Whole, q: torch.Tensor, kv: torch.Tensor, queries: Places, keys: Places,
                      documents: Documents | None) -> None:  # fmt: skip
        """Add what the part of kv gives."""


def kernel_for(q: torch.Tensor, per_group: int, documents: Documents | None) -> Kernel:
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in FLASH_SIZES if q.is_cuda else q.dtype != torch.float64
    return Flash(per_group) if fits and documents is None else Blocks(per_group, BLOCK_ROWS[q.dtype])


class _Tile(NamedTuple):
    """Queries begin..end of some of the h heads, and the keys first..last that they see."""

    heads: slice
    begin: int
    end: int
    first: int
    last: int
    own: bool  # the last (end - begin) keys are at the queries' own places
    hidden: torch.Tensor | None  # of the first keys: where they lie before the query's document, bool [end - begin, any]


class Blocks:
    """q [h, m g, d], kv [2, h, n, d], out as q, lse [h, m g]"""

    def __init__(self, per_group: int, size: int):
        self.per_group, self.size = per_group, size

    def fold(self, x):
        return x.permute(1, 2, 0, 3, 4).reshape(x.shape[1] * x.shape[2], -1, x.shape[4]).contiguous()

    def unfold(self, x, dtype, shape):
        m, b, k, g, d = shape
        out = torch.empty(shape, dtype=dtype, device=x.device)
        out.copy_(x.view(b, k, m, g, d).permute(2, 0, 1, 3, 4))
        return out

    def fold_keys(self, k, v):
        n, b, groups, _, d = k.shape
        kv = torch.empty((2, b, groups, n, d), dtype=k.dtype, device=k.device)
        for place, x in zip(kv, (k, v), strict=True):
            place.copy_(x.squeeze(3).permute(1, 2, 0, 3))
        return kv.view(2, b * groups, n, d)

    def unfold_keys(self, kv, dtype, b):
        return tuple(x.to(dtype, copy=True).unflatten(0, (b, -1)).permute(2, 0, 1, 3).unsqueeze(3) for x in kv)

    def sums(self, q):
        return Sums(torch.empty_like(q, dtype=exact(q.dtype)), torch.empty(q.shape[:-1], dtype=exact(q.dtype), device=q.device))

    def add(self, sums, q, kv, queries, keys, documents):
        mask, wide = future(self.size, self.per_group, q), exact(q.dtype)
        for tile in self._tiles(queries, keys, kv.shape[1], documents):
            scores = self._scores(q, kv[0], tile, mask)  # [h, rows, keys]
            top = scores.amax(-1).to(wide)
            if scores.dtype == wide:
                chances = torch.softmax(scores, -1, out=scores)
            else:
                chances = torch.softmax(scores, -1, dtype=wide)
            lse = top - chances.amax(-1).log_()  # the likeliest has e^(top - lse)
            out = torch.bmm(chances.to(q.dtype), kv[1, tile.heads, tile.first : tile.last])
            sums.put((tile.heads, self._rows(tile)), out, lse, tile.own)

    def whole(self, dout, out, lse):
        return Whole(dout, lse, (dout.to(lse.dtype) * out).sum(-1, keepdim=True))

    def differentiate(self, grads, whole, q, kv, queries, keys, documents):
        dq, (dk, dv) = grads
        dout, lse, delta = whole
        mask = future(self.size, self.per_group, q)
        for tile in self._tiles(queries, keys, kv.shape[1], documents):
            heads, rows, seen = tile.heads, self._rows(tile), slice(tile.first, tile.last)
            chances = self._scores(q, kv[0], tile, mask).to(dq.dtype).sub_(lse[heads, rows, None]).exp_()
            dscores = torch.bmm(dout[heads, rows], kv[1, heads, seen].transpose(1, 2)).to(dq.dtype)
            dscores = dscores.sub_(delta[heads, rows]).mul_(chances).to(q.dtype)
            dv[heads, seen] += torch.bmm(chances.to(q.dtype).transpose(1, 2), dout[heads, rows])
            dq[heads, rows] += torch.bmm(dscores, kv[0, heads, seen])
            dk[heads, seen] += torch.bmm(dscores.transpose(1, 2), q[heads, rows])

    def _rows(self, tile: _Tile) -> slice:
        return slice(tile.begin * self.per_group, tile.end * self.per_group)

    def _scores(self, q: torch.Tensor, k: torch.Tensor, tile: _Tile, mask: torch.Tensor) -> torch.Tensor:
        """q k^T of a tile, masked.   -> [h, (end - begin) g, last - first]"""
        count = tile.end - tile.begin
        scores = torch.bmm(q[tile.heads, self._rows(tile)], k[tile.heads, tile.first : tile.last].transpose(1, 2))
        if tile.own:
            scores[:, :, -count:] += mask[: count * self.per_group, :count]
        if tile.hidden is not None:
            # finite: of a row that sees nothing here lse is so low that the part weighs nothing, and no NaN arises
            hidden = tile.hidden.repeat_interleave(self.per_group, 0)
            scores[:, :, : hidden.shape[1]].masked_fill_(hidden, torch.finfo(scores.dtype).min / 2)
        return scores

    def _tiles(self, queries: Places, keys: Places, heads: int, documents: Documents | None) -> Iterator[_Tile]:
        """Blocks of neighbouring queries with the keys they see, those that see none left out."""
        where = None if documents is None else keys.tensor(documents.starts.device)
        for at, first, length in queries.starts():
            for offset in range(0, length, self.size):
                count = min(self.size, length - offset)
                begin, place = at + offset, first + offset
                before, last = keys.before(place), keys.before(place + count)
                if documents is None:
                    if last:
                        yield _Tile(slice(None), begin, begin + count, 0, last, last > before, None)
                    continue
                groups = heads // len(documents.on_host)
                for row in range(len(documents.on_host)):
                    low, crowded = (keys.before(documents.first_key(row, query)) for query in (place, place + count - 1))
                    if last > low:
                        hidden = documents.hidden(row, place, place + count, where[low:crowded]) if crowded > low else None
                        rows = slice(row * groups, (row + 1) * groups)
                        yield _Tile(rows, begin, begin + count, low, last, last > before, hidden)


class Flash:
    """q [b, a, m, d], kv [2, b, k, n, d], out as q, lse [b, a, m]"""

    def __init__(self, per_group: int):
        self.per_group = per_group

    def fold(self, x):
        return x.flatten(2, 3).permute(1, 2, 0, 3)

    def unfold(self, x, dtype, shape):
        out = torch.empty(shape, dtype=dtype, device=x.device)
        out.copy_(x.permute(2, 0, 1, 3).unflatten(2, shape[2:4]))
        return out

    def fold_keys(self, k, v):
        return torch.stack([x.squeeze(3).permute(1, 2, 0, 3) for x in (k, v)])

    def unfold_keys(self, kv, dtype, b):
        return tuple(x.to(dtype, copy=True).permute(2, 0, 1, 3).unsqueeze(3) for x in kv)

    def sums(self, q):
        return Sums(torch.empty(q.shape, dtype=torch.float32, device=q.device),
                    torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))  # fmt: skip

    def add(self, sums, q, kv, queries, keys, documents):
        for rows, seen, causal in pieces(queries, keys):
            out, lse = _flash(q[:, :, rows], *kv[:, :, :, seen], causal)
            sums.put((slice(None), slice(None), rows), out, lse, causal)

    def whole(self, dout, out, lse):
        return Whole(dout, lse, out)

    def differentiate(self, grads, whole, q, kv, queries, keys, documents):
        dq, (dk, dv) = grads
        dout, lse, out = whole
        for rows, seen, causal in pieces(queries, keys):
            k, v = kv[:, :, :, seen]
            more = _flash_backward(dout[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows].contiguous(), causal)
            dq[:, :, rows] += more[0]
            dk[:, :, seen] += more[1]
            dv[:, :, seen] += more[2]


def _flash(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of torch's kernel for the device. Queries are scaled; key/value heads may be fewer."""
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=1.0)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=1.0)


def _flash_backward(dout, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv). The kernel makes D of the out it is given and P of the lse: those of the whole give this part's gradients."""
    if q.is_cuda:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is not
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0], scale=1.0)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, scale=1.0)
