"""LLaMA 1, 2 and 3.x: our names are theirs without `model.`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import ConversionError, Link, renamed
from megatron_lite.convert.settings import Json, expect, head_settings, refuse, rope_json, rope_settings, wanted
from megatron_lite.parallel.shard import whole

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"
# What every model of this form is; `settings` and `to_json` are shared with Mistral and Qwen.
FORM = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "rotary_percent": 1.0,
        "rotary_interleaved": False}  # fmt: skip


def decoder_settings(config: Json, tied: bool) -> dict[str, Any]:
    """Fields of ModelConfig that all LLaMA-shaped families read alike. `tied`: what an absent tie_word_embeddings means."""
    expect(config, {"hidden_act": ("silu",)})
    dropout = float(config.get("attention_dropout") or 0.0)
    tied = tied if config.get("tie_word_embeddings") is None else config["tie_word_embeddings"]
    return head_settings(config) | rope_settings(config) | {
        "normalization": "RMSNorm", "norm_epsilon": float(config.get("rms_norm_eps", 1e-6)), "swiglu": True,
        "disable_bias_linear": True, "untie_embeddings_and_output_weights": not tied, "hidden_dropout": 0.0,
        "attention_dropout": dropout, "init_method_std": float(config.get("initializer_range", 0.02))}  # fmt: skip


def decoder_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """The part of config.json that all LLaMA-shaped families share."""
    return {"vocab_size": vocab, "hidden_size": model.hidden_size, "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim, "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings, "rms_norm_eps": model.norm_epsilon,
            "tie_word_embeddings": model.tied, "attention_dropout": model.attention_dropout,
            "initializer_range": model.init_method_std, **rope_json(model)}  # fmt: skip


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    both = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if both[0] != both[1]:
        raise ConversionError(f"config.json: attention_bias {both[0]} with mlp_bias {both[1]} is not built here: both or neither")
    fields = decoder_settings(config, tied=False) | {"disable_bias_linear": not both[0]}
    return ModelConfig(**fields), wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "LLaMA", FORM | {"qk_layernorm": False, "add_qkv_bias": False})
    bias = not model.disable_bias_linear
    return decoder_json(model, vocab) | {"attention_bias": bias, "mlp_bias": bias}


def links(tensors: Mapping[str, tuple[int, ...]], there: Mapping[str, Any]) -> list[Link]:
    """Our tensors in their places. `there` is not looked at: these families have one spelling."""
    found = [renamed(name, shape, name if name.startswith("lm_head.") else f"model.{name}") for name, shape in tensors.items()]
    if "lm_head.weight" not in tensors:
        name = "embed_tokens.weight"
        found.append(Link(whole(name, tensors[name]), "lm_head.weight", alias=True))
    return found
