"""Tokenizers: one small interface, one file per family, one function that builds them from the flags."""

from megatron_lite.tokenizers.base import Tokenizer, TokenizerError
from megatron_lite.tokenizers.byte_pairs import TIKTOKEN_PATTERNS, GPT2BPETokenizer, TikTokenizer
from megatron_lite.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_lite.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_lite.tokenizers.simple import ByteTokenizer, NullTokenizer

__all__ = [
    "TIKTOKEN_PATTERNS",
    "TOKENIZER_TYPES",
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "Tokenizer",
    "TokenizerError",
    "build_tokenizer",
]

# Which of the flags that name files or how to read them a tokenizer needs, and which it may have.
NEEDS = {
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
    "ByteTokenizer": (),
}
MAY_HAVE = {"TikTokenizer": ("tiktoken_pattern", "tiktoken_num_special_tokens")}
TOKENIZER_TYPES = tuple(NEEDS)


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None, vocab_file: str | None = None,
    merge_file: str | None = None, tiktoken_pattern: str | None = None, tiktoken_num_special_tokens: int | None = None,
) -> Tokenizer:  # fmt: skip
    """The tokenizer that the flags of these names describe.

    `vocab_size` is the number of ordinary ids for NullTokenizer, and cuts the ranks of Megatron's JSON for TikTokenizer; for
    the others it may only confirm or widen the tokenizer's own. Raises TokenizerError naming the flags for any combination
    that cannot work.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise TokenizerError(f"--tokenizer-type {tokenizer_type}: expected one of {', '.join(TOKENIZER_TYPES)}")
    files = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file,
             "tiktoken_pattern": tiktoken_pattern, "tiktoken_num_special_tokens": tiktoken_num_special_tokens}  # fmt: skip
    for name, value in (files | {"vocab_size": vocab_size}).items():
        flag, needed = f"--{name.replace('_', '-')}", name in NEEDS[tokenizer_type]
        if needed and value in (None, ""):
            raise TokenizerError(f"--tokenizer-type {tokenizer_type} needs {flag}")
        if name != "vocab_size" and value is not None and not needed and name not in MAY_HAVE.get(tokenizer_type, ()):
            reads = " ".join(f"--{flag.replace('_', '-')}" for flag in NEEDS[tokenizer_type] if flag in files) or "no file"
            raise TokenizerError(f"{flag} {value}: {tokenizer_type} reads {reads}, leave it out")
    if tokenizer_type == "NullTokenizer":
        return NullTokenizer(vocab_size)
    tokenizer = _build(tokenizer_type, files, vocab_size)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise TokenizerError(
            f"--vocab-size {vocab_size} is too small: the tokenizer has {tokenizer.vocab_size} ids "
            f"(added tokens counted); leave --vocab-size out or give at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _build(tokenizer_type: str, files: dict, vocab_size: int | None) -> Tokenizer:
    match tokenizer_type:
        case "HuggingFaceTokenizer":
            return HuggingFaceTokenizer(files["tokenizer_model"])
        case "SentencePieceTokenizer":
            return SentencePieceTokenizer(files["tokenizer_model"])
        case "GPT2BPETokenizer":
            return GPT2BPETokenizer(files["vocab_file"], files["merge_file"])
        case "TikTokenizer":
            more = files["tiktoken_pattern"], files["tiktoken_num_special_tokens"]
            return TikTokenizer(files["tokenizer_model"], vocab_size, *more)
    return ByteTokenizer()
