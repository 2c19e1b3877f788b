"""The collectives over a `SharedBoard`, each cut into messages that fit a slot. All tensors here are contiguous.

AllGather       slot = my x[lo:hi]                              read: copy everyone's
ReduceScatter   slot = my pieces for the others, [n - 1, len]   read: sum my piece over everyone
AllReduce       slot = my x[lo:hi]                              read: sum over everyone
LargeAllReduce  reduce-scatter and gather of blocks in turn: each rank sums one n-th instead of everything
AllToAll        slot = my pieces for the others                 read: copy my piece from everyone
ExchangeRows    slot = a run of all that I have for the others  read: copy what of each run is for me
Broadcast       slot = x[lo:hi] of the source                   read: copy it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from megatron_lite.comm.shared import Exchange, SharedBoard

SUM_BLOCK = 1 << 17
Rows = Sequence[Sequence[int]]  # [p][q]: rows that rank p has for rank q
COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def combine(parts: list[torch.Tensor], out: torch.Tensor, op: str = "sum") -> None:
    """out = parts[0] op parts[1] op ... in this order, the same on every rank and transport. All flat, equal lengths.

    Half precision sums are accumulated in fp32 and rounded once. `out` may be one of the parts.
    """
    join = COMBINE[op]
    if len(parts) == 2:  # a half precision sum of two is computed in fp32 and rounded once by torch itself
        join(parts[0], parts[1], out=out)
        return
    wide = torch.float32 if op == "sum" and out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    for lo in range(0, out.numel(), SUM_BLOCK):  # in blocks, so that the accumulator stays in the cache
        blocks = [p[lo : lo + SUM_BLOCK] for p in parts]
        target = out[lo : lo + SUM_BLOCK]
        total = join(blocks[0].to(wide), blocks[1].to(wide))
        for block in blocks[2:-1]:
            join(total, block.to(wide), out=total)
        if wide == out.dtype:
            join(total, blocks[-1], out=target)
        else:
            target.copy_(join(total, blocks[-1].to(wide), out=total))


def _length(board: SharedBoard, x: torch.Tensor, parts: int = 1) -> int:
    """Elements of each part in one message that carries `parts` of them."""
    length = board.slot_bytes // x.element_size() // parts
    if length == 0:
        raise ValueError(f"a slot of {board.slot_bytes} bytes cannot hold {parts} elements of {x.dtype}")
    return length


class AllGather(Exchange):
    """out [n*d0, ...] from x [d0, ...]; x may be my own part of out."""

    def __init__(self, board: SharedBoard, out: torch.Tensor, x: torch.Tensor):
        self.out, self.x = out.view(board.size, -1), x.view(-1)
        self.length = _length(board, x)
        super().__init__(board, -(-x.numel() // self.length), out)
        mine = self.out[board.rank]
        if mine.data_ptr() != x.data_ptr():
            mine.copy_(self.x)

    def write(self, slot: int, piece: int) -> None:
        part = self.x[piece * self.length : (piece + 1) * self.length]
        self.board.slot(self.board.rank, slot, part.dtype)[: part.numel()].copy_(part)

    def read(self, slot: int, piece: int) -> None:
        lo = piece * self.length
        for peer in self.board.peers:
            part = self.out[peer, lo : lo + self.length]
            part.copy_(self.board.slot(peer, slot, part.dtype)[: part.numel()])


class _Scattered(Exchange):
    """Messages that carry, for every peer, the range [lo, hi) of that peer's part of x [n, len]; my own stays here."""

    def __init__(self, board: SharedBoard, out: torch.Tensor, x: torch.Tensor):
        self.x = x.view(board.size, -1)
        self.length = _length(board, x, board.size - 1)
        super().__init__(board, -(-self.x.shape[1] // self.length), out)

    def write(self, slot: int, piece: int) -> None:
        lo, hi = piece * self.length, min((piece + 1) * self.length, self.x.shape[1])
        mine = self.board.slot(self.board.rank, slot, self.x.dtype)
        for place, peer in enumerate(self.board.peers):
            mine[place * (hi - lo) : (place + 1) * (hi - lo)].copy_(self.x[peer, lo:hi])

    def parts(self, slot: int, piece: int) -> list[torch.Tensor]:
        """The range's part for me from every rank, in rank order."""
        rank = self.board.rank
        lo, hi = piece * self.length, min((piece + 1) * self.length, self.x.shape[1])
        found = []
        for source in range(self.board.size):
            at = (rank - (rank > source)) * (hi - lo)
            theirs = self.board.slot(source, slot, self.x.dtype)[at : at + hi - lo]
            found.append(self.x[rank, lo:hi] if source == rank else theirs)
        return found


class ReduceScatter(_Scattered):
    """out [d0/n, ...] from x [d0, ...]; out may be my own part of x."""

    def __init__(self, board: SharedBoard, out: torch.Tensor, x: torch.Tensor):
        super().__init__(board, out, x)
        self.flat = out.view(-1)

    def read(self, slot: int, piece: int) -> None:
        combine(self.parts(slot, piece), self.flat[piece * self.length : (piece + 1) * self.length])


class AllToAll(_Scattered):
    """out [n, ...] from x [n, ...]: piece q of mine goes to rank q."""

    def __init__(self, board: SharedBoard, out: torch.Tensor, x: torch.Tensor):
        super().__init__(board, out, x)
        self.out = out.view(board.size, -1)

    def read(self, slot: int, piece: int) -> None:
        lo = piece * self.length
        for source, part in enumerate(self.parts(slot, piece)):
            self.out[source, lo : lo + self.length].copy_(part)


class ExchangeRows(Exchange):
    """AllToAll with parts of unequal size. What a rank has for the others is one line, in rank order, sent in runs."""

    def __init__(self, board: SharedBoard, out: torch.Tensor, x: torch.Tensor, rows: Rows):
        rank, size = board.rank, x.shape[1:].numel()
        self.sizes = [[0 if p == q else n * size for q, n in enumerate(row)] for p, row in enumerate(rows)]
        self.starts = [[0, *accumulate(line)] for line in self.sizes]  # [p][q]: where q's part begins in p's line
        self.length = _length(board, x)
        super().__init__(board, -(-max(start[-1] for start in self.starts) // self.length), out)
        give, take = [n * size for n in rows[rank]], [row[rank] * size for row in rows]
        mine, places = list(x.view(-1).split(give)), list(out.view(-1).split(take))
        places[rank].copy_(mine[rank])
        self.mine, self.places = mine, places

    def _overlap(self, source: int, target: int, piece: int) -> tuple[int, int, int]:
        """(where in the slot, where in the part, length) of what `target` gets in a run of the line of `source`."""
        lo, start = piece * self.length, self.starts[source][target]
        begin, end = max(lo, start), min(lo + self.length, start + self.sizes[source][target])
        return begin - lo, begin - start, end - begin

    def write(self, slot: int, piece: int) -> None:
        place = self.board.slot(self.board.rank, slot, self.result.dtype)
        for peer in self.board.peers:
            at, start, length = self._overlap(self.board.rank, peer, piece)
            if length > 0:
                place[at : at + length].copy_(self.mine[peer][start : start + length])

    def read(self, slot: int, piece: int) -> None:
        for source in self.board.peers:
            at, start, length = self._overlap(source, self.board.rank, piece)
            if length > 0:
                theirs = self.board.slot(source, slot, self.result.dtype)
                self.places[source][start : start + length].copy_(theirs[at : at + length])


class AllReduce(Exchange):
    """out = sum (max, min) of x over ranks; out may be x."""

    def __init__(self, board: SharedBoard, out: torch.Tensor, x: torch.Tensor, op: str):
        self.out, self.x, self.op = out.view(-1), x.view(-1), op
        self.length = _length(board, x)
        super().__init__(board, -(-x.numel() // self.length), out)

    def write(self, slot: int, piece: int) -> None:
        part = self.x[piece * self.length : (piece + 1) * self.length]
        self.board.slot(self.board.rank, slot, part.dtype)[: part.numel()].copy_(part)

    def read(self, slot: int, piece: int) -> None:
        out = self.out[piece * self.length : (piece + 1) * self.length]
        combine([self.board.slot(r, slot, out.dtype)[: out.numel()] for r in range(self.board.size)], out, self.op)


class LargeAllReduce(Exchange):
    """AllReduce for three and more ranks: block i is scattered in message S(i) and its sums are gathered in G(i).

    Messages in the order S0 S1 G0 S2 G1 ... G(last): while peers read S(i + 1), G(i) is on its way.
    """

    def __init__(self, board: SharedBoard, out: torch.Tensor, x: torch.Tensor, op: str):
        self.out, self.x, self.op = out.view(-1), x.view(-1), op
        self.part = _length(board, x, board.size)
        blocks = -(-x.numel() // (self.part * board.size))
        self.order = [("S", 0)]
        for i in range(1, blocks):
            self.order += [("S", i), ("G", i - 1)]
        self.order.append(("G", blocks - 1))
        self.place = {what: i for i, what in enumerate(self.order)}
        super().__init__(board, len(self.order), out)

    def _range(self, block: int, rank: int) -> tuple[int, int]:
        lo = (block * self.board.size + rank) * self.part
        return min(lo, self.x.numel()), min(lo + self.part, self.x.numel())

    def needs(self, piece: int) -> int:
        kind, block = self.order[piece]
        return self.place["S", block] + 1 if kind == "G" else 0

    def write(self, slot: int, piece: int) -> None:
        kind, block = self.order[piece]
        mine = self.board.slot(self.board.rank, slot, self.x.dtype)
        if kind == "S":
            lo, hi = self._range(block, 0)[0], self._range(block, self.board.size - 1)[1]
            mine[: hi - lo].copy_(self.x[lo:hi])
        else:
            lo, hi = self._range(block, self.board.rank)
            mine[: hi - lo].copy_(self.out[lo:hi])

    def read(self, slot: int, piece: int) -> None:
        kind, block = self.order[piece]
        board, dtype = self.board, self.x.dtype
        if kind == "S":
            lo, hi = self._range(block, board.rank)
            at = board.rank * self.part
            if hi > lo:
                parts = [board.slot(r, slot, dtype)[at : at + hi - lo] for r in range(board.size)]
                combine(parts, self.out[lo:hi], self.op)
            return
        for peer in board.peers:
            lo, hi = self._range(block, peer)
            self.out[lo:hi].copy_(board.slot(peer, slot, dtype)[: hi - lo])


class Broadcast(Exchange):
    """x of rank `src` into x of everyone."""

    def __init__(self, board: SharedBoard, x: torch.Tensor, src: int):
        self.x, self.src = x.view(-1), src
        self.length = _length(board, x)
        super().__init__(board, -(-x.numel() // self.length), x)

    def _piece(self, slot: int, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = self.x[piece * self.length : (piece + 1) * self.length]
        return part, self.board.slot(self.src, slot, part.dtype)[: part.numel()]

    def write(self, slot: int, piece: int) -> None:
        if self.board.rank == self.src:
            part, place = self._piece(slot, piece)
            place.copy_(part)

    def read(self, slot: int, piece: int) -> None:
        if self.board.rank != self.src:
            part, place = self._piece(slot, piece)
            part.copy_(place)


class Shared:
    """The shared-memory transport: each method starts an exchange and returns it."""

    def __init__(self, board: SharedBoard):
        self.board = board

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Exchange:
        return self.board.start(AllGather(self.board, out, x))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Exchange:
        return self.board.start(ReduceScatter(self.board, out, x))

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, op: str) -> Exchange:
        large = self.board.size > 2 and x.numel() * x.element_size() > self.board.slot_bytes
        return self.board.start((LargeAllReduce if large else AllReduce)(self.board, out, x, op))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Exchange:
        return self.board.start(AllToAll(self.board, out, x))

    def exchange_rows(self, out: torch.Tensor, x: torch.Tensor, rows: Rows) -> Exchange:
        exchange = ExchangeRows(self.board, out, x, rows)
        return self.board.start(exchange) if exchange.pieces else exchange

    def broadcast(self, x: torch.Tensor, src: int) -> Exchange:
        return self.board.start(Broadcast(self.board, x, src))

    def barrier(self) -> Exchange:
        return self.board.start(Exchange(self.board, 1, None))
