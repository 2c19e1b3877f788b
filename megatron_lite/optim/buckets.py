"""Where each parameter lies in the flat buffers: arithmetic only.

A bucket holds the parameters of one or more units (a transformer layer, the embedding, the output layer) in reverse order
of use, the order in which their gradients become ready. Every parameter starts at a multiple of ALIGN elements, and the
bucket's end is padded so that the data-parallel ranks divide it evenly: rank r owns [r * size / n, (r + 1) * size / n),
whatever parameters lie there. The layout follows from shapes, order and rank count alone, so all ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # elements: 256 bytes in fp32, so that vector loads and slices of a parameter are aligned


@dataclass(frozen=True)
class Slot:
    """Parameter `index` (of the list given to `layout`) occupies [start, start + numel) of its bucket."""

    index: int
    start: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    slots: tuple[Slot, ...]
    size: int

    def owned(self, rank: int, ranks: int) -> tuple[int, int]:
        """[start, end) of this bucket that `rank` of `ranks` owns under ZeRO."""
        part = self.size // ranks
        return rank * part, (rank + 1) * part


def layout(units: Sequence[Sequence[tuple[int, int]]], ranks: int, bucket_size: int | None = None) -> list[Bucket]:
    """Buckets of `units` = lists of (parameter index, numel) in order of use.

    Units are taken in reverse, and neighbours share a bucket while it stays within `bucket_size` elements; None gives
    every unit its own. The first and last unit never share, so that a tied embedding lies alone on both of its stages.
    """
    buckets: list[Bucket] = []
    pending: list[tuple[int, int]] = []
    multiple = ALIGN * ranks

    def close() -> None:
        slots, at = [], 0
        for index, numel in pending:
            slots.append(Slot(index, at, numel))
            at += -(-numel // ALIGN) * ALIGN
        if pending:
            buckets.append(Bucket(tuple(slots), -(-at // multiple) * multiple))
        pending.clear()

    order = list(range(len(units)))[::-1]
    for unit in order:
        alone = unit in (0, len(units) - 1) or bucket_size is None
        filled = sum(n for _, n in pending) + sum(n for _, n in units[unit])
        if pending and (alone or filled > bucket_size):
            close()
        pending.extend(reversed(units[unit]))
        if alone:
            close()
    close()
    return buckets


def runs(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted [start, end) spans with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
