"""The pipeline that flags leave open (`--pipeline-schedule auto`, `--pipeline-split auto`), chosen from what things cost.

    costs       of a layer, the embedding, the output layer and a message: `PartCosts`. Measured (training/measure.py), or
                counted in FLOPs where nothing runs (`flop_costs`, for --dry-run)
    cuts        of the layers into stages: even, and balanced, with which the slowest rank takes the shortest
    schedules   every named one, every number of chunks, and the list scheduler (schedules/auto.py)

All of them are simulated, and the one with the shortest step within --pipeline-memory-limit is run. This file is
arithmetic: the same costs give the same pipeline. training/settle.py is where a run gets its pipeline from.

    8 layers, pp 2, the output layer as slow as two layers       even 4 4: ranks take 4 and 6      balanced 5 3: 5 and 5
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from megatron_lite.config import Config, ParallelConfig
from megatron_lite.planner.pipeline import AUTO, Pipeline, plan_pipeline, schedule_and_chunks
from megatron_lite.planner.split import layer_ranges
from megatron_lite.schedules import SCHEDULES
from megatron_lite.schedules.actions import Placement, format_schedule, parse_schedule
from megatron_lite.schedules.auto import GREEDY, Cut, choose
from megatron_lite.schedules.simulate import Costs

MOST_TRIED = 4  # chunks per rank, where the flags leave their number open: more of them only send more messages


class Price(NamedTuple):
    """What one microbatch costs in one part of the model."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        return sum(self)


class PartCosts(NamedTuple):
    """What every pipeline rank takes for a layer, the embedding and the output layer (final norm and loss included), and
    what a message between two ranks takes; all in `unit`."""

    layer: tuple[Price, ...]
    embedding: tuple[Price, ...]
    head: tuple[Price, ...]
    latency: float
    unit: str
    source: str  # where the numbers come from, in words

    def __str__(self) -> str:
        parts = {"layer": self.layer, "embedding": self.embedding, "output layer": self.head}
        texts = [f"{name} {' | '.join(map(_words, prices if len(set(prices)) > 1 else prices[:1]))}"
                 for name, prices in parts.items()]  # fmt: skip
        return f"{self.source}; F B W in {self.unit}: {', '.join(texts)}; message {self.latency:.3g}"


def _words(price: Price) -> str:
    return " ".join(f"{cost:.3g}" for cost in price)


class Chosen(NamedTuple):
    pipeline: Pipeline
    costs: Costs  # of its stages
    report: str


def flop_costs(config: Config) -> PartCosts:
    """Costs in units of one layer's forward: matrix products alone, causal attention halved, messages free.

    A layer of M weights and Q = heads x head size: F = 2 M + 2 Q s per token, B = 2 M + 4 Q s, W = 2 M. Output layer of
    h x Vp weights: 2 h Vp each. The embedding looks up. The same figures as planner/flops.py adds up.
    """
    model, pp = config.model, config.parallel.pp
    h, q, kv = model.hidden_size, model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    matrices = 2 * ((3 if model.swiglu else 2) * h * model.ffn_hidden_size + h * (q + 2 * kv) + q * h)
    attention, head = 2 * q * model.seq_length, 2 * h * config.padded_vocab_size
    unit = matrices + attention
    again = 1.0 if config.activations.recompute_granularity == "full" else 0.0  # of --recompute-method block an upper bound
    layer = Price(1.0, (matrices + 2 * attention) / unit + again, matrices / unit)
    parts = (layer, Price(0.0, 0.0, 0.0), Price(*(head / unit,) * 3))
    return PartCosts(*((part,) * pp for part in parts), 0.0, "layer forwards", "costs counted in FLOPs, not measured")


def choose_pipeline(config: Config, num_microbatches: int, costs: PartCosts) -> Chosen:
    """The pipeline with the shortest simulated step; ScheduleError where none fits the memory limit."""
    parallel, layers = config.parallel, config.model.num_layers
    names, limit = (*SCHEDULES, GREEDY), parallel.pipeline_memory_limit
    if parallel.pipeline_schedule != AUTO:
        names = (schedule_and_chunks(layers, parallel)[0],)
    cuts, chunks = cuts_of(layers, parallel, costs), allowed_chunks(layers, parallel)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    choice = choose(parallel.pp, num_microbatches, cuts, limit, chunks, names=names, group_size=group, unit=costs.unit)
    lists = tuple(map(tuple, choice.schedule)) if choice.name == GREEDY else None
    pipeline = Pipeline(choice.name, choice.placement, choice.group_size, choice.cut.layers, lists)
    return Chosen(pipeline, choice.cut.costs, f"pipeline {choice.report}\n  {costs}")


def allowed_chunks(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Chunks per rank that may be tried: those that the flags name, else as many as there are layers for."""
    named = parallel.num_virtual_stages_per_pipeline_rank, parallel.num_layers_per_virtual_pipeline_stage
    if parallel.pipeline_schedule == AUTO and named == (None, None):
        return list(range(1, min(MOST_TRIED, max(num_layers // parallel.pp, 1)) + 1))
    return [schedule_and_chunks(num_layers, named_parallel(parallel))[1]]


def named_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """The same settings with the plainest schedule in the place of `auto`: what fits its stages fits some automatic ones."""
    return replace(parallel, pipeline_schedule="1f1b") if parallel.pipeline_schedule == AUTO else parallel


def cuts_of(num_layers: int, parallel: ParallelConfig, costs: PartCosts) -> Callable[[Placement], list[Cut]]:
    """placement -> the cuts of the layers to try: even and balanced, or only the one that flags fix."""
    ends = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    fixed = any(ends) or parallel.num_layers_per_virtual_pipeline_stage is not None

    def cuts(placement: Placement) -> list[Cut]:
        try:
            even = layer_ranges(num_layers, placement.num_stages, *ends)
        except ValueError:  # more stages than layers
            return []
        found = [Cut(stage_costs(costs, placement, even), tuple(even))]
        layers = balanced_layers(num_layers, placement, costs)
        if not fixed and layers != even:
            note = f"layers {' '.join(str(len(own)) for own in layers)}"
            found.append(Cut(stage_costs(costs, placement, layers), tuple(layers), note))
        return found[-1:] if parallel.pipeline_split == AUTO else found

    return cuts


def stage_costs(costs: PartCosts, placement: Placement, layers: Sequence[range]) -> Costs:
    """F, B and W of every stage on the rank where it lies; embedding and output layer are in the first and the last."""
    sums = []
    for stage, own in enumerate(layers):
        rank = placement.where(stage).rank
        parts = [costs.layer[rank]] * len(own)
        parts += [costs.embedding[rank]] if stage == 0 else []
        parts += [costs.head[rank]] if stage == len(layers) - 1 else []
        sums.append([sum(each) for each in zip(*parts, strict=True)])
    return Costs(*map(list, zip(*sums, strict=True)), latency=costs.latency)


def balanced_layers(num_layers: int, placement: Placement, costs: PartCosts) -> list[range]:
    """Layers of every stage, one or more each, such that the slowest rank takes as short as any split makes it.

    A layer at a time goes to the rank that is then the least busy, and there to its least busy stage: with equal layers
    no other order ends lower. Of equal choices the earliest, so that equal costs give the even split.
    """
    stages = range(placement.num_stages)
    where = [placement.where(stage).rank for stage in stages]
    counts = [1] * len(stages)

    def busy(stage: int) -> float:
        ends = costs.embedding[where[stage]].total * (stage == 0) + costs.head[where[stage]].total * (stage == stages[-1])
        return counts[stage] * costs.layer[where[stage]].total + ends

    for _ in range(num_layers - len(stages)):
        loads = [sum(busy(stage) for stage in stages if where[stage] == rank) for rank in range(placement.pp_size)]
        then = [_digits(load + costs.layer[rank].total) for rank, load in enumerate(loads)]
        _, _, stage = min((then[where[stage]], _digits(busy(stage)), stage) for stage in stages)
        counts[stage] += 1
    ends = [sum(counts[:stage]) for stage in range(len(stages) + 1)]
    return [range(first, last) for first, last in zip(ends, ends[1:])]  # noqa: B905 (one shorter by design)


def _digits(time: float) -> float:
    """Equal times compare equal, whatever order their parts were added in."""
    return float(f"{time:.9g}")


# ---------------------------------------------------------------------------------------------------------------------
# In a checkpoint: a resumed run takes the same pipeline again, as sums in another order would have other bits


def decisive(config: Config, num_microbatches: int) -> dict:
    """The settings that a choice depends on, as JSON gives them back. With the same ones it is kept."""
    parallel = config.parallel
    names = ("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "pipeline_schedule",
             "pipeline_memory_limit", "pipeline_split", "num_virtual_stages_per_pipeline_rank",
             "num_layers_per_virtual_pipeline_stage", "microbatch_group_size_per_virtual_pipeline_stage",
             "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")  # fmt: skip
    settings = asdict(config.model) | asdict(config.activations) | {name: getattr(parallel, name) for name in names}
    settings |= {"dtype": config.precision.dtype_name, "fp8": config.precision.fp8_format, "vocabulary": config.padded_vocab_size,
                 "micro_batch_size": config.train.micro_batch_size, "num_microbatches": num_microbatches}  # fmt: skip
    return json.loads(json.dumps(settings))


def to_record(pipeline: Pipeline, settings: dict) -> dict:
    """A chosen pipeline as JSON."""
    lists = format_schedule(pipeline.lists) if pipeline.lists is not None else None
    return {"for": settings, "schedule": pipeline.schedule, "placement": list(pipeline.placement),
            "group_size": pipeline.group_size, "layers_per_stage": [len(own) for own in pipeline.layers],
            "lists": lists}  # fmt: skip


def from_record(record: dict | None, settings: dict) -> Pipeline | None:
    """The pipeline of a record; None where there is none, or it was chosen for other settings."""
    if record is None or record["for"] != settings:
        return None
    counts = record["layers_per_stage"]
    layers = tuple(range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(len(counts)))
    lists = None if record["lists"] is None else tuple(map(tuple, parse_schedule(record["lists"])))
    return Pipeline(record["schedule"], Placement(*record["placement"]), record["group_size"], layers, lists)


def describe(pipeline: Pipeline) -> str:
    """A pipeline in a line."""
    chunks = f"{pipeline.num_chunks} chunk{'s' if pipeline.num_chunks > 1 else ''} per rank"
    return f"{pipeline.schedule} with {chunks}, layers per stage {' '.join(str(len(own)) for own in pipeline.layers)}"


def plainest_pipeline(num_layers: int, parallel: ParallelConfig) -> Pipeline:
    """A pipeline whose stages the layers must be able to fill; ValueError, in words, where they are not."""
    return plan_pipeline(num_layers, named_parallel(parallel))
