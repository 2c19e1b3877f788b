"""The .bin/.idx bytes, and what happens to files that are not what they should be."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.indexed import (
    DTYPES,
    DataError,
    IndexedDataset,
    IndexedWriter,
    best_dtype,
    sequence_pointers,
    write_index,
)


def write(prefix, documents, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def raw_index(lengths, pointers, document_index, code=8, magic=b"MMIDIDX\0\0", version=1, modes=b""):
    """An .idx file packed by hand, field by field."""
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    head += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(document_index))
    body = b"".join(struct.pack("<i", x) for x in lengths) + b"".join(struct.pack("<q", x) for x in pointers)
    return head + body + b"".join(struct.pack("<q", x) for x in document_index) + modes


def put(prefix, index: bytes, tokens: bytes):
    with open(f"{prefix}.idx", "wb") as file:
        file.write(index)
    with open(f"{prefix}.bin", "wb") as file:
        file.write(tokens)
    return str(prefix)


def test_written_bytes_are_the_documented_format(tmp_path):
    prefix = write(tmp_path / "d", [[1, 2, 3], [], [4, 5]])
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)
    assert (tmp_path / "d.idx").read_bytes() == raw_index([3, 0, 2], [0, 6, 6], [0, 1, 2, 3])
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]
    assert len(IndexedDataset(prefix)) == 3


@pytest.mark.parametrize("code", sorted(DTYPES))
@pytest.mark.parametrize("modes", [b"", b"\1\0"])
def test_reads_every_dtype_and_ignores_modes(tmp_path, code, modes):
    tokens = np.array([7, 0, 100, 1, 2], DTYPES[code])
    size = tokens.itemsize
    prefix = put(tmp_path / "d", raw_index([2, 3], [0, 2 * size], [0, 2], code, modes=modes), tokens.tobytes())
    data = IndexedDataset(prefix)
    assert (data.dtype, data.num_tokens, data.num_documents) == (tokens.dtype, 5, 1)
    assert [data[i].tolist() for i in range(2)] == [[7, 0], [100, 1, 2]]
    assert data.document(0).tolist() == data.window(0, 5).tolist() == tokens.tolist()


@settings(max_examples=25, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 65499), max_size=6), max_size=8), data=st.data())
def test_round_trip_and_window(tmp_path_factory, documents, data):
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("rt") / "d", documents))
    stream = [token for document in documents for token in document]
    assert dataset.num_tokens == len(stream) and dataset.num_documents == len(documents)
    assert [dataset.document(i).tolist() for i in range(len(documents))] == documents
    assert np.diff(dataset.document_token_bounds()).tolist() == [len(document) for document in documents]
    start = data.draw(st.integers(0, len(stream)))
    length = data.draw(st.integers(0, len(stream) - start))
    assert dataset.window(start, length).tolist() == stream[start : start + length]


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(5)), start=st.integers(0, 14), length=st.integers(0, 14))
def test_window_of_a_file_whose_sequences_lie_in_another_order(tmp_path_factory, order, start, length):
    stored = [[10, 11, 12], [], [20], [30, 31, 32, 33], [40, 41, 42, 43, 44, 45]]
    pointers = sequence_pointers([len(part) for part in stored], 2)
    index = raw_index([len(stored[i]) for i in order], [pointers[i] for i in order], [0, 2, 5])
    prefix = put(tmp_path_factory.mktemp("nc") / "d", index, np.concatenate(stored).astype("<u2").tobytes())
    dataset = IndexedDataset(prefix)
    stream = [token for i in order for token in stored[i]]
    length = min(length, len(stream) - start)
    assert dataset.window(start, length).tolist() == stream[start : start + length]
    assert dataset.document(1).tolist() == [token for i in order[2:] for token in stored[i]]
    assert dataset.document_token_bounds().tolist() == [0, sum(len(stored[i]) for i in order[:2]), 14]


def test_window_beyond_the_end_is_refused(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "d", [[1, 2, 3]]))
    with pytest.raises(DataError, match="asked for tokens 2 to 4 of 3"):
        dataset.window(2, 2)


def test_d09_ids_come_back_as_they_went_in(tmp_path):
    ids = [0, 65499, 65500, 65535, 65536, 69999]
    assert best_dtype(65499) == np.uint16 and best_dtype(65500) == np.int32
    dataset = IndexedDataset(write(tmp_path / "d", [ids], best_dtype(70000)))
    assert dataset[0].tolist() == ids and dataset.dtype == np.int32
    with pytest.raises(DataError, match="token id 65536 does not fit in uint16"):
        write(tmp_path / "e", [[1], [65536]])
    assert not list(tmp_path.glob("e*")), "a failed writer leaves nothing behind"


def test_d10_pointers_past_two_gibibytes(tmp_path):
    lengths = np.full(5, 2**30, np.int32)
    pointers = sequence_pointers(lengths, 4)
    assert pointers.dtype == np.int64 and pointers.tolist() == [i * 2**32 for i in range(5)]
    write_index(str(tmp_path / "d.idx"), np.int32, lengths, np.arange(6))
    with open(tmp_path / "d.bin", "wb") as file:
        file.truncate(5 * 2**32)  # sparse: takes no room
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.num_tokens == 5 * 2**30 and dataset.document_token_bounds()[-2] == 2**32
    assert dataset.window(2**32 - 1, 3).tolist() == [0, 0, 0]


BROKEN = {
    "text": (b"this is a text file, not an index at all", "not a Megatron index"),
    "short": (b"MMIDIDX\0\0", "9 bytes, but an index has a header of 34 bytes"),
    "version": (raw_index([2], [0], [0, 1], version=2), "index version 2, expected 1"),
    "dtype": (raw_index([2], [0], [0, 1], code=9), "unknown dtype code 9, expected 1 to 8"),
    "cut": (raw_index([2], [0], [0, 1])[:-3], "59 bytes, but 1 sequences and 2 document entries take 62 bytes"),
    "last": (raw_index([2], [0], [0, 2]), "document index runs from 0 to 2, expected 0 to 1"),
    "backwards": (raw_index([1, 1], [0, 2], [0, 2, 1, 2]), "document index goes backwards"),
    "no documents": (raw_index([], [], []), "document index is empty"),
    "length": (raw_index([3, -1], [0, 6], [0, 2]), "sequence 1 has length -1, expected 0 or more"),
    "pointer": (raw_index([1, 1], [0, -2], [0, 2]), "sequence 1 is said to start at byte -2"),
    "odd pointer": (raw_index([1, 1], [0, 1], [0, 2]), "byte 1, expected a multiple of 2"),
    "far pointer": (raw_index([1, 1], [0, 2**62], [0, 2]), "4 bytes, but its index needs 4611686018427387906 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_d13_a_wrong_index_is_one_line_that_names_the_file(tmp_path, name):
    index, message = BROKEN[name]
    prefix = put(tmp_path / "d", index, b"\0\0\0\0")
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(caught.value).startswith(prefix) and "\n" not in str(caught.value)


def test_d14_a_bin_of_another_size_is_refused_at_once(tmp_path):
    prefix = str(write(tmp_path / "d", [list(range(50))]))
    whole = (tmp_path / "d.bin").read_bytes()
    for content in (whole[:-10], whole + b"\0\0", b""):
        (tmp_path / "d.bin").write_bytes(content)
        with pytest.raises(DataError, match=rf"d\.bin: {len(content)} bytes, but its index needs 100 bytes"):
            IndexedDataset(prefix)


def test_missing_files_are_named(tmp_path):
    prefix = str(write(tmp_path / "d", [[1]]))
    with pytest.raises(DataError, match="give the prefix without"):
        IndexedDataset(prefix + ".bin")
    os.remove(prefix + ".bin")
    with pytest.raises(DataError, match=r"d\.bin: no such file, though"):
        IndexedDataset(prefix)


def test_writer_is_all_or_nothing(tmp_path):
    prefix = write(tmp_path / "d", [[1, 2]])
    with pytest.raises(KeyError), IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([3])
        raise KeyError
    assert IndexedDataset(prefix)[0].tolist() == [1, 2]
    old = IndexedDataset(prefix)
    write(prefix, [[9], [8, 7]])
    assert old[0].tolist() == [1, 2], "whoever has the old files mapped keeps them"
    assert IndexedDataset(prefix)[1].tolist() == [8, 7]
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]


def test_a_killed_writer_leaves_the_old_files_and_no_obstacle(tmp_path):
    prefix = write(tmp_path / "d", [[1, 2]])
    code = (
        "import os, sys, numpy as np; from megatron_lite.data.indexed import IndexedWriter\n"
        "w = IndexedWriter(sys.argv[1], np.uint16); w.add_document(list(range(2000000 // 100))); w.mark()\n"
        "os.kill(os.getpid(), 9)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    killed = subprocess.run([sys.executable, "-c", code, str(prefix)], cwd=root)
    assert killed.returncode == -9 and (tmp_path / "d.bin.tmp").stat().st_size > 0
    assert IndexedDataset(prefix)[0].tolist() == [1, 2]
    assert IndexedDataset(write(prefix, [[5]]))[0].tolist() == [5]
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]


def test_two_writers_on_one_prefix_are_refused(tmp_path):
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2])
        with pytest.raises(DataError, match="another process is writing"):
            IndexedWriter(tmp_path / "d", np.uint16)
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1, 2]


def test_extend_and_bulk_writing(tmp_path):
    one = IndexedDataset(write(tmp_path / "one", [[1], [2, 3]]))
    with IndexedWriter(tmp_path / "all", np.int32) as writer:  # a wider dtype on the way
        writer.add_documents(np.array([7, 8, 9]), [2, 1])
        writer.extend(one)
        writer.extend(one)
        with pytest.raises(DataError, match="lengths add up to 3, but 2 tokens"):
            writer.add_documents([1, 2], [3])
    merged = IndexedDataset(tmp_path / "all")
    assert [merged.document(i).tolist() for i in range(6)] == [[7, 8], [9], [1], [2, 3], [1], [2, 3]]
    assert merged.document_index.tolist() == list(range(7))
