"""Collectives between ranks of one host: ours through shared memory and over gloo, against gloo's own.

    python benchmarks/collectives.py --ranks 2 --sizes 4K 256K 2M 64M --json collectives.json

Medians in milliseconds of the slowest rank; the ways take turns within each round, so that a noisy neighbour meets all.
Sizes are of the whole tensor: what is reduced, what the gather gives, what goes round the ring.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_lite.comm import collectives as comm  # noqa: E402
from megatron_lite.comm.launch import keep_heap, run  # noqa: E402
from megatron_lite.comm.mesh import Axis  # noqa: E402
from megatron_lite.comm.p2p import P2P  # noqa: E402
from megatron_lite.comm.shared import SharedBoard  # noqa: E402
from tools.bench_collectives import message_round  # noqa: E402

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
WAYS = ("shared", "over_gloo", "gloo")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "send_recv")


def size_in_bytes(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


def calls(
    axis: Axis, pairs: Axis, links: tuple[P2P, P2P], size: int, dtype: torch.dtype
) -> dict[tuple[str, str], Callable[[], object]]:
    """(op, way) -> a call on tensors of `size` bytes."""
    whole = torch.zeros(size // dtype.itemsize // axis.size * axis.size, dtype=dtype)  # sums summed again stay finite
    part = torch.zeros(whole.numel() // axis.size, dtype=dtype)
    found = {}
    for way, over, link in (("shared", axis, links[0]), ("over_gloo", pairs, links[1])):
        if way == "over_gloo" or axis.board is not None:
            found["all_reduce", way] = lambda over=over: comm.all_reduce(whole, over)
            found["reduce_scatter", way] = lambda over=over: comm.reduce_scatter_into(part, whole, over)
            found["send_recv", way] = lambda link=link: message_round(link, whole)
            found["all_gather", way] = lambda over=over: comm.all_gather_into(whole, part, over)
    found["all_reduce", "gloo"] = lambda: dist.all_reduce(whole)
    found["reduce_scatter", "gloo"] = lambda: dist.reduce_scatter_tensor(part, whole)
    found["all_gather", "gloo"] = lambda: dist.all_gather_into_tensor(whole, part)
    return found


def measure(rank: int, ranks: int, sizes: list[int], dtype: torch.dtype, seconds: float) -> dict[tuple, float]:
    """Median milliseconds of each (op, way, size) on this rank."""
    keep_heap()
    members = tuple(range(ranks))
    axis = Axis("bench", rank, members, dist.group.WORLD, SharedBoard.connect(rank, ranks, dist.group.WORLD))
    pairs = Axis("bench", rank, members, dist.group.WORLD)
    links = P2P(axis, torch.device("cpu")), P2P(pairs, torch.device("cpu"))
    medians = {}
    for size in sizes:
        ways = calls(axis, pairs, links, size, dtype)
        rounds = max(5, min(200, int(seconds / (size / 1e9 + 0.0003) / len(ways))))
        times: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
        for _ in range(rounds + 2):
            for key, call in ways.items():
                dist.barrier()
                began = time.perf_counter()
                call()
                times[key].append(time.perf_counter() - began)
        medians.update({(*key, size): 1000 * statistics.median(t[2:]) for key, t in times.items()})
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["4K", "256K", "2M", "64M"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=2.0, help="aimed-at time per size")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    sizes = [size_in_bytes(s) for s in args.sizes]
    answers = run(measure, args.ranks, args.ranks, sizes, getattr(torch, args.dtype), args.seconds, timeout=600)
    slowest = {key: max(a[key] for a in answers) for key in answers[0]}
    print(f"{args.ranks} ranks, {args.dtype}, one thread each; ms, median of the slowest rank")
    print(f"{'op':<16}{'size':>8}" + "".join(f"{way:>10}" for way in WAYS))
    rows = []
    for op in OPS:
        for name, size in zip(args.sizes, sizes, strict=True):
            row = {"op": op, "bytes": size, **{way: slowest.get((op, way, size)) for way in WAYS}}
            rows.append(row)
            print(f"{op:<16}{name:>8}" + "".join(f"{row[w]:>10.3f}" if row[w] else f"{'-':>10}" for w in WAYS))
    if args.json:
        table = {"ranks": args.ranks, "dtype": args.dtype, "torch": torch.__version__, "rows": rows}
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
