"""A save that is written behind the training (`--async-save`).

    start     snapshot to host memory: all that a step waits for          every rank
    writing   a thread writes and syncs this rank's file                  every rank
    naming    a thread writes the manifest, renames, moves the tracker    rank 0
    saved

From one state to the next all ranks go together, in `poll`, which the loop calls between two steps: the threads speak to
nobody, so that the order of the training's collectives is the same on every rank. File writes, fsync and checksums let go
of the interpreter's lock.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Generic, TypeVar

import torch

from megatron_lite.checkpoint.agree import CheckpointError, agree
from megatron_lite.checkpoint.boxes import Piece, joined
from megatron_lite.checkpoint.folder import TEMPORARY, discard, iteration_name
from megatron_lite.checkpoint.save import merge, name_it, prepare, write_own
from megatron_lite.checkpoint.shard_file import stretch
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh

T = TypeVar("T")


class Snapshot:
    """Host memory for a copy of what a rank saves. It is kept from save to save: fresh memory costs twice the copy."""

    def __init__(self) -> None:
        self.kept: dict[tuple, torch.Tensor] = {}
        self.pinned = False  # copies from a GPU, which do not wait
        self.pieces: list[Piece] | None = None  # of the last save, and for them:
        self.copies: list[Piece] = []
        self.targets: list[torch.Tensor] = []

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The same blocks with their bytes as they are now; the tensors may change as soon as this returns.

        Of a list, blocks one under the other become one, in memory too, so that the thread that writes has little to do in
        Python; for the same list once more nothing is planned. Anything else is copied as it comes, and not held.
        """
        if not isinstance(pieces, list):
            self.kept, kept = {}, self.kept
            self.copies = [self._copied(piece, kept) for piece in pieces]
        else:
            if pieces is not self.pieces:
                self._arrange(pieces)
            with torch.no_grad():
                torch._foreach_copy_(self.targets, [piece.tensor for piece in pieces], non_blocking=True)
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        return self.copies

    def _copied(self, piece: Piece, kept: dict[tuple, torch.Tensor]) -> Piece:
        host = self._memory(piece, tuple(piece.offset), tuple(piece.length), kept)
        host.copy_(piece.tensor.detach(), non_blocking=True)
        return Piece(piece.key, piece.full_shape, piece.offset, piece.length, host)

    def _arrange(self, pieces: list[Piece]) -> None:
        """Where each piece is copied to: rows of the memory of its stretch."""
        self.kept, kept, places, self.copies = {}, self.kept, {}, []
        for block in map(stretch, joined(pieces)):
            host, first, row = self._memory(block.pieces[0], block.offset, block.length, kept), block.pieces[0], 0
            self.copies.append(Piece(first.key, first.full_shape, block.offset, block.length, host))
            for piece in block.pieces:
                places[id(piece)] = host[row : row + piece.length[0]] if block.length else host
                row += piece.length[0] if block.length else 0
        self.pieces, self.targets = pieces, [places[id(piece)] for piece in pieces]

    def _memory(self, like: Piece, offset: Sequence[int], length: Sequence[int], kept: dict[tuple, torch.Tensor]) -> torch.Tensor:
        dtype, cuda = like.tensor.dtype, like.tensor.is_cuda
        key, self.pinned = (like.key, offset, length, dtype), self.pinned or cuda
        self.kept[key] = torch.empty(length, dtype=dtype, pin_memory=cuda) if key not in kept else kept[key]
        return self.kept[key]


def step_aside() -> None:
    """This thread runs in time that nobody else wants, so that a core it needs is not taken from a step (Linux: elsewhere
    threads have no priority of their own)."""
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Task(Generic[T]):
    """A function at work in a thread; its value or its error is kept until somebody asks."""

    def __init__(self, work: Callable[[], T]):
        self.work, self.value, self.error = work, None, None
        # A daemon: when another rank is gone the process ends without waiting for a checkpoint that cannot be completed.
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        step_aside()
        try:
            self.value = self.work()
        except BaseException as error:  # kept for the thread that trains: nothing is lost with this one
            self.error = error

    @property
    def over(self) -> bool:
        return not self.thread.is_alive()

    def result(self) -> T:
        """Wait for the end. Raises what the function raised."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.value


class BackgroundSave:
    """One save under way, from the copy to the tracker. Constructor and `poll` are collective over all ranks."""

    def __init__(self, directory: str | os.PathLike, iteration: int, pieces: Iterable[Piece], meta: dict, mesh: Mesh,
                 snapshot: Snapshot, keep: int | None = None):  # fmt: skip
        """As `save_checkpoint`, but returns once the pieces are copied. `snapshot`: not in use by another save.

        Raises CheckpointError on every rank where the folder cannot be used or the copy cannot be made.
        """
        self.directory, self.iteration, self.meta, self.mesh = Path(directory), iteration, meta, mesh
        self.keep = keep
        self.staging = self.directory / (TEMPORARY + iteration_name(iteration))
        self.doing = f"saving iteration {iteration} to {directory}"
        self.first = mesh.world.rank == 0
        self.naming, self.prepared, self.stack = False, False, ExitStack()

        copies: list[Piece] = []
        try:  # one word among the ranks for the folder and the copy: a step waits for it
            agree(lambda: copies.extend(self._prepare(pieces, snapshot)), mesh.world, self.doing)
        except CheckpointError:
            self._give_up()
            raise
        self.task: Task = Task(lambda: write_own(self.staging, mesh.world.rank, copies))

    def _prepare(self, pieces: Iterable[Piece], snapshot: Snapshot) -> list[Piece]:
        """Make the folder ready on rank 0, and copy."""
        if self.first:
            prepare(self.directory, self.staging, self.stack)
            self.prepared = True
        return snapshot.take(pieces)

    def poll(self, wait: bool = False) -> Path | None:
        """Go on to what is next if all ranks can; the folder once it is the latest, else None. `wait`: stay until then.

        Raises one CheckpointError on every rank if the save failed on some: the half-written folder is then gone and the
        previous checkpoint the latest.
        """
        while wait or self._all_over():
            try:
                answers = agree(self.task.result, self.mesh.world, self.doing)
            except CheckpointError:
                self._give_up()
                raise
            if self.naming:
                self.stack.close()
                return answers[0]
            self.naming = True
            self.task = Task(self._publish(answers))
            if not wait:
                return None
        return None

    def _publish(self, reports: list) -> Callable[[], Path | None]:
        if not self.first:
            return lambda: None
        return lambda: name_it(self.directory, self.staging, merge(self.iteration, reports, self.meta), self.keep)

    def _all_over(self) -> bool:
        busy = torch.tensor([not self.task.over], dtype=torch.float32, device=self.mesh.device)
        return not comm.all_reduce(busy, self.mesh.world, op="max")

    def _give_up(self) -> None:
        """All ranks have spoken, so nobody writes there any more. Without the lock the folder may be another run's."""
        if self.prepared:
            discard(self.staging)
        self.stack.close()
