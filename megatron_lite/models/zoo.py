"""`--model` presets: published sizes, written as the flags they stand for.

A preset sets defaults only: a flag on the command line wins over it. Keys are field names of `ModelConfig`, plus
`vocab_size` of `DataConfig`. `seq_length` is a length the model was trained at (not its longest, where that was far
longer than most of its training); `max_position_embeddings` is what the published configuration allows.
Sources: the papers and the configuration files published with the weights.
"""

from typing import Any

# GPT-2 and GPT-3 (Radford et al. 2019, table 2; Brown et al. 2020, table 2.1): what is not named is Megatron's default
# (learned positions, LayerNorm 1e-5, 4h GELU MLP, biases, tied output). GPT-2's GELU is the tanh form.
GPT = {"openai_gelu": True, "vocab_size": 50257}
GPT2 = GPT | {"seq_length": 1024, "max_position_embeddings": 1024}
GPT3 = GPT | {"seq_length": 2048, "max_position_embeddings": 2048}

# What the LLaMA family shares (Touvron et al. 2023): no biases, no dropout.
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
UNTIED = {"untie_embeddings_and_output_weights": True}
LLAMA2 = LLAMA | UNTIED | {"vocab_size": 32000, "seq_length": 4096, "max_position_embeddings": 4096}
LLAMA3 = LLAMA | {"vocab_size": 128256, "rotary_base": 500000.0, "seq_length": 8192, "max_position_embeddings": 8192}
LLAMA32 = LLAMA3 | {
    "max_position_embeddings": 131072,
    "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
    "rope_original_max_position": 8192,
}
QWEN25 = LLAMA | {
    "vocab_size": 151936,
    "add_qkv_bias": True,
    "rotary_base": 1e6,
    "norm_epsilon": 1e-6,
    "seq_length": 4096,
    "max_position_embeddings": 131072,
}
MISTRAL = (
    LLAMA | UNTIED | {"vocab_size": 32000, "rotary_base": 1e6, "seq_length": 4096, "max_position_embeddings": 32768}
)

# Mixture of experts (Jiang et al. 2024, arXiv 2401.04088; Yang et al. 2025, arXiv 2505.09388).
MIXTRAL = LLAMA | UNTIED | {"rotary_base": 1e6, "seq_length": 4096, "num_experts": 8, "moe_router_topk": 2}
QWEN3_MOE = (
    LLAMA
    | UNTIED
    | {
        "vocab_size": 151936,
        "qk_layernorm": True,
        "kv_channels": 128,
        "rotary_base": 1e6,
        "norm_epsilon": 1e-6,
        "seq_length": 4096,
        "max_position_embeddings": 40960,
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk": True,
    }
)
# Fine-grained experts beside shared ones, the first layer dense (Dai et al. 2024, arXiv 2401.06066).
DEEPSEEK_MOE = (
    LLAMA
    | UNTIED
    | {
        "vocab_size": 102400,
        "norm_epsilon": 1e-6,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "moe_layer_freq": "[0]+[1]*27",
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 2816,
        "moe_router_topk": 6,
        "moe_router_pre_softmax": True,
    }
)


def _size(layers: int, hidden: int, heads: int, ffn: int, groups: int | None = None) -> dict[str, Any]:
    """The five numbers of a size; `groups` key/value heads turn grouped-query attention on."""
    size = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn}
    return size if groups is None else size | {"group_query_attention": True, "num_query_groups": groups}


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | _size(12, 768, 12, 3072),
    "gpt2-medium": GPT2 | _size(24, 1024, 16, 4096),
    "gpt2-large": GPT2 | _size(36, 1280, 20, 5120),
    "gpt2-xl": GPT2 | _size(48, 1600, 25, 6400),
    "gpt3-175b": GPT3 | _size(96, 12288, 96, 49152),
    "llama2-7b": LLAMA2 | _size(32, 4096, 32, 11008),
    "llama2-13b": LLAMA2 | _size(40, 5120, 40, 13824),
    "llama2-70b": LLAMA2 | _size(80, 8192, 64, 28672, groups=8),
    "llama3-8b": LLAMA3 | UNTIED | _size(32, 4096, 32, 14336, groups=8),
    "llama3-70b": LLAMA3 | UNTIED | _size(80, 8192, 64, 28672, groups=8),
    "llama3.2-1b": LLAMA32 | _size(16, 2048, 32, 8192, groups=8),
    "llama3.2-3b": LLAMA32 | _size(28, 3072, 24, 8192, groups=8),
    "qwen2.5-0.5b": QWEN25 | {"max_position_embeddings": 32768} | _size(24, 896, 14, 4864, groups=2),
    "qwen2.5-1.5b": QWEN25 | _size(28, 1536, 12, 8960, groups=2),
    "qwen2.5-7b": QWEN25 | UNTIED | {"vocab_size": 152064} | _size(28, 3584, 28, 18944, groups=4),
    # v0.2: like v0.1 but full attention instead of a 4096-token window, theta 1e6.
    "mistral-7b": MISTRAL | _size(32, 4096, 32, 14336, groups=8),
    "mixtral-8x7b": MIXTRAL | {"vocab_size": 32000, "max_position_embeddings": 32768} | _size(32, 4096, 32, 14336, groups=8),
    "mixtral-8x22b": MIXTRAL | {"vocab_size": 32000, "max_position_embeddings": 65536} | _size(56, 6144, 48, 16384, groups=8),
    "qwen3-30b-a3b": QWEN3_MOE
    | {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768}
    | _size(48, 2048, 32, 6144, groups=4),
    "deepseek-moe-16b": DEEPSEEK_MOE | _size(28, 2048, 16, 10944),
}
