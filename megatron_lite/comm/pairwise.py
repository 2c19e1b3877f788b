"""The collectives over a gloo group, summed in rank order. Two ways to move the parts, both deterministic:

    small    gloo's own all-gather and all-to-all, then a local sum: fewest threads to wake
    large    isend/irecv pairs, which move bytes two to four times as fast as gloo's own collectives

Every message is sent as bytes, so any dtype travels. Each collective takes its own tag, the same on all ranks since all
start the same collectives in the same order. Same interface and bit-equal results as comm/exchanges.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from megatron_lite.comm.exchanges import Rows, combine

FIRST_TAG = 1 << 30  # below: pipeline messages (comm/p2p.py), which may use the same group
SMALL_BYTES = 1 << 19
# torch 2.13 renamed this one; the old name warns there.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _small(x: torch.Tensor) -> bool:
    return x.numel() * x.element_size() <= SMALL_BYTES


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


class Pending:
    """Sends and receives in flight; `wait` finishes them, runs `then`, and returns `result`."""

    def __init__(
        self, works: list, keep: list[torch.Tensor], result: torch.Tensor, then: Callable[[], None] | None = None
    ):
        self.works, self.keep, self.result, self.then = works, keep, result, then

    def wait(self) -> torch.Tensor:
        works, self.works = self.works, []
        for work in works:
            work.wait()
        self.keep = []
        then, self.then = self.then, None
        if then is not None:
            then()
        return self.result


class Pairwise:
    """The transport of one gloo group; `tags` is shared by everyone who uses the group."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup, tags: Iterator[int]):
        self.rank, self.size, self.group, self.tags = rank, size, group, tags
        self.peers = [(rank + step) % size for step in range(1, size)]  # everyone starts with another peer

    def _exchange(
        self, send: Callable, receive: Callable, result: torch.Tensor, then: Callable | None = None
    ) -> Pending:
        """send(peer) goes to, and receive(peer) is filled from, every peer. Both give flat tensors."""
        tag = FIRST_TAG + next(self.tags) % FIRST_TAG
        works, keep = [], []
        for peer in self.peers:
            place = receive(peer)
            if place is not None and place.numel():
                works.append(dist.irecv(place.view(torch.uint8), group=self.group, group_src=peer, tag=tag))
        for peer in self.peers:
            part = send(peer)
            if part is not None and part.numel():
                keep.append(part)
                works.append(dist.isend(part.view(torch.uint8), group=self.group, group_dst=peer, tag=tag))
        return Pending(works, keep, result, then)

    def _gather(
        self, out: torch.Tensor, flat: torch.Tensor, result: torch.Tensor, then: Callable | None = None
    ) -> Pending:
        """gloo's own: out [n, len] from everyone's flat [len]."""
        return Pending(
            [ALL_GATHER(_bytes(out), _bytes(flat), group=self.group, async_op=True)], [out, flat], result, then
        )

    def _turn(
        self, out: torch.Tensor, parts: torch.Tensor, result: torch.Tensor, then: Callable | None = None
    ) -> Pending:
        """gloo's own: out [n, len], row p from rank p; parts [n, len], row p to rank p."""
        work = dist.all_to_all_single(_bytes(out), _bytes(parts), group=self.group, async_op=True)
        return Pending([work], [out, parts], result, then)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Pending:
        parts, flat = out.view(self.size, -1), x.view(-1)
        mine = parts[self.rank]
        if _small(out):
            sent = flat.clone() if mine.data_ptr() == x.data_ptr() else flat
            return self._gather(parts, sent, out)
        if mine.data_ptr() != x.data_ptr():
            mine.copy_(flat)
        return self._exchange(lambda p: flat, lambda p: parts[p], out)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Pending:
        parts, flat = x.view(self.size, -1), out.view(-1)
        if _small(x):
            arrived = torch.empty_like(parts)
            return self._turn(arrived, parts, out, lambda: combine(list(arrived), flat))
        return self._reduce_scatter(list(parts), flat, "sum", out)

    def _reduce_scatter(self, parts: list[torch.Tensor], flat: torch.Tensor, op: str, result: torch.Tensor) -> Pending:
        """flat = my part summed over ranks; parts[q] is what this rank adds to rank q's."""
        arrived = [parts[r] if r == self.rank else torch.empty_like(parts[self.rank]) for r in range(self.size)]
        return self._exchange(lambda p: parts[p], lambda p: arrived[p], result, lambda: combine(arrived, flat, op))

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, op: str) -> Pending:
        flat, target = x.view(-1), out.view(-1)
        if _small(x):
            everyone = flat.new_empty(self.size, flat.numel())
            return self._gather(everyone, flat, out, lambda: combine(list(everyone), target, op))
        if self.size == 2:
            arrived = [flat if r == self.rank else torch.empty_like(flat) for r in range(self.size)]
            return self._exchange(lambda p: flat, lambda p: arrived[p], out, lambda: combine(arrived, target, op))
        length = -(-flat.numel() // self.size)
        parts = list(flat.split(length))
        parts += [flat[:0]] * (self.size - len(parts))
        sums = list(target.split(length))
        sums += [target[:0]] * (self.size - len(sums))
        first = self._reduce_scatter(parts, sums[self.rank], op, out)
        reduce, gather_tag = first.then, iter([next(self.tags)])

        def gather() -> None:
            reduce()
            Pairwise(self.rank, self.size, self.group, gather_tag)._exchange(
                lambda p: sums[self.rank], lambda p: sums[p], out).wait()  # fmt: skip

        first.then = gather
        return first

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> Pending:
        parts, places = x.view(self.size, -1), out.view(self.size, -1)
        if _small(x):
            return self._turn(places, parts, out)
        places[self.rank].copy_(parts[self.rank])
        return self._exchange(lambda p: parts[p], lambda p: places[p], out)

    def exchange_rows(self, out: torch.Tensor, x: torch.Tensor, rows: Rows) -> Pending:
        rank, size = self.rank, x.shape[1:].numel()
        parts = x.view(-1).split([n * size for n in rows[rank]])
        places = out.view(-1).split([row[rank] * size for row in rows])
        places[rank].copy_(parts[rank])
        return self._exchange(lambda p: parts[p], lambda p: places[p], out)
    def shift(self, out: torch.Tensor, x: torch.Tensor, following: int, before: int) -> Pending:
        """x to rank `following`, out from rank `before`."""
        flat, place = x.view(-1), out.view(-1)
        return self._exchange(lambda p: flat if p == following else None, lambda p: place if p == before else None, out)

    def broadcast(self, x: torch.Tensor, src: int) -> Pending:
        flat = x.view(-1)
        if self.rank == src:
            return self._exchange(lambda p: flat, lambda p: None, x)
        return self._exchange(lambda p: None, lambda p: flat if p == src else None, x)
