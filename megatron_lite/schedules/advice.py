"""What runs but wastes time or memory, in words, with what it is predicted to cost."""

from fractions import Fraction
from typing import NamedTuple

from megatron_lite.schedules import ASYNCHRONOUS, SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.interleaved import other_sizes, whole_groups
from megatron_lite.schedules.simulate import Number, chunk_costs, simulate
from megatron_lite.schedules.sizes import GROUP, Sizes

# Schedules that hold more, and one that often takes no longer with less; whether it does is simulated. A step ends for
# all ranks together, which is where zb-h2 loses what its papers count: the span bubble.
FILLED = 2  # times p: microbatches after which all rounds are alike
LEANER = {"gpipe": "1f1b", "zb-h2": "zb-h1", "dualpipev": "zbv"}


def schedule_warnings(
    name: str,
    pp_size: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    costs: tuple[Number, Number, Number] = (1, 1, 1),
    latency: Number = 0,
) -> list[str]:
    """Warnings about a schedule that runs at these sizes; `costs` are F, B and W of a rank's share of the model."""
    if name in ASYNCHRONOUS or pp_size < 2 or schedule_problems(name, pp_size, num_chunks, num_microbatches, group_size):
        return []
    if num_microbatches >= _enough(name, pp_size) and name != "interleaved" and name not in LEANER:
        return []  # nothing to say, so nothing to simulate
    timed = Forecaster(pp_size, tuple(map(Fraction, costs)), latency)
    own = timed(name, num_chunks, num_microbatches, group_size)
    found = _few_microbatches(name, num_chunks, num_microbatches, own, timed)
    if name == "interleaved":
        found += _groups(Sizes(pp_size, num_chunks, num_microbatches, group_size), own, timed)
    if name in LEANER:
        found += _leaner(LEANER[name], num_chunks, num_microbatches, own, timed)
    return [f"--pipeline-schedule {name}: {text}" for text in found]


class Forecast(NamedTuple):
    """What a step takes: its length, the part of it that a rank idles (on average), microbatches that a rank holds."""

    makespan: Number
    bubble: Number
    peak: float

    @property
    def fraction(self) -> float:
        return float(self.bubble / self.makespan) if self.makespan else 0.0

    def later(self, before: "Forecast", rounds: Number) -> "Forecast":
        """After `rounds` more of what happened since `before`."""
        return Forecast(*(now + rounds * (now - then) for now, then in zip(self, before, strict=True)))


class Forecaster:
    """Simulates named schedules on the same ranks, at the same costs of a rank's share.

    Of many microbatches only the first rounds are simulated: once the pipeline is full, every round (a microbatch, two
    where they go both ways, a group of an interleaved schedule) takes as long as the one before. Messages that take
    time can make rounds alternate; then all is simulated.
    """

    def __init__(self, pp_size: int, costs: tuple[Number, ...], latency: Number):
        self.pp_size, self.costs, self.latency = pp_size, costs, latency

    def __call__(self, name: str, num_chunks: int, num_microbatches: int, group_size: int | None = None) -> Forecast:
        groups = SCHEDULES[name].has_groups
        period = (group_size or self.pp_size) if groups else 2
        least = FILLED * self.pp_size + (2 * period if groups else 0)
        rounds = (num_microbatches - least) // period - 1  # more than the first `least` and two
        if rounds < 1 or self.latency:
            return self._simulated(name, num_chunks, num_microbatches, group_size)
        few = num_microbatches - rounds * period
        before, after = (self._simulated(name, num_chunks, number, group_size) for number in (few - period, few))
        return after.later(before, rounds)

    def _simulated(self, name: str, num_chunks: int, num_microbatches: int, group_size: int | None) -> Forecast:
        placement = schedule_placement(name, self.pp_size, num_chunks)
        schedule = build_schedule(name, self.pp_size, num_chunks, num_microbatches, group_size)
        run = simulate(schedule, placement, chunk_costs(*self.costs, placement.chunks_per_share, self.latency))
        return Forecast(run.makespan, run.sync_bubble, max(run.peak_live))


def _bubble(run: Forecast) -> str:
    return f"bubble {float(run.bubble):.4g} of {float(run.makespan):.4g}, {run.fraction:.1%} of the step"


def _enough(name: str, pp_size: int) -> int:
    """Microbatches that fill the pipeline."""
    return 2 * pp_size - 1 if name in ("zb-h2", "zbv") else pp_size


def _few_microbatches(name: str, num_chunks: int, total: int, own: Forecast, timed: Forecaster) -> list[str]:
    """Below this many the pipeline is never full."""
    enough = _enough(name, timed.pp_size)
    if total >= enough:
        return []
    full = timed(name, num_chunks, enough)
    return [
        f"{total} microbatches never fill {timed.pp_size} pipeline ranks: predicted {_bubble(own)}; "
        f"with {enough}: {full.fraction:.1%}"
    ]


def _groups(sizes: Sizes, own: Forecast, timed: Forecaster) -> list[str]:
    """Groups whose rest is too short cost time, groups larger than needed cost memory."""
    pp, chunks, total, _ = sizes
    group = sizes.group_size or pp
    better = next((size for size in range(pp, total + 1) if whole_groups(pp, total, size)), None)
    if not whole_groups(pp, total, group):
        text = (
            f"groups of {group} leave a last one of {total % group} microbatches, fewer than the {pp} pipeline ranks: "
            f"predicted {_bubble(own)}"
        )
        if better is not None:
            return [f"{text}; {GROUP} {better}: {timed('interleaved', chunks, total, better).fraction:.1%}"]
        return [f"{text}; {other_sizes(sizes)} would not waste it"]
    if better is not None and better < group:
        other = timed("interleaved", chunks, total, better)
        if other.makespan <= own.makespan and other.peak < own.peak:
            return [
                f"groups of {group} hold {own.peak:g} microbatches; {GROUP} {better} takes as long "
                f"({float(other.makespan):.4g}) with {other.peak:g}"
            ]
    return []


def _leaner(other: str, num_chunks: int, total: int, own: Forecast, timed: Forecaster) -> list[str]:
    leaner = timed(other, num_chunks, total)
    if leaner.makespan > own.makespan or leaner.peak >= own.peak:
        return []
    return [
        f"predicted step {float(own.makespan):.4g} with {own.peak:g} microbatches held per rank; {other} takes "
        f"{float(leaner.makespan):.4g} with {leaner.peak:g}"
    ]
