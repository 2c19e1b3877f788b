"""Fill-in-the-middle (Bavarian et al. 2022, arXiv 2207.14255): a document is cut in three, and its middle comes last.

    P M S        the document, cut at two places drawn at random
    p P s S m M  prefix first ("PSM")       p, s, m mark prefix, suffix and middle
    p s S m P M  suffix first ("SPM")

A sample may hold several documents, or a part of one: each is drawn for and turned by itself, its end-of-document token
stays behind it. Three marks make a document longer, so the sample's end is cut off: its length is kept. As in Megatron-LM,
but the cuts fall between tokens, not between characters, so that no tokenizer is needed and nothing is tokenized twice.
"""

from typing import NamedTuple

import numpy as np

from megatron_lite.data.indexed import DataError
from megatron_lite.data.loader import Samples
from megatron_lite.data.samples import MASK

STREAM = 0xF1  # keeps these draws apart from others of the same seed and sample number


class Fim(NamedTuple):
    """How documents are turned: the share `rate` of them, of those the share `spm_rate` suffix first, and the marks' ids."""

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    eod: int


def fill_in_the_middle(tokens: np.ndarray, fim: Fim, random: np.random.Generator) -> np.ndarray:
    """int64 [n] -> int64 [n], each document turned or not as `random` says."""
    pieces = []
    for document in np.split(tokens, np.flatnonzero(tokens == fim.eod) + 1):
        end = len(document) - int(len(document) > 0 and document[-1] == fim.eod)
        if end and random.random() < fim.rate:
            pieces += [*_turned(document[:end], fim, random), document[end:]]
        else:
            pieces.append(document)
    return np.concatenate(pieces)[: len(tokens)]


def _turned(text: np.ndarray, fim: Fim, random: np.random.Generator) -> list[np.ndarray]:
    """The parts of one document in their new order. Each of its three may be empty."""
    first, second = np.sort(random.integers(0, len(text) + 1, size=2))
    before, within, behind = text[:first], text[first:second], text[second:]
    prefix, middle, suffix = (np.array([mark], text.dtype) for mark in (fim.prefix, fim.middle, fim.suffix))
    if random.random() < fim.spm_rate:
        return [prefix, suffix, behind, middle, before, within]
    return [prefix, before, suffix, behind, middle, within]


class FimSamples:
    """Samples with documents turned. What is drawn depends on (seed, sample number) alone: not on layout or restarts."""

    def __init__(self, samples: Samples, fim: Fim, seed: int, vocab_size: int):
        marks = {"prefix": fim.prefix, "middle": fim.middle, "suffix": fim.suffix}
        for name, mark in marks.items():
            if not 0 <= mark < vocab_size or mark == fim.eod:
                raise DataError(f"--fim-{name}-id {mark}: expected an id from 0 to {vocab_size - 1} that is not the end of a "
                                f"document ({fim.eod})")  # fmt: skip
        self.samples, self.fim, self.seed = samples, fim, seed & MASK

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [s + 1]"""
        random = np.random.default_rng([self.seed, STREAM, global_sample])
        return fill_in_the_middle(self.samples[global_sample], self.fim, random)
