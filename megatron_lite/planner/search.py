"""Which layout trains a model fastest on so many devices? Every valid one is priced, those that fit are ranked.

    axes            tp (up to two nodes), pp, dp = what is left
    pipeline        1f1b, interleaved with 2, 3, 4, ... chunks, zb-h1, zbv
    state           ZeRO 0 to 3
    activations     kept, attention recomputed, layers recomputed; micro-batch 1, 2, 4, 8

Thousands of layouts, of which few are simulated. Each has a bound that no schedule beats (`least_seconds`): what the first
microbatch takes to reach a rank, what the rank has to do, what the last one takes to leave. Layouts are taken in the order
of their bounds; those that do not fit are dropped before anything is simulated, and once as many as are asked for are faster
than the next bound, no other can be among them.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.config import ActivationConfig, Config
from megatron_lite.errors import ReportedError
from megatron_lite.planner.cluster import GIB, Cluster
from megatron_lite.planner.memory import buffer_bytes, chunk_bytes, peak_bytes, rank_state
from megatron_lite.planner.pipeline import Pipeline, plan_pipeline
from megatron_lite.planner.timing import Price, StepTime, action_lists, few_microbatches, stage_prices, step_time
from megatron_lite.schedules import schedule_problems

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv")
MICRO_BATCHES = (1, 2, 4, 8)
MOST_CHUNKS = 8
TREATMENTS = {"": ActivationConfig(), "selective": ActivationConfig("selective"), "full": ActivationConfig("full", "uniform", 1)}
FARTHEST = 4096  # how far another number of devices is looked for


class SearchError(ReportedError):
    """No layout: why, and the nearest thing that would work."""


class Layout(NamedTuple):
    tp: int
    pp: int
    dp: int
    schedule: str  # as in --pipeline-schedule
    chunks: int
    zero: int
    micro_batch: int
    recompute: str  # key of TREATMENTS

    def flags(self) -> str:
        """Ready to be put behind the flags of the model."""
        words = [f"--tensor-model-parallel-size {self.tp}"] if self.tp > 1 else []
        words += ["--sequence-parallel"] if self.tp > 1 else []
        words += [f"--pipeline-model-parallel-size {self.pp}"] if self.pp > 1 else []
        if self.pp > 1 and self.schedule == "interleaved":
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.chunks}")
        elif self.pp > 1 and self.schedule != "1f1b":
            words.append(f"--pipeline-schedule {self.schedule}")
        words += [f"--zero-stage {self.zero}"] if self.zero else []
        words.append(f"--micro-batch-size {self.micro_batch}")
        words += {"selective": ["--recompute-activations"],
                  "full": ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]}.get(
                      self.recompute, [])  # fmt: skip
        return " ".join(words)

    def __str__(self) -> str:
        schedule = "" if self.pp == 1 else f" {self.schedule}" + (f" x{self.chunks}" if self.schedule == "interleaved" else "")
        recompute = f", recompute {self.recompute}" if self.recompute else ""
        return f"tp {self.tp} pp {self.pp}{schedule} dp {self.dp} ZeRO-{self.zero} micro-batch {self.micro_batch}{recompute}"


class Found(NamedTuple):
    """A layout that fits. `memory`: bytes of its largest rank, buffers included."""

    layout: Layout
    config: Config
    pipeline: Pipeline
    time: StepTime
    memory: float


class Lost(NamedTuple):
    """A layout that is not among the best, and why."""

    layout: Layout
    why: str


class Result(NamedTuple):
    best: list[Found]
    lost: list[Lost]
    valid: int  # layouts that could run
    priced: int  # of them simulated
    unfit: int  # dropped because they do not fit


def with_layout(base: Config, layout: Layout) -> Config:
    """The configuration at a layout."""
    chunks = layout.chunks if layout.schedule == "interleaved" else None
    parallel = replace(base.parallel, tensor_model_parallel_size=layout.tp, sequence_parallel=layout.tp > 1,
                       pipeline_model_parallel_size=layout.pp, zero_stage=layout.zero,
                       pipeline_schedule="1f1b" if chunks else layout.schedule,
                       num_virtual_stages_per_pipeline_rank=chunks)  # fmt: skip
    train = replace(base.train, micro_batch_size=layout.micro_batch, world_size=layout.tp * layout.pp * layout.dp)
    return replace(base, parallel=parallel, train=train, activations=TREATMENTS[layout.recompute])


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def layouts(base: Config, cluster: Cluster, devices: int, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Every valid layout of so many devices. `fixed`: fields of `Layout` with the only value they may have."""
    model, batch = base.model, base.train.global_batch_size

    def allowed(name: str, values: Iterator[Any] | list[Any] | tuple) -> list[Any]:
        return [value for value in values if fixed.get(name, value) == value]

    for tp in allowed("tp", [d for d in divisors(devices) if d <= 2 * cluster.gpus_per_node and cuts_evenly(base, d)]):
        for pp in allowed("pp", [d for d in divisors(devices // tp) if d <= model.num_layers]):
            dp = devices // (tp * pp)
            for micro in allowed("micro_batch", [b for b in MICRO_BATCHES if batch % (b * dp) == 0]):
                for schedule, chunks in pipelines(base, pp, batch // (micro * dp)):
                    if fixed.get("schedule", schedule) != schedule or fixed.get("chunks", chunks) != chunks:
                        continue
                    for zero in allowed("zero", [0] if dp == 1 else [0, 1, 2, 3]):
                        for recompute in allowed("recompute", list(TREATMENTS)):
                            yield Layout(tp, pp, dp, schedule, chunks, zero, micro, recompute)


def cuts_evenly(base: Config, tp: int) -> bool:
    """What tensor and sequence parallelism divide; 8-bit products need sides of 16."""
    model, sizes = base.model, [base.model.num_attention_heads, base.model.ffn_hidden_size, base.model.seq_length]
    if any(size % tp for size in sizes) or (model.num_kv_heads % tp and tp % model.num_kv_heads):
        return False
    kv = max(model.num_kv_heads, tp) * model.head_dim
    eights = (model.ffn_hidden_size, model.num_attention_heads * model.head_dim, kv)
    return base.precision.fp8_format is None or not any(size % (16 * tp) for size in eights)


def pipelines(base: Config, pp: int, microbatches: int) -> list[tuple[str, int]]:
    """(schedule, chunks) that run with so many ranks and microbatches."""
    if pp == 1:
        return [("1f1b", 1)]
    layers = base.model.num_layers
    found = [("1f1b", 1), ("zb-h1", 1)]
    found += [("zbv", 2)] if layers >= 2 * pp else []
    found += [("interleaved", v) for v in range(2, MOST_CHUNKS + 1) if layers % (pp * v) == 0 and microbatches % pp == 0]
    return [(name, chunks) for name, chunks in found if not schedule_problems(name, pp, chunks, microbatches)]


# ---------------------------------------------------------------------------------------------------------------------
# One layout


class Pricer:
    """Prices and sizes of layouts. What several of them share is worked out once."""

    def __init__(self, base: Config, cluster: Cluster):
        self.base, self.cluster = base, cluster
        self.plans: dict[tuple, Pipeline] = {}
        self.prices: dict[tuple, list[Price]] = {}
        self.states: dict[tuple, list[int]] = {}
        self.activations: dict[tuple, list[int]] = {}
        self.bounds: dict[tuple, float] = {}

    def config(self, layout: Layout) -> Config:
        return with_layout(self.base, layout)

    def pipeline(self, layout: Layout) -> Pipeline:
        key = layout.pp, layout.schedule, layout.chunks
        if key not in self.plans:
            self.plans[key] = plan_pipeline(self.base.model.num_layers, self.config(layout).parallel)
        return self.plans[key]

    def least_seconds(self, layout: Layout) -> float:
        """No schedule takes less: the first microbatch reaches rank r through the r stages before it, and the last one leaves
        through them, unless W is left over for that time."""
        key = layout._replace(zero=0)
        if key not in self.bounds:
            self.bounds[key] = self._least_seconds(layout)
        return self.bounds[key]

    def _least_seconds(self, layout: Layout) -> float:
        key = layout.tp, layout.pp, layout.schedule, layout.chunks, layout.micro_batch, layout.recompute
        if key not in self.prices:
            self.prices[key] = stage_prices(self.config(layout), self.cluster, self.pipeline(layout))
        prices, placement = self.prices[key], self.pipeline(layout).placement
        microbatches = self.base.train.global_batch_size // (layout.micro_batch * layout.dp)
        sums, way, least = [sum(price) for price in prices], 0.0, 0.0
        for rank in range(layout.pp):
            busy = sum(sums[placement.stage(rank, chunk)] for chunk in range(placement.num_chunks))
            least = max(least, way + microbatches * busy)
            price = prices[rank]
            way += price.forward + price.tensor_forward
            if layout.schedule in ("1f1b", "interleaved"):
                way += price.input_grad + price.weight_grad + price.tensor_backward
        return least

    def memory(self, layout: Layout) -> float:
        """Bytes of the largest rank: of the first two, which hold most microbatches, and the last, which has the logits."""
        config, pipeline = self.config(layout), self.pipeline(layout)
        ranks = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
        where = layout.tp, layout.pp, layout.dp, layout.schedule, layout.chunks
        if (key := (*where, layout.zero)) not in self.states:
            self.states[key] = [sum(rank_state(config, pipeline, rank)[1:]) for rank in ranks]
        states = self.states[key]
        if max(states) > self.cluster.usable_memory:
            return max(states)
        if (key := (*where, layout.micro_batch, layout.recompute)) not in self.activations:
            number = few_microbatches(pipeline, config.num_microbatches)
            lists = action_lists(pipeline.schedule, layout.pp, pipeline.num_chunks, number, pipeline.group_size)
            self.activations[key] = [peak_bytes(lists[rank], [chunk_bytes(config, chunk) for chunk in pipeline.chunks(rank)])
                                     for rank in ranks]  # fmt: skip
        return max(map(sum, zip(states, self.activations[key], strict=True))) + buffer_bytes(config)

    def found(self, layout: Layout, memory: float) -> Found:
        config, pipeline = self.config(layout), self.pipeline(layout)
        return Found(layout, config, pipeline, step_time(config, self.cluster, pipeline), memory)


# ---------------------------------------------------------------------------------------------------------------------
# All of them


def search(base: Config, cluster: Cluster, devices: int, fixed: Mapping[str, Any] | None = None, keep: int = 10) -> Result:
    """The `keep` fastest layouts of `devices` devices that fit, and why others lost. SearchError where there is none."""
    fixed = fixed or {}
    _check_count(cluster, devices)
    pricer = Pricer(base, cluster)
    every = list(layouts(base, cluster, devices, fixed))
    if not every:
        raise SearchError(_no_layout(base, cluster, devices, fixed))
    queue = [(pricer.least_seconds(layout), index) for index, layout in enumerate(every)]
    heapq.heapify(queue)
    found: list[Found] = []
    unfit: list[tuple[Layout, float]] = []
    enough = keep + min(keep, 5)  # a few more, to say why they lost
    while queue:
        bound, index = heapq.heappop(queue)
        if len(found) >= enough and bound > found[enough - 1].time.seconds:
            break
        memory = pricer.memory(every[index])
        if memory > cluster.usable_memory:
            unfit.append((every[index], memory))
            continue
        found.append(pricer.found(every[index], memory))
        found.sort(key=lambda each: (each.time.seconds, each.memory))
    if not found:
        raise SearchError(_fits_nowhere(base, cluster, devices, fixed, unfit))
    best, rest = found[:keep], found[keep:enough]
    lost = [Lost(layout, f"does not fit: {memory / GIB:.1f} GiB of {cluster.usable_memory / GIB:.1f}")
            for layout, memory in _different(unfit)]  # fmt: skip
    lost += [Lost(each.layout, _slower(each.time, best[0].time)) for each in rest]
    return Result(best, lost, len(every), len(found), len(unfit))


def _different(unfit: list[tuple[Layout, float]], most: int = 5) -> list[tuple[Layout, float]]:
    """The first of each tp, pp and ZeRO stage."""
    found: dict[tuple, tuple[Layout, float]] = {}
    for layout, memory in unfit:
        found.setdefault((layout.tp, layout.pp, layout.zero), (layout, memory))
    return list(found.values())[:most]


def _slower(time: StepTime, best: StepTime) -> str:
    """By how much, and what most of it is."""
    parts = {"compute": "computes", "tensor": "waits for tp", "bubble": "idles in the pipeline", "data": "waits for dp",
             "optimizer": "updates"}  # fmt: skip
    more = {name: (getattr(time, name) - getattr(best, name)) / best.seconds for name in parts}
    worst = max(more, key=more.__getitem__)
    return f"{time.seconds / best.seconds - 1:.1%} slower: {parts[worst]} {more[worst]:.1%} of the best step longer"


def _check_count(cluster: Cluster, devices: int) -> None:
    if devices < 1:
        raise SearchError(f"--gpus {devices}: at least 1 would work")
    most = None if cluster.nodes is None else cluster.nodes * cluster.gpus_per_node
    if most is not None and devices > most:
        raise SearchError(f"--gpus {devices}: {cluster.name} has {most}; nearest that works: {most}")


def _no_layout(base: Config, cluster: Cluster, devices: int, fixed: Mapping[str, Any]) -> str:
    """Why, and the nearest counts that some layout can use."""
    batch = base.train.global_batch_size

    def works(number: int) -> bool:
        return next(layouts(base, cluster, number, fixed), None) is not None

    below = next((n for n in range(devices - 1, max(0, devices - FARTHEST), -1) if works(n)), None)
    above = next((n for n in range(devices + 1, devices + FARTHEST) if works(n)), None)
    near = " or ".join(str(n) for n in (below, above) if n is not None)
    kept = "".join(f", {name} {value}" for name, value in fixed.items())
    nearest = f"nearest counts that work: {near}" if near else "no count near it works: change --global-batch-size"
    return (f"--gpus {devices}: no layout can use them{kept and ' with' + kept[1:]}: they are tp x pp x dp with tp a divisor of "
            f"{base.model.num_attention_heads} heads, {base.model.ffn_hidden_size} MLP channels and {base.model.seq_length} "
            f"tokens, pp at most {base.model.num_layers} layers, and a batch of {batch} that dp x micro-batch divides; "
            f"{nearest}")  # fmt: skip


def _fits_nowhere(base: Config, cluster: Cluster, devices: int, fixed: Mapping[str, Any],
                  unfit: list[tuple[Layout, float]]) -> str:  # fmt: skip
    """What comes closest, and how many devices would do."""
    layout, least = min(unfit, key=lambda each: each[1])
    text = (f"no layout fits {devices} x {cluster.memory / GIB:.4g} GiB, of which {cluster.usable_memory / GIB:.4g} can be used; "
            f"the least any needs is {least / GIB:.4g} GiB or more: {layout}")  # fmt: skip
    most = devices * 64 if cluster.nodes is None else cluster.nodes * cluster.gpus_per_node
    number = devices * 2
    while number <= most:
        pricer = Pricer(base, cluster)
        if any(pricer.memory(each) <= cluster.usable_memory for each in layouts(base, cluster, number, fixed)):
            return f"{text}; nearest that works: --gpus {number}"
        number *= 2
    return f"{text}; it takes devices with more memory, or a smaller model"
