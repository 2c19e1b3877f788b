"""Tiny random models of every family, saved by transformers, and our converter as the tests call it."""

import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools import convert_checkpoint

VOCAB, REACH = 99, 64  # an odd vocabulary: no padding fits it
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=REACH, rms_norm_eps=1e-6, tie_word_embeddings=False,
             bos_token_id=1, eos_token_id=2)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | more))


def gpt2(**more):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        **dict(vocab_size=VOCAB, n_positions=REACH, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
               attn_pdrop=0.0, bos_token_id=1, eos_token_id=2) | more))  # fmt: skip


MODELS = {
    "gpt2": gpt2,
    "gpt2_untied": lambda: gpt2(tie_word_embeddings=False),
    "llama1": lambda: llama(num_key_value_heads=4),
    "llama2_linear": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3": lambda: llama(rope_parameters=LLAMA3),
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "llama_biases_head_dim": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=16),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=None)),
    "mistral_window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=24)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1])),
}


def save_model(kind, folder, dtype=torch.float32, shard="1GB"):
    """A folder as it is published: weights with no zeros and ones in them, settings, generation settings, a tokenizer."""
    torch.manual_seed(3)
    model = MODELS[kind]().to(dtype).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.1)
    model.generation_config.update(max_new_tokens=7)
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                         unk_token="<unk>").save_pretrained(folder)  # fmt: skip


def convert(command, load, save, *flags):
    """Run the tool in this process: its exit status."""
    try:
        return convert_checkpoint.main([command, "--load", str(load), "--save", str(save), *flags])
    except SystemExit as end:
        return end.code


def text_of(folder):
    """{name: bytes} of all files of a folder."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
