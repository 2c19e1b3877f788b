"""Pipeline schedules by name. A new one is one file with its build function, and one row here.

    actions.py    what an action is, where stages lie, what waits for what, the text form
    check.py      is a list of actions right?          simulate.py   when would each run?
    advice.py     what runs but wastes time            sizes.py      the words in which sizes are refused
    greedy.py     a list for any costs                 auto.py       which schedule is shortest and fits?
    file.py       a list from a text file               asynchronous.py   which weights each action uses without a flush
    draw.py       the picture as text                  svg.py, html.py, trace.py   for people and for Perfetto

`build_schedule` gives the lists of all ranks, `schedule_placement` says which stage each of their chunks is.
"""

from collections.abc import Callable
from typing import NamedTuple

from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.asynchronous import two_buffer_problems
from megatron_lite.schedules.dualpipe import dualpipe, dualpipe_problems
from megatron_lite.schedules.dualpipev import dualpipev, dualpipev_problems
from megatron_lite.schedules.gpipe import gpipe
from megatron_lite.schedules.interleaved import interleaved, interleaved_problems
from megatron_lite.schedules.one_f_one_b import one_f_one_b
from megatron_lite.schedules.sizes import GROUP, Sizes, one_chunk_problems, two_chunk_problems
from megatron_lite.schedules.zb_h1 import zb_h1
from megatron_lite.schedules.zb_h2 import zb_h2
from megatron_lite.schedules.zbv import zbv


class ScheduleSpec(NamedTuple):
    name: str  # as in --pipeline-schedule
    build: Callable[..., list[Action]]  # (pp_size, pp_rank, num_chunks, num_microbatches[, group_size]) -> actions
    placement_kind: str  # see actions.Placement
    problems: Callable[[Sizes], list[str]]  # what makes sizes impossible, in words
    default_chunks: int = 1
    has_groups: bool = False  # takes a group_size


SCHEDULES = {
    spec.name: spec
    for spec in (
        ScheduleSpec("gpipe", gpipe, "loop", one_chunk_problems),
        ScheduleSpec("1f1b", one_f_one_b, "loop", one_chunk_problems),
        ScheduleSpec("interleaved", interleaved, "loop", interleaved_problems, default_chunks=2, has_groups=True),
        ScheduleSpec("zb-h1", zb_h1, "loop", one_chunk_problems),
        ScheduleSpec("zb-h2", zb_h2, "loop", one_chunk_problems),
        ScheduleSpec("zbv", zbv, "v", two_chunk_problems, default_chunks=2),
        ScheduleSpec("dualpipev", dualpipev, "v", dualpipev_problems, default_chunks=2),
        ScheduleSpec("dualpipe", dualpipe, "bidirectional", dualpipe_problems, default_chunks=2),
    )
}
# Not flushed between updates: 1F1B over all microbatches from one drain to the next. Their gradients are of older weights.
ASYNCHRONOUS = {
    spec.name: spec
    for spec in (
        ScheduleSpec("pipedream", one_f_one_b, "loop", one_chunk_problems),
        ScheduleSpec("pipedream-2bw", one_f_one_b, "loop", two_buffer_problems),
        ScheduleSpec("pipemare", one_f_one_b, "loop", one_chunk_problems),
    )
}
EVERY = SCHEDULES | ASYNCHRONOUS


def schedule_problems(
    name: str, pp_size: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> list[str]:
    """Everything that keeps schedule `name` from running at these sizes, in words; empty when it runs."""
    if name not in EVERY:
        return [f"--pipeline-schedule {name}: unknown; choose from {', '.join(EVERY)}"]
    sizes = {"pipeline ranks": pp_size, "chunks per rank": num_chunks, "microbatches": num_microbatches}
    if group_size is not None:
        sizes["microbatches per group"] = group_size
    if small := [f"{what} = {size}" for what, size in sizes.items() if size < 1]:
        return [f"--pipeline-schedule {name}: {' and '.join(small)}; at least 1 would work"]
    found = EVERY[name].problems(Sizes(pp_size, num_chunks, num_microbatches, group_size))
    if group_size is not None and not EVERY[name].has_groups:
        found.append(f"{GROUP} {group_size}: this schedule runs no groups; leave it out, or use interleaved")
    return [f"--pipeline-schedule {name}: {text}" for text in found]


def schedule_placement(name: str, pp_size: int, num_chunks: int) -> Placement:
    """Where the stages of schedule `name` lie."""
    return Placement(EVERY[name].placement_kind, pp_size, num_chunks)


def build_schedule(
    name: str, pp_size: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> list[list[Action]]:
    """The action lists of all ranks; ScheduleError with every problem if it cannot run at these sizes."""
    if problems := schedule_problems(name, pp_size, num_chunks, num_microbatches, group_size):
        raise ScheduleError("\n".join(problems))
    extra = (group_size,) if group_size is not None else ()
    return [EVERY[name].build(pp_size, rank, num_chunks, num_microbatches, *extra) for rank in range(pp_size)]
