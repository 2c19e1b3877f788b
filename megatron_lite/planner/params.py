"""Exact parameter counts, by canonical part: of the whole model, of a chunk, of one rank.

Cut over tp: the vocabulary (padded to a multiple of `--make-vocab-size-divisible-by` x tp), query and key/value heads
(each rank holds at least one: with fewer heads than ranks they are held `tp / heads` times), the MLP's width.
Held by every tp rank: norms, learned positions, biases of the row-parallel linears. With tied embeddings and more
than one stage the last stage holds a copy of the first stage's embedding; in a V both lie on rank 0.
"""

from collections import Counter

from megatron_lite.config import Config, ModelConfig
from megatron_lite.planner.pipeline import Chunk, Pipeline, pipeline_of


def layer_parts(model: ModelConfig, tp: int = 1) -> dict[str, int]:
    """Elements of one transformer layer on one tp rank: canonical part -> weights plus biases."""
    h, d, f = model.hidden_size, model.head_dim, model.ffn_hidden_size // tp
    q = model.num_attention_heads // tp * d
    kv = max(model.num_kv_heads // tp, 1) * d
    row_bias = 0 if model.disable_bias_linear else h
    norm = _norm(model, h)
    qkv_bias, mlp_bias = int(model.qkv_bias), int(not model.disable_bias_linear)
    parts = {
        "input_layernorm": norm,
        "self_attn.q_proj": q * (h + qkv_bias),
        "self_attn.k_proj": kv * (h + qkv_bias),
        "self_attn.v_proj": kv * (h + qkv_bias),
        "self_attn.o_proj": q * h + row_bias,
        "post_attention_layernorm": norm,
        "mlp.up_proj": f * (h + mlp_bias),
        "mlp.down_proj": f * h + row_bias,
    }
    if model.qk_layernorm:
        parts |= {"self_attn.q_norm": _norm(model, d), "self_attn.k_norm": _norm(model, d)}
    if model.swiglu:
        parts["mlp.gate_proj"] = f * (h + mlp_bias)
    return parts


def model_parts(config: Config) -> dict[str, int]:
    """Elements of the whole, uncut model with its true vocabulary; `layers` is all layers together."""
    model, vocab = config.model, config.data.vocab_size
    parts = {"embed_tokens": vocab * model.hidden_size}
    parts |= _positions(model)
    parts["layers"] = model.num_layers * sum(layer_parts(model).values())
    parts["norm"] = _norm(model, model.hidden_size)
    if not model.tied:
        parts["lm_head"] = vocab * model.hidden_size
    return parts


def count_parameters(config: Config) -> int:
    """Parameters of the model as published: each tensor once, no padding."""
    return sum(model_parts(config).values())


def chunk_parts(config: Config, chunk: Chunk) -> dict[str, int]:
    """Elements of one chunk on each tp rank, padding and copies included."""
    model, tp = config.model, config.parallel.tp
    table = config.padded_vocab_size // tp * model.hidden_size
    parts = {"embed_tokens": table} | _positions(model) if chunk.first else {}
    parts["layers"] = len(chunk.layers) * sum(layer_parts(model, tp).values())
    if chunk.last:
        parts["norm"] = _norm(model, model.hidden_size)
        if not model.tied:
            parts["lm_head"] = table
        elif not chunk.first:
            parts["lm_head (copy of embed_tokens)"] = table
    return parts


def rank_parts(config: Config, rank: int, pipeline: Pipeline | None = None) -> dict[str, int]:
    """Elements that each tp rank of pipeline rank `rank` holds: those of all its chunks. `pipeline`: the flags' own."""
    together: Counter[str] = Counter()
    for chunk in (pipeline or pipeline_of(config)).chunks(rank):
        together.update(chunk_parts(config, chunk))
    return dict(together)


def rank_parameters(config: Config, rank: int, pipeline: Pipeline | None = None) -> int:
    """Parameters on each tp rank of a pipeline rank."""
    return sum(rank_parts(config, rank, pipeline).values())


def _norm(model: ModelConfig, size: int) -> int:
    return 2 * size if model.normalization == "LayerNorm" else size


def _positions(model: ModelConfig) -> dict[str, int]:
    if model.position_embedding_type != "learned_absolute":
        return {}
    return {"embed_positions": model.max_position_embeddings * model.hidden_size}


def unit_tensors(config: Config, chunk: Chunk) -> list[list[int]]:
    """Elements of every parameter tensor of a chunk on each tp rank: its units (`TransformerStage.units`) in order of use."""
    model, tp = config.model, config.parallel.tp
    table, norm = config.padded_vocab_size // tp * model.hidden_size, _vectors(model, model.hidden_size)
    units = [[table], *([each] for each in _positions(model).values())] if chunk.first else []
    units += [layer_tensors(model, tp)] * len(chunk.layers)
    if chunk.last:
        units.append(norm)
        if not (model.tied and chunk.first):
            units.append([table])
    return units


def layer_tensors(model: ModelConfig, tp: int = 1) -> list[int]:
    """Elements of one layer's parameter tensors on a tp rank; Q, K and V are one, and so are gate and up."""
    parts, h = layer_parts(model, tp), model.hidden_size
    width, bias = (2 if model.swiglu else 1) * model.ffn_hidden_size // tp, not model.disable_bias_linear
    fused = sum(parts[f"self_attn.{name}_proj"] for name in "qkv")
    rows = fused // (h + int(model.qkv_bias))
    tensors = _vectors(model, h) * 2 + [rows * h, *([rows] if model.qkv_bias else [])]
    tensors += (_vectors(model, model.head_dim) * 2) if model.qk_layernorm else []
    tensors += [parts["self_attn.o_proj"] - bias * h, width * h, parts["mlp.down_proj"] - bias * h]
    return tensors + ([h, width, h] if bias else [])


def partial_elements(config: Config, chunk: Chunk) -> int:
    """Gradient elements of a chunk that tp ranks sum in one message at the end of a step: what each of them saw only a part
    of. Under sequence parallelism norms, row biases and learned positions; always q/k norms, and key/value heads that
    several ranks hold, one slot for each of the different ones."""
    model, tp = config.model, config.parallel.tp
    if tp == 1:
        return 0
    each, ends = 0, 0
    if config.parallel.sequence_parallel:
        each += 2 * _norm(model, model.hidden_size) + (0 if model.disable_bias_linear else 2 * model.hidden_size)
        ends += sum(_positions(model).values()) if chunk.first else 0
        ends += _norm(model, model.hidden_size) if chunk.last else 0
    each += 2 * _norm(model, model.head_dim) if model.qk_layernorm else 0
    if tp > model.num_kv_heads:
        each += 2 * model.num_kv_heads * model.head_dim * (model.hidden_size + int(model.qkv_bias))
    return each * len(chunk.layers) + ends


def _vectors(model: ModelConfig, size: int) -> list[int]:
    """A norm's tensors."""
    return [size] * (2 if model.normalization == "LayerNorm" else 1)
