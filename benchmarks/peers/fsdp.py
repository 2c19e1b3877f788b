"""torch's fully_shard (FSDP2) over gloo: every layer a unit, bf16 parameters and activations, gradients reduced in fp32.

Options: reshard (free the gathered parameters between forward and backward, as ZeRO-3 does).
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peers.loops import Loop, token_loss
from benchmarks.peers.plain import load_plain
from benchmarks.peers.spec import Spec


class FullyShardedLoop(Loop):
    """The plain loop on a sharded model. The gradients are reduce-scattered with every microbatch, as FSDP2 ships."""

    def __init__(self, spec: Spec):
        model, reshard = load_plain(spec), spec.options["reshard"]
        low = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
        options = {"mesh": init_device_mesh("cpu", (spec.world,)), "reshard_after_forward": reshard,
                   "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)}  # fmt: skip
        for layer in model.layers.values():
            fully_shard(layer, **options)
        fully_shard(model, **options)
        super().__init__(spec, lambda x, y: token_loss(model(x), y), model.parameters())

    def rows(self, batch):
        return batch.chunk(self.spec.world)[self.spec.rank]

    def reduce_loss(self, loss):
        dist.all_reduce(loss)
        return loss / self.spec.world


def build(spec: Spec) -> FullyShardedLoop:
    """One rank of the pair."""
    spec.init_process_group()
    return FullyShardedLoop(spec)
