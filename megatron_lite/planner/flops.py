"""Model FLOPs of a step, and the share of the hardware's peak they are (MFU).

Model FLOPs count every matrix product of forward and backward once: not recomputation, not the embedding look-up, and
causal attention at half of its square (Megatron's convention since core 0.12; older figures did not halve).
Q = heads x head size, KV = key/value heads x head size, Vp = padded vocabulary, k = 3 matrices with SwiGLU, else 2:

    F_token = 6 [ L (k h ffn + h (Q + 2 KV) + Q h) + h Vp ] + 6 L Q s
    MFU     = F_token x tokens per second / (devices x dense peak of one)

In a layer with experts k h ffn gives way to h E + k h (topk ffn_expert + ffn_shared): the router, and what a token sees.
"""

import re

from megatron_lite.config import Config
from megatron_lite.planner.params import expert_width

# Dense peak of one device in TFLOP/s: (words in the device's name, 16-bit with fp32 sums, fp32 without tensor cores).
# The first row whose words are all in the name counts. From the vendors' data sheets; the doubled "sparse" figures are
# not used. Volta and Turing have no bf16: their 16-bit figure is fp16's.
PEAKS: tuple[tuple[frozenset[str], float, float], ...] = tuple(
    (frozenset(words.split()), half, single)
    for words, half, single in (
        ("gb200", 2500.0, 80.0),
        ("b200", 2250.0, 75.0),
        ("gh200", 989.0, 67.0),
        ("h200 nvl", 836.0, 60.0),
        ("h200", 989.0, 67.0),
        ("h100 pcie", 756.0, 51.0),
        ("h100 nvl", 836.0, 60.0),
        ("h100", 989.0, 67.0),
        ("h800 pcie", 756.0, 51.0),
        ("h800", 989.0, 67.0),
        ("h20", 148.0, 44.0),
        ("a100", 312.0, 19.5),
        ("a800", 312.0, 19.5),
        ("a40", 149.7, 37.4),
        ("a6000", 154.8, 38.7),
        ("a30", 165.0, 10.3),
        ("a10g", 70.0, 35.0),
        ("a10", 125.0, 31.2),
        ("l40s", 362.0, 91.6),
        ("l40", 181.0, 90.5),
        ("l4", 121.0, 30.3),
        ("v100", 125.0, 15.7),
        ("t4", 65.0, 8.1),
        ("rtx 5090", 209.5, 104.8),
        ("rtx 4090", 165.2, 82.6),
        ("rtx 3090", 71.0, 35.6),
        ("mi300x", 1307.4, 163.4),
        ("mi250x", 191.5, 47.9),
    )
)


def flops_per_token(config: Config) -> int:
    """Forward and backward FLOPs per token of a full-length sample: model FLOPs, causal attention halved."""
    model = config.model
    h, wide, with_experts = model.hidden_size, 3 if model.swiglu else 2, sum(model.expert_layers)
    q, kv = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention, mlp = h * (q + 2 * kv) + q * h, wide * h * model.ffn_hidden_size
    seen = model.moe_router_topk * expert_width(model) + (model.moe_shared_expert_intermediate_size or 0)
    experts = h * (model.num_experts or 0) + wide * h * seen
    layers = model.num_layers * attention + (model.num_layers - with_experts) * mlp + with_experts * experts
    matrices = 6 * (layers + h * config.padded_vocab_size)
    return matrices + 6 * model.num_layers * q * model.seq_length


def tokens_per_iteration(config: Config) -> int:
    """Tokens of one step: global batch x sequence."""
    return config.train.global_batch_size * config.model.seq_length


def flops_per_iteration(config: Config) -> int:
    """Model FLOPs of one step over the whole cluster."""
    return flops_per_token(config) * tokens_per_iteration(config)


def device_peak_tflops(device_name: str, dtype_name: str) -> float | None:
    """Dense peak in TFLOP/s of a known GPU, e.g. ("NVIDIA A100-SXM4-80GB", "bfloat16") -> 312; None where unknown."""
    words = frozenset(re.split(r"[^a-z0-9]+", device_name.lower()))
    column = {"bfloat16": 1, "float16": 1, "float32": 2}.get(dtype_name)
    if column is None or words & {"laptop", "mobile", "mig", "ti", "d"}:
        return None
    return next((row[column] for row in PEAKS if row[0] <= words), None)


def mfu(config: Config, seconds_per_iteration: float, devices: int, peak_tflops: float) -> float:
    """Model FLOPs utilisation, 0..1: achieved model FLOP/s over `devices` dense peaks of `peak_tflops` TFLOP/s each."""
    return flops_per_iteration(config) / (seconds_per_iteration * devices * peak_tflops * 1e12)
