"""Mixtral: LLaMA's names, and in place of the MLP a router and experts. The names are here; the layer is not built yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import ConversionError, Link, renamed
from megatron_lite.convert.settings import Json

ARCHITECTURE = "MixtralForCausalLM"
MODEL_TYPE = "mixtral"
PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def settings(config: Json) -> tuple[ModelConfig, int]:
    """Refused: there is no layer of experts to put the weights into."""
    raise ConversionError("config.json describes a Mixtral model: layers of experts are not built here yet")


def to_json(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """Refused, as `settings`."""
    raise ConversionError("this model cannot be written as Mixtral: it has no experts")


def their_name(name: str) -> str:
    """`layers.0.mlp.experts.3.gate_proj.weight` -> `model.layers.0.block_sparse_moe.experts.3.w1.weight`"""
    name = re.sub(r"\.mlp\.router\.", ".block_sparse_moe.gate.", name)
    name = re.sub(r"\.mlp\.experts\.(\d+)\.(\w+)\.", lambda m: f".block_sparse_moe.experts.{m[1]}.{PARTS[m[2]]}.", name)
    return name if name.startswith("lm_head.") else f"model.{name}"


def links(tensors: Mapping[str, tuple[int, ...]], there: Mapping[str, Any]) -> list[Link]:
    """Our tensors in their places."""
    return [renamed(name, shape, their_name(name)) for name, shape in tensors.items()]
