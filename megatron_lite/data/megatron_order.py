"""Megatron's own order of samples, for who continues a run that Megatron began (--data-order megatron).

    documents  d_0 d_1 ...     those of the split, once per epoch, shuffled over all epochs at once
    stream     their tokens end to end; sample k is its tokens [k s, (k + 1) s], so that neighbours share one token
    shuffle    the order in which the samples are read

One `numpy.random.RandomState(seed)` shuffles the documents, then the samples. If the last epoch gives less than 80 % of an
epoch's samples, it is shuffled apart: its documents after those of the other epochs, its samples after theirs. (As in
gpt_dataset.py and helpers.cpp of Megatron-Core; what it calls documents here are the sequences of the `.idx`.)

Unlike the keyed order this one depends on the number of samples that the run asks for, and has to be built: three arrays in
`--data-cache-path`, named by a hash of all that decides them (lengths of the sequences, not paths or dates). The first rank
of a node builds while the others wait for it; each file gets its name when it is whole.
"""

import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from megatron_lite.data.blend import read_blend
from megatron_lite.data.indexed import CHUNK, DataError, IndexedDataset
from megatron_lite.data.samples import parse_split, split_documents

APART = 0.80  # a last epoch with a smaller share of its samples is shuffled apart
SURPLUS = 0.005  # more samples than its weight asks for are built of each source of a blend
FORMAT = 1  # of the cached arrays


def epochs_needed(tokens: int, seq_length: int, num_samples: int | None) -> int:
    """Passes over `tokens` tokens that give `num_samples` samples; None: one pass."""
    return 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))


def samples_apart(tokens: int, seq_length: int, epochs: int, num_samples: int | None) -> int | None:
    """Samples of all epochs but the last where the last is shuffled apart, else None."""
    if epochs == 1:
        return None
    before = ((epochs - 1) * tokens - 1) // seq_length
    return before if num_samples - before < int(APART * ((tokens - 1) // seq_length)) else None


def document_order(documents: np.ndarray, epochs: int, apart: bool, random: np.random.RandomState) -> np.ndarray:
    """int32 [epochs * documents] (int64 where they need it): which document comes when in the stream."""
    if apart:
        parts = document_order(documents, epochs - 1, False, random), document_order(documents, 1, False, random)
        return np.concatenate(parts)
    order = np.tile(documents, epochs)
    random.shuffle(order)
    return order


def sample_starts(order: np.ndarray, lengths: np.ndarray, seq_length: int, samples: int) -> np.ndarray:
    """[samples + 1, 2]: (place in `order`, token inside that document) of the first token of each sample.

    The document of token t is the first whose end lies beyond t, so empty documents are passed over.
    """
    ends = np.cumsum(lengths[order], dtype=np.int64)  # [documents of all epochs], tokens of the stream
    starts = np.empty((samples + 1, 2), index_dtype(len(order)))
    for low in range(0, samples + 1, CHUNK):
        tokens = np.arange(low, min(low + CHUNK, samples + 1), dtype=np.int64) * seq_length
        place = np.searchsorted(ends, tokens, side="right")
        starts[low : low + CHUNK, 0] = place
        starts[low : low + CHUNK, 1] = tokens - (ends[place] - lengths[order[place]])
    return starts


def index_dtype(entries: int) -> np.dtype:
    """The integer that numbers so many entries; lengths of documents fit in 32 bits."""
    return np.dtype(np.int32 if entries < 2**31 else np.int64)


def sample_order(samples: int, apart: int | None, random: np.random.RandomState) -> np.ndarray:
    """uint32 [samples] (int64 where they need it): which sample is read when; the first `apart` before all others."""
    dtype = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    first = np.arange(samples if apart is None else apart, dtype=dtype)
    random.shuffle(first)
    if apart is None:
        return first
    last = np.arange(apart, samples, dtype=dtype)
    random.shuffle(last)
    return np.concatenate([first, last])


def build_order(
    lengths: np.ndarray, first: int, last: int, seq_length: int, seed: int, num_samples: int | None
) -> list[np.ndarray]:
    """The three arrays for documents [first, last) of a data set whose documents have `lengths` tokens."""
    tokens = int(lengths[first:last].sum(dtype=np.int64))
    epochs = epochs_needed(tokens, seq_length, num_samples)
    samples, apart = (epochs * tokens - 1) // seq_length, samples_apart(tokens, seq_length, epochs, num_samples)
    random = np.random.RandomState(seed)
    documents = np.arange(first, last, dtype=index_dtype(last))
    order = document_order(documents, epochs, apart is not None, random)
    return [order, sample_starts(order, lengths, seq_length, samples), sample_order(samples, apart, random)]


class MegatronSamples:
    """Samples of documents [first, last) of a data set, in Megatron's order; limited, to at least `num_samples`."""

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_length: int,
        seed: int,
        num_samples: int | None,
        first: int,
        last: int,
        cache: str | None,
    ):
        self.dataset, self.seq_length = dataset, seq_length
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{dataset.prefix}.bin: holds {dataset.dtype}, expected integer token ids")
        lengths = dataset.lengths
        self.num_tokens = int(lengths[first:last].sum(dtype=np.int64))
        if self.num_tokens <= seq_length:
            raise DataError(f"{dataset.prefix}.bin: {self.num_tokens} tokens in this split, but one sample of "
                            f"--seq-length {seq_length} needs {seq_length + 1}")  # fmt: skip
        key = _key(lengths[first:last], [first, last, seq_length, seed, num_samples])
        names = ("documents", "starts", "shuffle")
        folder = cache or f"{dataset.prefix}_cache"
        self.order, self.starts, self.shuffle = cached(
            folder, key, names, lambda: build_order(lengths, first, last, seq_length, seed, num_samples)
        )

    def __len__(self) -> int:
        """Samples that there are."""
        return len(self.shuffle)

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        sample = int(self.shuffle[_within(global_sample, len(self))])
        (place, begin), (last, end) = self.starts[sample].tolist(), self.starts[sample + 1].tolist()
        pieces = [self.dataset[int(document)] for document in self.order[place : last + 1]]
        pieces[-1] = pieces[-1][: end + 1]
        pieces[0] = pieces[0][begin:]
        return np.concatenate(pieces).astype(np.int64)

    def describe(self, num_samples: int) -> str:
        """One line for the start-up log."""
        per_epoch = (self.num_tokens - 1) // self.seq_length
        return (f"{self.dataset.prefix}: {self.num_tokens:,} tokens in Megatron's order, {per_epoch:,} samples per epoch "
                f"(sequence length {self.seq_length:,}), {num_samples:,} samples needed = {num_samples / per_epoch:,.2f} epochs; "
                f"the order is that of {len(self):,} samples and changes with the length of the run")  # fmt: skip


class MegatronBlend:
    """Several sources in Megatron's greedy order: step i reads the source that is furthest behind its weight."""

    def __init__(self, sources: Sequence[MegatronSamples], weights: Sequence[float], num_samples: int, cache: str | None):
        self.sources, self.weights = list(sources), normalized(weights)
        key = _key(np.array(self.weights), [len(sources), num_samples])
        folder = cache or f"{sources[0].dataset.prefix}_cache"
        names = ("source", "sample")
        self.source, self.sample = cached(folder, key, names, lambda: list(greedy_blend(self.weights, num_samples)))

    def __len__(self) -> int:
        """Samples that there are."""
        return len(self.source)

    def where(self, global_sample: int) -> tuple[int, int]:
        """(source, its sample number) of a sample."""
        _within(global_sample, len(self))
        return int(self.source[global_sample]), int(self.sample[global_sample])

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        source, sample = self.where(global_sample)
        return self.sources[source][sample]

    def describe(self, num_samples: int) -> str:
        """The blend, then a line per source: its weight and how much of it is read."""
        counts = np.bincount(self.source[:num_samples], minlength=len(self.sources))
        lines = [f"blend of {len(self.sources)} sources in Megatron's order, {num_samples:,} samples needed"]
        for source, weight, count in zip(self.sources, self.weights, counts, strict=True):
            lines.append(f"  {weight:.6f}  {source.describe(int(count))}")
        return "\n".join(lines)


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1, by numpy's division."""
    array = np.array(weights, np.float64)
    return (array / array.sum()).tolist()


def greedy_blend(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(int16 [samples] source, int64 [samples] its sample): step i takes the first largest weight * max(i, 1) - count.

    Step by step, some two microseconds each: which source is ahead by a rounding error counts.
    """
    share, counts = np.array(weights, np.float64), np.zeros(len(weights), np.float64)
    source, sample, error = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64), np.empty_like(share)
    for step in range(num_samples):
        np.multiply(share, max(step, 1), out=error)
        np.subtract(error, counts, out=error)
        most = error.argmax()
        source[step], sample[step] = most, counts[most]
        counts[most] += 1
    return source, sample


def megatron_samples(
    words: Sequence[str], seq_length: int, seed: int, num_samples: int, split: tuple[str | None, int], cache: str | None,
    read: int | None = None,
) -> MegatronSamples | MegatronBlend:  # fmt: skip
    """The samples that a --data-path stands for. `split`: (--split, which part of it: 0, 1, 2); None: all documents.

    By weight, each source is built for its share of the `num_samples` that Megatron would ask for and a little more; by size,
    for one epoch, which is all that Megatron then gives. Raises DataError where that is less than the `read` samples that are
    used (None: all): every evaluation here reads the same first ones.
    """
    weights, prefixes = read_blend(words)
    if len(prefixes) == 1 and weights is None:
        return _source(prefixes[0], seq_length, seed, num_samples, split, cache)
    if len(prefixes) >= 2**15:
        raise DataError(f"a blend of {len(prefixes)} sources, at most {2**15 - 1} are possible with --data-order megatron")
    if weights is None:
        sources = [_source(prefix, seq_length, seed, None, split, cache) for prefix in prefixes]
        whole = sum(map(len, sources))
        needed = num_samples if read is None else read
        if needed > whole:
            raise DataError(f"a blend by size gives one epoch of {whole} samples with --data-order megatron, the run needs "
                            f"{needed}; give weights")  # fmt: skip
        return MegatronBlend(sources, [len(source) for source in sources], min(num_samples, whole), cache)
    parts = normalized([float(weight) for weight in weights])
    shares = [math.ceil(num_samples * part) for part in parts]
    sources = [_source(prefix, seq_length, seed, math.ceil(share * (1 + SURPLUS)), split, cache)
               for prefix, share in zip(prefixes, shares, strict=True)]  # fmt: skip
    return MegatronBlend(sources, parts, sum(shares), cache)  # which normalizes once more, as Megatron does: bits count


def _source(prefix: str, seq_length: int, seed: int, num_samples: int | None, split: tuple, cache: str | None) -> MegatronSamples:
    dataset, (text, part) = IndexedDataset(prefix), split
    first, last = (0, len(dataset)) if text is None else split_documents(parse_split(text), len(dataset))[part]
    return MegatronSamples(dataset, seq_length, seed, num_samples, first, last, cache)


def _within(global_sample: int, size: int) -> int:
    if not 0 <= global_sample < size:
        raise DataError(f"sample {global_sample}: --data-order megatron was built for {size} samples, numbered from 0")
    return global_sample


def _key(numbers: np.ndarray, settings: list[int | None]) -> str:
    """What decides the arrays, as a name."""
    digest = hashlib.sha256(json.dumps([FORMAT, *settings]).encode())
    for low in range(0, len(numbers), CHUNK):
        digest.update(np.ascontiguousarray(numbers[low : low + CHUNK]).data)
    return digest.hexdigest()[:32]


def cached(folder: str, key: str, names: Sequence[str], build: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    """The arrays of a key, mapped; built and stored by whoever comes first. Raises DataError where it cannot be stored."""
    paths = [os.path.join(folder, f"{key}-{name}.npy") for name in names]
    if not all(map(os.path.exists, paths)):
        try:
            os.makedirs(folder, exist_ok=True)
            with _alone(os.path.join(folder, f"{key}.lock")):
                if not all(map(os.path.exists, paths)):  # another process may have been faster
                    for path, array in zip(paths, build(), strict=True):
                        _store(path, array)
        except OSError as error:
            raise DataError(
                f"{folder}: the order of samples cannot be stored there ({error}); name another --data-cache-path"
            ) from error
    return [np.load(path, mmap_mode="r").view(np.ndarray) for path in paths]


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """One process of this machine at a time; where the file system has no locks, all at once, which is only slower."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _store(path: str, array: np.ndarray) -> None:
    """Write an array, all or nothing."""
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        try:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.remove(file.name)
            raise
