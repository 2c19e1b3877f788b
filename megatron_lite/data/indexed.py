"""Megatron's `.bin`/`.idx` token files: a memory-mapped reader and an atomic writer.

    prefix.bin   the tokens of all sequences, one after another, little endian
    prefix.idx   magic "MMIDIDX\\0\\0" | u64 version = 1 | u8 dtype code | u64 n sequences | u64 d document entries
                 int32 lengths[n] | int64 byte pointers[n] | int64 document index[d] | (int8 modes[n], ignored)

The document index says at which sequence each document starts: its first entry is 0, its last is n, so d - 1 documents.
"""

import os
import struct
from typing import NamedTuple

import numpy as np

from megatron_lite.data.spool import Spool
from megatron_lite.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes
DTYPES = {code: np.dtype(name) for code, name in enumerate("u1 i1 <i2 <i4 <i8 <f8 <f4 <u2".split(), start=1)}
TEMPORARY = ".tmp"  # ending of files being written
CHUNK = 1 << 20  # entries handled at once, so that checking or writing a huge index needs little memory


class Index(NamedTuple):
    """What an `.idx` file says; the arrays are views of the mapped file."""

    dtype: np.dtype
    lengths: np.ndarray  # int32 [sequences], tokens
    pointers: np.ndarray  # int64 [sequences], bytes
    document_index: np.ndarray  # int64 [documents + 1], sequences


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron stores ids of this vocabulary in: 2 bytes where they fit with room to spare, else 4."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def dtype_code(dtype) -> int:
    """The code of `dtype` in the `.idx` header."""
    for code, known in DTYPES.items():
        if known == np.dtype(dtype):
            return code
    known = ", ".join(map(str, DTYPES.values()))
    raise DataError(f"dtype {np.dtype(dtype)} has no code in an .idx file, expected one of {known}")


def read_index(path: str) -> Index:
    """Map and check one `.idx` file. Raises DataError naming the file with what was expected and what was found."""
    if not os.path.isfile(path):
        hint = " (give the prefix without .bin or .idx)" if path.endswith((".bin.idx", ".idx.idx")) else ""
        raise DataError(f"{path}: no such file{hint}")
    size = os.path.getsize(path)
    if size < HEADER.size:
        raise DataError(f"{path}: {size} bytes, but an index has a header of {HEADER.size} bytes")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, sequences, entries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{path}: not a Megatron index, it begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path}: index version {version}, expected {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{path}: unknown dtype code {code}, expected 1 to {max(DTYPES)}")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences):  # multimodal sets carry one more byte per sequence
        raise DataError(f"{path}: {size} bytes, but {sequences} sequences and {entries} document entries take {expected} bytes")
    lengths = np.frombuffer(raw, "<i4", count=sequences, offset=HEADER.size)
    pointers = np.frombuffer(raw, "<i8", count=sequences, offset=HEADER.size + 4 * sequences)
    document_index = np.frombuffer(raw, "<i8", count=entries, offset=HEADER.size + 12 * sequences)
    _check_document_index(path, document_index, sequences)
    return Index(DTYPES[code], lengths, pointers, document_index)


def _check_document_index(path: str, document_index: np.ndarray, sequences: int) -> None:
    if len(document_index) == 0:
        raise DataError(f"{path}: the document index is empty, expected at least the entry 0")
    first, last = int(document_index[0]), int(document_index[-1])
    if first != 0 or last != sequences:
        raise DataError(f"{path}: the document index runs from {first} to {last}, expected 0 to {sequences}")
    if not np.all(document_index[1:] >= document_index[:-1]):
        raise DataError(f"{path}: the document index goes backwards, expected entries in rising order")


class _Extent(NamedTuple):
    total_bytes: int  # of all sequences together
    furthest_byte: int  # where the last byte that any sequence needs ends
    contiguous: bool  # each sequence starts where the one before it ends


def _measure(path: str, index: Index) -> _Extent:
    """Walk lengths and pointers once, a chunk at a time."""
    itemsize, total, furthest, contiguous = index.dtype.itemsize, 0, 0, True
    for low in range(0, len(index.lengths), CHUNK):
        sizes = index.lengths[low : low + CHUNK].astype(np.int64) * itemsize
        pointers = index.pointers[low : low + CHUNK].astype(np.int64)
        if sizes.min() < 0:
            where = low + int(np.argmin(sizes))
            raise DataError(f"{path}: sequence {where} has length {index.lengths[where]}, expected 0 or more")
        if pointers.min() < 0 or (pointers % itemsize).any():
            where = low + int(np.argmax((pointers < 0) | (pointers % itemsize != 0)))
            raise DataError(
                f"{path}: sequence {where} is said to start at byte {index.pointers[where]}, "
                f"expected a multiple of {itemsize} that is not negative"
            )
        ends = total + np.cumsum(sizes)
        contiguous = contiguous and np.array_equal(pointers, ends - sizes)
        furthest = max(furthest, int(pointers.max()), int((pointers + sizes).max()))
        total = int(ends[-1])
    return _Extent(total, furthest, contiguous)


class IndexedDataset:
    """The sequences under `prefix`, mapped read-only: opening reads the index once, tokens are read when asked for.

    Everything that could fail later is checked here: header, counts, document index, and the size of the `.bin`
    against the index, so a file cut short is refused before the first step. Raises DataError.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = os.fspath(prefix)
        index_path, tokens_path = self.prefix + ".idx", self.prefix + ".bin"
        self.dtype, self.lengths, self.pointers, self.document_index = index = read_index(index_path)
        extent = _measure(index_path, index)
        if not os.path.isfile(tokens_path):
            raise DataError(f"{tokens_path}: no such file, though {index_path} is there")
        size = os.path.getsize(tokens_path)
        # Megatron's writers leave no gap; only a foreign index may point at part of a larger file.
        wrong = size != extent.total_bytes if extent.contiguous else size < extent.furthest_byte
        if wrong:
            raise DataError(
                f"{tokens_path}: {size} bytes, but its index needs {extent.furthest_byte} bytes: "
                "the file was cut short or belongs to another index"
            )
        self.num_tokens = extent.total_bytes // self.dtype.itemsize
        # a plain ndarray view: slicing a np.memmap costs ten times as much
        mapped = np.memmap(tokens_path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
        self._tokens = mapped.view(np.ndarray)[: size // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        # Token offsets of the sequences; only needed when they cannot be read off the pointers.
        self._starts = None if extent.contiguous else np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    def __getitem__(self, sequence: int) -> np.ndarray:
        """The tokens of one sequence, a read-only view [length]."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self._tokens[start : start + int(self.lengths[sequence])]

    def document(self, document: int) -> np.ndarray:
        """The tokens of one document [length]."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"{self.prefix}: document {document} of {self.num_documents}")
        first, last = self.token_offset(self.document_index[[document, document + 1]])
        return self.window(int(first), int(last - first))

    def token_offset(self, sequences: np.ndarray) -> np.ndarray:
        """Position in the token stream at which each of `sequences` starts (the number of sequences gives the end)."""
        if self._starts is not None:
            return self._starts[sequences]
        inside = np.minimum(sequences, len(self) - 1)
        offsets = self.pointers[inside] // self.dtype.itemsize if len(self) else np.zeros(len(sequences), np.int64)
        return np.where(sequences < len(self), offsets, self.num_tokens)

    def document_token_bounds(self) -> np.ndarray:
        """int64 [documents + 1]: document i is the tokens bounds[i] to bounds[i + 1] of the stream."""
        return self.token_offset(self.document_index)

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` tokens of the stream from token `start` on: a read-only view of a contiguous file, else a copy."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise DataError(f"{self.prefix}.bin: asked for tokens {start} to {start + length} of {self.num_tokens}")
        if self._starts is None:
            return self._tokens[start : start + length]
        out = np.empty(length, self.dtype)
        sequence, filled = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while filled < length:
            skip = start + filled - int(self._starts[sequence])
            piece = self[sequence][skip : skip + length - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            sequence += 1
        return out


def sequence_pointers(lengths: np.ndarray, itemsize: int, start: int = 0) -> np.ndarray:
    """int64 [n]: the byte at which each sequence starts when they lie one after another from byte `start` on."""
    sizes = np.asarray(lengths).astype(np.int64) * itemsize  # in 64 bits before the sum, or 2 GiB would wrap
    return start + np.cumsum(sizes) - sizes


def write_index(path: str, dtype, lengths, document_index) -> None:
    """Write and fsync an `.idx` file for sequences that lie one after another. lengths [n], document_index [d].

    Both are arrays, or anything that has a length and gives an array for a slice: no more than CHUNK entries are held.
    """
    itemsize, start = np.dtype(dtype).itemsize, 0
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, dtype_code(dtype), len(lengths), len(document_index)))
        for low in range(0, len(lengths), CHUNK):
            file.write(np.ascontiguousarray(lengths[low : low + CHUNK], "<i4").data)
        for low in range(0, len(lengths), CHUNK):
            part = lengths[low : low + CHUNK]
            file.write(sequence_pointers(part, itemsize, start).astype("<i8").tobytes())
            start += int(np.sum(part, dtype=np.int64)) * itemsize
        for low in range(0, len(document_index), CHUNK):
            file.write(np.ascontiguousarray(document_index[low : low + CHUNK], "<i8").data)
        file.flush()
        os.fsync(file.fileno())


class Mark(NamedTuple):
    """How far a writer has come: what a later one keeps of its files, to go on from there."""

    tokens: int
    sequences: int
    documents: int


class IndexedWriter:
    """Writes `prefix.bin` and `prefix.idx`, all or nothing.

    Tokens, lengths and document ends go straight to temporary files, so memory does not grow with the data. `finalize`
    fsyncs and renames; leaving a `with` block does that too, or removes the temporary files when an exception passes. The
    old index goes first and the new one comes last, so at no moment does an index lie beside tokens that are not its own.
    What a killed writer left behind is overwritten by the next, or kept up to `mark`, one that it had given out. A second
    writer at the same time is refused (DataError), as are files that are shorter than the mark.
    """

    def __init__(self, prefix: str | os.PathLike, dtype, mark: Mark | None = None):
        self.prefix = os.fspath(prefix)
        self.dtype = DTYPES[dtype_code(dtype)]
        os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
        tokens, sequences, documents = mark or Mark(0, 0, 0)
        self._tokens = Spool(self.prefix + ".bin" + TEMPORARY, self.dtype)
        try:
            self._lengths = Spool(self.prefix + ".lengths" + TEMPORARY, np.dtype("<i4"))
            self._ends = Spool(self.prefix + ".documents" + TEMPORARY, np.dtype("<i8"))
            for spool, entries in ((self._tokens, tokens), (self._lengths, sequences), (self._ends, documents + 1)):
                spool.cut(entries if mark else 0)
        except BaseException:
            self.suspend()
            raise
        if not mark:
            self._ends.append(np.zeros(1, "<i8"))

    def add_document(self, tokens) -> None:
        """One document of one sequence: integer ids [length]."""
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens, lengths) -> None:
        """Many documents of one sequence each: their ids end to end [sum of lengths], and their lengths [documents]."""
        lengths = np.asarray(lengths, np.int64)
        total = int(lengths.sum())
        if total != len(tokens):
            raise DataError(f"{self.prefix}: lengths add up to {total}, but {len(tokens)} tokens were given")
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() < 2**31:
            raise DataError(f"{self.prefix}: a document of {lengths.max()} tokens; at most {2**31 - 1} fit in an index")
        self._write(tokens)
        first = len(self._lengths) + 1
        self._lengths.append(lengths)
        self._ends.append(np.arange(first, first + len(lengths), dtype=np.int64))

    def extend(self, dataset: IndexedDataset) -> None:
        """Append all sequences and documents of another data set, a piece at a time."""
        for low in range(0, dataset.num_tokens, CHUNK):
            self._write(dataset.window(low, min(CHUNK, dataset.num_tokens - low)))
        first = len(self._lengths)
        for low in range(0, len(dataset), CHUNK):
            self._lengths.append(dataset.lengths[low : low + CHUNK])
        for low in range(1, dataset.num_documents + 1, CHUNK):
            self._ends.append(dataset.document_index[low : low + CHUNK].astype(np.int64) + first)

    def _write(self, tokens) -> None:
        """Append ids to the `.bin`; an id that the dtype cannot hold is an error, since a cast would wrap it."""
        ids = np.asarray(tokens)
        if ids.dtype != self.dtype and len(ids) and self.dtype.kind in "iu":
            low, high, limits = int(ids.min()), int(ids.max()), np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self.prefix}: token id {low if low < limits.min else high} does not fit in {self.dtype} "
                    f"({limits.min} to {limits.max})"
                )
        self._tokens.append(ids)

    def mark(self) -> Mark:
        """Make what was added so far durable; a later writer can go on from here."""
        for spool in (self._tokens, self._lengths, self._ends):
            spool.sync()
        return Mark(len(self._tokens), len(self._lengths), len(self._ends) - 1)

    def seal(self) -> None:
        """Make both files durable under their temporary names; `publish` then is all that is left to do."""
        self.mark()
        write_index(self.prefix + ".idx" + TEMPORARY, self.dtype, self._lengths, self._ends)

    def finalize(self) -> None:
        """Make the two files durable and give them their names; a failure, say a full disk, leaves no files behind."""
        try:
            self.seal()
        except BaseException:
            self.abort()
            raise
        publish(self.prefix)
        self.suspend()  # only now, as this gives up the lock

    def suspend(self) -> None:
        """Close the files and leave them for a later writer."""
        for name in ("_lengths", "_ends", "_tokens"):
            if hasattr(self, name):
                getattr(self, name).close()

    def abort(self) -> None:
        """Give up: remove the temporary files and leave what was under the prefix before."""
        if not self._tokens.closed:
            remove_temporary(self.prefix)
        self.suspend()

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()


def publish(prefix: str) -> None:
    """Give sealed files their names. May be cut short at any point and called again."""
    if os.path.exists(prefix + ".bin" + TEMPORARY):
        _remove(prefix + ".idx")
        os.replace(prefix + ".bin" + TEMPORARY, prefix + ".bin")
    if os.path.exists(prefix + ".idx" + TEMPORARY):
        os.replace(prefix + ".idx" + TEMPORARY, prefix + ".idx")
    remove_temporary(prefix)
    _sync_folder(os.path.dirname(os.path.abspath(prefix)))


def remove_temporary(prefix: str) -> None:
    """Remove what a writer of `prefix` leaves behind when it is killed."""
    for ending in (".idx", ".lengths", ".documents", ".bin"):
        _remove(prefix + ending + TEMPORARY)


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.remove(path)


def _sync_folder(folder: str) -> None:
    """A rename is durable only once its folder is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
