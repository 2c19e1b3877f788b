"""Activations computed a second time in the backward instead of kept.

    recompute(region, x)   a region of the model: x is kept, and the backward runs the region again
    remade(fn, x)          one tensor: a linear that would keep fn(x) as its input gets it from x again

The second run is the first one bit by bit: kernels are the same, and dropout is keyed by what it belongs to (rng.py), not
drawn from a state that would have to be put back. Weight gradients go where a layer's backward always hands them
(parallel/wgrad.py), so that `B` recomputes and queues them, and `W` finds them as if nothing had been recomputed.

The backward needs no output of the region. Told that it is a replay, the region leaves out what only its output needs
(the last linear and its collective; see models/transformer.py). Source of the idea: Chen et al. 2016 (arXiv 1604.06174),
Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Region(Protocol):
    """A part of the model as a function of one activation. In a replay its output's values are not read, only its graph."""

    def __call__(self, x: torch.Tensor, replay: bool = False) -> torch.Tensor: ...


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, region: Region, x: torch.Tensor):
        ctx.region = region
        ctx.save_for_backward(x)
        return region(x.detach())

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        region, ctx.region = ctx.region, None
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = region(x, replay=True)
        torch.autograd.backward(y, dy)
        return None, x.grad


def recompute(region: Region, x: torch.Tensor) -> torch.Tensor:
    """region(x), keeping x alone for the backward.   x and the result: any shapes"""
    if not torch.is_grad_enabled():
        return region(x)
    if not x.requires_grad:  # frozen layers below: the region's own weights still need their gradients
        x = x.detach().requires_grad_()
    return _Recompute.apply(region, x)


def remade(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call that gives fn(x) again, without a graph. It holds x, which costs nothing where fn's backward keeps x too."""
    x = x.detach()

    def again() -> torch.Tensor:
        with torch.no_grad():
            return fn(x)

    return again
