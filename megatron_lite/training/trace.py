"""What the ranks really did: the bubble of the log line, and the files of --trace-dir that tools/trace.py draws.

The bubble is the simulator's sync bubble (schedules/simulate.py), measured: of the time T that the slowest rank needs for
its action list, the part in which a rank does nothing, averaged over ranks. A rank that worked `total - wait` seconds

    idle = T - (total - wait)          waits for messages, and at the end for the slowest rank

A trace is one JSON file per rank and iteration, `DIR/iter_0000002/rank_00000.json`:

    rank tp cp dp pp world iteration   who and when
    schedule placement                 name; [kind, pipeline ranks, chunks per rank]
    start end                          of the rank's action list
    actions  [["F0", start, end]]      in the order run; from when its input was there until its result was on the way
    waits    [["F0", start, end]]      for that input ("": for messages to leave)
    phases   [["reduce", start, end]]  after the list: reduce, norm, optimizer

Times are seconds since the trace was set up, on one clock for all ranks of a host; hosts are aligned by a barrier.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh
from megatron_lite.errors import ReportedError
from megatron_lite.pipeline.executor import Result
from megatron_lite.training.setup import Trainer

FORMAT = 1


class TraceError(ReportedError):
    """A trace cannot be written or read."""


def bubble_share(seconds: Sequence[tuple[float, float]], mesh: Mesh) -> float:
    """Mean share of idle time over steps and ranks, in [0, 1). `seconds`: (total, wait) of this rank's list per step.

    Collective; the same on every rank.
    """
    total, wait = torch.tensor(seconds, dtype=torch.float64, device=mesh.device).unbind(1)
    slowest = comm.all_reduce(total.clone(), mesh.pp, op="max")
    idle = (slowest - total + wait).sum()
    idle, whole = comm.all_reduce(torch.stack([idle, slowest.sum()]), mesh.world).tolist()
    return idle / whole if whole else 0.0


class Tracer:
    """Writes the iterations from --trace-start on, --trace-steps of them. Making one is collective over the world."""

    def __init__(self, trainer: Trainer, iteration: int):
        """`iteration`: done before this run. The default leaves the run's first out, in which memory is found."""
        logging, self.mesh, self.recorder = trainer.config.logging, trainer.mesh, trainer.recorder
        self.pipeline = trainer.settled.pipeline
        self.folder = Path(logging.trace_dir)
        first = logging.trace_start or iteration + 2
        self.iterations = range(first, first + logging.trace_steps)
        self.iteration: int | None = None
        self._make(self.folder)
        self.zero = _common_zero(self.mesh)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"--trace-dir {self.folder}: {error.strerror}") from error

    def begin(self, iteration: int) -> None:
        """`iteration` counts from 1, as on the log line."""
        self.iteration = iteration if iteration in self.iterations else None
        if self.iteration is not None:
            self.recorder.begin()

    def end(self, result: Result) -> None:
        if self.iteration is None:
            return
        self.recorder.end()
        folder = self.folder / f"iter_{self.iteration:07d}"
        self._make(folder)
        text = json.dumps(self._facts() | self._times(result)) + "\n"
        try:
            (folder / f"rank_{self.mesh.rank:05d}.json").write_text(text, encoding="ascii")
        except OSError as error:
            raise TraceError(f"--trace-dir {self.folder}: {error.strerror}") from error

    def _facts(self) -> dict:
        mesh, placement = self.mesh, self.pipeline.placement
        axes = {name: getattr(mesh, name).rank for name in ("tp", "cp", "dp", "pp")}
        return {"format": FORMAT, "rank": mesh.rank, "world": mesh.world.size, **axes, "iteration": self.iteration,
                "schedule": self.pipeline.schedule, "placement": list(placement)}  # fmt: skip

    def _times(self, result: Result) -> dict:
        def when(stamp: object) -> float:
            return round(self.recorder.clock.when(stamp) - self.zero, 7)

        waits = [(str(action or ""), when(start), when(end)) for action, start, end in result.waits]
        fed = {name: end for name, _, end in waits}
        return {
            "start": when(result.started),
            "end": when(result.ended),
            "actions": [(str(a), fed.get(str(a), when(start)), when(end)) for a, start, end in self.recorder.actions],
            "waits": waits,
            "phases": [(name, when(start), when(end)) for name, start, end in self.recorder.phases],
        }


def _common_zero(mesh: Mesh) -> float:
    """The moment of one barrier on this host's clock: the same number on all ranks of the host."""
    comm.barrier(mesh.world)
    here = (socket.gethostname(), time.perf_counter())
    return min(moment for host, moment in comm.gather_objects(here, mesh.world) if host == here[0])
