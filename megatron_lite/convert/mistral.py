"""Mistral: LLaMA's names. Its sliding window is attention's own only beyond the window, so positions stop there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.llama import FORM, decoder_json, decoder_settings, links
from megatron_lite.convert.settings import Json, refuse, wanted

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"


def within_window(model: ModelConfig, window: int | None) -> ModelConfig:
    """Samples no longer than the window see the same tokens with and without it; longer ones are cut off."""
    if window is None or window >= model.max_position_embeddings:
        return model
    return replace(model, max_position_embeddings=window, seq_length=min(model.seq_length, window))


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    window = config.get("sliding_window", 4096)  # absent means 4096, null means none
    return within_window(ModelConfig(**decoder_settings(config, tied=False)), window), wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "Mistral", FORM | {"qk_layernorm": False, "qkv_bias": False, "disable_bias_linear": True})
    return decoder_json(model, vocab) | {"sliding_window": None}


__all__ = ["ARCHITECTURE", "MODEL_TYPE", "links", "settings", "to_json", "within_window"]
