"""What a plan runs on: devices, their nodes and the wires. From a JSON file, a preset, or this machine.

    {"name": "my cluster", "nodes": 16, "gpus_per_node": 8, "memory_gib": 79, "memory_bandwidth_gbs": 3350,
     "peak_tflops": {"bfloat16": 989, "float32": 67}, "within_node": {"bandwidth_gbs": 360, "latency_us": 5},
     "between_nodes": {"bandwidth_gbs": 40, "latency_us": 10}}

Units: GiB = 2^30 bytes, GB/s = 10^9 bytes per second, dense TFLOP/s, all per device. A wire's bandwidth is what one device
sends in one direction while it receives as much; its latency is that of one message, sending and receiving calls included.
Optional, with their defaults:

    nodes                 none: as many as are asked for
    host                  {"bandwidth_gbs": 32, "latency_us": 10}: device to host memory
    matmul_efficiency     0.75: of the peak, what large matrix products reach
    overlap               0.8: of the compute beside it, what communication can hide behind (0 where it costs the same cores)
    rendezvous_us         0: what a measured collective costs more between computations than one after another
    collectives           {"within_node": {"all_reduce": {"bandwidth_gbs": ..., "latency_us": ...}, ...}, "between_nodes": ...}:
                          measured, per call and per byte that leaves a rank; tools/bench_collectives.py --save writes them

Presets are data sheets, wires at 80 % of them (what NCCL's own tests reach with large messages): NVLink 300, 450, 450, 900 GB/s
and one 200, 400, 400, 400 Gbit/s adapter per GPU. Latencies are round figures.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.errors import ReportedError
from megatron_lite.planner.flops import device_peak_tflops

GIB, GB, TERA, MICRO = 1 << 30, 1e9, 1e12, 1e-6
MARGIN = 0.92  # of a device's memory that a plan may fill: the rest is for the context, NCCL, work space and fragments
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
THIS = "this"  # --cluster this


class ClusterError(ReportedError):
    """A cluster that cannot be planned for; every problem, a line each."""


class Link(NamedTuple):
    """A wire, or a collective over it: `bandwidth` bytes per second, `latency` seconds."""

    bandwidth: float
    latency: float

    def seconds(self, size: float, messages: float = 1) -> float:
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Bytes, seconds, FLOP/s; see the head of this file. `measured`: (within | between, collective) -> its line."""

    name: str
    gpus_per_node: int
    memory: float
    memory_bandwidth: float
    peak: dict[str, float]
    within: Link
    between: Link
    nodes: int | None = None
    host: Link = Link(32 * GB, 10 * MICRO)
    matmul_efficiency: float = 0.75
    overlap: float = 0.8
    rendezvous: float = 0.0
    measured: dict[tuple[str, str], Link] = field(default_factory=dict)

    @property
    def usable_memory(self) -> float:
        return MARGIN * self.memory

    def flops(self, dtype_name: str) -> float:
        """Dense peak of one device, FLOP/s; ClusterError where the cluster does not say."""
        if dtype_name not in self.peak:
            known = ", ".join(sorted(self.peak))
            raise ClusterError(f"--cluster {self.name}: no peak_tflops for {dtype_name}; it has {known}")
        return self.peak[dtype_name]

    def describe(self) -> str:
        """One line."""
        nodes = "" if self.nodes is None else f"{self.nodes} x "
        return (f"{self.name}: {nodes}{self.gpus_per_node} devices of {self.memory / GIB:.4g} GiB, "
                f"{self.within.bandwidth / GB:.4g} GB/s within a node, {self.between.bandwidth / GB:.4g} between")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Presets


def _node(name: str, memory_gib: float, memory_gbs: float, nvlink: float, adapter: float, host: float, **peaks: float) -> dict:
    """A node of eight; wires in GB/s of the data sheet."""
    halves = {dtype: device_peak_tflops(name, dtype) for dtype in ("bfloat16", "float16", "float32")}
    return {"name": name, "gpus_per_node": 8, "memory_gib": memory_gib, "memory_bandwidth_gbs": memory_gbs,
            "peak_tflops": halves | peaks, "within_node": {"bandwidth_gbs": 0.8 * nvlink, "latency_us": 5},
            "between_nodes": {"bandwidth_gbs": 0.8 * adapter, "latency_us": 10},
            "host": {"bandwidth_gbs": host, "latency_us": 10}}  # fmt: skip


# memory as the allocator finds it; fp64 without tensor cores
PRESETS = {
    "a100": _node("a100", 79, 2039, 300, 25, 32, float64=9.7),
    "h100": _node("h100", 79, 3350, 450, 50, 64, float64=34, float8=1979),
    "h200": _node("h200", 139, 4800, 450, 50, 64, float64=34, float8=1979),
    "b200": _node("b200", 178, 8000, 900, 50, 64, float64=37, float8=4500),
}
# A CPU core, where nothing has been measured: what one rank finds on a common server (benchmarks/collectives.py).
CORE = {"flops_per_cycle": {"avx512f": 64, "avx2": 32, "": 8}, "memory_gbs": 8.0, "bandwidth_gbs": 3.0, "latency_us": 50}


def this_machine(cores: int | None = None) -> dict[str, Any]:
    """Description of this machine: its NVIDIA GPUs if the kernel lists any, else a rank per CPU core, by rough constants.
    `tools/bench_collectives.py --save` measures what is guessed here."""
    gpus = [_model_of(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    known = next((name for name in reversed(PRESETS) if gpus and name in gpus[0].lower()), None)
    if known:
        return PRESETS[known] | {"name": f"this machine ({gpus[0]})", "nodes": 1, "gpus_per_node": len(gpus)}
    cores = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    info = _text("/proc/cpuinfo")
    width = next(each for flag, each in CORE["flops_per_cycle"].items() if flag in info)
    clock = float(found[1]) if (found := re.search(r"cpu MHz\s*: ([\d.]+)", info)) else 2500.0
    total = float(found[1]) / 2**20 if (found := re.search(r"MemTotal:\s+(\d+) kB", _text("/proc/meminfo"))) else 8.0
    single = width * clock / 1e6
    half = single * (2 if "avx512_bf16" in info else 0.25)  # without such instructions bf16 is converted
    wire = {"bandwidth_gbs": CORE["bandwidth_gbs"], "latency_us": CORE["latency_us"]}
    return {"name": "this machine (CPU, guessed)", "nodes": 1, "gpus_per_node": cores, "memory_gib": total / cores,
            "memory_bandwidth_gbs": CORE["memory_gbs"], "within_node": wire, "overlap": 0.0,
            "peak_tflops": {"bfloat16": half, "float16": single / 100, "float32": single, "float64": single / 2}}  # fmt: skip


def _model_of(path: Path) -> str:
    found = re.search(r"Model:\s*(.+)", _text(str(path)))
    return found[1].strip() if found else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class _Range(NamedTuple):
    """What a number may be, and what it usually is, in words."""

    low: float
    high: float
    usual: str


RANGES = {
    "gpus_per_node": _Range(1, 4096, "usually 8"),
    "nodes": _Range(1, 1e6, "leave it out for as many as are asked for"),
    "memory_gib": _Range(0.01, 1e5, "an H100 has 79"),
    "memory_bandwidth_gbs": _Range(0.01, 1e6, "an H100 has 3350"),
    "peak_tflops": _Range(1e-5, 1e6, "dense TFLOP/s; an H100 has 989 in bfloat16"),
    "bandwidth_gbs": _Range(1e-4, 1e5, "GB/s per device and direction; NVLink 4 has 450, a 400 Gbit/s adapter 50"),
    "latency_us": _Range(0, 1e7, "usually 3 to 20"),
    "matmul_efficiency": _Range(0.01, 1.0, "a share of the peak, usually 0.75"),
    "overlap": _Range(0.0, 1.0, "a share, usually 0.8"),
    "rendezvous_us": _Range(0.0, 1e6, "microseconds, usually 0"),
}
WIRES = ("within_node", "between_nodes", "host")
KNOWN = {"name", "nodes", "gpus_per_node", "memory_gib", "memory_bandwidth_gbs", "peak_tflops", *WIRES, "matmul_efficiency",
         "overlap", "rendezvous_us", "collectives"}  # fmt: skip


def read_cluster(text: str) -> Cluster:
    """The cluster of `--cluster text`: a preset's name, `this`, or a JSON file. ClusterError with every problem."""
    if text.lower() in PRESETS:
        return cluster_of(PRESETS[text.lower()], text)
    if text == THIS:
        return cluster_of(this_machine(), text)
    path = Path(text)
    if not path.is_file():
        raise ClusterError(f"--cluster {text}: no such file and no preset; presets are {', '.join(PRESETS)}, {THIS}")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ClusterError(f"--cluster {text}: no JSON: {error}") from None
    return cluster_of(description, text)


def cluster_of(description: Any, source: str) -> Cluster:
    """A cluster from its JSON form. `source` names it in errors."""
    if not isinstance(description, dict):
        raise ClusterError(f"--cluster {source}: expected an object with {', '.join(sorted(KNOWN))}")
    problems: list[str] = []
    d, number = description, _numbers(problems)
    if extra := sorted(set(d) - KNOWN):
        problems.append(f"unknown: {', '.join(extra)}; known are {', '.join(sorted(KNOWN))}")
    nodes = number(d, "nodes", default=0, whole=True) or None
    if nodes == 1 and "between_nodes" not in d and "within_node" in d:
        d = d | {"between_nodes": d["within_node"]}  # there is none
    found = {
        "gpus_per_node": number(d, "gpus_per_node", whole=True),
        "memory": number(d, "memory_gib") * GIB,
        "memory_bandwidth": number(d, "memory_bandwidth_gbs") * GB,
        "peak": _peaks(d, problems, number),
        "within": _link(d, "within_node", problems, number),
        "between": _link(d, "between_nodes", problems, number),
        "nodes": nodes,
        "host": _link(d, "host", problems, number) if "host" in d else Cluster.host,
        "matmul_efficiency": number(d, "matmul_efficiency", default=Cluster.matmul_efficiency),
        "overlap": number(d, "overlap", default=Cluster.overlap),
        "rendezvous": number(d, "rendezvous_us", default=0.0) * MICRO,
        "measured": _measured(d.get("collectives", {}), problems, number),
    }
    if problems:
        raise ClusterError("\n".join(f"--cluster {source}: {problem}" for problem in problems))
    return Cluster(name=str(d.get("name", source)), **found)


Number = Callable[..., float]


def _numbers(problems: list[str]) -> Number:
    """A reader of numbers that notes what is wrong and goes on with 1."""

    def number(where: dict, key: str, default: float | None = None, whole: bool = False, path: str = "", kind: str = "") -> float:
        allowed, name = RANGES[kind or key], f"{path}{key}"
        if key not in where:
            if default is None:
                problems.append(f"{name} is missing; {allowed.usual}")
            return 1 if default is None else default
        value = where[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            problems.append(f"{name} = {value!r} is not a number; {allowed.usual}")
            return 1
        if not allowed.low <= value <= allowed.high:
            nearest = min(max(value, allowed.low), allowed.high)
            problems.append(f"{name} = {value:g} is out of range; nearest that is taken: {nearest:g}; {allowed.usual}")
            return 1
        if whole and value != int(value):
            problems.append(f"{name} = {value:g} is not a whole number; {allowed.usual}")
        return int(value) if whole else float(value)

    return number


def _peaks(d: dict, problems: list[str], number: Number) -> dict[str, float]:
    peaks = d.get("peak_tflops")
    if not isinstance(peaks, dict) or not peaks:
        problems.append('peak_tflops is missing; give dense TFLOP/s per dtype, for example {"bfloat16": 989}')
        return {}
    return {dtype: number(peaks, dtype, path="peak_tflops.", kind="peak_tflops") * TERA for dtype in peaks}


def _link(d: dict, name: str, problems: list[str], number: Number) -> Link:
    wire = d.get(name)
    if not isinstance(wire, dict):
        problems.append(f'{name} is missing; give {{"bandwidth_gbs": ..., "latency_us": ...}}')
        return Link(1, 0)
    bandwidth = number(wire, "bandwidth_gbs", path=f"{name}.") * GB
    return Link(bandwidth, number(wire, "latency_us", path=f"{name}.") * MICRO)


def _measured(tables: Any, problems: list[str], number: Number) -> dict[tuple[str, str], Link]:
    found: dict[tuple[str, str], Link] = {}
    if not isinstance(tables, dict):
        problems.append(f"collectives: expected an object, not {tables!r}")
        return found
    for where, table in tables.items():
        if where not in WIRES[:2] or not isinstance(table, dict) or not set(table) <= set(OPS):
            problems.append(f"collectives.{where}: expected within_node or between_nodes, each with some of {', '.join(OPS)}")
            continue
        for op in table:
            found[where.split("_")[0], op] = _link({f"collectives.{where}.{op}": table[op]}, f"collectives.{where}.{op}",
                                                   problems, number)  # fmt: skip
    return found
