#!/usr/bin/env python3
"""How fast the wires are: every collective and pipeline message over every mesh axis, by size.

    torchrun --nproc-per-node 8 tools/bench_collectives.py --tp 4 --save cluster.json --plot wires.svg

    algorithm bandwidth    size / time                      size: of the whole buffer (what is reduced, what a gather gives)
    bus bandwidth          algorithm bandwidth x share      share: all_reduce 2 (n-1)/n; all_gather, reduce_scatter,
                           all_to_all (n-1)/n; broadcast, send 1: of the buffer, what leaves a rank at least
    latency, bandwidth     of time = latency + size x share / bandwidth, fitted to all sizes with equal relative weight

Times are medians of the slowest rank; all groups of an axis talk at once, as in a run. `ring` is an all-reduce made of plain
messages (tools/ring.py), beside the run's own. --save writes what `--cluster` reads (docs/planning.md), the measured
memory and matrix speed included. Without torchrun there is one rank and nothing to measure.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any folder
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.launch import init_from_env, keep_heap, set_threads, shutdown
from megatron_lite.comm.mesh import Axis, Mesh, build_mesh
from megatron_lite.comm.p2p import KINDS, P2P
from megatron_lite.grid import Grid
from megatron_lite.planner.cluster import GB, GIB, MICRO
from megatron_lite.planner.traffic import wire_share
from megatron_lite.training.peak import matmul_peak_tflops
from tools.ring import between_neighbours, ring_all_reduce

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OPS = ("all_reduce", "ring", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
AXES = ("tp", "dp", "pp", "world")
FEWEST, MOST = 3, 200  # repeats


class Row(NamedTuple):
    """One measurement."""

    axis: str
    where: str  # within_node or between_nodes
    ranks: int
    op: str
    size: int  # bytes of the whole buffer
    seconds: float

    @property
    def sent(self) -> float:
        """Bytes that leave a rank."""
        return self.size * wire_share("all_reduce" if self.op == "ring" else self.op, self.ranks)

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return self.sent / self.seconds


def size_in_bytes(text: str) -> int:
    """`64K` -> 65536."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    if not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 1K, 64M or 1G")
    return int(number) * unit


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--tp", type=int, default=1, help="ranks of the tp axis (default 1)")
    add("--pp", type=int, default=1, help="ranks of the pp axis (default 1); dp is what is left")
    add("--ops", nargs="+", choices=OPS, default=OPS, help="default: all")
    add("--min-size", type=size_in_bytes, default="1K", metavar="SIZE", help="smallest buffer (default 1K)")
    add("--max-size", type=size_in_bytes, default="1G", metavar="SIZE", help="largest buffer (default 1G)")
    add("--factor", type=int, default=4, help="from one size to the next (default 4)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16", help="default bfloat16")
    add("--seconds", type=float, default=0.5, help="aimed-at time of one measurement (default 0.5)")
    add("--distributed-backend", choices=["nccl", "gloo"], help="default: nccl with CUDA, gloo without")
    add("--save", type=Path, metavar="FILE", help="a cluster for --cluster (JSON)")
    add("--json", type=Path, metavar="FILE", help="the table")
    add("--plot", type=Path, metavar="FILE", help="bus bandwidth over size (.png, .svg)")
    return parser


def problems(args: argparse.Namespace, world: int) -> list[str]:
    """Everything wrong with the flags."""
    found = [f"--{name} {getattr(args, name)}: at least 1 would work" for name in ("tp", "pp") if getattr(args, name) < 1]
    if not found and world % (args.tp * args.pp):
        found.append(f"--tp {args.tp} --pp {args.pp}: {world} ranks are no multiple of their product {args.tp * args.pp}")
    if args.max_size < args.min_size:
        found.append(f"--max-size {args.max_size}: below --min-size {args.min_size}")
    if args.factor < 2:
        found.append(f"--factor {args.factor}: at least 2 would work")
    if args.save and "send" not in args.ops:
        found.append("--save: needs send among --ops: a cluster's wires are what its messages found")
    if world == 1:
        found.append("one rank has nobody to talk to: start it with torchrun --nproc-per-node 2, or more")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def calls(axis: Axis, links: P2P, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """op -> a call with a buffer of `size` bytes. Sums of zeros stay finite, however often."""
    whole = torch.zeros(max(size // dtype.itemsize // axis.size, 1) * axis.size, dtype=dtype, device=device)
    part = torch.zeros(whole.numel() // axis.size, dtype=dtype, device=device)
    exchange = between_neighbours(axis.rank, axis.size, axis.group)
    return {
        "all_reduce": lambda: comm.all_reduce(whole, axis),
        "ring": lambda: ring_all_reduce(whole, axis.rank, axis.size, exchange),
        "all_gather": lambda: comm.all_gather_into(whole, part, axis),
        "reduce_scatter": lambda: comm.reduce_scatter_into(part, whole, axis),
        "all_to_all": lambda: comm.all_to_all(whole, axis),
        "broadcast": lambda: comm.broadcast(whole, axis),
        "send": lambda: message_round(links, whole),
    }


def message_round(links: P2P, tensor: torch.Tensor) -> None:
    """To the next rank, while one comes from the previous."""
    rank, size = links.axis.rank, links.axis.size
    awaited = links.irecv(tensor.shape, tensor.dtype, (rank - 1) % size, KINDS[0], 0, 0)
    links.send(tensor, (rank + 1) % size, KINDS[0], 0, 0)
    awaited.wait()
    links.flush()


def seconds_of(call: Callable[[], object], mesh: Mesh, budget: float) -> float:
    """Median time of a call, of the slowest rank. Collective over the world."""
    times: list[float] = []
    repeats = 3
    while len(times) < repeats:
        comm.barrier(mesh.world)
        began = _now(mesh.device)
        call()
        times.append(_now(mesh.device) - began)
        if len(times) == 3 and repeats == 3:  # connected and allocated by now
            longest = float(comm.all_reduce(torch.tensor(times[-1], device=mesh.device), mesh.world, op="max"))
            repeats = 3 + min(max(int(budget / max(longest, 1e-6)), FEWEST), MOST)
    middle = torch.tensor(median(times[3:]), dtype=torch.float64, device=mesh.device)
    return float(comm.all_reduce(middle, mesh.world, op="max"))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def axes_of(mesh: Mesh) -> dict[str, Axis]:
    """Axes with someone to talk to; of those with the same ranks the first."""
    found: dict[str, Axis] = {}
    for name in AXES:
        axis = getattr(mesh, name)
        if axis.size > 1 and axis.ranks not in [other.ranks for other in found.values()]:
            found[name] = axis
    return found


def measure(mesh: Mesh, args: argparse.Namespace, tell: Callable[[str], None]) -> list[Row]:
    """All rows, the same on every rank. Collective over the world."""
    hosts, rows = comm.gather_objects(socket.gethostname(), mesh.world), []
    dtype = getattr(torch, args.dtype)
    for name, axis in axes_of(mesh).items():
        alone = [len({hosts[rank] for rank in ranks}) == 1 for ranks in comm.gather_objects(axis.ranks, mesh.world)]
        where, links, size = "within_node" if all(alone) else "between_nodes", P2P(axis, mesh.device), args.min_size
        tell(f"\n{name}: {axis.size} ranks, {where.replace('_', ' ')}, {args.dtype}\n"
             f"{'operation':<16}{'bytes':>12}{'ms':>11}{'algorithm GB/s':>16}{'bus GB/s':>10}")  # fmt: skip
        while size <= args.max_size:
            for op, call in calls(axis, links, size, dtype, mesh.device).items():
                if op in args.ops:
                    row = Row(name, where, axis.size, op, size, seconds_of(call, mesh, args.seconds))
                    rows.append(row)
                    tell(f"{op:<16}{size:>12}{1e3 * row.seconds:>11.4f}{row.algorithm_bandwidth / GB:>16.3f}"
                         f"{row.bus_bandwidth / GB:>10.3f}")  # fmt: skip
            size *= args.factor
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# What it comes to


def fit(rows: list[Row]) -> tuple[float, float]:
    """(latency in seconds, bandwidth in bytes per second) of time = latency + sent / bandwidth: least squares of relative
    errors. No latency below zero."""
    xs, weights = [row.sent for row in rows], [row.seconds**-2 for row in rows]
    ts, total = [row.seconds for row in rows], sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, ts, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, x, t in zip(weights, xs, ts, strict=True)) / spread if spread else 0.0
    latency = mean_t - slope * mean_x
    if slope <= 0 or latency < 0:  # all latency, or all bandwidth
        largest = max(rows, key=lambda row: row.sent)
        return (min(ts), largest.bus_bandwidth) if slope <= 0 else (0.0, mean_x / mean_t)
    return latency, 1 / slope


def fits(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """where -> operation -> its line, in the units of a cluster file."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for where, op in dict.fromkeys((row.where, row.op) for row in rows):
        latency, bandwidth = fit([row for row in rows if (row.where, row.op) == (where, op)])
        line = {"bandwidth_gbs": max(bandwidth / GB, 1e-4), "latency_us": latency / MICRO}
        found.setdefault(where, {})[op] = line
    return found


def description(mesh: Mesh, rows: list[Row]) -> dict:
    """The cluster, as `--cluster` reads it. Collective over the world."""
    hosts = comm.gather_objects(socket.gethostname(), mesh.world)
    memory, bandwidth, peaks, efficiency = _device_facts(mesh)
    lines, nodes = fits(rows), len(set(hosts))
    wires = {where: table["send"] for where, table in lines.items() if "send" in table}
    collectives = {where: {op: line for op, line in table.items() if op != "ring"} for where, table in lines.items()}
    if "within_node" not in wires and "between_nodes" in wires:  # a rank per node
        wires["within_node"] = wires["between_nodes"]
    what = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    return {"name": f"{nodes} x {len(hosts) // nodes} {what}, measured", "nodes": nodes, "gpus_per_node": len(hosts) // nodes,
            "memory_gib": memory / GIB, "memory_bandwidth_gbs": bandwidth / GB, "peak_tflops": peaks, **wires,
            "matmul_efficiency": efficiency, "overlap": 0.8 if mesh.device.type == "cuda" else 0.0,
            "collectives": collectives, "rendezvous_us": 1e6 * rendezvous_seconds(mesh)}  # fmt: skip


def rendezvous_seconds(mesh: Mesh, rounds: int = 40) -> float:
    """What an all-reduce costs more where ranks compute before it than one after another: they come to it at different times,
    caches hold other things, and on a CPU a thread that slept has to get a core. Collective over the world; the largest."""
    if mesh.world.size == 1:
        return 0.0
    message = torch.ones(1 << 18, device=mesh.device)  # 1 MiB
    rows, matrix = torch.ones(1024, 256, device=mesh.device), torch.ones(256, 2048, device=mesh.device)

    def timed(work: bool, send: bool) -> float:
        comm.barrier(mesh.world)
        began = _now(mesh.device)
        for _ in range(rounds):
            if work:
                (rows @ matrix).mul_(2).sum()  # 8 MiB between: what lay in the caches is gone
            if send:
                comm.all_reduce(message.clone(), mesh.world)
        return (_now(mesh.device) - began) / rounds

    timed(True, True)
    found = [[timed(True, True), timed(True, False), timed(False, True)] for _ in range(5)]
    both, work, send = (median(column) for column in zip(*found, strict=True))
    return max(max(comm.gather_objects(both - work - send, mesh.world)), 0.0)


def _device_facts(mesh: Mesh) -> tuple[float, float, dict[str, float], float]:
    """(memory, bytes per second of a copy, peaks in TFLOP/s, share of them that products reach) of a rank's device, all ranks
    at once; the slowest counts."""
    device, cuda = mesh.device, mesh.device.type == "cuda"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world.size))
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local)  # fmt: skip
    block = torch.empty(1 << (30 if cuda else 26), dtype=torch.uint8, device=device)
    other = torch.empty_like(block)
    bandwidth = 2 * block.numel() / seconds_of(lambda: other.copy_(block), mesh, 0.3)
    peaks: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        comm.barrier(mesh.world)
        peak = matmul_peak_tflops(dtype, device)
        if peak is not None:
            least = comm.all_reduce(torch.tensor(peak, dtype=torch.float64, device=device), mesh.world, op="min")
            peaks[str(dtype).removeprefix("torch.")] = float(least)
    efficiency = 1.0
    if cuda and "bfloat16" in peaks:
        side = 8192
        x = torch.ones(side, side, dtype=torch.bfloat16, device=device)
        efficiency = min(1.0, 2 * side**3 / seconds_of(lambda: x @ x, mesh, 0.5) / (peaks["bfloat16"] * 1e12))
    return memory, bandwidth, peaks, efficiency


def plot(rows: list[Row], path: Path) -> None:
    """Bus bandwidth over size, an axis in each picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.axis for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(6 * len(names), 4.5), layout="constrained", squeeze=False)
    for name, ax in zip(names, axes[0], strict=True):
        for op in dict.fromkeys(row.op for row in rows):
            points = [(row.size, row.bus_bandwidth / GB) for row in rows if (row.axis, row.op) == (name, op)]
            ax.plot(*zip(*points, strict=True), marker="o", label=op)
        ax.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus GB/s", title=name)
        ax.legend()
    figure.savefig(path)
    pyplot.close(figure)


def report(rows: list[Row]) -> str:
    """The fitted lines."""
    lines = [f"\n{'fitted':<16}{'':<16}{'latency us':>12}{'bus GB/s':>10}"]
    for where, table in fits(rows).items():
        lines += [f"{op:<16}{where.replace('_', ' '):<16}{line['latency_us']:>12.1f}{line['bandwidth_gbs']:>10.3f}"
                  for op, line in table.items()]  # fmt: skip
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags."""
    args = build_parser().parse_args(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if found := problems(args, world):
        if rank == 0:
            print("".join(f"bench_collectives: error: {problem}\n" for problem in found), file=sys.stderr, end="")
        return 2
    rank, world, device = init_from_env(args.distributed_backend)
    if device.type == "cpu":
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        keep_heap()
    mesh = build_mesh(Grid(tp=args.tp, pp=args.pp, dp=world // (args.tp * args.pp)), device)
    tell = (lambda text: print(text, flush=True)) if rank == 0 else (lambda text: None)
    rows = measure(mesh, args, tell)
    tell(report(rows))
    found = description(mesh, rows) if args.save else None
    if rank == 0:
        facts = {"torch": torch.__version__, "dtype": args.dtype, "world": world, "fits": fits(rows)}
        table = [row._asdict() | {"algorithm_bandwidth": row.algorithm_bandwidth, "bus_bandwidth": row.bus_bandwidth}
                 for row in rows]  # fmt: skip
        for path, content in ((args.json, facts | {"rows": table}), (args.save, found)):
            if path:
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if args.plot:
            plot(rows, args.plot)
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
