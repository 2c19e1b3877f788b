"""Boxes: blocks of full tensors as (offset per dim, length per dim). Arithmetic, and what ranks hand in and ask for.

A flat range of a row-major matrix (what ZeRO gives a rank) is at most three boxes:

    . . . . . .
    . . H H H H      H  the end of a row
    M M M M M M      M  whole rows
    M M M M M M
    T T T . . .      T  the start of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, le, sub

import torch

from megatron_lite.parallel.shard import Shard

Span = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Piece:
    """A block of a full tensor to be written. `tensor` has shape `length`, may be a view; it is copied when written."""

    key: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Request:
    """A block of a full tensor to be read into `tensor` (shape `length`, any dtype and device, may be a view)."""

    key: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: tuple[int, ...]
    tensor: torch.Tensor


def text(offset: Sequence[int], length: Sequence[int]) -> str:
    """`[0:64,128:256]`."""
    return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(offset, length, strict=True)) + "]"


def fault_of(part: Piece | Request) -> str | None:
    """Why a piece or request is not a block of its full tensor, or None."""
    full, offset, length = part.full_shape, part.offset, part.length
    if not len(full) == len(offset) == len(length):
        return f"tensor {part.key}: shape {list(full)}, offset {list(offset)} and length {list(length)} differ in dims"
    if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(offset, length, full, strict=True)):
        return f"tensor {part.key}: block {text(offset, length)} lies outside its shape {list(full)}"
    if tuple(part.tensor.shape) != tuple(length):
        return f"tensor {part.key}: block {text(offset, length)} comes with a tensor of shape {list(part.tensor.shape)}"
    return None


def joined(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Pieces that lie one under the other in their tensor, together: their bytes in a row are those of one block.

    Heads of a fused projection are such pieces: apart in the parameter, side by side in the full tensor.
    """
    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.key, p.offset)):
        last = groups[-1][-1] if groups else None
        if last is not None and piece.offset and follows(last, piece):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def follows(above: Piece, below: Piece) -> bool:
    """Whether `below` has the rows after those of `above`, of the same columns of the same tensor."""
    kinds = [(p.key, p.full_shape, p.offset[1:], p.length[1:], p.tensor.dtype) for p in (above, below)]
    return kinds[0] == kinds[1] and below.offset[0] == above.offset[0] + above.length[0]


def flat_boxes(start: int, length: int, shape: Sequence[int]) -> list[Span]:
    """Elements `start .. start + length` of a row-major tensor as boxes, in flat order: at most three for a matrix.

    Each box is contiguous in the flat range. At most `2 * dims - 1` boxes; none for an empty range.
    Raises ValueError for a range outside the tensor.
    """
    shape = tuple(shape)
    if start < 0 or length < 0 or start + length > math.prod(shape):
        raise ValueError(f"flat range {start}:{start + length} lies outside a tensor of shape {list(shape)}")
    if length == 0:
        return []
    if len(shape) < 2:
        return [((start,), (length,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    first, skip = divmod(start, row)
    last, rest = divmod(start + length, row)

    def inside_row(index: int, begin: int, count: int) -> list[Span]:
        return [((index, *o), (1, *n)) for o, n in flat_boxes(begin, count, shape[1:])]

    if first == last:
        return inside_row(first, skip, length)
    boxes = []
    if skip:
        boxes += inside_row(first, skip, row - skip)
        first += 1
    if last > first:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + inside_row(last, 0, rest)


def overlap(a: Span, b: Span) -> Span | None:
    """The block two boxes share, or None."""
    offset = tuple(map(max, a[0], b[0]))
    length = tuple(map(sub, map(min, map(add, *a), map(add, *b)), offset))
    return (offset, length) if min(length, default=1) > 0 else None


def subtract(box: Span, hole: Span) -> list[Span]:
    """What is left of `box` without `hole`, as disjoint boxes."""
    shared = overlap(box, hole)
    if shared is None:
        return [box]
    left = []
    offset, length = list(box[0]), list(box[1])
    for dim, (start, size) in enumerate(zip(*shared, strict=True)):
        end = offset[dim] + length[dim]
        for o, n in ((offset[dim], start - offset[dim]), (start + size, end - start - size)):
            if n > 0:
                left.append(((*offset[:dim], o, *offset[dim + 1 :]), (*length[:dim], n, *length[dim + 1 :])))
        offset[dim], length[dim] = start, size
    return left


def uncovered(box: Span, covers: Iterable[Span]) -> list[Span]:
    """The parts of `box` that no box of `covers` holds."""
    left = [box]
    for cover in covers:
        left = [part for old in left for part in subtract(old, cover)]
    return left


def tiling_fault(shape: Sequence[int], boxes: Sequence[Span]) -> str | None:
    """Why `boxes` do not tile a tensor of `shape` exactly (each element once), or None if they do."""
    for offset, length in boxes:
        inside = len(offset) == len(length) == len(shape) and min((0, *offset, *length)) == 0
        if not inside or not all(map(le, map(add, offset, length), shape)):
            return f"block {text(offset, length)} lies outside its shape {list(shape)}"
    # Sweep along the first dim: a box can only meet those that have not ended where it begins.
    active: list[Span] = []
    for box in sorted(boxes, key=lambda b: b[0]):
        active = [other for other in active if not shape or other[0][0] + other[1][0] > box[0][0]]
        for other in active:
            if overlap(box, other):
                return f"blocks {text(*other)} and {text(*box)} overlap"
        active.append(box)
    if sum(math.prod(length) for _, length in boxes) == math.prod(shape):
        return None
    missing = uncovered(((0,) * len(shape), tuple(shape)), boxes)
    return f"block {text(*missing[0])} of its shape {list(shape)} is missing"


def box_pieces(prefix: str, shard: Shard, local: torch.Tensor) -> list[Piece]:
    """What this rank writes of one parameter (or of a moment of its shape): the boxes it owns, as `<prefix>/<name>`.

    A tied second copy writes nothing: the place that owns the tensor does. Replicas over dp and cp are the caller's.
    """
    if shard.tied:
        return []
    owned = [b for b in shard.boxes if b.owned]
    return [Piece(f"{prefix}/{b.name}", b.full_shape, b.offset, b.length, b.of_local(local)) for b in owned]


def box_requests(prefix: str, shard: Shard, local: torch.Tensor) -> list[Request]:
    """What fills one parameter (or a moment of its shape): all of its boxes, owned or not."""
    return [Request(f"{prefix}/{b.name}", b.full_shape, b.offset, b.length, b.of_local(local)) for b in shard.boxes]


def flat_pieces(prefix: str, shard: Shard, shape: Sequence[int], start: int, flat: torch.Tensor) -> list[Piece]:
    """As `box_pieces` for what ZeRO holds: `flat` is 1-D, the elements `start ..` of the local parameter of `shape`."""
    if shard.tied:
        return []
    return [Piece(*fields) for owned, fields in flat_parts(prefix, shard, shape, start, flat) if owned]


def flat_requests(prefix: str, shard: Shard, shape: Sequence[int], start: int, flat: torch.Tensor) -> list[Request]:
    """As `box_requests`, for a flat slice of the local parameter."""
    return [Request(*fields) for _, fields in flat_parts(prefix, shard, shape, start, flat)]


def flat_parts(prefix: str, shard: Shard, shape: Sequence[int], start: int, flat: torch.Tensor) -> list[tuple]:
    """(owned, fields of a Piece) where a flat slice of the local parameter meets the parameter's boxes."""
    if flat.numel() == math.prod(shape):  # all of it: the boxes as they are, in a tenth of the time
        local = flat.view(shape)
        boxes = [box for box in shard.boxes if math.prod(box.length)]
        return [(b.owned, (f"{prefix}/{b.name}", b.full_shape, b.offset, b.length, b.of_local(local))) for b in boxes]
    parts = []
    taken = 0
    for offset, length in flat_boxes(start, flat.numel(), shape):
        size = math.prod(length)
        view = flat[taken : taken + size].view(length)
        taken += size
        for box in shard.boxes:
            shared = overlap((offset, length), (box.local, box.length))
            if shared is None:
                continue
            at, extent = shared
            block = view[tuple(slice(a - o, a - o + n) for a, o, n in zip(at, offset, extent, strict=True))]
            where = tuple(b + a - o for b, a, o in zip(box.offset, at, box.local, strict=True))
            parts.append((box.owned, (f"{prefix}/{box.name}", box.full_shape, where, extent, block)))
    return parts
