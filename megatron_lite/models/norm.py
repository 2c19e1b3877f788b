"""LayerNorm and RMSNorm over the hidden dimension, each keeping only the low-precision input and fp32 statistics."""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.parallel.tensor import TensorParallel, replicated_vector
from megatron_lite.parallel.wgrad import give


def _exact(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., h], weight [h] -> y [..., h] in x's dtype, rstd [..., 1] in fp32.   y = x * rsqrt(mean(x^2) + eps) * w"""
    exact = _exact(x)
    work = x.to(exact)
    rstd = torch.linalg.vector_norm(work, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (work * rstd).mul_(weight.to(exact)).to(x.dtype), rstd


def rms_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor):
    """dx [..., h] in x's dtype and the weight's gradient [h] in fp32.

    with n = x * rstd and g = dy * w:  dx = rstd * (g - n * mean(g * n)),  dw = sum over tokens of dy * n
    """
    weight, dy = weight.to(rstd.dtype), dy.to(rstd.dtype)
    normed = x.to(rstd.dtype) * rstd
    dn = dy * normed
    dw = dn.flatten(0, -2).sum(0)
    mean = (dn @ weight).unsqueeze(-1).div_(x.shape[-1])
    return (dy * weight).addcmul_(normed, mean, value=-1).mul_(rstd).to(x.dtype), dw


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps: float, kernels):
        y, rstd = kernels[0](x, weight, eps)
        ctx.weight, ctx.kernels = weight, kernels
        ctx.save_for_backward(x, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, rstd = ctx.saved_tensors
        dx, dw = ctx.kernels[1](dy, x, ctx.weight, rstd)
        if ctx.weight.requires_grad:
            give(ctx.weight, lambda grad: grad.add_(dw))
        return dx, None, None, None


def _with_exact_statistics(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias in the dtype that gives torch's kernel fp32 statistics: the weight's own on CUDA, fp32 on CPU."""
    return (weight, bias) if x.is_cuda else (weight.to(_exact(x)), bias.to(_exact(x)))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps: float):
        y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], *_with_exact_statistics(x, weight, bias), eps)
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(x, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        weight, bias = _with_exact_statistics(x, ctx.weight, ctx.bias)
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, [x.shape[-1]], mean, rstd, weight, bias, [True, False, False])
        normed = (x - mean) * rstd  # in the statistics' dtype, so that the sums over tokens are exact enough
        if ctx.weight.requires_grad:
            dw = (dy * normed).flatten(0, -2).sum(0, dtype=_exact(x))
            give(ctx.weight, lambda grad: grad.add_(dw))
        if ctx.bias.requires_grad:
            db = dy.flatten(0, -2).sum(0, dtype=_exact(x))
            give(ctx.bias, lambda grad: grad.add_(db))
        return dx, None, None, None


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight.   [..., h] -> [..., h]   (Zhang and Sennrich 2019, arXiv 1910.07467)

    `kernels` = (forward, backward), replaced by their compiled forms under --compile.
    """

    def __init__(self, name: str, size: int, eps: float, tp: TensorParallel, partial: bool | None = None):
        super().__init__()
        self.eps = eps
        self.kernels = (rms_forward, rms_backward)
        self.weight = replicated_vector(f"{name}.weight", size, "ones", tp, partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, self.kernels)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias.   [..., h] -> [..., h]"""

    def __init__(self, name: str, size: int, eps: float, tp: TensorParallel, partial: bool | None = None):
        super().__init__()
        self.eps = eps
        self.weight = replicated_vector(f"{name}.weight", size, "ones", tp, partial)
        self.bias = replicated_vector(f"{name}.bias", size, "zeros", tp, partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps)


NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
