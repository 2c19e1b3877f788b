"""Products of rows that lie group by group with a matrix of their own for each group: the experts' GEMMs.

    rows [R, i]   a a a b c c c c     weights [E, o, i]      linear           y_e = x_e W_e^T      [R, o]
    groups         0     1   2                               input_grad      dx_e = dy_e W_e       [R, i]
                                                             add_weight_grad dW_e += dy_e^T x_e    [E, o, i]

Groups have any sizes, none among them; nothing is padded. One grouped GEMM where torch has it (bf16 on CUDA), which needs
no group's size on the host; else a loop over the groups.
"""

from __future__ import annotations

from functools import cached_property

import torch

GROUPED = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
ALIGN = 8  # elements of bf16 in the 16 bytes that its rows must start at


class Groups:
    """How many rows each group has: `counts` int64 [E] on the device of the rows."""

    def __init__(self, counts: torch.Tensor):
        self.counts = counts

    @cached_property
    def sizes(self) -> list[int]:
        """On the host, which waits for the device."""
        return self.counts.tolist()

    @cached_property
    def ends(self) -> torch.Tensor:
        """int32 [E], where each group ends."""
        return self.counts.cumsum(0).to(torch.int32)


def is_grouped(x: torch.Tensor, shape: torch.Size) -> bool:
    """Whether torch's grouped GEMM takes rows x with matrices of `shape` [E, o, i]."""
    fits = x.dtype == torch.bfloat16 and shape[1] % ALIGN == shape[2] % ALIGN == 0 and x.shape[0] > 0
    return GROUPED is not None and fits and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


def linear(x: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """x [R, i], weights [E, o, i] -> [R, o]"""
    if is_grouped(x, weights.shape):
        return GROUPED(x, weights.transpose(1, 2), offs=groups.ends)
    return _loop(x, weights.transpose(1, 2), groups)


def input_grad(dy: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """dy [R, o], weights [E, o, i] -> [R, i]"""
    if is_grouped(dy, weights.shape):
        return GROUPED(dy, weights, offs=groups.ends)
    return _loop(dy, weights, groups)


def _loop(x: torch.Tensor, matrices: torch.Tensor, groups: Groups) -> torch.Tensor:
    """x_e @ matrices_e, each straight into its rows."""
    out = x.new_empty(x.shape[0], matrices.shape[2])
    for part, matrix, place in zip(x.split(groups.sizes), matrices, out.split(groups.sizes), strict=True):
        if part.shape[0]:
            torch.mm(part, matrix, out=place)
    return out


def add_weight_grad(grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """grad [E, o, i] += dy_e^T @ x_e, in the precision of `grad`.   dy [R, o], x [R, i]"""
    if is_grouped(x, grad.shape):
        return grad.add_(GROUPED(dy.t(), x, offs=groups.ends))
    for own, left, right in zip(grad, dy.split(groups.sizes), x.split(groups.sizes), strict=True):
        if left.shape[0] == 0:
            continue
        if grad.dtype == x.dtype:  # fp32 and fp64: the GEMM itself adds
            own.addmm_(left.t(), right)
        else:
            own.add_(left.t() @ right)
    return grad
