"""DistributedDataParallel over gloo on the plain model: the gradients are reduced with the last microbatch only."""

import contextlib

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loops import Loop, token_loss
from benchmarks.peers.plain import load_plain
from benchmarks.peers.spec import Spec


class DataParallelLoop(Loop):
    """The plain loop, each rank on its rows of the global batch."""

    def __init__(self, spec: Spec):
        self.model = DistributedDataParallel(load_plain(spec), gradient_as_bucket_view=True)
        super().__init__(spec, lambda x, y: token_loss(self.model(x), y), self.model.parameters())

    def rows(self, batch):
        return batch.chunk(self.spec.world)[self.spec.rank]

    def microbatch_context(self, last: bool):
        return contextlib.nullcontext() if last else self.model.no_sync()

    def reduce_loss(self, loss):
        dist.all_reduce(loss)
        return loss / self.spec.world


def build(spec: Spec) -> DataParallelLoop:
    """One rank of the data-parallel pair."""
    spec.init_process_group()
    return DataParallelLoop(spec)
