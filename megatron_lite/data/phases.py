"""A blend that changes during the run: a text file says from which sample on which blend is read (--data-schedule).

    # from sample   what --data-path would be given
    0               0.9 data/web 0.1 data/books
    2000000         0.5 data/web 0.4 data/books 0.1 data/code

    sample n  ->  its phase p (start_p <= n < start_{p+1})  ->  blend_p[n - start_p] = (source, j)
              ->  sample j + (how often the source was read in the phases before p) of that source

So every phase keeps its weights within one sample at every prefix of it, and a source that several phases name goes on where
the phase before left it: nothing is read twice before everything was read once. The counts before each phase are sums of
`Blend.counts`, computed when the file is opened; a lookup is a search among the phases and two array reads.
"""

import bisect
import shlex
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from megatron_lite.data.blend import Blend, read_blend, turns_per_period
from megatron_lite.data.indexed import DataError


class Phase(NamedTuple):
    """From sample `start` on, `prefixes` are mixed by `weights` (None: by size)."""

    start: int
    weights: list[Fraction] | None
    prefixes: list[str]


def read_phases(path: str) -> list[Phase]:
    """The phases of a schedule file. Raises DataError naming the line and what was expected."""
    phases = []
    try:
        with open(path, encoding="utf-8") as file:
            lines = [(number, shlex.split(line, comments=True)) for number, line in enumerate(file, start=1)]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    for number, words in lines:
        if not words:
            continue
        where, start = f"{path}:{number}", words[0].replace("_", "")
        if not (start.isascii() and start.isdigit()) or len(words) < 2:
            raise DataError(f"{where}: expected the sample from which a blend is read, then the blend, such as: 0 0.7 A 0.3 B")
        if not phases and int(start) != 0:
            raise DataError(f"{where}: the first phase starts at sample {start}, expected 0")
        if phases and int(start) <= phases[-1].start:
            raise DataError(
                f"{where}: starts at sample {start}, expected one after {phases[-1].start}, where the phase before starts"
            )
        try:
            phases.append(Phase(int(start), *read_blend(words[1:])))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    if not phases:
        raise DataError(f"{path}: names no phase, expected lines such as: 0 0.7 A 0.3 B")
    return phases


class PhasedSamples:
    """Samples of the sources that the phases name, mixed by the phase that a sample lies in; every source has its own epochs."""

    def __init__(self, phases: Sequence[Phase], open_source: Callable[[str, int], object]):
        """`open_source(prefix, number)` opens a source; they are numbered in the order in which the phases name them."""
        names = list(dict.fromkeys(prefix for phase in phases for prefix in phase.prefixes))
        self.sources = [open_source(name, number) for number, name in enumerate(names)]
        self.phases, self.starts = list(phases), [phase.start for phase in phases]
        self.members = [[names.index(prefix) for prefix in phase.prefixes] for phase in phases]
        sizes = [[len(self.sources[source]) for source in members] for members in self.members]
        self.turns = [turns_per_period(size if phase.weights is None else phase.weights)
                      for phase, size in zip(phases, sizes, strict=True)]  # fmt: skip
        self.blends = [Blend(turns) for turns in self.turns]
        self.before = [np.zeros(len(names), np.int64)]  # [sources] per phase: samples that were read before it
        for phase, end in enumerate(self.starts[1:]):
            self.before.append(self._counts(phase, end - self.starts[phase]))

    def _counts(self, phase: int, samples: int) -> np.ndarray:
        """int64 [sources]: how many samples of each were read once `samples` of a phase are."""
        counts = self.before[phase].copy()
        counts[self.members[phase]] += self.blends[phase].counts(samples)
        return counts

    def where(self, global_sample: int) -> tuple[int, int]:
        """(source, its sample number) of a sample."""
        if global_sample < 0:
            raise IndexError(f"sample {global_sample}: samples are numbered from 0")
        phase = bisect.bisect_right(self.starts, global_sample) - 1
        member, sample = self.blends[phase][global_sample - self.starts[phase]]
        source = self.members[phase][member]
        return source, int(self.before[phase][source]) + sample

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        source, sample = self.where(global_sample)
        return self.sources[source][sample]

    def describe(self, num_samples: int) -> str:
        """The phases with their shares, then a line per source: how often the run goes through it."""
        lines = [f"schedule of {len(self.phases)} blends, {num_samples:,} samples needed"]
        for phase, blend, turns in zip(self.phases, self.blends, self.turns, strict=True):
            shares = ", ".join(f"{turn / blend.period:.6f} {name}" for turn, name in zip(turns, phase.prefixes, strict=True))
            lines.append(f"  from sample {phase.start:,}: {shares}")
        last = max(0, bisect.bisect_left(self.starts, num_samples) - 1)
        counts = self._counts(last, num_samples - self.starts[last])
        lines += [f"  {source.describe(int(count))}" for source, count in zip(self.sources, counts, strict=True)]
        return "\n".join(lines)
