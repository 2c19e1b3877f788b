"""JSON lines, Parquet or plain text -> Megatron's .bin/.idx.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/folder

Writes {output-prefix}_{key}_document.bin and .idx for each JSON key, the name to give to --data-path. Documents keep
their order whatever the number of workers. The reader hands out chunks of raw documents, workers turn them into token
arrays, and the writer appends: only a few chunks are in memory at any time.
"""

import argparse
import functools
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from megatron_lite.data.indexed import DataError, IndexedWriter, best_dtype
from megatron_lite.tokenizers import TOKENIZER_TYPES, Tokenizer, TokenizerError, build_tokenizer
from tools.text_inputs import COMPRESSED, LIBRARY, PARQUET, Document, has_keys, read_documents

CHUNK_BYTES = 1 << 19  # text handed to a worker at once: enough to hide the hand-over, little enough to bound memory


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool
    skip_bad: bool


@dataclass
class Encoded:
    """Token arrays of one chunk of documents, per key."""

    tokens: dict[str, np.ndarray]  # [sum of lengths]
    lengths: dict[str, np.ndarray]  # [documents]
    empty: dict[str, int]
    refused: list[str]  # what was wrong with each document that was skipped
    raw_bytes: int


@dataclass
class Totals:
    """The summary, per key where it differs by key."""

    documents: dict[str, int]
    tokens: dict[str, int]
    empty: dict[str, int]
    refused: int = 0
    first_refused: list[str] = field(default_factory=list)


class BadDocument(ValueError):
    """One document that cannot be used; the message begins with file:line."""


def chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups of documents of about CHUNK_BYTES."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.raw) + 64
        if size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def texts_of(document: Document, keys: tuple[str, ...]) -> list[str]:
    """The text under each key. Raises BadDocument for anything but text there."""
    try:
        text = document.raw.decode()
    except UnicodeDecodeError as error:
        raise BadDocument(f"{document.where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not document.is_json:
        return [text]
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"{document.where}: malformed JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadDocument(f"{document.where}: a JSON {type(row).__name__}, expected an object with {', '.join(keys)}")
    for key in keys:
        if key not in row:
            raise BadDocument(f"{document.where}: has no key {key!r} (--json-keys), only {', '.join(map(repr, row))}")
        if not isinstance(row[key], str):
            raise BadDocument(f"{document.where}: key {key!r} holds {type(row[key]).__name__}, expected text")
        try:
            row[key].encode()
        except UnicodeEncodeError:  # JSON can escape one
            raise BadDocument(f"{document.where}: key {key!r} holds half a surrogate pair, which is no text") from None
    return [row[key] for key in keys]


def ids_of(document: Document, job: Job, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each key's text, end of document not yet appended."""
    try:
        ids = [tokenizer.encode(text) for text in texts_of(document, job.keys)]
    except TokenizerError as error:
        raise BadDocument(f"{document.where}: {error}") from None
    if job.append_eod and any(tokenizer.eod in part for part in ids):
        raise BadDocument(f"{document.where}: this text gives the end-of-document id {tokenizer.eod} itself")
    return ids


@functools.cache
def tokenizer_of(job: Job) -> Tokenizer:
    """A process builds its tokenizer once, not once per chunk."""
    return build_tokenizer(job.tokenizer_type, job.tokenizer_model, job.vocab_size)


def encode_chunk(job: Job, documents: list[Document]) -> Encoded:
    """Tokenise a chunk; runs in a worker."""
    tokenizer = tokenizer_of(job)
    dtype = best_dtype(tokenizer.vocab_size)
    pieces = {key: [] for key in job.keys}
    empty, refused = dict.fromkeys(job.keys, 0), []
    for document in documents:
        try:
            ids_by_key = ids_of(document, job, tokenizer)
        except BadDocument as error:
            if not job.skip_bad:
                raise
            refused.append(str(error))
            continue
        for key, ids in zip(job.keys, ids_by_key, strict=True):
            if not ids:
                empty[key] += 1
                continue
            if job.append_eod:
                ids.append(tokenizer.eod)
            pieces[key].append(np.array(ids, dtype))
    tokens = {key: np.concatenate([np.empty(0, dtype), *parts]) for key, parts in pieces.items()}
    lengths = {key: np.array([len(part) for part in parts], np.int64) for key, parts in pieces.items()}
    return Encoded(tokens, lengths, empty, refused, sum(len(document.raw) for document in documents))


def run_ordered(task: Callable, items: Iterator, workers: int) -> Iterator:
    """`map(task, items)` by worker processes, in order, with at most a few items per worker in flight."""
    if workers == 0:
        yield from map(task, items)
        return
    # spawn: the same on every system, and safe beside the threads of a tokenizer library
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = deque()
        try:
            for item in items:
                running.append(pool.submit(task, item))
                if len(running) > 3 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def preprocess(inputs: list[str], prefix: str, job: Job, workers: int, max_bytes: int | None,
               part: tuple[int, int] = (0, 1)) -> Totals:  # fmt: skip
    """Write the data sets of all keys; nothing appears under the prefix unless everything went well.

    `part` (i, n): only documents i, i + n, i + 2n, ... of the input, for machines that share the work.
    """
    from tqdm import tqdm

    totals = Totals(*(dict.fromkeys(job.keys, 0) for _ in range(3)))
    dtype = best_dtype(tokenizer_of(job).vocab_size)
    unknown = LIBRARY in inputs or any(name.lower().endswith((*COMPRESSED, PARQUET)) for name in inputs)
    size = None if unknown else sum(os.path.getsize(name) for name in inputs)
    size = max_bytes if size is None else min(size, max_bytes or size)
    documents = itertools.islice(read_documents(inputs, job.keys, max_bytes), part[0], None, part[1])
    writers = {}
    try:
        for key in job.keys:
            writers[key] = IndexedWriter(f"{prefix}_{key}_document", dtype)
        results = run_ordered(functools.partial(encode_chunk, job), chunks(documents), workers)
        with tqdm(total=size, unit="B", unit_scale=True, disable=None, desc="preprocess") as bar:
            for encoded in results:
                for key, writer in writers.items():
                    writer.add_documents(encoded.tokens[key], encoded.lengths[key])
                add_to(totals, encoded)
                bar.update(encoded.raw_bytes)
        for key, documents in totals.documents.items():
            if documents == 0:
                raise DataError(f"--input {' '.join(inputs)}: no document with text under {key!r}, nothing written")
        for writer in writers.values():
            writer.finalize()
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    return totals


def add_to(totals: Totals, encoded: Encoded) -> None:
    """Count one chunk."""
    for key, lengths in encoded.lengths.items():
        totals.documents[key] += len(lengths)
        totals.tokens[key] += int(lengths.sum())
        totals.empty[key] += encoded.empty[key]
    totals.refused += len(encoded.refused)
    totals.first_refused = (totals.first_refused + encoded.refused)[:5]


def report(totals: Totals, prefix: str) -> None:
    """The summary: what was written on stdout, examples of what was refused on stderr."""
    for message in totals.first_refused:
        print(f"skipped: {message}", file=sys.stderr)
    for key, documents in totals.documents.items():
        print(
            f"{prefix}_{key}_document: {documents} documents, {totals.tokens[key]} tokens, "
            f"{totals.empty[key]} empty dropped, {totals.refused} lines refused"
        )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="preprocess_data", description="JSON lines, Parquet or plain text -> Megatron's .bin/.idx", allow_abbrev=False
    )
    add = result.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="*.jsonl, *.ndjson or *.json: one JSON object per line; *.parquet: one document per row; any other file: one "
        "document of plain UTF-8 text; each but Parquet also as *.gz or *.zst; "
        f"{LIBRARY}: the sources of Python's standard library and its language reference, which need no download",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read; each gets its own output")
    add("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document id")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0 works in this one (default: all cores)")
    add("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    add("--tokenizer-model", help="a Hugging Face folder or a sentencepiece .model file")
    add("--vocab-size", type=int, help="number of ordinary ids, for NullTokenizer only")
    add("--skip-bad-lines", action="store_true", help="count lines that cannot be used, do not stop at the first")
    add("--partitions", type=int, default=1, metavar="N", help="cut the documents into N parts, for as many machines")
    add("--partition", type=int, metavar="I", help="the part to do here, 0 to N - 1; writes PREFIX_I_KEY_document, to be joined "
        "by tools/merge_datasets.py")  # fmt: skip
    add("--max-bytes", type=int, help="stop after this much input text")
    return result


def problems(arguments: argparse.Namespace) -> list[str]:
    """Everything wrong with the flags, each with what would work."""
    files = [name for name in arguments.input if name != LIBRARY]
    found = [f"--input {name}: no such file" for name in files if not os.path.isfile(name)]
    keys = " ".join(arguments.json_keys)
    plain = [name for name in arguments.input if not has_keys(name)]
    if plain and len(arguments.json_keys) > 1:
        found.append(f"--json-keys {keys}: the plain text {plain[0]} has one field, give one key")
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        found.append(f"--json-keys {keys}: a key is given twice")
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
    if arguments.vocab_size is not None and arguments.tokenizer_type != "NullTokenizer":
        found.append(f"--vocab-size {arguments.vocab_size}: no effect with {arguments.tokenizer_type}, leave it out")
    return found


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for input that cannot be used, with one line each."""
    arguments = parser().parse_args(argv)
    if found := problems(arguments):
        parser().exit(2, "".join(f"preprocess_data: error: {problem}\n" for problem in found))
    job = Job(
        arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_size,
        tuple(arguments.json_keys), arguments.append_eod, arguments.skip_bad_lines,
    )  # fmt: skip
    try:
        if job.append_eod:
            _ = tokenizer_of(job).eod  # a tokenizer without one is refused before any work
        part = arguments.partition or 0, arguments.partitions
        prefix = arguments.output_prefix + (f"_{part[0]}" if part[1] > 1 else "")
        totals = preprocess(arguments.input, prefix, job, arguments.workers, arguments.max_bytes, part)
    except (DataError, TokenizerError, BadDocument, OSError) as error:
        parser().exit(1, f"preprocess_data: error: {error}\n")
    except BrokenProcessPool:
        parser().exit(1, "preprocess_data: error: a worker process died, perhaps for lack of memory; try --workers 1\n")
    report(totals, prefix)
    return 0


if __name__ == "__main__":
    sys.exit(main())
