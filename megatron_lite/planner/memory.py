"""Bytes one rank needs: parameters and their training state exactly, activations by formula.

State per parameter held by the rank, in bytes (ZeRO stage 0):

            weight  gradient sum  fp32 master  Adam moments   together
    16 bits    2          4            4             8            18
    fp32       4          4            -             8            16
    fp64       8          8            -            16            32         (SGD keeps one moment instead of two)

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
First stage: the mask of the embedding's dropout. Last stage: inputs of the final norm and of the output layer, and the
logits (their gradient takes their place). All of it as often as the schedule keeps microbatches alive: a rank's peak is
counted along its list of actions, where every chunk's forward adds what that chunk keeps and its weight gradient frees it.
An asynchronous pipeline keeps several versions of the weights, or PipeMare's estimate of older ones and the fp32 mean of
its updates (schedules/asynchronous.py). Left out: work space within one operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config import Config
from megatron_lite.planner.params import chunk_parts, rank_parameters
from megatron_lite.planner.pipeline import Chunk, Pipeline, pipeline_of
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


def kept(stage: int, ranks: int, weight: float, gradient: float, optimizer: float) -> tuple[float, float, float]:
    """Of these bytes per parameter, what one of the `ranks` that share them keeps at a ZeRO stage.

    bf16 with fp32 gradients, 2 + 4 + 12: 18, 6 + 12/n, 2 + 16/n, 18/n. Source: Rajbhandari et al. 2020 (arXiv 1910.02054).
    """
    shares = [ranks if stage >= sharded_from else 1 for sharded_from in (3, 2, 1)]
    return tuple(size / n for size, n in zip((weight, gradient, optimizer), shares, strict=True))


def state_bytes(config: Config) -> tuple[float, float, float]:
    """(weight, gradient sum, optimizer) bytes per parameter of its stage that a rank keeps between steps."""
    parallel = config.parallel
    ranks = max(config.data_parallel_size // parallel.zero_replica_size, 1)
    return kept(parallel.zero_stage, ranks, *full_state_bytes(config))


def full_state_bytes(config: Config) -> tuple[int, int, int]:
    """(weight, gradient sum, optimizer) bytes per parameter without ZeRO."""
    dtype = config.precision.dtype_name
    exact = EXACT_BYTES[dtype]
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    master = exact if config.precision.master_weights else 0
    return ELEMENT_BYTES[dtype], exact, master + moments * exact


def attention_core(config: Config) -> str:
    """The form of attention that a GPU run takes (`models/attention.py`): dropout rules the flash kernel out."""
    return "block" if config.model.attention_dropout or config.parallel.distributed_backend == "gloo" else "flash"


def layer_activation_bytes(config: Config, core: str | None = None) -> int:
    """Bytes that one transformer layer keeps of one microbatch for its backward, on one tp rank."""
    model, tp = config.model, config.parallel.tp
    tokens = model.seq_length * config.train.micro_batch_size
    e = ELEMENT_BYTES[config.precision.dtype_name]
    whole = tokens * (e * 4 * model.hidden_size + 2 * _norm_bytes(config))
    if model.hidden_dropout:
        whole += tokens * 2 * model.hidden_size * MASK_BYTES
    if config.parallel.sequence_parallel:
        whole //= tp
    heads, kv_heads = model.num_attention_heads // tp, max(model.num_kv_heads // tp, 1)
    fused = heads + 2 * kv_heads  # the core keeps Q, K and V of its own; the QKV linear's output goes, but for q/k norms
    attention = (fused + heads + (fused if model.qk_layernorm else 0)) * model.head_dim
    kept = e * (attention + (3 if model.swiglu else 2) * model.ffn_hidden_size // tp)
    if model.qk_layernorm:
        kept += _norm_bytes(config) * (heads + kv_heads)
    return whole + tokens * (kept + heads * _attention_bytes(config, core or attention_core(config)))


def _norm_bytes(config: Config) -> int:
    """Statistics a norm keeps per token: 1/rms, and LayerNorm its mean."""
    exact = 8 if config.precision.fp64 else 4
    return exact * (2 if config.model.normalization == "LayerNorm" else 1)


def _attention_bytes(config: Config, core: str) -> int:
    """What attention keeps per head and query beside Q, K, V and its output."""
    if core == "flash":
        return 4
    e, length = ELEMENT_BYTES[config.precision.dtype_name], config.model.seq_length
    block = min(BLOCK_ROWS[config.precision.dtype_name], length)
    copies = int(length <= KEEP_PROBABILITIES_UP_TO) + int(config.model.attention_dropout > 0)
    return copies * e * (length + block) // 2


def end_activation_bytes(config: Config, chunk: Chunk) -> int:
    """Bytes of one microbatch that the first stage (embedding) and the last (norm, head) keep beside their layers."""
    model, parallel = config.model, config.parallel
    tokens = model.seq_length * config.train.micro_batch_size
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


def peak_bytes(actions: Sequence[Action], kept: Sequence[int]) -> int:
    """Most bytes alive at once on a rank whose chunk c keeps kept[c] of every microbatch from its F to its W."""
    live = peak = 0
    for action in actions:
        live += kept[action.chunk] if "F" in action.parts else 0
        peak = max(peak, live)
        live -= kept[action.chunk] if "W" in action.parts else 0
    return peak


def _estimate_bytes(config: Config, rank: int) -> tuple[int, int]:
    """(estimated weights, mean change of an update) in bytes per parameter that PipeMare's correction keeps."""
    if not config.parallel.pipemare_correction_decay or rank == config.parallel.pp - 1:
        return 0, 0
    dtype = config.precision.dtype_name
    return ELEMENT_BYTES[dtype], EXACT_BYTES[dtype]


def stage_memory(config: Config, core: str | None = None, pipeline: Pipeline | None = None) -> list[StageMemory]:
    """The memory of every pipeline rank, first to last; of the flags' own pipeline unless one is given."""
    weight, gradient, optimizer = state_bytes(config)
    pipeline, layer, plan = pipeline or pipeline_of(config), layer_activation_bytes(config, core), []
    for rank, actions in enumerate(pipeline.actions(pipeline.planned(config.num_microbatches))):
        count, chunks = rank_parameters(config, rank, pipeline), pipeline.chunks(rank)
        of_chunk = [len(chunk.layers) * layer + end_activation_bytes(config, chunk) for chunk in chunks]
        live = peak_live(actions, pipeline.placement.chunks_per_share)
        layers = tuple(chunk.layers for chunk in chunks)
        versions = pipeline.weight_versions(rank, config.num_microbatches)
        extra = _estimate_bytes(config, rank) if pipeline.schedule == "pipemare" else (0, 0)
        each = weight * versions + extra[0], gradient, optimizer + extra[1]
        state, activations = (round(size * count) for size in each), peak_bytes(actions, of_chunk)
        plan.append(StageMemory(rank, layers, count, *state, activations, live, transient_bytes(config, rank, pipeline)))
    return plan
