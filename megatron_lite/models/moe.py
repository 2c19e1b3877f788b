"""Mixture of experts: a layer's MLP many times over, of which each token sees a few.

    x --+--> router --> weights, experts of each token
        |                  |
        +------------------+--> sort --> all-to-all --> experts of this rank --> all-to-all --> sum --+--> out
        +--> shared experts, which see every token, while rows travel ---------------------------------+

Router: models/router.py. The way there and back: parallel/expert.py.

What tp ranks do          router and experts                                             shared experts
  etp = tp                all of them on all tokens, each with its cut of the matrices   cut over tp, as an MLP
  etp = 1                 each on its own part of the sequence, with whole matrices      the same

With etp = 1 and without sequence parallelism the tokens, which all tp ranks have, are cut along the sequence first and
gathered behind. Either way gradients of the router are partial sums over tp, with etp = 1 those of the experts too.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig
from megatron_lite.models.mlp import MLP, swiglu_backward, swiglu_forward
from megatron_lite.models.router import Router, Training
from megatron_lite.parallel.expert import Dispatch, ExpertParallel, through_experts
from megatron_lite.parallel.shard import Box, Init, Shard, parameter, split
from megatron_lite.parallel.tensor import Again, TensorParallel


class MoE(nn.Module):
    """x [s/tp or s, b, h] -> the same shape."""

    def __init__(self, name: str, model: ModelConfig, tp: TensorParallel, experts: ExpertParallel, init: Init,
                 output_init: Init, remake: bool = False):  # fmt: skip
        super().__init__()
        self.tp, self.ep, self.gated = tp, experts, model.swiglu
        alone = Axis("tp")
        self.cut, self.whole = (tp.axis, alone) if experts.cut else (alone, tp.axis)  # who cuts matrices, who has tokens apart
        self.router = Router(f"{name}.router", model, tp, experts.cp, self.whole, self.cut.size, init)
        self.up, self.down = expert_matrices(name, model, tp, experts, self.cut, init, output_init)
        approximate = "tanh" if model.openai_gelu else "none"
        self.kernels = (swiglu_forward, swiglu_backward) if model.swiglu else (
            partial(nn.functional.gelu, approximate=approximate), partial(torch.ops.aten.gelu_backward, approximate=approximate))
        self.shared_experts = None
        if model.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(f"{name}.shared_experts", model, tp, init, output_init, remake,
                                      model.moe_shared_expert_intermediate_size)  # fmt: skip

    def forward(self, x: torch.Tensor, again: Again | None = None, replay: bool = False,
                training: Training | None = None) -> torch.Tensor:  # fmt: skip
        """`training` is for the router. The experts make their own copies of x; only the shared ones take it `again`."""
        apart = self.whole.size > 1 and not self.tp.sequence_parallel and x.shape[0] % self.whole.size == 0
        if self.cut.size > 1:
            tokens = comm.gather_sequence(x, self.cut) if self.tp.sequence_parallel else comm.copy_to(x, self.cut)
        else:
            tokens = comm.split_sequence(x, self.whole) if apart else x  # a single new token is everyone's
        routes = self.router(tokens, training)
        shared = self.shared_experts
        dispatch = Dispatch(routes.chosen, routes.kept, self.router.model.num_experts, self.ep.axis)
        out, beside = through_experts(tokens, routes.weights, dispatch, self.up, self.down, self.kernels,
                                      lambda: None if shared is None else shared(x, again, replay), replay)  # fmt: skip
        if self.cut.size > 1:
            sequence = self.tp.sequence_parallel
            out = comm.reduce_scatter_sequence(out, self.cut) if sequence else comm.reduce_from(out, self.cut)
        elif apart:
            out = comm.gather_replicated(out, self.whole)
        return out if beside is None else out + beside


def expert_matrices(name: str, model: ModelConfig, tp: TensorParallel, experts: ExpertParallel, cut: Axis, init: Init,
                    output_init: Init) -> tuple[nn.Parameter, nn.Parameter]:  # fmt: skip
    """This rank's experts, one under the other: up [E/ep 2f/etp, h], each gate over up, and down [E/ep h, f/etp].

    Boxes name the matrices of single experts: `layers.0.mlp.experts.3.gate_proj.weight`.
    """
    h, f = model.hidden_size, model.moe_ffn_hidden_size
    first, number = split(model.num_experts, experts.axis.size, experts.axis.rank)
    start, width = split(f, cut.size, cut.rank)
    copies = (1, 0, False) if cut.size > 1 or tp.axis.size == 1 else (tp.axis.size, tp.axis.rank, True)
    pieces = ["gate_proj", "up_proj"] if model.swiglu else ["up_proj"]
    ups, downs = [], []
    for place in range(number):
        expert = f"{name}.experts.{first + place}"
        for at, piece in enumerate(pieces):
            local = ((place * len(pieces) + at) * width, 0)
            ups.append(Box(f"{expert}.{piece}.weight", (f, h), (start, 0), (width, h), local, *copies))
        downs.append(Box(f"{expert}.down_proj.weight", (h, f), (0, start), (h, width), (place * h, 0), *copies))
    fused = "gate_up_proj" if model.swiglu else "up_proj"
    up = Shard(f"{name}.experts.{fused}.weight", tuple(ups), init, decay=True, expert=True)
    down = Shard(f"{name}.experts.down_proj.weight", tuple(downs), output_init, decay=True, expert=True)
    return (parameter((len(ups) * width, h), up, tp.dtype, tp.device),
            parameter((number * h, width), down, tp.dtype, tp.device))  # fmt: skip
