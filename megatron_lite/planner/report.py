"""What `--dry-run` prints: grid, stages, schedule, memory and work of a run, from its settings alone."""

import textwrap
from functools import partial
from operator import attrgetter

from megatron_lite.config import Config
from megatron_lite.grid import Grid
from megatron_lite.planner.automatic import choose_pipeline, flop_costs
from megatron_lite.planner.cluster import read_cluster
from megatron_lite.planner.flops import flops_per_iteration, flops_per_token, tokens_per_iteration
from megatron_lite.planner.memory import StageMemory, attention_core, full_state_bytes, stage_memory, state_bytes
from megatron_lite.planner.outlook import outlook
from megatron_lite.planner.params import count_parameters
from megatron_lite.planner.pipeline import Pipeline, is_automatic, pipeline_of, pipeline_warnings
from megatron_lite.planner.recompute import in_words
from megatron_lite.planner.units import count, size
from megatron_lite.schedules.draw import draw
from megatron_lite.schedules.simulate import Costs, Timeline, chunk_costs, simulate

WIDTH = 100  # columns
DRAWN_RANKS, DRAWN_MICROBATCHES = 16, 8  # a larger schedule is pictured with fewer microbatches
MOST_DRAWN = 64  # microbatches; of lists that are made for one number, which may be larger, nothing is pictured
SPANS = 4  # chunks whose layers are all printed
ALIKE = 3  # so many middle stages that differ in nothing are printed as one row


def dry_run_report(config: Config, grid: Grid) -> str:
    """The whole report, at most 100 columns wide except for the drawing of a very large grid."""
    chosen = choose_pipeline(config, config.num_microbatches, flop_costs(config)) if is_automatic(config.parallel) else None
    pipeline = chosen.pipeline if chosen else pipeline_of(config)
    notes = [folded(chosen.report)] if chosen else warnings(config)
    picture = schedule_picture(pipeline, config.num_microbatches, chosen and chosen.costs)
    parts = [draw_grid(grid), stage_table(config, pipeline), picture, *notes, work(config, grid), copies(config, grid)]
    if config.train.cluster is not None:
        parts.append(folded(outlook(config, pipeline, read_cluster(config.train.cluster))))
    return "\n\n".join(part for part in parts if part)


def draw_grid(grid: Grid) -> str:
    """The grid's own drawing; of a grid too wide for the page only its sizes."""
    text = grid.draw()
    return text if max(map(len, text.splitlines())) <= WIDTH and len(text.splitlines()) <= 40 else text.splitlines()[0]


def stage_table(config: Config, pipeline: Pipeline) -> str:
    """Layers, parameters and bytes per rank, a row per pipeline rank."""
    plan = stage_memory(config, pipeline=pipeline)
    head = ("stage", "layers", "parameters", "weights", "gradients", "optimizer", "transient", "activations", "total")
    rows = [head, *_rows(plan)]
    if not any(stage.transient for stage in plan):
        rows = [[cell for cell, name in zip(row, head, strict=True) if name != "transient"] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [_stage_title(config, plan)]
    for row in rows:
        lines.append("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    core = {"flash": "flash attention (GPUs assumed: no --distributed-backend gloo)", "block": "block-causal attention"}
    activations = f"{core[attention_core(config)]}, {in_words(config.activations)}"
    if config.model.num_experts is not None:
        activations += ", not counted what experts keep (counted: an MLP in their place)"
    for text in (_state_legend(config), f"activations: {activations}, as many microbatches as the schedule keeps alive"):
        lines.append(folded(f"  {text}", "    "))
    return "\n".join(lines)


def schedule_picture(pipeline: Pipeline, total: int, costs: Costs | None = None) -> str:
    """The pipeline's timeline; empty without a pipeline. Of many microbatches only the first few are pictured."""
    pp = pipeline.placement.pp_size
    if pp == 1:
        return ""
    title = f"schedule {pipeline.schedule}"
    if pipeline.asynchronous:
        return asynchronous_picture(pipeline, total, title)
    timeline = timed(pipeline, total, costs)
    bubble = f"{100 * timeline.sync_fraction:.1f}% of the step"
    shown = few_microbatches(pipeline, total)
    if pp > DRAWN_RANKS or shown > MOST_DRAWN:
        chunks = f" x {pipeline.num_chunks} chunks" if pipeline.num_chunks > 1 else ""
        return f"{title}: {pp} ranks{chunks}, {total} microbatches; bubble {bubble}"
    if shown == total:
        return draw(timeline, title, width=WIDTH)
    note = f"the run has {total} microbatches, of which the picture shows {shown}: its bubble is {bubble}"
    return draw(timed(pipeline, shown, costs), title, width=WIDTH) + f"\n  {note}"


def asynchronous_picture(pipeline: Pipeline, per_step: int, title: str) -> str:
    """The first microbatches after a drain; the pipeline stays full over the updates until the next."""
    pp, between = pipeline.placement.pp_size, per_step * pipeline.drain_interval
    shown, bubble = min(between, max(DRAWN_MICROBATCHES, 2 * pp)), 100 * (pp - 1) / (between + pp - 1)
    versions = ", ".join(str(pipeline.weight_versions(rank, per_step)) for rank in range(min(pp, DRAWN_RANKS)))
    note = (f"an update after every {per_step} microbatch(es), without a flush; drained every {pipeline.drain_interval} "
            f"steps: bubble {bubble:.2g}%\n  versions of the weights kept: {versions}")  # fmt: skip
    if pp > DRAWN_RANKS:
        return f"{title}: {pp} ranks\n  {note}"
    return draw(timed(pipeline, shown), f"{title} after a drain", width=WIDTH) + f"\n  {note}"


def warnings(config: Config) -> list[str]:
    """What the schedule wastes."""
    return [folded(text) for text in pipeline_warnings(config)]


def folded(text: str, indent: str = "  ") -> str:
    """The text with its lines of more than WIDTH columns folded."""
    fill = partial(textwrap.fill, width=WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(fill(line) if len(line) > WIDTH else line for line in text.splitlines())


def timed(pipeline: Pipeline, num_microbatches: int, costs: Costs | None = None) -> Timeline:
    """The pipeline's timeline; without costs as if F, B and W of a rank's share of the layers each took one."""
    costs = costs or chunk_costs(1, 1, 1, pipeline.placement.chunks_per_share)
    return simulate(pipeline.actions(num_microbatches), pipeline.placement, costs)


def few_microbatches(pipeline: Pipeline, total: int) -> int:
    """As many of `total` microbatches as a picture needs: enough to fill the pipeline, in whole groups."""
    pp = pipeline.placement.pp_size
    if not pipeline.named:
        return total  # lists are for so many and no other number
    group = (pipeline.group_size or pp) if pipeline.has_groups else 1
    first = -(-max(DRAWN_MICROBATCHES, pp) // group) * group
    return next((shown for shown in range(first, total, group) if not pipeline.problems(shown)), total)


def work(config: Config, grid: Grid) -> str:
    """Tokens and floating-point operations of a step, and of the run where its length is known."""
    train = config.train
    tokens, flops = tokens_per_iteration(config), flops_per_iteration(config)
    batch = f"{config.num_microbatches} microbatches x {train.micro_batch_size} samples x dp {grid.dp}"
    per = {"step": flops, "rank": flops / grid.world_size, "token": flops_per_token(config)}
    shares = ", ".join(f"{count(number)}FLOP per {what}" for what, number in per.items())
    lines = [
        f"step: {batch} = {train.global_batch_size} samples = {tokens:,} tokens",
        f"  {shares}",
        "  (model FLOPs: matrix products of forward and backward, causal attention halved)",
    ]
    if train.rampup_batch_size:
        start, increment, samples = train.rampup_batch_size
        lines.append(f"  at first {start} samples, {increment} more each time until {samples:,} samples are consumed")
    if train.train_iters:
        total = train.batch_sizes.samples(train.train_iters) * config.model.seq_length
        lines.append(f"run: {train.train_iters:,} steps = {total:,} tokens, {count(total * flops_per_token(config))}FLOP")
    return "\n".join(lines)


def _stage_title(config: Config, plan: list[StageMemory]) -> str:
    total, held = count_parameters(config), config.parallel.tp * sum(stage.parameters for stage in plan)
    largest = max(plan, key=lambda stage: stage.total)
    title = f"model: {total:,} parameters"
    if held != total:
        title += f"; with padding and copies {held:,} on {config.parallel.tp * config.parallel.pp} rank(s)"
    return f"{title}\nlargest rank: {size(largest.total)} on stage {largest.stage}"


def _state_legend(config: Config) -> str:
    weight, gradient, optimizer = state_bytes(config)
    together = f"{weight:.4g} + {gradient:.4g} + {optimizer:.4g} = {weight + gradient + optimizer:.4g} bytes per parameter"
    stage = f", ZeRO-{config.parallel.zero_stage}" if config.parallel.zero_stage else ""
    return f"each row is one rank of the stage; {config.precision.dtype_name}{stage}: {together}"


def _rows(plan: list[StageMemory]) -> list[tuple[str, ...]]:
    """Table rows; runs of stages that differ only in which layers they hold are folded into first ... last."""
    rows, index = [], 0
    while index < len(plan):
        end = index
        while end + 1 < len(plan) and _alike(plan[end + 1], plan[index]):
            end += 1
        if end - index + 1 >= ALIKE:
            rows.append(_row(plan[index], plan[end]))
        else:
            rows.extend(_row(stage, stage) for stage in plan[index : end + 1])
        index = end + 1
    return rows


def _alike(one: StageMemory, other: StageMemory) -> bool:
    return all(of(one) == of(other) for of in (attrgetter("parameters", "activations", "transient"), _counts))


def _counts(stage: StageMemory) -> list[int]:
    return [len(layers) for layers in stage.layers]


def _row(first: StageMemory, last: StageMemory) -> tuple[str, ...]:
    stages = f"{first.stage}" if first is last else f"{first.stage}..{last.stage}"
    spans = [_span(min(a.start, b.start), max(a.stop, b.stop) - 1) for a, b in zip(first.layers, last.layers, strict=True)]
    if len(spans) > SPANS:
        spans = [*spans[: SPANS - 2], "...", spans[-1]]
    layers = f"{', '.join(spans)} ({sum(_counts(first))}{'' if first is last else ' each'})"
    amounts = (first.weights, first.gradients, first.optimizer, first.transient, first.activations, first.total)
    return (stages, layers, f"{first.parameters:,}", *map(size, amounts))


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}..{last}"


def copies(config: Config, grid: Grid) -> str:
    """What --peer-checkpoint-interval takes of memory and disk: masters (or exact weights) and moments, each element once."""
    every = config.checkpoint.peer_checkpoint_interval
    if not every:
        return ""
    weight, _, optimizer = full_state_bytes(config)
    state = count_parameters(config) * (optimizer + (0 if config.precision.master_weights else weight))
    each = f"{size(state / grid.world_size)} of host memory and as much of the local disk for each rank of a node"
    often = "every step" if every == 1 else f"every {every} steps"
    return folded(f"copies in peers, {often}: {each}; twice that while the next is written")
