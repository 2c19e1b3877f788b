"""A schedule for costs that no named one was made for: greedy list scheduling under a memory cap.

The idea is that of the automatic scheduler of Zero Bubble Pipeline Parallelism (Qi et al., 2023): simulate the step,
and let each rank, whenever it is free, take the best action that can run.

    1   a B or an F whose input is there and, for F, whose activations fit under the cap
    2   else a waiting W, if it ends before the next B or F can start, or if memory is what keeps the next F waiting
    3   else wait for that B or F

What "best" means is a handful of yes-or-no questions (`Policy`). No answer is right for all costs, so every
combination is tried, and the list with the shortest step wins.

The cap counts what a rank holds from F until W. A forward is let in only if the oldest microbatch whose forwards are
not all done here still finds room for the rest of them: it can then always reach the loss, come back and free its
room, so no cap of at least one microbatch can end in a deadlock. Each chunk runs its microbatches in order, which
keeps the messages of every link in order for the placements with one chunk per rank and direction (`fits`).
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from megatron_lite.schedules.actions import Action, Event, Placement, ScheduleError, gives, needs
from megatron_lite.schedules.simulate import Costs, simulate


class Policy(NamedTuple):
    early_forwards: bool  # before the first B as many F as fit, not just as many as 1F1B has
    backward_first: bool  # of a B and an F that can both start now, the B
    fill: bool  # a waiting W rather than any gap, even if the B or F after it then starts later


TRIED = 4  # times p: microbatches with which policies are compared; the steps that more of them add are alike
POLICIES = tuple(Policy(*answers) for answers in product((True, False), repeat=len(Policy._fields)))


@dataclass
class _Rank:
    """What one rank has done so far."""

    next_forward: list[int]  # per chunk, the microbatch whose F comes next
    next_backward: list[int]
    free: float = 0.0  # when its last action ends
    live: int = 0  # chunk activations held
    waiting: deque[Action] = field(default_factory=deque)  # W that could run
    actions: list[Action] = field(default_factory=list)


def greedy_problems(placement: Placement, memory_limit: float | None) -> list[str]:
    """What keeps the list scheduler from working, in words."""
    found = placement.problems()
    if placement.kind == "loop" and placement.num_chunks > 1:
        found.append("a loop of several chunks shares its links among them; the list scheduler needs 1 chunk, or a v")
    if memory_limit is not None and memory_limit < 1:
        found.append(f"a limit of {memory_limit} microbatches per rank is below the 1 that any schedule needs")
    return found


def greedy_schedule(
    placement: Placement, num_microbatches: int, costs: Costs, memory_limit: float | None = None
) -> list[list[Action]]:
    """The list with the shortest step among those of all policies; at most `memory_limit` microbatches per rank.

    Of many microbatches only the first few decide on the policy.
    """
    if problems := greedy_problems(placement, memory_limit) + costs.problems(placement.num_stages):
        raise ScheduleError("; ".join(problems))
    limit = num_microbatches if memory_limit is None else memory_limit
    cap = int(limit * placement.chunks_per_share + 1e-9)
    few = min(num_microbatches, TRIED * placement.pp_size)
    lists = [list_schedule(placement, few, costs, cap, policy) for policy in POLICIES]
    steps = [simulate(schedule, placement, costs).makespan for schedule in lists]
    best = steps.index(min(steps))
    return lists[best] if few == num_microbatches else list_schedule(placement, num_microbatches, costs, cap, POLICIES[best])


def list_schedule(placement: Placement, num_microbatches: int, costs: Costs, cap: int, policy: Policy) -> list[list[Action]]:
    """One greedy pass. `cap` counts activations of chunks."""
    scheduler = _Scheduler(placement, num_microbatches, costs, cap, policy)
    moves = {rank: scheduler.move(rank) for rank in range(placement.pp_size)}
    while any(moves.values()):
        # In order of start time: what a rank cannot see yet is then never ready before what it chooses.
        rank = min((rank for rank, move in moves.items() if move), key=lambda rank: moves[rank][0])
        start, action = moves[rank]
        scheduler.run(rank, start, action)
        near = (placement.previous(rank, action.chunk), placement.next(rank, action.chunk))
        for other in {rank, *(place.rank for place in near if place)}:
            moves[other] = scheduler.move(other)
    return [rank.actions for rank in scheduler.ranks]


def _times(placement: Placement, costs: Costs) -> dict[tuple[int, int, str], float]:
    """By rank, chunk and kind. As floats: exact fractions would be slow, and the order is a heuristic anyway."""
    return {
        (rank, chunk, kind): float(costs.of(Action(kind, chunk, 0), placement.stage(rank, chunk)))
        for rank in range(placement.pp_size)
        for chunk in range(placement.num_chunks)
        for kind in "FBW"
    }


class _Scheduler:
    """The state of a simulated step."""

    def __init__(self, placement: Placement, num_microbatches: int, costs: Costs, cap: int, policy: Policy):
        self.placement, self.cap, self.policy, self.latency = placement, cap, policy, float(costs.latency)
        self.times = _times(placement, costs)
        self.slack = 1e-9 * max(self.times.values())  # times that differ by less are the same, summed otherwise
        self.numbers = [placement.microbatches(chunk, num_microbatches) for chunk in range(placement.num_chunks)]
        starts = [numbers.start for numbers in self.numbers]
        self.ranks = [_Rank(list(starts), list(starts)) for _ in range(placement.pp_size)]
        self.done: dict[Event, float] = {}

    def move(self, rank: int) -> tuple[float, Action] | None:
        """What `rank` does next and when it starts; None while it can do nothing but wait for others."""
        state = self.ranks[rank]
        open_actions = [(max(ready, state.free), action) for ready, action in self._candidates(rank)]
        soonest = min((start for start, _ in open_actions), default=None)
        if state.waiting and (soonest is None or soonest > state.free + self.slack):
            weight = state.waiting[0]
            fits = soonest is None or state.free + self._cost(rank, weight) <= soonest + self.slack
            if fits or self.policy.fill:
                return state.free, weight
        if soonest is None:
            return None
        return min((entry for entry in open_actions if entry[0] <= soonest + self.slack), key=self._preference)

    def run(self, rank: int, start: float, action: Action) -> None:
        state = self.ranks[rank]
        state.free = start + self._cost(rank, action)
        state.actions.append(action)
        self.done.update(dict.fromkeys(gives(action, rank), state.free))
        if action.kind == "F":
            state.next_forward[action.chunk] += 1
            state.live += 1
        elif action.kind == "B":
            state.next_backward[action.chunk] += 1
            state.waiting.append(action._replace(kind="W"))
        else:
            state.waiting.popleft()
            state.live -= 1

    def _cost(self, rank: int, action: Action) -> float:
        return self.times[rank, action.chunk, action.kind]

    def _preference(self, entry: tuple[float, Action]) -> tuple[bool, int, int]:
        """Late chunks first: they are nearer to the loss, and their B is what the others wait for."""
        _, action = entry
        return (action.kind == "B") != self.policy.backward_first, -action.chunk, action.microbatch

    def _candidates(self, rank: int) -> list[tuple[float, Action]]:
        """(ready, action) of every B and F whose needs have been scheduled."""
        state, found = self.ranks[rank], []
        for chunk, numbers in enumerate(self.numbers):
            microbatch = state.next_backward[chunk]
            if microbatch < state.next_forward[chunk]:
                found.append(Action("B", chunk, microbatch))
            microbatch = state.next_forward[chunk]
            if microbatch < numbers.stop and self._admits(rank, chunk):
                found.append(Action("F", chunk, microbatch))
        return [(ready, action) for action in found if (ready := self._ready(action, rank)) is not None]

    def _ready(self, action: Action, rank: int) -> float | None:
        """When everything that `action` needs is there; None if some of it has not been scheduled yet."""
        times = []
        for event in needs(action, rank, self.placement):
            if event not in self.done:
                return None
            times.append(self.done[event] + (self.latency if event.rank != rank else 0.0))
        return max(times, default=0.0)

    def _admits(self, rank: int, chunk: int) -> bool:
        """Is there room for the next F of `chunk`, and then still for the oldest microbatch's other forwards?"""
        state = self.ranks[rank]
        oldest = min(state.next_forward)
        reserved = sum(microbatch == oldest for microbatch in state.next_forward)
        reserved -= state.next_forward[chunk] == oldest
        if not self.policy.early_forwards and not any(state.next_backward) and chunk == 0:
            if state.next_forward[0] >= self._usual_warmup(rank):
                return False
        return state.live + 1 + reserved <= self.cap

    def _usual_warmup(self, rank: int) -> int:
        """Forwards of chunk 0 before the first B in 1F1B, and in ZBV."""
        behind = self.placement.pp_size - rank
        return behind if self.placement.num_chunks == 1 else 2 * behind - 1 + rank
