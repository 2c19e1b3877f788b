"""The memory of one bucket: parameters and gradients in flat buffers, and the part of them that this rank owns.

    param        [size]     model dtype; every parameter is a view of it          stage 3: there while a unit is used
    grad         [size]     fp32 (fp64 for fp64 models); every `main_grad` too    stages 2, 3: there while it is summed
    param_shard  [size/n]   what the optimizer writes: a view of `param`          stage 3: memory of its own
    grad_shard   [size/n]   what the optimizer reads: a view of `grad`            stages 2, 3: memory of its own

n ranks share a copy of the model state; without ZeRO n = 1, and each rank owns everything. A buffer that is "not there"
has given its storage back: the tensors that view it, autograd's references among them, find it again when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.optim.buckets import Bucket, runs
from megatron_lite.optim.compress import LowRank
from megatron_lite.parallel.shard import Box


@dataclass(eq=False)
class Transient:
    """Bytes of full buffers that have memory for a while only (stages 2 and 3): now, and at their most."""

    live: int = 0
    peak: int = 0

    def add(self, number: int) -> None:
        self.live += number
        self.peak = max(self.peak, self.live)


@dataclass(eq=False)
class FlatBucket:
    """One bucket's memory and its progress through a step."""

    layout: Bucket
    params: list[nn.Parameter]
    owned: tuple[int, int]  # [start, end) of the buffers
    param: torch.Tensor
    grad: torch.Tensor
    param_shard: torch.Tensor
    grad_shard: torch.Tensor
    transient: Transient
    expected: int = 0  # contributions until the next reduction
    arrived: int = 0
    summed: bool = False  # grad_shard holds a reduced sum of this step
    reduction: comm.Handle | None = field(default=None, repr=False)
    gathering: comm.Handle | None = field(default=None, repr=False)
    shard: Axis = field(default_factory=lambda: Axis("zero_shard"))  # ranks that share it, of which each owns a part
    replica: Axis = field(default_factory=lambda: Axis("zero_replica"))  # ranks that own the same part
    current: bool = True  # `param` is there and holds the newest values
    low_rank: LowRank | None = field(default=None, repr=False)  # with gradient compression

    @property
    def expert(self) -> bool:
        return self.params[0].shard.expert

    def slots(self):
        """(slot, parameter) pairs in the order in which they lie."""
        return zip(self.layout.slots, self.params, strict=True)

    def owned_part(self, start: int, end: int) -> tuple[int, int] | None:
        """[start, end) of the buffers as a range of the shards; None where this rank owns nothing of it."""
        first, last = max(start, self.owned[0]), min(end, self.owned[1])
        return (first - self.owned[0], last - self.owned[0]) if first < last else None

    def spans(self, wanted: Callable[[nn.Parameter, Box], bool]) -> list[tuple[int, int]]:
        """[start, end) in the shards of the elements in boxes for which wanted(param, box), neighbours joined."""
        found = [self.owned_part(*box_span(slot.start, param, box))
                 for slot, param in self.slots() for box in param.shard.boxes if wanted(param, box)]  # fmt: skip
        return runs([part for part in found if part])


def box_span(start: int, param: nn.Parameter, box: Box) -> tuple[int, int]:
    """A box of a parameter that starts at `start`, as a flat range: boxes of a local parameter are whole rows of it."""
    row = param.shape[1:].numel()
    return start + box.local[0] * row, start + (box.local[0] + box.length[0]) * row


def make_bucket(layout: Bucket, params: list[nn.Parameter], shard: Axis, replica: Axis, stage: int, transient: Transient,
                fill: Callable[[nn.Parameter], None] | None) -> FlatBucket:  # fmt: skip
    """Memory for `params`, which become views of it. `fill` gives them their values; None keeps those that they have."""
    first = params[0]
    exact = torch.float64 if first.dtype == torch.float64 else torch.float32
    owned = layout.owned(shard.rank, shard.size)
    param = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
    grad = torch.empty(layout.size, dtype=exact, device=first.device)
    for slot, p in zip(layout.slots, params, strict=True):
        place = slice(slot.start, slot.start + slot.numel)
        if fill is None:
            param[place].copy_(p.data.flatten())
        p.data = param[place].view(p.shape)
        p.main_grad = grad[place].view(p.shape)
        if fill is not None:
            fill(p)
    mine = slice(*owned)
    bucket = FlatBucket(layout, params, owned, param, grad, param[mine], grad[mine], transient, shard=shard, replica=replica)
    if stage >= 2:
        bucket.grad_shard = torch.empty(owned[1] - owned[0], dtype=exact, device=first.device)
        transient.add(grad.nbytes)
        free(grad, transient)
    else:
        grad.zero_()
    if stage == 3:
        bucket.param_shard = param[mine].clone()
        transient.add(param.nbytes)
        free(param, transient)
        bucket.current = False
    return bucket


def free(flat: torch.Tensor, transient: Transient) -> None:
    """Give a buffer's memory back, if it has any; its views stay valid objects."""
    if is_there(flat):
        transient.add(-flat.nbytes)
        flat.untyped_storage().resize_(0)


def bring(flat: torch.Tensor, transient: Transient) -> None:
    """Give a buffer memory again, uninitialised, if it has none."""
    if not is_there(flat):
        flat.untyped_storage().resize_(flat.nbytes)
        transient.add(flat.nbytes)


def is_there(flat: torch.Tensor) -> bool:
    return flat.untyped_storage().size() > 0
