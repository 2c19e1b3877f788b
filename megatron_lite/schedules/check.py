"""Is a schedule right? Answered before any tensor moves, for any list of actions, whoever wrote it.

In this order, so that the message names the first thing that is wrong:

1. every action is one: known kind, chunk and microbatch that exist;
2. on each rank each (chunk, microbatch) runs F once, then its backward once (BW, or B and later W);
3. no rank waits for ever: running the lists with blocking waits reaches their end;
4. on each link the messages of one kind leave in the order in which they are expected, as transports keep order.

The report counts live activations in units of one microbatch of a rank's layers. They are held from F until W has
run, as W still needs the inputs of the linears; `peak_live_early` is what is left if B already freed everything.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_lite.schedules.actions import (
    PARTS,
    Action,
    Event,
    Placement,
    ScheduleError,
    gives,
    needs,
    received,
    sent,
)

Schedule = Sequence[Sequence[Action]]  # one list of actions per pipeline rank
MOST_WAITS = 8  # ranks that a deadlock message names


@dataclass(frozen=True)
class CheckReport:
    num_actions: int
    num_messages: int
    peak_live: tuple[float, ...]  # per rank, held until W
    peak_live_early: tuple[float, ...]  # per rank, held until B


def check(schedule: Schedule, placement: Placement, num_microbatches: int) -> CheckReport:
    """Raise ScheduleError at the first bad action, or report what the schedule costs."""
    if problems := placement.problems():
        raise ScheduleError("; ".join(problems))
    if len(schedule) != placement.pp_size:
        raise ScheduleError(f"the schedule has {len(schedule)} ranks, the placement {placement.pp_size}")
    for rank, actions in enumerate(schedule):
        _check_rank(rank, actions, placement, num_microbatches)
    execution_order(schedule, placement)
    return CheckReport(
        num_actions=sum(len(actions) for actions in schedule),
        num_messages=_check_links(schedule, placement),
        peak_live=tuple(peak_live(actions, placement.chunks_per_share) for actions in schedule),
        peak_live_early=tuple(peak_live(actions, placement.chunks_per_share, freed_by="B") for actions in schedule),
    )


def peak_live(actions: Sequence[Action], num_chunks: int, freed_by: str = "W") -> float:
    """Most microbatches alive at once on one rank, held from F until `freed_by` (W or B); a chunk weighs 1/num_chunks.

    `num_chunks` are those that make up a rank's share of the model (`Placement.chunks_per_share`).
    It follows from the order alone: whatever the actions cost, a rank runs them one after another.
    """
    live = peak = 0
    for action in actions:
        live += "F" in action.parts
        peak = max(peak, live)
        live -= freed_by in action.parts
    return peak / num_chunks


def execution_order(schedule: Schedule, placement: Placement, pairs: Sequence[Collection[int]] = ()) -> list[tuple[int, int]]:
    """(rank, index) of every action, each after all it needs; or a ScheduleError that says who waits for what.

    `pairs` are, for each rank, the indexes of actions that start only when the one after them can start too.
    """

    def wanted(rank: int) -> list[Event]:
        index = at[rank]
        joined = bool(pairs) and index in pairs[rank]
        return [event for action in schedule[rank][index : index + 1 + joined] for event in needs(action, rank, placement)]

    at = [0] * len(schedule)
    done: set[Event] = set()
    order: list[tuple[int, int]] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions) and done.issuperset(wanted(rank)):
                order.append((rank, at[rank]))
                done.update(gives(actions[at[rank]], rank))
                at[rank] += 1
                moved = True
    waits, stuck = [], []
    for rank, actions in enumerate(schedule):
        if at[rank] < len(actions):
            stuck.append(rank)
            missing = [event for event in wanted(rank) if event not in done]
            waits.append(f"{_name(rank, at[rank], actions[at[rank]])} waits for {' and '.join(map(str, missing))}")
    if waits:
        more = [f"and {len(waits) - MOST_WAITS} more ranks"] if len(waits) > MOST_WAITS else []
        raise ScheduleError("deadlock: " + "; ".join(waits[:MOST_WAITS] + more), stuck[0])
    return order


def _name(rank: int, index: int, action: Action) -> str:
    return f"rank {rank}, action {index} ({action})"


def _check_rank(rank: int, actions: Sequence[Action], placement: Placement, num_microbatches: int) -> None:
    """Rules 1 and 2: what can be seen on one rank alone."""
    done: set[Event] = set()
    for index, action in enumerate(actions):
        name = _name(rank, index, action)
        if action.kind not in PARTS:
            raise ScheduleError(f"{name}: unknown kind {action.kind!r}; choose from {', '.join(PARTS)}", rank)
        if not 0 <= action.chunk < placement.num_chunks:
            raise ScheduleError(f"{name}: chunk {action.chunk} is not in 0..{placement.num_chunks - 1}", rank)
        numbers = placement.microbatches(action.chunk, num_microbatches)
        if action.microbatch not in numbers:
            through = f" of chunk {action.chunk}" if len(numbers) < num_microbatches else ""
            among = f"{numbers.start}..{numbers.stop - 1}{through}"
            raise ScheduleError(f"{name}: microbatch {action.microbatch} is not in {among}", rank)
        for event in gives(action, rank):
            if event in done:
                raise ScheduleError(f"{name}: {event} runs a second time", rank)
        for event in needs(action, rank, placement):
            # A chunk of the same rank may be a neighbour (the turn of a v); that is rule 3's business.
            if event.rank == rank and event.chunk == action.chunk and event not in done:
                raise ScheduleError(f"{name}: comes before {event}", rank)
        done.update(gives(action, rank))
    for chunk in range(placement.num_chunks):
        for microbatch in placement.microbatches(chunk, num_microbatches):
            for part, words in (("F", "forward"), ("B", "backward"), ("W", "weight gradient")):
                if Event(part, rank, chunk, microbatch) not in done:
                    missing = Action(part, chunk, microbatch)
                    hint = "" if part == "F" else f" (nor {Action('BW', chunk, microbatch)})"
                    raise ScheduleError(f"rank {rank} never runs {missing}{hint}: a {words} is missing", rank)


def _check_links(schedule: Schedule, placement: Placement) -> int:
    """Rule 4; returns the number of messages. Every message has a sender and a receiver once rules 2 and 3 hold."""
    sends, receives = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            if message := sent(action, rank, placement):
                sends[rank, message.target.rank, message.kind].append(message)
            if message := received(action, rank, placement):
                receives[message.source.rank, rank, message.kind].append(message)
    for (source, target, kind), messages in sends.items():
        for index, (out, into) in enumerate(zip(messages, receives[source, target, kind], strict=True)):
            if out != into:
                part = "F" if kind == "activation" else "B"
                raise ScheduleError(
                    f"rank {source} -> rank {target}, {kind} {index}: sent is the result of "
                    f"{Action(part, out.source.chunk, out.microbatch)}, expected that of "
                    f"{Action(part, into.source.chunk, into.microbatch)}; both ranks must run them in the same order",
                    target,
                )
    return sum(map(len, sends.values()))
