"""Tokenizers: one small interface, one file per family, one function that builds them from the flags."""

from megatron_lite.tokenizers.base import Tokenizer, TokenizerError
from megatron_lite.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_lite.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_lite.tokenizers.simple import ByteTokenizer, NullTokenizer

__all__ = [
    "TOKENIZER_TYPES",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "TokenizerError",
    "build_tokenizer",
]

FROM_FILES = {"HuggingFaceTokenizer": HuggingFaceTokenizer, "SentencePieceTokenizer": SentencePieceTokenizer}
TOKENIZER_TYPES = (*FROM_FILES, "NullTokenizer", "ByteTokenizer")


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer that `--tokenizer-type`, `--tokenizer-model` and `--vocab-size` describe.

    `vocab_size` is the number of ordinary ids for NullTokenizer; for the others it may only confirm or widen the
    tokenizer's own. Raises TokenizerError naming the flags for any combination that cannot work.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise TokenizerError(f"--tokenizer-type {tokenizer_type}: expected one of {', '.join(TOKENIZER_TYPES)}")
    if tokenizer_type in FROM_FILES:
        if not tokenizer_model:
            raise TokenizerError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
        tokenizer = FROM_FILES[tokenizer_type](tokenizer_model)
    else:
        if tokenizer_model:
            raise TokenizerError(f"--tokenizer-model {tokenizer_model}: {tokenizer_type} reads no file, leave it out")
        if tokenizer_type == "NullTokenizer":
            if vocab_size is None:
                raise TokenizerError("--tokenizer-type NullTokenizer needs --vocab-size")
            return NullTokenizer(vocab_size)
        tokenizer = ByteTokenizer()
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise TokenizerError(
            f"--vocab-size {vocab_size} is too small: the tokenizer has {tokenizer.vocab_size} ids "
            f"(added tokens counted); leave --vocab-size out or give at least {tokenizer.vocab_size}"
        )
    return tokenizer
