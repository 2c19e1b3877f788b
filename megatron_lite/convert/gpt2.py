"""GPT-2: matrices stored [in, out], Q, K and V side by side in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import Link, renamed
from megatron_lite.convert.settings import Json, expect, refuse, wanted
from megatron_lite.parallel.shard import Box, whole

ARCHITECTURE = "GPT2LMHeadModel"
MODEL_TYPE = "gpt2"
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
OUTSIDE = {"embed_tokens.weight": "wte.weight", "embed_positions.weight": "wpe.weight", "norm.weight": "ln_f.weight",
           "norm.bias": "ln_f.bias"}  # fmt: skip
INSIDE = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj",
          "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}  # fmt: skip


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    expect(config, {"activation_function": (*TANH_GELU, "gelu"), "scale_attn_weights": (True,), "add_cross_attention": (False,),
                    "scale_attn_by_inverse_layer_idx": (False,)})  # fmt: skip
    hidden, heads, reach = wanted(config, "n_embd"), wanted(config, "n_head"), wanted(config, "n_positions")
    model = ModelConfig(
        num_layers=wanted(config, "n_layer"), hidden_size=hidden, ffn_hidden_size=config.get("n_inner") or 4 * hidden,
        num_attention_heads=heads, kv_channels=hidden // heads, seq_length=reach, max_position_embeddings=reach,
        norm_epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        openai_gelu=config.get("activation_function", "gelu_new") != "gelu",
        untie_embeddings_and_output_weights=config.get("tie_word_embeddings") is False,
        hidden_dropout=float(config.get("resid_pdrop", 0.1)), attention_dropout=float(config.get("attn_pdrop", 0.1)),
        init_method_std=float(config.get("initializer_range", 0.02)))  # fmt: skip
    return model, wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "GPT-2", {
        "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False, "qk_layernorm": False,
        "disable_bias_linear": False, "num_kv_heads": model.num_attention_heads,
        "head_dim": model.hidden_size // model.num_attention_heads})  # fmt: skip
    return {"vocab_size": vocab, "n_positions": model.max_position_embeddings, "n_embd": model.hidden_size,
            "n_layer": model.num_layers, "n_head": model.num_attention_heads, "n_inner": model.ffn_hidden_size,
            "activation_function": "gelu_new" if model.openai_gelu else "gelu", "layer_norm_epsilon": model.norm_epsilon,
            "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout, "attn_pdrop": model.attention_dropout,
            "initializer_range": model.init_method_std, "tie_word_embeddings": model.tied}  # fmt: skip


def links(tensors: Mapping[str, tuple[int, ...]], there: Mapping[str, Any]) -> list[Link]:
    """Our tensors in their places. Files of the bare model, whose names lack `transformer.`, are recognised by `there`."""
    prefix = "" if "wte.weight" in there else "transformer."
    found = [link(name, shape, prefix) for name, shape in tensors.items()]
    if "lm_head.weight" not in tensors:
        name = "embed_tokens.weight"
        found.append(Link(whole(name, tensors[name]), "lm_head.weight", alias=True))
    return found


def link(name: str, shape: tuple[int, ...], prefix: str) -> Link:
    """Where one of our tensors lies."""
    if name in OUTSIDE:
        return renamed(name, shape, prefix + OUTSIDE[name])
    if name == "lm_head.weight":
        return renamed(name, shape, name)
    layer, part, kind = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name).groups()
    matrix = len(shape) == 2
    if part in INSIDE:
        return renamed(name, shape, f"{prefix}h.{layer}.{INSIDE[part]}.{kind}", transposed=matrix)
    place = ("q_proj", "k_proj", "v_proj").index(part.removeprefix("self_attn."))
    zero, rest = (0,) * len(shape), (0,) * (len(shape) - 1)
    box = Box(name, shape, zero, shape, (place * shape[0], *rest))
    return Link(box, f"{prefix}h.{layer}.attn.c_attn.{kind}", transposed=matrix)
