"""JSON lines, Parquet, plain text or a Hugging Face data set -> Megatron's .bin/.idx.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/folder

Writes {output-prefix}_{key}_document.bin and .idx for each JSON key, the name to give to --data-path, and .tokenizer, which
training compares with its own. Documents keep their order whatever the number of workers. The reader hands out pieces of raw
documents, workers turn them into token arrays, and the writer appends: only a few pieces are in memory at any time. How far it
has come is written down every few seconds in {output-prefix}.progress.json: killed, the same command goes on from there, to the
same bytes.
"""

import argparse
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron_lite.data.indexed import DataError, IndexedWriter, Mark, best_dtype, publish
from megatron_lite.tokenizers import Tokenizer, TokenizerError, build_tokenizer
from megatron_lite.tokenizers.fingerprint import fingerprint, keep
from tools.encode_texts import BadDocument, Encoded, Job, Piece, encode_piece, run_ordered
from tools.text_inputs import LIBRARY, Document, Position, Selection, has_keys, is_dataset, read_documents, stored_bytes, there
from tools.tokenizer_flags import add_tokenizer_flags, tokenizer_values

PIECE_BYTES = 1 << 19  # text handed to a worker at once: enough to hide the hand-over, little enough to bound memory
SAVE_SECONDS = 2.0  # between two records of the progress: at most so much is done again after a kill
EXAMPLES = 5  # refused documents that are shown


@dataclass(frozen=True)
class Work:
    """What is to be written from what. `part` (i, n): only documents i, i + n, i + 2n, ... of the inputs."""

    inputs: list[str]
    prefix: str
    tokenizer: Tokenizer
    fingerprint: str  # of the tokenizer
    job: Job
    max_bytes: int | None = None
    part: tuple[int, int] = (0, 1)
    selection: Selection = Selection()

    def output(self, key: str) -> str:
        """The prefix of a key's files."""
        return f"{self.prefix}_{key}_document"

    @property
    def record(self) -> str:
        """The file that says how far it has come."""
        return f"{self.prefix}.progress.json"

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """What decides the bytes that are written: work may only be gone on with where all of it is as it was."""
        files = [os.stat(name) if os.path.isfile(name) else None for name in self.inputs]
        return {
            "--input": [[name, stat and [stat.st_size, stat.st_mtime_ns]] for name, stat in zip(self.inputs, files, strict=True)],
            "--json-keys": list(self.job.keys), "--append-eod": self.job.append_eod, "--max-bytes": self.max_bytes,
            "--parse-special-tokens": self.job.special, "--partition": list(self.part),
            "--dataset-split and --dataset-config": list(asdict(self.selection).values()),
            "the tokenizer": self.fingerprint,
            "the version of Python": platform.python_version() if LIBRARY in self.inputs else None,
        }  # fmt: skip


@dataclass
class Totals:
    """The summary, per key where it differs by key."""

    documents: dict[str, int]
    tokens: dict[str, int]
    empty: dict[str, int]
    refused: int = 0
    first_refused: list[str] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        """Count one piece."""
        for key, lengths in encoded.lengths.items():
            self.documents[key] += len(lengths)
            self.tokens[key] += int(lengths.sum())
            self.empty[key] += encoded.empty[key]
        self.refused += len(encoded.refused)
        self.first_refused = (self.first_refused + encoded.refused)[:EXAMPLES]


@dataclass
class Progress:
    """How far the work has come; `sealed`: only the names are missing."""

    position: Position
    totals: Totals
    marks: dict[str, Mark] = field(default_factory=dict)  # by key; empty at the beginning
    sealed: bool = False

    def save(self, work: Work) -> None:
        """Write it down, all or nothing."""
        with open(work.record + ".tmp", "w", encoding="utf-8") as file:
            json.dump({"work": work.description, "progress": asdict(self)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work.record + ".tmp", work.record)


def progress_of(work: Work) -> tuple[Progress, str]:
    """(where to go on, a line about it): from the beginning unless the same work was begun before."""
    fresh = Progress(Position(), Totals(*(dict.fromkeys(work.job.keys, 0) for _ in range(3))))
    try:
        with open(work.record, encoding="utf-8") as file:
            saved = json.load(file)
        was, now, progress = saved["work"], work.description, saved["progress"]
        marks = {key: Mark(*mark) for key, mark in progress["marks"].items()}
        begun = Progress(Position(**progress["position"]), Totals(**progress["totals"]), marks, progress["sealed"])
    except FileNotFoundError:
        return fresh, ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return fresh, f"{work.record} cannot be read ({error}): starting over"
    changed = [name for name in now if was.get(name) != now[name]]
    if changed:
        return fresh, f"{', '.join(changed)} changed since an unfinished run: starting over"
    return begun, f"going on after {begun.position.documents:,} documents of an unfinished run"


def pieces(documents: Iterator[Document], position: Position, part: tuple[int, int]) -> Iterator[Piece]:
    """This part's documents in groups of about PIECE_BYTES."""
    group, size = [], 0
    for document in documents:
        if (position.documents - 1) % part[1] != part[0]:
            continue
        group.append(document)
        size += len(document.raw) + 64
        if size >= PIECE_BYTES:
            yield Piece(replace(position), group)
            group, size = [], 0
    if group:
        yield Piece(replace(position), group)


def preprocess(work: Work, workers: int) -> Totals:
    """Write the data sets of all keys; nothing appears under their names unless everything went well.

    An error removes what was written, unless the work is long enough for its progress to be on record.
    """
    progress, note = progress_of(work)
    if note:
        print(note, file=sys.stderr)
    dtype = best_dtype(work.tokenizer.vocab_size)
    writers: dict[str, IndexedWriter] = {}
    try:
        if not progress.sealed:
            for key in work.job.keys:
                writers[key] = IndexedWriter(work.output(key), dtype, progress.marks.get(key))
            if not progress.marks:
                _remove(work.record)  # of other work; what it was about is overwritten from here on
            convert(work, progress, writers, workers)
            for writer in writers.values():
                writer.seal()
            progress.sealed = True
            progress.save(work)
    except BaseException:
        for writer in writers.values():
            if os.path.exists(work.record):
                writer.suspend()
            else:
                writer.abort()
        raise
    for key in work.job.keys:
        keep(work.output(key), work.fingerprint)
        publish(work.output(key))
    for writer in writers.values():
        writer.suspend()
    _remove(work.record)
    return progress.totals


def convert(work: Work, progress: Progress, writers: dict[str, IndexedWriter], workers: int) -> None:
    """Read, tokenise and append, from where `progress` is to the end."""
    position = replace(progress.position)
    documents = read_documents(work.inputs, work.job.keys, work.max_bytes, position, work.selection)
    task = functools.partial(encode_piece, work.tokenizer, work.job)
    results = run_ordered(task, pieces(documents, position, work.part), workers)
    saved = time.monotonic()
    with Bar(work, progress.position) as bar:
        for encoded in results:
            for key, writer in writers.items():
                writer.add_documents(encoded.tokens[key], encoded.lengths[key])
            progress.totals.add(encoded)
            progress.position = encoded.position
            bar.show(encoded)
            if time.monotonic() - saved >= SAVE_SECONDS:
                progress.marks = {key: writer.mark() for key, writer in writers.items()}
                progress.save(work)
                saved = time.monotonic()
    for key, count in progress.totals.documents.items():
        if count == 0:
            raise DataError(f"--input {' '.join(work.inputs)}: no document with text under {key!r}, nothing written")


class Bar:
    """Share of the inputs, time left, documents/s and MB/s of text; nothing where there is no terminal."""

    def __init__(self, work: Work, position: Position):
        from tqdm import tqdm

        self.sizes = [os.path.getsize(name) if os.path.isfile(name) else 0 for name in work.inputs]
        self.whole, self.max_bytes = stored_bytes(work.inputs), work.max_bytes
        self.documents, self.raw_bytes, self.started = 0, 0, time.monotonic()
        known = self.whole or self.max_bytes
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}" if known else "{desc}: {elapsed}{postfix}"
        self.bar = tqdm(total=1.0, initial=self.share(position), disable=None, desc="preprocess", bar_format=form)

    def share(self, position: Position) -> float:
        """Of the work that is done at a position: of the bytes on disk, or of --max-bytes, whichever ends first."""
        stored = (sum(self.sizes[: position.source]) + position.stored) / self.whole if self.whole else 0.0
        return min(1.0, max(stored, position.text / self.max_bytes if self.max_bytes else 0.0))

    def show(self, encoded: Encoded) -> None:
        """Count one piece."""
        self.documents += encoded.documents
        self.raw_bytes += encoded.raw_bytes
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = f"{self.documents / seconds:,.0f} documents/s, {self.raw_bytes / seconds / 1e6:.1f} MB/s"
        self.bar.set_postfix_str(speed, refresh=False)
        self.bar.update(self.share(encoded.position) - self.bar.n)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.remove(path)


def report(totals: Totals, work: Work) -> None:
    """The summary: what was written on stdout, examples of what was refused on stderr."""
    for message in totals.first_refused:
        print(f"skipped: {message}", file=sys.stderr)
    for key, documents in totals.documents.items():
        print(
            f"{work.output(key)}: {documents} documents, {totals.tokens[key]} tokens, "
            f"{totals.empty[key]} empty dropped, {totals.refused} lines refused"
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="preprocess_data",
        description="JSON lines, Parquet, plain text, data sets -> Megatron's .bin/.idx",
        allow_abbrev=False,
    )
    add = result.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="*.jsonl, *.ndjson or *.json: one JSON object per line; *.parquet: one document per row; any other file: one "
        "document of plain UTF-8 text; each but Parquet also as *.gz or *.zst; a folder, or hub:NAME in the Hugging Face Hub: "
        f"what datasets.load_dataset makes of it; {LIBRARY}: the sources of Python's standard library and its language "
        "reference, which need no download",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read; each gets its own output")
    add("--dataset-split", default=None, metavar="NAME", help="split of a folder or hub:NAME (default: train)")
    add("--dataset-config", default=None, metavar="NAME", help="configuration of a folder or hub:NAME")
    add("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document id")
    add("--parse-special-tokens", action="store_true", help="text that spells a special token becomes it (default: stays text)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0 works in this one (default: all cores)")
    add_tokenizer_flags(result, required=True)
    add("--skip-bad-lines", action="store_true", help="count lines that cannot be used, do not stop at the first")
    add("--partitions", type=int, default=1, metavar="N", help="cut the documents into N parts, for as many machines")
    add("--partition", type=int, metavar="I", help="the part to do here, 0 to N - 1; writes PREFIX_I_KEY_document, to be joined "
        "by tools/merge_datasets.py")  # fmt: skip
    add("--max-bytes", type=int, help="stop after this much input text")
    return result


def problems(arguments: argparse.Namespace) -> list[str]:
    """Everything wrong with the flags, each with what would work."""
    found = [f"--input {name}: no such file or folder (hub:{name} would be in the Hub)" if name.count("/") == 1
             else f"--input {name}: no such file" for name in arguments.input if not there(name)]  # fmt: skip
    keys = " ".join(arguments.json_keys)
    plain = [name for name in arguments.input if not has_keys(name)]
    if plain and len(arguments.json_keys) > 1:
        found.append(f"--json-keys {keys}: the plain text {plain[0]} has one field, give one key")
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        found.append(f"--json-keys {keys}: a key is given twice")
    for flag in ("dataset_split", "dataset_config"):
        if (value := getattr(arguments, flag)) is not None and not any(map(is_dataset, arguments.input)):
            found.append(f"--{flag.replace('_', '-')} {value}: no effect without a folder or hub:NAME as --input, leave it out")
    if arguments.workers < 0:
        found.append(f"--workers {arguments.workers}: expected 0 (in this process) or more")
    if arguments.max_bytes is not None and arguments.max_bytes < 1:
        found.append(f"--max-bytes {arguments.max_bytes}: expected 1 or more")
    parts, part = arguments.partitions, arguments.partition
    if parts < 1:
        found.append(f"--partitions {parts}: expected 1 or more")
    elif parts == 1 and part is not None:
        found.append(f"--partition {part}: no effect without --partitions, leave it out")
    elif parts > 1 and (part is None or not 0 <= part < parts):
        given = "" if part is None else f" --partition {part}"
        found.append(f"--partitions {parts}{given}: give --partition 0 to {parts - 1}")
    if arguments.vocab_size is not None and arguments.tokenizer_type not in ("NullTokenizer", "TikTokenizer"):
        found.append(f"--vocab-size {arguments.vocab_size}: no effect with {arguments.tokenizer_type}, leave it out")
    return found


def work_of(arguments: argparse.Namespace) -> Work:
    """The command line as work. Raises TokenizerError for what the tokenizer cannot do."""
    values = dict(tokenizer_values(arguments))
    tokenizer = build_tokenizer(**values)
    job = Job(tuple(arguments.json_keys), arguments.append_eod, arguments.skip_bad_lines,
              arguments.parse_special_tokens)  # fmt: skip
    tokenizer.encode_batch([], job.special)  # refused before any work
    if job.append_eod:
        _ = tokenizer.eod
    part = arguments.partition or 0, arguments.partitions
    prefix = arguments.output_prefix + (f"_{part[0]}" if part[1] > 1 else "")
    selection = Selection(arguments.dataset_split or "train", arguments.dataset_config)
    text = fingerprint(**values | {"vocab_size": tokenizer.vocab_size})
    return Work(arguments.input, prefix, tokenizer, text, job, arguments.max_bytes, part, selection)


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for input that cannot be used, with one line each."""
    arguments = parser().parse_args(argv)
    if found := problems(arguments):
        parser().exit(2, "".join(f"preprocess_data: error: {problem}\n" for problem in found))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are what runs side by side, not threads in each
    work = None
    try:
        work = work_of(arguments)
        totals = preprocess(work, arguments.workers)
    except (DataError, TokenizerError, BadDocument, OSError) as error:
        parser().exit(1, f"preprocess_data: error: {error}{what_is_kept(work)}\n")
    except BrokenProcessPool:
        text = "a worker process died, perhaps for lack of memory; try --workers 1"
        parser().exit(1, f"preprocess_data: error: {text}{what_is_kept(work)}\n")
    except KeyboardInterrupt:
        parser().exit(130, f"preprocess_data: stopped{what_is_kept(work)}\n")
    report(totals, work)
    return 0


def what_is_kept(work: Work | None) -> str:
    """What a person should know about work that has ended early."""
    return "; what was done is kept, the same command goes on with it" if work and os.path.exists(work.record) else ""


if __name__ == "__main__":
    sys.exit(main())
