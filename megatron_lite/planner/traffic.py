"""What the wires carry in a step: every collective and every pipeline message of a rank, by mesh axis.

Bytes of a collective's buffer are of the whole of it: what is reduced, what a gather gives, what a message holds. Of them
leave each of the n ranks (ring algorithms, which reach the lower bound; Patarasuk & Yuan 2009; Thakur et al. 2005):

    all_reduce  2 (n-1)/n      all_gather, reduce_scatter, all_to_all  (n-1)/n      broadcast, send  1

u = s b h e bytes is one activation, e those of an element, g those of a gradient. Per microbatch (Shoeybi et al. 2019, arXiv
1909.08053; Korthikanti et al. 2022, arXiv 2205.05198; parallel/tensor.py, parallel/vocab.py):

    tp, a layer    forward     2 all-reduce u                            sequence parallel: 2 all-gather + 2 reduce-scatter
                   backward    2 all-reduce u                            4 all-gather + 2 reduce-scatter (inputs gathered again)
                   recomputed  the forward's again, without the last sum (whose output nobody needs); inputs it gathered stay
    tp, embedding  forward     1 all-reduce u, or reduce-scatter         backward: -, or all-gather
    tp, output     backward    1 all-reduce u; sequence parallel: an all-gather forward, one and a reduce-scatter backward
                   loss        maxima, then three sums of a token, fp32
    pp             u, under sequence parallelism u / tp, for every stage boundary and direction that crosses ranks

Per step, for each bucket of P parameters (Rajbhandari et al. 2020, arXiv 1910.02054, section 7; optim/ddp.py, optim/zero.py):

    ZeRO 0         all-reduce g P over dp
    ZeRO 1         reduce-scatter g P; all-gather e P
    ZeRO 2         reduce-scatter g P in every microbatch; all-gather e P
    ZeRO 3         reduce-scatter g P and about 2 all-gather e P in every microbatch; with pipeline stages once each
    replicas       of hybrid shards: all-reduce g P / shards
    tied           all-reduce of the embedding's g P between first and last stage, where they are two ranks
    partial        gradients of which tp ranks saw a part, one all-reduce
    scalars        the norm, the loss and its tokens

`--grad-reduce-dtype bf16` sends an all-reduce as all-to-all and all-gather of 2 bytes, a reduce-scatter as an all-to-all.
Low-rank gradients (`--grad-compression`) are counted uncompressed. Evaluation, logging and checkpoints are left out.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.optim.buckets import layout
from megatron_lite.planner.memory import ELEMENT_BYTES, EXACT_BYTES, model_tokens
from megatron_lite.planner.params import partial_elements, unit_tensors
from megatron_lite.planner.pipeline import Chunk, Pipeline
from megatron_lite.planner.recompute import RECOMPUTED, spans
from megatron_lite.schedules.actions import Action, sent

LOGITS_CHUNK_BYTES = 8 << 20  # parallel/vocab.py


class Transfer(NamedTuple):
    """`calls` times `op` over mesh axis `axis` with a buffer of `size` bytes. `behind`: the matrix product it runs beside
    ("input_grad", "weight_grad"), empty where everybody waits for it."""

    axis: str
    op: str
    size: float
    calls: float = 1
    what: str = ""
    behind: str = ""


def wire_share(op: str, ranks: int) -> float:
    """Of a buffer's bytes, those that leave a rank."""
    if ranks == 1:
        return 0.0
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "send": 1.0}.get(op, (ranks - 1) / ranks)


def axis_size(config: Config, axis: str) -> int:
    """Ranks of a named axis (comm/mesh.py)."""
    tp, pp, dp, copies = config.parallel.tp, config.parallel.pp, config.data_parallel_size, config.parallel.zero_replica_size
    zero, cp, ep = config.parallel.zero_stage > 0, config.parallel.cp, config.parallel.ep
    return {"tp": tp, "pp": pp, "dp": dp, "dp_cp": dp * cp, "cp": cp, "ep": ep,
            "expert_dp": dp * cp // ep, "tp_pp": tp * pp, "embedding": 2 if pp > 1 else 1, "mirror": 2,
            "zero_shard": dp * cp // copies if zero else 1, "zero_replica": copies}[axis]  # fmt: skip


def bytes_by_axis(config: Config, transfers: Iterable[Transfer]) -> dict[str, float]:
    """Axis -> bytes that leave a rank."""
    found: Counter[str] = Counter()
    for each in transfers:
        found[each.axis] += each.calls * each.size * wire_share(each.op, axis_size(config, each.axis))
    return dict(found)


# ---------------------------------------------------------------------------------------------------------------------
# Tensor parallelism: of one microbatch


def activation_bytes(config: Config) -> int:
    """u: [s, b, h] in the model's dtype."""
    return model_tokens(config) * config.model.hidden_size * ELEMENT_BYTES[config.precision.dtype_name]


def forward_transfers(config: Config, chunk: Chunk) -> list[Transfer]:
    """tp transfers of a chunk's forward."""
    if config.parallel.tp == 1:
        return []
    u, sp, layers = activation_bytes(config), config.parallel.sequence_parallel, len(chunk.layers)
    found = []
    if chunk.first:
        found.append(Transfer("tp", "reduce_scatter" if sp else "all_reduce", u, 1, "embedding"))
    if layers and sp:
        found += [Transfer("tp", op, u, 2 * layers, "layers") for op in ("all_gather", "reduce_scatter")]
    elif layers:
        found.append(Transfer("tp", "all_reduce", u, 2 * layers, "layers"))
    if chunk.last:
        found += [Transfer("tp", "all_gather", u, 1, "output layer")] if sp else []
        exact = 8 if config.precision.fp64 else 4
        tokens, width = model_tokens(config), config.padded_vocab_size // config.parallel.tp
        calls = ceil(tokens / max(1, LOGITS_CHUNK_BYTES // (4 * width)))
        found += [Transfer("tp", "all_reduce", values * exact * tokens / calls, calls, "loss") for values in (1, 3)]
    return found


def backward_transfers(config: Config, chunk: Chunk) -> list[Transfer]:
    """tp transfers of a chunk's backward, recomputation included."""
    if config.parallel.tp == 1:
        return []
    u, sp, found = activation_bytes(config), config.parallel.sequence_parallel, []
    heads = int(chunk.last)
    linears, gathered = 2 * len(chunk.layers) + heads, 0  # column-cut ones; those of them whose input a replay has gathered
    for span in spans(len(chunk.layers), config.activations):
        if span.treatment == RECOMPUTED:
            layers, last = span.stop - span.start, chunk.layers[span.stop - 1]
            sums = 2 * layers - (0 if multiplies_in_8_bits(config, last) else 1)
            found.append(Transfer("tp", "reduce_scatter" if sp else "all_reduce", u, sums, "recomputed"))
            found += [Transfer("tp", "all_gather", u, 2 * layers, "recomputed")] if sp else []
            gathered += 2
    if sp:
        found.append(Transfer("tp", "all_gather", u, 2 * len(chunk.layers) + chunk.first, "output gradients"))
        found.append(Transfer("tp", "all_gather", u, linears - gathered, "inputs again", "input_grad"))
    found.append(Transfer("tp", "reduce_scatter" if sp else "all_reduce", u, linears, "input gradients", "weight_grad"))
    return [each for each in found if each.calls]


def multiplies_in_8_bits(config: Config, layer: int) -> bool:
    ends = {0, config.model.num_layers - 1} if config.precision.first_last_layers_bf16 else set()
    return config.precision.fp8_format is not None and layer not in ends


# ---------------------------------------------------------------------------------------------------------------------
# Context and expert parallelism: of one layer and microbatch


def context_transfers(config: Config, kind: str) -> tuple[list[Transfer], list[Transfer]]:
    """(forward, backward) of attention under a --cp-comm-type of "p2p", "a2a" or "allgather" (docs/parallelism.md).

    Ring: K and V one rank on, c - 1 times, beside the compute on them; backward the same, and their gradients, exact, c times
    until they are home. Ulysses: Q, K, V to whole sequences of few heads, the output back, and both again. All-gather: K and V,
    again in the backward, whose gradients are scattered. Raises ValueError for other kinds.
    Source: Liu et al. 2023 (arXiv 2310.01889), Jacobs et al. 2023 (arXiv 2309.14509).
    """
    model, parallel, dtype = config.model, config.parallel, config.precision.dtype_name
    size, tokens, e = parallel.cp, model_tokens(config), ELEMENT_BYTES[dtype]
    if size == 1:
        return [], []
    q = model.num_attention_heads // parallel.tp * model.head_dim
    pair = 2 * max(model.num_kv_heads // parallel.tp, 1) * model.head_dim * tokens  # elements of a rank's own K and V
    if kind == "p2p":
        keys = Transfer("cp", "send", e * pair, size - 1, "keys and values", "attention")
        return [keys], [keys, Transfer("cp", "send", EXACT_BYTES[dtype] * pair, size, "their gradients", "attention")]
    if kind == "a2a":
        trade = [Transfer("cp", "all_to_all", e * (q * tokens + pair), 1, "queries, keys, values"),
                 Transfer("cp", "all_to_all", e * q * tokens, 1, "attention's output")]  # fmt: skip
        return trade, trade[::-1]
    if kind == "allgather":
        keys = Transfer("cp", "all_gather", e * pair * size, 1, "keys and values")
        return [keys], [keys, Transfer("cp", "reduce_scatter", EXACT_BYTES[dtype] * pair * size, 1, "their gradients")]
    raise ValueError(f"no formula for {kind}")


def expert_rows(config: Config) -> int:
    """Rows that a rank sends to experts, and in expectation gets: topk for each of its tokens, nothing dropped. Whole experts
    (etp 1) share the tokens out over tp."""
    apart = config.parallel.tp if config.parallel.etp == 1 else 1
    return model_tokens(config) // apart * config.model.moe_router_topk


def dispatch_transfers(config: Config) -> list[Transfer]:
    """Rows to the experts' ranks and home; the backward's are as many. Source: Lepikhin et al. 2020 (arXiv 2006.16668)."""
    if config.parallel.ep == 1:
        return []
    rows = expert_rows(config) * config.model.hidden_size * ELEMENT_BYTES[config.precision.dtype_name]
    return [Transfer("ep", "all_to_all", rows, 1, what) for what in ("rows to experts", "rows home")]


# ---------------------------------------------------------------------------------------------------------------------
# Data parallelism


class Gradients(NamedTuple):
    """What data parallelism moves for one chunk: gradients as often as they are reduced, parameters in forward and backward.
    `per_microbatch`: in every microbatch rather than once a step."""

    reduced: list[Transfer]
    gathered: list[Transfer]
    gathered_again: list[Transfer]
    per_microbatch: bool
    gathers_per_microbatch: bool


def bucket_sizes(config: Config, chunk: Chunk) -> list[int]:
    """Elements of the gradient buckets of a chunk, padding included (optim/buckets.py)."""
    units = [[(0, count) for count in unit] for unit in unit_tensors(config, chunk)]
    ranks = max(config.data_parallel_size, 1)
    return [bucket.size for bucket in layout(units, ranks, config.parallel.ddp_bucket_size)]


def gradient_transfers(config: Config, chunk: Chunk) -> Gradients:
    """Each bucket's reduction and gathers."""
    parallel, dtype = config.parallel, config.precision.dtype_name
    stage, pipelined, exact, e = parallel.zero_stage, parallel.pp > 1, EXACT_BYTES[dtype], ELEMENT_BYTES[dtype]
    per_microbatch, frees = stage == 2 or (stage == 3 and not pipelined), stage == 3 and not pipelined
    shards, sizes = axis_size(config, "zero_shard"), bucket_sizes(config, chunk)
    reduced: list[Transfer] = []
    for size in sizes if config.data_parallel_size > 1 else []:
        reduced += _reduction(config, size, "zero_shard" if shards > 1 else "dp_cp", exact)
    gathered = [Transfer("zero_shard", "all_gather", e * size, 1, "parameters") for size in sizes] if shards > 1 else []
    again: list[Transfer] = []
    if frees and gathered:
        in_order = gathered[::-1]
        if chunk.first and chunk.last and config.model.tied:
            in_order.append(in_order[0])  # the output layer uses the embedding's bucket once more
        embeddings = 1 + (config.model.position_embedding_type == "learned_absolute") if chunk.first else 0
        gathered, again = in_order, [each._replace(what="parameters again") for each in in_order[embeddings:-1]]
    return Gradients(reduced, gathered, again, per_microbatch, frees)


def _reduction(config: Config, size: int, axis: str, exact: int) -> list[Transfer]:
    """The reduction of one bucket of `size` elements over `axis`."""
    op, whole = ("reduce_scatter", exact * size) if axis == "zero_shard" else ("all_reduce", exact * size)
    if config.parallel.grad_reduce_dtype != "bf16":
        return [Transfer(axis, op, whole, 1, "gradients")]
    narrow = [Transfer(axis, "all_to_all", 2 * size, 1, "gradients")]
    return narrow + ([Transfer(axis, "all_gather", 2 * size, 1, "gradients")] if op == "all_reduce" else [])


def end_transfers(config: Config, pipeline: Pipeline, rank: int) -> list[Transfer]:
    """What a step ends with on a pipeline rank: replicas, mirrors, tied copies, partial gradients, norm and loss."""
    parallel, exact = config.parallel, EXACT_BYTES[config.precision.dtype_name]
    chunks, shards = pipeline.chunks(rank), axis_size(config, "zero_shard")
    owned = [size // shards for chunk in chunks for size in bucket_sizes(config, chunk)]
    found = []
    if shards > 1 and parallel.zero_replica_size > 1:
        for size in owned:
            found += [each._replace(what="replicas") for each in _reduction(config, size, "zero_replica", exact)]
    if pipeline.placement.kind == "bidirectional":
        found += [Transfer("mirror", "all_reduce", exact * size, 1, "both places of a stage") for size in owned]
    if parallel.tp > 1 and (elements := sum(partial_elements(config, chunk) for chunk in chunks)):
        found.append(Transfer("tp", "all_reduce", exact * elements / shards, 1, "partial gradients"))
    ends = [chunk.first or chunk.last for chunk in chunks]
    if config.model.tied and parallel.pp > 1 and any(ends) and pipeline.placement.kind == "loop":
        table = next(sizes[0 if chunk.last else -1] for chunk in chunks if chunk.first or chunk.last
                     for sizes in [bucket_sizes(config, chunk)])  # fmt: skip
        found.append(Transfer("embedding", "all_reduce", exact * table / shards, 1, "tied embeddings"))
    scalars = [("dp_cp", 16), ("pp", 16), ("tp_pp", 8), ("zero_shard", 8)]
    found += [Transfer(axis, "all_reduce", size, 1, "scalars") for axis, size in scalars if axis_size(config, axis) > 1]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# A step


def message_bytes(config: Config) -> int:
    """A pipeline message: a stage's output, of which sequence parallelism cuts each tp rank its part."""
    return activation_bytes(config) // (config.parallel.tp if config.parallel.sequence_parallel else 1)


def rank_transfers(config: Config, pipeline: Pipeline, rank: int, actions: list[Action]) -> list[Transfer]:
    """Everything that a pipeline rank's tp ranks take part in during a step of these actions."""
    found, total = end_transfers(config, pipeline, rank), config.num_microbatches
    for number, chunk in enumerate(pipeline.chunks(rank)):
        microbatches = len(pipeline.placement.microbatches(number, total))
        each_pass = [*forward_transfers(config, chunk), *backward_transfers(config, chunk)]
        found += [each._replace(calls=each.calls * microbatches) for each in each_pass]
        moved = gradient_transfers(config, chunk)
        reductions, gathers = (microbatches if often else 1 for often in (moved.per_microbatch, moved.gathers_per_microbatch))
        found += [each._replace(calls=each.calls * reductions) for each in moved.reduced]
        found += [each._replace(calls=each.calls * gathers) for each in [*moved.gathered, *moved.gathered_again]]
    if messages := sum(sent(action, rank, pipeline.placement) is not None for action in actions):
        found.append(Transfer("pp", "send", message_bytes(config), messages, "activations and their gradients"))
    return found
