"""Logits and the gradient of every parameter against Hugging Face transformers, random tiny weights, fp64 at 1e-9.

Which tensor of theirs is which of ours, and which settings, the converter says: `megatron_lite/convert/`.
"""

import dataclasses
import functools
import sys
import types

import pytest
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig
from megatron_lite.convert import deepseek_moe, mixtral
from megatron_lite.convert.families import family_of_model
from megatron_lite.convert.links import check_links, our_tensors
from megatron_lite.models.moe import MoE
from megatron_lite.models.router import Training
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.expert import ExpertParallel
from megatron_lite.parallel.shard import Init, allocate
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
    if family is deepseek_moe:
        return deepseek(family.to_json(model, VOCAB))
    config = transformers.AutoConfig.for_model(family.MODEL_TYPE, **family.to_json(model, VOCAB))
    config._experts_implementation = "eager"  # torch's grouped GEMM, which it would take, knows no fp64
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def deepseek(config):
    """DeepSeekMoE has no class in transformers: a LLaMA of that config.json, with the DeepSeek-V2 layer of experts in it, whose
    router is V1's where nothing is scaled and there are no groups."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    moe = transformers.DeepseekV2Config(
        hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"], routed_scaling_factor=1.0,
        topk_method="greedy", n_shared_experts=config["n_shared_experts"], n_routed_experts=config["n_routed_experts"],
        **{name: config[name] for name in ("moe_intermediate_size", "num_experts_per_tok")})  # fmt: skip
    for layer in llama.model.layers[config["first_k_dense_replace"] :]:
        layer.mlp = modeling_deepseek_v2.DeepseekV2Moe(moe)
    return llama


class Exact(types.ModuleType):
    """torch, where single precision is double."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def exactly(router, *args):
    """transformers' routers work in fp32 whatever they are given: their own code, with every fp32 in it fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(sys.modules[type(router).__module__], "torch", Exact("torch"))
        return type(router).forward(router, *args)


def published(tensors, mixtral=False):
    """{name in the published files: block} of {transformers' name: tensor}: its experts lie in one tensor, the files' apart."""
    parts, experts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj"), ".mlp.experts."
    found = {}
    for name, tensor in tensors.items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        place, _, kind = name.partition(experts.replace(".mlp.", ".block_sparse_moe.") if mixtral else experts)
        for e, matrix in enumerate(tensor if kind else ()):
            for part, block in zip(parts[:2] if kind == "gate_up_proj" else parts[2:],
                                   matrix.chunk(2) if kind == "gate_up_proj" else [matrix], strict=True):  # fmt: skip
                found[f"{place}.{'block_sparse_moe' if mixtral else 'mlp'}.experts.{e}.{part}.weight"] = block
        if not kind:
            found[name] = tensor
    return found


def in_double(reference):
    """transformers' RMSNorm casts to fp32 whatever it is given: the same formula in fp64 takes its place."""
    for module in reference.modules():
        if type(module).__name__.lower().endswith("router"):
            module.forward = functools.partial(exactly, module)
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(rms_norm, module)
    return reference.double()


def rms_norm(module, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


MOE = dataclasses.replace(LLAMA, num_experts=6, moe_router_topk=3, moe_ffn_hidden_size=40)
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
    "mixtral": dataclasses.replace(MOE, moe_ffn_hidden_size=80),
    "qwen3_moe": dataclasses.replace(MOE, qk_layernorm=True, moe_layer_freq="[1,0,1]", moe_router_pre_softmax=True),
    "qwen3_moe_normalised": dataclasses.replace(MOE, qk_layernorm=True, moe_router_pre_softmax=True, moe_router_norm_topk=True),
    "deepseek_moe": dataclasses.replace(MOE, moe_layer_freq="[0,1,1]", moe_router_pre_softmax=True,
                                        moe_shared_expert_intermediate_size=80),
}  # fmt: skip


def of_reference(model, reference, what):
    """{published name: what(parameter), or a block of it}"""
    return published({name: what(p) for name, p in reference.named_parameters()}, family_of_model(model) is mixtral)


def both(case):
    """(transformers' model, ours with its weights, {our tensor's name: its link to theirs})"""
    model = CASES[case]
    torch.manual_seed(5)
    reference = in_double(reference_of(model))
    for name, p in reference.named_parameters():  # every parameter takes part: no ones and zeros
        matrix, ends = p.dim() > 1, name.split(".")[-2] in ("wte", "wpe", "embed_tokens", "lm_head")
        mean = 0.5 if not matrix and name.endswith("weight") else 0.0
        torch.nn.init.normal_(p, mean, 0.4 if matrix and not ends else 0.2)  # layers outweigh the last token's embedding
    theirs, targets = of_reference(model, reference, lambda p: p.data), our_tensors(model, VOCAB)
    links = [link for link in family_of_model(model).links(targets, theirs) if not link.alias]
    check_links(links, targets, {name: p.shape for name, p in theirs.items()})
    link_of = {link.box.name: link for link in links}

    tp = TensorParallel(Axis("tp"), False, torch.float64, torch.device("cpu"))
    ours = TransformerStage(model, VOCAB, 128, range(model.num_layers), True, True, tp).initialise(1)
    for param in ours.parameters():
        for box in param.shard.boxes:
            link = link_of[box.name]
            box.of_local(param.data).copy_(box.of_full(link.of_theirs(theirs[link.theirs])))
    return reference, ours, link_of


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case):
    reference, ours, link_of = both(case)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    labels = torch.randint(0, VOCAB, (BATCH, SEQ))
    mask = (torch.rand(BATCH, SEQ) < 0.8).double()
    logits = reference(tokens).logits
    with torch.no_grad():
        mine = ours.logits(ours.hidden(tokens, None)).transpose(0, 1)[..., :VOCAB]
    torch.testing.assert_close(mine, logits, rtol=1e-9, atol=1e-9)

    loss = (torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()).sum()
    loss.backward()
    theirs = of_reference(CASES[case], reference, lambda p: p.grad)
    attach_grad_buffers(ours.parameters())
    my_loss = ours(tokens, labels, mask)
    my_loss.backward()
    torch.testing.assert_close(my_loss.detach(), loss.detach(), rtol=1e-10, atol=0)
    for param in ours.parameters():
        for box in param.shard.boxes:
            link = link_of[box.name]
            expected = box.of_full(link.of_theirs(theirs[link.theirs]))
            scale = max(expected.abs().max().item(), 1e-4)  # a key bias has gradient zero: softmax does not see it
            difference = (box.of_local(param.main_grad) - expected).abs().max().item()
            assert difference <= 1e-9 * scale, box.name


def test_the_router_of_deepseek_v3():
    """Sigmoid scores, groups, a bias on the choice, scaled weights, a shared expert: one layer of V3's, and its gradients."""
    model = dataclasses.replace(
        MOE, num_experts=8, moe_router_topk=3, moe_router_score_function="sigmoid", moe_router_norm_topk=True,
        moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5, moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=40)  # fmt: skip
    torch.manual_seed(5)
    reference = in_double(modeling_deepseek_v3.DeepseekV3MoE(transformers.DeepseekV3Config(
        hidden_size=48, num_attention_heads=6, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1)))  # fmt: skip
    for p in (*reference.parameters(), reference.gate.e_score_correction_bias):
        torch.nn.init.normal_(p, 0.0, 0.4)
    tp = TensorParallel(Axis("tp"), False, torch.float64, torch.device("cpu"))
    ours = MoE("mlp", model, tp, ExpertParallel(), Init("normal", 1.0), Init("normal", 1.0))
    ours.router.bias.copy_(reference.gate.e_score_correction_bias)
    theirs = published({f".mlp.{name}": p for name, p in reference.named_parameters()})
    for param in ours.parameters():
        allocate(param)
        for box in param.shard.boxes:
            box.of_local(param.data).copy_(theirs[f".{box.name.replace('router', 'gate')}"].data)
    attach_grad_buffers(ours.parameters())
    x, dy = torch.randn(20, 2, 48, dtype=torch.float64, requires_grad=True), torch.randn(20, 2, 48, dtype=torch.float64)
    mine, counted = x.detach().requires_grad_(), Training(torch.ones(2, 20))
    expected, got = reference(x), ours(mine, training=counted)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    expected.backward(dy)
    got.backward(dy)
    torch.testing.assert_close(mine.grad, x.grad, rtol=1e-10, atol=1e-10)
    grads = published({f".mlp.{name}": p.grad for name, p in reference.named_parameters()})
    for param in ours.parameters():
        for box in param.shard.boxes:
            grad = grads[f".{box.name.replace('router', 'gate')}"]
            torch.testing.assert_close(box.of_local(param.main_grad), grad, rtol=1e-10, atol=1e-10)
    assert ours.router.tally[:-2].sum() == 20 * 2 * 3
