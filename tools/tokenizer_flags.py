"""The flags that say which tokenizer a tool uses."""

import argparse

from megatron_lite.tokenizers import TIKTOKEN_PATTERNS, TOKENIZER_TYPES

NAMES = ("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "tiktoken_pattern",
         "tiktoken_num_special_tokens")  # fmt: skip


def add_tokenizer_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the flags, under the names that pretrain_gpt.py gives them."""
    add = parser.add_argument
    add("--tokenizer-type", required=required, choices=TOKENIZER_TYPES)
    add("--tokenizer-model", metavar="PATH", help="a Hugging Face folder, a sentencepiece .model file, or ranks for TikTokenizer")
    add("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    add("--tiktoken-pattern", choices=tuple(TIKTOKEN_PATTERNS), help="how TikTokenizer cuts text into words")
    add("--tiktoken-num-special-tokens", type=int, metavar="N", help="ids before those of a TikTokenizer's JSON file")
    add("--vocab-size", type=int, metavar="N", help="ordinary ids of NullTokenizer, or all of a TikTokenizer's JSON file")


def tokenizer_values(arguments: argparse.Namespace) -> tuple[tuple[str, str | int | None], ...]:
    """(name, value) of the arguments of `build_tokenizer`."""
    return tuple((name, getattr(arguments, name)) for name in NAMES)
