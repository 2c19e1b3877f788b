"""Exact parameter counts, by canonical part: of the whole model, of a chunk, of one rank.

Cut over tp: the vocabulary (padded to a multiple of `--make-vocab-size-divisible-by` x tp), query and key/value heads
(each rank holds at least one: with fewer heads than ranks they are held `tp / heads` times), the MLP's width.
Held by every tp rank: norms, learned positions, biases of the row-parallel linears. With tied embeddings and more
than one stage the last stage holds a copy of the first stage's embedding; in a V both lie on rank 0.
Experts are shared out over ep, each cut over etp; their router is held by every rank, shared experts are cut over tp.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from megatron_lite.config import Config, ModelConfig
from megatron_lite.planner.pipeline import Chunk, Pipeline, pipeline_of


class ExpertShare(NamedTuple):
    """Of a layer with experts, how many of them a rank counts, and over how many ranks each is cut."""

    experts: int
    cut: int = 1


def expert_share(config: Config) -> ExpertShare | None:
    """What each rank holds; None without experts."""
    model, parallel = config.model, config.parallel
    return ExpertShare(model.num_experts // parallel.ep, parallel.etp) if model.num_experts else None


def expert_width(model: ModelConfig) -> int:
    """Channels of one expert."""
    return model.moe_ffn_hidden_size or model.ffn_hidden_size


def layer_parts(model: ModelConfig, tp: int = 1, share: ExpertShare | None = None) -> dict[str, int]:
    """Elements of one transformer layer on one tp rank: canonical part -> weights plus biases. `share`: it has experts."""
    h, d = model.hidden_size, model.head_dim
    q = model.num_attention_heads // tp * d
    kv = max(model.num_kv_heads // tp, 1) * d
    row_bias = 0 if model.disable_bias_linear else h
    norm = _norm(model, h)
    qkv_bias = int(model.qkv_bias)
    parts = {
        "input_layernorm": norm,
        "self_attn.q_proj": q * (h + qkv_bias),
        "self_attn.k_proj": kv * (h + qkv_bias),
        "self_attn.v_proj": kv * (h + qkv_bias),
        "self_attn.o_proj": q * h + row_bias,
        "post_attention_layernorm": norm,
    }
    if model.qk_layernorm:
        parts |= {"self_attn.q_norm": _norm(model, d), "self_attn.k_norm": _norm(model, d)}
    if share is None:
        return parts | _mlp_parts(model, "mlp", model.ffn_hidden_size // tp)
    parts["mlp.router"] = model.num_experts * h
    parts["mlp.experts"] = share.experts * (3 if model.swiglu else 2) * h * (expert_width(model) // share.cut)
    if shared := model.moe_shared_expert_intermediate_size:
        parts |= _mlp_parts(model, "mlp.shared_experts", shared // tp)
    return parts


def _mlp_parts(model: ModelConfig, name: str, f: int) -> dict[str, int]:
    """Elements of an MLP of which a rank has f channels."""
    h, bias = model.hidden_size, int(not model.disable_bias_linear)
    parts = {f"{name}.up_proj": f * (h + bias), f"{name}.down_proj": f * h + bias * h}
    return parts | ({f"{name}.gate_proj": f * (h + bias)} if model.swiglu else {})


def layers_elements(model: ModelConfig, layers: Iterable[int], tp: int = 1, share: ExpertShare | None = None) -> int:
    """Elements of these layers on one tp rank; `share` is that of those with experts."""
    kinds, total = model.expert_layers, 0
    for has_experts, number in Counter(kinds[layer] for layer in layers).items():
        total += number * sum(layer_parts(model, tp, share if has_experts else None).values())
    return total


def expert_elements(config: Config, layers: Iterable[int]) -> int:
    """Of them those of experts, which other ranks hold than the rest and which are reduced over fewer of them."""
    if (share := expert_share(config)) is None:
        return 0
    each, kinds = layer_parts(config.model, config.parallel.tp, share)["mlp.experts"], config.model.expert_layers
    return each * sum(kinds[layer] for layer in layers)


def model_parts(config: Config, experts: int | None = None) -> dict[str, int]:
    """Elements of the whole, uncut model with its true vocabulary; `layers` is all layers together, with all experts of each
    or so many."""
    model, vocab = config.model, config.data.vocab_size
    parts = {"embed_tokens": vocab * model.hidden_size}
    parts |= _positions(model)
    share = ExpertShare(experts or model.num_experts) if model.num_experts else None
    parts["layers"] = layers_elements(model, range(model.num_layers), share=share)
    parts["norm"] = _norm(model, model.hidden_size)
    if not model.tied:
        parts["lm_head"] = vocab * model.hidden_size
    return parts


def count_parameters(config: Config) -> int:
    """Parameters of the model as published: each tensor once, no padding."""
    return sum(model_parts(config).values())


def count_active_parameters(config: Config) -> int:
    """Of them those that a token sees: of each layer's experts those that it goes to."""
    return sum(model_parts(config, experts=config.model.moe_router_topk).values())


def chunk_parts(config: Config, chunk: Chunk) -> dict[str, int]:
    """Elements of one chunk on each tp rank, padding and copies included."""
    model, tp = config.model, config.parallel.tp
    table = config.padded_vocab_size // tp * model.hidden_size
    parts = {"embed_tokens": table} | _positions(model) if chunk.first else {}
    parts["layers"] = layers_elements(model, chunk.layers, tp, expert_share(config))
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
    kinds, share = model.expert_layers, expert_share(config)
    for layer in chunk.layers:
        units.append(layer_tensors(model, tp, share if kinds[layer] else None))
    if chunk.last:
        units.append(norm)
        if not (model.tied and chunk.first):
            units.append([table])
    return units


def expert_tensors(config: Config, chunk: Chunk) -> list[list[int]]:
    """The same of a chunk's experts, a unit of each layer that has some: gate and up of all of a rank's experts are one tensor,
    and so is down."""
    kinds, wide = config.model.expert_layers, 3 if config.model.swiglu else 2
    each = expert_elements(config, [layer for layer in chunk.layers if kinds[layer]][:1])
    return [[each - each // wide, each // wide] for layer in chunk.layers if kinds[layer]]


def layer_tensors(model: ModelConfig, tp: int = 1, share: ExpertShare | None = None) -> list[int]:
    """Elements of one layer's parameter tensors on a tp rank, but for experts; Q, K and V are one, and so are gate and up."""
    parts, h = layer_parts(model, tp, share), model.hidden_size
    bias = not model.disable_bias_linear
    fused = sum(parts[f"self_attn.{name}_proj"] for name in "qkv")
    rows = fused // (h + int(model.qkv_bias))
    tensors = _vectors(model, h) * 2 + [rows * h, *([rows] if model.qkv_bias else [])]
    tensors += (_vectors(model, model.head_dim) * 2) if model.qk_layernorm else []
    tensors += [parts["self_attn.o_proj"] - bias * h, *([h] if bias else [])]
    tensors += [parts["mlp.router"]] if share else []
    f = ((model.moe_shared_expert_intermediate_size or 0) if share else model.ffn_hidden_size) // tp
    width = (2 if model.swiglu else 1) * f
    if f:
        tensors += [width * h, f * h, *([width, h] if bias else [])]
    return tensors


def partial_elements(config: Config, chunk: Chunk) -> int:
    """Gradient elements of a chunk that tp ranks sum in one message at the end of a step: what each of them saw only a part
    of. Under sequence parallelism norms, row biases and learned positions; always q/k norms, and key/value heads that
    several ranks hold, one slot for each of the different ones, and always routers."""
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
    routers = sum(model.expert_layers[i] for i in chunk.layers) * (model.num_experts or 0) * model.hidden_size
    return each * len(chunk.layers) + routers + ends


def _vectors(model: ModelConfig, size: int) -> list[int]:
    """A norm's tensors."""
    return [size] * (2 if model.normalization == "LayerNorm" else 1)
