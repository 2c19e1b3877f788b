"""The feed-forward half of a layer: down(gelu(up x)), or gated, down(silu(gate x) * up x)."""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.config import ModelConfig
from megatron_lite.parallel.shard import Init
from megatron_lite.parallel.tensor import Again, ColumnParallelLinear, RowParallelLinear, TensorParallel, column_boxes
from megatron_lite.recompute import remade


def swiglu_forward(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2f] -> [..., f]:  silu(gate) * up"""
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate).mul_(up)


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """dy [..., f], the forward's input [..., 2f] -> its gradient [..., 2f]"""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate_up)
    d_gate, d_up = out.chunk(2, -1)
    torch.ops.aten.silu.out(gate, out=d_up)  # both halves are worked out in place: no temporaries of their size
    d_up.mul_(dy)
    torch.mul(dy, up, out=d_gate)
    torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
    return out


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up alone; silu(gate) is computed again in the backward (Shazeer 2020, arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx, gate_up, kernels):
        ctx.kernels = kernels
        ctx.save_for_backward(gate_up)
        return kernels[0](gate_up)

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        return ctx.kernels[1](dy, gate_up), None


class MLP(nn.Module):
    """x [s/tp or s, b, h] -> the same shape. f = ffn / tp.

    `remake` (--recompute-modules mlp_act): the activation's output is computed again in the backward from its input.
    `kernels` = SwiGLU's (forward, backward), replaced by their compiled forms under --compile.
    `width`: other than --ffn-hidden-size (shared experts).
    """

    def __init__(self, name: str, model: ModelConfig, tp: TensorParallel, init: Init, output_init: Init,
                 remake: bool = False, width: int | None = None):  # fmt: skip
        super().__init__()
        self.swiglu, self.approximate, self.remake = model.swiglu, "tanh" if model.openai_gelu else "none", remake
        self.kernels = (swiglu_forward, swiglu_backward)
        h, f, bias = model.hidden_size, width or model.ffn_hidden_size, not model.disable_bias_linear
        pieces = ["gate_proj", "up_proj"] if model.swiglu else ["up_proj"]
        weights = column_boxes([(f"{name}.{piece}.weight", (f, h)) for piece in pieces], tp.axis)
        biases = column_boxes([(f"{name}.{piece}.bias", (f,)) for piece in pieces], tp.axis) if bias else None
        fused = "gate_up_proj" if model.swiglu else "up_proj"
        self.up_proj = ColumnParallelLinear(f"{name}.{fused}", len(pieces) * f // tp.axis.size, h, weights, init, tp, biases)
        self.down_proj = RowParallelLinear(f"{name}.down_proj", f, h, output_init, tp, bias)

    def forward(self, x: torch.Tensor, again: Again | None = None, replay: bool = False) -> torch.Tensor:
        """`again` makes x anew, see parallel/tensor.py. In a replay the output's values are not needed."""
        up = self.up_proj(x, again, replay)  # [s, b, 2f] gated, [s, b, f] otherwise
        return self.down_proj(self.activation(up), remade(self.activation, up) if self.remake else None, replay)

    def activation(self, up: torch.Tensor) -> torch.Tensor:
        return _SwiGLU.apply(up, self.kernels) if self.swiglu else nn.functional.gelu(up, approximate=self.approximate)
