"""tools/preprocess_data.py: what goes in comes out, whatever the locale, the number of workers or a bad line."""

import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedDataset
from tools.preprocess_data import main

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "tools", "preprocess_data.py")
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


def lines(path, rows):
    """A JSONL file: strings as they are, other rows as JSON."""
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    path.write_bytes(text.encode())
    return str(path)


def run(source, prefix, *flags, tokenizer=NULL, workers="0"):
    """In this process."""
    inputs = [source] if isinstance(source, str) else source
    return main(
        ["--input", *inputs, "--output-prefix", str(prefix), "--workers", workers, *tokenizer, *flags]
    )  # fmt: skip


def documents(prefix, key="text"):
    data = IndexedDataset(f"{prefix}_{key}_document")
    return [data.document(i).tolist() for i in range(data.num_documents)]


def failure(capsys, code, *arguments, **more):
    """The one line on stderr of a run that must fail."""
    with pytest.raises(SystemExit) as caught:
        run(*arguments, **more)
    assert caught.value.code == code
    return capsys.readouterr().err


def test_d01_empty_documents_are_dropped_and_counted(tmp_path, capsys):
    source = lines(tmp_path / "a.jsonl", [{"text": ""}, {"text": "1 2"}, {"text": ""}])
    assert run(source, tmp_path / "o", "--append-eod") == 0
    assert documents(tmp_path / "o") == [[1, 2, 100]]
    assert "1 documents, 3 tokens, 2 empty dropped, 0 lines refused" in capsys.readouterr().out


def test_d02_lengths_include_the_end_of_document(tmp_path):
    run(
        lines(tmp_path / "a.jsonl", [{"text": "1 2"}, {"text": "3"}, {"text": "4 5 6"}]), tmp_path / "o", "--append-eod"
    )
    data = IndexedDataset(f"{tmp_path}/o_text_document")
    assert int(data.lengths.sum()) * data.dtype.itemsize == os.path.getsize(f"{tmp_path}/o_text_document.bin")
    assert documents(tmp_path / "o") == [[1, 2, 100], [3, 100], [4, 5, 6, 100]]


BAD = {
    "{oops": "malformed JSON",
    '"text"': "a JSON str, expected an object",
    "42": "a JSON int, expected an object",
    '["text"]': "a JSON list, expected an object",
    '{"body": "1"}': "has no key 'text'",
    '{"text": null}': "holds NoneType, expected text",
    '{"text": "1 x"}': "'x' is not an id",
    '{"text": "\\ud800"}': "half a surrogate pair",
    "[" * 100000: "malformed JSON",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_d03_a_bad_line_names_file_and_line_or_is_counted(tmp_path, capsys, line):
    source = lines(tmp_path / "a.jsonl", ["", {"text": "1"}, "  \t", line, "", {"text": "2"}])
    error = failure(capsys, 1, source, tmp_path / "o")
    assert f"{source}:4: " in error and BAD[line] in error and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.jsonl"], "nothing half-written"
    assert run(source, tmp_path / "o", "--skip-bad-lines") == 0
    assert documents(tmp_path / "o") == [[1], [2]]
    shown = capsys.readouterr()
    assert "1 lines refused" in shown.out and f"skipped: {source}:4" in shown.err


def test_bytes_that_are_not_utf8_are_a_bad_line(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1"}\n{"text": "\xff"}\n')
    assert "a.jsonl:2: not UTF-8 text" in failure(capsys, 1, str(tmp_path / "a.jsonl"), tmp_path / "o")


def test_d04_the_chosen_key_is_read(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "1", "body": "2 3"}, {"text": "4", "body": "5"}])
    run(source, tmp_path / "o", "--json-keys", "body")
    assert documents(tmp_path / "o", "body") == [[2, 3], [5]]
    assert not os.path.exists(f"{tmp_path}/o_text_document.bin")
    run(source, tmp_path / "p", "--json-keys", "body", "text")
    assert documents(tmp_path / "p", "body") == [[2, 3], [5]] and documents(tmp_path / "p") == [[1], [4]]


def test_d05_d07_locale_workers_and_folder_make_no_difference(tmp_path):
    """As a script, from elsewhere, under the C locale, with and without workers; order kept over many chunks."""
    rows = [{"text": f"日本語 😀 é {i} " + "x" * (i % 7) * 3000} for i in range(300)]
    source = lines(tmp_path / "a.jsonl", rows)
    environments = [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}]
    for name, workers, extra in zip("ab", ("2", "0"), environments, strict=True):
        command = [sys.executable, SCRIPT, "--input", source, "--output-prefix", name, "--workers", workers, *BYTES]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **extra}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "300 documents" in done.stdout
    for ending in ("bin", "idx"):
        assert (tmp_path / f"a_text_document.{ending}").read_bytes() == (
            tmp_path / f"b_text_document.{ending}"
        ).read_bytes()
    assert bytes(documents(tmp_path / "a")[299]).decode() == rows[299]["text"]


def test_d08_many_short_documents_need_little_memory(tmp_path):
    """Well under 100 bytes per document: 60k and 10k documents, in processes of their own, differ by a few MB."""
    peaks = []
    for count in (10_000, 60_000):
        source = tmp_path / f"{count}.jsonl"
        source.write_bytes(b'{"text": "7"}\n' * count)
        command = [sys.executable, SCRIPT, "--input", str(source), "--output-prefix", str(tmp_path / "o")]
        process = subprocess.Popen([*command, "--workers", "0", *NULL], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        peaks.append(usage.ru_maxrss * 1024)
    assert (peaks[1] - peaks[0]) / 50_000 < 60
    assert IndexedDataset(f"{tmp_path}/o_text_document").num_documents == 60_000


def test_an_error_in_a_worker_reaches_the_user(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "1"}] * 5 + ["{"])
    command = [sys.executable, SCRIPT, "--input", source, "--output-prefix", str(tmp_path / "o"), "--workers", "1"]
    done = subprocess.run([*command, *NULL], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and f"{source}:6: malformed JSON" in done.stderr
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_plain_text_is_one_document_per_file(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes("\ufefféa\n\nb".encode())
    (tmp_path / "b.md").write_bytes(b"c")
    (tmp_path / "c.txt").write_bytes(b"")
    mixed = [str(tmp_path / "a.txt"), lines(tmp_path / "d.jsonl", [{"text": "d"}]), str(tmp_path / "b.md")]
    run([*mixed, str(tmp_path / "c.txt")], tmp_path / "o", "--append-eod", tokenizer=BYTES)
    assert documents(tmp_path / "o") == [[*"éa\n\nb".encode(), 256], [ord("d"), 256], [ord("c"), 256]]
    assert "3 documents, 11 tokens, 1 empty dropped" in capsys.readouterr().out


def test_json_lines_under_another_name_are_not_taken_for_text(tmp_path, capsys):
    source = lines(tmp_path / "a.txt", [{"text": "1"}])
    assert "a.txt: looks like JSON lines" in failure(capsys, 1, source, tmp_path / "o")


def test_max_bytes(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": f"{i}"} for i in range(10, 90)])  # 15 bytes a line
    run(source, tmp_path / "o", "--max-bytes", "31")
    assert documents(tmp_path / "o") == [[10], [11], [12]]
    (tmp_path / "a.txt").write_bytes("aé日b".encode())
    for limit, text in ((1, "a"), (2, "a"), (3, "aé"), (5, "aé"), (6, "aé日"), (7, "aé日b"), (99, "aé日b")):
        run(str(tmp_path / "a.txt"), tmp_path / "t", "--max-bytes", str(limit), tokenizer=BYTES)
        assert documents(tmp_path / "t") == [list(text.encode())]
    run("python-library", tmp_path / "l", "--max-bytes", "100000", "--append-eod", tokenizer=BYTES)
    data = IndexedDataset(f"{tmp_path}/l_text_document")
    assert 99_997 <= data.num_tokens - data.num_documents <= 100_000
    assert (np.array([data.document(i)[-1] for i in range(data.num_documents)]) == 256).all()


def word_level(folder, eos):
    """A Hugging Face folder whose model has whole words as tokens, the end of text among them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"} if eos else {}))
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def test_t02_t07_append_eod_with_hugging_face(tmp_path, capsys):
    source = lines(tmp_path / "a.jsonl", [{"text": "a b"}, {"text": "b <eos> a"}])
    without, tokenizer = word_level(tmp_path / "without", False), word_level(tmp_path / "with", True)
    assert "has no eos_token" in failure(capsys, 1, source, tmp_path / "o", "--append-eod", tokenizer=without)
    # A model that knows the separator as a word cannot keep such text apart from a document's end: never silently.
    error = failure(capsys, 1, source, tmp_path / "o", "--append-eod", tokenizer=tokenizer)
    assert "a.jsonl:2: this text gives the end-of-document id 0 itself" in error
    run(source, tmp_path / "o", "--append-eod", "--skip-bad-lines", tokenizer=tokenizer)
    assert documents(tmp_path / "o") == [[1, 2, 0]]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--workers", "-1"], "--workers -1: expected 0"),
        (["--max-bytes", "0"], "--max-bytes 0: expected 1 or more"),
        (["--json-keys", "a", "a"], "a key is given twice"),
        (["--tokenizer-type", "ByteTokenizer"], "--vocab-size 100: no effect with ByteTokenizer"),
        (["--append"], "unrecognized arguments: --append"),
        (["--tokenizer-type", "Nonsense"], "invalid choice"),
        (["--input", "not-here.jsonl", "nor-here.txt"], "not-here.jsonl: no such file\n"),
    ],
)
def test_wrong_flags_are_named(tmp_path, capsys, flags, message):
    source = lines(tmp_path / "a.jsonl", [{"text": "1"}])
    assert message in failure(capsys, 2, source, tmp_path / "o", *flags)


def test_nothing_to_write_is_an_error(tmp_path, capsys):
    source = lines(tmp_path / "a.jsonl", [{"text": ""}, ""])
    assert "no document with text under 'text'" in failure(capsys, 1, source, tmp_path / "o")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "7 " * 1000}] * 400)
    command = [sys.executable, SCRIPT, "--input", source, "--output-prefix", str(tmp_path / "o"), "--workers", "0"]
    done = subprocess.run(
        [*command, *NULL], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "File too large" in done.stderr, done.stderr
    assert os.listdir(tmp_path) == ["a.jsonl"]
