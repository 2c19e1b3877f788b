"""Linears in 8-bit floating point (--fp8-format): scaling, casting, and the three matrix products of a linear.

    y  = x W^T       x and W in e4m3                       forward
    dx = dy W        dy in e5m2 (hybrid) or e4m3           gradient of the input
    dW = dy^T x      likewise, the result in fp32          gradient of the weight

Weights, activations and gradients stay in bf16 and are cast for each product: q = cast(clamp(t * scale, -m, m)) with m the
largest number of the format (e4m3 448, e5m2 57344), and scale = m / (amax * 2^margin), one number per tensor.

    tensorwise    amax is that of the tensor itself
    delayed       amax is the largest of the tensor's last `history` uses; what has grown since then saturates

Saturation never hides a value that is not finite: it makes the scale NaN, and with it the whole product. Sources:
Micikevicius et al. 2022 (arXiv 2209.05433) for formats and scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lite.config import PrecisionConfig
from megatron_lite.errors import ReportedError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)  # the first GPUs with 8-bit products: Ada, Hopper
MULTIPLE = 16  # of every side of the matrices, for the product on the GPU


@dataclass(frozen=True)
class Fp8Recipe:
    """What is cast to what, and which amax the scale comes from: of the last `history` uses, or the tensor's own (0)."""

    forward: torch.dtype = E4M3
    backward: torch.dtype = E5M2
    history: int = 0
    margin: int = 0

    @classmethod
    def of(cls, config: PrecisionConfig) -> Fp8Recipe | None:
        if config.fp8_format is None:
            return None
        backward = E5M2 if config.fp8_format == "hybrid" else E4M3
        history = config.fp8_amax_history_len if config.fp8_recipe == "delayed" else 0
        return cls(E4M3, backward, history, config.fp8_margin)


def require_fp8(config: PrecisionConfig, device: torch.device) -> None:
    """Raise ReportedError where --fp8-format was given and the device multiplies no 8-bit matrices."""
    if config.fp8_format is None:
        return
    found = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)}, {capability[0]}.{capability[1]}"
    raise ReportedError(f"--fp8-format {config.fp8_format}: needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or "
                        f"newer, this is {found}; --bf16 alone runs here")  # fmt: skip


class Cast(NamedTuple):
    """A matrix in 8 bits and what it was multiplied by (an fp32 scalar)."""

    values: torch.Tensor
    scale: torch.Tensor

    def t(self) -> Cast:
        """Transposed, in memory of its own: products read both operands along their rows."""
        return Cast(self.values.t().contiguous(), self.scale)


def scale_of(amax: torch.Tensor, dtype: torch.dtype, margin: int) -> torch.Tensor:
    """m / (amax * 2^margin) as an fp32 scalar; 1 for a tensor of zeros, NaN for one that is not finite."""
    scale = torch.finfo(dtype).max / (amax * 2.0**margin)
    scale = torch.where(amax > 0, scale.clamp(max=torch.finfo(torch.float32).max), torch.ones_like(amax))
    return torch.where(torch.isfinite(amax), scale, torch.full_like(amax, float("nan")))


def cast(t: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Cast:
    """t [m, k] in 8 bits, saturated."""
    limit = torch.finfo(dtype).max
    return Cast((t.float() * scale).clamp_(-limit, limit).to(dtype), scale)


def product(a: Cast, b: Cast, out_dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """a [m, k] times b [n, k] transposed -> [m, n]. `fast`: the GPU may add up in fewer bits, as is usual in the forward.

    On CPU the same numbers are multiplied in fp32, for tests.
    """
    if a.values.is_cuda:
        return torch._scaled_mm(a.values, b.values.t(), scale_a=a.scale.reciprocal(), scale_b=b.scale.reciprocal(),
                                out_dtype=out_dtype, use_fast_accum=fast)  # fmt: skip
    return ((a.values.float() @ b.values.float().t()) / (a.scale * b.scale)).to(out_dtype)


class Scaling:
    """The scale of one tensor's uses, and the amax of the last of them."""

    def __init__(self, dtype: torch.dtype, recipe: Fp8Recipe, device: torch.device):
        self.dtype, self.margin = dtype, recipe.margin
        self.history = torch.zeros(recipe.history, device=device) if recipe.history else None  # newest first

    @torch.no_grad()
    def cast(self, t: torch.Tensor, remember: bool = True) -> Cast:
        """t [m, k] in 8 bits. Nothing waits for the device. A tensor without history takes its own amax."""
        amax = torch.linalg.vector_norm(t, float("inf"), dtype=torch.float32)
        if self.history is None:
            return cast(t, scale_of(amax, self.dtype, self.margin), self.dtype)
        known, finite = self.history.max(), torch.isfinite(amax)
        used = torch.where(finite & (known > 0), known, amax)
        if remember:
            pushed = torch.cat([amax.reshape(1), self.history[:-1]])
            self.history = torch.where(finite, pushed, self.history)
        return cast(t, scale_of(used, self.dtype, self.margin), self.dtype)


class Fp8Linear:
    """The scales of one linear. Matrices: x [t, in], weight [out, in], dy [t, out] with t the tokens; x and dy may have
    more leading dims."""

    def __init__(self, recipe: Fp8Recipe, device: torch.device):
        self.recipe = recipe
        self.x, self.weight = (Scaling(recipe.forward, recipe, device) for _ in range(2))
        self.dy = Scaling(recipe.backward, recipe, device)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, training: bool) -> tuple[torch.Tensor, tuple]:
        """x W^T, and the scales that the backward casts x and W with again. Not in training: no amax is remembered."""
        x8, weight8 = self.x.cast(x.flatten(0, -2), training), self.weight.cast(weight, training)
        y = x.new_empty(*x.shape[:-1], weight.shape[0])  # not a view: what comes behind a linear adds to it in place
        y.flatten(0, -2).copy_(product(x8, weight8, x.dtype, fast=True))
        return y, (x8.scale, weight8.scale)

    def cast_grad(self, dy: torch.Tensor) -> Cast:
        return self.dy.cast(dy.flatten(0, -2))

    def input_grad(self, dy8: Cast, weight: torch.Tensor, scales: tuple, like: torch.Tensor) -> torch.Tensor:
        """dy W in the dtype and with the leading dims of `like`.   [..., in]"""
        weight8 = cast(weight, scales[1], self.recipe.forward)
        return product(dy8, weight8.t(), like.dtype, fast=False).view(*like.shape[:-1], -1)

    def weight_grad(self, dy8: Cast, x: torch.Tensor, scales: tuple) -> torch.Tensor:
        """dy^T x in fp32.   [out, in]"""
        x8 = cast(x.flatten(0, -2), scales[0], self.recipe.forward)
        return product(dy8.t(), x8.t(), torch.float32, fast=False)
