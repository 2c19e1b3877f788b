"""Tagged messages between ranks of one host through shared memory: what pipeline stages on CPU talk over (comm/p2p.py),
and the ranks of a ring (comm/ring.py).

Each rank owns a memory with a count of messages posted and a ring of entries for every receiver, and one heap:

    posted[receiver]      entries[receiver][k % ENTRIES] = tag, place in the heap, bytes, taken?      heap

A sender copies its tensor into the heap, fills an entry, raises the count, and goes on: it waits for nobody, so
no order of sends and receives can deadlock. The receiver finds the entry by its tag, copies the bytes out, and marks
the entry taken; the sender then uses the place again. The heap is sparse: only what is in flight costs memory.
A receiver with nothing to take sleeps on the sender's count (comm/futex.py).
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_lite.comm.futex import Futex
from megatron_lite.comm.shared import HEADER, group_timeout, map_everyone, wait_until

ENTRIES = 1024  # messages to one receiver that may wait to be taken
WORDS = 4
TAG, PLACE, LENGTH, TAKEN = range(WORDS)
HEAP_BYTES = 4 << 30
PAGE = 4096
LOOK_SECONDS = 0.5  # a sleeping receiver looks this often whether the sender still lives


class Mailbox:
    """One rank's view of everyone's memory. Made by `connect`; one thread per process may use it."""

    def __init__(self, rank: int, memories: list, pids: list[int], timeout: float):
        self.rank, self.size, self.pids, self.timeout = rank, len(memories), pids, timeout
        self.memories = memories
        self.words = [memoryview(m).cast("Q") for m in memories]
        self.bases = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in memories]
        self.futex = Futex(LOOK_SECONDS)
        self.sent = [0] * self.size
        self.seen = [0] * self.size
        self.arrived: list[dict[int, deque]] = [defaultdict(deque) for _ in range(self.size)]
        self.outstanding: list[tuple[int, int, int]] = []  # (word of the taken mark, place, room) of messages sent
        self.free: dict[int, list[int]] = defaultdict(list)  # places in the heap by room
        self.top = 0

    @classmethod
    def connect(cls, rank: int, size: int, group: dist.ProcessGroup) -> Mailbox | None:
        """Collective over `group`; None on all ranks where shared memory does not work."""
        everyone = tuple(range(size))
        found = map_everyone(rank, {everyone: _table_bytes(size) + HEAP_BYTES}, group)[everyone]
        return found and cls(rank, *found, group_timeout(group))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Copy a contiguous tensor into the mail for `peer`."""
        mine, at, length = self.words[self.rank], self._entry(peer, self.sent[peer]), tensor.nbytes
        if self.sent[peer] >= ENTRIES:
            wait_until(lambda: mine[at + TAKEN] == 1, lambda: [peer], self.rank, self.pids, self.timeout)
        place, room = self._room(length)
        ctypes.memmove(self.bases[self.rank] + _table_bytes(self.size) + place, tensor.data_ptr(), length)
        mine[at + TAG], mine[at + PLACE], mine[at + LENGTH], mine[at + TAKEN] = tag, place, length, 0
        self.sent[peer] += 1
        mine[_posted(peer)] = self.sent[peer]
        self.futex.wake(self.bases[self.rank] + 8 * _posted(peer))
        self.outstanding.append((at + TAKEN, place, room))

    def _room(self, length: int) -> tuple[int, int]:
        """A free (place, room) in my heap. The place freed last is used first: it may still be in the cache."""
        self._reclaim()
        room = -(-length // PAGE) * PAGE
        if not self.free[room]:
            if self.top + room > HEAP_BYTES:
                raise MemoryError(f"{self.top + room} bytes of messages wait to be received")
            self.top += room
            return self.top - room, room
        return self.free[room].pop(), room

    def _reclaim(self) -> None:
        mine, waiting = self.words[self.rank], []
        for message in self.outstanding:
            taken, place, room = message
            if mine[taken]:
                self.free[room].append(place)
            else:
                waiting.append(message)
        self.outstanding = waiting

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Wait for the oldest message of `peer` with this tag and copy it into a contiguous tensor."""
        at, place = self._arrival(peer, tag, tensor.nbytes)
        ctypes.memmove(tensor.data_ptr(), self.bases[peer] + place, tensor.nbytes)
        self.words[peer][at + TAKEN] = 1

    def borrow(self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """The same without a copy: a tensor in the sender's memory, which is the sender's again after the call given with it."""
        count = math.prod(shape)
        at, place = self._arrival(peer, tag, count * dtype.itemsize)
        tensor = torch.frombuffer(self.memories[peer], dtype=dtype, count=count, offset=place).view(shape)
        theirs = self.words[peer]

        def give_back() -> None:
            theirs[at + TAKEN] = 1

        return tensor, give_back

    def _arrival(self, peer: int, tag: int, nbytes: int) -> tuple[int, int]:
        """Wait for the oldest message of `peer` with this tag; its entry's word, and where it lies in `peer`'s memory."""
        if not self._has(peer, tag):
            count = self.bases[peer] + 8 * _posted(self.rank)
            wait_until(lambda: self._has(peer, tag), lambda: [peer], self.rank, self.pids, self.timeout,
                       lambda _: self.futex.wait(count, self.seen[peer]))  # fmt: skip
        at = self.arrived[peer][tag].popleft()
        place, length = self.words[peer][at + PLACE], self.words[peer][at + LENGTH]
        if length != nbytes:
            raise ValueError(f"rank {self.rank} awaits {nbytes} bytes, rank {peer} sent {length} with tag {tag}")
        return at, _table_bytes(self.size) + place

    def _has(self, peer: int, tag: int) -> bool:
        """Note what `peer` has posted since the last look; is a message with this tag there?"""
        theirs = self.words[peer]
        for number in range(self.seen[peer], theirs[_posted(self.rank)]):
            at = self._entry(self.rank, number)
            self.arrived[peer][theirs[at + TAG]].append(at)
            self.seen[peer] = number + 1
        return bool(self.arrived[peer][tag])

    def _entry(self, receiver: int, number: int) -> int:
        """Word where entry `number` for a receiver starts, in its sender's memory."""
        return (HEADER + PAGE * self.size) // 8 + (receiver * ENTRIES + number % ENTRIES) * WORDS


def _posted(receiver: int) -> int:
    """Word of the count of messages for a receiver; a page apart, so that no two receivers share a cache line."""
    return (HEADER + PAGE * receiver) // 8


def _table_bytes(size: int) -> int:
    return HEADER + size * (PAGE + ENTRIES * WORDS * 8)
