"""Inputs as raw documents: JSON lines, Parquet and plain text, the first and last also compressed, and what
`datasets.load_dataset` opens.

Everything is read as a stream, so that an input may be larger than memory, and from any `Position` on.
"""

import gzip
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from megatron_lite.data.corpus import python_library_texts
from megatron_lite.data.indexed import DataError

LIBRARY = "python-library"
HUB = "hub:"  # before a name in the Hugging Face Hub
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
PARQUET = ".parquet"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROWS = 1024  # of a Parquet file, held at once
SAVED = ("state.json", "dataset_dict.json")  # in a folder written by `Dataset.save_to_disk`


class Document(NamedTuple):
    """One raw document: a JSON line or a whole text."""

    name: str  # of its file or row source
    number: int  # its line or row, from 1; 0 for a whole text
    raw: bytes
    is_json: bool

    @property
    def where(self) -> str:
        """file, or file:line"""
        return f"{self.name}:{self.number}" if self.number else self.name


@dataclass
class Position:
    """How far the inputs were read: where to go on. `read_documents` keeps it up to date."""

    source: int = 0  # which input
    number: int = 0  # its lines, rows or texts that were read
    stored: int = 0  # its bytes on disk that were read, compressed as they are
    documents: int = 0  # of all inputs
    text: int = 0  # bytes of these documents


@dataclass(frozen=True)
class Selection:
    """Which part of a `datasets` data set is read."""

    split: str = "train"
    config: str | None = None


TRAINING = Selection()


def is_json(name: str) -> bool:
    """Whether a file holds JSON lines, by its name."""
    return _bare(name).endswith(JSON_ENDINGS)


def is_dataset(name: str) -> bool:
    """Whether `datasets` is what opens this input."""
    return name.startswith(HUB) or os.path.isdir(name)


def has_keys(name: str) -> bool:
    """Whether the documents of an input have several fields."""
    return is_dataset(name) or is_json(name) or name.lower().endswith(PARQUET)


def there(name: str) -> bool:
    """Whether an input can be opened, as far as can be told without opening it."""
    return name == LIBRARY or is_dataset(name) or os.path.isfile(name)


def stored_bytes(inputs: list[str]) -> int | None:
    """Bytes on disk of all inputs; None where one of them does not lie in a file."""
    return sum(map(os.path.getsize, inputs)) if all(map(os.path.isfile, inputs)) else None


def _bare(name: str) -> str:
    """The name in small letters, without the ending that says how the file is compressed."""
    name = name.lower()
    return name.rsplit(".", 1)[0] if name.endswith(COMPRESSED) else name


def read_documents(
    inputs: list[str], keys: tuple[str, ...], max_bytes: int | None, position: Position | None = None,
    selection: Selection = TRAINING,
) -> Iterator[Document]:  # fmt: skip
    """Documents of all inputs in order, up to the one that reaches `max_bytes` of text. Blank lines are no documents.

    A text is cut at the limit, a JSON line is not. Reading begins at `position`, which moves with the documents.
    """
    position = position or Position()
    limit = max_bytes if max_bytes is not None else sys.maxsize
    while position.source < len(inputs) and position.text < limit:
        name = inputs[position.source]
        for document in _documents_of(name, keys, limit - position.text, position, selection):
            left = limit - position.text
            if not document.is_json and len(document.raw) > left:
                document = document._replace(raw=_cut_text(document.raw, left))
                position.text = limit
            else:
                position.text += len(document.raw)
            position.documents += 1
            yield document
            if position.text >= limit:
                return
        position.source, position.number, position.stored = position.source + 1, 0, 0


def _documents_of(name: str, keys: tuple[str, ...], limit: int, position: Position, selection: Selection) -> Iterator[Document]:
    """The documents of one input from `position` on; of a text, no more is read than shows that it is longer than `limit`."""
    if name == LIBRARY:
        for number, (source, text) in enumerate(python_library_texts(), start=1):
            if number > position.number:
                position.number = number
                yield Document(f"{LIBRARY}:{source}", 0, text.encode(), False)
    elif is_dataset(name):
        yield from _numbered(_dataset_rows(name, keys, position.number, selection), name, position)
    elif name.lower().endswith(PARQUET):
        yield from _numbered(_parquet_rows(name, keys, position), name, position)
    elif is_json(name):
        yield from _lines(name, position)
    elif position.number == 0:
        most = limit if name.lower().endswith(COMPRESSED) else min(limit, os.path.getsize(name))
        with open(name, "rb") as stored, _unpacked(stored, name) as file:
            raw = b"".join(_whole(_pieces(file, most + 4), name)).removeprefix(BYTE_ORDER_MARK)
        if _is_json_object(raw.lstrip().split(b"\n", 1)[0]):
            raise DataError(f"{name}: looks like JSON lines; a file of those is to be named *.jsonl")
        position.number = 1
        yield Document(name, 0, raw, False)


def _lines(name: str, position: Position) -> Iterator[Document]:
    """The lines of a JSONL file that are not blank. A plain file is entered in the middle, a compressed one read up to it."""
    packed, skipped = name.lower().endswith(COMPRESSED), position.number
    with open(name, "rb") as stored, _unpacked(stored, name) as file:
        if not packed:
            file.seek(position.stored)
        for number, line in enumerate(_whole(file, name), start=1 if packed else skipped + 1):
            if number <= skipped:
                continue
            position.number = number
            position.stored = stored.tell() if packed else position.stored + len(line)
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield Document(name, number, line, True)


def _numbered(rows: Iterator[dict[str, Any]], name: str, position: Position) -> Iterator[Document]:
    """Rows of a table as JSON lines; a row is named by its number, from 1."""
    for row in rows:
        position.number += 1
        yield Document(name, position.number, json.dumps(row, default=str).encode(), True)


def _unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """The bytes that a file holds, by its name. Raises DataError where the package that .zst needs is not there."""
    if name.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=file, mode="rb")
    if not name.lower().endswith(".zst"):
        return file
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{name}: .zst files need a package: pip install zstandard (or decompress it: zstd -d)") from None
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))


def _pieces(file: BinaryIO, most: int) -> Iterator[bytes]:
    """Up to `most` bytes, a mebibyte at a time: a compressed file does not say how long it is."""
    while most > 0 and (piece := file.read(min(most, 1 << 20))):
        yield piece
        most -= len(piece)


def _whole(parts: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The parts; a compressed file that is cut short or broken is an error that names it."""
    try:
        yield from parts
    except Exception as error:  # zlib, gzip and zstandard raise kinds of their own
        raise DataError(f"{name}: cannot be read to its end ({error})") from error


def _parquet_rows(name: str, keys: tuple[str, ...], position: Position) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file from `position` on, the columns `keys` alone; groups of rows before it are not read."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{name}: Parquet files need a package: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(name) as file:
            check_columns(name, keys, file.schema_arrow.names)
            groups, skip, rows = list(range(file.num_row_groups)), position.number, max(1, file.metadata.num_rows)
            while groups and skip >= file.metadata.row_group(groups[0]).num_rows:
                skip -= file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(ROWS, row_groups=groups, columns=list(keys)) if groups else ():
                position.stored = os.path.getsize(name) * position.number // rows
                yield from batch.slice(skip).to_pylist()
                skip = max(0, skip - batch.num_rows)
    except ArrowException as error:
        raise DataError(f"{name}: not a Parquet file that can be read ({str(error).splitlines()[0]})") from None


def _dataset_rows(name: str, keys: tuple[str, ...], skip: int, selection: Selection) -> Iterator[dict[str, Any]]:
    """Rows of a data set from row `skip` on, the columns `keys` alone. Nothing is copied to a cache: it is streamed."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{name}: folders and names in the Hub need a package: pip install datasets") from None
    try:
        if any(os.path.isfile(os.path.join(name, file)) for file in SAVED):
            saved = datasets.load_from_disk(name)
            rows = (saved[selection.split] if isinstance(saved, dict) else saved).to_iterable_dataset()
        else:
            place = name.removeprefix(HUB)
            rows = datasets.load_dataset(place, selection.config, split=selection.split, streaming=True)
        check_columns(name, keys, rows.column_names or list(next(iter(rows), {})))
        for row in rows.skip(skip):
            yield {key: row[key] for key in keys}
    except DataError:
        raise
    except Exception as error:  # of a missing file, the network, a format, ...
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{name}: datasets cannot read it ({reason})") from None


def check_columns(name: str, keys: tuple[str, ...], columns: list[str]) -> None:
    """Raises DataError for the first key that is no column."""
    missing = [key for key in keys if key not in columns]
    if missing:
        raise DataError(f"{name}: has no column {missing[0]!r} (--json-keys), only {', '.join(columns)}")


def _cut_text(raw: bytes, limit: int) -> bytes:
    """The first `limit` bytes, or up to three fewer so as not to end inside a character."""
    while limit > 0 and raw[limit] & 0xC0 == 0x80:
        limit -= 1
    return raw[:limit]


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
