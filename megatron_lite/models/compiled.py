"""--compile: the element-wise parts of every layer through torch.compile, one fused loop each.

Only pure functions of tensors are compiled (norms, SwiGLU, rotary positions): a few seconds at the first step instead of
the half minute that a whole model takes, and nothing that communicates is inside. Needs a C++ compiler on CPU.
"""

from __future__ import annotations

import torch

from megatron_lite.models.attention import SelfAttention
from megatron_lite.models.mlp import MLP, swiglu_forward
from megatron_lite.models.moe import MoE
from megatron_lite.models.norm import RMSNorm, rms_backward, rms_forward
from megatron_lite.models.rope import rotate


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """mlp.swiglu_backward as one expression, which the compiler fuses; by itself it would make six temporaries.

    with s = sigmoid(gate):  silu = gate s,  silu' = s (1 + gate (1 - s))
    """
    exact = torch.promote_types(gate_up.dtype, torch.float32)
    dy, gate, up = dy.to(exact), *(part.to(exact) for part in gate_up.chunk(2, -1))
    s = torch.sigmoid(gate)
    return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], -1).to(gate_up.dtype)


def compile_elementwise(model: torch.nn.Module) -> None:
    """Put compiled kernels in place of a stage's eager ones."""
    norms = tuple(torch.compile(kernel, dynamic=False) for kernel in (rms_forward, rms_backward))
    swiglu = tuple(torch.compile(kernel, dynamic=False) for kernel in (swiglu_forward, swiglu_backward))
    rope = torch.compile(rotate, dynamic=False)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.kernels = norms
        elif isinstance(module, MLP) or (isinstance(module, MoE) and module.gated):
            module.kernels = swiglu
        elif isinstance(module, SelfAttention):
            module.rope.kernel = rope
