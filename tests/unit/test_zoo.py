"""Presets against the published parameter counts."""

import math
from dataclasses import fields

import pytest

from megatron_lite.arguments import parse
from megatron_lite.config import ModelConfig
from megatron_lite.convert.links import our_tensors
from megatron_lite.models.zoo import PRESETS
from megatron_lite.planner.params import count_parameters

# Counts of the published weights, e.g. gpt2: 50257 * 768 + 1024 * 768 + 12 * (12 * 768^2 + 13 * 768) + 2 * 768.
# GPT-3's weights are not public; its count is this formula (the paper says 175B).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-moe-16b": 16_375_728_128,
}
RUN = "--micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data".split()


def preset(name, *flags):
    config, problems = parse(["--model", name, *RUN, *flags], 1)
    assert problems == []
    return config


def test_every_preset_has_a_published_count():
    assert set(PRESETS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_complete_and_has_its_published_size(name):
    assert set(PRESETS[name]) <= {field.name for field in fields(ModelConfig)} | {"vocab_size"}
    config = preset(name)
    if config.model.num_experts:  # by the shard records of the parameters that are built
        assert sum(map(math.prod, our_tensors(config.model, config.data.vocab_size).values())) == PUBLISHED[name]
    else:
        assert count_parameters(config) == PUBLISHED[name]


def test_a_flag_wins_over_the_preset():
    config = preset("llama3.2-1b", "--num-layers", "2", "--seq-length", "128", "--vocab-size", "1000")
    assert (config.model.num_layers, config.model.seq_length, config.data.vocab_size) == (2, 128, 1000)
    assert config.model.hidden_size == 2048 and config.model.kv_channels == 64


def reference_config(transformers, config):
    """The transformers configuration of the same model, None for families that it does not name alike."""
    model, vocab = config.model, config.data.vocab_size
    if model.position_embedding_type == "learned_absolute":
        return transformers.GPT2Config(
            vocab_size=vocab,
            n_positions=model.max_position_embeddings,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
        )
    family = transformers.Qwen2Config if model.add_qkv_bias else transformers.LlamaConfig
    return family(
        vocab_size=vocab,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tied,
    )


@pytest.mark.parametrize("name", ["gpt2-xl", "llama3-8b", "llama3.2-1b", "qwen2.5-0.5b", "qwen2.5-7b"])
def test_formula_counts_what_transformers_builds(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = preset(name)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(reference_config(transformers, config))
    assert count_parameters(config) == sum(param.numel() for param in reference.parameters())
