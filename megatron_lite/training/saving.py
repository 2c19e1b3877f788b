"""When a run saves, what, and how: at once, or behind the training with `--async-save`; and when it is copied to peers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.background import BackgroundSave, Snapshot
from megatron_lite.checkpoint.boxes import Piece
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm import collectives as comm
from megatron_lite.training.setup import Trainer
from megatron_lite.training.state import WEIGHTS, Home, Progress, compression, meta_of, pieces_of, routers, tensors


class Saver:
    """All checkpoints of a run. Every method is collective: all ranks call it at the same point of the run.

    Full checkpoints go to `--save`, copies of the weights to `--save`/weights. Of each kind one is under way at most: the next
    one waits for it, so that memory holds one copy.
    """

    def __init__(self, trainer: Trainer, progress: Progress, say: Callable[[str], None], home: Home | None = None):
        self.trainer, self.flags, self.say, self.home = trainer, trainer.config.checkpoint, say, home or Home()
        resumed = self.flags.load == self.flags.save and progress.iteration > 0
        loaded = self.home.tracked if self.home.recovered else progress.iteration
        self.saved_iteration = loaded if resumed else None  # that is safe
        self.last_started = self.saved_iteration
        self.clock = time.monotonic()
        self.snapshots = {"full": Snapshot(), WEIGHTS: Snapshot()}
        self.running: dict[str, BackgroundSave] = {}
        self.views: tuple[list, list[Piece]] = ([], [])  # where the state lay at the last full save, and its pieces

    def due(self, progress: Progress, last: bool) -> tuple[bool, bool]:
        """(whether to save now, whether to save the weights alone)."""
        flags, iteration = self.flags, progress.iteration
        if flags.save is None:
            return False, False
        weights = flags.save_weights_only_interval
        every = flags.save_interval
        full = last or bool(every and iteration % every == 0) or self._time_is_up()
        return full and self.last_started != iteration, not last and bool(weights and iteration % weights == 0)

    def _time_is_up(self) -> bool:
        """Whether --save-interval-minutes have passed on rank 0, whose clock decides for all."""
        if self.flags.save_interval_minutes is None:
            return False
        mesh = self.trainer.mesh
        passed = time.monotonic() - self.clock >= 60 * self.flags.save_interval_minutes
        answer = torch.tensor([passed], dtype=torch.float32, device=mesh.device)
        return bool(comm.broadcast(answer, mesh.world))

    def save(self, progress: Progress, full: bool, weights: bool) -> None:
        """Save what is due: to the end, or with --async-save until it is copied."""
        meta = meta_of(self.trainer, progress)
        if full:
            self.clock, self.last_started = time.monotonic(), progress.iteration
            pieces = self._pieces(not self.flags.no_save_optim)
            self._save("full", self.flags.save, pieces, meta, self.flags.save_retain)
        if weights:
            dtype = getattr(torch, self.trainer.config.precision.dtype_name)
            pieces = pieces_of(self.trainer, False, dtype)
            self._save(WEIGHTS, os.path.join(self.flags.save, WEIGHTS), pieces, meta | {"kind": WEIGHTS}, None)

    def _pieces(self, optim: bool) -> list[Piece]:
        """What a full save writes: the same list as long as the state lies where it did, so that a step does not wait for it to
        be planned again. The views hold their memory, so no other tensor can have come to the same address."""
        flats = [(prefix, flat) for _, (prefix, _, _, _, flat) in tensors(self.trainer, optim)]
        flats += [(router.bias_name, router.bias) for router in routers(self.trainer) if router.bias is not None]
        flats += compression(self.trainer) if optim else []
        where = [(key, flat.data_ptr(), flat.numel(), flat.dtype, flat.device) for key, flat in flats]
        if where != self.views[0]:
            self.views = (where, list(pieces_of(self.trainer, optim)))
        return self.views[1]

    def _save(self, kind: str, directory: str, pieces: Iterable[Piece], meta: dict, keep: int | None) -> None:
        mesh, iteration = self.trainer.mesh, meta["iteration"]
        started = time.perf_counter()
        if not self.flags.async_save:
            folder = save_checkpoint(directory, iteration, pieces, meta, mesh, keep)
            self._saved(kind, iteration, folder, f"in {time.perf_counter() - started:.1f} s")
            return
        self._finish(kind)
        self.running[kind] = BackgroundSave(directory, iteration, pieces, meta, mesh, self.snapshots[kind], keep)
        self.say(f"iteration {iteration} is copied in {time.perf_counter() - started:.1f} s and being written to {directory}")

    def copy_due(self, progress: Progress, last: bool) -> bool:
        """Whether to copy this iteration to peers. At the end of a run there is a checkpoint instead."""
        every = self.flags.peer_checkpoint_interval if self.home.peers else 0
        ends = last or progress.iteration == self.trainer.config.train.train_iters
        return bool(every) and not ends and progress.iteration % every == 0

    def copy(self, progress: Progress) -> None:
        """Copy the state to peers. A copy that fails is said and leaves the one before it: checkpoints do not depend on it."""
        started = time.perf_counter()
        meta = meta_of(self.trainer, progress) | {"tracked": self.home.tracked, "being_saved": self.last_started}
        try:
            self.home.peers.save(progress.iteration, pieces_of(self.trainer, True), meta)
        except CheckpointError as error:
            self.say(f"WARNING: no copy of iteration {progress.iteration} in peers: {error}")
        else:
            self.say(f"iteration {progress.iteration} is copied to peers in {time.perf_counter() - started:.1f} s")

    def poll(self) -> None:
        """Between two steps: bring what is being written further, if all ranks can. Raises CheckpointError if it failed."""
        for kind, save in list(self.running.items()):
            self._advance(kind, save, wait=False)

    def drain(self) -> None:
        """Wait until everything is written. Raises CheckpointError if something could not be."""
        for kind in list(self.running):
            self._finish(kind)

    def finish(self, progress: Progress) -> None:
        """At the end of a run: drain, and give back what copies in peers took, once a checkpoint is as new."""
        self.drain()
        if self.home.peers and self.saved_iteration == progress.iteration:
            self.home.peers.remove()

    def _finish(self, kind: str) -> None:
        if kind in self.running:
            self._advance(kind, self.running[kind], wait=True)

    def _advance(self, kind: str, save: BackgroundSave, wait: bool) -> None:
        folder = save.poll(wait)
        if folder is not None:
            del self.running[kind]
            self._saved(kind, save.iteration, folder, "behind the training")

    def _saved(self, kind: str, iteration: int, folder: Path, how: str) -> None:
        if kind == "full":
            self.saved_iteration = self.home.tracked = iteration
        self.say(f"saved {folder} {how}")
