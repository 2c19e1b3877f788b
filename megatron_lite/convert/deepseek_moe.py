"""DeepSeekMoE (16B): LLaMA's names and attention, dense layers first, then many small experts beside shared ones.

transformers has no class of this form (the published folder brings its own code), so the tool does not check the logits of a
conversion; tests/parity/test_transformers.py holds this file against a LLaMA with transformers' DeepSeek-V2 experts in it.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import ConversionError
from megatron_lite.convert.llama import FORM, decoder_json, decoder_settings
from megatron_lite.convert.qwen3_moe import links
from megatron_lite.convert.settings import PLAIN_ROUTER, Json, expect, layer_list, refuse, wanted

ARCHITECTURE = "DeepseekForCausalLM"
MODEL_TYPE = "deepseek"
FIXED = FORM | PLAIN_ROUTER | {
    "qk_layernorm": False, "qkv_bias": False, "disable_bias_linear": True, "moe_router_pre_softmax": True}  # fmt: skip


def settings(config: Json) -> tuple[ModelConfig, int]:
    """(our model, vocabulary) of a config.json."""
    expect(config, {"attention_bias": (False,), "scoring_func": ("softmax",)})
    fields, width = decoder_settings(config, tied=False), wanted(config, "moe_intermediate_size")
    first, step, shared = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1), config.get("n_shared_experts")
    fields |= {"num_experts": wanted(config, "n_routed_experts"), "moe_router_topk": wanted(config, "num_experts_per_tok"),
               "moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": shared * width if shared else None,
               "moe_router_pre_softmax": True, "moe_router_norm_topk": bool(config.get("norm_topk_prob", False)),
               "moe_layer_freq": layer_list(layer >= first and layer % step == 0
                                            for layer in range(fields["num_layers"]))}  # fmt: skip
    return ModelConfig(**fields), wanted(config, "vocab_size")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """config.json of one of our models."""
    refuse(model, "DeepSeekMoE", FIXED)
    shared, width, layers = model.moe_shared_expert_intermediate_size, model.moe_ffn_hidden_size, model.expert_layers
    first = layers.index(True) if True in layers else len(layers)
    wrong = [] if all(layers[first:]) else [f"--moe-layer-freq {model.moe_layer_freq}: dense layers come first there"]
    if shared and shared % width:
        wrong.append(f"--moe-shared-expert-intermediate-size {shared}: no multiple of --moe-ffn-hidden-size {width}")
    if wrong:
        raise ConversionError("this model cannot be written as DeepSeekMoE:", wrong)
    return decoder_json(model, vocab) | {
        "attention_bias": False, "n_routed_experts": model.num_experts, "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": width, "n_shared_experts": shared // width if shared else None, "scoring_func": "softmax",
        "norm_topk_prob": model.moe_router_norm_topk, "first_k_dense_replace": first, "moe_layer_freq": 1,
        "aux_loss_alpha": model.moe_aux_loss_coeff, "seq_aux": True}  # fmt: skip


__all__ = ["ARCHITECTURE", "MODEL_TYPE", "links", "settings", "to_json"]
