"""Checkpoints beside torch.distributed.checkpoint: the same state, the same processes, the same folder, turn by turn.

    python benchmarks/checkpoint.py                     1 GB on 4 ranks
    python benchmarks/checkpoint.py --megabytes 200 --rounds 5 --out results.json

State: weights and two moments in fp32, each tensor cut by rows over the ranks. A save ends when it is durable (both sync
their files). `host copy` is the copy of a rank's state into host memory that is there already: the least that a step can
wait for with --async-save. Peaks are of the resident memory beyond what the process holds with its state.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.checkpoint.background import BackgroundSave, Snapshot  # noqa: E402
from megatron_lite.checkpoint.boxes import Piece, Request  # noqa: E402
from megatron_lite.checkpoint.load import load_checkpoint, plan  # noqa: E402
from megatron_lite.checkpoint.manifest import Stored, Written, assemble, parse, to_text  # noqa: E402
from megatron_lite.checkpoint.save import save_checkpoint  # noqa: E402
from megatron_lite.comm import collectives as comm  # noqa: E402
from megatron_lite.comm.launch import WorkerPool, keep_heap  # noqa: E402
from megatron_lite.comm.mesh import Mesh, build_mesh  # noqa: E402
from megatron_lite.grid import Grid  # noqa: E402

COLUMNS = 2048
TENSORS = 24  # of each of the three kinds
SPACES = ("model", "optim/exp_avg", "optim/exp_avg_sq")


def state_of(rank: int, ranks: int, megabytes: int) -> dict[str, torch.Tensor]:
    """This rank's rows of every tensor, [rows/ranks, COLUMNS]."""
    rows = int(megabytes * 1e6 / (len(SPACES) * TENSORS * COLUMNS * 4 * ranks)) * ranks
    torch.manual_seed(rank)
    return {f"{space}/layer.{i}.weight": torch.randn(rows // ranks, COLUMNS) for space in SPACES for i in range(TENSORS)}


def pieces(state: dict[str, torch.Tensor], rank: int, ranks: int) -> list[Piece]:
    return [Piece(key, (len(x) * ranks, COLUMNS), (rank * len(x), 0), tuple(x.shape), x) for key, x in state.items()]


def columns(state: dict[str, torch.Tensor], rank: int, ranks: int) -> list[Request]:
    """The same tensors cut by columns, which are in no file in one piece."""
    rows, width = len(next(iter(state.values()))) * ranks, COLUMNS // ranks
    return [Request(key, (rows, COLUMNS), (0, rank * width), (rows, width), torch.zeros(rows, width)) for key in state]


class Clock:
    """Times a collective act: from a barrier to the moment when the last rank is done."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def seconds(self, act: Callable[[], object]) -> float:
        comm.barrier(self.mesh.world)
        started = time.perf_counter()
        act()
        mine = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        return float(comm.all_reduce(mine, self.mesh.world, op="max"))


def resident_peak(act: Callable[[], object]) -> float:
    """MB that the act needed at its peak beyond what was resident before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return float(line.split()[1]) / 1024


def work(rank: int, folder: str, ranks: int, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """All rounds on one rank: seconds of every act, by name."""
    keep_heap()
    mesh = build_mesh(Grid(tp=ranks), torch.device("cpu"))
    clock, state, place = Clock(mesh), state_of(rank, ranks, megabytes), Path(folder)
    parts = init_device_mesh("cpu", (ranks,))
    theirs = {key: DTensor.from_local(x, parts, [Shard(0)], run_check=False) for key, x in state.items()}
    own, snapshot, across = pieces(state, rank, ranks), Snapshot(), columns(state, rank, ranks)
    target = pieces({key: torch.zeros_like(x) for key, x in state.items()}, rank, ranks)
    into = {key: DTensor.from_local(p.tensor, parts, [Shard(0)], run_check=False) for key, p in zip(state, target, strict=True)}
    snapshot.take(own)
    host = [torch.empty_like(p.tensor).copy_(p.tensor) for p in own]
    seconds: dict[str, list[float]] = {}
    running: list[BackgroundSave] = []

    def note(name: str, act: Callable[[], object]) -> None:
        seconds.setdefault(name, []).append(clock.seconds(act))

    def clear() -> None:
        comm.barrier(mesh.world)
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        comm.barrier(mesh.world)

    for _ in range(rounds):
        clear()
        note("save", lambda: save_checkpoint(place / "ours", 1, own, {}, mesh))
        note("dcp save", lambda: dcp.save(theirs, checkpoint_id=place / "theirs"))
        note("load", lambda: load_checkpoint(place / "ours", target, mesh, 1))
        assert all(torch.equal(p.tensor, x) for p, x in zip(target, state.values(), strict=True))
        note("load unchecked", lambda: load_checkpoint(place / "ours", target, mesh, 1, verify=False))
        note("dcp load", lambda: dcp.load(into, checkpoint_id=place / "theirs"))
        note("load across", lambda: load_checkpoint(place / "ours", across, mesh, 1))
        note("host copy", lambda: [to.copy_(p.tensor) for to, p in zip(host, own, strict=True)])
        note("blocked", lambda: running.append(BackgroundSave(place / "ours", 2, own, {}, mesh, snapshot)))
        note("behind", lambda: running.pop().poll(wait=True))
    seconds["load peak MB"] = [resident_peak(lambda: load_checkpoint(place / "ours", target, mesh, 1))]
    seconds["state MB"] = [sum(x.numel() * 4 for x in state.values()) / 1e6]
    dist.barrier()
    return seconds


def planning(ranks: int = 128, tensors: int = 300) -> dict[str, float]:
    """Seconds to merge the manifests of so many ranks (no data), to read the text back, and to plan one rank's load."""
    rows = 64 * ranks
    blocks = [Written(f"{space}/layer.{i}.weight", (rows, COLUMNS), "float32",
                      Stored(f"shard_{r:05d}.safetensors", f"{space}/layer.{i}.weight{r}", (64 * r, 0), (64, COLUMNS), 0))
              for space in SPACES for i in range(tensors) for r in range(ranks)]  # fmt: skip
    files = {f"shard_{r:05d}.safetensors": 1 for r in range(ranks)}
    started = time.perf_counter()
    manifest = assemble(1, files, blocks, {})
    merged = time.perf_counter()
    text = to_text(manifest)
    written = time.perf_counter()
    read = parse(json.loads(text))
    parsed = time.perf_counter()
    narrow = torch.empty(1, 1).expand(rows, COLUMNS // ranks)
    wanted = [Request(key, (rows, COLUMNS), (0, 0), tuple(narrow.shape), narrow) for key in read.tensors]
    reads, problems = plan(read, wanted)
    assert not problems and len(reads) == len(blocks)
    return {"merge": merged - started, "write": written - merged, "read": parsed - written,
            "plan": time.perf_counter() - parsed, "blocks": len(blocks)}  # fmt: skip


def report(found: dict[str, list[float]], plans: dict[str, float], ranks: int) -> dict[str, float]:
    """Print the table; the ratios."""
    middle = {name: statistics.median(values) for name, values in found.items()}

    def paired(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(found[a], found[b], strict=True))

    total = middle["state MB"] * ranks
    print(f"{total:.0f} MB on {ranks} ranks, median of {len(found['save'])} rounds\n")
    for name in ("save", "dcp save", "load", "load unchecked", "dcp load", "load across", "host copy", "blocked", "behind"):
        print(f"{name:16} {middle[name]:8.3f} s {total / middle[name]:9.0f} MB/s")
    ratios = {
        "save, speed against dcp": paired("dcp save", "save"),
        "load, speed against dcp": paired("dcp load", "load"),
        "unchecked load, speed against dcp": paired("dcp load", "load unchecked"),
        "load at another layout, time against the same": paired("load across", "load"),
        "step blocked, time against a host copy": paired("blocked", "host copy"),
        "peak of a load beyond its targets, share of a rank's state": middle["load peak MB"] / middle["state MB"],
        f"merge and plan {plans['blocks']:.0f} blocks of 128 ranks, s": plans["merge"] + plans["plan"],
        "write and read that manifest, s": plans["write"] + plans["read"],
    }
    print()
    for name, value in ratios.items():
        print(f"{name:62} {value:6.2f}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description="Checkpoints beside torch.distributed.checkpoint.", allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=1000, help="weights and moments of all ranks together")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--out", help="JSON file")
    arguments = parser.parse_args()
    sizes = arguments.ranks, arguments.megabytes, arguments.rounds
    plans = planning()
    pool = WorkerPool(arguments.ranks)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = pool.run(work, arguments.ranks, f"{folder}/benchmark", *sizes, timeout=1800)[0]
    finally:
        pool.shutdown()
    ratios = report(found, plans, arguments.ranks)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps({"seconds": found, "plan": plans, "ratios": ratios}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
