"""Compressed and Parquet input, parts for many machines, merging, inspecting, training a tokenizer."""

import gzip
import json

import numpy as np
import pytest

from megatron_lite.config import Config, DataConfig, ModelConfig, TrainConfig
from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.data.loader import BatchLoader
from megatron_lite.rampup import BatchSizes
from megatron_lite.tokenizers import build_tokenizer
from megatron_lite.tokenizers.fingerprint import kept
from megatron_lite.training.data import build_splits, open_samples
from tools import inspect_data, merge_datasets, preprocess_data, train_tokenizer
from tools.text_inputs import read_documents

TEXTS = ["hello", "naïve 文字 🙂", "a\nb", "x" * 500, "last"]


def jsonl(texts):
    return "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts)).encode()


def prepared(tmp_path, name, *more):
    """Documents of an input as text, end of document taken off."""
    out = tmp_path / "out"
    preprocess_data.main(["--input", str(tmp_path / name), "--output-prefix", str(out), "--tokenizer-type", "ByteTokenizer",
                          "--append-eod", "--workers", "0", *more])  # fmt: skip
    suffix = f"_{more[more.index('--partition') + 1]}" if "--partition" in more else ""
    data = IndexedDataset(f"{out}{suffix}_text_document")
    documents = [data.document(n).tolist() for n in range(data.num_documents)]
    assert all(document.count(256) == 1 and document[-1] == 256 for document in documents)
    return [bytes(document[:-1]).decode() for document in documents]


def write(path, documents):
    with IndexedWriter(path, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return str(path)


def test_gzip(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS)))
    assert prepared(tmp_path, "a.jsonl.gz") == TEXTS
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + b"word " * 500_000))
    assert prepared(tmp_path, "a.txt.gz") == ["word " * 500_000]


def test_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl(TEXTS)))
    assert prepared(tmp_path, "a.jsonl.zst") == TEXTS


def test_without_the_package_zst_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(SystemExit) as left:
        prepared(tmp_path, "a.jsonl.zst")
    assert left.value.code == 1 and "pip install zstandard" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [20, 60])
def test_a_compressed_file_cut_short_is_named(tmp_path, capsys, cut):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS * 50))[:-cut])
    with pytest.raises(SystemExit) as left:
        prepared(tmp_path, "a.jsonl.gz")
    assert left.value.code == 1 and "a.jsonl.gz: cannot be read to its end" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_parquet(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS, "other": [1] * 5}), tmp_path / "a.parquet", row_group_size=2)
    assert prepared(tmp_path, "a.parquet") == TEXTS
    for name, key, message in (("a.parquet", "body", "has no column 'body'"), ("a.parquet", "other", "expected text"),
                               ("b.parquet", "text", "not a Parquet file")):  # fmt: skip
        (tmp_path / "b.parquet").write_bytes(b"no such thing" * 9)
        with pytest.raises(SystemExit):
            prepared(tmp_path, name, "--json-keys", key)
        assert message in capsys.readouterr().err


def test_parts_of_many_machines_are_together_the_whole(tmp_path):
    texts = [f"document {n}" for n in range(50)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    parts = [prepared(tmp_path, "a.jsonl", "--partitions", "3", "--partition", str(i)) for i in range(3)]
    assert parts == [texts[0::3], texts[1::3], texts[2::3]]
    names = [str(tmp_path / f"out_{i}_text_document") for i in range(3)]
    assert merge_datasets.main(["--input", *names, "--output-prefix", str(tmp_path / "all")]) == 0
    merged = IndexedDataset(tmp_path / "all")
    found = [bytes(merged.document(n)[:-1].tolist()).decode() for n in range(merged.num_documents)]
    assert found == [text for part in parts for text in part]


@pytest.mark.parametrize("flags, message", [
    ("--partitions 3", "--partitions 3: give --partition 0 to 2"),
    ("--partitions 3 --partition 3", "--partitions 3 --partition 3: give --partition 0 to 2"),
    ("--partitions 0", "--partitions 0: expected 1 or more"),
    ("--partition 0", "--partition 0: no effect without --partitions"),
])  # fmt: skip
def test_parts_that_are_none(tmp_path, capsys, flags, message):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    with pytest.raises(SystemExit) as left:
        prepared(tmp_path, "a.jsonl", *flags.split())
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_what_cannot_be_merged_is_refused_and_harms_nothing(tmp_path):
    one = write(tmp_path / "one", [[1, 2], [3]])
    with IndexedWriter(tmp_path / "wide", np.int32) as writer:
        writer.add_document([70_000])
    with pytest.raises(DataError, match="wide.idx: tokens are int32, those of .*one are uint16"):
        merge_datasets.merge([one, str(tmp_path / "wide")], str(tmp_path / "all"))
    with pytest.raises(DataError, match="is one of the inputs"):
        merge_datasets.merge([one, one], one)
    assert IndexedDataset(one).num_tokens == 3 and not (tmp_path / "all.idx").exists()


def test_statistics(tmp_path, capsys):
    prefix = write(tmp_path / "d", [[7] * n for n in (1, 2, 3, 3, 9)])
    assert inspect_data.main([prefix, "--plot", str(tmp_path / "d.png")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "5 documents, 5 sequences, 18 tokens of uint16, ids 7 to 7" in out[0]
    assert "mean 3.6, median 3, shortest 1, longest 9, empty 0" in out[1]
    assert [line.split()[:4] for line in out[2:]] == [
        ["1", "-", "1", "1"], ["2", "-", "3", "3"], ["4", "-", "7", "0"], ["8", "-", "15", "1"]]  # fmt: skip
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_a_document_as_text(tmp_path, capsys):
    prefix = write(tmp_path / "d", [list(b"one"), [*"zwei €".encode(), 256]])
    assert inspect_data.main([prefix, "--document", "1", "0", "--tokenizer-type", "ByteTokenizer"]) == 0
    assert capsys.readouterr().out == "zwei €\none\n"
    with pytest.raises(SystemExit) as left:
        inspect_data.main([prefix, "--document", "2"])
    assert left.value.code == 1 and "document 2 of 2" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_the_samples_of_an_iteration_are_those_the_loader_reads(tmp_path, capsys, rank):
    a, b = (write(tmp_path / name, [list(range(n, n + 200))] * 2) for name, n in (("a", 0), ("b", 300)))
    words = ["3", a, "1", b]
    sizes = "--micro-batch-size 2 --global-batch-size 8 --seq-length 6 --seed 5 --split 100 --dp 2 --iteration 3"
    assert inspect_data.main([*words, *sizes.split(), "--rank", str(rank)]) == 0
    shown = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    samples = open_samples(words, 6, 5, "train", "100")
    loader = BatchLoader(samples, micro_batch_size=2, batch_sizes=BatchSizes(8), dp_rank=rank, dp_size=2, vocab_size=999,
                         consumed_samples=16, prefetch=0)  # fmt: skip
    rows = [[*tokens.tolist(), int(labels[-1])] for batch in loader.next_step()
            for tokens, labels in zip(batch.tokens, batch.labels, strict=True)]  # fmt: skip
    assert shown == [" ".join(map(str, row)) for row in rows]


@pytest.mark.parametrize("flags, message", [
    ("a b", "one prefix at a time"),
    ("a --iteration 1", "needs the run's --seq-length"),
    ("a --iteration 0 --seq-length 4", "--iteration 0: expected 1 or more"),
    ("a --iteration 1 --seq-length 4 --rank 2 --dp 2", "--rank 2: expected 0 to 1"),
    ("a --iteration 1 --seq-length 4 --dp 2 --global-batch-size 3", "not a multiple of micro-batch size x dp = 2"),
    ("", "name a prefix"),
    ("a --data-order megatron", "no effect without --iteration"),
    ("a --iteration 1 --seq-length 4 --data-order megatron", "needs the run's --train-iters or --train-samples"),
    ("a --iteration 1 --seq-length 4 --train-samples 9", "say nothing without it"),
    ("a --iteration 1 --seq-length 4 --data-order megatron --train-iters 9 --global-batch-size 8 --rampup-batch-size 4 2 9",
     "such a run has --train-samples"),
    ("a --iteration 1 --seq-length 4 --global-batch-size 8 --micro-batch-size 4 --rampup-batch-size 4 2 9",
     "no multiples of micro-batch size x dp = 4"),
    ("a --iteration 1 --seq-length 4 --data-schedule b", "one of them"),
])  # fmt: skip
def test_inspection_that_cannot_be(capsys, flags, message):
    with pytest.raises(SystemExit) as left:
        inspect_data.main(flags.split())
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_trained_tokenizer_reads_everything_back(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["the cat sat on the mat and looked at the wide open sea"] * 30))
    folder = str(tmp_path / "tokenizer")
    flags = ["--input", str(tmp_path / "a.jsonl"), "--vocab-size", "270", "--output", folder]
    assert train_tokenizer.main(flags) == 0
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    assert (tokenizer.vocab_size, tokenizer.eod) == (270, 269)
    assert capsys.readouterr().out == f"{folder}: 270 ids, end of document 269\n"
    assert len(tokenizer.encode("the cat")) < 7
    for text in (*TEXTS, " leading", "\t\r\n", "<|endoftext|>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and 269 not in ids
    with pytest.raises(SystemExit):
        train_tokenizer.main(flags)
    assert "is there already" in capsys.readouterr().err


def test_reading_stops_at_the_limit(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS)))
    assert len(list(read_documents([str(tmp_path / "a.jsonl.gz")], ("text",), 30))) == 2


def test_data_remembers_its_tokenizer(tmp_path):
    """Merging refuses what two tokenizers made, and a run warns about data of another tokenizer than its own."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(["1 2 3 4 5 6 7 8 9"] * 9))
    for name, flags in (("null", ["NullTokenizer", "--vocab-size", "50"]), ("bytes", ["ByteTokenizer"])):
        preprocess_data.main(["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / name), "--workers", "0",
                              "--tokenizer-type", *flags])  # fmt: skip
    null, byte = (str(tmp_path / f"{name}_text_document") for name in ("null", "bytes"))
    digest = "e3b0c44298fc1c14"  # of no file
    assert kept(null) == f"NullTokenizer 51 {digest}" and kept(byte) == f"ByteTokenizer 257 {digest}"
    with pytest.raises(DataError, match=f"{byte}: made with tokenizer ByteTokenizer .* but {null} with NullTokenizer"):
        merge_datasets.merge([null, byte], str(tmp_path / "all"))
    plain = write(tmp_path / "plain", [[1, 2, 3]])
    assert kept(plain) is None
    merge_datasets.merge([plain, null, null], str(tmp_path / "all"))
    assert kept(str(tmp_path / "all")) == kept(null)
    for tokenizer, warned in (("NullTokenizer", 0), ("ByteTokenizer", 1), (None, 0)):
        train = TrainConfig(micro_batch_size=1, global_batch_size=1, train_iters=2)
        data = DataConfig(vocab_size=257, tokenizer_type=tokenizer, data_path=(null,))
        config = Config(model=ModelConfig(seq_length=4), train=train, data=data)
        notes = build_splits(config, None).notes
        assert sum("WARNING: the tokenizer is not that of the data" in note for note in notes) == warned


@pytest.mark.parametrize("order", ["schedule", "megatron", "growing"])
def test_the_samples_of_an_iteration_in_other_orders(tmp_path, capsys, order):
    a, b = (write(tmp_path / name, [list(range(n, n + 200))] * 2) for name, n in (("a", 0), ("b", 300)))
    (tmp_path / "phases.txt").write_text(f"0 {a}\n18 1 {a} 3 {b}\n")
    sizes = "--micro-batch-size 2 --global-batch-size 8 --seq-length 6 --seed 5 --dp 2 --iteration 3"
    words = {"schedule": ["--data-schedule", str(tmp_path / "phases.txt")],
             "megatron": ["3", a, "1", b, *"--split 100 --data-order megatron --train-iters 10".split()],
             "growing": ["3", a, "1", b, *"--split 100 --data-order megatron --train-samples 77".split(),
                         *"--rampup-batch-size 4 4 16".split()]}[order]  # fmt: skip
    assert inspect_data.main([*words, *sizes.split()]) == 0
    shown = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    data = {"data_schedule": str(tmp_path / "phases.txt")} if order == "schedule" else {
        "data_path": ("3", a, "1", b), "split": "100", "data_order": "megatron"}  # fmt: skip
    length = {"train_samples": 77, "rampup_batch_size": (4, 4, 16)} if order == "growing" else {}
    train = TrainConfig(micro_batch_size=2, global_batch_size=8, train_iters=10, seed=5, **length)
    samples = build_splits(Config(model=ModelConfig(seq_length=6), train=train, data=DataConfig(**data)), None).train
    numbers = (8, 9) if order == "growing" else (16, 17, 20, 21)  # of the third step
    assert shown == [" ".join(map(str, samples[number])) for number in numbers]
