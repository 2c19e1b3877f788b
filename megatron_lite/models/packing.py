"""Documents packed into one sample: positions that start over, and attention that stays inside.

             keys   a b c # d e # f              starts of a row   0 0 0 0 4 4 4 7
    queries  a      x
             b      x x                          A query at i sees the keys from starts[i] to i. The rows from one block of
             c      x x x                        queries on need no key before the earliest start in it, over the batch:
             #      x x x x                      what lies left of that is never multiplied. What is left to be masked lies
             d              x                    within the block's own keys, and is made block by block and thrown away.
             e              x x
             #              x x x
             f                    x

Built once for each microbatch, on every rank, from what the loader found; see data/documents.py. `starts` are places in the
whole sample, so queries may be cut along the sequence while keys keep their places.
Shapes: b rows, s sequence.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch


class Documents:
    """Which keys each query of a microbatch sees. `starts` int64 [b, s] on the host, starts[:, 0] = 0, never falling in a
    row: the work is planned there, so that no kernel is waited for; `device` is where it is done."""

    def __init__(self, starts: torch.Tensor, device: torch.device):
        self.on_host, self.starts = starts, starts.to(device, non_blocking=True)
        self.earliest: list[int] = starts.amin(0).tolist()  # over the rows
        self.latest: list[int] = starts.amax(0).tolist()

    def first_key(self, query: int) -> int:
        """The first key that any row's query `query`, or one behind it, sees."""
        return self.earliest[query]

    def mask(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor | None:
        """To be added to the scores of queries begin..end and the n first of their keys: -inf where a key lies before the
        query's document, else 0.   [b, end - begin, n]; None where no query has such a key. n stays below the block's keys."""
        first, last = self.earliest[begin], self.latest[end - 1]
        if first == last:
            return None
        keys = torch.arange(first, last, device=self.starts.device)
        before = keys < self.starts[:, begin:end, None]
        return torch.zeros(before.shape, dtype=dtype, device=keys.device).masked_fill_(before, float("-inf"))

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document, row after row; together b s."""
        b, s = self.on_host.shape
        begins = (self.on_host == torch.arange(s)).flatten().nonzero().flatten()
        return torch.diff(begins, append=torch.tensor([b * s])).tolist()


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
