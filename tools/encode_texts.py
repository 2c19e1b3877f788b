"""Raw documents -> token arrays: what a worker of tools/preprocess_data.py does with its piece, and how workers are run."""

import functools
import json
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from typing import NamedTuple

import numpy as np

from megatron_lite.data.indexed import best_dtype
from megatron_lite.tokenizers import Tokenizer, TokenizerError
from tools.text_inputs import Document, Position


@dataclass(frozen=True)
class Job:
    """What every worker needs to know beside the tokenizer."""

    keys: tuple[str, ...]
    append_eod: bool
    skip_bad: bool
    special: bool  # text that spells a special token is that token


class Piece(NamedTuple):
    """Documents that are handed to a worker at once."""

    position: Position  # of the reader, behind them
    documents: list[Document]


@dataclass
class Encoded:
    """Token arrays of one piece, per key."""

    position: Position
    tokens: dict[str, np.ndarray]  # [sum of lengths]
    lengths: dict[str, np.ndarray]  # [documents]
    empty: dict[str, int]
    refused: list[str]  # what was wrong with each document that was skipped
    documents: int
    raw_bytes: int


class BadDocument(ValueError):
    """One document that cannot be used; the message begins with file:line."""


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


def encode_piece(tokenizer: Tokenizer, job: Job, piece: Piece) -> Encoded:
    """Tokenise a piece; runs in a worker. Raises BadDocument for the first bad document unless those are skipped."""
    refused = []
    read = _good(((d, functools.partial(texts_of, d, job.keys)) for d in piece.documents), job.skip_bad, refused)
    try:
        flat = iter(tokenizer.encode_batch([text for _, texts in read for text in texts], job.special))
        batch = [[next(flat) for _ in texts] for _, texts in read]
    except TokenizerError:  # which of them it was, encoding one by one says
        batch = [None] * len(read)
    checks = ((d, functools.partial(_ids_of, d, texts, ids, job, tokenizer)) for (d, texts), ids in zip(read, batch, strict=True))
    tokens = {key: array("i") for key in job.keys}
    lengths = {key: [] for key in job.keys}
    empty = dict.fromkeys(job.keys, 0)
    end = [tokenizer.eod] if job.append_eod else []
    for _, parts in _good(checks, job.skip_bad, refused):
        for key, ids in zip(job.keys, parts, strict=True):
            if ids:
                tokens[key].fromlist(ids)
                tokens[key].fromlist(end)
                lengths[key].append(len(ids) + len(end))
            else:
                empty[key] += 1
    dtype = best_dtype(tokenizer.vocab_size)
    return Encoded(
        piece.position,
        {key: np.frombuffer(ids, np.intc).astype(dtype) for key, ids in tokens.items()},
        {key: np.array(counts, np.int64) for key, counts in lengths.items()},
        empty, refused, len(piece.documents), sum(len(document.raw) for document in piece.documents),
    )  # fmt: skip


def _good(pairs: Iterator[tuple[Document, Callable]], skip_bad: bool, refused: list[str]) -> list[tuple]:
    """(document, what its function gives) of documents that can be used; why not, of the others."""
    found = []
    for document, function in pairs:
        try:
            found.append((document, function()))
        except BadDocument as error:
            if not skip_bad:
                raise
            refused.append(str(error))
    return found


def _ids_of(document: Document, texts: list[str], ids: list[list[int]] | None, job: Job, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each text of a document, end of document not yet appended, encoded here where the batch gave none."""
    try:
        ids = tokenizer.encode_batch(texts, job.special) if ids is None else ids
    except TokenizerError as error:
        raise BadDocument(f"{document.where}: {error}") from None
    if job.append_eod and not job.special and any(tokenizer.eod in part for part in ids):
        raise BadDocument(f"{document.where}: this text gives the end-of-document id {tokenizer.eod} itself")
    return ids


def run_ordered(task: Callable, items: Iterator, workers: int) -> Iterator:
    """`map(task, items)` by worker processes, in order, with at most a few items per worker in flight."""
    if workers == 0:
        yield from map(task, items)
        return
    # spawn: the same on every system, and safe beside the threads of a tokenizer library
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(task,)) as pool:
        running = deque()
        try:
            for item in items:
                running.append(pool.submit(_do, item))
                if len(running) > 3 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def _start_worker(task: Callable) -> None:
    """A worker gets its task once, not with every item; it leaves Ctrl-C to its parent, and ends with it: a killed parent would
    leave it waiting for ever."""
    _do.task = task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _do(item):
    return _do.task(item)


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)
