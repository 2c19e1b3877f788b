"""When would each action run? Costs in, timeline out: makespan, bubble, memory. Nothing is executed.

Two bubbles are told apart, as papers mean different ones:

    sync bubble = makespan - busy               the step ends for all ranks together (gradient clipping, overflow check)
    span bubble = max over ranks (end - start) - busy     reachable only if a rank may begin its next step on its own

The first is what a training step pays here. "Zero bubble" in the Zero Bubble papers (Qi et al., 2023) is the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megatron_lite.schedules.actions import Action, Event, Placement, ScheduleError, gives, needs, overlap_pairs
from megatron_lite.schedules.check import Schedule, execution_order, peak_live

Number = int | float | Fraction  # integers and fractions stay exact


@dataclass(frozen=True)
class Costs:
    """Time of F, B and W on one stage (one chunk), a number or one per stage; BW = B + W. Latency per message.

    An F and a BW of another chunk right after it may run at the same time (`actions.overlap_pairs`). With `overlap`
    None they run one after the other. Else they start together, when both can, and end together, F + BW - overlap *
    min(F, BW) later: 0 hides nothing, 1 all of the shorter one.
    """

    forward: Number | Sequence[Number] = 1
    input_grad: Number | Sequence[Number] = 1
    weight_grad: Number | Sequence[Number] = 1
    latency: Number = 0
    overlap: Number | None = None

    def of(self, action: Action, stage: int) -> Number:
        table = {"F": self.forward, "B": self.input_grad, "W": self.weight_grad}
        prices = [table[part] for part in action.parts]
        return sum(price[stage] if isinstance(price, Sequence) else price for price in prices)

    def problems(self, num_stages: int) -> list[str]:
        """What is wrong with these costs for a pipeline of `num_stages` stages, in words."""
        found = [] if self.latency >= 0 else [f"latency {self.latency} is negative"]
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            found.append(f"overlap {self.overlap} is no part of an action; it goes from 0 (none) to 1 (all hidden)")
        for name in ("forward", "input_grad", "weight_grad"):
            price = getattr(self, name)
            prices = price if isinstance(price, Sequence) else [price]
            if isinstance(price, Sequence) and len(price) != num_stages:
                found.append(f"{name} costs are given for {len(price)} stages, the pipeline has {num_stages}")
            if any(cost < 0 for cost in prices):
                found.append(f"{name} cost {min(prices)} is negative")
        return found


def chunk_costs(
    forward: Number,
    input_grad: Number,
    weight_grad: Number,
    num_chunks: int,
    latency: Number = 0,
    overlap: Number | None = None,
) -> Costs:
    """Costs of one chunk from those of a rank's whole share, so that schedules with different chunks compare.

    `num_chunks` are those that make up the share (`Placement.chunks_per_share`).
    """
    shares = [Fraction(cost) / num_chunks for cost in (forward, input_grad, weight_grad)]
    return Costs(*shares, latency, overlap)


class Span(NamedTuple):
    """One action with its start and end."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    placement: Placement
    spans: tuple[tuple[Span, ...], ...]  # per rank, in time order
    peak_live: tuple[float, ...]  # per rank, microbatches held until W
    peak_live_early: tuple[float, ...]  # per rank, microbatches held until B

    @property
    def num_microbatches(self) -> int:
        return 1 + max(span.action.microbatch for spans in self.spans for span in spans)

    @property
    def makespan(self) -> Number:
        return max(spans[-1].end for spans in self.spans)

    @property
    def busy(self) -> tuple[Number, ...]:
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def idle(self) -> tuple[Number, ...]:
        """Per rank, between the first start and the last end of the step."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def sync_bubble(self) -> Number:
        """Idle time of a rank, averaged over ranks: the same on all of them when stages cost the same."""
        return sum(self.idle) / len(self.idle)

    @property
    def sync_fraction(self) -> float:
        """Sync bubble as a part of the step."""
        return float(self.sync_bubble / self.makespan) if self.makespan else 0.0

    @property
    def span_bubble(self) -> Number:
        """What would be left of the bubble if no rank waited for the others at the end of the step."""
        longest = max(spans[-1].end - spans[0].start for spans in self.spans)
        return sum(longest - busy for busy in self.busy) / len(self.busy)


def simulate(schedule: Schedule, placement: Placement, costs: Costs | None = None) -> Timeline:
    """Start every action as soon as its rank is free and what it needs is there. Sending costs the sender nothing.

    The schedule is one that `check` accepts. Two actions that overlap start and end together; the timeline divides
    their time between them, so that spans never cover each other.
    """
    costs = costs or Costs()
    if problems := costs.problems(placement.num_stages):
        raise ScheduleError("; ".join(problems))
    if len(schedule) != placement.pp_size or not all(schedule):
        raise ScheduleError(f"every one of the {placement.pp_size} ranks needs actions; got {len(schedule)} lists")
    pairs = [frozenset() if costs.overlap is None else overlap_pairs(actions) for actions in schedule]
    spans: list[list[Span]] = [[] for _ in schedule]
    done: dict[Event, Number] = {}
    for rank, index in execution_order(schedule, placement, pairs):
        if index - 1 in pairs[rank]:
            continue  # ran with the one before it
        together = schedule[rank][index : index + 1 + (index in pairs[rank])]
        events = [event for action in together for event in needs(action, rank, placement)]
        ready = [done[event] + (costs.latency if event.rank != rank else 0) for event in events]
        start = max([spans[rank][-1].end if spans[rank] else 0, *ready])
        times = [costs.of(action, placement.stage(rank, action.chunk)) for action in together]
        end = start + sum(times) - (costs.overlap * min(times) if len(times) > 1 else 0)
        if len(times) > 1 and end > start:
            middle = start + (end - start) * times[0] / sum(times)
            spans[rank] += [Span(together[0], start, middle), Span(together[1], middle, end)]
        else:
            spans[rank] += [Span(action, start, end) for action in together]
        done.update((event, end) for action in together for event in gives(action, rank))
    return Timeline(
        placement=placement,
        spans=tuple(map(tuple, spans)),
        peak_live=tuple(peak_live(actions, placement.chunks_per_share) for actions in schedule),
        peak_live_early=tuple(peak_live(actions, placement.chunks_per_share, freed_by="B") for actions in schedule),
    )
