"""A tokenizer as a short text: equal for equal files, wherever they lie. It is kept in checkpoints, and beside data sets in
prefix.tokenizer."""

import hashlib
import os
from pathlib import Path

# What decides ids. Chat templates and model weights may lie beside them and change nothing.
DECIDE = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "*.model", "*.tiktoken")


def fingerprint(
    tokenizer_type: str | None, tokenizer_model: str | None, vocab_size: int | None, vocab_file: str | None = None,
    merge_file: str | None = None, tiktoken_pattern: str | None = None, tiktoken_num_special_tokens: int | None = None,
) -> str | None:  # fmt: skip
    """`HuggingFaceTokenizer 32000 5f2c...` (sha256 of its files, 16 digits); None without a tokenizer.

    A file that cannot be read counts as absent: the run has read what it needs of it already.
    """
    if tokenizer_type is None:
        return None
    digest = hashlib.sha256()
    for name in (tokenizer_model, vocab_file, merge_file):
        if name is not None:
            path = Path(name)
            files = sorted({file for pattern in DECIDE for file in path.glob(pattern)}) if path.is_dir() else [path]
            for file in files:
                if file.is_file():
                    digest.update(file.name.encode() + b"\0" if path.is_dir() else b"")
                    digest.update(file.read_bytes())
    reading = [str(value) for value in (tiktoken_pattern, tiktoken_num_special_tokens) if value is not None]
    digest.update(" ".join(reading).encode())
    return f"{tokenizer_type} {vocab_size} {digest.hexdigest()[:16]}"


def keep(prefix: str, text: str) -> None:
    """Write down beside a data set which tokenizer made it."""
    temporary = f"{prefix}.tokenizer.tmp"
    Path(temporary).write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, f"{prefix}.tokenizer")


def kept(prefix: str) -> str | None:
    """Which tokenizer made a data set; None where nobody wrote it down."""
    try:
        return Path(f"{prefix}.tokenizer").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def same(one: str, other: str) -> bool:
    """Whether kind and files are the same; the vocabulary in between may be widened by a run."""
    return one.split()[::2] == other.split()[::2]
