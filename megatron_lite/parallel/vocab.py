"""The two layers that touch the vocabulary, cut over tp along it: embedding and cross-entropy.

Vocabulary padding: local rows past the true vocabulary belong to no box. They start at zero, the loss masks their logits
to -inf, so their gradients are zero, they stay zero, and the loss does not depend on tp or on the amount of padding.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.parallel.shard import Box, Init, Shard, parameter
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.parallel.wgrad import give

HALF_SCALE = 2.0**14  # of the gradient in fp16 logits: probabilities vanish below 2^-24, and 2^14 leaves room for a sum
LOGITS_CHUNK_BYTES = 8 << 20  # fp32 bytes of logits in work at a time: fits the last-level cache of a small machine


def vocab_boxes(name: str, vocab_size: int, padded_size: int, hidden: int, axis: Axis) -> tuple[Box, ...]:
    """The true rows among this rank's `padded_size / tp` rows; a rank that holds padding alone has no box."""
    rows = padded_size // axis.size
    start = axis.rank * rows
    real = max(0, min(vocab_size - start, rows))
    return (Box(name, (vocab_size, hidden), (start, 0), (real, hidden), (0, 0)),) if real else ()


def vocab_matrix(name: str, vocab_size: int, padded_size: int, hidden: int, init: Init, tp: TensorParallel,
                 tied: bool = False) -> nn.Parameter:  # fmt: skip
    """This rank's rows of a [vocabulary, hidden] matrix: the embedding, the output layer, or the tied copy of both."""
    boxes = vocab_boxes(name, vocab_size, padded_size, hidden, tp.axis)
    shard = Shard(name, boxes, init, decay=True, tied=tied)
    return parameter((padded_size // tp.axis.size, hidden), shard, tp.dtype, tp.device)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, axis: Axis, sequence_parallel: bool):
        rows = weight.shape[0]
        local = ids - axis.rank * rows  # [s, b]
        elsewhere = ((local < 0) | (local >= rows)).unsqueeze(-1)
        local = local.clamp(0, rows - 1)
        out = nn.functional.embedding(local, weight).masked_fill_(elsewhere, 0)  # [s, b, h]
        ctx.weight, ctx.axis, ctx.sequence_parallel = weight, axis, sequence_parallel
        ctx.save_for_backward(local, elsewhere)
        return comm.reduce_scatter(out, axis) if sequence_parallel else comm.all_reduce(out, axis)

    @staticmethod
    def backward(ctx, dy):
        local, elsewhere = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = comm.all_gather(dy, ctx.axis)  # [s/tp, b, h] -> [s, b, h]
        if ctx.axis.size > 1:
            dy = dy.masked_fill(elsewhere, 0)
        give(ctx.weight, lambda grad: grad.index_add_(0, local.flatten(), dy.flatten(0, 1).to(grad.dtype)))
        return None, None, None, None


def embed(weight: nn.Parameter, ids: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Rows of the vocabulary-parallel embedding.   ids [s, b] -> [s/tp or s, b, h]

    Each rank looks up the ids it holds, zeros elsewhere, and the sum over tp (or its reduce-scatter) is the embedding.
    """
    return _Embedding.apply(weight, ids, tp.axis, tp.sequence_parallel)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, mask, axis: Axis, vocab_size: int, smoothing: float):
        rows, width = logits.shape  # [n, V/tp]
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        first = axis.rank * width
        real = max(0, min(vocab_size - first, width))  # columns of the true vocabulary
        keep_grad = ctx.needs_input_grad[0]
        ctx.scale = HALF_SCALE if logits.dtype == torch.float16 else 1.0
        losses = torch.empty(rows, dtype=exact, device=logits.device)
        chunk = max(1, LOGITS_CHUNK_BYTES // (4 * width))
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            wanted = mask[part].to(exact) * ctx.scale if keep_grad else None
            work = logits[part].to(exact, copy=not keep_grad)  # in fp32 and fp64 the logits themselves
            losses[part] = _rows(work, labels[part] - first, wanted, axis, vocab_size, real, smoothing)
            if keep_grad and work.dtype != logits.dtype:
                logits[part] = work  # the logits' memory now holds their gradient
        if keep_grad:
            ctx.save_for_backward(logits)
        return (losses * mask).sum()

    @staticmethod
    def backward(ctx, dloss):
        (grad,) = ctx.saved_tensors
        return grad.mul_((dloss / ctx.scale).to(grad.dtype)), None, None, None, None, None


def _rows(work, target, mask, axis, vocab_size, real, smoothing):
    """Loss [n] of logits `work` [n, V/tp], which become mask x the loss's gradient unless `mask` is None. `target` [n] counts
    from this rank's first column.

    loss = log(sum exp) - (1 - e) * logit[target] - e/V * sum of logits over the true vocabulary
    """
    work[:, real:] = float("-inf")
    top = work.amax(1) if real else work.new_full((work.shape[0],), float("-inf"))
    top = comm.all_reduce(top, axis, op="max")
    work.sub_(top.unsqueeze(1))
    mine = ((target >= 0) & (target < real)).unsqueeze(1)
    index = target.clamp(0, max(real - 1, 0)).unsqueeze(1)
    picked = work.gather(1, index).masked_fill_(~mine, 0).squeeze(1)
    linear = work[:, :real].sum(1) if smoothing else torch.zeros_like(picked)
    work.exp_()
    sums = comm.all_reduce(torch.stack([work.sum(1), picked, linear]), axis)  # [3, n]
    loss = sums[0].log() - (1.0 - smoothing) * sums[1] - smoothing / vocab_size * sums[2]
    if mask is not None:
        work.mul_((mask / sums[0]).unsqueeze(1))  # mask x softmax
        work.scatter_add_(1, index, mine * ((smoothing - 1.0) * mask).unsqueeze(1))
        if smoothing:
            work[:, :real] -= (smoothing / vocab_size * mask).unsqueeze(1)
    return loss


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, axis: Axis, vocab_size: int,
                  label_smoothing: float = 0.0) -> torch.Tensor:  # fmt: skip
    """Sum over tokens of mask x loss, in fp32 (fp64 for fp64 logits).   logits [n, V/tp], labels [n], mask [n] -> scalar

    Works through the tokens in chunks and writes the gradient over the logits, which are thereby consumed: there is
    never a second tensor of their size. `vocab_size` is the true vocabulary; later columns are padding.
    """
    return _CrossEntropy.apply(logits, labels, mask, axis, vocab_size, label_smoothing)


@torch.no_grad()
def token_losses(logits: torch.Tensor, labels: torch.Tensor, axis: Axis, vocab_size: int) -> torch.Tensor:
    """The loss of every token by itself, as `cross_entropy` has it.   logits [n, V/tp], labels [n] -> [n] in fp32 or fp64"""
    rows, width = logits.shape
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    first = axis.rank * width
    real = max(0, min(vocab_size - first, width))
    losses = torch.empty(rows, dtype=exact, device=logits.device)
    chunk = max(1, LOGITS_CHUNK_BYTES // (4 * width))
    for part in (slice(begin, min(begin + chunk, rows)) for begin in range(0, rows, chunk)):
        losses[part] = _rows(logits[part].to(exact, copy=True), labels[part] - first, None, axis, vocab_size, real, 0.0)
    return losses
