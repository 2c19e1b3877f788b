"""Which model and tokenizer a checkpoint was trained with, held against a run's or handed to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.load import locate
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.config import Config

# Settings of `ModelConfig` that make it another model: shapes, and what no shape shows. Fine-tuning may change RoPE, to reach
# further; --seq-length, dropout and the padding of the vocabulary belong to a run.
SHAPES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "disable_bias_linear",
          "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights", "num_experts", "moe_layer_freq",
          "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias")  # fmt: skip
FUNCTION = ("normalization", "norm_epsilon", "swiglu", "openai_gelu", "position_embedding_type", "moe_router_topk",
            "moe_router_score_function", "moe_router_pre_softmax", "moe_router_norm_topk", "moe_router_num_groups",
            "moe_router_group_topk", "moe_router_topk_scaling_factor")  # fmt: skip
ROPE = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling",
        "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position")  # fmt: skip
GROUPS = ("group_query_attention", "num_query_groups")
TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "tiktoken_pattern",
             "tiktoken_num_special_tokens")  # fmt: skip


def check_model(config: Config, meta: Mapping[str, Any]) -> None:
    """Refuse the weights of another model, naming each setting that differs. Raises CheckpointError."""
    model = meta.get("config", {}).get("model", {})
    names = [*SHAPES, *FUNCTION, *(() if config.checkpoint.finetune else ROPE)]
    pairs = [(name, model[name], getattr(config.model, name)) for name in names if name in model]
    if "num_attention_heads" in model:
        pairs.append(("num_query_groups", kv_heads(model), config.model.num_kv_heads))
    if model.get("position_embedding_type") == "learned_absolute":
        pairs.append(("max_position_embeddings", model["max_position_embeddings"], config.model.max_position_embeddings))
    vocabulary = meta.get("config", {}).get("data", {}).get("vocab_size")
    if vocabulary is not None:
        pairs.append(("vocab_size", vocabulary, config.data.vocab_size))
    wrong = [f"--{name.replace('_', '-')}: trained with {was}, now {now}" for name, was, now in pairs if was != now]
    if wrong:
        raise CheckpointError("the checkpoint holds another model", wrong)


def kv_heads(model: Mapping[str, Any]) -> int:
    return model["num_query_groups"] if model.get("group_query_attention") else model["num_attention_heads"]


def stored_settings(directory: str, iteration: int | None) -> dict[str, Any]:
    """Field name -> value of what `--use-checkpoint-args` takes: architecture, sequence length, tokenizer.

    Raises CheckpointError where there is no checkpoint or it does not say what it holds.
    """
    manifest = read_manifest(locate(directory, iteration))
    stored = manifest.meta.get("config")
    if not stored:
        raise CheckpointError(f"{directory}: iteration {manifest.iteration} does not say which model it holds")
    model, names = stored["model"], [*SHAPES, *FUNCTION, *ROPE, *GROUPS, "seq_length"]
    if model.get("position_embedding_type") == "learned_absolute":
        names.append("max_position_embeddings")
    found = {name: model[name] for name in names if name in model}
    return found | {name: stored["data"][name] for name in TOKENIZER if name in stored.get("data", {})}
