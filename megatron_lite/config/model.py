"""Flags of the architecture."""

import re
from dataclasses import dataclass

from megatron_lite.config.flag import flag

LIST = re.compile(r"\s*\[([01](?:\s*,\s*[01])*)\]\s*(?:\*\s*(\d+))?\s*")  # [0, 1]*3


@dataclass(frozen=True)
class ModelConfig:
    """model"""

    model: str | None = flag(None, "preset whose sizes are the defaults of the flags below (see docs/models.md)", type=str)
    num_layers: int | None = flag(None, "transformer layers", type=int)
    hidden_size: int | None = flag(None, "width of the residual stream", type=int)
    ffn_hidden_size: int | None = flag(None, "width of the MLP (default 4h; with --swiglu 2/3 of that, multiple of 64)", type=int)
    num_attention_heads: int | None = flag(None, "query heads", type=int)
    group_query_attention: bool = flag(False, "share key/value heads between query heads")
    num_query_groups: int | None = flag(None, "key/value heads (needs --group-query-attention)", type=int)
    kv_channels: int | None = flag(None, "size of one head (default hidden / heads)", type=int)
    seq_length: int | None = flag(None, "tokens per sample", type=int)
    max_position_embeddings: int | None = flag(None, "longest sequence the positions allow (default --seq-length)", type=int)
    position_embedding_type: str = flag("learned_absolute", "how positions enter", choices=("learned_absolute", "rope", "none"),
        stands_for=("--use-rotary-position-embeddings", "rope"))  # fmt: skip
    rotary_base: float = flag(10000.0, "RoPE theta")
    rotary_percent: float = flag(1.0, "share of each head that RoPE turns")
    rotary_interleaved: bool = flag(False, "RoPE pairs neighbours (2i, 2i+1) instead of halves (i, i + d/2)")
    rotary_seq_len_interpolation_factor: float | None = flag(None, "linear RoPE scaling: positions are divided by it", type=float)
    use_rope_scaling: bool = flag(False, "LLaMA-3's frequency-dependent RoPE scaling")
    rope_scaling_factor: float = flag(8.0, "LLaMA-3 RoPE scaling: factor")
    rope_low_freq_factor: float = flag(1.0, "LLaMA-3 RoPE scaling: low frequency factor")
    rope_high_freq_factor: float = flag(4.0, "LLaMA-3 RoPE scaling: high frequency factor")
    rope_original_max_position: int = flag(8192, "LLaMA-3 RoPE scaling: context length before scaling")
    normalization: str = flag("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "epsilon inside the norms")
    swiglu: bool = flag(False, "gated MLP: down(silu(gate) * up)")
    openai_gelu: bool = flag(False, "tanh form of GELU, as GPT-2 used")
    disable_bias_linear: bool = flag(False, "no biases in the linears")
    add_qkv_bias: bool = flag(False, "bias in the QKV projection only")
    qk_layernorm: bool = flag(False, "norm on every query and key head")
    untie_embeddings_and_output_weights: bool = flag(False, "separate output weights")
    make_vocab_size_divisible_by: int = flag(128, "the vocabulary is padded to a multiple of this times tp, never trained")
    hidden_dropout: float = flag(0.1, "dropout after embedding, attention and MLP")
    attention_dropout: float = flag(0.1, "dropout on attention probabilities")
    init_method_std: float = flag(0.02, "standard deviation of initial weights; output projections get std/sqrt(2 layers)")
    label_smoothing: float = flag(0.0, "share of the target spread over the true vocabulary")
    num_experts: int | None = flag(None, "experts in place of the MLP (default: none, an MLP)", type=int)
    moe_layer_freq: str = flag("1", "which layers have experts: every Nth, or a list with a 0 or 1 for each layer, as in "
        "[0]+[1]*27", type=str)  # fmt: skip
    moe_ffn_hidden_size: int | None = flag(None, "width of one expert (default: --ffn-hidden-size)", type=int)
    moe_shared_expert_intermediate_size: int | None = flag(None, "width of all shared experts together, which see every token "
        "(default: none)", type=int)  # fmt: skip
    moe_router_topk: int = flag(2, "experts that each token goes to")
    moe_router_score_function: str = flag("softmax", "scores of the router's logits", choices=("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = flag(False, "softmax over all experts before the choice, so that a token's weights need not "
        "sum to 1 (default: over the chosen)")  # fmt: skip
    moe_router_norm_topk: bool = flag(False, "divide the weights of a token's experts by their sum")
    moe_router_num_groups: int | None = flag(None, "groups of experts, the best of which a token may use", type=int)
    moe_router_group_topk: int | None = flag(None, "groups that a token may use (needs --moe-router-num-groups)", type=int)
    moe_router_topk_scaling_factor: float | None = flag(None, "factor on the weights of a token's experts", type=float)
    moe_router_load_balancing_type: str = flag("seq_aux_loss", "loss that evens out the load: over each sequence, or none "
        "(Megatron's aux_loss is over a micro-batch, and would change with the layout: refused)",
        choices=("seq_aux_loss", "aux_loss", "none"))  # fmt: skip
    moe_aux_loss_coeff: float = flag(0.0, "weight of that loss")
    moe_z_loss_coeff: float | None = flag(None, "weight of the mean squared logsumexp of the router's logits", type=float)
    moe_router_enable_expert_bias: bool = flag(False, "even out the load by a bias on the choice alone, updated once a step")
    moe_router_bias_update_rate: float = flag(1e-3, "step of that bias")
    moe_expert_capacity_factor: float | None = flag(None, "tokens that an expert takes, in units of an even share; what is more "
        "is dropped (default: nothing is dropped)", type=float)  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.kv_channels

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Of each layer whether it has experts."""
        return expert_layers(self.moe_layer_freq, self.num_layers) if self.num_experts else (False,) * self.num_layers

    @property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def qkv_bias(self) -> bool:
        return self.add_qkv_bias or not self.disable_bias_linear


def expert_layers(pattern: str, num_layers: int) -> tuple[bool, ...]:
    """--moe-layer-freq: `2` is every second layer from the first on, `[0]+[1]*27` says it of each. Raises ValueError."""
    if pattern.strip().isdecimal() and int(pattern) > 0:
        return tuple(layer % int(pattern) == 0 for layer in range(num_layers))
    found: list[bool] = []
    for part in pattern.split("+"):
        match = LIST.fullmatch(part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a number nor a list of 0 and 1, as in [0]+[1]*{num_layers - 1}")
        found += [digit.strip() == "1" for digit in match[1].split(",")] * int(match[2] or 1)
    if len(found) != num_layers:
        raise ValueError(f"it speaks of {len(found)} layers, and there are {num_layers}")
    return tuple(found)
