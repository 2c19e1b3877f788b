"""Exact parameter counts, by canonical part: of the whole model, of a stage, of one rank.

Cut over tp: the vocabulary (padded to a multiple of `--make-vocab-size-divisible-by` x tp), query and key/value heads
(each rank holds at least one: with fewer heads than ranks they are held `tp / heads` times), the MLP's width.
Held by every tp rank: norms, learned positions, biases of the row-parallel linears. With tied embeddings and pp > 1 the
last stage holds a copy of the first stage's embedding.
"""

from megatron_lite.config import Config, ModelConfig
from megatron_lite.planner.split import layer_ranges


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


def rank_parts(config: Config, stage: int) -> dict[str, int]:
    """Elements that each tp rank of pipeline stage `stage` holds, padding and copies included."""
    model, parallel = config.model, config.parallel
    table = config.padded_vocab_size // parallel.tp * model.hidden_size
    first, last = stage == 0, stage == parallel.pp - 1
    parts = {}
    if first:
        parts = {"embed_tokens": table} | _positions(model)
    parts["layers"] = len(stage_layers(config)[stage]) * sum(layer_parts(model, parallel.tp).values())
    if last:
        parts["norm"] = _norm(model, model.hidden_size)
        if not model.tied:
            parts["lm_head"] = table
        elif not first:
            parts["lm_head (copy of embed_tokens)"] = table
    return parts


def rank_parameters(config: Config, stage: int) -> int:
    """Parameters on each tp rank of a stage."""
    return sum(rank_parts(config, stage).values())


def stage_layers(config: Config) -> list[range]:
    """Global layer numbers of every pipeline stage."""
    parallel = config.parallel
    return layer_ranges(config.model.num_layers, parallel.pp, parallel.decoder_first_pipeline_num_layers,
                        parallel.decoder_last_pipeline_num_layers)  # fmt: skip


def _norm(model: ModelConfig, size: int) -> int:
    return 2 * size if model.normalization == "LayerNorm" else size


def _positions(model: ModelConfig) -> dict[str, int]:
    if model.position_embedding_type != "learned_absolute":
        return {}
    return {"embed_positions": model.max_position_embeddings * model.hidden_size}
