"""Hugging Face transformers: LlamaForCausalLM with SDPA in the loop people write around it (autocast for bf16)."""

import torch

from benchmarks.peers.loops import Loop
from benchmarks.peers.spec import NORM_EPS, ROPE_BASE, Spec


def build(spec: Spec) -> Loop:
    """The model from transformers, our initial weights, its own loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = spec.shape
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.seq,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(spec.load_weights())
    model.train()
    run = torch.compile(model) if spec.compile else model

    def loss_of(tokens, targets):
        # The targets are shifted already; shift_labels tells its loss so.
        return run(input_ids=tokens, labels=targets, shift_labels=targets.contiguous()).loss

    return Loop(spec, loss_of, model.parameters())
