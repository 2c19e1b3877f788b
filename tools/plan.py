#!/usr/bin/env python3
"""What a run will need and how fast it will be, before it is started; and which layout is the fastest.

    python tools/plan.py --model llama3-8b --bf16 --micro-batch-size 1 --global-batch-size 128 --gpus 16 \\
        --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --cluster h100         one layout in full
    python tools/plan.py --model llama3-8b --bf16 --global-batch-size 128 --gpus 16 --search     the ten fastest
    python tools/plan.py --model llama3-8b --bf16 --global-batch-size 16 --scaling --out scaling.svg

Every other flag is pretrain_gpt.py's. In a search flags of the layout are kept as they are given. Nothing is started, and no
torch is needed. Formulas: docs/planning.md.
"""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any folder
from megatron_lite.arguments import format_problems, parse, read, without
from megatron_lite.config import Config
from megatron_lite.errors import ReportedError
from megatron_lite.planner.cluster import GIB, PRESETS, THIS, Cluster, read_cluster
from megatron_lite.planner.outlook import outlook, transfer_table, transfers_of_ranks, uncounted
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.planner.report import dry_run_report, folded
from megatron_lite.planner.scaling import Curve, chosen_layouts, curve, table
from megatron_lite.planner.search import SCHEDULES, Result, search

LARGEST = 16384  # devices of --scaling
PICTURES = (".png", ".svg")
# pretrain_gpt.py's flags that fix a part of the searched layouts
FIXED = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "zero_stage": "zero", "micro_batch_size":
         "micro_batch", "pipeline_schedule": "schedule", "num_virtual_stages_per_pipeline_rank": "chunks",
         "recompute_granularity": "recompute"}  # fmt: skip
FOLLOWS = {"sequence_parallel", "recompute_method", "recompute_num_layers", "recompute_modules"}  # from what is searched
# the only values that a search gives them
SEARCHED = {"recompute_method": "uniform", "recompute_num_layers": 1, "recompute_modules": ("core_attn",)}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     epilog="All other flags are pretrain_gpt.py's.")  # fmt: skip
    add, what = parser.add_argument, parser.add_mutually_exclusive_group()
    what.add_argument("--search", action="store_true", help="the fastest layouts that fit, as flags")
    what.add_argument("--scaling", action="store_true", help="speed-up and efficiency from 1 device to --gpus")
    add("--gpus", type=int, metavar="N", help=f"devices (default: --world-size, else one node; --scaling: up to {LARGEST})")
    add("--node", type=int, metavar="N", help="devices of a node, instead of the cluster's")
    add("--cluster", default="h100", help=f"{', '.join(PRESETS)}, {THIS}, or a JSON file (default h100)")
    add("--keep", type=int, metavar="N", help="layouts that --search prints (default 10)")
    add("--strong", action="store_true", help="--scaling with one batch for all; without, each data-parallel rank has its own")
    add("--out", type=Path, metavar="FILE", help="--scaling as a picture (.png, .svg)")
    return parser


class Usage(ReportedError):
    """Flags that do not go together."""


def configuration(flags: list[str], devices: int) -> Config:
    """The run's configuration; `Usage` with every problem."""
    config, problems = parse([*flags, "--dry-run", "--world-size", str(devices)], 1)
    if config.data.vocab_size is None and not problems:
        raise Usage("--vocab-size: is missing: a plan reads no tokenizer")
    if problems:
        raise Usage(format_problems(problems).replace("pretrain_gpt.py", "plan.py", 1))
    return config


def fixed_and_free(flags: list[str]) -> tuple[dict, list[str]]:
    """(the parts of a layout that flags fix, the flags without them). `Usage` for values that are not searched."""
    given = read(flags).values
    fixed = {FIXED[name]: value for name, value in given.items() if name in FIXED}
    if "chunks" in fixed and fixed.get("schedule", "1f1b") == "1f1b":
        fixed["schedule"] = "interleaved"
    wrong = [f"--{name.replace('_', '-')} {in_words(given[name])}: a search has {in_words(value)}"
             for name, value in SEARCHED.items() if name in given and in_words(given[name]) != in_words(value)]  # fmt: skip
    if fixed.get("schedule", "1f1b") not in SCHEDULES:
        wrong.append(f"--pipeline-schedule {fixed['schedule']}: a search has {', '.join(SCHEDULES)}")
    if wrong:
        raise Usage("\n".join([*wrong, "without --search any layout is planned"]))
    return fixed, without(flags, {*FIXED, *FOLLOWS})


def in_words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def one_layout(flags: list[str], devices: int, cluster: Cluster) -> str:
    """The report of --dry-run, what the wires carry, and the step."""
    config = configuration(flags, devices)
    parts = [dry_run_report(config, config.grid)]
    if config.parallel.pipeline_schedule == "auto" or config.parallel.pipeline_split == "auto":
        raise Usage("--pipeline-schedule auto: is chosen when the run starts; plan.py --search compares schedules by name")
    pipeline = pipeline_of(config)
    parts.append(folded(outlook(config, pipeline, cluster)))
    if uncounted(config):
        return "\n\n".join(parts)
    transfers = transfers_of_ranks(config, pipeline)
    parts.append(f"transfers of a rank of stage 0 in a step\n{transfer_table(config, transfers[0])}")
    return "\n\n".join(parts)


def searched(flags: list[str], devices: int, cluster: Cluster, keep: int) -> str:
    fixed, free = fixed_and_free(flags)
    if not {"global_batch_size"} & set(read(flags).values):
        raise Usage("--search: needs --global-batch-size: layouts compare at one batch")
    base = configuration([*free, "--micro-batch-size", "1"], 1)
    if without := uncounted(base):
        raise Usage(f"--search: the time of a step is {without}; a single layout's memory is: leave --search out")
    return result_text(search(base, cluster, devices, fixed, keep), devices, cluster)


def result_text(result: Result, devices: int, cluster: Cluster) -> str:
    lines = [f"{devices} devices of {cluster.describe()}",
             f"{result.valid} layouts can run; {result.unfit} were dropped as they do not fit, {result.priced} simulated", "",
             f"{'':>4}{'step':>10}{'MFU':>8}{'bubble':>8}{'memory':>11}"]  # fmt: skip
    for place, found in enumerate(result.best, 1):
        time = found.time
        numbers = f"{time.seconds:>8.3g} s{time.mfu:>8.1%}{time.bubble_fraction:>8.1%}{found.memory / GIB:>7.1f} GiB"
        lines += [f"{place:>3}.{numbers}   {found.layout}", f"      {found.layout.flags()}"]
    lines += ["", "not among them"] + [f"  {lost.layout}: {lost.why}" for lost in result.lost] if result.lost else []
    return "\n".join(lines)


def scaled(flags: list[str], most: int, cluster: Cluster, strong: bool) -> list[Curve]:
    config = configuration(flags, 1)
    if without := uncounted(config):
        raise Usage(f"--scaling: the time of a step is {without}")
    counts = [2**power for power in range(most.bit_length()) if 2**power <= most]
    layouts = chosen_layouts(config, cluster.gpus_per_node)
    return [curve(name, config, cluster, layout, counts, strong) for name, layout in layouts.items()]


def draw(curves: list[Curve], path: Path) -> None:
    """Speed-up and efficiency over devices; hollow where a point does not fit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    most = max(point.devices for each in curves for point in each.points)
    axes[0].plot([1, most], [1, most], color="0.7", linestyle="--", label="ideal")
    for each in curves:
        devices = [point.devices for point in each.points]
        for ax, values in zip(axes, ([p.speed_up for p in each.points], [p.efficiency for p in each.points]), strict=True):
            line = ax.plot(devices, values, label=each.name)[0]
            for point, value in zip(each.points, values, strict=True):
                ax.plot(point.devices, value, "o", color=line.get_color(), fillstyle="full" if point.fits else "none")
    axes[0].set(xscale="log", yscale="log", xlabel="devices", ylabel="speed-up", title="speed-up over one device")
    axes[1].set(xscale="log", ylim=(0, 1.05), xlabel="devices", ylabel="efficiency", title="efficiency (hollow: does not fit)")
    axes[0].legend()
    figure.savefig(path)
    pyplot.close(figure)


def check(args: argparse.Namespace) -> None:
    """Flags that do not go together."""
    found = [f"--{name}: needs --scaling" for name in ("strong", "out") if getattr(args, name) and not args.scaling]
    found += ["--keep: needs --search"] if args.keep and not args.search else []
    if args.out and args.out.suffix not in PICTURES:
        found.append(f"--out {args.out}: should end in {' or '.join(PICTURES)}")
    for name in ("gpus", "node", "keep"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            found.append(f"--{name} {getattr(args, name)}: at least 1 would work")
    if found:
        raise Usage("\n".join(found))


def main(argv: list[str] | None = None) -> int:
    """Console entry point. 2 for flags that do not work, each in words."""
    args, flags = build_parser().parse_known_args(argv)
    try:
        check(args)
        cluster = read_cluster(args.cluster)
        cluster = replace(cluster, gpus_per_node=args.node) if args.node else cluster
        world = read(flags).values.get("world_size")
        devices = args.gpus or world or (LARGEST if args.scaling else cluster.gpus_per_node)
        flags = without(flags, ["world_size"])  # --gpus says it
        if args.search:
            print(searched(flags, devices, cluster, args.keep or 10))
        elif args.scaling:
            curves = scaled(flags, devices, cluster, args.strong)
            print(f"{cluster.describe()}\n\n{table(curves)}")
            if args.out:
                draw(curves, args.out)
                print(f"\nwrote {args.out}")
        else:
            print(one_layout(flags, devices, cluster))
    except (ReportedError, ValueError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    sys.exit(main())
