"""Speed-up and efficiency of a layout as devices are added: what `tools/plan.py --scaling` draws.

    weak     every data-parallel rank keeps its share of the batch: the batch grows with dp
    strong   the batch stays; more ranks have fewer microbatches each, and the pipeline's bubble grows

    speed-up     tokens per second over those of one device that had all the memory it needs
    efficiency   speed-up / devices
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.planner.cluster import Cluster
from megatron_lite.planner.search import Layout, Pricer, cuts_evenly, with_layout
from megatron_lite.schedules import schedule_problems


class Point(NamedTuple):
    devices: int
    seconds: float
    speed_up: float
    efficiency: float
    fits: bool


class Curve(NamedTuple):
    name: str
    points: list[Point]


def chosen_layouts(config: Config, node: int) -> dict[str, Layout]:
    """What is compared: each axis alone, and the three together. dp 0: what the devices leave; a 0 in tp or pp grows."""
    micro = config.train.micro_batch_size
    tp = max(d for d in range(1, node + 1) if cuts_evenly(config, d))
    pp = max((d for d in (2, 4, 8) if config.model.num_layers % d == 0), default=1)
    return {
        "data parallel, ZeRO-1": Layout(1, 1, 0, "1f1b", 1, 1, micro, ""),
        "tensor parallel": Layout(0, 1, 1, "1f1b", 1, 0, micro, ""),
        "pipeline parallel": Layout(1, 0, 1, "1f1b", 1, 0, micro, ""),
        f"tp {tp} x pp {pp} x dp, ZeRO-1": Layout(tp, pp, 0, "1f1b", 1, 1, micro, ""),
    }


def layout_at(config: Config, layout: Layout, devices: int) -> Layout | None:
    """The layout on so many devices; None where it is none."""
    rest, over = divmod(devices, max(layout.tp, 1) * max(layout.pp, 1) * max(layout.dp, 1))
    if over:
        return None
    grown = layout._replace(**{name: rest for name in ("tp", "pp", "dp") if getattr(layout, name) == 0})
    if grown.tp * grown.pp * grown.dp != devices or grown.pp > config.model.num_layers or not cuts_evenly(config, grown.tp):
        return None
    return grown._replace(zero=layout.zero if grown.dp > 1 else 0)


def curve(name: str, config: Config, cluster: Cluster, layout: Layout, counts: Iterable[int], strong: bool = False) -> Curve:
    """The points of one layout; counts at which it cannot run are left out."""
    alone = _seconds_alone(config, cluster, layout)
    points = []
    for devices in counts:
        grown = layout_at(config, layout, devices)
        if grown is None:
            continue
        batch = config.train.global_batch_size * (1 if strong else grown.dp)
        if batch % (grown.dp * grown.micro_batch):
            continue
        microbatches = batch // (grown.dp * grown.micro_batch)
        if grown.pp > 1 and schedule_problems(grown.schedule, grown.pp, grown.chunks, microbatches):
            continue
        pricer = Pricer(replace(config, train=replace(config.train, global_batch_size=batch)), cluster)
        memory = pricer.memory(grown)
        seconds = pricer.found(grown, memory).time.seconds
        speed_up = alone * (batch / config.train.global_batch_size) / seconds
        points.append(Point(devices, seconds, speed_up, speed_up / devices, memory <= cluster.usable_memory))
    return Curve(name, points)


def _seconds_alone(config: Config, cluster: Cluster, layout: Layout) -> float:
    """A step of the batch on one device, whether it fits or not."""
    one = Layout(1, 1, 1, "1f1b", 1, 0, layout.micro_batch, layout.recompute)
    pricer = Pricer(with_layout(config, one), cluster)
    return pricer.found(one, 0.0).time.seconds


def table(curves: Iterable[Curve]) -> str:
    """A row per point."""
    lines = []
    for each in curves:
        lines += [each.name, f"  {'devices':>8}{'step':>12}{'speed-up':>12}{'efficiency':>12}"]
        lines += [f"  {point.devices:>8}{point.seconds:>10.3g} s{point.speed_up:>12.1f}{point.efficiency:>12.1%}"
                  f"{'' if point.fits else '   does not fit'}" for point in each.points]  # fmt: skip
    return "\n".join(lines)
