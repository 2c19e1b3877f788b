"""Saving: every rank writes the blocks it owns, then all agree, then one rank gives the checkpoint its name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from megatron_lite.checkpoint.agree import CheckpointError, agree
from megatron_lite.checkpoint.boxes import Piece
from megatron_lite.checkpoint.folder import TEMPORARY, clean, discard, iteration_name, locked, publish, retire
from megatron_lite.checkpoint.manifest import Manifest, Written, assemble
from megatron_lite.checkpoint.shard_file import write_shard
from megatron_lite.comm.mesh import Mesh


def save_checkpoint(
    directory: str | os.PathLike, iteration: int, pieces: Iterable[Piece], meta: dict, mesh: Mesh, keep: int | None = None
) -> Path:
    """Write iteration `iteration` and make it the latest; the folder. Collective over all ranks.

    pieces  the blocks this rank owns: over all ranks each element of each tensor once. Iterating must do no collective
    meta    JSON; rank 0's is stored
    keep    checkpoints that stay, this one counted; older ones are removed once it is safe (None: all stay)

    Returns after everything is durable and the tracker names it. If anything fails on any rank (disk full, a block
    missing or given twice), every rank raises one CheckpointError naming rank and cause, the half-written folder is
    removed, and the previous checkpoint stays the latest. An iteration that exists is replaced only by a complete one.
    """
    directory = Path(directory)
    staging = directory / (TEMPORARY + iteration_name(iteration))
    doing = f"saving iteration {iteration} to {directory}"
    first = mesh.world.rank == 0
    with ExitStack() as stack:
        agree(lambda: prepare(directory, staging, stack) if first else None, mesh.world, doing)
        try:
            reports = agree(lambda: write_own(staging, mesh.world.rank, pieces), mesh.world, doing)
            work = (lambda: name_it(directory, staging, merge(iteration, reports, meta), keep)) if first else (lambda: None)
            return agree(work, mesh.world, doing)[0]
        except CheckpointError:
            # All ranks have spoken, so nobody writes there any more.
            if first:
                discard(staging)
            raise


def prepare(directory: Path, staging: Path, stack: ExitStack) -> None:
    """Rank 0, before anybody writes: take the lock, clear leftovers, make the folder."""
    stack.enter_context(locked(directory))
    clean(directory)
    staging.mkdir()


def write_own(staging: Path, rank: int, pieces: Iterable[Piece]) -> tuple[dict[str, int], list[Written]]:
    """This rank's file; ({file: bytes}, blocks in it)."""
    staging.mkdir(parents=True, exist_ok=True)  # asks the file server again where another host made the folder just now
    path = staging / f"shard_{rank:05d}.safetensors"
    written = write_shard(path, list(pieces))
    return ({path.name: path.stat().st_size} if written else {}), written


def merge(iteration: int, reports: list[tuple[dict[str, int], list[Written]]], meta: dict) -> Manifest:
    """The manifest of all ranks' reports."""
    files = {name: size for own, _ in reports for name, size in own.items()}
    return assemble(iteration, files, (block for _, written in reports for block in written), meta)


def name_it(directory: Path, staging: Path, manifest: Manifest, keep: int | None) -> Path:
    """Make the written files the latest checkpoint, then let go of those that are not kept."""
    final = publish(directory, staging, manifest)
    if keep is not None:
        retire(directory, keep, manifest.iteration)
    return final
