"""Which schedule makes the shortest step within the memory? Answered by simulating all that could.

Candidates are the named schedules, with each number of chunks that is allowed, and the list scheduler (greedy.py) on
a plain pipeline and on a V; each with every cut of the model into stages that `cuts_of` offers. Steps are compared as a
training step ends, for all ranks together. Nothing here knows what a cut is made of: planner/automatic.py does.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.check import peak_live
from megatron_lite.schedules.greedy import greedy_problems, greedy_schedule
from megatron_lite.schedules.interleaved import whole_groups
from megatron_lite.schedules.simulate import Costs, Number, Timeline, simulate

GREEDY = "greedy"  # the list scheduler's name among the schedules
MOST_LISTED = 20_000  # actions of all ranks: so many the list scheduler orders in some seconds
USEFUL = 2  # times p: microbatches per rank that the list scheduler is given at most; zero bubble needs no more


class Cut(NamedTuple):
    """One way to cut the model into the stages of a placement."""

    costs: Costs
    layers: tuple[range, ...] = ()  # of every stage; the caller's, handed back with the choice
    note: str = ""


CutsOf = Callable[[Placement], Sequence[Cut]]  # none where the model cannot be cut into so many stages


class Choice(NamedTuple):
    name: str  # of the schedule; GREEDY is the list scheduler's
    num_chunks: int
    schedule: list[list[Action]]
    report: str  # what was chosen and why, with a table of the candidates
    placement: Placement
    timeline: Timeline
    cut: Cut
    group_size: int | None  # microbatches per group, where it is not the schedule's default


class Candidate(NamedTuple):
    name: str
    num_chunks: int
    placement: Placement
    schedule: list[list[Action]] = []
    timeline: Timeline | None = None  # None if it cannot run
    note: str = ""  # why it cannot, or with which options it does
    cut: Cut = Cut(Costs())
    group_size: int | None = None

    @property
    def peak(self) -> float:
        return max(self.timeline.peak_live)


def choose(
    pp_size: int,
    num_microbatches: int,
    cuts_of: CutsOf,
    memory_limit: float | None = None,
    chunks: Collection[int] = (1, 2),
    copies: bool = False,
    names: Collection[str] = (*SCHEDULES, GREEDY),
    group_size: int | None = None,
    unit: str = "",
) -> Choice:
    """The candidate with the shortest step among those that hold at most `memory_limit` microbatches per rank.

    Ties go to the one that holds less, then to fewer chunks, then to the first in the registry and the first cut.
    `copies` allows dualpipe, which keeps every parameter twice. `group_size` is the interleaved schedule's, by default the
    smallest that wastes nothing. `unit` is that of the costs, for the report.
    """
    found = candidates(pp_size, num_microbatches, cuts_of, memory_limit, sorted(chunks), copies, names, group_size)
    runs = [candidate for candidate in found if candidate.timeline]
    fits = [candidate for candidate in runs if memory_limit is None or candidate.peak <= memory_limit]
    if not fits:
        least = f"; the least any of them holds is {min(each.peak for each in runs):g}" if runs else ""
        reasons = "" if runs else "".join(f"\n  {each.name}: {each.note}" for each in found)
        raise ScheduleError(
            f"--pipeline-memory-limit {memory_limit}: no schedule for {pp_size} pipeline ranks, {num_microbatches} "
            f"microbatches and {' or '.join(map(str, sorted(chunks)))} chunks per rank fits{least}{reasons}"
        )
    best = min(fits, key=lambda each: (_digits(each.timeline.makespan), each.peak, each.num_chunks))
    report = report_text(best, found, memory_limit, len(fits), unit)
    return Choice(best.name, best.num_chunks, best.schedule, report, best.placement, best.timeline, best.cut, best.group_size)


def least_held(pp_size: int, num_microbatches: int, chunks: Collection[int]) -> float | None:
    """The fewest microbatches per rank that any candidate holds; None where none runs. Costs do not matter for it."""
    if 1 in chunks or 2 in chunks:
        return 1.0  # the list scheduler's: it can wait until one is done
    peaks = []
    for count in chunks:
        group = _whole_group(pp_size, num_microbatches)
        if not schedule_problems("interleaved", pp_size, count, num_microbatches, group):
            lists = build_schedule("interleaved", pp_size, count, num_microbatches, group)
            peaks.append(max(peak_live(actions, count) for actions in lists))
    return min(peaks, default=None)


def _digits(time: Number) -> float:
    """Equal times compare equal, whatever order their parts were added in."""
    return float(f"{float(time):.9g}")


def candidates(
    pp_size: int,
    num_microbatches: int,
    cuts_of: CutsOf,
    memory_limit: float | None,
    chunks: Sequence[int],
    copies: bool,
    names: Collection[str],
    group_size: int | None,
) -> list[Candidate]:
    """Every named schedule and list with every cut, simulated if it can run."""
    found = []
    for name, spec in SCHEDULES.items():
        if name in names and (spec.placement_kind != "bidirectional" or copies):
            allowed = [count for count in chunks if (count > 1) == (spec.default_chunks > 1)]
            if not spec.has_groups:  # the others run one number of chunks only
                allowed = [count for count in allowed if count == spec.default_chunks]
            for count in allowed:
                found += _named(name, pp_size, count, num_microbatches, cuts_of, group_size)
    limit = min(USEFUL * pp_size, memory_limit) if memory_limit is not None else USEFUL * pp_size
    for count, kind in ((1, "loop"), (2, "v")):
        if count in chunks and GREEDY in names:
            found += _greedy(Placement(kind, pp_size, count), num_microbatches, cuts_of, limit)
    return found


def _named(name: str, pp_size: int, num_chunks: int, total: int, cuts_of: CutsOf, group: int | None) -> list[Candidate]:
    placement = schedule_placement(name, pp_size, num_chunks)
    group = (group or _whole_group(pp_size, total)) if SCHEDULES[name].has_groups else None
    if problems := schedule_problems(name, pp_size, num_chunks, total, group):
        return [Candidate(name, num_chunks, placement, note=problems[0].split(": ", 1)[-1])]
    if not (cuts := cuts_of(placement)):
        return [Candidate(name, num_chunks, placement, note=_uncut(placement))]
    schedule = build_schedule(name, pp_size, num_chunks, total, group)
    grouped = f"groups of {group}" if group else ""
    return [Candidate(name, num_chunks, placement, schedule, simulate(schedule, placement, cut.costs),
                      _join(grouped, cut.note), cut, group) for cut in cuts]  # fmt: skip


def _greedy(placement: Placement, total: int, cuts_of: CutsOf, limit: float) -> list[Candidate]:
    """The list scheduler, with the cut whose busiest rank has the least to do: it takes long, and a list only adds waits."""
    cuts = cuts_of(placement)
    if problems := greedy_problems(placement, limit) or ([] if cuts else [_uncut(placement)]):
        return [Candidate(GREEDY, placement.num_chunks, placement, note=problems[0])]
    if (actions := 3 * total * placement.num_chunks * placement.pp_size) > MOST_LISTED:
        return [Candidate(GREEDY, placement.num_chunks, placement, note=f"lists of {actions} actions take too long to make")]
    cut = min(cuts, key=lambda each: _busiest(each.costs, placement))
    schedule = greedy_schedule(placement, total, cut.costs, limit)
    note = _join("on a v" if placement.kind == "v" else "", cut.note)
    return [Candidate(GREEDY, placement.num_chunks, placement, schedule, simulate(schedule, placement, cut.costs), note, cut)]


def _busiest(costs: Costs, placement: Placement) -> Number:
    """What the busiest rank does for one microbatch."""
    chunks = range(placement.num_chunks)
    return max(sum(costs.of(Action(kind, chunk, 0), placement.stage(rank, chunk)) for chunk in chunks for kind in ("F", "BW"))
               for rank in range(placement.pp_size))  # fmt: skip


def _whole_group(pp_size: int, total: int) -> int | None:
    """The smallest group of an interleaved schedule that leaves no rest too short; None: the default, pp, does."""
    if whole_groups(pp_size, total, pp_size):
        return None
    return next((size for size in range(pp_size, total + 1) if whole_groups(pp_size, total, size)), None)


def _join(*notes: str) -> str:
    return ", ".join(filter(None, notes))


def _uncut(placement: Placement) -> str:
    return f"the model's layers cannot be cut into {placement.num_stages} stages"


def report_text(best: Candidate, found: Sequence[Candidate], memory_limit: float | None, num_fitting: int, unit: str) -> str:
    """The choice in a sentence, and every candidate in a row, shortest step first."""
    within = "" if memory_limit is None else f" that hold at most {memory_limit:g} microbatches per rank"
    step, bubble = float(best.timeline.makespan), best.timeline.sync_fraction
    chunks = f"{best.num_chunks} chunk{'s' if best.num_chunks > 1 else ''} per rank"
    lines = [
        f"chosen: {best.name} with {_join(chunks, best.note)}, step {step:.6g}{unit and ' ' + unit}, "
        f"bubble {bubble:.1%} of it, peak {best.peak:.4g} microbatches: "
        f"{'the shortest step of the ' if num_fitting > 1 else ''}{num_fitting} candidate{'s' * (num_fitting > 1)}{within}",
        f"  {'schedule':<12} {'chunks':>6} {'step':>10} {'bubble':>7} {'peak':>6}",
    ]
    order = sorted(found, key=lambda each: (each.timeline is None, each.timeline and _digits(each.timeline.makespan)))
    for each in order:
        if each.timeline is None:
            lines.append(f"  {each.name:<12} {each.num_chunks:>6} {'-':>10} {'-':>7} {'-':>6}  cannot run: {each.note}")
            continue
        over = memory_limit is not None and each.peak > memory_limit
        notes = [each.note] + ([f"over the limit of {memory_limit:g}"] if over else []) + (["<- chosen"] if each is best else [])
        numbers = f"{float(each.timeline.makespan):>10.6g} {each.timeline.sync_fraction:>7.1%} {each.peak:>6.4g}"
        lines.append(f"  {each.name:<12} {each.num_chunks:>6} {numbers}  {_join(*notes)}".rstrip())
    return "\n".join(lines)
