"""Where a run gets its pipeline from: its flags, or with `auto` the checkpoint it goes on from, or a measurement.

    flags say all            planner/pipeline.py
    auto, resuming           what the run chose when it started, if the settings that matter are the same: the same bits
    auto                     measure (training/measure.py), choose on one rank (planner/automatic.py), tell all
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_lite.checkpoint.agree import DamagedCheckpoint, agree
from megatron_lite.checkpoint.folder import decide, iteration_folder
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.comm.collectives import gather_objects
from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.planner.automatic import PartCosts, choose_pipeline, decisive, describe, from_record, to_record
from megatron_lite.planner.pipeline import Pipeline, is_automatic, pipeline_of


@dataclass(frozen=True)
class Settled:
    """A run's pipeline; where it was chosen, its record for checkpoints, and what to tell people."""

    pipeline: Pipeline
    record: dict | None = None
    notes: tuple[str, ...] = ()


def settle_pipeline(config: Config, mesh: Mesh, num_microbatches: int, measure: Callable[[], PartCosts]) -> Settled:
    """The pipeline of this run, the same on every rank. Collective over the world where it is automatic."""
    if not is_automatic(config.parallel):
        return Settled(pipeline_of(config))
    settings = decisive(config, num_microbatches)
    record = stored_record(config, mesh)
    kept = from_record(record, settings)
    if kept is not None:
        return Settled(kept, record, (f"pipeline kept from the checkpoint: {describe(kept)}",))
    started = time.perf_counter()
    costs = measure()
    chosen = choose_pipeline(config, num_microbatches, costs) if mesh.world.rank == 0 else None
    chosen = gather_objects(chosen, mesh.world)[0]
    notes = [chosen.report, f"  measured and chosen in {time.perf_counter() - started:.1f} s"]
    if record is not None:
        notes.insert(0, "pipeline chosen anew: the checkpoint's was chosen for other settings")
    return Settled(chosen.pipeline, to_record(chosen.pipeline, settings), tuple(notes))


def stored_record(config: Config, mesh: Mesh) -> dict | None:
    """The record in the checkpoint that this run goes on from, on every rank; None where there is none. Collective."""
    if config.checkpoint.finetune:
        return None  # a run of its own
    choice = decide(config.checkpoint.load, config.checkpoint.save, mesh, config.checkpoint.load_iteration)
    if choice.iteration is None:
        return None

    def read() -> dict | None:
        try:
            return read_manifest(iteration_folder(choice.directory, choice.iteration)).meta.get("pipeline")
        except DamagedCheckpoint:
            return None  # `restore` says so, and goes on from an older one

    return agree(read if mesh.world.rank == 0 else lambda: None, mesh.world, "reading the checkpoint's pipeline")[0]
