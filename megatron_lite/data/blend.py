"""Several sources as one: which of them sample n comes from, and which of its own samples that is.

    weights w_i = a_i / D  ->  a period of D slots; source i gets its j-th turn (j = 1 .. a_i) in one of the slots
                               floor((j - 1) D / a_i) + 1 .. ceil(j D / a_i), in which an even flow would bring it

    sample n  ->  source = order[n % D],  its sample = (n // D) a_source + turn[n % D]

Turns are given slot by slot to the source whose window ends first (Liu and Layland's earliest deadline first; these
windows are those of proportionate-fair scheduling, Baruah et al. 1996, which one machine of full load always meets).
A turn inside its window means |samples of source i among the first n - n w_i| < 1 for every i and every n. The map is a
pure function of the weights: nothing but the number of consumed samples has to be stored, and one lookup reads two arrays.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megatron_lite.data.indexed import DataError

LONGEST = 1 << 18  # slots of a period; weights that need more are rounded to multiples of 1 / LONGEST
STRIPE = 1 << 14  # slots whose turns are listed at once


def read_blend(words: Sequence[str]) -> tuple[list[Fraction] | None, list[str]]:
    """`A`, `A B C` or `3 A 1 B` -> (weights, prefixes); weights None: by size. Raises DataError in words.

    A word that reads as a number is a weight. Weights need not add up to anything.
    """
    shape = "give one prefix, several prefixes, or a weight before every prefix, such as 0.7 A 0.3 B"
    numbers = [_number(word) for word in words]
    weights, prefixes = None, list(words)
    if any(number is not None for number in numbers):
        if len(words) % 2:
            raise DataError(f"{len(words)} words are no pairs of weight and prefix; {shape}")
        for place, number in enumerate(numbers):
            if (number is None) != (place % 2 == 1):
                what = "a weight" if number is None else "a prefix"
                raise DataError(f"word {place + 1}, {words[place]}, stands where {what} is expected; {shape}")
        for word, number in zip(words[::2], numbers[::2], strict=True):
            if not math.isfinite(number) or number <= 0:
                raise DataError(f"weight {word} is not a finite number above 0; leave out what is not to be read")
        weights, prefixes = [Fraction(word) for word in words[::2]], list(words[1::2])
    twice = next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None)
    if twice is not None:
        raise DataError(f"{twice} is named twice; name it once, with the sum of its weights")
    return weights, prefixes


def _number(word: str) -> float | None:
    try:
        return float(word) if not word.startswith("_") else None
    except ValueError:
        return None


def turns_per_period(weights: Sequence[Fraction | int]) -> list[int]:
    """a_i: whole numbers in the proportion of `weights`, exactly if they add up to at most LONGEST.

    Otherwise each weight is rounded to a multiple of 1 / LONGEST, at least one; the sum stays whole by largest remainders.
    """
    exact = [Fraction(weight) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [count // divisor for count in whole]
    total = sum(whole)
    if total <= LONGEST:
        return whole
    if len(whole) > LONGEST // 16:
        raise DataError(f"a blend of {len(whole)} sources, at most {LONGEST // 16} are possible; join some of them")
    counts = [max(1, count * LONGEST // total) for count in whole]
    rest = sorted(range(len(whole)), key=lambda i: counts[i] * total - whole[i] * LONGEST)  # what got too little first
    missing = LONGEST - sum(counts)
    for i in rest[:missing] if missing > 0 else ():
        counts[i] += 1
    largest = [(-count, i) for i, count in enumerate(counts)]
    heapq.heapify(largest)
    for _ in range(-missing):  # the least weights were raised to one turn: the largest pays
        count, i = largest[0]
        counts[i] -= 1
        heapq.heapreplace(largest, (count + 1, i))
    return counts


class Blend:
    """Sample number -> (source, sample number within it), for whole numbers `turns` per period and source."""

    def __init__(self, turns: Sequence[int]):
        if not turns or min(turns) < 1:
            raise ValueError(f"every source needs a turn in a period, not {list(turns)}")
        self.turns = np.array(turns, np.int64)  # [sources]
        self.period = int(self.turns.sum())
        self.order = _order(self.turns, self.period)  # int32 [period]
        self.turn = _turn(self.order, self.turns)  # int32 [period]

    def __getitem__(self, sample: int) -> tuple[int, int]:
        """(source, how many samples of it came before this one)."""
        if sample < 0:
            raise IndexError(f"sample {sample}: samples are numbered from 0")
        round_, slot = divmod(sample, self.period)
        source = int(self.order[slot])
        return source, round_ * int(self.turns[source]) + int(self.turn[slot])

    def counts(self, samples: int) -> np.ndarray:
        """int64 [sources]: how many of the first `samples` come from each."""
        rounds, slots = divmod(samples, self.period)
        return rounds * self.turns + np.bincount(self.order[:slots], minlength=len(self.turns))


def _order(turns: np.ndarray, period: int) -> np.ndarray:
    """int32 [period]: the source of each slot, that with the earliest end of its window first."""
    order = np.empty(period, np.int32)
    waiting: list[int] = []  # (end of the window) * sources + source, of turns whose window has begun
    for low in range(0, period, STRIPE):
        high = min(low + STRIPE, period)
        begins, keys = _windows(turns, period, low, high)
        begins.append(period)  # a sentinel that no slot reaches
        place = 0
        for slot in range(low, high):
            while begins[place] <= slot:
                heapq.heappush(waiting, keys[place])
                place += 1
            order[slot] = heapq.heappop(waiting) % len(turns)
    return order


def _windows(turns: np.ndarray, period: int, low: int, high: int) -> tuple[list[int], list[int]]:
    """Turns whose windows begin in [low, high), by begin: (begins, keys for the queue)."""
    # floor(j period / turns) >= low is j >= ceil(low turns / period)
    first, last = (-(-edge * turns // period) for edge in (low, high))
    counts = last - first
    source = np.repeat(np.arange(len(turns)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begin = number * period // turns[source]
    end = -(-(number + 1) * period // turns[source])
    by_begin = np.argsort(begin, kind="stable")
    return begin[by_begin].tolist(), (end * len(turns) + source)[by_begin].tolist()


def _turn(order: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """int32 [period]: how often a slot's source was at its turn before."""
    by_source = np.argsort(order, kind="stable")
    turn = np.empty(len(order), np.int32)
    turn[by_source] = np.arange(len(order)) - np.repeat(np.cumsum(turns) - turns, turns)
    return turn


class BlendedSamples:
    """Samples of several sources, mixed by weight; every source goes through epochs of its own.

    `weights` None: by the number of samples that each source has, so that all of them finish an epoch together.
    """

    def __init__(self, sources: Sequence, weights: Sequence[Fraction] | None = None):
        self.sources = list(sources)
        self.by_size = weights is None
        self.turns = turns_per_period([len(source) for source in sources] if weights is None else weights)
        self.blend = Blend(self.turns)

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        source, sample = self.blend[global_sample]
        return self.sources[source][sample]

    def where(self, global_sample: int) -> tuple[int, int]:
        """(source, its sample number) of a sample."""
        return self.blend[global_sample]

    def describe(self, num_samples: int) -> str:
        """The blend, then a line per source: its weight and how often the run goes through it."""
        counts = self.blend.counts(num_samples)
        kind = "by size" if self.by_size else "by weight"
        lines = [f"blend of {len(self.sources)} sources {kind}, {num_samples:,} samples needed"]
        for source, turns, count in zip(self.sources, self.turns, counts, strict=True):
            lines.append(f"  {turns / self.blend.period:.6f}  {source.describe(int(count))}")
        return "\n".join(lines)
