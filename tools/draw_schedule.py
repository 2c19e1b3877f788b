"""Draw a pipeline schedule, with its bubble and its memory: in the terminal, as a picture, or for Perfetto.

    python tools/draw_schedule.py --schedule zbv --pp 4 --microbatches 8
    python tools/draw_schedule.py --schedule zb-h1 --costs 1,1.2,0.8 --latency 0.05 --out zb.html
    python tools/draw_schedule.py --schedule auto --memory-limit 4 --costs 1,1.2,0.8
    python tools/draw_schedule.py --schedule zbv --out mine.txt
    python tools/draw_schedule.py --schedule-file mine.txt

Colors and folding to the window's width only on a terminal; what a file or a pipe gets is plain text.
"""

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any folder
from megatron_lite.schedules import ASYNCHRONOUS, EVERY, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.advice import schedule_warnings
from megatron_lite.schedules.asynchronous import weights_text
from megatron_lite.schedules.auto import Cut, choose
from megatron_lite.schedules.check import check
from megatron_lite.schedules.draw import draw
from megatron_lite.schedules.file import format_file, read_schedule
from megatron_lite.schedules.html import draw_html
from megatron_lite.schedules.simulate import Timeline, chunk_costs, simulate
from megatron_lite.schedules.svg import draw_svg
from megatron_lite.schedules.trace import chrome_trace

PICTURES = {
    ".svg": lambda timeline, title: draw_svg(timeline, title),
    ".html": lambda timeline, title: draw_html({title: timeline}, title),
    ".json": lambda timeline, title: json.dumps(chrome_trace(timeline, title)),
    ".txt": lambda timeline, title: format_file(
        [[span.action for span in spans] for spans in timeline.spans], timeline.placement
    ),
}


class Drawn(NamedTuple):
    """What is drawn, and what is said about it."""

    title: str
    schedule: list[list[Action]]
    placement: Placement
    num_microbatches: int
    remarks: list[str]


def parse_costs(text: str) -> tuple[float, ...]:
    """`1,1,1` -> costs of F, B and W."""
    try:
        costs = tuple(float(word) for word in text.split(","))
    except ValueError:
        costs = ()
    if len(costs) != 3 or not all(0 <= cost < float("inf") for cost in costs) or not any(costs):
        raise argparse.ArgumentTypeError(f"{text!r} should be three times F,B,W >= 0, such as 1,1,1 or 1,1.2,0.8")
    return costs


def parse_out(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} should end in {', '.join(PICTURES)}")
    return Path(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--schedule", choices=(*EVERY, "auto"), default="1f1b", help="which order (default 1f1b); auto: the shortest"
    )
    which.add_argument("--schedule-file", metavar="FILE", help="a file such as --out x.txt writes; sizes are the file's")
    add("--pp", type=int, default=4, help="pipeline ranks (default 4)")
    add("--microbatches", type=int, default=8, help="microbatches per step (default 8)")
    add("--chunks", type=int, help="chunks (virtual stages) per rank (default: as many as the schedule needs, 1 or 2)")
    add("--group-size", type=int, metavar="G", help="microbatches per group of interleaved (default: pipeline ranks)")
    add("--per-update", type=int, metavar="M", help="microbatches per update of an asynchronous schedule (default 1; 2bw: pp)")
    add(
        "--costs",
        type=parse_costs,
        default=(1.0, 1.0, 1.0),
        metavar="F,B,W",
        help="time of forward, input gradient and weight gradient of one microbatch on one rank (default 1,1,1)",
    )
    add("--latency", type=float, default=0, metavar="C", help="time a message takes, in the same unit (default 0)")
    add("--overlap", type=float, metavar="O", help="run F next to BW of another chunk at once; hidden part, 0 to 1")
    add("--memory-limit", type=float, metavar="N", help="for auto: most microbatches a rank may hold")
    add("--out", type=parse_out, metavar="FILE", help="a picture (.svg, .html), a Chrome trace (.json), the lists (.txt)")
    return parser


def named(args: argparse.Namespace) -> Drawn:
    chunks = EVERY[args.schedule].default_chunks if args.chunks is None else args.chunks
    if problems := schedule_problems(args.schedule, args.pp, chunks, args.microbatches, args.group_size):
        raise ScheduleError("\n".join(problems))
    schedule = build_schedule(args.schedule, args.pp, chunks, args.microbatches, args.group_size)
    if args.schedule in ASYNCHRONOUS:
        remarks = versions_of(args, schedule)
    else:
        remarks = schedule_warnings(args.schedule, args.pp, chunks, args.microbatches, args.group_size, args.costs, args.latency)
    return Drawn(args.schedule, schedule, schedule_placement(args.schedule, args.pp, chunks), args.microbatches, remarks)


def versions_of(args: argparse.Namespace, schedule: list[list[Action]]) -> list[str]:
    """Which weights each action uses. The bubble is that of filling and draining once: in between there is none."""
    each = args.per_update if args.per_update is not None else args.pp if args.schedule == "pipedream-2bw" else 1
    if problems := schedule_problems(args.schedule, args.pp, 1, each):
        raise ScheduleError("\n".join(problems))
    lines = [f"rank {rank}  {weights_text(args.schedule, actions, each)}" for rank, actions in enumerate(schedule)]
    return [f"weights, by updates made before them; | an update, after every {each} microbatch(es), without a flush:", *lines]


def chosen(args: argparse.Namespace) -> Drawn:
    choice = choose(
        args.pp,
        args.microbatches,
        lambda placement: [Cut(chunk_costs(*args.costs, placement.chunks_per_share, args.latency))],
        args.memory_limit,
        (1, 2) if args.chunks is None else range(1, args.chunks + 1),
    )
    return Drawn(f"auto ({choice.name})", choice.schedule, choice.placement, args.microbatches, [choice.report])


def from_file(args: argparse.Namespace) -> Drawn:
    """Sizes follow from the file; the checker says what is wrong with it."""
    file = read_schedule(args.schedule_file)
    if problems := file.problems(len(file.schedule), file.num_microbatches):
        raise ScheduleError(problems[0])
    return Drawn(Path(file.path).name, file.schedule, file.placement(), file.num_microbatches, [])


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
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.per_update is not None and (args.schedule_file or args.schedule not in ASYNCHRONOUS):
        parser.error(f"--per-update: only {', '.join(ASYNCHRONOUS)} update within the picture")
    source = from_file if args.schedule_file else chosen if args.schedule == "auto" else named
    try:
        title, schedule, placement, num_microbatches, remarks = source(args)
        check(schedule, placement, num_microbatches)
        costs = chunk_costs(*args.costs, placement.chunks_per_share, args.latency, args.overlap)
        timeline = simulate(schedule, placement, costs)
    except (ScheduleError, OSError) as error:
        parser.error(str(error))
    if args.out:
        args.out.write_text(PICTURES[args.out.suffix](timeline, title), encoding="utf-8")
        print(f"wrote {args.out}")
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else None
        print(draw(timeline, title=title, width=width, color=terminal))
    print()
    print("\n".join([summary(timeline), *remarks]))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    main()
