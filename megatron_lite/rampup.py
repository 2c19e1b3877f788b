"""How many samples a step takes: a pure function of the samples consumed before it.

    --global-batch-size 32 --rampup-batch-size 8 8 600     (32 - 8) / 8 = 3 increments, one every 600 / 3 = 200 samples

    consumed    0 ... 199    200 ... 399    400 ... 599    600 ...
    batch       8            16             24             32

A step that begins below a border may end beyond it. Borders are Megatron's, in whole numbers: at `consumed` there were
floor(consumed * increments / samples) increments.
"""

from collections.abc import Iterator
from typing import NamedTuple


class BatchSizes(NamedTuple):
    """Samples per step of a run. `ramp` = (start, increment, samples) of `--rampup-batch-size`; None: always `full`."""

    full: int
    ramp: tuple[int, int, int] | None = None

    @property
    def sizes(self) -> range:
        """Every batch size of the run, rising."""
        return range(self.ramp[0], self.full + 1, self.ramp[1]) if self.ramp else range(self.full, self.full + 1)

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed`."""
        if self.ramp is None:
            return self.full
        start, increment, samples = self.ramp
        increments = (self.full - start) // increment
        return min(self.full, start + increment * (consumed * increments // samples))

    def steps(self, samples: int) -> int:
        """Whole steps that `samples` last for; what is left of them is not trained on."""
        found = 0
        for step, consumed, size in self._stretches():
            if consumed > samples:
                break
            found = step + (samples - consumed) // size
        return found

    def samples(self, steps: int) -> int:
        """Samples of the first `steps` steps."""
        found = 0
        for step, consumed, size in self._stretches():
            if step > steps:
                break
            found = consumed + (steps - step) * size
        return found

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """(step, samples consumed before it, batch size) of each step from which on the size may be another. Of entries with
        the same step the last one counts: a step can be longer than an increment lasts."""
        sizes, step, consumed = self.sizes, 0, 0
        for level, size in enumerate(sizes, 1):
            yield step, consumed, size
            if level < len(sizes):
                border = -(-level * self.ramp[2] // (len(sizes) - 1))  # the first sample count with `level` increments
                steps = max(0, -(-(border - consumed) // size))
                step, consumed = step + steps, consumed + steps * size


def is_ramp(ramp: tuple[int, ...] | None, full: int | None) -> bool:
    """Whether these numbers of `--rampup-batch-size` lead to `full` in whole increments."""
    if ramp is None or full is None or len(ramp) != 3 or min(ramp) < 1:
        return False
    return ramp[0] < full and (full - ramp[0]) % ramp[1] == 0
