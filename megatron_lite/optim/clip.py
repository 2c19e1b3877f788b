"""The global gradient norm, each parameter counted once, and the clip coefficient."""

from __future__ import annotations

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.optim.flat import FlatBucket

ROW = 64  # so few squares lose nothing in fp32


def owned_spans(bucket: FlatBucket) -> list[tuple[int, int]]:
    """What this rank counts: not the copies that another tp rank owns, not a second copy that another place owns."""
    return bucket.spans(lambda param, box: box.owned and not param.shard.tied)


def other_spans(bucket: FlatBucket) -> list[tuple[int, int]]:
    """The copies that another rank counts."""
    return bucket.spans(lambda param, box: not box.owned or param.shard.tied)


def square_sum(buckets: list[FlatBucket], of: str, *axes: Axis, experts: tuple[Axis, ...] = ()) -> torch.Tensor:
    """Sum of squares over all ranks of `axes` of the owned part of each bucket's `of` ("grad" or "param"): fp64 scalar.
    `axes`: tp x pp, and the one that ZeRO shards over; `experts`: the same for buckets of experts, and ep, where there is one.

    Exact to fp32 rounding whatever the size: torch's own fp32 norm of a few million values on CPU is off by 1e-4.
    """
    total = _owned_sum([b for b in buckets if not (experts and b.expert)], of, buckets[0].grad.device)
    for axis in axes:
        comm.all_reduce(total, axis)
    if experts:
        apart = _owned_sum([b for b in buckets if b.expert], of, total.device)
        for axis in experts:
            comm.all_reduce(apart, axis)
        total += apart
    return total


def _owned_sum(buckets: list[FlatBucket], of: str, device: torch.device) -> torch.Tensor:
    """This rank's part."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        flat = bucket.grad_shard if of == "grad" else bucket.param_shard
        for start, end in owned_spans(bucket):
            total += _square_sum(flat[start:end])
        for start, end in other_spans(bucket):
            total += 0.0 * _square_sum(flat[start:end])  # nothing, or NaN if this rank's copy alone is not finite
    return total


def _square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a 1-D tensor: norms of ROW values in (at least) fp32, their squares added in fp64."""
    exact = torch.promote_types(flat.dtype, torch.float32)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=exact)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=exact)
    return rows.double().square().sum() + rest.double().square()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)); 1 when clipping is off (max_norm 0)."""
    if max_norm == 0.0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
