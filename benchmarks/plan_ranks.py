"""Does the planner order layouts as the clock does? Step times of small runs beside the plan for the measured cluster.

    python benchmarks/plan_ranks.py --json benchmarks/results/plan_ranks.json

First the wires, memory and matrix speed of two ranks (tools/bench_collectives.py, one thread each), then a step of every
layout below, predicted and measured: the median of the slowest rank. Rounds go through all layouts in turn, so that a noisy
neighbour meets all. At the end Spearman's rank correlation of the two columns.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.arguments import parse  # noqa: E402
from megatron_lite.comm import collectives as comm  # noqa: E402
from megatron_lite.comm.launch import WorkerPool, keep_heap  # noqa: E402
from megatron_lite.comm.mesh import build_mesh, single  # noqa: E402
from megatron_lite.config import Config  # noqa: E402
from megatron_lite.data.loader import Batch  # noqa: E402
from megatron_lite.grid import Grid  # noqa: E402
from megatron_lite.planner.cluster import Cluster, cluster_of  # noqa: E402
from megatron_lite.planner.pipeline import pipeline_of  # noqa: E402
from megatron_lite.planner.timing import step_time  # noqa: E402
from megatron_lite.training.setup import build_trainer, grid_of  # noqa: E402
from megatron_lite.training.step import train_step  # noqa: E402
from tools import bench_collectives  # noqa: E402

MODEL = ("--num-layers 8 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 4 --seq-length 256 "
         "--ffn-hidden-size 704 --vocab-size 2048 --swiglu --normalization RMSNorm --position-embedding-type rope "
         "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 "
         "--global-batch-size 8 --train-iters 9 --mock-data --distributed-backend gloo")  # fmt: skip
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {  # name -> (ranks, flags)
    "1 rank": (1, "--micro-batch-size 4"),
    "1 rank, recompute": (1, f"--micro-batch-size 4 {FULL}"),
    "tp 2": (2, f"--micro-batch-size 4 {TP}"),
    "tp 2, sp": (2, f"--micro-batch-size 4 {TP} --sequence-parallel"),
    "tp 2, recompute": (2, f"--micro-batch-size 4 {TP} {FULL}"),
    "pp 2, 8 microbatches": (2, f"--micro-batch-size 1 {PP}"),
    "pp 2, 2 microbatches": (2, f"--micro-batch-size 4 {PP}"),
    "pp 2, 1 microbatch": (2, f"--micro-batch-size 8 {PP}"),
    "pp 2, 1 microbatch, recompute": (2, f"--micro-batch-size 8 {PP} {FULL}"),
    "dp 2": (2, "--micro-batch-size 4"),
    "dp 2, ZeRO-2, 4 microbatches": (2, "--micro-batch-size 1 --zero-stage 2"),
    "dp 2, ZeRO-3, 4 microbatches": (2, "--micro-batch-size 1 --zero-stage 3"),
    "dp 2, recompute": (2, f"--micro-batch-size 4 {FULL}"),
}


def configuration(flags: str, world: int) -> Config:
    config, found = parse(f"{MODEL} {flags}".split(), world)
    assert not found, found
    return config


def cluster_here(rank: int, world: int, largest: str) -> dict:
    """The measured cluster of these ranks."""
    keep_heap()
    mesh = build_mesh(Grid(tp=world), torch.device("cpu"))
    args = bench_collectives.build_parser().parse_args(["--dtype", "float32", "--max-size", largest, "--seconds", "0.1"])
    return bench_collectives.description(mesh, bench_collectives.measure(mesh, args, lambda text: None))


def step_seconds(rank: int, world: int, flags: str, steps: int) -> float:
    """Median seconds of a step after two, on this rank."""
    keep_heap()
    config = configuration(flags, world)
    mesh = build_mesh(grid_of(config, world), torch.device("cpu")) if world > 1 else single()
    trainer, train = build_trainer(config, mesh), config.train
    ids = torch.randint(0, config.data.vocab_size, (train.micro_batch_size, config.model.seq_length))
    batches, times = [Batch(ids, ids, torch.ones(ids.shape))] * config.num_microbatches, []
    for step in range(steps + 2):
        comm.barrier(mesh.world)
        began = time.perf_counter()
        train_step(trainer, batches, step, 0)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def ranks_of(values: Sequence[float]) -> list[float]:
    """Place of each value, equal ones sharing theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of the places."""
    a, b = ranks_of(one), ranks_of(other)
    mean = (len(a) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return both / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5


def compare(pool: WorkerPool, cluster: Cluster, names: Sequence[str], steps: int, rounds: int) -> list[dict]:
    """Predicted and measured seconds of each layout."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            world, flags = LAYOUTS[name]
            times[name].append(max(pool.run(step_seconds, world, world, flags, steps, timeout=600)))
    rows = []
    for name in names:
        world, flags = LAYOUTS[name]
        config = configuration(flags, world)
        plan = step_time(config, cluster, pipeline_of(config))
        rows.append({"layout": name, "ranks": world, "flags": flags, "predicted": plan.seconds, "measured": median(times[name]),
                     "parts": plan._asdict()})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a layout in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-size", default="16M", help="of the measured messages")
    parser.add_argument("--json", type=Path, help="also write the table and the cluster here")
    args = parser.parse_args()
    pool = WorkerPool(2)
    found = pool.run(cluster_here, 2, 2, args.max_size, timeout=600)[0]
    cluster = cluster_of(found, "measured")
    print(f"{cluster.describe()}; {cluster.peak['float32'] / 1e9:.0f} GFLOP/s, {cluster.memory_bandwidth / 1e9:.1f} GB/s")
    rows = compare(pool, cluster, list(LAYOUTS), args.steps, args.rounds)
    pool.shutdown()
    places = {key: ranks_of([row[key] for row in rows]) for key in ("predicted", "measured")}
    print(f"{'layout':<34}{'predicted ms':>14}{'measured ms':>14}{'ratio':>8}{'places':>10}")
    for index, row in sorted(enumerate(rows), key=lambda pair: pair[1]["measured"]):
        row |= {f"{key}_place": places[key][index] + 1 for key in places}
        ratio = row["predicted"] / row["measured"]
        print(f"{row['layout']:<34}{1e3 * row['predicted']:>14.1f}{1e3 * row['measured']:>14.1f}{ratio:>8.2f}"
              f"{row['predicted_place']:>5.0f}{row['measured_place']:>5.0f}")  # fmt: skip
    correlation = spearman([row["predicted"] for row in rows], [row["measured"] for row in rows])
    print(f"Spearman's rank correlation of {len(rows)} layouts: {correlation:.3f}")
    if args.json:
        table = {"torch": torch.__version__, "model": MODEL, "spearman": correlation, "cluster": found, "rows": rows}
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
