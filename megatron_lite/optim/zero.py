"""Where full parameters come from when ranks share them: gathered just ahead of their use, freed after it.

After a step each rank has written its own part of every bucket; the rest comes by all-gather.

    stages 1, 2   the gathered parts go in place; nothing is freed
    stage 3       a unit's parameters have memory only around its use, forward and backward; the last unit keeps its own
                  between the two. With pipeline stages they stay from first use to the end of the step: several
                  microbatches are under way at once, and each would gather every unit twice

Gathers are started `ahead` units before their use, in order of use, so all ranks of a shard axis start the same ones.
On CUDA they run on NCCL's own stream: it waits for what was queued before the start, the unit's use for its end, and the
host for neither.
"""

from __future__ import annotations

import torch

from megatron_lite.backward import in_backward
from megatron_lite.comm import collectives as comm
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.optim.flat import FlatBucket, bring, free


class UnitParameters:
    """The parameters of one chunk's units (`models.transformer.Weights`), where they are sharded.

    The layers of a recomputed span are gathered around the whole of it, so that its replay finds them there."""

    def __init__(self, chunk: TransformerStage, buckets: dict[str, FlatBucket], ahead: int, frees: bool):
        """`buckets` by unit. `ahead`: units to gather before they are needed. `frees`: after each use, as stage 3 does."""
        self.ahead, self.frees = ahead, frees
        self.order = [buckets[unit] for unit in chunk.order()]
        self.place = {unit: i for i, unit in enumerate(chunk.order())}
        self.first = sum(unit.startswith("embed") for unit in chunk.order())  # their backward reads no parameter

    def gather(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        place = self.place[unit]
        self._bring(range(place, min(place + self.ahead + 1, len(self.order))))
        return in_backward(x, lambda: drop(self.order[place])) if self.frees and x.requires_grad else x

    def free(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        place = self.place[unit]
        if self.frees and place < len(self.order) - 1:
            drop(self.order[place])
        if not self.frees or not x.requires_grad or place < self.first:
            return x
        return in_backward(x, lambda: self._bring(range(place, max(place - self.ahead, self.first) - 1, -1)))

    def _bring(self, places: range) -> None:
        """Start the gathers of these uses, and wait for the first's."""
        for place in places:
            start_gather(self.order[place])
        finish_gather(self.order[places[0]])


def start_gather(bucket: FlatBucket) -> None:
    """All-gather the bucket's parameters, unless they are there or on their way."""
    if bucket.current or bucket.gathering is not None:
        return
    bring(bucket.param, bucket.transient)
    bucket.gathering = comm.start_all_gather_into(bucket.param, bucket.param_shard, bucket.shard)


def finish_gather(bucket: FlatBucket) -> None:
    if bucket.gathering is not None:
        bucket.gathering.wait()
        bucket.gathering, bucket.current = None, True


def drop(bucket: FlatBucket) -> None:
    """Free the bucket's full parameters (stage 3)."""
    finish_gather(bucket)
    free(bucket.param, bucket.transient)
    bucket.current = False


def outdate(bucket: FlatBucket, owns_memory: bool) -> None:
    """The owned part has changed: the gathered rest is old."""
    finish_gather(bucket)
    if owns_memory:
        free(bucket.param, bucket.transient)
    bucket.current = False
