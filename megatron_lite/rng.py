"""Randomness without state: every random draw of a step is named, and its seed follows from the name.

    seed = hash(run seed, iteration, global microbatch, layer, site, role)

So a resumed run, a recomputed layer, and a run cut in another way draw what they should without anything to save or
restore. The role decides who agrees with whom:

    replicated   all tp ranks hold the same activation and must drop the same elements: the tp rank is not in the name
    sharded      each tp rank holds its own part (attention heads; everything under sequence parallel): it is

A context-parallel rank always holds tokens, or heads, of its own: its rank is in the name (rank 0's is that of no such axis).
So masks depend on how a sequence is cut, over cp as over tp under sequence parallel. Data-parallel replicas differ because
the global microbatch index differs. Weights have a stream of their own (parallel/shard.py), keyed by the parameter's name;
the data order another (data/samples.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lite.parallel.shard import seed_of

REPLICATED, SHARDED = "replicated", "sharded"


@dataclass(frozen=True)
class DropoutKey:
    """What the dropout of one microbatch is keyed by. `microbatch` counts over all data-parallel ranks of the step."""

    seed: int
    iteration: int
    microbatch: int
    tp_rank: int
    cp_rank: int = 0

    def generator(self, device: torch.device, layer: int, site: str, role: str) -> torch.Generator:
        """A fresh generator for one dropout site of one layer (-1 is the embedding)."""
        who = f"tp{self.tp_rank}" if role == SHARDED else "all"
        who += f"/cp{self.cp_rank}" if self.cp_rank else ""
        name = f"dropout/{self.iteration}/{self.microbatch}/{layer}/{site}/{role}/{who}"
        return torch.Generator(device=device).manual_seed(seed_of(self.seed, name))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p: float, generator: torch.Generator):
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - p, generator=generator)
        ctx.save_for_backward(keep)
        ctx.scale = 1.0 / (1.0 - p)
        return x * keep * ctx.scale

    @staticmethod
    def backward(ctx, dy):
        (keep,) = ctx.saved_tensors
        return dy * keep * ctx.scale, None, None


def dropout(x: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
    """Inverted dropout with an explicit generator; keeps one byte per element. No generator (evaluation) or p = 0: x."""
    if p == 0.0 or generator is None:
        return x
    return _Dropout.apply(x, p, generator)
