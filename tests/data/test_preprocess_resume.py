"""tools/preprocess_data.py cut short anywhere and started again by the same command: the bytes of an undisturbed run."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.data.indexed import IndexedDataset
from tools import preprocess_data
from tools.preprocess_data import main

ROOT = Path(__file__).resolve().parents[2]
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


class Killed(BaseException):
    """Not an error that the tool could answer."""


def rows(count):
    return [{"text": f"{i % 100} {i % 7} " * (1 + i % 5), "more": str(i % 50), "n": i} for i in range(count)]


def jsonl(count):
    """Lines, some of them blank, some bad, some empty."""
    lines = [json.dumps(row) for row in rows(count)]
    for place, line in ((3, ""), (20, "{bad"), (41, '{"text": "", "more": ""}'), (50, " ")):
        lines.insert(place, line)
    return "".join(line + "\n" for line in lines).encode()


def make_jsonl(folder):
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(60))
    (folder / "b.jsonl").write_bytes(jsonl(60))
    return ["--input", str(folder / "a.jsonl"), str(folder / "b.jsonl"), *NULL, "--skip-bad-lines", "--append-eod"]


def make_gzip(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(120)))
    return ["--input", str(folder / "a.jsonl.gz"), *NULL, "--skip-bad-lines"]


def make_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows(120))
    parquet.write_table(table, folder / "a.parquet", row_group_size=17)
    return ["--input", str(folder / "a.parquet"), *NULL, "--json-keys", "text", "more"]


def make_texts(folder):
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"text {n} é " * (n + 1), encoding="utf-8")
    return ["--input", *(str(folder / f"{n}.txt") for n in range(30)), "python-library", *BYTES, "--max-bytes", "60000"]


def make_parts(folder):
    (folder / "a.jsonl").write_bytes(jsonl(200))
    return ["--input", str(folder / "a.jsonl"), *NULL, "--skip-bad-lines", "--partitions", "3", "--partition", "1"]


def make_dataset(folder):
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(120)))
    return ["--input", str(folder / "set"), *NULL]


KINDS = {"jsonl": make_jsonl, "gzip": make_gzip, "parquet": make_parquet, "texts": make_texts, "parts": make_parts,
         "dataset": make_dataset}  # fmt: skip


def outputs(folder, name):
    """Suffix -> bytes of all files of an output prefix."""
    return {path.name.removeprefix(name): path.read_bytes() for path in sorted(folder.glob(f"{name}_*"))}


@pytest.mark.parametrize("kind", [*list(KINDS)[:-1], pytest.param("dataset", marks=pytest.mark.full)])
def test_every_cut_is_gone_on_from(tmp_path, monkeypatch, capsys, kind):
    """Cut at each piece in turn, often twice, then left alone."""
    monkeypatch.setattr(preprocess_data, "PIECE_BYTES", 700)
    flags = [*KINDS[kind](tmp_path), "--workers", "0"]
    assert main([*flags, "--output-prefix", str(tmp_path / "whole")]) == 0
    expected, summary = outputs(tmp_path, "whole"), capsys.readouterr().out
    monkeypatch.setattr(preprocess_data, "SAVE_SECONDS", 0.0)
    add, generator = preprocess_data.Totals.add, random.Random(0)
    cuts = 0
    for trial in range(2):
        prefix = f"cut{trial}"
        while True:
            left = generator.randint(1, 12)

            def counted(totals, encoded):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                add(totals, encoded)

            monkeypatch.setattr(preprocess_data.Totals, "add", counted)
            try:
                main([*flags, "--output-prefix", str(tmp_path / prefix)])
                break
            except Killed:
                cuts += 1
                assert not any(name.endswith((".bin", ".idx")) for name in outputs(tmp_path, prefix)), (
                    "nothing half-made is there"
                )
        assert outputs(tmp_path, prefix) == expected
        assert not list(tmp_path.glob(f"{prefix}*.tmp")) + list(tmp_path.glob(f"{prefix}*.json"))
        printed = capsys.readouterr()
        assert printed.out.replace(prefix, "whole") == summary, "the summary counts what was done before"
    assert cuts >= 2


def command(source, prefix, workers):
    """The tool in a process of its own that writes its progress down after every piece."""
    code = ("import sys; from tools import preprocess_data as tool; tool.SAVE_SECONDS, tool.PIECE_BYTES = 0, 20000\n"
            "if __name__ == '__main__': sys.exit(tool.main(sys.argv[1:]))")  # fmt: skip
    return [
        sys.executable,
        "-c",
        code,
        "--input",
        source,
        "--output-prefix",
        prefix,
        "--workers",
        workers,
        "--append-eod",
        *BYTES,
    ]


def killed_runs(tmp_path, workers, kills, seed):
    """Start, kill without warning after a random number of records, start again; how many kills found it at work."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} " * (i % 90)}) + "\n" for i in range(4000)))
    source, record, hit = str(tmp_path / "a.jsonl"), tmp_path / "out.progress.json", 0
    assert subprocess.run(command(source, "whole", workers), cwd=tmp_path, env=environment(), capture_output=True).returncode == 0
    generator = random.Random(seed)
    for _ in range(kills):
        process = subprocess.Popen(command(source, "out", workers), cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        changes, last = generator.randint(1, 10), None
        while process.poll() is None and changes:
            now = record.stat().st_mtime_ns if record.exists() else None
            changes -= now != last
            last = now
            time.sleep(generator.random() * 0.005)
        process.send_signal(signal.SIGKILL)
        hit += process.wait() == -signal.SIGKILL
        if workers != "0":
            _wait_for_end_of_session(process.pid)
    done = subprocess.run(command(source, "out", workers), cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return hit


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _wait_for_end_of_session(leader):
    """Workers end with their parent, killed though it was."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(leader, signal.SIGKILL)
    raise AssertionError("workers outlived their parent")


def test_killed_at_random_moments(tmp_path):
    assert killed_runs(tmp_path, "0", kills=3, seed=1) >= 1
    assert outputs(tmp_path, "out") == outputs(tmp_path, "whole")
    left = {f"{name}_text_document{ending}" for name in ("out", "whole") for ending in (".bin", ".idx", ".tokenizer")}
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", *left}


@pytest.mark.full
def test_killed_at_random_moments_with_workers(tmp_path):
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert killed_runs(folder, "2", kills=6, seed=seed) >= 2
        assert outputs(folder, "out") == outputs(folder, "whole")


def begun(tmp_path, monkeypatch, *flags):
    """Work that was cut short after three pieces."""
    monkeypatch.setattr(preprocess_data, "PIECE_BYTES", 100)
    monkeypatch.setattr(preprocess_data, "SAVE_SECONDS", 0.0)
    (tmp_path / "a.jsonl").write_bytes("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(60)).encode())
    monkeypatch.setattr(preprocess_data.Bar, "show", lambda bar, encoded: None if encoded.position.documents < 9 else cut())
    with pytest.raises(Killed):
        run(tmp_path, *flags)
    assert (tmp_path / "o.progress.json").exists()
    monkeypatch.undo()


def cut():
    raise Killed


def run(tmp_path, *flags):
    return main(["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "o"), "--workers", "0", *NULL, *flags])


def documents(tmp_path):
    data = IndexedDataset(tmp_path / "o_text_document")
    return [data.document(i).tolist() for i in range(data.num_documents)]


def test_other_flags_or_another_input_start_over_and_say_so(tmp_path, monkeypatch, capsys):
    begun(tmp_path, monkeypatch)
    assert run(tmp_path, "--append-eod") == 0
    assert "--append-eod changed since an unfinished run: starting over" in capsys.readouterr().err
    assert documents(tmp_path) == [[i, 100] for i in range(60)]
    begun(tmp_path, monkeypatch)
    (tmp_path / "a.jsonl").write_text('{"text": "5"}\n')
    assert run(tmp_path) == 0 and "--input changed" in capsys.readouterr().err
    assert documents(tmp_path) == [[5]]


def test_a_record_that_cannot_be_read_starts_over(tmp_path, monkeypatch, capsys):
    begun(tmp_path, monkeypatch)
    for text in ("{", "[]", '{"work": {}}'):
        (tmp_path / "o.progress.json").write_text(text)
        assert run(tmp_path) == 0 and "starting over" in capsys.readouterr().err
        assert documents(tmp_path) == [[i] for i in range(60)]


def test_long_work_survives_a_bad_line(tmp_path, monkeypatch, capsys):
    """With its progress on record an error keeps what was done, and --skip-bad-lines goes on with it."""
    monkeypatch.setattr(preprocess_data, "PIECE_BYTES", 100)
    monkeypatch.setattr(preprocess_data, "SAVE_SECONDS", 0.0)
    lines = [json.dumps({"text": f"{i}"}) for i in range(60)]
    lines[50] = "{bad"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert "a.jsonl:51: malformed JSON" in (error := capsys.readouterr().err) and "what was done is kept" in error
    assert run(tmp_path, "--skip-bad-lines") == 0
    printed = capsys.readouterr()
    assert "going on after" in printed.err and "59 documents, 59 tokens, 0 empty dropped, 1 lines refused" in printed.out
    assert documents(tmp_path) == [[i] for i in range(60) if i != 50]


@pytest.mark.parametrize("done", range(5))
def test_cut_short_while_names_are_given(tmp_path, monkeypatch, capsys, done):
    """Two keys, two renames each: whatever is left is done by the next run."""
    (tmp_path / "a.jsonl").write_text('{"text": "1 2", "more": "3"}\n')
    replace, count = os.replace, 0

    def counted(source, target):
        nonlocal count
        if str(target).endswith((".bin", ".idx")):
            count += 1
            if count > done:
                raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", counted)
    if done < 4:
        with pytest.raises(Killed):
            run(tmp_path, "--json-keys", "text", "more")
        monkeypatch.setattr(os, "replace", replace)
    assert run(tmp_path, "--json-keys", "text", "more") == 0
    assert documents(tmp_path) == [[1, 2]] and IndexedDataset(tmp_path / "o_more_document")[0].tolist() == [3]
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob("*.json"))


def test_ctrl_c_is_one_line(tmp_path, monkeypatch, capsys):
    def interrupted(bar, encoded):
        raise KeyboardInterrupt

    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    monkeypatch.setattr(preprocess_data.Bar, "show", interrupted)
    with pytest.raises(SystemExit) as left:
        run(tmp_path)
    assert left.value.code == 130 and capsys.readouterr().err == "preprocess_data: stopped\n"
    assert os.listdir(tmp_path) == ["a.jsonl"]
