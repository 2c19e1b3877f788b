"""Draw a pipeline schedule in the terminal, with its bubble and its memory.

    python tools/draw_schedule.py --schedule 1f1b --pp 4 --microbatches 8

Colors and folding to the window's width only on a terminal; what a file or a pipe gets is plain text.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any folder
from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.check import check
from megatron_lite.schedules.draw import draw
from megatron_lite.schedules.simulate import Timeline, chunk_costs, simulate


def parse_costs(text: str) -> tuple[float, ...]:
    """`1,1,1` -> costs of F, B and W."""
    try:
        costs = tuple(float(word) for word in text.split(","))
    except ValueError:
        costs = ()
    if len(costs) != 3 or not all(0 <= cost < float("inf") for cost in costs) or not any(costs):
        raise argparse.ArgumentTypeError(f"{text!r} should be three times F,B,W >= 0, such as 1,1,1 or 1,1.2,0.8")
    return costs


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="which order (default 1f1b)")
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per step (default 8)")
    parser.add_argument("--chunks", type=int, default=1, help="chunks (virtual stages) per rank (default 1)")
    parser.add_argument(
        "--costs",
        type=parse_costs,
        default=(1.0, 1.0, 1.0),
        metavar="F,B,W",
        help="time of forward, input gradient and weight gradient of one microbatch on one rank (default 1,1,1)",
    )
    args = parser.parse_args(argv)
    if problems := schedule_problems(args.schedule, args.pp, args.chunks, args.microbatches):
        parser.error("\n".join(problems))
    return args


def summary(timeline: Timeline) -> str:
    """The numbers under the picture."""
    sync, span, step = float(timeline.sync_bubble), float(timeline.span_bubble), float(timeline.makespan)
    parts = f"{sync / step:.1%} of the step, {sync / (step - sync):.1%} of the work"
    peaks = " ".join(f"{peak:g}" for peak in timeline.peak_live)
    return "\n".join(
        [
            f"bubble            {sync:g} of {step:g} = {parts}",
            f"without barrier   {span:g} (if no rank waited for the others at the end of the step)",
            f"peak activations  {peaks} (microbatches per rank, rank 0 first)",
        ]
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    schedule = build_schedule(args.schedule, args.pp, args.chunks, args.microbatches)
    placement = schedule_placement(args.schedule, args.pp, args.chunks)
    check(schedule, placement, args.microbatches)
    timeline = simulate(schedule, placement, chunk_costs(*args.costs, args.chunks))
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    print(draw(timeline, title=args.schedule, width=width, color=terminal))
    print()
    print(summary(timeline))


if __name__ == "__main__":
    main()
