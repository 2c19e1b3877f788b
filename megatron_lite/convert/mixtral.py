"""Mixtral: LLaMA's names, and in place of the MLP a router and experts. Each token's weights are a softmax over its experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import Link, renamed
from megatron_lite.convert.llama import FORM, decoder_json, decoder_settings
from megatron_lite.convert.mistral import within_window
from megatron_lite.convert.settings import PLAIN_ROUTER, Json, expect, refuse, wanted

ARCHITECTURE = "MixtralForCausalLM"
MODEL_TYPE = "mixtral"
PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
FIXED = FORM | PLAIN_ROUTER | {
    "qk_layernorm": False, "qkv_bias": False, "disable_bias_linear": True, "moe_shared_expert_intermediate_size": None,
    "moe_router_pre_softmax": False, "moe_router_norm_topk": False}  # fmt: skip


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    expect(config, {"router_jitter_noise": (0, 0.0)})
    fields = decoder_settings(config, tied=False)
    fields |= {"num_experts": wanted(config, "num_local_experts"), "moe_router_topk": wanted(config, "num_experts_per_tok"),
               "moe_ffn_hidden_size": fields["ffn_hidden_size"]}  # fmt: skip
    return within_window(ModelConfig(**fields), config.get("sliding_window")), wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "Mixtral", FIXED | {"expert_layers": (True,) * model.num_layers})
    return decoder_json(model, vocab) | {
        "intermediate_size": model.moe_ffn_hidden_size, "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk, "router_aux_loss_coef": model.moe_aux_loss_coeff,
        "sliding_window": None}  # fmt: skip


def their_name(name: str) -> str:
    """`layers.0.mlp.experts.3.gate_proj.weight` -> `model.layers.0.block_sparse_moe.experts.3.w1.weight`"""
    name = re.sub(r"\.mlp\.router\.", ".block_sparse_moe.gate.", name)
    name = re.sub(r"\.mlp\.experts\.(\d+)\.(\w+)\.", lambda m: f".block_sparse_moe.experts.{m[1]}.{PARTS[m[2]]}.", name)
    return name if name.startswith("lm_head.") else f"model.{name}"


def links(tensors: Mapping[str, tuple[int, ...]], there: Mapping[str, Any]) -> list[Link]:
    """Our tensors in their places."""
    return [renamed(name, shape, their_name(name)) for name, shape in tensors.items()]
