"""Batches out of samples. The order is global; a rank reads its part of it.

    step       the next batch_sizes.at(consumed) = num_microbatches * dp_size * micro_batch_size samples
    microbatch j of data-parallel rank d:  consumed + (j * dp_size + d) * micro_batch_size + [0 .. micro_batch_size)

So the samples of a step are the same for every dp size and every cut into microbatches, every rank takes the same
number of steps, also while the batch grows, and the whole state is one integer, `consumed_samples`.
Shapes: b = micro-batch size, s = sequence length.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from megatron_lite.data.documents import Resets
from megatron_lite.data.indexed import DataError
from megatron_lite.rampup import BatchSizes

Position = Callable[[int], dict]  # of a stream: sample number -> what a checkpoint stores to go on from there


class Samples(Protocol):
    """Anything that gives int64 [s + 1] for a global sample number."""

    def __getitem__(self, global_sample: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank."""

    tokens: torch.Tensor  # int64 [b, s]
    labels: torch.Tensor  # int64 [b, s]
    loss_mask: torch.Tensor  # float32 [b, s], 1 where the label counts
    positions: torch.Tensor | None = None  # int64 [b, s] with --reset-position-ids
    starts: torch.Tensor | None = None  # int64 [b, s] with --reset-attention-mask; see data/documents.py

    def pinned(self) -> "Batch":
        """The same in page-locked memory. Needs CUDA."""
        held = (getattr(self, field.name) for field in fields(self))
        return Batch(*(None if tensor is None else tensor.pin_memory() for tensor in held))


NOTHING = Batch(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.empty(0))


def check_ids(ids: np.ndarray, numbers: Sequence[int], vocab_size: int) -> None:
    """Refuse ids [n, s + 1] of the samples `numbers` outside [0, vocab_size): an embedding would fail far from the cause, or
    read another row."""
    if 0 <= ids.min() and ids.max() < vocab_size:
        return
    row, column = np.argwhere((ids < 0) | (ids >= vocab_size))[0]
    raise DataError(
        f"sample {numbers[row]} holds token id {ids[row, column]}, but the vocabulary has {vocab_size} entries "
        f"(ids 0 to {vocab_size - 1}): the data was made with another tokenizer or --vocab-size is too small"
    )


@dataclass(frozen=True)
class StepReader:
    """Builds one rank's microbatches of the step that starts at a given sample; no state, so any thread may call it."""

    samples: Samples
    micro_batch_size: int
    batch_sizes: BatchSizes  # samples of a step, from the samples consumed before it
    dp_rank: int
    dp_size: int
    vocab_size: int
    masked_token: int | None  # inputs with this id carry no loss
    end: int | None = None  # samples from this number on are not read: rows without a loss stand in their places
    needed: bool = True  # False where neither tokens nor labels are looked at
    pin: bool = False  # page-locked memory, which a device copies from while the host goes on
    resets: Resets | None = None  # what starts over behind each document

    def sample_numbers(self, consumed: int, microbatch: int) -> range:
        """Global numbers of the samples this rank puts into one microbatch."""
        first = consumed + (microbatch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def num_microbatches(self, consumed: int) -> int:
        return self.batch_sizes.at(consumed) // (self.micro_batch_size * self.dp_size)

    def read(self, consumed: int) -> list[Batch]:
        """The microbatches of the step that starts after `consumed` samples."""
        count = self.num_microbatches(consumed)
        if not self.needed:
            return [NOTHING] * count
        batches = [self._microbatch(self.sample_numbers(consumed, j)) for j in range(count)]
        return [batch.pinned() for batch in batches] if self.pin else batches

    def _microbatch(self, numbers: range) -> Batch:
        inside = numbers if self.end is None else range(numbers.start, max(min(numbers.stop, self.end), numbers.start))
        rows = [self.samples[number] for number in inside] or [np.zeros_like(self.samples[0])]
        ids = np.stack(rows)  # [b, s + 1]
        check_ids(ids, inside, self.vocab_size)
        if len(rows) < len(numbers):
            ids = np.pad(ids, ((0, len(numbers) - len(rows)), (0, 0)))
        tokens, labels = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        mask = np.ones(tokens.shape, np.float32)
        mask[len(inside) :] = 0.0
        if self.masked_token is not None:
            mask[tokens == self.masked_token] = 0.0
        reset = self.resets.of(tokens) if self.resets else ()
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(mask), *reset)


class Step(NamedTuple):
    """What the loader hands over: a step's microbatches, and where a stream of samples stands after it."""

    batches: list[Batch]
    position: dict | None


def _read_step(reader: StepReader, consumed: int, position: Position | None) -> Step:
    batches = reader.read(consumed)
    after = consumed + reader.batch_sizes.at(consumed)
    return Step(batches, position(after) if position and reader.needed else None)


def _read_ahead(read: Callable[[int], Step], sizes: BatchSizes, consumed: int, steps: queue.Queue, stop: threading.Event) -> None:
    """Body of the prefetch thread. It hands over steps, or the error that ended it, and never blocks for good."""
    while not stop.is_set():
        try:
            item = read(consumed)
        except BaseException as error:  # whatever it is, the training thread has to hear of it
            item = error
        while not stop.is_set():
            try:
                steps.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(item, BaseException):
            return
        consumed += sizes.at(consumed)


class BatchLoader:
    """Gives one rank its microbatches, step after step, from `consumed_samples` on.

    `prefetch` steps are read ahead by a daemon thread; 0 reads in line. Either way the batches are the same, and no
    random generator is touched. `wait_seconds` is the time `next_step` has kept its caller waiting. `end`, `needed` and
    `pin` are StepReader's. Samples that are found by number have no state but `consumed_samples`; of a stream, `position`
    says where it stands at a sample, and the loader's `position` is that after the last step handed over.
    Raises DataError from `next_step` for a sample that cannot be read or holds an id outside the vocabulary.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch_size: int,
        batch_sizes: BatchSizes,
        dp_rank: int,
        dp_size: int,
        vocab_size: int,
        consumed_samples: int = 0,
        eod: int | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        end: int | None = None,
        needed: bool = True,
        pin: bool = False,
        position: Position | None = None,
        prefetch: int = 2,
    ):
        each = micro_batch_size * dp_size
        if micro_batch_size < 1 or not 0 <= dp_rank < dp_size or any(size < 1 or size % each for size in batch_sizes.sizes):
            raise ValueError(
                f"micro_batch_size {micro_batch_size} must be at least 1, dp_rank {dp_rank} must lie in [0, {dp_size}), "
                f"and their product must divide every batch of {batch_sizes}"
            )
        if consumed_samples < 0 or prefetch < 0:
            raise ValueError(f"consumed_samples {consumed_samples} and prefetch {prefetch} must not be negative")
        resetting = reset_position_ids or reset_attention_mask
        if eod is None and (eod_mask_loss or resetting):
            raise ValueError("--eod-mask-loss and --reset-... need a tokenizer that has an end-of-document token")
        masked = eod if eod_mask_loss else None
        resets = Resets(eod, reset_position_ids, reset_attention_mask) if resetting else None
        self.reader = StepReader(
            samples, micro_batch_size, batch_sizes, dp_rank, dp_size, vocab_size, masked, end, needed, pin, resets
        )
        self.consumed_samples = consumed_samples
        self.position: dict | None = None
        self.wait_seconds = 0.0
        self.prefetch = prefetch
        self._read = partial(_read_step, self.reader, position=position)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._steps: queue.Queue = queue.Queue(maxsize=max(prefetch, 1))
        self._error: BaseException | None = None

    def next_step(self) -> list[Batch]:
        """This rank's batches of the next step; `consumed_samples` moves on by the global batch."""
        started = time.perf_counter()
        try:
            step = self._from_thread() if self.prefetch else self._read(self.consumed_samples)
        finally:
            self.wait_seconds += time.perf_counter() - started
        self.consumed_samples += self.reader.batch_sizes.at(self.consumed_samples)
        self.position = step.position
        return step.batches

    def take_wait_seconds(self) -> float:
        """`wait_seconds` since the last call, which starts again at 0."""
        waited, self.wait_seconds = self.wait_seconds, 0.0
        return waited

    def _from_thread(self) -> Step:
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise RuntimeError("this loader is closed")
        if self._thread is None:  # started on first use, so a loader may be made before a fork
            arguments = (self._read, self.reader.batch_sizes, self.consumed_samples, self._steps, self._stop)
            self._thread = threading.Thread(target=_read_ahead, args=arguments, name="batch-loader", daemon=True)
            self._thread.start()
        item = self._steps.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        return item

    def close(self) -> None:
        """Stop reading ahead and join the thread. May be called more than once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *error) -> None:
        self.close()
