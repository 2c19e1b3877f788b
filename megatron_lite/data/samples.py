"""Which tokens a sample is: pure functions of (seed, sample number), with no index to build, cache or share.

    stream    t0 t1 t2 ... cut into N = (tokens - 1) // seq windows of seq + 1 tokens; neighbours share one token
    sample g  epoch = g // N, window = permute(g % N, N, key=(seed, epoch))

`permute` is a Feistel network over just enough bits for N, walked on until the value falls below N: a bijection of
[0, N) for any key, in constant time and memory. So the order is the same on every rank, for any layout, any run length
and any number of restarts.
"""

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from megatron_lite.data.indexed import DataError, IndexedDataset

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's multipliers
ROUNDS = 8
BLOCK = 1024  # places of an epoch that are permuted at once


def parse_split(text: str) -> tuple[float, float, float]:
    """`"969, 30, 1"` -> the fractions for training, validation and test. Missing ones are 0; the sum is 1.

    Strict: one to three plain numbers, none negative, not all zero. Raises DataError naming `--split`.
    """
    parts = [part.strip() for part in text.split(",")]
    numeric = all(re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", part) for part in parts)
    if not numeric or len(parts) > 3 or not 0 < sum(map(float, parts)) < math.inf:
        raise DataError(
            f"--split {text!r}: expected one to three weights for training, validation and test, "
            "such as 969,30,1 or 98,2 or 100; none negative and not all zero"
        )
    weights = [*map(float, parts), 0.0, 0.0][:3]
    return tuple(weight / sum(weights) for weight in weights)


def split_documents(fractions: Sequence[float], num_documents: int) -> list[tuple[int, int]]:
    """Document ranges (first, last + 1) of the splits, rounded as Megatron does: adjoining, together all."""
    ends = [round(end * float(num_documents)) for end in itertools.accumulate(fractions, initial=0.0)]
    return list(itertools.pairwise(ends))


def _mix(x: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit values in which every input bit moves every output bit."""
    x = (x ^ (x >> 30)) * MIX_1 & MASK
    x = (x ^ (x >> 27)) * MIX_2 & MASK
    return x ^ (x >> 31)


def _mix_array(x: np.ndarray) -> np.ndarray:
    """`_mix` on uint64 [n]; array arithmetic wraps at 64 bits by itself."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: int | Sequence[int]) -> list[int]:
    """One 64-bit key per round out of an integer or a sequence of integers, whose order counts."""
    state = 0
    for part in (key,) if isinstance(key, int) else key:
        state = _mix((state + GOLDEN ^ part) & MASK)
    return [_mix(state + number * GOLDEN & MASK) for number in range(1, ROUNDS + 1)]


def _halves(n: int) -> tuple[int, int]:
    """Bits of the low and high half of the smallest power of two that holds [0, n); it is below 2 n."""
    bits = (n - 1).bit_length()
    return bits // 2, bits - bits // 2


def permute(i: int, n: int, key: int | Sequence[int]) -> int:
    """Where a keyed permutation of [0, n) sends i. A bijection for every n >= 1 and every key; O(1).

    Each round changes one half by a function of the other, which can be undone whatever the function: the network is
    a bijection of the power of two above n. Walking its cycle until the value is below n keeps that, and takes
    fewer than two steps on average.
    """
    if not 0 <= i < n:
        raise ValueError(f"cannot permute {i} within [0, {n})")
    low_bits, high_bits = _halves(n)
    low_mask, high_mask = (1 << low_bits) - 1, (1 << high_bits) - 1
    keys = _round_keys(key)
    while True:
        low, high = i & low_mask, i >> low_bits
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high ^= _mix(low ^ first) & high_mask
            low ^= _mix(high ^ second) & low_mask
        i = high << low_bits | low
        if i < n:
            return i


def permute_array(i: np.ndarray, n: int, key: int | Sequence[int]) -> np.ndarray:
    """`permute` of each entry of an integer array; int64 of the same shape."""
    values = np.array(i).astype(np.uint64).reshape(-1)
    if values.size and (np.min(i) < 0 or np.max(i) >= n):
        raise ValueError(f"cannot permute {np.min(i)} to {np.max(i)} within [0, {n})")
    low_bits, high_bits = _halves(n)
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
    keys = [np.uint64(value) for value in _round_keys(key)]
    walking = np.arange(values.size)  # entries that have not yet fallen below n
    while walking.size:
        low, high = values[walking] & low_mask, values[walking] >> np.uint64(low_bits)
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high = high ^ (_mix_array(low ^ first) & high_mask)
            low = low ^ (_mix_array(high ^ second) & low_mask)
        values[walking] = high << np.uint64(low_bits) | low
        walking = walking[values[walking] >= np.uint64(n)]
    return values.astype(np.int64).reshape(np.shape(i))


class Order:
    """`permute` of [0, n) by (seed, epoch), a block of places at a time, since arrays cost less per entry than numbers; but
    the first place by itself, which is all that a start waits for.

    Nothing but a block is kept, and a block that another thread puts in its place costs time, never the answer.
    """

    def __init__(self, n: int, seed: int):
        self.n, self.seed = n, seed
        self._block: tuple[int, memoryview] | None = None  # first sample, where it and those behind it lie

    def __getitem__(self, sample: int) -> int:
        """Where the sample of this number lies in its epoch."""
        if self._block is None:
            self._block = (0, memoryview(b""))
            epoch, place = divmod(sample, self.n)
            return permute(place, self.n, (self.seed, epoch))
        first, places = self._block
        if not 0 <= sample - first < len(places):
            first, places = self._block = self._around(sample)
        return places[sample - first]

    def _around(self, sample: int) -> tuple[int, memoryview]:
        epoch, place = divmod(sample, self.n)
        low = place - place % BLOCK
        places = permute_array(np.arange(low, min(low + BLOCK, self.n)), self.n, (self.seed, epoch))
        return sample - place + low, places.data


class WindowSamples:
    """Samples of `seq_length` + 1 tokens out of tokens `first_token` to `last_token` (exclusive) of a data set.

    Unlimited: after N = (tokens - 1) // seq_length samples the next epoch begins, in another order. The last
    (tokens - 1) % seq_length tokens make no whole window and stay unused. Raises DataError when N would be 0.
    """

    def __init__(
        self, dataset: IndexedDataset, seq_length: int, seed: int, first_token: int = 0, last_token: int | None = None
    ):
        self.dataset, self.seq_length, self.seed, self.first_token = dataset, seq_length, seed, first_token
        last_token = dataset.num_tokens if last_token is None else last_token
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{dataset.prefix}.bin: holds {dataset.dtype}, expected integer token ids")
        if not 0 <= first_token <= last_token <= dataset.num_tokens:
            raise DataError(f"{dataset.prefix}.bin: tokens {first_token} to {last_token} of {dataset.num_tokens}")
        self.num_tokens = last_token - first_token
        self.samples_per_epoch = max(self.num_tokens - 1, 0) // seq_length
        if self.samples_per_epoch == 0:
            raise DataError(
                f"{dataset.prefix}.bin: {self.num_tokens} tokens in this split (of {dataset.num_tokens}), but one "
                f"sample of --seq-length {seq_length} needs {seq_length + 1}; "
                "use more data, another --split, or a shorter --seq-length"
            )
        self.order = Order(self.samples_per_epoch, seed)

    def __len__(self) -> int:
        """Samples per epoch."""
        return self.samples_per_epoch

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [seq_length + 1]: inputs are all but the last token, labels all but the first."""
        if global_sample < 0:
            raise IndexError(f"sample {global_sample}: samples are numbered from 0")
        start = self.first_token + self.order[global_sample] * self.seq_length
        return self.dataset.window(start, self.seq_length + 1).astype(np.int64)

    def describe(self, num_samples: int) -> str:
        """One line for the start-up log: what is there, and how often a run of `num_samples` goes through it."""
        epochs = num_samples / self.samples_per_epoch
        return (
            f"{self.dataset.prefix}: {self.num_tokens:,} tokens, {self.samples_per_epoch:,} samples per epoch "
            f"(sequence length {self.seq_length:,}), {num_samples:,} samples needed = {epochs:,.2f} epochs"
        )


class MockSamples:
    """Made-up samples for `--mock-data`: each token is the one before plus a stride, but one in ten is drawn at random.

    The stride depends on the seed alone, so a model can learn it; a sample depends on (seed, sample number) alone.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int):
        self.vocab_size, self.seq_length, self.seed = vocab_size, seq_length, seed & MASK
        self.stride = 1 + permute(0, max(vocab_size - 1, 1), self.seed)

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        random = np.random.default_rng([self.seed, global_sample])  # its own stream: the global one stays untouched
        steps = random.integers(self.vocab_size, size=self.seq_length + 1)
        regular = random.random(self.seq_length + 1) >= 0.1
        regular[0] = False  # the first step draws the first token
        return np.cumsum(np.where(regular, self.stride, steps)) % self.vocab_size

    def describe(self, num_samples: int) -> str:
        """One line for the start-up log."""
        return (
            f"mock data: unlimited samples of sequence length {self.seq_length:,} over {self.vocab_size:,} ids, "
            f"{num_samples:,} samples needed"
        )
