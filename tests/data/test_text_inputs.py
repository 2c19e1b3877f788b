"""What `datasets` opens, special tokens that are asked for, batches, data of more than 2^31 bytes under preparation."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter, Mark, write_index
from megatron_lite.data.samples import WindowSamples, permute
from megatron_lite.tokenizers import build_tokenizer
from tools import preprocess_data
from tools.text_inputs import Position, Selection, read_documents

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["hello", "naïve 文字 🙂", "a\nb", "x" * 500, "last"]


def prepared(tmp_path, name, *more, key="text"):
    """Documents of an input as text."""
    flags = ["--tokenizer-type", "ByteTokenizer", "--workers", "0", "--json-keys", key, *more]
    assert preprocess_data.main(["--input", str(name), "--output-prefix", str(tmp_path / "out"), *flags]) == 0
    data = IndexedDataset(tmp_path / f"out_{key}_document")
    return [bytes(data.document(n).tolist()).decode() for n in range(data.num_documents)]


def failure(capsys, code, *arguments):
    with pytest.raises(SystemExit) as left:
        prepared(*arguments)
    assert left.value.code == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.fixture
def folder(tmp_path):
    """JSON lines in two splits."""
    (tmp_path / "set").mkdir()
    for split, texts in (("train", TEXTS), ("test", TEXTS[:2])):
        rows = "".join(json.dumps({"text": text, "body": text.upper()}) + "\n" for text in texts)
        (tmp_path / "set" / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    return tmp_path / "set"


def test_a_folder(tmp_path, folder):
    assert prepared(tmp_path, folder) == TEXTS
    assert prepared(tmp_path, folder, "--dataset-split", "test") == TEXTS[:2]
    assert prepared(tmp_path, folder, key="body") == [text.upper() for text in TEXTS]


def test_a_folder_of_parquet_and_one_saved_to_disk(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(5))})
    (tmp_path / "set").mkdir()
    rows.to_parquet(str(tmp_path / "set" / "part.parquet"))
    assert prepared(tmp_path, tmp_path / "set") == TEXTS
    rows.save_to_disk(str(tmp_path / "saved"))
    assert prepared(tmp_path, tmp_path / "saved") == TEXTS
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path / "both"))
    assert prepared(tmp_path, tmp_path / "both", "--dataset-split", "test") == TEXTS[:1]


def test_data_sets_that_cannot_be_opened_are_one_line(tmp_path, folder, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert "datasets cannot read it" in failure(capsys, 1, tmp_path, tmp_path / "empty")
    assert "has no column 'title' (--json-keys), only text, body" in failure(capsys, 1, tmp_path, folder, "--json-keys", "title")
    assert "datasets cannot read it" in failure(capsys, 1, tmp_path, folder, "--dataset-split", "nothing")
    assert "--dataset-split x: no effect without a folder" in failure(capsys, 2, tmp_path, __file__, "--dataset-split", "x")
    assert "owner/set: no such file or folder (hub:owner/set would be in the Hub)" in failure(capsys, 2, tmp_path, "owner/set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in failure(capsys, 1, tmp_path, "hub:owner/set")


def test_nobody_pays_for_datasets_who_does_not_use_it(tmp_path):
    """Nor for torch, transformers or pyarrow."""
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    code = ("import sys; from tools.preprocess_data import main\n"
            "main(sys.argv[1:])\n"
            "print([name for name in ('datasets', 'torch', 'transformers', 'pyarrow') if name in sys.modules])")  # fmt: skip
    flags = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "o"), "--workers", "0", "--tokenizer-type",
             "ByteTokenizer"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done


def test_reading_goes_on_from_any_position(tmp_path, folder):
    """Whatever was read before, the rest is what is left."""
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.jsonl").write_text('\n{"text": "1"}\n\n{"text": "2"}\n')
    inputs = [str(tmp_path / "a.txt"), str(folder), str(tmp_path / "b.jsonl"), "python-library"]
    every = list(read_documents(inputs, ("text",), 50_000))
    for stop in range(len(every)):
        position = Position()
        reader = read_documents(inputs, ("text",), 50_000, position)
        read = [next(reader) for _ in range(stop)]
        reader.close()
        rest = list(read_documents(inputs, ("text",), 50_000, Position(**vars(position)), Selection()))
        assert read + rest == every and position.documents == stop
    assert [document.where for document in every[:8]] == [
        inputs[0], *(f"{folder}:{n}" for n in range(1, 6)), f"{inputs[2]}:2", f"{inputs[2]}:4"]  # fmt: skip


def word_folder(path):
    """A Hugging Face folder whose end of text is a special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eod>"])
    tokenizer.enable_truncation(5)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eod>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(path)


def test_t07_special_tokens_are_text_unless_asked_for(tmp_path, capsys):
    model = word_folder(tmp_path / "model")
    tokenizer, text = build_tokenizer("HuggingFaceTokenizer", model), "one<eod>two and more"
    assert tokenizer.encode_batch([text, "", text]) == [tokenizer.encode(text), [], tokenizer.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eod not in tokenizer.encode(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    flags = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "o"), "--workers", "0", "--append-eod",
             "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model]  # fmt: skip
    for asked, count in (([], 1), (["--parse-special-tokens"], 2)):
        assert preprocess_data.main([*flags, *asked]) == 0
        assert (IndexedDataset(tmp_path / "o_text_document").document(0) == tokenizer.eod).sum() == count
    error = failure(capsys, 1, tmp_path, tmp_path / "a.jsonl", "--parse-special-tokens")
    assert "ByteTokenizer has no special tokens that text could spell" in error


def test_gpt2_files_as_flags(tmp_path, capsys):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "a.jsonl").write_text('{"text": "abba"}\n')
    flags = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "o"), "--workers", "0", "--append-eod",
             "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(tmp_path / "vocab.json")]  # fmt: skip
    with pytest.raises(SystemExit):
        preprocess_data.main(flags)
    assert "--tokenizer-type GPT2BPETokenizer needs --merge-file" in capsys.readouterr().err
    assert preprocess_data.main([*flags, "--merge-file", str(tmp_path / "merges.txt")]) == 0
    assert IndexedDataset(tmp_path / "o_text_document").document(0).tolist() == [2, 1, 0, 3]


def sparse(path, size):
    """A file of zeros that takes no room."""
    with open(path, "wb") as file:
        file.truncate(size)


def test_a_writer_goes_on_beyond_2_gibibytes(tmp_path):
    """Four documents of 2^30 tokens lie there already; the pointers of what follows pass 2^31 and 2^32 bytes."""
    sparse(tmp_path / "d.bin.tmp", 2**33)
    np.full(4, 2**30, "<i4").tofile(tmp_path / "d.lengths.tmp")
    np.arange(5, dtype="<i8").tofile(tmp_path / "d.documents.tmp")
    writer = IndexedWriter(tmp_path / "d", np.uint16, Mark(2**32, 4, 4))
    writer.add_document([7, 8, 9])
    assert writer.mark() == Mark(2**32 + 3, 5, 5)
    writer.finalize()
    data = IndexedDataset(tmp_path / "d")
    assert data.pointers.tolist() == [0, 2**31, 2**32, 3 * 2**31, 2**33] and data.num_tokens == 2**32 + 3
    assert data.document(4).tolist() == [7, 8, 9] and data.window(2**32 - 1, 3).tolist() == [0, 7, 8]


def test_a_mark_that_the_files_do_not_reach_is_refused(tmp_path):
    writer = IndexedWriter(tmp_path / "d", np.uint16)
    writer.add_document([1, 2])
    mark = writer.mark()
    writer.suspend()
    sparse(tmp_path / "d.bin.tmp", 2)
    with pytest.raises(DataError, match=r"d.bin.tmp: 2 bytes, but 4 were written before"):
        IndexedWriter(tmp_path / "d", np.uint16, mark)
    sparse(tmp_path / "d.bin.tmp", 4)
    writer = IndexedWriter(tmp_path / "d", np.uint16, mark)
    writer.add_document([3])
    writer.finalize()
    assert IndexedDataset(tmp_path / "d").document(1).tolist() == [3]


def test_windows_beyond_2_to_the_31_tokens(tmp_path):
    """8 GiB without room on the disk: a token written where a far sample lies is in that sample."""
    tokens, seq_length = 2**32, 1000
    sparse(tmp_path / "d.bin", 2 * tokens)
    write_index(str(tmp_path / "d.idx"), np.uint16, np.full(4, 2**30, np.int32), np.arange(5))
    samples = WindowSamples(IndexedDataset(tmp_path / "d"), seq_length, seed=1)
    assert len(samples) == (tokens - 1) // seq_length
    far = next(n for n in range(50) if permute(n, len(samples), (1, 0)) * seq_length > 2**31 + 2**30)
    start = permute(far, len(samples), (1, 0)) * seq_length
    with open(tmp_path / "d.bin", "r+b") as file:
        file.seek(2 * (start + 5))
        file.write(b"\x2a\0")
    assert np.flatnonzero(samples[far]).tolist() == [5] and samples[far][5] == 42
