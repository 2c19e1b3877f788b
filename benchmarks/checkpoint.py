"""Checkpoints of a real run beside torch.distributed.checkpoint (DCP): the same state, processes and folder, turn by turn.

    python benchmarks/checkpoint.py --out benchmarks/results/checkpoint.json        1 GB of weights and moments on 4 ranks
    python benchmarks/checkpoint.py --mb 8 --rounds 1                               seconds: does it work

A run of 4 gloo ranks at tp2·pp2 saves and loads through the functions that pretrain_gpt.py calls; DCP gets the same blocks as
DTensors with memory of their own. Both sync every file before a save ends (ours its folder, manifest and tracker as well).
Ours compares checksums when it loads, DCP has none. Where each act of a round is timed from a barrier to the last rank's end,
ratios are taken inside a round, and the table has their median.

    bare write   as many bytes out of one buffer a rank, write and fsync: what the file system gives
    bare read    and back from its cache into that buffer
    host copy    this rank's state into host memory that is there already: what a step must wait for with --async-save
    blocked      what it waits for: Saver.save
    cores taken  CPU time of the threads besides the training's, in cores, beyond what they take without a save. Where the
                 steps keep all cores busy they lose at least their share: 100 / (number of cores) % for each core taken
    peak         resident memory at its highest beyond what the process held before the model was built
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import operator
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, placement_types

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.arguments import parse  # noqa: E402
from megatron_lite.checkpoint.boxes import Request  # noqa: E402
from megatron_lite.checkpoint.load import plan  # noqa: E402
from megatron_lite.checkpoint.manifest import Stored, Written, assemble, read_manifest, to_text  # noqa: E402
from megatron_lite.checkpoint.manifest import parse as parse_manifest  # noqa: E402
from megatron_lite.comm import collectives as comm  # noqa: E402
from megatron_lite.comm.launch import keep_heap, run  # noqa: E402
from megatron_lite.comm.mesh import Axis, build_mesh  # noqa: E402
from megatron_lite.data.loader import Batch  # noqa: E402
from megatron_lite.training.saving import Saver  # noqa: E402
from megatron_lite.training.setup import Trainer, build_trainer, grid_of, num_microbatches  # noqa: E402
from megatron_lite.training.state import Progress, pieces_of, restore, save, tensors  # noqa: E402
from megatron_lite.training.step import train_step  # noqa: E402

RANKS, LAYERS, VOCAB, LENGTH = 4, 8, 1536, 128
OWN = "tp2·pp2"
LAYOUTS = {OWN: "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "dp4 zero-1": "--zero-stage 1",
           "tp1·pp4": "--pipeline-model-parallel-size 4"}  # fmt: skip
SPACES = ("model", "optim/exp_avg", "optim/exp_avg_sq")
QUIET_STEPS, MOST_STEPS = 4, 40  # timed without a save; and at most with one
CONVERT = ("import sys; from tools.convert_checkpoint import main; main(sys.argv[1:]); "
           "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])")  # fmt: skip


def hidden_size(megabytes: int) -> int:
    """Of the model whose weights and two moments in fp32 are about so many MB: 8 layers of 13 h², 2 vocabularies of h."""
    def size(h: int) -> int:
        return 12 * (LAYERS * 13 * h * h + 2 * VOCAB * h)

    return min(range(64, 4096, 64), key=lambda h: abs(size(h) - megabytes * 1e6))


def trainer_at(layout: str, hidden: int, folder: Path) -> Trainer:
    """This rank's part of the model at a layout; saves to and loads from `folder`."""
    flags = (f"{LAYOUTS[layout]} --num-layers {LAYERS} --hidden-size {hidden} --ffn-hidden-size {3 * hidden} --swiglu "
             f"--num-attention-heads {hidden // 32} --seq-length {LENGTH} --vocab-size {VOCAB} --normalization RMSNorm "
             "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --mock-data "
             "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --train-iters 99 "
             f"--async-save --save {folder} --load {folder}")  # fmt: skip
    config, problems = parse(flags.split(), RANKS)
    assert not problems, problems
    return build_trainer(config, build_mesh(grid_of(config, RANKS), torch.device("cpu")))


def sharded(trainer: Trainer) -> dict[str, DTensor]:
    """The state as DCP's users hold it: one tensor of its own per weight and moment, cut over tp; other stages hold others."""
    parallel = trainer.config.parallel
    tp = init_device_mesh("cpu", (parallel.pp, parallel.tp), mesh_dim_names=("pp", "tp"))["tp"]
    state = {}
    for _, (prefix, shard, shape, _, flat) in tensors(trainer, optim=True):
        for name in dict.fromkeys(box.name for box in shard.boxes):
            boxes = sorted((box for box in shard.boxes if box.name == name), key=lambda box: box.offset)
            # Heads of a fused projection lie apart in the parameter: as a tensor of their own they lie together.
            own = torch.cat([box.of_local(flat.view(shape)) for box in boxes])
            cut = [d for d, n in enumerate(own.shape) if n != boxes[0].full_shape[d]]
            place = placement_types.Shard(cut[0]) if cut else placement_types.Replicate()
            state[f"{prefix}/{name}"] = DTensor.from_local(own, tp, [place], run_check=False)
            assert state[f"{prefix}/{name}"].shape == boxes[0].full_shape
    return state


def wipe(trainer: Trainer) -> None:
    """Forget weights and moments."""
    for state in trainer.optimizer.states:
        for tensor in (state.master, *state.moments.values()):
            tensor.zero_()


def digest(trainer: Trainer) -> torch.Tensor:
    """Sums over the whole state, each element once, alike at every layout up to rounding."""
    sums = torch.zeros(2, dtype=torch.float64)
    for piece in pieces_of(trainer, optim=True):
        sums += torch.stack([piece.tensor.sum(dtype=torch.float64), piece.tensor.abs().sum(dtype=torch.float64)])
    return comm.all_reduce(sums, trainer.mesh.world)


def seconds(act: Callable[[], object], world: Axis) -> float:
    """Of a collective act: from a barrier to the moment when the last rank is done."""
    comm.barrier(world)
    started = time.perf_counter()
    act()
    mine = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    return float(comm.all_reduce(mine, world, op="max"))


def status(name: str) -> float:
    """MB that the kernel says of this process: VmRSS, or VmHWM, its highest."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return float(line.split()[1]) * 1024 / 1e6


class Bench:
    """One rank's measurements, by name, one value per round."""

    def __init__(self, folder: Path, hidden: int):
        self.folder, self.found = folder, {}
        self.trainers = {name: trainer_at(name, hidden, folder / "ours") for name in LAYOUTS}
        self.own = self.trainers[OWN]
        self.world = self.own.mesh.world
        self.unchecked = dataclasses.replace(self.own, config=dataclasses.replace(
            self.own.config, checkpoint=dataclasses.replace(self.own.config.checkpoint, no_verify_checkpoint=True)))  # fmt: skip
        ids = torch.randint(VOCAB, (1, LENGTH))
        self.batches = [Batch(ids, ids, torch.ones(1, LENGTH))] * num_microbatches(self.own.config, 1)
        self.saver, self.steps = Saver(self.own, Progress(), lambda line: None), 0
        self.step()
        self.theirs = sharded(self.own)
        held = sum(x.to_local().nbytes for x in self.theirs.values() if x.placements[0].is_shard() or self.own.mesh.tp.rank == 0)
        own = sum(piece.tensor.nbytes for piece in pieces_of(self.own, optim=True))
        both = comm.all_reduce(torch.tensor([held, own], dtype=torch.float64), self.world)
        assert both[0] == both[1], "they do not write the same bytes"
        self.into = {key: torch.zeros_like(tensor) for key, tensor in self.theirs.items()}
        self.plain = torch.zeros(int(own), dtype=torch.uint8)
        self.host = [torch.zeros_like(piece.tensor) for piece in pieces_of(self.own, optim=True)]

    def note(self, name: str, act: Callable[[], object]) -> None:
        self.found.setdefault(name, []).append(seconds(act, self.world))

    def step(self) -> None:
        train_step(self.own, self.batches, self.steps, 4 * self.steps)
        self.saver.poll()
        self.steps += 1

    def clear(self) -> None:
        """Nothing of the last round is there, or on its way to the disk."""
        comm.barrier(self.world)
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            os.sync()
        comm.barrier(self.world)

    def compare(self, number: int) -> None:
        """Save and load, ours and DCP's, who is first by turns; and ours at other layouts."""
        place, before = self.folder / "theirs", digest(self.own)
        acts = [("save", lambda: save(self.own, Progress(10))), ("bare write", self.bare_write),
                ("dcp save", lambda: dcp.save(self.theirs, checkpoint_id=place))]  # fmt: skip
        loads = [("load", lambda: restore(self.own)), ("bare read", self.bare_read),
                 ("dcp load", lambda: dcp.load(self.into, checkpoint_id=place))]  # fmt: skip
        for name, act in acts if number % 2 else acts[::-1]:
            self.clear()  # a disk of burst speed, or one that grows as it is written, favours who comes first
            self.note(name, act)
        for _, act in acts[:2] if number % 2 else acts[1:]:  # what was cleared away
            seconds(act, self.world)
        wipe(self.own)
        for name, act in loads if number % 2 else loads[::-1]:
            self.note(name, act)
        assert torch.equal(digest(self.own), before), "what was loaded is not what was saved"
        assert all(torch.equal(x.to_local(), self.theirs[key].to_local()) for key, x in self.into.items())
        for name, trainer in self.trainers.items():
            if trainer is not self.own:
                wipe(trainer)
                self.note(f"load {name}", lambda trainer=trainer: restore(trainer))
                assert torch.allclose(digest(trainer), before, rtol=1e-9), f"what was loaded at {name} is not what was saved"
        self.note("load unchecked", lambda: restore(self.unchecked))

    def bare_write(self) -> None:
        with open(self.folder / f"bare_{self.world.rank}", "wb", buffering=0) as file:
            for block in self.plain.split(8 << 20):
                file.write(block.numpy())
            os.fsync(file.fileno())

    def bare_read(self) -> None:
        with open(self.folder / f"bare_{self.world.rank}", "rb", buffering=0) as file:
            for block in self.plain.split(1 << 20):
                file.readinto(block.numpy())

    def behind(self) -> None:
        """A save behind the training: what the step waits for, and how the steps go meanwhile."""
        self.clear()
        quiet, cpu, started = [], self.others_cpu(), time.perf_counter()
        for _ in range(QUIET_STEPS):
            quiet.append(seconds(self.step, self.world))
        usual = (self.others_cpu() - cpu) / (time.perf_counter() - started)
        pieces = list(pieces_of(self.own, optim=True))
        self.note("host copy", lambda: [to.copy_(piece.tensor) for to, piece in zip(self.host, pieces, strict=True)])
        self.note("blocked", lambda: self.saver.save(Progress(20), full=True, weights=False))
        during, cpu, started = [], self.others_cpu(), time.perf_counter()
        while self.saver.running and len(during) < MOST_STEPS:
            during.append(seconds(self.step, self.world))
        wall, taken = time.perf_counter() - started, self.others_cpu() - cpu
        self.note("drain", self.saver.drain)
        for name, value in (("step", statistics.mean(quiet)), ("step while writing", statistics.mean(during)),
                            ("cores taken", taken / wall - usual), ("behind", wall), ("steps behind", len(during))):  # fmt: skip
            self.found.setdefault(name, []).append(value)

    def others_cpu(self) -> float:
        """CPU seconds that all ranks' threads besides those that train have used."""
        mine = torch.tensor([time.process_time() - time.thread_time()], dtype=torch.float64)
        return float(comm.all_reduce(mine, self.world))


def measure(rank: int, folder: str, hidden: int, rounds: int, heap: bool = True) -> dict[str, list[float]]:
    """All rounds on one rank. What is left in the folder is a checkpoint of iteration 10 in `ours`. `heap`: as runs have it."""
    if heap:
        keep_heap()
    bench = Bench(Path(folder), hidden)
    bench.clear()
    bench.saver.save(Progress(1), full=True, weights=False)  # makes the snapshot's memory
    bench.saver.drain()
    for number in range(rounds):
        bench.compare(number)
        bench.behind()
    bench.clear()
    save(bench.own, Progress(10))
    bench.found["MB"] = [sum(piece.tensor.nbytes for piece in pieces_of(bench.own, optim=True)) / 1e6]
    return bench.found


def peak(rank: int, layout: str, folder: str, hidden: int, load: bool) -> float:
    """MB that starting needs at its peak, afresh or from the checkpoint."""
    keep_heap()
    before = status("VmRSS")
    trainer = trainer_at(layout, hidden, Path(folder))
    if load:
        restore(trainer)
    return status("VmHWM") - before


def converter_peak(command: str, load: Path, to: Path) -> float:
    """MB that tools/convert_checkpoint.py holds at its peak, all told."""
    call = [sys.executable, "-c", CONVERT, command, "--load", str(load), "--save", str(to), "--no-check"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1]) * 1024 / 1e6


def memory(folder: Path, hidden: int) -> dict[str, float]:
    """Peaks in MB: of a start, fresh and from the checkpoint in `folder`, at two layouts; of converters, and their limit."""
    found = {}
    for layout in (OWN, "tp1·pp4"):
        fresh, loaded = (max(run(peak, RANKS, layout, str(folder), hidden, load, timeout=600)) for load in (False, True))
        found |= {f"fresh start {layout}": fresh, f"load {layout}": loaded}
    entries = read_manifest(folder / "iter_0000010").tensors.values()
    found["converter's limit"] = 300 + 2 * max(sum(map(entry.bytes_of, entry.boxes)) for entry in entries) / 1e6
    found["native-to-hf"] = converter_peak("native-to-hf", folder, folder / "hf")
    found["hf-to-native"] = converter_peak("hf-to-native", folder / "hf", folder / "native")
    return found


def planning(ranks: int = 128, count: int = 300, columns: int = 4096) -> dict[str, float]:
    """Seconds to merge what so many ranks report (no data), to write and read that as JSON, and to plan one rank's load.

    Every rank has written rows of every tensor, and the load wants other columns of each, which are in every file."""
    rows = 64 * ranks
    reports = [[Written(f"{space}/layers.{i}.weight", (rows, columns), "float32",
                        Stored(f"shard_{r:05d}.safetensors", f"{space}/layers.{i}.weight{r}", (64 * r, 0), (64, columns), 0))
                for space in SPACES for i in range(count)] for r in range(ranks)]  # fmt: skip
    files = {f"shard_{r:05d}.safetensors": 1 for r in range(ranks)}
    started = time.perf_counter()
    manifest = assemble(1, files, (block for report in reports for block in report), {})
    merged = time.perf_counter()
    read = parse_manifest(json.loads(to_text(manifest)))
    told = time.perf_counter()
    narrow = torch.empty(1, 1).expand(rows, columns // ranks)
    wanted = [Request(key, (rows, columns), (0, 0), tuple(narrow.shape), narrow) for key in read.tensors]
    asked = time.perf_counter()
    reads, problems = plan(read, wanted)
    planned = time.perf_counter()
    assert not problems and len(reads) == ranks * 3 * count
    return {"blocks": len(reads), "merge": merged - started, "write and read": told - merged, "plan": planned - asked}


def rows_of(found: dict[str, list[float]], peaks: dict[str, float], plans: dict[str, float]) -> list[dict]:
    """The table: what, measured, the bound that it is to keep, and whether it does."""

    def paired(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(found[a], found[b], strict=True))

    slower = 100 * (paired("step while writing", "step") - 1)
    cores = statistics.median(found["cores taken"])
    rows: list[tuple[str, float, str, float]] = [
            ("save: times DCP's speed, both synced", paired("dcp save", "save"), ">=", 1.2),
            ("load, same layout: times DCP's speed", paired("dcp load", "load"), ">=", 1.2),
            *((f"load at {name}: times the same layout's", paired(f"load {name}", "load"), "<=", 1.3)
              for name in LAYOUTS if name != OWN),
            ("step after --async-save waits: times a host copy", paired("blocked", "host copy"), "<=", 1.2),
            ("steps while writing: % slower", slower, "<", 10.0 * max(1, math.ceil(cores))),
            (f"the same for each core taken ({cores:.2f} of {os.cpu_count()})", slower / cores, "<", 10.0),
            *((f"peak of a load at {name}: times a fresh start's", peaks[f"load {name}"] / peaks[f"fresh start {name}"],
               "<=", 1.5) for name in (OWN, "tp1·pp4")),
            *((f"peak of {name}, MB (2 x largest tensor + 300)", peaks[name], "<=", peaks["converter's limit"])
              for name in ("native-to-hf", "hf-to-native")),
            (f"merge and plan, s: {plans['blocks']:.0f} blocks of 128 ranks", plans["merge"] + plans["plan"], "<", 1.0)]
    kept = {">=": operator.ge, "<=": operator.le, "<": operator.lt}
    return [{"what": what, "measured": value, "bound": bound, "required": limit, "ok": kept[bound](value, limit)}
            for what, value, bound, limit in rows]  # fmt: skip


def show(found: dict[str, list[float]], rows: list[dict]) -> None:
    """Print seconds, then the table."""
    total = found["MB"][0]
    rounds = len(found["save"])
    print(f"{total:.0f} MB of weights and moments on {RANKS} ranks, median of {rounds} rounds; both sides sync their files")
    for name in ("bare write", "save", "dcp save", "bare read", "load", "load unchecked", "dcp load",
                 *(f"load {n}" for n in LAYOUTS if n != OWN), "host copy", "blocked", "behind", "step",
                 "step while writing"):  # fmt: skip
        value = statistics.median(found[name])
        rate = "" if "step" in name else f"{total / value:8.0f} MB/s"
        print(f"  {name:<20}{value:8.3f} s {rate}   {' '.join(f'{x:.3f}' for x in found[name])}")
    print(f"\n{'':<58}{'measured':>10}{'required':>12}  ok")
    for row in rows:
        required, ok = f"{row['bound']} {row['required']:.1f}", "yes" if row["ok"] else "NO"
        print(f"{row['what']:<58}{row['measured']:>10.2f}{required:>12}  {ok}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="weights and moments of all ranks together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    args = parser.parse_args(argv)
    hidden = hidden_size(args.mb)
    plans = planning()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
        found = run(measure, RANKS, f"{folder}/state", hidden, args.rounds, timeout=1800)
        total = sum(rank["MB"][0] for rank in found)
        found = found[0] | {"MB": [total]}
        peaks = memory(Path(folder, "state", "ours"), hidden)
    rows = rows_of(found, peaks, plans)
    show(found, rows)
    if args.out:
        about = {"torch": torch.__version__, "ranks": RANKS, "hidden_size": hidden, "layouts": LAYOUTS, "synced": "both sides"}
        body = about | {"rows": rows, "rounds": found, "peak_mb": peaks, "planning_s": plans}
        args.out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
