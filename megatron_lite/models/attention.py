"""Causal self-attention with grouped queries: fused QKV, rotary positions, the attention core chosen by device.

Shapes: s sequence, b micro-batch, a query heads, k key/value heads, g = a/k queries per key/value head, d head size; all
head counts are this tp rank's. The QKV rows are grouped per KV head, [k][g queries, 1 key, 1 value][d], so that a cut
over tp keeps each query beside its key, and K/V are never expanded to the query heads.

The core, chosen in `core_attention` and nowhere else:
    CUDA    torch's scaled_dot_product_attention (flash), queries scaled beforehand
    CPU     block-causal batched matmuls: queries of a block of rows and their group folded into one matrix, keys up to
            the block's end, the mask on the diagonal block alone. Half the work of a full square, and each product large
            enough for the GEMM library: 2.8 x faster in training than SDPA on CPU.
With `documents` (packing.py) a query sees its own document alone: CUDA takes the documents one by one, CPU goes
row by row and skips the keys before a block's documents. One new token against those before it, when text is made:
`past.attend_one`. Where ranks share a sequence: context_attention.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig
from megatron_lite.models.context_attention import context_attention
from megatron_lite.models.norm import NORMS
from megatron_lite.models.packing import Documents
from megatron_lite.models.partial_attention import BLOCK_ROWS, future
from megatron_lite.models.past import Past
from megatron_lite.models.rope import Rope, contiguous_like
from megatron_lite.parallel.shard import Box, Init
from megatron_lite.parallel.tensor import Again, ColumnParallelLinear, RowParallelLinear, TensorParallel
from megatron_lite.recompute import recompute
from megatron_lite.rng import SHARDED, DropoutKey

KEEP_PROBABILITIES_UP_TO = 2048  # tokens; longer sequences recompute them in the backward instead of holding s^2 values


def local_heads(model: ModelConfig, axis: Axis) -> tuple[int, int]:
    """(query heads, key/value heads) of one tp rank. Fewer KV heads than ranks: each rank holds one, shared with others."""
    return model.num_attention_heads // axis.size, max(1, model.num_kv_heads // axis.size)


def qkv_boxes(name: str, suffix: str, model: ModelConfig, axis: Axis) -> tuple[Box, ...]:
    """Where the local fused rows lie in the full q_proj, k_proj and v_proj. `suffix` is "weight" or "bias"."""
    heads, groups = local_heads(model, axis)
    d, per_group = model.head_dim, heads // groups
    copies = max(1, axis.size // model.num_kv_heads)  # ranks that share one KV head
    width = (model.hidden_size,) if suffix == "weight" else ()
    boxes, row = [], 0

    def add(piece: str, full_rows: int, first: int, rows: int, copies: int) -> None:
        nonlocal row
        zero = (0,) * len(width)
        boxes.append(Box(f"{name}.{piece}_proj.{suffix}", (full_rows, *width), (first, *zero), (rows, *width), (row, *zero),
                         copies, axis.rank % copies, copies > 1))  # fmt: skip
        row += rows

    for group in range(groups):
        kv = axis.rank * groups + group if copies == 1 else axis.rank // copies
        query = axis.rank * heads + group * per_group
        add("q", model.num_attention_heads * d, query * d, per_group * d, 1)
        add("k", model.num_kv_heads * d, kv * d, d, copies)
        add("v", model.num_kv_heads * d, kv * d, d, copies)
    return tuple(boxes)


def head_first(x: torch.Tensor) -> torch.Tensor:
    """New memory for x [s, b, k, g, d] laid out as [b, k, s, g, d], which the CPU core reads without a copy."""
    s, b, k, g, d = x.shape
    return torch.empty((b, k, s, g, d), dtype=x.dtype, device=x.device).permute(2, 0, 1, 3, 4)


class _Tile(NamedTuple):
    """Queries begin..end of some of the b k heads, and the keys first..end, which are all that they see."""

    heads: slice
    first: int
    begin: int
    end: int
    row: int | None = None  # of the batch, where its documents cut it


def _tiles(s: int, size: int, groups: int, documents: Documents | None) -> list[_Tile]:
    """Blocks of `size` queries: of the whole batch, or of each row from the first document that the block holds a part of."""
    blocks = [(i, min(i + size, s)) for i in range(0, s, size)]
    if documents is None:
        return [_Tile(slice(None), 0, begin, end) for begin, end in blocks]
    return [_Tile(slice(row * groups, (row + 1) * groups), documents.first_key(row, begin), begin, end, row)
            for row in range(len(documents.starts)) for begin, end in blocks]  # fmt: skip


class _BlockCausal(torch.autograd.Function):
    """q [s, b, k, g, d] (already scaled), k and v [s, b, k, 1, d] -> [s, b, k, g, d]"""

    @staticmethod
    def forward(ctx, q, k, v, p: float, generator: torch.Generator | None, block: int, documents: Documents | None):
        s, b, groups, per_group, d = q.shape
        # [b k, s g, d] and [b k, s, d]; no copy where rope laid them out so, and never a view that keeps all of QKV alive
        q, k, v = (x.permute(1, 2, 0, 3, 4).reshape(b * groups, -1, d).contiguous() for x in (q, k, v))
        out = torch.empty((s, b, groups, per_group, d), dtype=q.dtype, device=q.device)
        by_head = out.view(s, b * groups, per_group, d).transpose(0, 1)  # [b k, s, g, d]
        keep_all = s <= KEEP_PROBABILITIES_UP_TO and ctx.needs_input_grad[0]
        kept, drops, later = [], [], future(min(block, s), per_group, q)
        for tile in _tiles(s, block, groups, documents):
            heads, first, begin, end, _ = tile  # h of the b k heads
            probabilities = _probabilities(q, k, tile, per_group, later, documents)  # [h, (end - begin) g, end - first]
            kept.append(probabilities if keep_all else None)
            drops.append(_drop_scale(probabilities, p, generator))
            if drops[-1] is not None:
                probabilities = probabilities * drops[-1]
            rows = torch.bmm(probabilities, v[heads, first:end])  # [h, (end - begin) g, d]
            by_head[heads, begin:end] = rows.view(-1, end - begin, per_group, d)
        ctx.shape, ctx.block, ctx.documents = (s, b, groups, per_group, d), block, documents
        ctx.save_for_backward(q, k, v, *kept, *drops)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, *rest = ctx.saved_tensors
        kept, drops = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        s, b, groups, per_group, d = ctx.shape
        dout = dout.permute(1, 2, 0, 3, 4).reshape(b * groups, s * per_group, d)
        dq = torch.empty_like(q)
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        dk, dv = (torch.zeros(k.shape, dtype=exact, device=k.device) for _ in range(2))
        later = future(min(ctx.block, s), per_group, q)
        for n, tile in enumerate(_tiles(s, ctx.block, groups, ctx.documents)):
            heads, first, begin, end, _ = tile
            rows = slice(begin * per_group, end * per_group)
            probabilities = kept[n]
            if probabilities is None:
                probabilities = _probabilities(q, k, tile, per_group, later, ctx.documents)
            drop = drops[n]
            used = probabilities if drop is None else probabilities * drop
            dp = torch.bmm(dout[heads, rows], v[heads, first:end].transpose(1, 2))
            if drop is not None:
                dp *= drop
            dv[heads, first:end] += torch.bmm(used.transpose(1, 2), dout[heads, rows])
            ds = torch._softmax_backward_data(dp, probabilities, -1, q.dtype, grad_input=dp)
            dq[heads, rows] = torch.bmm(ds, k[heads, first:end])
            dk[heads, first:end] += torch.bmm(ds.transpose(1, 2), q[heads, rows])
        shape_q, shape_k = (b, groups, s, per_group, d), (b, groups, s, 1, d)
        dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        back = (2, 0, 1, 3, 4)  # [b, k, s, g, d] -> [s, b, k, g, d]
        dq, dk, dv = (x.view(shape).permute(back) for x, shape in ((dq, shape_q), (dk, shape_k), (dv, shape_k)))
        return dq, dk, dv, None, None, None, None


def _probabilities(q: torch.Tensor, k: torch.Tensor, tile: _Tile, per_group: int, later: torch.Tensor,
                   documents: Documents | None) -> torch.Tensor:  # fmt: skip
    """softmax(q k^T) of the queries of a tile against its keys.   -> [h, (end - begin) g, end - first]"""
    heads, first, begin, end, row = tile
    scores = torch.bmm(q[heads, begin * per_group : end * per_group], k[heads, first:end].transpose(1, 2))
    scores[:, :, begin - first :] += later[: (end - begin) * per_group, : end - begin]  # the last block may be shorter
    mask = None if documents is None else documents.mask(row, begin, end, scores.dtype)  # [end - begin, n]
    if mask is not None:
        scores[:, :, : mask.shape[1]] += mask.repeat_interleave(per_group, 0)
    return torch.softmax(scores, -1, out=scores)


def _drop_scale(x: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor | None:
    """0 or 1/(1 - p) per element, drawn per (head, query, key); None without dropout."""
    if p == 0.0 or generator is None:
        return None
    return torch.empty_like(x).bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same through torch's kernel. q [s, b, k, g, d] scaled, k and v [s, b, k, 1, d] -> [s, b, k, g, d]"""
    s, b, groups, per_group, d = q.shape
    q = q.reshape(s, b, groups * per_group, d).permute(1, 2, 0, 3)  # [b, a, s, d]
    k, v = (_own(x).squeeze(3).permute(1, 2, 0, 3) for x in (k, v))  # [b, k, s, d]
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=per_group > 1)
    return out.permute(2, 0, 1, 3).reshape(s, b, groups, per_group, d)


def _sdpa_by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """`_sdpa` of each document by itself: a kernel call each, no mask, no work outside."""
    s, b, groups, per_group, d = q.shape
    pieces = []
    for x in (q, _own(k), _own(v)):
        rows = x.transpose(0, 1).reshape(b * s, -1, 1, d)  # the rows of the batch one after another: [b s, heads, 1, d]
        pieces.append([part.permute(2, 1, 0, 3) for part in rows.split(documents.lengths)])  # [1, heads, n, d]
    out = [nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=1.0, enable_gqa=per_group > 1)
           for part in zip(*pieces, strict=True)]  # fmt: skip
    joined = torch.cat([part[0].transpose(0, 1) for part in out])  # [b s, a, d]
    return joined.view(b, s, groups, per_group, d).transpose(0, 1)


def _own(x: torch.Tensor) -> torch.Tensor:
    """x in memory of its own: a slice that the backward keeps would keep all of QKV alive."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.contiguous()


def core_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, generator: torch.Generator | None,
                   documents: Documents | None = None) -> torch.Tensor:  # fmt: skip
    """Causal attention of scaled q [s, b, k, g, d] over k, v [s, b, k, 1, d] -> [s, b, k, g, d], within `documents`.

    Attention dropout needs our own generator, which SDPA does not take, so with dropout CUDA runs the block form too.
    """
    if q.is_cuda and (p == 0.0 or generator is None):
        return _sdpa(q, k, v) if documents is None else _sdpa_by_document(q, k, v, documents)
    return _BlockCausal.apply(q, k, v, p, generator, BLOCK_ROWS[q.dtype], documents)


class SelfAttention(nn.Module):
    """x [s/tp or s, b, h] -> the same shape."""

    def __init__(self, name: str, layer: int, model: ModelConfig, tp: TensorParallel, init: Init, output_init: Init,
                 recompute_core: bool = False):  # fmt: skip
        super().__init__()
        self.layer, self.model, self.tp, self.recompute_core = layer, model, tp, recompute_core
        self.heads, self.groups = local_heads(model, tp.axis)
        rows = (self.heads + 2 * self.groups) * model.head_dim
        bias = qkv_boxes(name, "bias", model, tp.axis) if model.qkv_bias else None
        self.qkv_proj = ColumnParallelLinear(
            f"{name}.qkv_proj", rows, model.hidden_size, qkv_boxes(name, "weight", model, tp.axis), init, tp, bias)
        norm = NORMS[model.normalization]
        self.q_norm = self.k_norm = None
        if model.qk_layernorm:  # one norm shared by all heads, so each rank's gradient covers its heads only
            self.q_norm = norm(f"{name}.q_norm", model.head_dim, model.norm_epsilon, tp, partial=True)
            self.k_norm = norm(f"{name}.k_norm", model.head_dim, model.norm_epsilon, tp, partial=True)
        self.o_proj = RowParallelLinear(f"{name}.o_proj", model.num_attention_heads * model.head_dim, model.hidden_size,
                                        output_init, tp, not model.disable_bias_linear)  # fmt: skip
        self.rope = Rope(model.rotary_interleaved)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None, key: DropoutKey | None,
                again: Again | None = None, replay: bool = False, past: Past | None = None,
                documents: Documents | None = None) -> torch.Tensor:  # fmt: skip
        """`again` makes x anew, see parallel/tensor.py. In a replay the backward follows at once. `past`: see models/past.py,
        `documents`: models/packing.py."""
        qkv = self.qkv_proj(x, again, replay)  # [s, b, k (g + 2) d]
        attend = partial(self._attend, angles, key, past, documents)
        return self.o_proj(recompute(attend, qkv) if self.recompute_core else attend(qkv))

    def _attend(self, angles, key: DropoutKey | None, past: Past | None, documents: Documents | None, qkv: torch.Tensor,
                replay: bool = False) -> torch.Tensor:  # fmt: skip
        """Norms of q and k, positions, and the core.   [s, b, k (g + 2) d] -> [s, b, a d]. A replay changes nothing here.

        What --recompute-modules core_attn computes again: from QKV on, since QKV is one tensor and the core's Q, K and V,
        copies of it in another layout, are as large.
        """
        per_group, d = self.heads // self.groups, self.model.head_dim
        s, b, _ = qkv.shape
        q, k, v = qkv.view(s, b, self.groups, per_group + 2, d).split([per_group, 1, 1], dim=3)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        scale = 1.0 / math.sqrt(d)
        if angles is None:
            q = q * scale
        else:
            new = contiguous_like if q.is_cuda else head_first  # the layout that the core reads without a copy
            q, k = self.rope(q, angles, scale, new), self.rope(k, angles, 1.0, new)
        generator = None
        if key is not None and self.model.attention_dropout > 0:
            generator = key.generator(qkv.device, self.layer, "attention", SHARDED)
        core = partial(core_attention, p=self.model.attention_dropout, generator=generator, documents=documents)
        if self.tp.context is not None:
            core = partial(context_attention, context=self.tp.context, layer=self.layer, documents=documents, core=core)
        out = core(q, k, v) if past is None else past.attend(self.layer, q, k, v, core)  # [s, b, k, g, d]
        return out.reshape(s, b, self.heads * d)
