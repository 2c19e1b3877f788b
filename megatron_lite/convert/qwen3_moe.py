"""Qwen3's mixture of experts: Qwen3 with a router called `gate` and experts in place of the MLP, of all layers but some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import Link
from megatron_lite.convert.llama import FORM, decoder_json, decoder_settings
from megatron_lite.convert.llama import links as llama_links
from megatron_lite.convert.mistral import within_window
from megatron_lite.convert.qwen2 import window_of
from megatron_lite.convert.settings import PLAIN_ROUTER, Json, expect, layer_list, refuse, wanted

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"
FIXED = FORM | PLAIN_ROUTER | {
    "qk_layernorm": True, "qkv_bias": False, "disable_bias_linear": True, "moe_shared_expert_intermediate_size": None,
    "moe_router_pre_softmax": True}  # fmt: skip


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    expect(config, {"attention_bias": (False,)})
    fields = decoder_settings({"head_dim": 128, **config}, tied=False) | {"qk_layernorm": True}
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    number = "num_experts" if "num_experts" in config else "num_local_experts"  # as published, and as transformers 5 writes it
    fields |= {"num_experts": wanted(config, number), "moe_router_topk": wanted(config, "num_experts_per_tok"),
               "moe_ffn_hidden_size": wanted(config, "moe_intermediate_size"), "moe_router_pre_softmax": True,
               "moe_router_norm_topk": bool(config.get("norm_topk_prob", False)),
               "moe_layer_freq": layer_list(layer not in dense and (layer + 1) % step == 0
                                            for layer in range(fields["num_layers"]))}  # fmt: skip
    return within_window(ModelConfig(**fields), window_of(config)), wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "Qwen3-MoE", FIXED)
    return decoder_json(model, vocab) | {
        "attention_bias": False, "use_sliding_window": False, "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk, "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": model.moe_router_norm_topk, "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, there in enumerate(model.expert_layers) if not there],
        "router_aux_loss_coef": model.moe_aux_loss_coeff}  # fmt: skip


def links(tensors: Mapping[str, tuple[int, ...]], there: Mapping[str, Any]) -> list[Link]:
    """Our tensors in their places: what we call a router they call a gate."""
    return [replace(link, theirs=link.theirs.replace(".mlp.router.", ".mlp.gate.")) for link in llama_links(tensors, there)]
