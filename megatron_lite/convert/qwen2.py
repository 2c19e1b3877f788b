"""Qwen2 and Qwen2.5: LLaMA's names, biases on the QKV projection."""

from __future__ import annotations

from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import ConversionError
from megatron_lite.convert.llama import FORM, decoder_json, decoder_settings, links
from megatron_lite.convert.mistral import within_window
from megatron_lite.convert.settings import Json, expect, refuse, wanted

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"


def window_of(config: Json) -> int | None:
    """The sliding window that some layer has, or None."""
    kinds = config.get("layer_types")
    if not config.get("use_sliding_window"):
        if kinds and set(kinds) != {"full_attention"}:
            raise ConversionError(f"config.json: layer_types {sorted(set(kinds))} without use_sliding_window")
        return None
    return config.get("sliding_window", 4096)


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    expect(config, {"attention_bias": (True,)})
    fields = decoder_settings(config, tied=False) | {"add_qkv_bias": True}
    return within_window(ModelConfig(**fields), window_of(config)), wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "Qwen2", FORM | {"qk_layernorm": False, "add_qkv_bias": True, "disable_bias_linear": True})
    return decoder_json(model, vocab) | {"use_sliding_window": False}


__all__ = ["ARCHITECTURE", "MODEL_TYPE", "links", "settings", "to_json"]
