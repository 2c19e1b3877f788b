"""Pipeline schedules by name. A new one is one file with its build function, and one row here.

    actions.py   what an action is, where stages lie, what waits for what, the text form
    check.py     is a list of actions right?          simulate.py   when would each run?          draw.py   the picture

`build_schedule` gives the lists of all ranks, `schedule_placement` says which stage each of their chunks is.
"""

from collections.abc import Callable
from typing import NamedTuple

from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.gpipe import gpipe
from megatron_lite.schedules.one_f_one_b import one_f_one_b


def one_chunk_problems(pp_size: int, num_chunks: int, num_microbatches: int) -> list[str]:
    if num_chunks == 1:
        return []
    return [f"--num-virtual-stages-per-pipeline-rank {num_chunks}: this schedule runs 1 chunk per rank; 1 would work"]


class ScheduleSpec(NamedTuple):
    name: str  # as in --pipeline-schedule
    build: Callable[[int, int, int, int], list[Action]]  # (pp_size, pp_rank, num_chunks, num_microbatches) -> actions
    placement_kind: str  # see actions.Placement
    problems: Callable[[int, int, int], list[str]]  # (pp_size, num_chunks, num_microbatches) -> impossible, in words


SCHEDULES = {
    spec.name: spec
    for spec in (
        ScheduleSpec("gpipe", gpipe, "loop", one_chunk_problems),
        ScheduleSpec("1f1b", one_f_one_b, "loop", one_chunk_problems),
    )
}


def schedule_problems(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> list[str]:
    """Everything that keeps schedule `name` from running at these sizes, in words; empty when it runs."""
    if name not in SCHEDULES:
        return [f"--pipeline-schedule {name}: unknown; choose from {', '.join(SCHEDULES)}"]
    sizes = {"pipeline ranks": pp_size, "chunks per rank": num_chunks, "microbatches": num_microbatches}
    if small := [f"{what} = {size}" for what, size in sizes.items() if size < 1]:
        return [f"--pipeline-schedule {name}: {' and '.join(small)}; at least 1 would work"]
    found = SCHEDULES[name].problems(pp_size, num_chunks, num_microbatches)
    return [f"--pipeline-schedule {name}: {text}" for text in found]


def schedule_placement(name: str, pp_size: int, num_chunks: int) -> Placement:
    """Where the stages of schedule `name` lie."""
    return Placement(SCHEDULES[name].placement_kind, pp_size, num_chunks)


def build_schedule(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> list[list[Action]]:
    """The action lists of all ranks; ScheduleError with every problem if it cannot run at these sizes."""
    if problems := schedule_problems(name, pp_size, num_chunks, num_microbatches):
        raise ScheduleError("\n".join(problems))
    return [SCHEDULES[name].build(pp_size, rank, num_chunks, num_microbatches) for rank in range(pp_size)]
