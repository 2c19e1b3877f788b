"""The gradient engine: parameters and gradients in flat buckets, and their reduction over data parallel ranks.

    param  [bucket]   model dtype; every parameter is a view of it
    grad   [bucket]   fp32 (fp64 for fp64 models); every `param.main_grad` is a view of it

A bucket is ready when each of its parameters has received all its contributions of the step (microbatches x uses). Its
all-reduce starts at that moment, inside the last backward; `finish` starts what is left and waits. Since buckets become
ready in an order that follows from the schedule, all data-parallel ranks start the same reductions in the same order.

This is stage 0 (every rank keeps everything). Stages 1 to 3 change what a bucket keeps, not who calls what.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.optim.buckets import Bucket, layout, runs
from megatron_lite.parallel.shard import Box


@dataclass
class FlatBucket:
    """One bucket's memory and its progress through a step."""

    layout: Bucket
    params: list[nn.Parameter]
    param: torch.Tensor
    grad: torch.Tensor
    expected: int = 0  # contributions per step
    arrived: int = 0
    reduction: comm.Handle | None = field(default=None, repr=False)

    def spans(self, wanted) -> list[tuple[int, int]]:
        """[start, end) of the elements in boxes for which wanted(param, box), neighbours joined."""
        found = []
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            for box in param.shard.boxes:
                if wanted(param, box):
                    found.append(_span(slot.start, param, box))
        return runs(found)


def _span(start: int, param: nn.Parameter, box: Box) -> tuple[int, int]:
    """A box as a flat range: boxes of a local parameter are whole rows of it."""
    row = param[0].numel()
    return start + box.local[0] * row, start + (box.local[0] + box.length[0]) * row


class GradientEngine:
    """Owns the memory of a rank's chunks. `reduce_axis` is dp x cp; `mirror_axis` the two ranks that hold the same stages."""

    def __init__(self, chunks: list[TransformerStage], reduce_axis: Axis, tp_axis: Axis, embedding_axis: Axis,
                 overlap: bool = True, bucket_size: int | None = None, mirror_axis: Axis | None = None,
                 wire_dtype: torch.dtype | None = None):  # fmt: skip
        self.wire_dtype = wire_dtype  # what gradients travel as between data-parallel ranks; None: as they are
        self.axis, self.tp_axis, self.embedding_axis, self.overlap = reduce_axis, tp_axis, embedding_axis, overlap
        self.buckets: list[FlatBucket] = []
        self._owner: dict[nn.Parameter, FlatBucket] = {}
        self.mirror_axis = mirror_axis or Axis("mirror")
        # A mirror rank holds the same stages with its chunks swapped: from the first stage on, buckets meet their copies.
        for chunk in chunks if self.mirror_axis.rank == 0 else chunks[::-1]:
            self._adopt(chunk, bucket_size)
        self._uses = {p: chunk.uses(p) for chunk in chunks for p in chunk.parameters()}
        copies = [p for p in self._uses if p.shard.name == "embed_tokens.weight"]
        self.tied = copies if chunks[0].model.tied and (len(copies) == 2 or embedding_axis.size > 1) else []

    def _adopt(self, chunk: TransformerStage, bucket_size: int | None) -> None:
        """Move a chunk's parameters into flat buckets, keeping their values."""
        params: list[nn.Parameter] = []
        units = []
        for _, unit in chunk.units():
            units.append([(len(params) + i, p.numel()) for i, p in enumerate(unit)])
            params.extend(unit)
        for bucket in layout(units, self.axis.size, bucket_size):
            mine = [params[slot.index] for slot in bucket.slots]
            first = mine[0]
            exact = torch.float64 if first.dtype == torch.float64 else torch.float32
            flat = FlatBucket(bucket, mine, torch.zeros(bucket.size, dtype=first.dtype, device=first.device),
                              torch.zeros(bucket.size, dtype=exact, device=first.device))  # fmt: skip
            for slot, param in zip(bucket.slots, mine, strict=True):
                place = slice(slot.start, slot.start + slot.numel)
                flat.param[place].copy_(param.data.flatten())
                param.data = flat.param[place].view(param.shape)
                param.main_grad = flat.grad[place].view(param.shape)
                param.grad_arrived = self._arrived
                self._owner[param] = flat
            self.buckets.append(flat)

    def begin_step(self, microbatches: int) -> None:
        """Forget the last step's gradients; every parameter now expects `microbatches` (of a chunk) x uses contributions."""
        for bucket in self.buckets:
            bucket.grad.zero_()
            bucket.arrived, bucket.reduction = 0, None
            bucket.expected = sum(self._uses[p] for p in bucket.params if p.requires_grad) * microbatches

    def _arrived(self, param: nn.Parameter) -> None:
        bucket = self._owner[param]
        bucket.arrived += 1
        if bucket.arrived == bucket.expected and self.overlap:
            bucket.reduction = comm.start_all_reduce(bucket.grad, self.axis, wire_dtype=self.wire_dtype)

    def finish(self) -> None:
        """After the last backward: gradients are complete sums over dp x cp, mirror ranks, tp copies and tied copies."""
        for bucket in self.buckets:
            if bucket.reduction is None:
                bucket.reduction = comm.start_all_reduce(bucket.grad, self.axis, wire_dtype=self.wire_dtype)
        for bucket in self.buckets:
            bucket.reduction.wait()
            bucket.reduction = comm.start_all_reduce(bucket.grad, self.mirror_axis)
        for bucket in self.buckets:
            bucket.reduction.wait()
            bucket.reduction = None
        self._sum_partial_copies()
        if len(self.tied) == 2:  # both copies on this rank: a pipeline folded into a V, or run both ways
            first, last = (param.main_grad for param in self.tied)
            last.copy_(first.add_(last))
        elif self.tied:
            comm.all_reduce(self.tied[0].main_grad, self.embedding_axis)

    def _sum_partial_copies(self) -> None:
        """Sum over tp the gradients whose copies each saw a part of the data, in one message.

        A block held by c ranks has tp/c different contents (shared KV heads); each has a slot of the message, filled by
        the ranks that hold it and zero elsewhere. Norms and biases have c = tp: one slot.
        """
        tp = self.tp_axis
        views = [(box, box.of_local(p.main_grad)) for p in self._owner for box in p.shard.boxes if box.partial]
        if not views or tp.size == 1:
            return
        message = views[0][1].new_zeros(sum(v.numel() * (tp.size // box.copies) for box, v in views))
        places, at = [], 0
        for box, view in views:
            mine = at + tp.rank // box.copies * view.numel()
            places.append(message[mine : mine + view.numel()].view(view.shape))
            places[-1].copy_(view)
            at += view.numel() * (tp.size // box.copies)
        comm.all_reduce(message, tp)
        for (_, view), place in zip(views, places, strict=True):
            view.copy_(place)

    def bytes(self) -> dict[str, int]:
        """Bytes this rank holds for weights and gradients."""
        return {"weights": sum(b.param.nbytes for b in self.buckets), "gradients": sum(b.grad.nbytes for b in self.buckets)}
