"""Validation sets: several by name, and a set as a whole."""

import re
from collections.abc import Sequence

import numpy as np

from megatron_lite.data.blend import BlendedSamples
from megatron_lite.data.indexed import DataError

NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.*)", re.DOTALL)


def read_sets(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`web=A code=0.7 B 0.3 C` -> {"web": ("A",), "code": ("0.7", "B", "0.3", "C")}; words without a name are one set, "".

    A path that looks like a name is written with its folder, ./lang=en. Raises DataError in words.
    """
    sets: dict[str, list[str]] = {}
    name = ""
    for word in words:
        named = NAMED.fullmatch(word)
        if named:
            name, word = named.groups()
            if name in sets:
                raise DataError(f"two validation sets are called {name}; give each a name of its own")
            sets[name] = []
        elif not name:
            sets.setdefault("", [])
        if word:
            sets[name].append(word)
    if "" in sets and len(sets) > 1:
        raise DataError(f"{' '.join(sets[''])} stands before the first name; name every set, as in web=A code=B")
    empty = next((name for name, own in sets.items() if not own), None)
    if empty is not None:
        raise DataError(f"the validation set {empty} names no data; give a prefix after {empty}=")
    return {name: tuple(own) for name, own in sets.items()}


class EachOnce:
    """Every sample that some sources have, once: source after source, each in the order of its first epoch."""

    def __init__(self, samples):
        self.sources = samples.sources if isinstance(samples, BlendedSamples) else [samples]
        self.first = np.cumsum([0, *map(len, self.sources)])  # int64 [sources + 1], number of each source's first sample

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, sample: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        source = int(np.searchsorted(self.first, sample, side="right")) - 1
        return self.sources[source][sample - int(self.first[source])]
