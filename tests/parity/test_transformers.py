"""Logits and the gradient of every parameter against Hugging Face transformers, random tiny weights, fp64 at 1e-9."""

import dataclasses
import functools

import pytest
import torch
import transformers

from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig
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


def llama_config(model: ModelConfig, **more):
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.use_rope_scaling:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, "low_freq_factor": model.rope_low_freq_factor,
                 "high_freq_factor": model.rope_high_freq_factor,
                 "original_max_position_embeddings": model.rope_original_max_position}  # fmt: skip
    if model.rotary_seq_len_interpolation_factor is not None:
        rope |= {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return dict(
        vocab_size=VOCAB, hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim, max_position_embeddings=64,
        rms_norm_eps=model.norm_epsilon, tie_word_embeddings=model.tied, rope_parameters=rope,
        attn_implementation="sdpa", **more)  # fmt: skip


def hf_llama(model):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_config(model)))


def hf_qwen2(model):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**llama_config(model)))


def hf_qwen3(model):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**llama_config(model)))


def hf_gpt2(model):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=model.hidden_size, n_layer=model.num_layers,
        n_head=model.num_attention_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        layer_norm_epsilon=model.norm_epsilon, attn_implementation="sdpa"))  # fmt: skip


def llama_tensors(reference):
    """canonical name -> parameter (ours are Hugging Face's without `model.`)"""
    return {name.removeprefix("model."): p for name, p in reference.named_parameters()}


def gpt2_tensors(reference, hidden):
    """canonical name -> (parameter, row slice, transposed); GPT-2 keeps [in, out] matrices with Q, K, V side by side."""
    found = {"embed_tokens.weight": reference.transformer.wte.weight, "embed_positions.weight": reference.transformer.wpe.weight,
             "norm.weight": reference.transformer.ln_f.weight, "norm.bias": reference.transformer.ln_f.bias}  # fmt: skip
    for i, block in enumerate(reference.transformer.h):
        for kind in ("weight", "bias"):
            found |= {f"layers.{i}.input_layernorm.{kind}": getattr(block.ln_1, kind),
                      f"layers.{i}.post_attention_layernorm.{kind}": getattr(block.ln_2, kind),
                      f"layers.{i}.self_attn.o_proj.{kind}": getattr(block.attn.c_proj, kind),
                      f"layers.{i}.mlp.up_proj.{kind}": getattr(block.mlp.c_fc, kind),
                      f"layers.{i}.mlp.down_proj.{kind}": getattr(block.mlp.c_proj, kind)}  # fmt: skip
            for n, piece in enumerate("qkv"):
                found[f"layers.{i}.self_attn.{piece}_proj.{kind}"] = (getattr(block.attn.c_attn, kind), n)
    return found


def in_double(reference):
    """transformers' RMSNorm casts to fp32 whatever it is given: the same formula in fp64 takes its place."""
    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(rms_norm, module)
    return reference.double()


def rms_norm(module, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def value_of(entry, hidden, grad=False):
    piece = None
    if isinstance(entry, tuple):
        entry, piece = entry
    tensor = entry.grad if grad else entry.data
    if piece is not None:
        tensor = tensor[..., piece * hidden : (piece + 1) * hidden]
    return tensor


CASES = {
    "llama_gqa": (hf_llama, LLAMA),
    "llama_theta_llama3_scaling": (hf_llama, dataclasses.replace(
        LLAMA, rotary_base=500000.0, use_rope_scaling=True, rope_original_max_position=16, rope_scaling_factor=8.0)),
    "llama_linear_scaling": (hf_llama, dataclasses.replace(LLAMA, rotary_seq_len_interpolation_factor=4.0)),
    "llama_head_dim": (hf_llama, dataclasses.replace(LLAMA, kv_channels=16)),
    "llama_mha_tied": (hf_llama, dataclasses.replace(
        LLAMA, group_query_attention=False, num_query_groups=None, untie_embeddings_and_output_weights=False)),
    "qwen2": (hf_qwen2, dataclasses.replace(LLAMA, add_qkv_bias=True)),
    "qwen3": (hf_qwen3, dataclasses.replace(LLAMA, qk_layernorm=True)),
    "gpt2": (hf_gpt2, GPT),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case):
    build, model = CASES[case]
    torch.manual_seed(5)
    reference = in_double(build(model))
    for p in reference.parameters():  # every parameter takes part: no ones and zeros
        torch.nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.2)
    gpt = build is hf_gpt2
    tensors = gpt2_tensors(reference, model.hidden_size) if gpt else llama_tensors(reference)

    tp = TensorParallel(Axis("tp"), False, torch.float64, torch.device("cpu"))
    ours = TransformerStage(model, VOCAB, 128, range(model.num_layers), True, True, tp).initialise(1)
    seen = set()
    for param in ours.parameters():
        for box in param.shard.boxes:
            value = value_of(tensors[box.name], model.hidden_size)
            matrix = gpt and value.dim() == 2 and "embed" not in box.name
            box.of_local(param.data).copy_(box.of_full(value.t() if matrix else value))
            seen.add(box.name)
    assert seen == set(tensors) - ({"lm_head.weight"} if model.tied else set())

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
            grad = value_of(tensors[box.name], model.hidden_size, grad=True)
            matrix = gpt and grad.dim() == 2 and "embed" not in box.name
            expected = box.of_full(grad.t() if matrix else grad)
            scale = max(expected.abs().max().item(), 1e-4)  # a key bias has gradient zero: softmax does not see it
            difference = (box.of_local(param.main_grad) - expected).abs().max().item()
            assert difference <= 1e-9 * scale, box.name
