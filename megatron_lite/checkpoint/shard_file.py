"""One safetensors file, written and read block by block: never more than a few MB besides the caller's own tensors.

The layout is the public one (8 bytes header length, JSON header, raw bytes), so that `safetensors` opens these files.
It is written here because the library wants all tensors copied at once, and read here because the library maps whole
files, which counts as memory of the process and turns a truncated file into a SIGBUS instead of an error.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint
from megatron_lite.checkpoint.boxes import Piece, Span, fault_of, text
from megatron_lite.checkpoint.manifest import DTYPES, Entry, Stored, Written

BLOCK = 8 << 20  # bytes handled at a time: big enough for the disk, small enough for the cache and for memory

Rows = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]  # offset and length of a part of a block, and its target


def file_key(piece: Piece) -> str:
    """The tensor's key where the piece is the full tensor, else the key and the block: `model/norm.weight[0:32]`."""
    return piece.key if tuple(piece.length) == tuple(piece.full_shape) else piece.key + text(piece.offset, piece.length)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared."""
    if not tensor.numel():
        return memoryview(b"")
    # One element may be contiguous with any stride, which `view` does not take.
    return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())


def plan_file(pieces: Sequence[Piece]) -> tuple[dict[str, Piece], bytes]:
    """(pieces by key in the file, in writing order; the file's first bytes). Raises CheckpointError for bad pieces."""
    problems = [fault for fault in map(fault_of, pieces) if fault]
    named: dict[str, Piece] = {}
    # The widest dtypes first: each block then starts at a multiple of its item size, as other readers like it.
    for piece in sorted(pieces, key=lambda p: -p.tensor.dtype.itemsize):
        dtype = str(piece.tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            problems.append(f"tensor {piece.key}: dtype {dtype} cannot be stored")
        if file_key(piece) in named:
            problems.append(f"tensor {piece.key}: block {text(piece.offset, piece.length)} is given twice")
        named[file_key(piece)] = piece
    if problems:
        raise CheckpointError("pieces that cannot be written", problems)
    header, end = {}, 0
    for key, piece in named.items():
        start, end = end, end + piece.tensor.numel() * piece.tensor.dtype.itemsize
        dtype = DTYPES[str(piece.tensor.dtype).removeprefix("torch.")]
        header[key] = {"dtype": dtype, "shape": list(piece.length), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return named, len(raw).to_bytes(8, "little") + raw


def write_shard(path: Path, pieces: Sequence[Piece], produce: Callable[[Piece], torch.Tensor] | None = None) -> list[Written]:
    """Write the pieces to a new file and fsync it; what was written, with checksums. No file where there is nothing.

    `produce` makes a piece's values when its turn comes, so that one tensor is in memory at a time; the pieces' own
    tensors then only say dtype and shape (they may be on the meta device).

    Raises CheckpointError for pieces that are no blocks of their tensors, OSError naming the file where writing fails.
    """
    # A block without elements of a tensor that has some is nothing to write; an empty tensor still keeps its name.
    pieces = [p for p in pieces if math.prod(p.length) or not math.prod(p.full_shape)]
    if not pieces:
        return []
    named, head = plan_file(pieces)
    written = []
    try:
        with open(path, "wb", buffering=0) as file:
            write_all(file.fileno(), memoryview(head))
            for key, piece in named.items():
                crc = write_tensor(file.fileno(), piece.tensor if produce is None else produce(piece))
                box = Stored(path.name, key, tuple(piece.offset), tuple(piece.length), crc)
                dtype = str(piece.tensor.dtype).removeprefix("torch.")
                written.append(Written(piece.key, tuple(piece.full_shape), dtype, box))
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return written


def write_tensor(fd: int, tensor: torch.Tensor) -> int:
    """Append a tensor's bytes to an open file and have the disk begin with them; their crc32."""
    raw = bytes_of(tensor.detach().to("cpu").contiguous())
    crc = 0
    for start in range(0, len(raw), BLOCK):
        block = raw[start : start + BLOCK]
        crc = zlib.crc32(block, crc)
        write_all(fd, block)
        start_writing(fd, len(block))
    return crc


def start_writing(fd: int, size: int) -> None:
    """The disk begins with the last `size` bytes, so that the fsync at the end finds most of it done. Nothing waits for it."""
    if hasattr(os, "posix_fadvise"):  # says that the cache may let go of them, which Linux begins by writing them
        with suppress(OSError):  # advice that a file system does not take: the fsync writes all
            os.posix_fadvise(fd, os.lseek(fd, 0, os.SEEK_CUR) - size, size, os.POSIX_FADV_DONTNEED)


def write_all(fd: int, block: memoryview) -> None:
    """os.write until all is written: a full disk shows as a short write first, as an error only at the next one."""
    while block:
        block = block[os.write(fd, block) :]


class ShardReader:
    """A file of a checkpoint, open for reading blocks of its tensors. Raises DamagedCheckpoint naming the file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpoint(f"cannot open {path}: {error.strerror}") from error
        try:
            self.entries, self.data = self.read_header()
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_) -> None:
        os.close(self.fd)

    def read_header(self) -> tuple[dict, int]:
        """(safetensors header, position of the first data byte)."""
        size = os.fstat(self.fd).st_size
        length = bytearray(8)
        self.read_into(memoryview(length), 0)
        count = int.from_bytes(length, "little")
        if count > size - 8:
            raise DamagedCheckpoint(f"{self.path} is not a safetensors file")
        raw = bytearray(count)
        self.read_into(memoryview(raw), 8)
        try:
            header = json.loads(raw)
        except ValueError as error:
            raise DamagedCheckpoint(f"{self.path} is not a safetensors file: {error}") from error
        return header, 8 + count

    def read_into(self, target: memoryview, position: int) -> None:
        """Fill `target` with the file's bytes from `position` on."""
        while target:
            try:
                count = os.preadv(self.fd, [target], position)
            except OSError as error:
                raise DamagedCheckpoint(f"cannot read {self.path}: {error.strerror}") from error
            if count == 0:
                raise DamagedCheckpoint(f"{self.path} is truncated")
            target, position = target[count:], position + count

    def position(self, box: Stored, dtype: str) -> int:
        """The first byte of a block, after its dtype, shape and place were held against the manifest's."""
        found = self.entries.get(box.key) if isinstance(self.entries, dict) else None
        if found is None:
            raise DamagedCheckpoint(f"{self.path} lacks {box.key}, which the manifest places there")
        try:  # a flipped bit may leave JSON of another form
            kind, shape, (start, end) = found["dtype"], found["shape"], found["data_offsets"]
            fits = end - start == math.prod(box.length) * getattr(torch, dtype).itemsize and start >= 0
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{self.path} has a damaged header: {box.key} is {found}") from error
        if (kind, shape) != (DTYPES[dtype], list(box.length)):
            raise DamagedCheckpoint(f"{self.path} holds {box.key} as {kind}{shape}, the manifest says "
                                    f"{DTYPES[dtype]}{list(box.length)}")  # fmt: skip
        if not fits:
            raise DamagedCheckpoint(f"{self.path} holds {box.key} in bytes {start} to {end} of its data")
        return self.data + start

    def checksum(self, box: Stored, entry: Entry) -> int:
        """crc32 of a block's bytes."""
        return self.read_all(box, entry.dtype, ())

    def read_all(self, box: Stored, dtype: str, parts: Sequence[tuple[Span, torch.Tensor]]) -> int:
        """The crc32 of all of the block's bytes and, in the same pass, parts of it (as for `read_box`) into their targets."""
        position, kind, crc = self.position(box, dtype), getattr(torch, dtype), 0
        parts = [as_rows(part, target) for part, target in parts]
        rows = (tuple(box.length) or (1,)) if parts else (math.prod(box.length),)
        if len(parts) == 1 and parts[0][1] == rows and fits_in_place(parts[0], rows, kind):
            raw = bytes_of(parts[0][2])
            for start in range(0, len(raw), BLOCK):
                block = raw[start : start + BLOCK]
                self.read_into(block, position + start)
                crc = zlib.crc32(block, crc)  # while the cache still holds it
            return crc
        for first, block in self.row_blocks(position, rows, kind):
            crc = zlib.crc32(bytes_of(block), crc)
            for part in parts:
                copy_rows(block, first, part)
        return crc

    def read_box(self, box: Stored, dtype: str, part: Span, target: torch.Tensor) -> None:
        """Copy a part of the block (placed relative to it) into `target` of the part's shape, converting dtypes."""
        position, kind, rows = self.position(box, dtype), getattr(torch, dtype), box.length or (1,)
        offset, length, target = as_rows(part, target)
        start = position + offset[0] * math.prod(rows[1:]) * kind.itemsize
        if fits_in_place((offset, length, target), rows, kind):
            self.read_into(bytes_of(target), start)
            return
        for first, block in self.row_blocks(start, (length[0], *rows[1:]), kind):
            copy_rows(block, offset[0] + first, (offset, length, target))

    def row_blocks(self, start: int, shape: Sequence[int], kind: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """The rows of a tensor that begins at byte `start`, a few MB at once: (first row, [rows, ...])."""
        row = math.prod(shape[1:])
        if not row:
            return
        step = max(1, min(shape[0], BLOCK // (row * kind.itemsize)))
        buffer = torch.empty(step, *shape[1:], dtype=kind)
        for first in range(0, shape[0], step):
            block = buffer[: min(step, shape[0] - first)]
            self.read_into(bytes_of(block), start + first * row * kind.itemsize)
            yield first, block


def as_rows(part: Span, target: torch.Tensor) -> Rows:
    """The same with at least one dim: a scalar is one row of one element."""
    offset, length = part
    target = target.detach()
    return (tuple(offset), tuple(length), target) if offset else ((0,), (1,), target.reshape(1))


def fits_in_place(part: Rows, rows: Sequence[int], kind: torch.dtype) -> bool:
    """Whether a part of a block of shape `rows` lies in the file as it does in its target."""
    _, length, target = part
    own_memory = target.device.type == "cpu" and target.is_contiguous()
    return length[1:] == tuple(rows[1:]) and target.dtype == kind and own_memory


def copy_rows(block: torch.Tensor, first: int, part: Rows) -> None:
    """Copy what a part wants of `block`, which is the rows from `first` on."""
    offset, length, target = part
    start, end = max(offset[0], first), min(offset[0] + length[0], first + len(block))
    if start < end:
        inner = tuple(slice(o, o + n) for o, n in zip(offset[1:], length[1:], strict=True))
        target[start - offset[0] : end - offset[0]].copy_(block[(slice(start - first, end - first), *inner)])
