"""Which schedule makes the shortest step within the memory? Answered by simulating all that could.

Candidates are the named schedules, with each number of chunks that is allowed, and the list scheduler (greedy.py) on
a plain pipeline and on a V. Steps are compared as a training step ends, for all ranks together.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.greedy import greedy_problems, greedy_schedule
from megatron_lite.schedules.interleaved import whole_groups
from megatron_lite.schedules.simulate import Costs, Number, Timeline, simulate

CostsOf = Callable[[int], Costs | None]  # number of stages -> what each costs; None if the model cannot be cut so
USEFUL = 2  # times p: microbatches per rank that the list scheduler is given at most; zero bubble needs no more


class Choice(NamedTuple):
    name: str  # of the schedule; `greedy` is the list scheduler's
    num_chunks: int
    schedule: list[list[Action]]
    report: str  # what was chosen and why, with a table of the candidates
    placement: Placement
    timeline: Timeline


class Candidate(NamedTuple):
    name: str
    num_chunks: int
    placement: Placement
    schedule: list[list[Action]]
    timeline: Timeline | None  # None if it cannot run
    note: str  # why it cannot, or with which options it does

    @property
    def peak(self) -> float:
        return max(self.timeline.peak_live)


def layer_costs(layers: Sequence[tuple[Number, Number, Number]], ranges: Sequence[tuple[int, int]], latency: Number = 0) -> Costs:
    """Costs of stages from F, B, W of each layer (embedding and head counted with the first and the last) and the
    layers begin..end of each stage."""
    sums = [[sum(layer[part] for layer in layers[begin:end]) for begin, end in ranges] for part in range(3)]
    return Costs(*sums, latency)


def choose(
    pp_size: int,
    num_microbatches: int,
    costs_of: CostsOf,
    memory_limit: float | None = None,
    chunks: Collection[int] = (1, 2),
    copies: bool = False,
) -> Choice:
    """The candidate with the shortest step among those that hold at most `memory_limit` microbatches per rank.

    Ties go to the one that holds less, then to fewer chunks, then to the first in the registry. `copies` allows
    dualpipe, which keeps every parameter twice.
    """
    found = candidates(pp_size, num_microbatches, costs_of, memory_limit, sorted(chunks), copies)
    runs = [candidate for candidate in found if candidate.timeline]
    fits = [candidate for candidate in runs if memory_limit is None or candidate.peak <= memory_limit]
    if not fits:
        least = f"; the least any of them holds is {min(each.peak for each in runs):g}" if runs else ""
        raise ScheduleError(
            f"--pipeline-memory-limit {memory_limit}: no schedule for {pp_size} pipeline ranks, {num_microbatches} "
            f"microbatches and {' or '.join(map(str, sorted(chunks)))} chunks per rank fits{least}"
        )
    best = min(fits, key=lambda each: (_digits(each.timeline.makespan), each.peak, each.num_chunks))
    report = report_text(best, found, memory_limit, len(fits))
    return Choice(best.name, best.num_chunks, best.schedule, report, best.placement, best.timeline)


def _digits(time: Number) -> float:
    """Equal times compare equal, whatever order their parts were added in."""
    return float(f"{float(time):.9g}")


def candidates(
    pp_size: int,
    num_microbatches: int,
    costs_of: CostsOf,
    memory_limit: float | None,
    chunks: Sequence[int],
    copies: bool,
) -> list[Candidate]:
    """Every named schedule and list, simulated if it can run."""
    found = []
    for name, spec in SCHEDULES.items():
        if spec.placement_kind != "bidirectional" or copies:
            allowed = [count for count in chunks if (count > 1) == (spec.default_chunks > 1)]
            if not spec.has_groups:  # the others run one number of chunks only
                allowed = [count for count in allowed if count == spec.default_chunks]
            found += [_named(name, pp_size, count, num_microbatches, costs_of) for count in allowed]
    limit = min(USEFUL * pp_size, memory_limit) if memory_limit is not None else USEFUL * pp_size
    for count, kind in ((1, "loop"), (2, "v")):
        if count in chunks:
            found.append(_greedy(Placement(kind, pp_size, count), num_microbatches, costs_of, limit))
    return found


def _named(name: str, pp_size: int, num_chunks: int, total: int, costs_of: CostsOf) -> Candidate:
    placement = schedule_placement(name, pp_size, num_chunks)
    group, note = None, ""
    if SCHEDULES[name].has_groups and not whole_groups(pp_size, total, pp_size):
        group = next((size for size in range(pp_size, total + 1) if whole_groups(pp_size, total, size)), None)
        note = f"groups of {group}" if group else ""
    costs = costs_of(placement.num_stages)
    if problems := schedule_problems(name, pp_size, num_chunks, total, group):
        return Candidate(name, num_chunks, placement, [], None, problems[0].split(": ", 1)[-1])
    if costs is None:
        return Candidate(name, num_chunks, placement, [], None, _uncut(placement))
    schedule = build_schedule(name, pp_size, num_chunks, total, group)
    return Candidate(name, num_chunks, placement, schedule, simulate(schedule, placement, costs), note)


def _greedy(placement: Placement, total: int, costs_of: CostsOf, limit: float) -> Candidate:
    costs = costs_of(placement.num_stages)
    problems = greedy_problems(placement, limit) or ([_uncut(placement)] if costs is None else [])
    if problems:
        return Candidate("greedy", placement.num_chunks, placement, [], None, problems[0])
    schedule = greedy_schedule(placement, total, costs, limit)
    note = "on a v" if placement.kind == "v" else ""
    return Candidate("greedy", placement.num_chunks, placement, schedule, simulate(schedule, placement, costs), note)


def _uncut(placement: Placement) -> str:
    return f"the model's layers cannot be cut into {placement.num_stages} stages"


def report_text(best: Candidate, found: Sequence[Candidate], memory_limit: float | None, num_fitting: int) -> str:
    """The choice in a sentence, and every candidate in a row, shortest step first."""
    within = "" if memory_limit is None else f" that hold at most {memory_limit:g} microbatches per rank"
    step, bubble = float(best.timeline.makespan), best.timeline.sync_fraction
    lines = [
        f"chosen: {best.name} with {best.num_chunks} chunk{'s' if best.num_chunks > 1 else ''} per rank, "
        f"step {step:.6g}, bubble {bubble:.1%} of it, peak {best.peak:g} microbatches: "
        f"the shortest step of the {num_fitting} schedules{within}",
        f"  {'schedule':<12} {'chunks':>6} {'step':>10} {'bubble':>7} {'peak':>6}",
    ]
    order = sorted(found, key=lambda each: (each.timeline is None, each.timeline and _digits(each.timeline.makespan)))
    for each in order:
        if each.timeline is None:
            lines.append(f"  {each.name:<12} {each.num_chunks:>6} {'-':>10} {'-':>7} {'-':>6}  cannot run: {each.note}")
            continue
        over = memory_limit is not None and each.peak > memory_limit
        notes = [each.note] + ([f"over the limit of {memory_limit:g}"] if over else []) + (["<- chosen"] if each is best else [])
        numbers = f"{float(each.timeline.makespan):>10.6g} {each.timeline.sync_fraction:>7.1%} {each.peak:>6g}"
        lines.append(f"  {each.name:<12} {each.num_chunks:>6} {numbers}  {', '.join(filter(None, notes))}".rstrip())
    return "\n".join(lines)
