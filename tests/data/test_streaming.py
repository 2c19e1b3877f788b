"""Samples of a data set that is tokenised while it is read: the windows of one long text, at any restart and layout."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.indexed import DataError
from megatron_lite.data.loader import BatchLoader
from megatron_lite.data.streaming import Source, StreamedSamples, open_rows
from megatron_lite.rampup import BatchSizes
from megatron_lite.tokenizers import ByteTokenizer

EOD, ENCODE = ByteTokenizer().eod, ByteTokenizer().encode
LIST = Source("a list")


class Listed:
    """Rows of a list, with the state of a Hugging Face data set: changed before a row is handed over."""

    def __init__(self, texts):
        self.texts, self.at, self.start = texts, 0, 0

    def __iter__(self):
        self.at = self.start
        while self.at < len(self.texts):
            self.at += 1
            yield {"text": self.texts[self.at - 1]}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


def samples_of(texts, length, encode=ENCODE):
    return StreamedSamples(Listed(texts), LIST, encode, EOD, length)


def stream_of(texts, tokens):
    """The first tokens of the texts, end after end, over and over."""
    once = [token for text in texts for token in [*text.encode(), EOD]]
    return np.tile(once, -(-tokens // len(once)))[:tokens]


TEXTS = st.lists(st.text("abc", max_size=9), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, length=st.integers(1, 12))
def test_windows_of_the_whole_text(texts, length):
    samples, stream = samples_of(texts, length), stream_of(texts, 15 * length + 1)
    for g in range(15):
        assert samples[g].tolist() == stream[g * length : (g + 1) * length + 1].tolist()


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, length=st.integers(1, 12), order=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_any_sample_at_any_time(texts, length, order):
    samples, stream = samples_of(texts, length), stream_of(texts, 21 * length + 1)
    for g in order:
        assert samples[g].tolist() == stream[g * length : (g + 1) * length + 1].tolist()


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, length=st.integers(1, 12), at=st.integers(1, 30))
def test_a_position_is_as_good_as_reading_to_it(texts, length, at):
    before, encoded = samples_of(texts, length), []
    position = json.loads(json.dumps(before.position(at)))

    def encode(text):
        encoded.append(text)
        return list(text.encode())

    after = samples_of(texts, length, encode)
    encoded.clear()
    assert after.seek(at, position) is None
    for g in range(at, at + 3):
        assert after[g].tolist() == before[g].tolist()
    assert after.position(at + 3) == before.position(at + 3)
    passed = position["tokens"] + 3 * length + 1
    assert sum(len(text) + 1 for text in encoded) <= passed + 2 * max(map(len, texts)) + 2, "rows before it are not read again"


def test_without_a_position_it_is_read_on_to():
    texts, length = ["abcde", "fg"], 3
    for position in (None, {}, samples_of(texts, 4).position(6), samples_of(texts, length).position(5)):
        samples = samples_of(texts, length)
        assert "reading on to it from the start" in samples.seek(6, position)
        assert samples[6].tolist() == stream_of(texts, 40)[18:22].tolist()
    assert samples_of(texts, length).seek(0, None) is None


def test_a_text_that_has_changed_is_noticed():
    position = samples_of(["abcde", "fg", "hi"], 3).position(3)
    samples = samples_of(["abcde", "fg", "hj"], 3)
    assert "has changed" in samples.seek(3, position)
    assert samples[3].tolist() == stream_of(["abcde", "fg", "hj"], 40)[9:13].tolist()


@pytest.mark.parametrize("mbs, size, prefetch", [(1, 1, 0), (1, 4, 2), (2, 2, 0), (4, 1, 2)])
def test_every_layout_reads_the_same_and_goes_on_from_anothers_checkpoint(mbs, size, prefetch):
    texts, sizes = ["one day", "", "another day", "x"], BatchSizes(8, (4, 4, 12))
    stream = stream_of(texts, 400)

    def step(loaders):
        rows = [batch.tokens for loader in loaders for batch in loader.next_step()]
        return sorted(row.tolist() for batch in rows for row in batch)

    def loaders(consumed, position):
        made = []
        for rank in range(size):
            samples = samples_of(texts, 5)
            assert samples.seek(consumed, position) is None
            made.append(BatchLoader(samples, micro_batch_size=mbs, batch_sizes=sizes, dp_rank=rank, dp_size=size, vocab_size=257,
                                    consumed_samples=consumed, position=samples.position, prefetch=prefetch))  # fmt: skip
        return made

    first = samples_of(texts, 5)
    with BatchLoader(first, micro_batch_size=4, batch_sizes=sizes, dp_rank=0, dp_size=1, vocab_size=257,
                     position=first.position) as single:  # fmt: skip
        for _ in range(3):
            single.next_step()
    mine = loaders(single.consumed_samples, single.position)
    consumed = single.consumed_samples
    for _ in range(3):
        size_now = sizes.at(consumed)
        assert step(mine) == sorted(stream[5 * g : 5 * g + 5].tolist() for g in range(consumed, consumed + size_now))
        consumed += size_now
    assert len({json.dumps(loader.position) for loader in mine}) == 1
    for loader in mine:
        loader.close()


ROWS = [f"document {n} " + "x" * (n % 7) for n in range(25)]


@pytest.fixture(scope="module", params=["jsonl", "parquet"])
def folder(request, tmp_path_factory):
    """A local data set of three files, one of them compressed."""
    path = tmp_path_factory.mktemp(request.param)
    for n, rows in enumerate((ROWS[:10], ROWS[10:11], ROWS[11:])):
        if request.param == "jsonl":
            lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in rows).encode()
            name, data = (f"train-{n}.jsonl.gz", gzip.compress(lines)) if n == 2 else (f"train-{n}.jsonl", lines)
            (path / name).write_bytes(data)
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            table = __import__("pyarrow").table({"id": [1] * len(rows), "text": rows})
            parquet.write_table(table, path / f"train-{n}.parquet", row_group_size=4)
    return str(path)


def opened(folder, length, **more):
    source = Source(folder, **more)
    return StreamedSamples(open_rows(source), source, ByteTokenizer().encode, EOD, length)


def test_a_local_folder_is_streamed_without_a_network(folder):
    """The states that the data set itself gives, at windows that begin in every file and in a second epoch."""
    samples, length, positions = opened(folder, 16), 16, {}
    stream = stream_of(ROWS, 64 * length + 1)
    for g in range(62):
        positions[g] = json.loads(json.dumps(samples.position(g)))
        assert samples[g].tolist() == stream[g * length : (g + 1) * length + 1].tolist()
    assert positions[61]["epoch"] >= 1
    resumed = opened(folder, length)
    for g in (1, 9, 12, 13, 14, 25, 40, 61):
        assert resumed.seek(g, positions[g]) is None
        for later in (g, g + 1, g + 2):
            assert resumed[later].tolist() == stream[later * length : (later + 1) * length + 1].tolist(), (g, later)


def test_what_cannot_be_streamed_is_said_in_one_line(folder, tmp_path):
    with pytest.raises(DataError, match="--dataset-text-key body is missing in row 0 of epoch 0; nearest values that work: "
                                        "--dataset-text-key text"):  # fmt: skip
        opened(folder, 4, text_key="body")
    with pytest.raises(DataError, match="--dataset-text-key id holds 1 and no text"):
        opened(folder, 4, text_key="id")
    for wrong in ({"split": "elsewhere"}, {"config": "other"}):
        with pytest.raises(DataError, match=f"--dataset-name {folder}"):
            opened(folder, 4, **wrong)
    with pytest.raises(DataError, match="--dataset-name .*nothing"):
        opened(str(tmp_path / "nothing"), 4)
    with pytest.raises(DataError, match="holds no rows"):
        samples_of([], 4)
