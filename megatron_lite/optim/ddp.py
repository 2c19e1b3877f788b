"""The gradient engine: who keeps which part of the model state, and how gradients are summed over data parallel ranks.

One engine, one switch, --zero-stage. A bucket's gradient is reduce-scattered over the `shard` axis and all-reduced over the
`replica` axis; without ZeRO the first has size 1 and the second is all of dp x cp. Experts that are shared out over ep have axes
of their own, of the ranks that hold the same ones.

    stage   reduced                          this rank keeps                                    with pipeline stages
    0       in the last backward             everything
    1       in the last backward             its part of masters and moments
    2       in every backward, then freed    its part of gradients too
    3       in every backward, then freed    its part of parameters too (optim/zero.py)         in the last backward

A bucket is ready when each of its parameters has received all its contributions (microbatches x uses of the step, or the
uses of one microbatch). Its reduction starts at that moment, inside the backward; `finish` starts what is left and waits.
Since buckets become ready in an order that follows from the schedule, all data-parallel ranks start the same reductions in
the same order. At stages 2 and 3 a bucket's full gradient starts at zero, but for the owned part, which starts at the sum
so far: the reduce-scatter then gives the new sum, with no pass of its own over the shard.

With --grad-compression (stages 0 and 1) a bucket is reduced by two small all-reduces over dp x cp (optim/compress.py): the
first starts when it is ready, the second when the next bucket is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.optim.buckets import Bucket, layout
from megatron_lite.optim.compress import Compression, LowRank
from megatron_lite.optim.flat import FlatBucket, Transient, box_span, bring, free, is_there, make_bucket
from megatron_lite.optim.zero import UnitParameters, drop, finish_gather, outdate, start_gather


@dataclass(frozen=True)
class Sharding:
    """What the ranks of `shard` divide among them (`stage` of ZeRO); those of `replica` hold the same.

    overlap         reductions start inside the backward
    overlap_gather  parameters are gathered ahead of their use
    limit           units gathered ahead, and full gradients on their way, at once
    pipelined       there are pipeline stages: stage 3 keeps parameters and gradients for the step
    mirror          the two ranks that hold the same stages (DualPipe)
    experts         (shard, replica) of experts; None: as the rest
    wire_dtype      what gradients travel as between data-parallel ranks; None: as they are
    compression     they travel as matrices of low rank; None: as they are
    """

    stage: int = 0
    shard: Axis = field(default_factory=lambda: Axis("zero_shard"))
    replica: Axis = field(default_factory=lambda: Axis("zero_replica"))
    overlap: bool = True
    overlap_gather: bool = True
    limit: int = 1
    pipelined: bool = False
    mirror: Axis = field(default_factory=lambda: Axis("mirror"))
    experts: tuple[Axis, Axis] | None = None
    wire_dtype: torch.dtype | None = None
    compression: Compression | None = None


class GradientEngine:
    """Owns the memory of a rank's chunks."""

    def __init__(self, chunks: list[TransformerStage], sharding: Sharding, tp_axis: Axis, embedding_axis: Axis,
                 bucket_size: int | None = None, fill: Callable[[nn.Parameter], None] | None = None):  # fmt: skip
        """`fill` gives each parameter its first values, bucket by bucket; None keeps the values that they have."""
        self.sharding, self.tp_axis, self.embedding_axis = sharding, tp_axis, embedding_axis
        self.stage, self.shard, self.replica = sharding.stage, sharding.shard, sharding.replica
        self.per_microbatch = self.stage == 2 or (self.stage == 3 and not sharding.pipelined)
        self.buckets: list[FlatBucket] = []
        self.transient = Transient()
        self._owner: dict[nn.Parameter, FlatBucket] = {}
        self._on_their_way: deque[FlatBucket] = deque()
        self.mirror_axis, self.wire_dtype = sharding.mirror, sharding.wire_dtype
        self.compression = sharding.compression
        self._compressing, self._scale = False, 1.0  # in this step; fp16's loss scale of it
        # A mirror rank holds the same stages with its chunks swapped: from the first stage on, buckets meet their copies.
        for chunk in chunks if self.mirror_axis.rank == 0 else chunks[::-1]:
            self._adopt(chunk, bucket_size, fill)
        self._uses = {p: chunk.uses(p) for chunk in chunks for p in chunk.parameters()}
        copies = [p for p in self._uses if p.shard.name == "embed_tokens.weight"]
        self.tied = copies if chunks[0].model.tied and (len(copies) == 2 or embedding_axis.size > 1) else []

    def _adopt(self, chunk: TransformerStage, bucket_size: int | None, fill: Callable | None) -> None:
        """Move a chunk's parameters into flat buckets."""
        params: list[nn.Parameter] = []
        units = []
        for _, unit in chunk.units():
            units.append([(len(params) + i, p.numel()) for i, p in enumerate(unit)])
            params.extend(unit)
        experts = [bool(unit) and params[unit[0][0]].shard.expert for unit in units]
        for wanted, axes in ((False, (self.shard, self.replica)), (True, self.sharding.experts or (self.shard, self.replica))):
            own = [unit for unit, expert in zip(units, experts, strict=True) if expert == wanted]
            self._allot(layout(own, axes[0].size * axes[1].size, bucket_size), params, axes, fill)
        if self.stage > 0:
            of_unit = {unit: self._owner[params[0]] for unit, params in chunk.units()}
            if chunk.last:
                of_unit["head"] = self._owner[chunk.output_weight]
            ahead = self.sharding.limit if self.sharding.overlap_gather else 0
            frees = self.stage == 3 and not self.sharding.pipelined
            chunk.weights = UnitParameters(chunk, of_unit, ahead, frees)

    def _allot(self, buckets: list[Bucket], params: list[nn.Parameter], axes: tuple[Axis, Axis], fill: Callable | None) -> None:
        """Make buckets over their shard and replica axes."""
        for bucket in buckets:
            mine = [params[slot.index] for slot in bucket.slots]
            flat = make_bucket(bucket, mine, *axes, self.stage, self.transient, fill)
            if self.compression:
                flat.low_rank = LowRank(bucket.slots, mine, flat.grad, self.compression.rank)
            self.buckets.append(flat)
            for param in mine:
                self._owner[param] = flat
                param.grad_arrived = self._arrived
                if self.stage >= 2:
                    param.grad_comes = self._comes

    # ------------------------------------------------------------------------------------------------- gradients

    def begin_step(self, microbatches: int, iteration: int = 0, scale: float = 1.0) -> None:
        """Forget the last step's gradients; count what every bucket will receive from `microbatches` (of a chunk).
        `iteration` counts from 0; `scale` is the loss scale."""
        self._compressing, self._scale = self.compression is not None and iteration >= self.compression.start, scale
        for bucket in self.buckets:
            if self._compressing:
                bucket.low_rank.begin(bucket.grad, scale)
            elif self.stage < 2:
                bucket.grad.zero_()
            bucket.arrived, bucket.summed = 0, False
            each = sum(self._uses[p] for p in bucket.params if p.requires_grad)
            bucket.expected = each if self.per_microbatch else each * microbatches

    def _comes(self, param: nn.Parameter) -> None:
        """Ahead of a contribution, stages 2 and 3: there must be a full gradient to add it to."""
        bucket = self._owner[param]
        if bucket.reduction is not None:
            self._complete(bucket)
        if is_there(bucket.grad):
            return
        bring(bucket.grad, self.transient)
        start, end = bucket.owned
        if bucket.summed:
            bucket.grad[:start].zero_()
            bucket.grad[start:end].copy_(bucket.grad_shard)
            bucket.grad[end:].zero_()
        else:
            bucket.grad.zero_()

    def _arrived(self, param: nn.Parameter) -> None:
        bucket = self._owner[param]
        bucket.arrived += 1
        if bucket.arrived < bucket.expected:
            return
        if self.per_microbatch:
            bucket.arrived = 0
            self._reduce(bucket)
            while len(self._on_their_way) > (self.sharding.limit if self.sharding.overlap else 0):
                self._complete(self._on_their_way[0])
        elif self.sharding.overlap:
            self._reduce(bucket)

    def _reduce(self, bucket: FlatBucket) -> None:
        """Start the bucket's reduction: its owned part will be the sum over `shard` (of size 1: over `replica`)."""
        if self._compressing:  # all of it will be an estimate of the sum over both
            if self._on_their_way:
                self._sum_right(self._on_their_way[-1])
            bucket.reduction = comm.start_all_reduce(bucket.low_rank.left(bucket.grad), self.compression.axis)
        elif self.stage > 0:
            bucket.reduction = comm.start_reduce_scatter_into(bucket.grad_shard, bucket.grad, bucket.shard, self.wire_dtype)
        else:
            bucket.reduction = comm.start_all_reduce(bucket.grad_shard, bucket.replica, wire_dtype=self.wire_dtype)
        self._on_their_way.append(bucket)

    def _sum_right(self, bucket: FlatBucket) -> None:
        """Compressed: wait for the sum of a bucket's first message and start that of its second, which needs it."""
        if not bucket.low_rank.halfway:
            bucket.reduction.wait()
            bucket.reduction = comm.start_all_reduce(bucket.low_rank.right(bucket.grad), self.compression.axis)

    def _complete(self, bucket: FlatBucket) -> None:
        if self._compressing:
            self._sum_right(bucket)
        bucket.reduction.wait()
        bucket.reduction, bucket.summed = None, True
        self._on_their_way.remove(bucket)
        if self.stage >= 2:
            free(bucket.grad, self.transient)

    def finish(self) -> None:
        """After the last backward: owned gradients are complete sums over dp x cp, mirror ranks, tp copies and tied copies."""
        for bucket in self.buckets:
            if self.stage >= 2 and not (bucket.summed or bucket.reduction or is_there(bucket.grad)):
                bucket.grad_shard.zero_()  # no contribution: unused or frozen
            elif bucket.reduction is None and (self.stage < 2 or is_there(bucket.grad)):
                self._reduce(bucket)
        while self._on_their_way:
            self._complete(self._on_their_way[0])
        if self._compressing:
            self._decompress()
        elif self.stage > 0:
            self._sum_owned([(bucket, bucket.replica) for bucket in self.buckets], self.wire_dtype)
        self._sum_owned([(bucket, self.mirror_axis) for bucket in self.buckets], None)
        self._sum_partial_copies()
        if len(self.tied) == 2:  # both copies on this rank: a pipeline folded into a V, or run both ways
            first, last = (self._owner[param].grad_shard for param in self.tied)
            last.copy_(first.add_(last))
        elif self.tied:
            comm.all_reduce(self._owner[self.tied[0]].grad_shard, self.embedding_axis)

    def _decompress(self) -> None:
        """Full gradients from the sums of their factors. All ranks of a model replica settle alike, since a step is
        skipped as a whole: what it left out must not stay in one rank's memory and be lost by another."""
        finite = torch.stack([bucket.low_rank.finite() for bucket in self.buckets]).all().float()
        taken = bool(comm.all_reduce(finite, self.compression.agree, op="min"))
        for bucket in self.buckets:
            bucket.low_rank.settle(bucket.grad, taken, self._scale)

    def _sum_owned(self, over: list[tuple[FlatBucket, Axis]], wire_dtype: torch.dtype | None) -> None:
        """All-reduce owned parts, one bucket waited for while the next are on their way."""
        for handle in [comm.start_all_reduce(bucket.grad_shard, axis, wire_dtype=wire_dtype) for bucket, axis in over]:
            handle.wait()

    def _sum_partial_copies(self) -> None:
        """Sum over tp the gradients whose copies each saw a part of the data, in one message.

        A block held by c ranks has tp/c different contents (shared KV heads); each has a slot of the message, filled by
        the ranks that hold it and zero elsewhere. Norms and biases have c = tp: one slot. The ranks of a tp group own the
        same ranges of equal buffers, so their parts of a block fit. Experts that all of them hold whole are summed in place.
        """
        tp = self.tp_axis
        if tp.size == 1:
            return
        self._sum_owned([(b, tp) for b in self.buckets if b.expert and b.params[0].shard.boxes[0].partial], None)
        views = [(box, bucket.grad_shard[slice(*part)]) for bucket in self.buckets if not bucket.expert
                 for slot, param in bucket.slots()
                 for box in param.shard.boxes if box.partial
                 if (part := bucket.owned_part(*box_span(slot.start, param, box)))]  # fmt: skip
        if not views:
            return
        message = views[0][1].new_zeros(sum(v.numel() * (tp.size // box.copies) for box, v in views))
        places, at = [], 0
        for box, view in views:
            mine = at + tp.rank // box.copies * view.numel()
            places.append(message[mine : mine + view.numel()])
            places[-1].copy_(view)
            at += view.numel() * (tp.size // box.copies)
        comm.all_reduce(message, tp)
        for (_, view), place in zip(views, places, strict=True):
            view.copy_(place)

    # ------------------------------------------------------------------------------------------------ parameters

    def parameters_changed(self) -> None:
        """The optimizer, or a checkpoint, has written the owned parts: the full parameters are gathered again, ahead of
        their use; now, at stages 1 and 2 without overlap."""
        if self.stage == 0:
            return
        for bucket in self.buckets:
            outdate(bucket, self.stage == 3)
        if self.stage < 3 and not self.sharding.overlap_gather:
            self.gather_parameters()

    def gather_parameters(self) -> None:
        """All full parameters at once, for who reads them outside a forward."""
        for bucket in reversed(self.buckets):
            start_gather(bucket)
            finish_gather(bucket)

    @contextmanager
    def gathered(self, param: nn.Parameter) -> Iterator[None]:
        """The full parameters of `param`'s bucket, for who reads them outside a forward. Collective over its `shard`."""
        bucket = self._owner[param]
        absent = not is_there(bucket.param)
        start_gather(bucket)
        finish_gather(bucket)
        yield
        if absent:
            drop(bucket)

    def bytes(self) -> dict[str, int]:
        """Bytes this rank holds for weights and gradients between steps."""
        gradients = sum((b.grad_shard if self.stage >= 2 else b.grad).nbytes for b in self.buckets)
        memory = sum(b.low_rank.bytes() for b in self.buckets if b.low_rank)  # of compression
        return {"weights": sum((b.param_shard if self.stage == 3 else b.param).nbytes for b in self.buckets),
                "gradients": gradients + memory}  # fmt: skip
