"""Documents packed into one sample: positions that start over, and attention that stays inside.

             keys   a b c # d e # f              starts of a row   0 0 0 0 4 4 4 7
    queries  a      x
             b      x x                          The query at i sees the keys from starts[i] to i. A block of queries
             c      x x x                        needs no key before the start of its first query: what lies left of
             #      x x x x                      that is never multiplied. A mask is needed only where a document starts
             d              x                    within the block; it is made for that block and thrown away.
             e              x x
             #              x x x
             f                    x

Built once for each microbatch, on every rank, from what the loader found; see data/documents.py. Starts are places in the
whole sample, so queries may be cut along the sequence while keys stay where they are.
Shapes: b rows, s sequence.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch


class Documents:
    """Which keys each query of a microbatch sees: `starts` int64 [b, s], 0 at first and never falling in a row.

    On the host too, where the work is planned, so that no kernel is waited for; on `device` masks are made.
    """

    def __init__(self, starts: torch.Tensor, device: torch.device):
        self.on_host = starts.numpy()
        self.starts = starts.to(device, non_blocking=True)

    def first_key(self, row: int, query: int) -> int:
        """The first key that a query, or one behind it, sees."""
        return int(self.on_host[row, query])

    def mask(self, row: int, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor | None:
        """To be added to the scores of queries begin..end and the n first of their keys, those before the last document of
        the block: -inf where the key lies before the query's document, else 0.   [end - begin, n]; None where n is 0."""
        first, last = self.first_key(row, begin), self.first_key(row, end - 1)
        if first == last:
            return None
        keys = torch.arange(first, last, device=self.starts.device)
        before = self.hidden(row, begin, end, keys)
        return torch.zeros(before.shape, dtype=dtype, device=keys.device).masked_fill_(before, float("-inf"))

    def hidden(self, row: int, begin: int, end: int, keys: torch.Tensor) -> torch.Tensor:
        """Whether the keys at these places lie before the documents of queries begin..end.   [n] -> bool [end - begin, n]"""
        return keys < self.starts[row, begin:end, None]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document, row after row; together b s."""
        begins = np.flatnonzero(self.on_host == np.arange(self.on_host.shape[1]))
        return np.diff(begins, append=self.on_host.size).tolist()


class Packing(NamedTuple):
    """What the documents of a microbatch change in the model."""

    positions: torch.Tensor | None = None  # int64 [b, s]; None: every row counts 0, 1, 2, ...
    documents: Documents | None = None  # None: a query sees everything before it


NOT_PACKED = Packing()


def packing_of(positions: torch.Tensor | None, starts: torch.Tensor | None, device: torch.device) -> Packing:
    """From a batch of the loader, int64 [b, s] each."""
    if positions is None and starts is None:
        return NOT_PACKED
    return Packing(None if positions is None else positions.to(device, non_blocking=True),
                   None if starts is None else Documents(starts, device))  # fmt: skip
