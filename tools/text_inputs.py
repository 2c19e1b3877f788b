"""Files of text as raw documents: JSON lines, Parquet and plain text, the first and last also compressed.

Everything is read as a stream, so that a file may be larger than memory.
"""

import gzip
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from megatron_lite.data.corpus import python_library_texts
from megatron_lite.data.indexed import DataError

LIBRARY = "python-library"
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
PARQUET = ".parquet"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROWS = 1024  # of a Parquet file, held at once


@dataclass(frozen=True)
class Document:
    """One raw document: a JSON line or a whole text."""

    where: str  # file, or file:line
    raw: bytes
    is_json: bool


def is_json(name: str) -> bool:
    """Whether a file holds JSON lines, by its name."""
    return _bare(name).endswith(JSON_ENDINGS)


def has_keys(name: str) -> bool:
    """Whether the documents of a file have several fields."""
    return is_json(name) or name.lower().endswith(PARQUET)


def _bare(name: str) -> str:
    """The name in small letters, without the ending that says how the file is compressed."""
    name = name.lower()
    return name.rsplit(".", 1)[0] if name.endswith(COMPRESSED) else name


def read_documents(inputs: list[str], keys: tuple[str, ...], max_bytes: int | None) -> Iterator[Document]:
    """Documents of all inputs in order, up to the one that reaches `max_bytes` of text. Blank lines are no documents.

    A text is cut at the limit, a JSON line is not.
    """
    left = max_bytes if max_bytes is not None else sys.maxsize
    for name in inputs:
        for document in _documents_of(name, keys, left):
            if not document.is_json and len(document.raw) > left:
                yield Document(document.where, _cut_text(document.raw, left), False)
                return
            yield document
            left -= len(document.raw)
            if left <= 0:
                return


def _documents_of(name: str, keys: tuple[str, ...], limit: int) -> Iterator[Document]:
    """All documents of one input; of a text, no more is read than shows that it is longer than `limit`."""
    if name == LIBRARY:
        for source, text in python_library_texts():
            yield Document(f"{LIBRARY}:{source}", text.encode(), False)
    elif name.lower().endswith(PARQUET):
        yield from _rows(name, keys)
    elif is_json(name):
        with _open(name) as file:  # bytes: lines end at \n alone, and no locale has a say
            for number, line in enumerate(_whole(file, name), start=1):
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if line.strip():
                    yield Document(f"{name}:{number}", line, True)
    else:
        most = limit if name.lower().endswith(COMPRESSED) else min(limit, os.path.getsize(name))
        with _open(name) as file:
            raw = b"".join(_whole(_pieces(file, most + 4), name)).removeprefix(BYTE_ORDER_MARK)
        if _is_json_object(raw.lstrip().split(b"\n", 1)[0]):
            raise DataError(f"{name}: looks like JSON lines; a file of those is to be named *.jsonl")
        yield Document(name, raw, False)


def _open(name: str) -> BinaryIO:
    """The bytes of a file, decompressed. Raises DataError where the package that .zst needs is not there."""
    if name.lower().endswith(".gz"):
        return gzip.open(name, "rb")
    if not name.lower().endswith(".zst"):
        return open(name, "rb")
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{name}: .zst files need a package: pip install zstandard (or decompress it: zstd -d)") from None
    return zstandard.open(name, "rb")


def _pieces(file: BinaryIO, most: int) -> Iterator[bytes]:
    """Up to `most` bytes, a mebibyte at a time: a compressed file does not say how long it is."""
    while most > 0 and (piece := file.read(min(most, 1 << 20))):
        yield piece
        most -= len(piece)


def _whole(parts: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The parts; a compressed file that is cut short or broken is an error that names it."""
    parts = iter(parts)
    while True:
        try:
            part = next(parts)
        except StopIteration:
            return
        except Exception as error:  # zlib, gzip and zstandard raise kinds of their own
            raise DataError(f"{name}: cannot be read to its end ({error})") from error
        yield part


def _rows(name: str, keys: tuple[str, ...]) -> Iterator[Document]:
    """Rows of a Parquet file as JSON lines of the columns `keys`; a row is named by its number, from 1."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{name}: Parquet files need a package: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(name) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                has = ", ".join(file.schema_arrow.names)
                raise DataError(f"{name}: has no column {missing[0]!r} (--json-keys), only {has}")
            number = 0
            for batch in file.iter_batches(ROWS, columns=list(keys)):
                for row in batch.to_pylist():
                    number += 1
                    yield Document(f"{name}:{number}", json.dumps(row, default=str).encode(), True)
    except ArrowException as error:
        raise DataError(f"{name}: not a Parquet file that can be read ({str(error).splitlines()[0]})") from None


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
