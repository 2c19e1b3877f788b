"""Bytes one rank needs: parameters and their training state exactly, activations by formula.

State per parameter held by the rank, in bytes (ZeRO stage 0):

            weight  gradient sum  fp32 master  Adam moments   together
    16 bits    2          4            4             8            18
    fp32       4          4            -             8            16
    fp64       8          8            -            16            32         (SGD keeps one moment instead of two)

--grad-compression keeps what it leaves out of the gradient sums beside them: twice that column.

Activations per layer and microbatch, e bytes per element, s tokens, b samples, h hidden, a heads of size d, k key/value
heads, f MLP width. What backward needs is kept: inputs of norms and linears, Q K V and attention's output, the MLP's
intermediate values. /t: cut over tp.

    held by every tp rank       e s b 4h + norm statistics + s b 2h dropout masks; all over t with sequence parallelism
    cut over tp                 e s b (2ad + 2kd + 2f) / t: Q, K, V, attention's output, both sides of GELU
                                with SwiGLU 3f: gate, up, product; with q/k norms ad + 2kd more, their inputs
    attention, cut over tp      flash: log-sum-exp, 4 a s b / t
                                block-causal (CPU, and wherever attention has dropout): the lower half of the s x s
                                probabilities up to 2048 tokens, and of the dropout factors, e each

At e = 2, f = 4h, GELU and dropout these are the formulas of Korthikanti et al. 2022 with flash attention, s b h 34 for
one rank, s b h (10 + 24 / t) with tp, s b h 34 / t with sequence parallelism.
Recomputation (megatron_lite/recompute.py), per layer:
    core_attn       attention's row above goes, and the q/k norms' inputs: the QKV linear's output stands for Q, K and V
    layernorm       4h -> 2h: the inputs of the linears behind the norms
    mlp_act         2f -> f, with SwiGLU 3f -> 2f
    full            e s b h, over t with sequence parallelism, per unit; and once all of a unit, while its backward runs

First stage: the mask of the embedding's dropout. Last stage: inputs of the final norm and of the output layer, and the
logits (their gradient takes their place). All of it as often as the schedule keeps microbatches alive: a rank's peak is
counted along its list of actions, where every chunk's forward adds what that chunk keeps and its weight gradient frees it.
An asynchronous pipeline keeps several versions of the weights, or PipeMare's estimate of older ones and the fp32 mean of
its updates (schedules/asynchronous.py). Left out: work space within one operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.planner.params import chunk_parts, expert_elements, rank_parameters
from megatron_lite.planner.pipeline import Chunk, Pipeline, pipeline_of
from megatron_lite.planner.recompute import KEPT, OFFLOADED, Span, spans
from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.check import peak_live

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
EXACT_BYTES = {"bfloat16": 4, "float16": 4, "float32": 4, "float64": 8}  # gradient sums, master weights, each moment
MASK_BYTES = 1  # of a dropout mask
BLOCK_ROWS = {"bfloat16": 128, "float16": 128, "float32": 64, "float64": 64}  # block-causal attention, see models/attention.py
KEEP_PROBABILITIES_UP_TO = 2048  # tokens, likewise


@dataclass(frozen=True)
class StageMemory:
    """One pipeline rank: what each of its tp ranks holds. Sizes in bytes; `transient` is what ZeRO-2 and 3 bring within a
    step, full gradients and gathered parameters."""

    stage: int
    layers: tuple[range, ...]  # of its chunks
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    live_microbatches: float
    transient: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


def sharded_bytes(stage: int, ranks: int, weight: float, gradient: float, optimizer: float) -> tuple[float, float, float]:
    """Of these bytes per parameter, what one of the `ranks` that share them keeps at a ZeRO stage.

    bf16 with fp32 gradients, 2 + 4 + 12: 18, 6 + 12/n, 2 + 16/n, 18/n. Source: Rajbhandari et al. 2020 (arXiv 1910.02054).
    """
    shares = [ranks if stage >= sharded_from else 1 for sharded_from in (3, 2, 1)]
    return tuple(size / n for size, n in zip((weight, gradient, optimizer), shares, strict=True))


def state_bytes(config: Config, experts: bool = False) -> tuple[float, float, float]:
    """(weight, gradient sum, optimizer) bytes per parameter of its stage that a rank keeps between steps. ZeRO shards over
    dp x cp; experts over the ranks of it that hold the same ones."""
    parallel = config.parallel
    ranks = config.data_parallel_size * parallel.cp // (parallel.ep if experts else 1)
    ranks = max(ranks // parallel.zero_replica_size, 1)
    return sharded_bytes(parallel.zero_stage, ranks, *full_state_bytes(config))


def full_state_bytes(config: Config) -> tuple[int, int, int]:
    """(weight, gradient sum, optimizer) bytes per parameter without ZeRO."""
    dtype = config.precision.dtype_name
    exact = EXACT_BYTES[dtype]
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    master = exact if config.precision.master_weights else 0
    compressed = config.parallel.grad_compression != "none"  # what steps left out is kept beside their gradients
    return ELEMENT_BYTES[dtype], exact * (2 if compressed else 1), master + moments * exact


def attention_core(config: Config) -> str:
    """The form of attention that a GPU run takes (`models/attention.py`): dropout rules the flash kernel out."""
    if config.parallel.cp > 1:
        return "flash"  # parts are merged by their log-sum-exp
    return "block" if config.model.attention_dropout or config.parallel.distributed_backend == "gloo" else "flash"


def layer_activation_bytes(config: Config, core: str | None = None, modules: tuple[str, ...] | None = None) -> int:
    """Bytes that one transformer layer keeps of one microbatch for its backward, on one tp rank.

    `modules` are recomputed: those of --recompute-modules, unless others are given.
    """
    modules = config.activations.modules if modules is None else modules
    tokens = model_tokens(config)
    attention = tokens * _attention_bytes(config, core or attention_core(config), "core_attn" in modules)
    return 2 * _residual_bytes(config, modules) + attention + _mlp_bytes(config, modules)


def model_tokens(config: Config) -> int:
    """Tokens of a microbatch on a rank: context parallelism cuts every sequence."""
    return config.model.seq_length // config.parallel.cp * config.train.micro_batch_size


def _residual_bytes(config: Config, modules: tuple[str, ...]) -> int:
    """What lies on either side of attention, or of the MLP: the norm's input and statistics, the input of the linear
    behind it, the mask of the dropout at the end."""
    wide = ELEMENT_BYTES[config.precision.dtype_name] * (1 if "layernorm" in modules else 2) + (
        MASK_BYTES if config.model.hidden_dropout else 0)  # fmt: skip
    size = model_tokens(config) * (wide * config.model.hidden_size + _norm_bytes(config))
    return size // config.parallel.tp if config.parallel.sequence_parallel else size


def _mlp_bytes(config: Config, modules: tuple[str, ...]) -> int:
    """Both sides of the activation function."""
    wide = (3 if config.model.swiglu else 2) - ("mlp_act" in modules)
    e = ELEMENT_BYTES[config.precision.dtype_name]
    return model_tokens(config) * e * wide * config.model.ffn_hidden_size // config.parallel.tp


def _attention_bytes(config: Config, core: str, recomputed: bool) -> int:
    """What attention keeps per token: Q, K, V, its output, and what the core needs. Recomputed, the output of the QKV
    linear takes the place of Q, K and V, and the rest is gone but for the output."""
    model, tp = config.model, config.parallel.tp
    heads, kv_heads = model.num_attention_heads // tp, max(model.num_kv_heads // tp, 1)
    fused = heads + 2 * kv_heads  # the core keeps Q, K and V of its own; the QKV linear's output goes, but for q/k norms
    with_norms = model.qk_layernorm and not recomputed
    kept = (fused + heads + (fused if with_norms else 0)) * model.head_dim * ELEMENT_BYTES[config.precision.dtype_name]
    if with_norms:
        kept += _norm_bytes(config) * (heads + kv_heads)
    return kept if recomputed else kept + heads * _core_bytes(config, core)


class Kept(NamedTuple):
    """Bytes of activations of one microbatch, of some layers or a chunk."""

    forward: int  # from the forward on
    running: int  # more while its backward runs
    waiting: int  # more from B to W, where a schedule splits the backward


def span_bytes(config: Config, span: Span, core: str | None = None) -> Kept:
    """What neighbouring layers keep. Recomputed: their input, and in their backward all that they keep otherwise; under
    sequence parallelism the last of them then holds the gathered inputs of two linears. Offloaded: nothing on the device,
    and then two layers at a time. With core_attn each core is complete again while its backward runs (what the MLP and the
    output projection kept is gone by then), and inputs of linears that were made again wait for W."""
    layers, model, tp = span.stop - span.start, config.model, config.parallel.tp
    full = layers * layer_activation_bytes(config, core)
    if span.treatment == OFFLOADED:
        return Kept(0, 2 * full, full)
    tokens, e = model_tokens(config), ELEMENT_BYTES[config.precision.dtype_name]
    if span.treatment == KEPT:
        modules, running = config.activations.modules, 0
        if "core_attn" in modules:
            there = _attention_bytes(config, "flash", True)  # Q, K, V or what they are made of, and the output
            output = model.num_attention_heads // tp * model.head_dim * e
            again = _attention_bytes(config, core or attention_core(config), False) - 2 * output
            again -= there - output if model.qk_layernorm else 0  # what the q/k norms keep is a part of QKV
            running = tokens * again - _residual_bytes(config, modules) - _mlp_bytes(config, modules)
        inputs = layers * layer_activation_bytes(config, core, tuple(m for m in modules if m == "core_attn")) - full
        return Kept(full, max(running, 0), inputs)
    wide = tokens * model.hidden_size * e
    cut = wide // tp if config.parallel.sequence_parallel else wide
    more = full - cut + 2 * (wide - cut)
    return Kept(cut, more, more)


def chunk_bytes(config: Config, chunk: Chunk, core: str | None = None) -> Kept:
    """The same of a whole chunk, its ends included. All its layers wait for their W; one span at a time runs its backward,
    and by then what the later ones and the last stage's end kept is gone."""
    sizes = [span_bytes(config, span, core) for span in spans(len(chunk.layers), config.activations)]
    end = end_activation_bytes(config, chunk)
    running, gone = 0, end - end_activation_bytes(config, chunk._replace(last=False))
    for size in reversed(sizes):
        running = max(running, size.running - gone)
        gone += size.forward
    return Kept(sum(size.forward for size in sizes) + end, running, sum(size.waiting for size in sizes))


def _norm_bytes(config: Config) -> int:
    """Statistics a norm keeps per token: 1/rms, and LayerNorm its mean."""
    exact = 8 if config.precision.fp64 else 4
    return exact * (2 if config.model.normalization == "LayerNorm" else 1)


def _core_bytes(config: Config, core: str) -> int:
    """What the core keeps per head and query beside Q, K, V and its output."""
    if core == "flash":
        return 4
    e, length = ELEMENT_BYTES[config.precision.dtype_name], config.model.seq_length
    block = min(BLOCK_ROWS[config.precision.dtype_name], length)
    copies = int(length <= KEEP_PROBABILITIES_UP_TO) + int(config.model.attention_dropout > 0)
    return copies * e * (length + block) // 2


def end_activation_bytes(config: Config, chunk: Chunk) -> int:
    """Bytes of one microbatch that the first stage (embedding) and the last (norm, head) keep beside their layers."""
    model, parallel = config.model, config.parallel
    tokens = model_tokens(config)
    local_tokens = tokens // parallel.tp if parallel.sequence_parallel else tokens
    e = ELEMENT_BYTES[config.precision.dtype_name]
    size = 0
    if chunk.first and model.hidden_dropout:
        size += local_tokens * model.hidden_size * MASK_BYTES
    if chunk.last:
        size += local_tokens * (2 * e * model.hidden_size + _norm_bytes(config))
        size += tokens * e * config.padded_vocab_size // parallel.tp
    return size


def transient_bytes(config: Config, rank: int, pipeline: Pipeline) -> int:
    """Bytes of full gradients (ZeRO-2 and 3) and gathered parameters (3) at once on a pipeline rank: those of a unit in use
    and of --zero-prefetch-limit more on their way. ZeRO-3 with a pipeline holds all of them for the step."""
    parallel, (weight, gradient, _) = config.parallel, full_state_bytes(config)
    if parallel.zero_stage < 2:
        return 0
    if parallel.zero_stage == 3 and parallel.pp > 1:
        return (weight + gradient) * rank_parameters(config, rank, pipeline)
    pair = [(parallel.no_overlap_grad_reduce, gradient)]
    if parallel.zero_stage == 3:
        pair.append((parallel.no_overlap_param_gather, weight))
    total = 0
    for alone, each in pair:
        window = 1 if alone else 1 + parallel.zero_prefetch_limit
        runs = [sum(units[i : i + window]) for units in _units(config, pipeline.chunks(rank)) for i in range(len(units))]
        total += each * max(runs)
    if config.model.tied and parallel.pp == 1:
        total += gradient * _units(config, pipeline.chunks(rank))[0][0]  # from the head's use of it to the embedding's
    return total


def _units(config: Config, chunks: Sequence[Chunk]) -> list[list[int]]:
    """Parameters of each unit of these chunks, in order of use."""
    found = []
    for chunk in chunks:
        parts = chunk_parts(config, chunk)
        layers = parts.pop("layers")
        before = [parts.pop(name) for name in ("embed_tokens", "embed_positions") if name in parts]
        found.append([*before, *[layers // max(len(chunk.layers), 1)] * len(chunk.layers), *parts.values()])
    return found


def live_microbatches(config: Config) -> list[float]:
    """Per pipeline rank, the most microbatches whose activations are alive at once: counted in the schedule itself."""
    pipeline = pipeline_of(config)
    per_share = pipeline.placement.chunks_per_share
    actions = pipeline.actions(pipeline.planned(config.num_microbatches))
    return [peak_live(mine, per_share) for mine in actions]


def peak_bytes(actions: Sequence[Action], kept: Sequence[Kept]) -> int:
    """Most bytes alive at once on a rank whose chunk c keeps kept[c] of every microbatch from its F to its W."""
    live = peak = 0
    for action in actions:
        chunk = kept[action.chunk]
        live += {"F": chunk.forward, "B": chunk.waiting}.get(action.kind, 0)
        peak = max(peak, live + (chunk.running if action.kind == "BW" else 0))
        live -= {"W": chunk.forward + chunk.waiting, "BW": chunk.forward}.get(action.kind, 0)
    return peak


def _estimate_bytes(config: Config, rank: int) -> tuple[int, int]:
    """(estimated weights, mean change of an update) in bytes per parameter that PipeMare's correction keeps."""
    if not config.parallel.pipemare_correction_decay or rank == config.parallel.pp - 1:
        return 0, 0
    dtype = config.precision.dtype_name
    return ELEMENT_BYTES[dtype], EXACT_BYTES[dtype]


def stage_memory(config: Config, core: str | None = None, pipeline: Pipeline | None = None) -> list[StageMemory]:
    """The memory of every pipeline rank, first to last; of the flags' own pipeline unless one is given."""
    pipeline = pipeline or pipeline_of(config)
    lists = pipeline.actions(pipeline.planned(config.num_microbatches))
    return [rank_memory(config, pipeline, rank, actions, core) for rank, actions in enumerate(lists)]


def rank_memory(config: Config, pipeline: Pipeline, rank: int, actions: Sequence[Action],
                core: str | None = None) -> StageMemory:  # fmt: skip
    """The memory of one pipeline rank that runs these actions."""
    chunks = pipeline.chunks(rank)
    activations = peak_bytes(actions, [chunk_bytes(config, chunk, core) for chunk in chunks])
    live = peak_live(actions, pipeline.placement.chunks_per_share)
    layers, (count, *state, transient) = tuple(chunk.layers for chunk in chunks), rank_state(config, pipeline, rank)
    return StageMemory(rank, layers, count, *state, activations, live, transient)


def rank_state(config: Config, pipeline: Pipeline, rank: int) -> tuple[int, int, int, int, int]:
    """(parameters, bytes of weights, of gradients, of the optimizer, of what ZeRO-2 and 3 bring within a step) of a rank."""
    count, versions = rank_parameters(config, rank, pipeline), pipeline.weight_versions(rank, config.num_microbatches)
    experts = sum(expert_elements(config, chunk.layers) for chunk in pipeline.chunks(rank))
    extra = _estimate_bytes(config, rank) if pipeline.schedule == "pipemare" else (0, 0)
    total = [0.0, 0.0, 0.0]
    for elements, (weight, gradient, optimizer) in ((count - experts, state_bytes(config)), (experts, state_bytes(config, True))):
        each = weight * versions + extra[0], gradient, optimizer + extra[1]
        total = [size + elements * more for size, more in zip(total, each, strict=True)]
    return count, *(round(size) for size in total), transient_bytes(config, rank, pipeline)


def buffer_bytes(config: Config) -> int:
    """Bytes that communication holds at once: the gathered input and the partial output of a tp linear, and pipeline messages
    posted ahead (pipeline/executor.py: two, and one that leaves)."""
    parallel, e = config.parallel, ELEMENT_BYTES[config.precision.dtype_name]
    whole = model_tokens(config) * config.model.hidden_size * e
    message = whole // parallel.tp if parallel.sequence_parallel else whole
    return (2 * whole if parallel.sequence_parallel else 0) + (3 * message if parallel.pp > 1 else 0)
