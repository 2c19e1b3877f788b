"""Qwen3: LLaMA's names, a norm on every query and key head."""

from __future__ import annotations

from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.llama import FORM, decoder_json, decoder_settings, links
from megatron_lite.convert.mistral import within_window
from megatron_lite.convert.qwen2 import window_of
from megatron_lite.convert.settings import Json, expect, refuse, wanted

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    expect(config, {"attention_bias": (False,)})
    fields = decoder_settings({"head_dim": 128, **config}, tied=False) | {"qk_layernorm": True}
    return within_window(ModelConfig(**fields), window_of(config)), wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "Qwen3", FORM | {"qk_layernorm": True, "qkv_bias": False, "disable_bias_linear": True})
    return decoder_json(model, vocab) | {"attention_bias": False, "use_sliding_window": False}


__all__ = ["ARCHITECTURE", "MODEL_TYPE", "links", "settings", "to_json"]
