"""tools/preprocess_data.py beside a bare loop over `encode_batch` of the tokenizers library: speed and memory.

    python benchmarks/preparation.py                                  40 MB, three rounds
    python benchmarks/preparation.py --megabytes 200 --rounds 1 --out results.json

The text is the embedded corpus, repeated; the tokenizer a byte-level BPE of 32,000 ids learnt from it. The bare loop has its
texts in memory and one core, and takes the ids; `bare x 2` is two such processes at once, what the machine gives. Ours reads
JSON lines and ends with a data set on disk. Tokens per second count from the first piece to the last, `whole` is the command
with its start. Contenders take turns; ratios are medians over rounds of ratios inside a round, and that per second of
processor time does not mind what else the machine does. Memory is the resident memory of all processes of a command together,
at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.data.corpus import python_library_texts  # noqa: E402
from tools import preprocess_data, train_tokenizer  # noqa: E402

BATCH = 1 << 19  # bytes of text in one call of the bare loop, as in one piece of ours
CONTENDERS = ("bare", "ours --workers 0", "bare x 2", "ours --workers 1", "ours --workers 2")


def texts(megabytes: float) -> Iterator[str]:
    """The embedded corpus, repeated, up to so much text."""
    left = megabytes * 1e6
    while left > 0:
        for _, text in python_library_texts():
            if left <= 0:
                return
            yield text
            left -= len(text.encode())


def bare(folder: Path, share: tuple[int, int]) -> dict:
    """One process of the bare loop: documents i, i + n, ... of the file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    batches, size = [[]], 0
    with open(folder / "text.jsonl", encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number % share[1] == share[0]:
                batches[-1].append(json.loads(line)["text"])
                size += len(line)
                if size >= BATCH:
                    batches.append([])
                    size = 0
    tokenizer.encode_batch(batches[0])
    started, used = time.perf_counter(), time.process_time()
    tokens = sum(len(encoding.ids) for batch in batches for encoding in tokenizer.encode_batch(batch, add_special_tokens=False))
    times = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}
    return times | {"tokens": tokens}


def ours(folder: Path, workers: int) -> dict:
    """The tool in this process, with a clock between its first and its last piece."""
    clock, run_ordered = {"tokens": 0}, preprocess_data.run_ordered

    def timed(task, items, workers):
        for encoded in run_ordered(task, items, workers):
            if "first" in clock:
                clock["tokens"] += len(encoded.tokens["text"])
            clock["last"] = time.perf_counter(), time.process_time()
            clock.setdefault("first", clock["last"])
            yield encoded

    preprocess_data.run_ordered = timed
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        preprocess_data.main(["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "out"),
                              "--workers", str(workers), "--tokenizer-type", "HuggingFaceTokenizer", "--append-eod",
                              "--tokenizer-model", str(folder / "tokenizer")])  # fmt: skip
        sys.stdout = sys.__stdout__
    seconds, cpu_seconds = (after - before for before, after in zip(clock["first"], clock["last"], strict=True))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": clock["tokens"]}


def resident(pid: int) -> int:
    """Bytes of a process and its children now."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)


def turn(name: str, folder: Path) -> dict:
    """Run one contender; its speed in MB/s of text, and its memory."""
    parts = 2 if name == "bare x 2" else 1
    commands = [[sys.executable, __file__, "--be", name, str(folder), str(part), str(parts)] for part in range(parts)]
    started, peak = time.perf_counter(), 0
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for command in commands]
    while any(process.poll() is None for process in running):
        peak = max(peak, sum(resident(process.pid) for process in running))
        time.sleep(0.05)
    whole = time.perf_counter() - started
    if any(process.returncode for process in running):
        raise RuntimeError(f"{name} ended with {[process.returncode for process in running]}")
    found = [json.loads(process.stdout.read()) for process in running]
    tokens = sum(one["tokens"] for one in found) / 1e6
    cpu_seconds = sum(one["cpu_seconds"] for one in found)  # without those of workers
    return {"steady": tokens / max(one["seconds"] for one in found), "per_cpu_second": tokens / cpu_seconds,
            "whole_seconds": whole, "peak_mb": peak / 1e6}  # fmt: skip


def be(name: str, folder: Path, share: tuple[int, int]) -> dict:
    """What a process of this program does for a contender."""
    return bare(folder, share) if name.startswith("bare") else ours(folder, int(name.split()[-1]))


def measure(folder: Path, rounds: int) -> dict[str, list[dict]]:
    """All contenders, turn by turn."""
    found = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name in CONTENDERS:
            found[name].append(turn(name, folder))
    return found


def ratio(found: dict[str, list[dict]], over: str, under: str, what: str = "steady") -> float:
    return statistics.median(a[what] / b[what] for a, b in zip(found[over], found[under], strict=True))


def summary(found: dict[str, list[dict]], megabytes: float) -> dict:
    """Medians and ratios."""
    rows = {name: {key: statistics.median(one[key] for one in turns) for key in turns[0]} for name, turns in found.items()}
    for name, row in rows.items():
        row["whole"] = megabytes / row["whole_seconds"] if name.startswith("ours") else None
    return {"megabytes": megabytes, "rows": rows, "ours / bare, one core": ratio(found, "ours --workers 0", "bare"),
            "ours / bare, per second of processor time": ratio(found, "ours --workers 0", "bare", "per_cpu_second"),
            "2 workers / 1 worker": ratio(found, "ours --workers 2", "ours --workers 1"),
            "2 bare loops / 1": ratio(found, "bare x 2", "bare")}  # fmt: skip


def table(result: dict) -> str:
    lines = [f"{'':20}{'Mtokens/s':>12}{'MB/s whole':>12}{'peak MB':>10}"]
    for name, row in result["rows"].items():
        whole = f"{row['whole']:12.2f}" if row["whole"] else f"{'':12}"
        lines.append(f"{name:20}{row['steady']:12.2f}{whole}{row['peak_mb']:10.0f}")
    lines += [f"{name}: {value:.3f}" for name, value in result.items() if " / " in name]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--be"]:
        _, name, folder, part, parts = argv
        found = be(name, Path(folder), (int(part), int(parts)))
        print(json.dumps(found))
        return 0
    parser = argparse.ArgumentParser(prog="preparation", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--megabytes", type=float, default=40, help="text (default 40)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="ids of the tokenizer (default 32000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
            for text in texts(arguments.megabytes):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        train_tokenizer.train(["python-library"], "text", arguments.vocab_size, str(folder / "tokenizer"), None)
        result = summary(measure(folder, arguments.rounds), arguments.megabytes)
    print(table(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
