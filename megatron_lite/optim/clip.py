"""The global gradient norm, each parameter counted once, and the clip coefficient."""

from __future__ import annotations

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.optim.ddp import FlatBucket


def owned_spans(bucket: FlatBucket) -> list[tuple[int, int]]:
    """What this rank counts: not the copies that another tp rank owns, not the tied copy that another stage owns."""
    return bucket.spans(lambda param, box: box.owned and not param.shard.tied)


def square_sum(buckets: list[FlatBucket], of: str, axis: Axis) -> torch.Tensor:
    """Sum of squares over all ranks of `axis` of the owned part of each bucket's `of` ("grad" or "param"): fp64 scalar.

    Norms of the spans are taken in the tensor's precision (at least fp32) and their squares added in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=buckets[0].grad.device)
    for bucket in buckets:
        flat = getattr(bucket, of)
        exact = torch.promote_types(flat.dtype, torch.float32)
        for start, end in owned_spans(bucket):
            total += torch.linalg.vector_norm(flat[start:end], dtype=exact).double().square()
    return comm.all_reduce(total, axis)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)); 1 when clipping is off (max_norm 0)."""
    if max_norm == 0.0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
