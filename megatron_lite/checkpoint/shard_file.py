"""One safetensors file, written and read block by block: never more than a few MB besides the caller's own tensors.

The layout is the public one (8 bytes header length, JSON header, raw bytes), so that `safetensors` opens these files.
It is written here because the library wants all tensors copied at once, and read here because the library maps whole
files, which counts as memory of the process and turns a truncated file into a SIGBUS instead of an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint
from megatron_lite.checkpoint.boxes import Piece, Span, fault_of, joined, text
from megatron_lite.checkpoint.checksums import ALGORITHMS, XXH3, Checksum
from megatron_lite.checkpoint.manifest import DTYPES, Entry, Stored, Written

BLOCK = 1 << 20  # bytes handled at a time: few enough that the cache still holds them for the checksum
AHEAD = 8 << 20  # bytes that are handed to the disk at once

Rows = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]  # offset and length of a part of a block, and its target


class Stretch(NamedTuple):
    """Pieces that make up one block of the file, and the block's place in the full tensor."""

    pieces: list[Piece]
    offset: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def key(self) -> str:
        """The tensor's key where the block is the full tensor, else the key and the block: `model/norm.weight[0:32]`."""
        first = self.pieces[0]
        return first.key if self.length == tuple(first.full_shape) else first.key + text(self.offset, self.length)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].tensor.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.length) * self.dtype.itemsize


def stretch(pieces: list[Piece]) -> Stretch:
    """Of pieces one under the other."""
    offset, length = tuple(pieces[0].offset), tuple(pieces[0].length)
    return Stretch(pieces, offset, (sum(p.length[0] for p in pieces), *length[1:]) if length else ())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared."""
    if not tensor.numel():
        return memoryview(b"")
    # One element may be contiguous with any stride, which `view` does not take.
    return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())


def plan_file(pieces: Sequence[Piece]) -> tuple[dict[str, Stretch], bytes]:
    """(blocks by key in the file, in writing order; the file's first bytes). Raises CheckpointError for bad pieces."""
    faults = [fault_of(piece) for piece in pieces]
    problems = [fault for fault in faults if fault]
    sound = [piece for piece, fault in zip(pieces, faults, strict=True) if not fault]
    named: dict[str, Stretch] = {}
    # The widest dtypes first: each block then starts at a multiple of its item size, as other readers like it.
    for block in sorted(map(stretch, joined(sound)), key=lambda block: -block.dtype.itemsize):
        name, dtype = block.pieces[0].key, str(block.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            problems.append(f"tensor {name}: dtype {dtype} cannot be stored")
        if block.key in named:
            problems.append(f"tensor {name}: block {text(block.offset, block.length)} is given twice")
        named[block.key] = block
    if problems:
        raise CheckpointError("pieces that cannot be written", problems)
    header, end = {}, 0
    for key, block in named.items():
        start, end = end, end + block.bytes
        dtype = DTYPES[str(block.dtype).removeprefix("torch.")]
        header[key] = {"dtype": dtype, "shape": list(block.length), "data_offsets": [start, end]}
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
            out = Writer(file.fileno())
            out.write(memoryview(head))
            for key, block in named.items():
                checksum = ALGORITHMS[XXH3]()
                for piece in block.pieces:
                    out.write_tensor(piece.tensor if produce is None else produce(piece), checksum)
                box = Stored(path.name, key, block.offset, block.length, checksum.intdigest(), XXH3)
                dtype = str(block.dtype).removeprefix("torch.")
                written.append(Written(block.pieces[0].key, tuple(block.pieces[0].full_shape), dtype, box))
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return written


class Writer:
    """Appends to an empty file, and has the disk begin early: the fsync at the end then finds most of it done."""

    def __init__(self, fd: int):
        self.fd, self.end, self.begun = fd, 0, 0  # bytes written, bytes that the disk has begun with

    def write(self, block: memoryview) -> None:
        """All of it: a full disk shows as a short write first, as an error only at the next one."""
        while block:
            count = os.write(self.fd, block)
            block, self.end = block[count:], self.end + count
        if self.end - self.begun >= AHEAD:
            self.start()

    def write_tensor(self, tensor: torch.Tensor, checksum: Checksum | None = None) -> None:
        """A tensor's bytes, which the checksum takes as well."""
        raw = bytes_of(tensor.detach().to("cpu").contiguous())
        for start in range(0, len(raw), AHEAD):  # large ones: what runs behind the training is to need Python's lock rarely
            block = raw[start : start + AHEAD]
            if checksum is not None:
                checksum.update(block)
            self.write(block)

    def start(self) -> None:
        """The disk begins with what it has not begun with. Nothing waits for it."""
        if hasattr(os, "posix_fadvise"):  # says that the cache may let go of them, which Linux begins by writing them
            with suppress(OSError):  # advice that a file system does not take: the fsync writes all
                os.posix_fadvise(self.fd, self.begun, self.end - self.begun, os.POSIX_FADV_DONTNEED)
        self.begun = self.end


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
        """Of a block's bytes, by the algorithm of the stored one."""
        return self.read_all(box, entry.dtype, ())

    def read_all(self, box: Stored, dtype: str, parts: Sequence[tuple[Span, torch.Tensor]]) -> int:
        """The checksum of all of the block's bytes, by its algorithm, and in the same pass parts of it (as for `read_box`) into
        their targets."""
        position, kind, checksum = self.position(box, dtype), getattr(torch, dtype), ALGORITHMS[box.algorithm]()
        parts = sorted((as_rows(part, target) for part, target in parts), key=lambda part: part[0])
        rows = (tuple(box.length) or (1,)) if parts else (math.prod(box.length),)
        if side_by_side(parts, rows, kind):
            row, passed = math.prod(rows[1:]) * kind.itemsize, 0
            for offset, length, target in parts:
                self.sum_rows(position + passed * row, (offset[0] - passed, *rows[1:]), kind, checksum)
                self.sum_into(target, position + offset[0] * row, checksum)
                passed = offset[0] + length[0]
            self.sum_rows(position + passed * row, (rows[0] - passed, *rows[1:]), kind, checksum)
            return checksum.intdigest()
        for first, block in self.row_blocks(position, rows, kind):
            checksum.update(bytes_of(block))
            for part in parts:
                copy_rows(block, first, part)
        return checksum.intdigest()

    def sum_into(self, target: torch.Tensor, position: int, checksum: Checksum) -> None:
        """Fill a tensor from byte `position` on, and give the checksum what was read while the cache still holds it."""
        raw = bytes_of(target)
        for start in range(0, len(raw), BLOCK):
            block = raw[start : start + BLOCK]
            self.read_into(block, position + start)
            checksum.update(block)

    def sum_rows(self, position: int, shape: Sequence[int], kind: torch.dtype, checksum: Checksum) -> None:
        """Give the checksum rows that nobody here wants."""
        for _, block in self.row_blocks(position, shape, kind):
            checksum.update(bytes_of(block))

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
        if not row or not shape[0]:
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


def side_by_side(parts: Sequence[Rows], rows: Sequence[int], kind: torch.dtype) -> bool:
    """Whether parts of a block of shape `rows`, in order of their offsets, share no row, each as it lies in the file."""
    ends = [0, *(offset[0] + length[0] for offset, length, _ in parts)]
    apart = all(part[0][0] >= end for part, end in zip(parts, ends, strict=False))
    return apart and all(fits_in_place(part, rows, kind) for part in parts)


def copy_rows(block: torch.Tensor, first: int, part: Rows) -> None:
    """Copy what a part wants of `block`, which is the rows from `first` on."""
    offset, length, target = part
    start, end = max(offset[0], first), min(offset[0] + length[0], first + len(block))
    if start < end:
        inner = tuple(slice(o, o + n) for o, n in zip(offset[1:], length[1:], strict=True))
        target[start - offset[0] : end - offset[0]].copy_(block[(slice(start - first, end - first), *inner)])
