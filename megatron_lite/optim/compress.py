"""Low-rank gradient reduction (PowerSGD; Vogels et al. 2019, arXiv 1905.13727): arithmetic only, no communication.

A rank's gradient matrix M [rows, cols], with what earlier steps left out of it (its error memory E) added, is reduced as

    P = sum over ranks of (M + E) Q        Q [cols, R]: the last step's, orthonormal     message 1: R x rows
    P orthonormal                                                                        on every rank alike
    S = (M + E)^T P;  Q = sum over ranks of S                                            message 2: R x cols
    applied P Q^T,  kept E = M + E - P S^T

R (rows + cols) elements travel instead of rows x cols. Summed over the ranks, applied = sum of M + E before - E after:
nothing is lost, some of it comes later. Two differences from the paper: Q is made orthonormal, too (in fp32, columns that
shrink step by step would lose their directions; and rank R = min(rows, cols) is then exact), and E is what this rank's own
matrix has outside P rather than its distance from the mean, whose sum is the same.

Gradients are sums over the tokens of the global batch (times fp16's loss scale), divided at the very end. E is kept in
that unit without the loss scale, so it goes on when the scale moves; what a step with more tokens left out weighs more.
Vectors, and matrices that would not become smaller, travel as they are in message 1.
Ranks that compute alike stay alike: all arithmetic on summed values is the same operations on the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lite.comm.mesh import Axis
from megatron_lite.optim.buckets import Slot
from megatron_lite.parallel.shard import seed_of


@dataclass(frozen=True)
class Compression:
    """`rank` R from iteration `start` on, over `axis`; `agree` are the ranks that step or skip together with different
    parts of the model."""

    rank: int
    start: int
    axis: Axis
    agree: Axis


class Matrix(NamedTuple):
    """A matrix at `start` of a bucket, reduced with rank `rank`."""

    name: str
    start: int
    rows: int
    cols: int
    rank: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """It as a view [rows, cols] of a flat buffer of the bucket's layout."""
        return flat[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)


def worthwhile(rows: int, cols: int, rank: int) -> bool:
    """Whether R (rows + cols) < rows x cols."""
    return rank * (rows + cols) < rows * cols


def divide(slots: Sequence[Slot], params: Sequence[torch.Tensor], rank: int) -> tuple[list[Matrix], list[tuple[int, int]]]:
    """(matrices to compress, [start, end) of all else) of a bucket. A matrix has its first dim as rows."""
    matrices, others = [], []
    for slot, param in zip(slots, params, strict=True):
        rows = param.shape[0]
        cols = slot.numel // rows
        if param.dim() > 1 and worthwhile(rows, cols, rank):
            matrices.append(Matrix(param.shard.name, slot.start, rows, cols, min(rank, rows, cols)))
        else:
            others.append((slot.start, slot.start + slot.numel))
    return matrices, others


def elements(matrices: Sequence[Matrix], others: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Elements of the two messages of a step."""
    exact = sum(end - start for start, end in others)
    return exact + sum(m.rank * m.rows for m in matrices), sum(m.rank * m.cols for m in matrices)


def orthonormal(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns [n, r], n >= r, that span x's. Householder's QR: where x's columns depend on each other, or are
    zero, it adds columns, the same ones on every rank. Not finite where x is not."""
    return torch.linalg.qr(x).Q


def drawn(matrix: Matrix, like: torch.Tensor) -> torch.Tensor:
    """The first Q [cols, R], from the parameter's name: the same on all ranks."""
    generator = torch.Generator().manual_seed(seed_of(0, f"{matrix.name}:compression"))
    return torch.randn(matrix.cols, matrix.rank, generator=generator, dtype=torch.float64).to(like)


class LowRank:
    """What a rank keeps of one bucket from step to step, and between the two messages of a step.

    error  [size]           E of every matrix, zero elsewhere; in the gradients' dtype, without loss scale
    q      [sum of cols R]  Q of every matrix, one behind the other
    """

    def __init__(self, slots: Sequence[Slot], params: Sequence[torch.Tensor], grad: torch.Tensor, rank: int):
        self.matrices, self.others = divide(slots, params, rank)
        self.error, self.q = torch.zeros_like(grad), grad.new_empty(0)
        self._left = self._own = self._right = self.q  # message 1; S; message 2
        self.halfway = False  # message 2 is under way
        self.forget()

    def forget(self) -> None:
        """Start anew: nothing left out so far."""
        self.error.zero_()
        first = [drawn(matrix, self.error).flatten() for matrix in self.matrices]
        self.q = torch.cat(first) if first else self.error.new_empty(0)

    def begin(self, grad: torch.Tensor, scale: float) -> None:
        """A step's gradients are added up on top of what earlier steps left out."""
        torch.mul(self.error, scale, out=grad)

    def left(self, grad: torch.Tensor) -> torch.Tensor:
        """Message 1: every P of this rank, then all that is not compressed."""
        self._left = grad.new_empty(elements(self.matrices, self.others)[0])
        for matrix, p, q in zip(self.matrices, self._ps(), self._qs(self.q), strict=True):
            torch.mm(matrix.of(grad), orthonormal(q), out=p)
        for (start, end), part in self._parts():
            part.copy_(grad[start:end])
        return self._left

    def right(self, grad: torch.Tensor) -> torch.Tensor:
        """Message 2, after the sum of message 1: every S of this rank."""
        self._own = torch.empty_like(self.q)
        for matrix, p, s in zip(self.matrices, self._ps(), self._qs(self._own), strict=True):
            p.copy_(orthonormal(p))
            torch.mm(matrix.of(grad).t(), p, out=s)
        self._right, self.halfway = self._own.clone(), True
        return self._right

    def finite(self) -> torch.Tensor:
        """Whether both sums are finite: a boolean scalar, the same on all ranks of the axis."""
        return torch.isfinite(self._left).all() & torch.isfinite(self._right).all()

    def settle(self, grad: torch.Tensor, taken: bool, scale: float) -> None:
        """After the sum of message 2: grad = what is applied, the rest goes to the memory. A step that is not `taken`
        leaves memory and Q as they were, and a gradient that is not finite."""
        if not taken:
            grad.fill_(torch.nan)
        else:
            for matrix, p, s, q in zip(self.matrices, self._ps(), self._qs(self._own), self._qs(self._right), strict=True):
                m = matrix.of(grad)
                error = matrix.of(self.error)
                torch.addmm(m, p, s.t(), alpha=-1.0, out=error)
                error.div_(scale)
                torch.mm(p, q.t(), out=m)
            for (start, end), part in self._parts():
                grad[start:end].copy_(part)
            self.q = self._right
        self._left = self._own = self._right = self.q
        self.halfway = False

    def bytes(self) -> int:
        return self.error.nbytes + self.q.nbytes

    def _ps(self) -> list[torch.Tensor]:
        """Every P [rows, R] as a view of message 1."""
        return _cut(self._left, [(m.rows, m.rank) for m in self.matrices])

    def _qs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Every Q or S [cols, R] as a view of their buffer."""
        return _cut(flat, [(m.cols, m.rank) for m in self.matrices])

    def _parts(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """([start, end) of the bucket, its place in message 1) of all that is not compressed."""
        at = sum(m.rank * m.rows for m in self.matrices)
        return list(zip(self.others, _cut(self._left[at:], [(end - start,) for start, end in self.others]), strict=True))


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Views of these shapes, one behind the other from the start."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
