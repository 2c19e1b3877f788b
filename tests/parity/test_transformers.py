"""Logits and the gradient of every parameter against Hugging Face transformers, random tiny weights, fp64 at 1e-9.

Which tensor of theirs is which of ours, and which settings, the converter says: `megatron_lite/convert/`.
"""

import dataclasses
import functools

import pytest
import torch
import transformers

from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig
from megatron_lite.convert.families import family_of_model
from megatron_lite.convert.links import check_links, our_tensors
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.parallel.wgrad import attach_grad_buffers

VOCAB, SEQ, BATCH = 96, 48, 2
LLAMA = ModelConfig(
    num_layers=3, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, group_query_attention=True, num_query_groups=2,
    kv_channels=8, seq_length=SEQ, max_position_embeddings=SEQ, position_embedding_type="rope", normalization="RMSNorm",
    norm_epsilon=1e-6, swiglu=True, disable_bias_linear=True, untie_embeddings_and_output_weights=True, hidden_dropout=0.0,
    attention_dropout=0.0, init_method_std=0.3)  # fmt: skip
GPT = ModelConfig(
    num_layers=3, hidden_size=48, ffn_hidden_size=192, num_attention_heads=6, kv_channels=8, seq_length=SEQ,
    max_position_embeddings=SEQ, openai_gelu=True, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3)  # fmt: skip


def reference_of(model):
    """transformers' model of one of our configurations."""
    family = family_of_model(model)
    config = transformers.AutoConfig.for_model(family.MODEL_TYPE, **family.to_json(model, VOCAB))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def in_double(reference):
    """transformers' RMSNorm casts to fp32 whatever it is given: the same formula in fp64 takes its place."""
    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(rms_norm, module)
    return reference.double()


def rms_norm(module, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


CASES = {
    "llama_gqa": LLAMA,
    "llama_theta_llama3_scaling": dataclasses.replace(
        LLAMA, rotary_base=500000.0, use_rope_scaling=True, rope_original_max_position=16, rope_scaling_factor=8.0),
    "llama_linear_scaling": dataclasses.replace(LLAMA, rotary_seq_len_interpolation_factor=4.0),
    "llama_head_dim": dataclasses.replace(LLAMA, kv_channels=16),
    "llama_mha_tied": dataclasses.replace(
        LLAMA, group_query_attention=False, num_query_groups=None, untie_embeddings_and_output_weights=False),
    "qwen2": dataclasses.replace(LLAMA, add_qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, qk_layernorm=True),
    "gpt2": GPT,
}  # fmt: skip


def both(case):
    """(transformers' model, ours with its weights, {our tensor's name: its link to theirs})"""
    model = CASES[case]
    torch.manual_seed(5)
    reference = in_double(reference_of(model))
    for name, p in reference.named_parameters():  # every parameter takes part: no ones and zeros
        matrix, ends = p.dim() > 1, name.split(".")[-2] in ("wte", "wpe", "embed_tokens", "lm_head")
        mean = 0.5 if not matrix and name.endswith("weight") else 0.0
        torch.nn.init.normal_(p, mean, 0.4 if matrix and not ends else 0.2)  # layers outweigh the last token's embedding
    theirs, targets = dict(reference.named_parameters()), our_tensors(model, VOCAB)
    links = [link for link in family_of_model(model).links(targets, theirs) if not link.alias]
    check_links(links, targets, {name: p.shape for name, p in theirs.items()})
    link_of = {link.box.name: link for link in links}

    tp = TensorParallel(Axis("tp"), False, torch.float64, torch.device("cpu"))
    ours = TransformerStage(model, VOCAB, 128, range(model.num_layers), True, True, tp).initialise(1)
    for param in ours.parameters():
        for box in param.shard.boxes:
            link = link_of[box.name]
            box.of_local(param.data).copy_(box.of_full(link.of_theirs(theirs[link.theirs].data)))
    return reference, ours, link_of


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case):
    reference, ours, link_of = both(case)
    theirs = dict(reference.named_parameters())
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    labels = torch.randint(0, VOCAB, (BATCH, SEQ))
    mask = (torch.rand(BATCH, SEQ) < 0.8).double()
    logits = reference(tokens).logits
    with torch.no_grad():
        mine = ours.logits(ours.hidden(tokens, None)).transpose(0, 1)[..., :VOCAB]
    torch.testing.assert_close(mine, logits, rtol=1e-9, atol=1e-9)

    loss = (torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()).sum()
    loss.backward()
    attach_grad_buffers(ours.parameters())
    my_loss = ours(tokens, labels, mask)
    my_loss.backward()
    torch.testing.assert_close(my_loss.detach(), loss.detach(), rtol=1e-10, atol=0)
    for param in ours.parameters():
        for box in param.shard.boxes:
            link = link_of[box.name]
            expected = box.of_full(link.of_theirs(theirs[link.theirs].grad))
            scale = max(expected.abs().max().item(), 1e-4)  # a key bias has gradient zero: softmax does not see it
            difference = (box.of_local(param.main_grad) - expected).abs().max().item()
            assert difference <= 1e-9 * scale, box.name
