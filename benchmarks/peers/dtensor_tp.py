"""Tensor and sequence parallelism with DTensor: torch's parallelize_module and loss_parallel on the plain model.

Options: masters (bf16 weights with fp32 masters; otherwise autocast).
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.loops import Loop, Masters, token_loss
from benchmarks.peers.plain import Llama, load_plain
from benchmarks.peers.spec import Spec


def cut(model: Llama, mesh) -> None:
    """The plan of the torch documentation: residual stream cut over the sequence, matrices over heads and ffn."""
    parallelize_module(
        model,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    layer_plan = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers.values():
        parallelize_module(layer, mesh, layer_plan)


class TensorParallelLoop(Loop):
    """The plain loop; forward and backward run under loss_parallel, which keeps the logits cut over the vocabulary."""

    def microbatch_context(self, last: bool):
        return loss_parallel()


def build(spec: Spec) -> TensorParallelLoop:
    """One rank of the tensor-parallel pair."""
    spec.init_process_group()
    mesh = init_device_mesh("cpu", (spec.world,))
    model = load_plain(spec)
    cut(model, mesh)
    masters = None
    if spec.options.get("masters"):
        masters = Masters(model.parameters())
        masters.attach()
    torch.manual_seed(0)
    return TensorParallelLoop(spec, lambda x, y: token_loss(model(x), y), model.parameters(), masters)
