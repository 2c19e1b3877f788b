"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) with LLaMA-3's and linear scaling.

Angles are computed in fp32 whatever the model's dtype, as Hugging Face does, so that converted models agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megatron_lite.config import ModelConfig

NewLike = Callable[[torch.Tensor], torch.Tensor]  # makes memory for a tensor of the same shape, in some layout


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """fp32 [rot/2]: theta^(-2i/rot), scaled as the configuration says; rot = the turned part of a head."""
    turned = int(model.head_dim * model.rotary_percent) // 2 * 2
    inv = 1.0 / model.rotary_base ** (torch.arange(0, turned, 2, dtype=torch.int64).float() / turned)
    if model.rotary_seq_len_interpolation_factor is not None:
        inv = inv / model.rotary_seq_len_interpolation_factor
    if model.use_rope_scaling:
        inv = _llama3(inv, model)
    return inv


def _llama3(inv: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """LLaMA 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    length = model.rope_original_max_position
    low, high, factor = model.rope_low_freq_factor, model.rope_high_freq_factor, model.rope_scaling_factor
    wavelength = 2 * math.pi / inv
    scaled = torch.where(wavelength > length / low, inv / factor, inv)
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * inv / factor + smooth * inv
    middle = (wavelength <= length / low) & (wavelength >= length / high)
    return torch.where(middle, between, scaled)


def cos_sin(model: ModelConfig, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., rot/2] at the positions [...]; fp32 for low-precision models, else the model's dtype."""
    angles = positions.float()[..., None] * inverse_frequencies(model).to(positions.device)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(exact), angles.sin().to(exact)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float, interleaved: bool, new: NewLike) -> torch.Tensor:
    """Turn x [s, ..., d] by the angles [s, rot/2] and multiply it by `scale`, into memory of the layout that `new` makes.
    Where every row of a batch has positions of its own, x is [s, b, ..., d] and the angles are [s, b, rot/2].

    Only the first rot channels turn. Pairs are (i, i + rot/2), or (2i, 2i + 1) when interleaved.
    """
    half = cos.shape[-1]
    shape = cos.shape[:-1] + (1,) * (x.dim() - cos.dim()) + (half,)
    cos, sin = (cos * scale).view(shape), (sin * scale).view(shape)
    out = new(x)
    out.copy_(x)  # first, so that the arithmetic runs in the new layout
    first, second = _pairs(out, half, interleaved)
    turned_first = (first * cos).addcmul_(second, sin, value=-1)
    second.copy_((second * cos).addcmul_(first, sin))
    first.copy_(turned_first)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :].mul_(scale)
    return out


def _pairs(x: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def contiguous_like(x: torch.Tensor) -> torch.Tensor:
    """New memory for a tensor of x's shape, in the order of its dims."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _Rope(torch.autograd.Function):
    """Nothing is kept but the angles: the backward turns by their negative."""

    @staticmethod
    def forward(ctx, x, cos, sin, scale: float, interleaved: bool, new: NewLike, kernel):
        ctx.cos, ctx.sin = cos, sin  # the stage's own, one pair for all layers
        ctx.scale, ctx.interleaved, ctx.kernel = scale, interleaved, kernel
        return kernel(x, cos, sin, scale, interleaved, new)

    @staticmethod
    def backward(ctx, dy):
        dx = ctx.kernel(dy, ctx.cos, -ctx.sin, ctx.scale, ctx.interleaved, contiguous_like)
        return dx, None, None, None, None, None, None


class Rope:
    """scale x turned x, [s, ..., d] -> the same shape. `kernel` is replaced by its compiled form under --compile."""

    def __init__(self, interleaved: bool):
        self.interleaved = interleaved
        self.kernel = rotate

    def __call__(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], scale: float, new: NewLike) -> torch.Tensor:
        return _Rope.apply(x, *angles, scale, self.interleaved, new, self.kernel)
