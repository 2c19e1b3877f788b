"""Context parallelism: which part of each sequence a rank holds, and what of another part its queries see.

A causal query sees what lies before it, so equal neighbouring parts are unequal work. The sequence is cut into 2c chunks, and
rank r of c owns chunks r and 2c-1-r (zigzag), an early one and a late one:

    c = 2, chunks 0 1 2 3          keys of rank 0   0 3        keys of rank 1   1 2
    queries of rank 0    0         causal over both            nothing
                         3         (own keys, in order)        both, no mask
    queries of rank 1    1         the first, no mask          causal over both
                         2         the first, no mask          (own keys, in order)

Against its own keys a rank does one causal square, against any other's two chunks x chunks without a mask: the first of these
keys for all its queries if they come from a lower rank, all of them for its second chunk if from a higher one. Every rank does
the same work in every step of a ring. Contiguous parts leave 43 % of four ranks' time idle in lockstep.

Labels are shifted before the cut, positions are those of the whole sequence. Neighbouring ranks own neighbouring chunks: the
chunks of u of them, put in order, are the zigzag part of one rank of c/u. So heads can be traded among u ranks (Ulysses) and
keys sent around c/u.

Source: Liu et al. 2023 (arXiv 2310.01889, ring), Jacobs et al. 2023 (arXiv 2309.14509, Ulysses).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lite.comm.mesh import Axis, Mesh


class Places(NamedTuple):
    """The places in the whole sequence that a local tensor holds, rising: runs of neighbours, (first, length)."""

    runs: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(length for _, length in self.runs)

    def before(self, place: int) -> int:
        """How many of the held places lie before `place`."""
        return sum(min(max(place - first, 0), length) for first, length in self.runs)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """int64, one for each token held."""
        return torch.cat([torch.arange(first, first + length, device=device) for first, length in self.runs])

    def starts(self) -> Iterator[tuple[int, int, int]]:
        """(local index, place, length) of each run."""
        at = 0
        for first, length in self.runs:
            yield at, first, length
            at += length


def zigzag(rank: int, size: int, length: int) -> Places:
    """What rank `rank` of `size` holds of a sequence of `length`, which 2 x size divides."""
    chunk = length // (2 * size)
    return Places(((rank * chunk, chunk), ((2 * size - 1 - rank) * chunk, chunk)))


class Piece(NamedTuple):
    """Queries and keys, as local slices, that all see each other; `causal`: they are at equal places and each query sees the
    keys up to its own."""

    queries: slice
    keys: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key that it sees."""
        n, m = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return n * (n + 1) // 2 if self.causal else n * m


def pieces(queries: Places, keys: Places) -> list[Piece]:
    """What causal queries see of keys, in as few pieces as can be; the causal ones first. A run of queries whose own places
    are among the keys finds them as one run, or not at all."""
    if queries == keys:
        whole = slice(0, queries.count)
        return [Piece(whole, whole, True)]
    causal, free = [], []
    for at, first, length in queries.starts():
        below, up_to = keys.before(first), keys.before(first + length)
        rows = slice(at, at + length)
        if up_to > below:
            causal.append(Piece(rows, slice(below, up_to), True))
        if below and free and free[-1].keys.stop == below and free[-1].queries.stop == at:
            free[-1] = free[-1]._replace(queries=slice(free[-1].queries.start, rows.stop))
        elif below:
            free.append(Piece(rows, slice(0, below), False))
    return causal + free


@dataclass(frozen=True)
class ContextParallel:
    """Who shares a sequence, and how attention sees the whole of it: `kinds` names the way for all layers, or for each.

    axis    all ranks of a sequence, in the order of the cut
    a2a     neighbours that trade sequence for heads under a2a+p2p
    ring    one rank of each such group, around which keys and values go
    """

    axis: Axis
    a2a: Axis
    ring: Axis
    kinds: tuple[str, ...]

    @staticmethod
    def of(mesh: Mesh, kinds: tuple[str, ...]) -> ContextParallel | None:
        """None where no sequence is cut."""
        return ContextParallel(mesh.cp, mesh.cp_a2a, mesh.cp_ring, kinds) if mesh.cp.size > 1 else None

    def kind(self, layer: int) -> str:
        return self.kinds[layer if len(self.kinds) > 1 else 0]

    def places(self, local: int) -> Places:
        """Of this rank's tokens, `local` of them."""
        return zigzag(self.axis.rank, self.axis.size, local * self.axis.size)

    def all_places(self, local: int) -> Places:
        """Of the whole sequence."""
        return Places(((0, local * self.axis.size),))


def own_part(x: torch.Tensor, axis: Axis, dim: int = 1) -> torch.Tensor:
    """This rank's two chunks of x along `dim`.   [b, s] -> [b, s/cp]"""
    if axis.size == 1:
        return x
    chunks = x.chunk(2 * axis.size, dim)
    return torch.cat([chunks[axis.rank], chunks[-1 - axis.rank]], dim)


def in_order(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """The parts of all c ranks put in the order of the sequence.   [c, ..., s/c at dim, ...] -> [..., s, ...]"""
    first, second = parts.chunk(2, dim)
    chunks = torch.cat([first, second.flip(0)])  # [2c, ..., s/2c, ...]
    return chunks.movedim(0, dim - 1).flatten(dim - 1, dim)


def in_parts(whole: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """`in_order` undone.   [..., s, ...] -> [c, ..., s/c at dim, ...]"""
    chunks = whole.unflatten(dim - 1, (2 * size, -1)).movedim(dim - 1, 0)
    first, second = chunks.chunk(2)
    return torch.cat([first, second.flip(0)], dim)
