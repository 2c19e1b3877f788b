"""Several versions of a rank's weights at once, for asynchronous pipelines (schedules/asynchronous.py).

    newest    bucket.param: where the optimizer writes, what is saved and evaluated
    older     copies, made just before the update that would overwrite a version still in use
    bound     the version that the parameters point at: every `param.data` is a view of one of these

Layers read their weight through the parameter, in the backward too, and never save it for autograd: whichever version is
bound when an action runs is the one it uses.
"""

from __future__ import annotations

import torch

from megatron_lite.optim.adamw import BucketState
from megatron_lite.optim.ddp import FlatBucket

Flats = list[torch.Tensor]  # one flat tensor per bucket


class WeightVersions:
    """The versions of the parameters of `buckets`, numbered by the updates made since this object was."""

    def __init__(self, buckets: list[FlatBucket]):
        self.buckets, self.newest, self.bound = buckets, 0, 0
        self.copies: dict[int, Flats] = {}
        self.spare: list[Flats] = []

    @property
    def allocated(self) -> int:
        """Most versions there was room for at once, the newest included."""
        return 1 + len(self.copies) + len(self.spare)

    def bind(self, version: int) -> None:
        """Point the parameters at a version that is kept."""
        if version != self.bound:
            self.point([b.param for b in self.buckets] if version == self.newest else self.copies[version])
            self.bound = version

    def point(self, flats: Flats) -> None:
        """Point the parameters at any weights of the buckets' layout; `bind` calls them none of its versions."""
        for bucket, flat in zip(self.buckets, flats, strict=True):
            for slot, param in zip(bucket.layout.slots, bucket.params, strict=True):
                param.data = flat[slot.start : slot.start + slot.numel].view(param.shape)
        self.bound = -1

    def keep_newest(self) -> None:
        """Copy the newest version, before an update overwrites it."""
        flats = self.spare.pop() if self.spare else [torch.empty_like(b.param) for b in self.buckets]
        for bucket, flat in zip(self.buckets, flats, strict=True):
            flat.copy_(bucket.param)
        self.copies[self.newest] = flats

    def updated(self) -> None:
        """The optimizer has written the next version."""
        here = self.bound == self.newest
        self.newest += 1
        if here:  # the memory is the same, its version another
            self.bound = self.newest

    def drop(self, version: int) -> None:
        """No action to come uses this version: its memory is free for another."""
        if version in self.copies:
            self.spare.append(self.copies.pop(version))


class WeightVelocity:
    """delta, the running mean of what an update changes: delta = gamma * delta + (1 - gamma) * (w_new - w_old).

    In the precision of the masters, one value per weight. It starts at zero.
    """

    def __init__(self, states: list[BucketState], gamma: float):
        self.states, self.gamma = states, gamma
        self.deltas = [torch.zeros_like(state.master) for state in states]
        self.estimates = [torch.empty_like(state.bucket.param) for state in states]

    def before_update(self) -> None:
        for delta, state in zip(self.deltas, self.states, strict=True):
            delta.mul_(self.gamma).sub_(state.master, alpha=1.0 - self.gamma)

    def after_update(self) -> None:
        for delta, state in zip(self.deltas, self.states, strict=True):
            delta.add_(state.master, alpha=1.0 - self.gamma)

    def earlier(self, updates: int) -> Flats:
        """An estimate of the weights `updates` updates ago: w - updates * delta, in the model's dtype. Overwrites the last."""
        for delta, state, out in zip(self.deltas, self.states, self.estimates, strict=True):
            out.copy_(torch.sub(state.master, delta, alpha=updates))
        return self.estimates
