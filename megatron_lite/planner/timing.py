"""How long a step takes: an alpha-beta model over a cluster (planner/cluster.py). Every wire is latency + bytes / bandwidth.

    step = pipeline + gradients + optimizer + scalars
    pipeline    the schedule's own simulation (schedules/simulate.py), with F, B and W of each stage, messages between stages
    F, B, W     matrix products at the peak times their efficiency, what lies between them at the memory's bandwidth,
                and the tp transfers nobody computes behind
    gradients   what is left of reducing them once the last backward has hidden its part; and of gathering parameters
    optimizer   owned state, read and written once

Efficiency of a product [m, k] x [k, n]: the cluster's matmul_efficiency times m/(m+c) n/(n+c) k/(k+c), c = 128: the side of a
GPU's tile, so that a side of 128 costs half and one of 4096 three per cent. On a CPU c = 16. Attention's products run at
60 % of matmul_efficiency (its softmax shares the units; Dao 2023, arXiv 2307.08691, figure 5), its backward takes 2.5 forwards.

Collectives of n ranks of which k share a node (`wire`): a ring crosses every node once each way, and the k ranks have an
adapter each, so bandwidth is min(within, k x between); 2(n-1) or n-1 hops of latency, a tree's 2 log2 n of the adapters' at most.
Measured collectives (tools/bench_collectives.py) replace both, and add what it takes ranks that compute to meet. Where
communication costs the cores that compute (`overlap` 0) nothing is hidden. Sources: Hockney 1994 (alpha-beta), Narayanan et al.
2021 (arXiv 2104.04473) for the sum.
"""

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.planner.cluster import Cluster, Link
from megatron_lite.planner.flops import flops_per_iteration
from megatron_lite.planner.memory import (
    ELEMENT_BYTES,
    EXACT_BYTES,
    full_state_bytes,
    layer_activation_bytes,
    model_tokens,
)
from megatron_lite.planner.params import layer_parts, rank_parameters
from megatron_lite.planner.pipeline import Chunk, Pipeline
from megatron_lite.planner.recompute import OFFLOADED, RECOMPUTED, spans
from megatron_lite.planner.traffic import (
    Transfer,
    axis_size,
    backward_transfers,
    end_transfers,
    forward_transfers,
    gradient_transfers,
    message_bytes,
    multiplies_in_8_bits,
    wire_share,
)
from megatron_lite.schedules import build_schedule
from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.simulate import Costs, simulate

TILE, CPU_TILE = 128, 16  # c of the efficiency
ATTENTION_SHARE, ATTENTION_BACKWARD = 0.6, 2.5
LOSS_PASSES = 6  # over fp32 logits: copy, maximum, exponential, sum, gradient, back
CAP = 3  # times p: so many microbatches are simulated, more are what each further p takes
SPLIT = ("zb-h1", "zb-h2", "zbv")  # schedules that run W apart from B


class StepTime(NamedTuple):
    """Seconds of a step on the slowest rank, by what they go to; they add up to `seconds`."""

    seconds: float
    compute: float  # matrix products and what lies between them, of the busiest rank
    tensor: float  # tp transfers that it waits for
    bubble: float  # the pipeline, beyond that rank's own work
    data: float  # dp transfers beyond what is hidden
    optimizer: float
    mfu: float
    tokens_per_second: float  # of the whole cluster

    @property
    def bubble_fraction(self) -> float:
        return self.bubble / self.seconds


class Price(NamedTuple):
    """Seconds of one microbatch in one chunk: compute of F, B, W, and tp transfers waited for in F and in B."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0

    @property
    def compute(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    @property
    def tensor(self) -> float:
        return self.tensor_forward + self.tensor_backward


# ---------------------------------------------------------------------------------------------------------------------
# Wires


def wire(config: Config, cluster: Cluster, axis: str) -> tuple[str, int, int]:
    """("within" | "between" nodes, ranks that share a node, ranks) of a named axis; ranks are placed tp, dp, pp."""
    tp, dp, size = config.parallel.tp, max(config.data_parallel_size, 1), axis_size(config, axis)
    shards = axis_size(config, "zero_shard")
    stride = {"tp": 1, "tp_pp": 1, "dp": tp, "dp_cp": tp, "zero_shard": tp, "zero_replica": tp * shards}.get(axis, tp * dp)
    if axis in ("embedding", "mirror"):
        stride *= max(config.parallel.pp - 1, 1)
    together = min(size, max(1, cluster.gpus_per_node // stride))
    return ("within" if together == size else "between"), together, size


def seconds_of(config: Config, cluster: Cluster, transfer: Transfer) -> float:
    """Of all calls of a transfer."""
    where, together, size = wire(config, cluster, transfer.axis)
    if size == 1 or not transfer.calls:
        return 0.0
    sent = transfer.size * wire_share(transfer.op, size)
    if measured := cluster.measured.get((where, transfer.op)):
        meeting = 0.0 if transfer.op == "send" else cluster.rendezvous
        return transfer.calls * (meeting + measured.seconds(sent))
    rounds = wire_share(transfer.op, size) * size if transfer.op != "send" else 1  # of the ring: 2 (n-1) or n-1
    if where == "within":
        link, hops = cluster.within, min(rounds, 2 * math.log2(size) if transfer.op != "send" else 1)
    elif transfer.op == "send":
        link, hops = cluster.between, 1
    else:
        link = Link(min(cluster.within.bandwidth, together * cluster.between.bandwidth) if together > 1
                    else cluster.between.bandwidth, cluster.between.latency)  # fmt: skip
        hops = min(rounds, 2 * math.log2(size))
    return transfer.calls * link.seconds(sent, max(hops, 1))


def _waited(config: Config, cluster: Cluster, transfers: Iterable[Transfer], beside: dict[str, float]) -> float:
    """Seconds of transfers beyond the part of the compute beside them that hides them."""
    total = 0.0
    hidden = {name: cluster.overlap * seconds for name, seconds in beside.items()}
    for each in transfers:
        seconds = seconds_of(config, cluster, each)
        saved = min(seconds, hidden.get(each.behind, 0.0))
        if each.behind:
            hidden[each.behind] -= saved
        total += seconds - saved
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Compute


def product_seconds(cluster: Cluster, dtype: str, m: float, n: float, k: float) -> float:
    """[m, k] x [k, n]."""
    tile = TILE if cluster.overlap else CPU_TILE
    efficiency = cluster.matmul_efficiency * math.prod(side / (side + tile) for side in (m, n, k))
    return 2 * m * n * k / (cluster.flops(dtype) * efficiency)


def layer_price(config: Config, cluster: Cluster, in_8_bits: bool = False) -> Price:
    """One layer's compute on a tp rank, nothing recomputed."""
    model, tp = config.model, config.parallel.tp
    tokens, h, e = model_tokens(config), model.hidden_size, ELEMENT_BYTES[config.precision.dtype_name]
    dtype = "float8" if in_8_bits else config.precision.dtype_name
    q, kv = model.num_attention_heads // tp * model.head_dim, max(model.num_kv_heads // tp, 1) * model.head_dim
    f, gated = model.ffn_hidden_size // tp, 1 + model.swiglu
    forward = backward = weights = 0.0
    for out, inner in ((q + 2 * kv, h), (h, q), (gated * f, h), (h, f)):
        forward += product_seconds(cluster, dtype, tokens, out, inner)
        backward += product_seconds(cluster, dtype, tokens, inner, out)
        weights += product_seconds(cluster, dtype, out, inner, tokens)
    core = attention_seconds(config, cluster)
    wide = h / tp if config.parallel.sequence_parallel else h
    between = tokens * e * (10 * wide + 2 * (q + 2 * kv) + (gated + 1) * f) / cluster.memory_bandwidth
    if config.model.hidden_dropout:
        between += tokens * 2 * wide * (2 * e + 1) / cluster.memory_bandwidth
    sums = _sum_seconds(config, cluster, sum(layer_parts(model, tp).values()))
    return Price(forward + core + between, backward + ATTENTION_BACKWARD * core + 2 * between, weights + sums)


def attention_seconds(config: Config, cluster: Cluster) -> float:
    """The core's forward of one layer and microbatch: two products of half of the square, 2 s q FLOPs per token."""
    model, dtype = config.model, config.precision.dtype_name
    width = model.num_attention_heads // config.parallel.tp * model.head_dim
    rate = cluster.flops(dtype) * cluster.matmul_efficiency * ATTENTION_SHARE
    return 2 * model_tokens(config) * model.seq_length * width / rate


def _sum_seconds(config: Config, cluster: Cluster, parameters: int) -> float:
    """Weight gradients are added to sums: read, written, and in 16 bits brought there."""
    exact, e = EXACT_BYTES[config.precision.dtype_name], ELEMENT_BYTES[config.precision.dtype_name]
    return parameters * (2 * exact + (2 * e if e < exact else 0)) / cluster.memory_bandwidth


def end_price(config: Config, cluster: Cluster, first: bool, last: bool) -> Price:
    """Embedding, and output layer with the loss."""
    tokens, h, e = model_tokens(config), config.model.hidden_size, ELEMENT_BYTES[config.precision.dtype_name]
    width, dtype = config.padded_vocab_size // config.parallel.tp, config.precision.dtype_name
    parts = [Price()]
    if first:
        look_up = tokens * h * 3 * e / cluster.memory_bandwidth
        parts.append(Price(look_up, look_up, tokens * h * 2 * EXACT_BYTES[dtype] / cluster.memory_bandwidth))
    if last:
        loss = tokens * width * (LOSS_PASSES * 4 + 2 * e) / cluster.memory_bandwidth
        parts.append(Price(product_seconds(cluster, dtype, tokens, width, h) + loss,
                           product_seconds(cluster, dtype, tokens, h, width),
                           product_seconds(cluster, dtype, width, h, tokens)
                           + _sum_seconds(config, cluster, width * h)))  # fmt: skip
    return Price(*map(sum, zip(*parts, strict=True)))


def selective_seconds(config: Config, cluster: Cluster) -> float:
    """Seconds that --recompute-modules brings into a layer's backward: attention's core, norms and activations."""
    model, tp, modules = config.model, config.parallel.tp, config.activations.modules
    tokens, e, again = model_tokens(config), ELEMENT_BYTES[config.precision.dtype_name], 0.0
    if "core_attn" in modules:
        again += attention_seconds(config, cluster)
    if "layernorm" in modules:
        again += 4 * tokens * e * model.hidden_size / cluster.memory_bandwidth
    if "mlp_act" in modules:
        again += 3 * tokens * e * model.ffn_hidden_size / tp / cluster.memory_bandwidth
    return again


def chunk_price(config: Config, cluster: Cluster, chunk: Chunk, split: bool = False) -> Price:
    """One microbatch through one chunk. A recomputed layer runs its forward again within B. `split`: W runs later than B, so
    that no transfer hides behind it."""
    kinds: Counter[tuple[str, bool]] = Counter()
    for span in spans(len(chunk.layers), config.activations):
        for layer in chunk.layers[span.start : span.stop]:
            kinds[span.treatment, multiplies_in_8_bits(config, layer)] += 1
    parts = [end_price(config, cluster, chunk.first, chunk.last)]
    for (treatment, in_8_bits), count in kinds.items():
        price = layer_price(config, cluster, in_8_bits)
        again = price.forward if treatment == RECOMPUTED else selective_seconds(config, cluster)
        away = back = 0.0
        if treatment == OFFLOADED:  # to host memory while the forward runs, from there while the backward does
            move = cluster.host.seconds(layer_activation_bytes(config))
            away, back = (max(move - cluster.overlap * beside, 0.0) for beside in (price.forward, price.input_grad))
        price = price._replace(forward=price.forward + away, input_grad=price.input_grad + again + back)
        parts.append(Price(*(count * part for part in price)))
    total = Price(*map(sum, zip(*parts, strict=True)))
    beside = {"input_grad": total.input_grad / 2, "weight_grad": 0.0 if split else total.weight_grad}
    return total._replace(tensor_forward=_waited(config, cluster, forward_transfers(config, chunk), {}),
                          tensor_backward=_waited(config, cluster, backward_transfers(config, chunk), beside))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The step


def stage_prices(config: Config, cluster: Cluster, pipeline: Pipeline) -> list[Price]:
    """Of every stage. Stages with as many layers and no ends cost the same."""
    last, known, found = len(pipeline.layers) - 1, {}, []
    in_8_bits = config.precision.first_last_layers_bf16
    for stage, layers in enumerate(pipeline.layers):
        chunk = Chunk(stage, layers, stage == 0, stage == last)
        key = (len(layers), chunk.first, chunk.last, layers.start if in_8_bits else 0)
        if key not in known:
            known[key] = chunk_price(config, cluster, chunk, pipeline.schedule in SPLIT)
        found.append(known[key])
    return found


def data_seconds(config: Config, cluster: Cluster, pipeline: Pipeline, prices: list[Price]) -> float:
    """dp transfers that are waited for, of the rank with most: gradients hide behind a backward (of the last microbatch, or
    of each where each is reduced), parameters behind forwards. The last bucket to be ready has nothing to hide behind."""
    worst = 0.0
    for rank in dict.fromkeys((0, min(1, config.parallel.pp - 1), config.parallel.pp - 1)):
        total = 0.0
        for number, chunk in enumerate(pipeline.chunks(rank)):
            moved, price = gradient_transfers(config, chunk), prices[chunk.stage]
            microbatches = len(pipeline.placement.microbatches(number, config.num_microbatches))
            often = [microbatches if each else 1 for each in (moved.per_microbatch, moved.gathers_per_microbatch)]
            hidden = 0.0 if config.parallel.no_overlap_grad_reduce else cluster.overlap * (price.input_grad + price.weight_grad)
            ahead = 0.0 if config.parallel.no_overlap_param_gather else cluster.overlap * price.forward
            reduced, gathered, again = ([seconds_of(config, cluster, each) for each in part] for part in moved[:3])
            backward = sum(reduced) + sum(again)
            total += often[0] * max(backward - hidden, reduced[-1] if reduced else 0.0)
            total += often[1] * max(sum(gathered) - ahead, gathered[0] if gathered else 0.0)
        total += sum(seconds_of(config, cluster, each) for each in end_transfers(config, pipeline, rank))
        worst = max(worst, total)
    return worst


def optimizer_seconds(config: Config, cluster: Cluster, pipeline: Pipeline) -> float:
    """The owned state read and written once, the gradient read twice and zeroed, of the rank with most."""
    _, exact, kept = full_state_bytes(config)
    e, shards = ELEMENT_BYTES[config.precision.dtype_name], axis_size(config, "zero_shard")
    most = max(rank_parameters(config, rank, pipeline) for rank in {0, config.parallel.pp - 1})
    masters = 0 if config.precision.master_weights else e
    zeroed = exact if config.parallel.zero_stage < 2 else exact / shards
    return most * ((2 * kept + 2 * exact + e + masters) / shards + zeroed) / cluster.memory_bandwidth


@lru_cache(maxsize=64)
def action_lists(name: str, pp: int, chunks: int, total: int, group: int | None) -> list[list[Action]]:
    return build_schedule(name, pp, chunks, total, group)


def few_microbatches(pipeline: Pipeline, total: int) -> int:
    """As many of a step's microbatches as have to be looked at: all that a rank keeps alive are among them."""
    pp = pipeline.placement.pp_size
    if not pipeline.named or pipeline.group_size or pipeline.schedule == "gpipe" or total <= (CAP + 1) * pp:
        return total
    return CAP * pp + total % pp


def makespan(pipeline: Pipeline, total: int, costs: Costs) -> float:
    """Seconds from the first action to the last. Of a named schedule with many microbatches fewer are simulated: each p of
    them adds the same time once the pipeline is full. Where it is not emptied after every step, filling it counts once."""
    pp, chunks = pipeline.placement.pp_size, pipeline.num_chunks
    if pp == 1:
        return total * sum(sum(price) for price in (costs.forward, costs.input_grad, costs.weight_grad))

    def run(number: int) -> float:
        named = pipeline.schedule, pp, chunks, number, pipeline.group_size
        lists = action_lists(*named) if pipeline.named else pipeline.actions(number)
        return float(simulate(lists, pipeline.placement, costs).makespan)

    number = CAP * pp if pipeline.asynchronous else few_microbatches(pipeline, total)
    whole = run(number)
    if number == total and not pipeline.asynchronous:
        return whole
    each = (whole - run(number - pp)) / pp
    return total * each + (whole - number * each) / pipeline.drain_interval


def costs_of(config: Config, cluster: Cluster, prices: list[Price]) -> Costs:
    """Prices as the simulator takes them."""
    latency = seconds_of(config, cluster, Transfer("pp", "send", message_bytes(config)))
    rows = [(price.forward + price.tensor_forward, price.input_grad + price.tensor_backward, price.weight_grad)
            for price in prices]  # fmt: skip
    return Costs(*map(list, zip(*rows, strict=True)), latency=latency)


def busiest(config: Config, pipeline: Pipeline, prices: list[Price]) -> Price:
    """All microbatches of the rank with most to do."""
    found = []
    for rank in range(config.parallel.pp):
        parts = []
        for number, chunk in enumerate(pipeline.chunks(rank)):
            microbatches = len(pipeline.placement.microbatches(number, config.num_microbatches))
            parts.append(Price(*(microbatches * seconds for seconds in prices[chunk.stage])))
        found.append(Price(*map(sum, zip(*parts, strict=True))))
    return max(found, key=sum)


def step_time(config: Config, cluster: Cluster, pipeline: Pipeline) -> StepTime:
    """The whole step, by parts."""
    prices = stage_prices(config, cluster, pipeline)
    work = busiest(config, pipeline, prices)
    whole = makespan(pipeline, config.num_microbatches, costs_of(config, cluster, prices))
    data, optimizer = data_seconds(config, cluster, pipeline, prices), optimizer_seconds(config, cluster, pipeline)
    seconds, tokens = whole + data + optimizer, config.train.global_batch_size * config.model.seq_length
    devices = config.parallel.tp * config.parallel.pp * config.data_parallel_size
    used = flops_per_iteration(config) / (seconds * devices * cluster.flops(config.precision.dtype_name))
    bubble = max(whole - work.compute - work.tensor, 0.0)
    return StepTime(seconds, work.compute, work.tensor, bubble, data, optimizer, used, tokens / seconds)
