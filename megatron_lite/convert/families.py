"""The families, and which of them a model belongs to. To add one: a file like llama.py, a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert import deepseek_moe, gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from megatron_lite.convert.links import ConversionError

FAMILIES: tuple[ModuleType, ...] = (gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_moe)


def family_of_json(config: Mapping[str, Any]) -> ModuleType:
    """The family of a config.json, by its architecture, or where that is not named its model_type."""
    names = config.get("architectures") or []
    for family in FAMILIES:
        if family.ARCHITECTURE in names or (not names and config.get("model_type") == family.MODEL_TYPE):
            return family
    known = ", ".join(family.ARCHITECTURE for family in FAMILIES)
    what = " and ".join(names) or f"model_type {config.get('model_type')!r}"
    raise ConversionError(f"config.json: unknown architecture {what}; known: {known}")


def family_of_model(model: ModelConfig) -> ModuleType:
    """The family that one of our models is written as."""
    if model.position_embedding_type == "learned_absolute":
        return gpt2
    if model.num_experts and not model.qk_layernorm:
        return deepseek_moe if model.moe_router_pre_softmax or model.moe_shared_expert_intermediate_size else mixtral
    if model.qk_layernorm:
        return qwen3_moe if model.num_experts else qwen3
    return qwen2 if model.add_qkv_bias else llama
