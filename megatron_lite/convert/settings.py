"""Their `config.json` and our settings, where the families agree: RoPE, heads, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import ConversionError

Json = Mapping[str, Any]
# What routers of all families here are.
PLAIN_ROUTER = {"moe_router_score_function": "softmax", "moe_router_num_groups": None, "moe_router_topk_scaling_factor": None,
                "moe_router_enable_expert_bias": False}  # fmt: skip
SEQUENCE = 4096  # tokens per sample where the positions reach further: a start for --seq-length, not a limit


def wanted(config: Json, name: str) -> Any:
    """A setting that must be there."""
    if config.get(name) is None:
        raise ConversionError(f"config.json lacks {name}")
    return config[name]


def expect(config: Json, allowed: Mapping[str, tuple]) -> None:
    """Refuse settings that this model has no counterpart for. `allowed`: {name: values that are fine}; absent is fine."""
    problems = [f"{name} {config[name]!r}: only {' or '.join(map(repr, values))} can be represented"
                for name, values in allowed.items() if config.get(name) is not None and config[name] not in values]  # fmt: skip
    if problems:
        raise ConversionError("config.json describes a model that is not built here:", problems)


def rope_settings(config: Json) -> dict[str, Any]:
    """RoPE's base and scaling as fields of ModelConfig, from either spelling (rope_theta + rope_scaling, rope_parameters)."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta", config.get("rope_theta"))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        raise ConversionError(f"config.json: partial_rotary_factor {share} is not built for this family")
    fields: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": float(10000.0 if theta is None else theta)}
    if kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = float(wanted(rope, "factor"))
    elif kind == "llama3":
        reach = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": float(wanted(rope, "factor")),
                   "rope_low_freq_factor": float(wanted(rope, "low_freq_factor")),
                   "rope_high_freq_factor": float(wanted(rope, "high_freq_factor")),
                   "rope_original_max_position": int(reach or wanted(config, "max_position_embeddings"))}  # fmt: skip
    elif kind != "default":
        raise ConversionError(f"config.json: RoPE scaling {kind!r} is not built here; known: default, linear, llama3")
    return fields


def rope_json(model: ModelConfig) -> dict[str, Any]:
    """The reverse, in the spelling that every version of transformers reads."""
    scaling = None
    if model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, "low_freq_factor": model.rope_low_freq_factor,
                   "high_freq_factor": model.rope_high_freq_factor,
                   "original_max_position_embeddings": model.rope_original_max_position}  # fmt: skip
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling}


def head_settings(config: Json) -> dict[str, Any]:
    """Width, heads and lengths as fields of ModelConfig."""
    hidden, heads = wanted(config, "hidden_size"), wanted(config, "num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise ConversionError(f"config.json: {heads} attention heads do not share {groups} key/value heads evenly")
    if config.get("head_dim") is None and hidden % heads:
        raise ConversionError(f"config.json: hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is absent")
    reach = wanted(config, "max_position_embeddings")
    return {"num_layers": wanted(config, "num_hidden_layers"), "hidden_size": hidden, "num_attention_heads": heads,
            "ffn_hidden_size": wanted(config, "intermediate_size"), "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else None, "kv_channels": config.get("head_dim") or hidden // heads,
            "max_position_embeddings": reach, "seq_length": min(reach, SEQUENCE)}  # fmt: skip


def layer_list(experts: Iterable[bool]) -> str:
    """--moe-layer-freq of layers that have experts or not."""
    found = [int(there) for there in experts]
    return "1" if all(found) else f"[{','.join(map(str, found))}]"


def refuse(model: ModelConfig, family: str, fixed: Mapping[str, Any]) -> None:
    """Refuse to write a model of ours in a family's form where its settings differ from what that form means."""
    wrong = [f"--{name.replace('_', '-')} {getattr(model, name)}: {family} means {value}"
             for name, value in fixed.items() if getattr(model, name) != value]  # fmt: skip
    if wrong:
        raise ConversionError(f"this model cannot be written as {family}:", wrong)
