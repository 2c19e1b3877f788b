"""Pipeline schedules, measured: their bubbles beside the simulator's and torch's, and the speed of real training.

    python benchmarks/pipeline_bubble.py modelled --out bubble.json     every action sleeps its cost, 4 ranks
    python benchmarks/pipeline_bubble.py real --names 1f1b zbv          model W on 2 ranks, beside torch's schedules
    python benchmarks/pipeline_bubble.py split --dtype fp32             is each stage as long as --pipeline-split auto predicts?

`modelled`: the sync bubble is the mean over ranks of the part of a step in which a rank's stages do nothing, from the first
rank's start to the last rank's end. Medians over rounds; ours and torch's take turns in the same processes. "simulated" is
the bubble on a perfect machine; "expected" simulates the times that the actions of this run really took, and the measured
latency of a message to a rank that waits for it. "overhead" is all time of a rank that is neither nap nor wait.

`real`: tokens/s and peak memory of whole training steps, by the driver of the speed table (benchmarks/throughput.py).
"""

import argparse
import fnmatch
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report  # noqa: E402
from benchmarks.contenders import PIPELINES, pipelines  # noqa: E402
from benchmarks.modelled import GREEDY, TORCH, Case, Steps, rank_steps  # noqa: E402
from benchmarks.stage_balance import balance_text, timed_rows  # noqa: E402
from benchmarks.throughput import Run, machine_facts  # noqa: E402
from benchmarks.throughput import parse as parse_throughput  # noqa: E402
from megatron_lite.comm import launch  # noqa: E402
from megatron_lite.schedules import SCHEDULES  # noqa: E402
from megatron_lite.schedules.simulate import Costs, chunk_costs, simulate  # noqa: E402

OURS = (*SCHEDULES, *GREEDY)


def parse(argv=None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["modelled", "real", "split"])
    parser.add_argument("--names", nargs="+", help="schedules or patterns (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each contender")
    parser.add_argument("--out", help="write everything measured to this JSON file")
    parser.add_argument("--ranks", type=int, default=4, help="modelled: pipeline ranks")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16], help="modelled: per step")
    parser.add_argument("--costs", nargs=3, type=float, default=[20, 20, 20], metavar=("F", "B", "W"),
                        help="modelled: milliseconds of a rank's share of the layers")  # fmt: skip
    parser.add_argument("--shape", choices=["W", "tiny"], default="W", help="real, split: tiny only tries the driver")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="real, split: fp32 where the CPU has no bf16")
    parser.add_argument("--heap", action="store_true", help="real: torch also with our allocator settings")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace, names) -> list[str]:
    """Those of the names that were asked for."""
    patterns = args.names or ["*"]
    return [name for name in dict.fromkeys(names) if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def measured(rows: list[dict]) -> tuple[float, float]:
    """(makespan, bubble as a share of it) of one step, from its ranks' rows."""
    makespan = max(row["ended"] for row in rows) - min(row["started"] for row in rows)
    return makespan, 1 - statistics.fmean(row["busy"] for row in rows) / makespan


def summary(notes: list[Steps], ranks: int) -> dict:
    """One row of the table from all ranks' notes of a case."""
    case = notes[0].case
    steps = [measured(rows) for rows in zip(*(note.rows for note in notes), strict=True)]
    row = {"name": case.name, "by": "torch" if case.torch else "ours", "microbatches": case.microbatches,
           "step_ms": 1e3 * statistics.median(step for step, _ in steps),
           "bubble_percent": 100 * statistics.median(bubble for _, bubble in steps)}  # fmt: skip
    if case.torch:
        return row
    schedule, placement = case.schedule(ranks)
    ideal = simulate(schedule, placement, chunk_costs(*case.costs, placement.chunks_per_share))
    taken = (statistics.fmean(note.costs[part] for note in notes) for part in range(3))
    expected = simulate(schedule, placement, Costs(*taken, latency=notes[0].latency))
    own = [1e3 * (r["total"] - r["wait"] - r["busy"]) / r["actions"] for note in notes for r in note.rows]
    return row | {
        "simulated_percent": 100 * ideal.sync_fraction,
        "expected_percent": 100 * expected.sync_fraction,
        "overhead_ms": statistics.median(own),
        "peak": [note.rows[0]["peak"] for note in notes],
        "simulated_peak": list(ideal.peak_live),
    }


def modelled_text(rows: list[dict]) -> str:
    """The table: a line per schedule, ours and torch's side by side."""
    head = ["microbatches", "schedule", "simulated", "expected", "ours", "torch", "overhead ms/action", "peak live", "simulated"]
    lines = [head]
    for row in rows:
        if row["by"] == "torch" and row["name"] in SCHEDULES:
            continue
        ours = row if row["by"] == "ours" else None
        peers = [r for r in rows if (r["by"], r["name"], r["microbatches"]) == ("torch", row["name"], row["microbatches"])]
        shown = [f"{r['bubble_percent']:.1f}" if r else "" for r in (ours, peers[0] if peers else None)]
        told = [f"{ours[key]:.1f}" if ours else "" for key in ("simulated_percent", "expected_percent")]
        line = [str(row["microbatches"]), row["name"], *told, *shown]
        if ours:
            peaks = (" ".join(f"{peak:g}" for peak in ours[key]) for key in ("peak", "simulated_peak"))
            line += [f"{ours['overhead_ms']:.3f}", *peaks]
        lines.append(line + [""] * (len(head) - len(line)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def modelled(args: argparse.Namespace) -> dict:
    """Every schedule on stages that sleep."""
    costs = tuple(cost / 1e3 for cost in args.costs)
    cases = [Case(name, m, peer, costs) for m in args.microbatches for name in chosen(args, [*OURS, *TORCH])
             for peer in (False, True) if name in (TORCH if peer else OURS)]  # fmt: skip
    patience = 60.0 + 3.0 * len(cases) * (args.rounds + 1)
    by_rank = launch.run(rank_steps, args.ranks, cases, args.ranks, args.rounds, timeout=patience)
    rows = [summary(list(notes), args.ranks) for notes in zip(*by_rank, strict=True)]
    print(f"sync bubble, % of the step; {args.ranks} ranks, F {args.costs[0]:g}, B {args.costs[1]:g}, "
          f"W {args.costs[2]:g} ms, medians of {args.rounds} steps")  # fmt: skip
    latency = 1e3 * by_rank[0][0].latency
    print(f"latency of a message {latency:.3f} ms")
    print(modelled_text(rows))
    return {"ranks": args.ranks, "costs_ms": args.costs, "rounds": args.rounds, "latency_ms": latency, "rows": rows}


def real(args: argparse.Namespace) -> dict:
    """Whole training steps on two ranks; all contenders asked for are in memory together."""
    options = parse_throughput(["--shape", args.shape, "--rounds", str(args.rounds)])
    with tempfile.TemporaryDirectory(prefix="pipelines-", ignore_cleanup_errors=True) as folder:
        run = Run(options, Path(folder))
        run.measure(pipelines(chosen(args, PIPELINES), args.heap), "pp", args.dtype)
        run.summarise()
    part = run.result["blocks"][0]
    print(report.block_text(part))
    rows = part["rows"]
    part["same name"] = {}
    for name in chosen(args, PIPELINES):
        ours, peer = rows.get(f"ours {name}"), rows.get(f"torch {name}")
        if ours and peer:
            ratio = part["same name"][name] = report.paired_ratio(ours, peer)
            peaks = f"{ours['peak_rss_mb']:.0f} / {peer['peak_rss_mb']:.0f} MB"
            print(f"{name}: ours / torch {ratio:.3f}, peak {peaks}")
    return run.result


def split(args: argparse.Namespace) -> dict:
    """Times of the stages of an automatic split, on two ranks."""
    rows = []
    for schedule in args.names or ["1f1b", "zbv"]:
        by_rank = launch.run(timed_rows, 2, 2, args.shape, args.dtype, schedule, args.rounds, timeout=600.0)
        rows += sorted(sum(by_rank, []), key=lambda row: row["stage"])
    print(balance_text(rows))
    return {"shape": args.shape, "dtype": args.dtype, "rounds": args.rounds, "rows": rows}


def main(argv=None) -> None:
    """Measure, print, write."""
    args = parse(argv)
    measure = {"modelled": modelled, "real": real, "split": split}[args.part]
    result = {"facts": machine_facts(), args.part: measure(args)}
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")
        print(f"\nwritten: {args.out}")


if __name__ == "__main__":
    main()
