"""What runs but wastes time or memory, in words, with what it is predicted to cost."""

from fractions import Fraction

from megatron_lite.schedules import ASYNCHRONOUS, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.interleaved import other_sizes, whole_groups
from megatron_lite.schedules.simulate import Number, Timeline, chunk_costs, simulate
from megatron_lite.schedules.sizes import GROUP, Sizes

# Schedules that hold more, and one that often takes no longer with less; whether it does is simulated. A step ends for
# all ranks together, which is where zb-h2 loses what its papers count: the span bubble.
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
    timed = _Timed(pp_size, tuple(map(Fraction, costs)), latency)
    own = timed(name, num_chunks, num_microbatches, group_size)
    found = _few_microbatches(name, num_chunks, num_microbatches, own, timed)
    if name == "interleaved":
        found += _groups(Sizes(pp_size, num_chunks, num_microbatches, group_size), own, timed)
    if name in LEANER:
        found += _leaner(LEANER[name], num_chunks, num_microbatches, own, timed)
    return [f"--pipeline-schedule {name}: {text}" for text in found]


class _Timed:
    """Simulates named schedules on the same ranks, at the same costs of a rank's share."""

    def __init__(self, pp_size: int, costs: tuple[Number, ...], latency: Number):
        self.pp_size, self.costs, self.latency = pp_size, costs, latency

    def __call__(self, name: str, num_chunks: int, num_microbatches: int, group_size: int | None = None) -> Timeline:
        placement = schedule_placement(name, self.pp_size, num_chunks)
        schedule = build_schedule(name, self.pp_size, num_chunks, num_microbatches, group_size)
        return simulate(schedule, placement, chunk_costs(*self.costs, placement.chunks_per_share, self.latency))


def _bubble(timeline: Timeline) -> str:
    bubble, step = float(timeline.sync_bubble), float(timeline.makespan)
    return f"bubble {bubble:.4g} of {step:.4g}, {timeline.sync_fraction:.1%} of the step"


def _enough(name: str, pp_size: int) -> int:
    """Microbatches that fill the pipeline."""
    return 2 * pp_size - 1 if name in ("zb-h2", "zbv") else pp_size


def _few_microbatches(name: str, num_chunks: int, total: int, own: Timeline, timed: _Timed) -> list[str]:
    """Below this many the pipeline is never full."""
    enough = _enough(name, timed.pp_size)
    if total >= enough:
        return []
    full = timed(name, num_chunks, enough)
    return [
        f"{total} microbatches never fill {timed.pp_size} pipeline ranks: predicted {_bubble(own)}; "
        f"with {enough}: {full.sync_fraction:.1%}"
    ]


def _groups(sizes: Sizes, own: Timeline, timed: _Timed) -> list[str]:
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
            return [f"{text}; {GROUP} {better}: {timed('interleaved', chunks, total, better).sync_fraction:.1%}"]
        return [f"{text}; {other_sizes(sizes)} would not waste it"]
    if better is not None and better < group:
        other = timed("interleaved", chunks, total, better)
        if other.makespan <= own.makespan and max(other.peak_live) < max(own.peak_live):
            return [
                f"groups of {group} hold {max(own.peak_live):g} microbatches; {GROUP} {better} takes as long "
                f"({float(other.makespan):.4g}) with {max(other.peak_live):g}"
            ]
    return []


def _leaner(other: str, num_chunks: int, total: int, own: Timeline, timed: _Timed) -> list[str]:
    leaner = timed(other, num_chunks, total)
    if leaner.makespan > own.makespan or max(leaner.peak_live) >= max(own.peak_live):
        return []
    return [
        f"predicted step {float(own.makespan):.4g} with {max(own.peak_live):g} microbatches held per rank; {other} takes "
        f"{float(leaner.makespan):.4g} with {max(leaner.peak_live):g}"
    ]
