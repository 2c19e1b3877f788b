"""Ranks of one host exchange CPU tensors through anonymous shared memory.

Each rank owns a piece of memory that its peers map: two counters and a ring of slots.

    published   how many messages this rank has written        slot of message k:  k % slots
    consumed    how many messages of all peers it has read

The one primitive: wait until everyone consumed message k - slots, copy mine into slot k, raise `published`; wait for
everyone's `published`, read their slots, raise `consumed`. An `Exchange` (comm/exchanges.py) is a collective cut into
such messages. All ranks start the same exchanges in the same order, so message numbers agree without being sent.

Starting an exchange publishes what fits and never blocks; waiting for it reads, oldest exchange first. The memory comes
from memfd_create: not limited by the size of /dev/shm, and it vanishes with the processes. x86-64 keeps the order of
stores, data before counter; other machines use gloo. One thread per process may use a board.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

HEADER = 4096
PUBLISHED, CONSUMED, TOKEN = 0, 8, 16  # indices of 8-byte words in the header, a cache line apart
SLOTS, SLOT_BYTES = 4, 1 << 20  # few and small: a slot is read while it is still in the cache
SLOT_BYTES_MANY = 4 << 20  # three and more ranks: fewer messages, since each waits until all have had a core
SPINS = 100
YIELD_SECONDS = 0.0005
SLEEP_SECONDS = 0.00005


class Exchange:
    """One collective in flight, as `pieces` messages. Subclasses fill `write` and `read`; `wait` returns `result`."""

    def __init__(self, board: SharedBoard, pieces: int, result: torch.Tensor | None):
        self.board, self.pieces, self.result = board, pieces, result
        self.written = self.done = 0

    def write(self, slot: int, piece: int) -> None:
        """Copy my part of message `piece` into my slot."""

    def read(self, slot: int, piece: int) -> None:
        """Use everyone's slots of message `piece`."""

    def needs(self, piece: int) -> int:
        """How many messages of this exchange must have been read before message `piece` can be written."""
        return 0

    def wait(self) -> torch.Tensor | None:
        self.board.finish(self)
        return self.result


class SharedBoard:
    """The memory of all ranks of one axis, mapped, and the exchanges in flight over it. Made by `connect`."""

    def __init__(
        self, rank: int, memories: list[mmap.mmap], pids: list[int], slots: int, slot_bytes: int, timeout: float
    ):
        self.rank, self.size, self.pids = rank, len(memories), pids
        self.slots, self.slot_bytes, self.timeout = slots, slot_bytes, timeout
        self.peers = [p for p in range(self.size) if p != rank]
        self.words = [memoryview(m).cast("Q") for m in memories]
        self.bytes = [torch.frombuffer(m, dtype=torch.uint8, offset=HEADER) for m in memories]
        self.typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self.published = self.consumed = 0
        self.unwritten: deque[Exchange] = deque()
        self.unread: deque[Exchange] = deque()

    @classmethod
    def connect(
        cls, rank: int, size: int, group: dist.ProcessGroup, slots: int = SLOTS, slot_bytes: int | None = None
    ) -> SharedBoard | None:
        """Collective over `group`: a board, or None on every rank if any rank cannot map every other's memory."""
        everyone = tuple(range(size))
        return cls.connect_all(rank, [everyone], group, slots, slot_bytes)[everyone]

    @classmethod
    def connect_all(
        cls,
        rank: int,
        memberships: list[tuple[int, ...]],
        group: dist.ProcessGroup,
        slots: int = SLOTS,
        slot_bytes: int | None = None,
    ) -> dict[tuple[int, ...], SharedBoard | None]:
        """A board, or None, for each of the sets of ranks of `group` that this rank is in. Collective over `group`."""
        room = {r: slot_bytes or (SLOT_BYTES if len(r) == 2 else SLOT_BYTES_MANY) for r in memberships}
        mapped = map_everyone(rank, {r: HEADER + slots * room[r] for r in memberships}, group)
        limit = group_timeout(group)
        return {r: found and cls(r.index(rank), *found, slots, room[r], limit) for r, found in mapped.items()}

    def slot(self, rank: int, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Slot `index` of a rank as a flat tensor of `dtype`."""
        if dtype not in self.typed:
            self.typed[dtype] = [[part.view(dtype) for part in whole.split(self.slot_bytes)] for whole in self.bytes]
        return self.typed[dtype][rank][index]

    def start(self, exchange: Exchange) -> Exchange:
        """Put an exchange in line and publish what fits."""
        self.unwritten.append(exchange)
        self.unread.append(exchange)
        self._publish()
        return exchange

    def finish(self, exchange: Exchange) -> None:
        """Read messages, oldest first, until this exchange is complete."""
        while exchange.done < exchange.pieces:
            if self.published == self.consumed:
                self._await(CONSUMED, self.published - self.slots + 1)
            self._publish()
            self._await(PUBLISHED, self.consumed + 1)
            oldest = self.unread[0]
            oldest.read(self.consumed % self.slots, oldest.done)
            self.consumed += 1
            self.words[self.rank][CONSUMED] = self.consumed
            oldest.done += 1
            if oldest.done == oldest.pieces:
                self.unread.popleft()

    def _publish(self) -> None:
        """Write messages while slots are free, without waiting for anyone."""
        words, line = self.words, self.unwritten
        while line and self.published - self.consumed < self.slots:
            first = line[0]
            if first.needs(first.written) > first.done:
                return
            oldest_needed = self.published - self.slots
            if any(words[p][CONSUMED] <= oldest_needed for p in self.peers) and oldest_needed >= 0:
                return
            first.write(self.published % self.slots, first.written)
            self.published += 1
            words[self.rank][PUBLISHED] = self.published
            first.written += 1
            if first.written == first.pieces:
                line.popleft()

    def _await(self, word: int, target: int) -> None:
        """Until every peer's counter has reached `target`: spin briefly, then give the core away.

        Ranks may outnumber cores; a rank that spins then keeps the very peer it waits for from running.
        """
        for peer in self.peers:
            counters = self.words[peer]
            for _ in range(SPINS):
                if counters[word] >= target:
                    break
            else:
                self._await_slowly(peer, word, target)

    def _await_slowly(self, peer: int, word: int, target: int) -> None:
        counters = self.words[peer]

        def late() -> list[int]:
            return [p for p in self.peers if self.words[p][word] < target]

        wait_until(lambda: counters[word] >= target, late, self.rank, self.pids, self.timeout)


def wait_until(
    ready: Callable[[], bool], late: Callable[[], list[int]], rank: int, pids: list[int], timeout: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:  # fmt: skip
    """Give the core away until `ready()`; if the ranks missed, `late()`, have ended or take too long, an error.

    `sleep` may take longer than it is asked to, if something wakes it.
    """
    began = looked = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now - began < YIELD_SECONDS:
            os.sched_yield()
            continue
        sleep(SLEEP_SECONDS if now - began < 0.1 else 10 * SLEEP_SECONDS)
        if now - looked < 0.5:
            continue
        looked, me = now, f"shared memory: rank {rank} of {len(pids)}"
        gone = [p for p in late() if not _alive(pids[p])]
        if gone and not ready():
            raise RuntimeError(f"{me} waited for ranks {gone} of its axis, whose processes have ended")
        if now - began > timeout:
            raise TimeoutError(f"{me} waited {timeout:g} s for ranks {late()} of its axis, which did not arrive")


def map_everyone(
    rank: int, lengths: dict[tuple[int, ...], int], group: dist.ProcessGroup
) -> dict[tuple[int, ...], tuple[list[mmap.mmap], list[int]] | None]:
    """For each set of ranks: the memory, of this length, and process id of every rank in it; or None on all of them.

    Collective over `group`, whose ranks may be in different sets.
    """
    made = {ranks: _offer(length) for ranks, length in lengths.items()}
    offers: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(offers, {ranks: offer for ranks, (_, _, offer) in made.items()}, group=group)
    opened = {
        ranks: _open_all(ranks.index(rank), memory, [offers[r][ranks] for r in ranks])
        for ranks, (_, memory, _) in made.items()
    }
    agreed: list = [None] * len(offers)
    dist.all_gather_object(agreed, {ranks for ranks, memories in opened.items() if memories}, group=group)
    mapped: dict = {}
    for ranks, (descriptor, _, _) in made.items():
        if descriptor is not None:
            os.close(descriptor)  # only now: the peers opened it through this process
        everyone = all(ranks in agreed[r] for r in ranks)
        mapped[ranks] = (opened[ranks], [offers[r][ranks]["pid"] for r in ranks]) if everyone else None
    return mapped


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def group_timeout(group: dist.ProcessGroup) -> float:
    """The process group's own time limit in seconds, so that both ways of waiting give up together."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _offer(length: int) -> tuple[int | None, mmap.mmap | None, dict | None]:
    """(file descriptor, my memory, what peers need in order to map it), or Nones where this cannot work."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return None, None, None
    descriptor = None
    try:
        descriptor = os.memfd_create("megatron_lite")
        os.ftruncate(descriptor, length)
        memory = mmap.mmap(descriptor, length)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None, None, None
    token = secrets.randbits(63)
    memoryview(memory).cast("Q")[TOKEN] = token
    host = (socket.gethostname(), boot)
    offer = {"host": host, "pid": os.getpid(), "descriptor": descriptor, "length": length, "token": token}
    return descriptor, memory, offer


def _open_all(rank: int, mine: mmap.mmap | None, offers: list[dict | None]) -> list[mmap.mmap] | None:
    """Everyone's memory in rank order, or None. The token catches equal process ids in different containers."""
    if None in offers or any(o["host"] != offers[0]["host"] or o["length"] != offers[0]["length"] for o in offers):
        return None
    memories = []
    for index, offer in enumerate(offers):
        if index == rank:
            memories.append(mine)
            continue
        try:
            descriptor = os.open(f"/proc/{offer['pid']}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(descriptor, offer["length"])
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return None
        if memoryview(memory).cast("Q")[TOKEN] != offer["token"]:
            return None
        memories.append(memory)
    return memories
