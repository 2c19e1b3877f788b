"""LitGPT: its GPT model and its chunked loss, in the precision its pretraining uses (bf16-mixed, that is, autocast)."""

from benchmarks.peers.loops import Loop
from benchmarks.peers.spec import NORM_EPS, ROPE_BASE, Spec


def build(spec: Spec) -> Loop:
    """The model from LitGPT with our initial weights through its own converter."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy

    shape = spec.shape
    config = Config(
        name="W",
        block_size=shape.seq,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_query_groups=shape.kv_heads,
        head_size=shape.head_dim,
        n_embd=shape.hidden,
        intermediate_size=shape.ffn,
        rotary_percentage=1.0,
        rope_base=int(ROPE_BASE),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=NORM_EPS,
        mlp_class_name="LLaMAMLP",
    )
    weights = {}
    copy_weights_hf_llama(config, {}, weights, spec.load_weights())
    model = GPT(config)
    model.load_state_dict(weights)
    return Loop(spec, lambda tokens, targets: chunked_cross_entropy(model(tokens), targets), model.parameters())
