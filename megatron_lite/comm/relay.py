"""Files from rank to rank, block by block, through host memory on both sides.

The bytes go over gloo whatever the training talks over: under NCCL a group of its own is made, so that copies of host
files neither pass through device memory nor queue with the training's messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_lite.comm.mesh import Axis
from megatron_lite.comm.pairwise import FIRST_TAG

BLOCK = 8 << 20  # bytes under way from a rank


class Transfer(NamedTuple):
    """A file of `size` bytes that rank `source` has and rank `target` is to have."""

    source: int
    target: int
    name: str
    size: int


Where = Callable[[Transfer], Path]


class Relay:
    """The way between the ranks of an axis. Making one and moving files are collective over it."""

    def __init__(self, axis: Axis, device: torch.device):
        if axis.size > 1 and device.type == "cuda":
            axis = replace(axis, group=dist.new_group(list(axis.ranks), backend="gloo"), tags=itertools.count())
        self.axis = axis

    def move(self, transfers: Sequence[Transfer], source: Where, target: Where) -> list[str]:
        """Move all files; every rank gives the same list. Returns what could not be read or written here, in words.

        `source` and `target` say where a file lies, and shall lie, on the rank that asks. A rank sends in one thread and
        receives in another, both in the list's order: the first transfer that is not over has both its ends at work on
        it, so no order deadlocks. A file that cannot be read travels as zeros, and one that cannot be written is dropped,
        so that the other end, which waits for the bytes, is not held up.
        """
        tag, rank = FIRST_TAG + next(self.axis.tags) % FIRST_TAG, self.axis.rank
        outgoing = [t for t in transfers if t.source == rank != t.target]
        incoming = [t for t in transfers if t.target == rank]
        with ThreadPoolExecutor(1, "relay") as threads:
            sending = threads.submit(self._send, outgoing, source, tag)
            problems = self._receive(incoming, source, target, tag)
            return sending.result() + problems

    def _send(self, transfers: Sequence[Transfer], source: Where, tag: int) -> list[str]:
        problems, buffer = [], torch.empty(BLOCK, dtype=torch.uint8)
        for transfer in transfers:
            reader = Reader(source(transfer))
            for block in blocks(buffer, transfer.size):
                reader.fill(block)
                dist.send(block, group=self.axis.group, group_dst=transfer.target, tag=tag)
            problems += reader.close()
        return problems

    def _receive(self, transfers: Sequence[Transfer], source: Where, target: Where, tag: int) -> list[str]:
        problems, buffer = [], torch.empty(BLOCK, dtype=torch.uint8)
        for transfer in transfers:
            own = Reader(source(transfer)) if transfer.source == transfer.target else None
            writer = Writer(target(transfer))
            for block in blocks(buffer, transfer.size):
                if own is not None:
                    own.fill(block)
                else:
                    dist.recv(block, group=self.axis.group, group_src=transfer.source, tag=tag)
                writer.put(block)
            problems += writer.close() + (own.close() if own is not None else [])
        return problems


def blocks(buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The buffer, and a part of it for the rest, as often as `size` bytes need it."""
    return [buffer[: min(len(buffer), size - start)] for start in range(0, size, len(buffer))]


class HostFile:
    """A file used in order. The first error is kept; what comes after it does nothing."""

    def __init__(self, path: Path, mode: str, doing: str):
        self.path, self.doing, self.problem, self.file = path, doing, None, None
        self.attempt(self._open, mode)

    def _open(self, mode: str) -> None:
        self.file = open(self.path, mode, buffering=0)

    def attempt(self, work: Callable[..., None], *arguments: object) -> None:
        if self.problem is None:
            try:
                work(*arguments)
            except OSError as error:
                self.problem = f"cannot {self.doing} {self.path}: {error.strerror}"

    def close(self) -> list[str]:
        """What went wrong, if anything."""
        if self.file is not None:
            self.attempt(self.file.close)
        return [self.problem] if self.problem else []


class Reader(HostFile):
    def __init__(self, path: Path):
        super().__init__(path, "rb", "read")

    def fill(self, block: torch.Tensor) -> None:
        """The next bytes into a uint8 tensor; zeros once something went wrong."""
        self.attempt(self._fill, memoryview(block.numpy()))
        if self.problem:
            block.zero_()

    def _fill(self, left: memoryview) -> None:
        while left:
            count = self.file.readinto(left)
            if not count:
                raise OSError(0, "it is shorter than it was")
            left = left[count:]


class Writer(HostFile):
    def __init__(self, path: Path):
        super().__init__(path, "wb", "write")

    def put(self, block: torch.Tensor) -> None:
        """Append the bytes of a uint8 tensor."""
        self.attempt(self._put, memoryview(block.numpy()))

    def _put(self, left: memoryview) -> None:
        while left:
            left = left[self.file.write(left) :]
