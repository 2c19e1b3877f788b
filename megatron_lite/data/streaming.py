"""Samples out of a Hugging Face data set that is read and tokenised while the run goes on: nothing is prepared.

    rows       t0 | t1 | t2 | ...            in the order of the data set, again from its start when it ends
    stream     ids(t0) eod ids(t1) eod ...   cut into windows of s + 1 tokens; neighbours share one token
    sample g   window g

The order depends on the data set alone, not on the layout: every rank that needs tokens goes through the whole stream and
keeps its own samples. Where window g begins is known once all rows before it were tokenised; so that a resumed run need
not do that again, the checkpoint holds `position(g)`: the data set's own state before the row in which window g begins,
how many tokens of that row are passed, and a checksum of it. Without one that fits, the stream is read on from its start to the
sample asked for.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np

from megatron_lite.data.indexed import DataError


class Source(NamedTuple):
    """What is streamed: the words of --dataset-name, --dataset-config, --dataset-split, --dataset-text-key."""

    name: str
    config: str | None = None
    split: str = "train"
    text_key: str = "text"

    def __str__(self) -> str:
        return " ".join(filter(None, (f"--dataset-name {self.name}", self.config, f"(split {self.split})")))


class Rows(Protocol):
    """A data set of rows that knows where it stands, as datasets.IterableDataset is."""

    def __iter__(self) -> Iterator[dict]: ...

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state_dict: dict) -> None: ...


def open_rows(source: Source) -> Rows:
    """The rows of a data set by name or folder, streamed. Raises DataError in one line."""
    import datasets  # heavy, and most runs read prepared files

    try:
        return datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
    except Exception as error:  # of many kinds: no such folder, no network, no such split
        raise DataError(f"{source}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _Row(NamedTuple):
    before: dict  # the data set's state that gives this row next
    epoch: int
    number: int  # in its epoch
    tokens: np.ndarray  # int64 [its tokens, eod included]


class StreamedSamples:
    """Windows of `seq_length` + 1 tokens of a stream of rows.

    Reading goes forward; a sample before the last one read starts the stream anew. Raises DataError in one line for rows
    that cannot be read or are no text, for the first one when it is made.
    """

    def __init__(self, rows: Rows, source: Source, encode: Callable[[str], list[int]], eod: int, seq_length: int):
        self.rows, self.source, self.encode, self.eod, self.seq_length = rows, source, encode, eod, seq_length
        self._fresh = rows.state_dict()
        self._begin(0, self._fresh)
        self._fill(1)

    def __getitem__(self, global_sample: int) -> np.ndarray:
        """int64 [seq_length + 1]."""
        self._go_to(global_sample)
        self._fill(self.seq_length + 1)
        pieces = [row.tokens for row in self._held]
        pieces[0] = pieces[0][self._passed :]
        return np.concatenate(pieces)[: self.seq_length + 1]

    def position(self, sample: int) -> dict:
        """What `seek` needs to go on with `sample`, in JSON's types."""
        self._go_to(sample)
        self._fill(1)
        row = self._held[0]
        return {"sample": sample, "source": list(self.source), "seq_length": self.seq_length, "epoch": row.epoch,
                "row": row.number, "rows": row.before, "tokens": self._passed, "crc32": crc32(row.tokens)}  # fmt: skip

    def seek(self, sample: int, position: dict | None) -> str | None:
        """Stand at `sample`, where `position` (of a checkpoint) is; None, or what to tell people if it cannot be used."""
        if sample == 0:
            return None
        stored = {key: (position or {}).get(key) for key in ("sample", "source", "seq_length")}
        if stored != {"sample": sample, "source": list(self.source), "seq_length": self.seq_length}:
            return f"{self.source}: the checkpoint does not say where sample {sample:,} begins: reading on to it from the start"
        self._begin(sample, position["rows"], position["epoch"], position["row"], position["tokens"])
        self._fill(1)
        if crc32(self._held[0].tokens) == position["crc32"]:
            return None
        self._begin(0, self._fresh)
        return f"{self.source}: has changed, or its tokenizer has: reading on to sample {sample:,} from the start"

    def describe(self, num_samples: int) -> str:
        """One line for the start-up log."""
        return f"{self.source}: streamed, samples of sequence length {self.seq_length:,} in its order, {num_samples:,} needed"

    def _begin(self, sample: int, state: dict, epoch: int = 0, row: int = 0, passed: int = 0) -> None:
        """Read on from a state of the rows, of whose next row `passed` tokens lie before `sample`."""
        self.rows.load_state_dict(state)
        self._next, self._epoch, self._row, self._passed = sample, epoch, row, passed
        self._state, self._rows = state, iter(self.rows)
        self._held: deque[_Row] = deque()  # from the row in which sample `_next` begins
        self._tokens = -passed  # in `_held`, behind where `_next` begins

    def _go_to(self, sample: int) -> None:
        """Let go of what lies before the window `sample`."""
        if sample < 0:
            raise IndexError(f"sample {sample}: samples are numbered from 0")
        if sample < self._next:
            self._begin(0, self._fresh)
        while self._next < sample:
            self._fill(self.seq_length + 1)  # the next window begins with this one's last token
            self._passed += self.seq_length
            self._tokens -= self.seq_length
            self._next += 1
            while self._passed >= len(self._held[0].tokens):
                self._passed -= len(self._held.popleft().tokens)

    def _fill(self, tokens: int) -> None:
        """Hold at least so many tokens from where `_next` begins."""
        while self._tokens < tokens:
            row = self._read()
            self._held.append(row)
            self._tokens += len(row.tokens)

    def _read(self) -> _Row:
        before, row = self._state, self._next_row()
        if row is None:
            self._begin_epoch()
            before, row = self._fresh, self._next_row()
        if row is None:
            raise DataError(f"{self.source}: holds no rows")
        self._state = self.rows.state_dict()
        text, key = row.get(self.source.text_key), self.source.text_key
        if not isinstance(text, str):
            texts = [name for name, value in row.items() if isinstance(value, str)]
            fix = f"nearest values that work: --dataset-text-key {' or '.join(texts)}" if texts else "none of its columns is text"
            found = "is missing" if key not in row else f"holds {text!r:.40} and no text"
            raise DataError(f"{self.source}: --dataset-text-key {key} {found} in row {self._row} of epoch {self._epoch}; {fix}")
        self._row += 1
        return _Row(before, self._epoch, self._row - 1, np.array([*self.encode(text), self.eod], np.int64))

    def _next_row(self) -> dict | None:
        try:
            return next(self._rows, None)
        except Exception as error:  # a damaged file, a network that went away
            raise DataError(f"{self.source}: row {self._row} of epoch {self._epoch}: {_reason(error)}") from error

    def _begin_epoch(self) -> None:
        self.rows.load_state_dict(self._fresh)
        self._rows = iter(self.rows)
        self._epoch, self._row = self._epoch + 1, 0
