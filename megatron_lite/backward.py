"""A place in the backward: what must happen when it comes by."""

from __future__ import annotations

from collections.abc import Callable

import torch


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call: Callable[[], None]):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.call()
        return dy, None


def in_backward(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """x itself. When the backward has the gradient of this x, `call` runs: after the backward of what follows, before that of
    what made x."""
    return _InBackward.apply(x, call)
