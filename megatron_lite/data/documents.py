"""Where the documents in a sample start, and what starts over there.

    tokens      a b c # d e # # f g        # is the end of a document; it belongs to the document it ends
    starts      0 0 0 0 4 4 4 7 8 8        --reset-attention-mask: a token sees nothing before its document's start
    positions   0 1 2 3 0 1 2 0 0 1        --reset-position-ids: position in the window - start

A sample is a window of the stream of all documents, so its first tokens may be the rest of a document: that counts as
starting at 0. The information is made where tokens are read, which every rank does, and so never travels.
"""

from typing import NamedTuple

import numpy as np
import torch


def document_starts(tokens: np.ndarray, eod: int) -> np.ndarray:
    """For each token the place where its document starts in the row.   [b, s] -> int64 [b, s]"""
    starts = np.zeros(tokens.shape, np.int64)
    rows, ends = np.nonzero(tokens[:, :-1] == eod)
    starts[rows, ends + 1] = ends + 1
    return np.maximum.accumulate(starts, axis=1)


class Resets(NamedTuple):
    """What starts over after each token `eod`."""

    eod: int
    positions: bool  # --reset-position-ids
    attention: bool  # --reset-attention-mask

    def of(self, tokens: np.ndarray) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(positions, starts) of tokens [b, s], each int64 [b, s], or None where nothing is reset."""
        starts = document_starts(tokens, self.eod)
        positions = np.arange(tokens.shape[1]) - starts
        return (torch.from_numpy(positions) if self.positions else None,
                torch.from_numpy(starts) if self.attention else None)  # fmt: skip
