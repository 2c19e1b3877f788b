"""Byte-pair encodings from a bare vocabulary: GPT-2's two files, and tiktoken's ranks; both run by the `tokenizers` library."""

import base64
import binascii
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.tokenizers.base import Tokenizer, TokenizerError
from megatron_lite.tokenizers.library import LibraryTokenizer

GPT2_EOD = "<|endoftext|>"

# How text is cut into words, within which bytes are merged: regular expressions as tiktoken and Megatron have them.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K_WORDS = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+%s|" + r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*%s"
CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_WORDS = CASED % (SUFFIX + "?", SUFFIX + "?") + r"|\p{N}{1,3}" + CASED_REST
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": CASED % ("", "") + r"|\p{N}" + CASED_REST,
}


class Published(NamedTuple):
    """What a published `.tiktoken` file does not say itself."""

    words: str
    eod: int
    vocab_size: int


# By their number of ranks: GPT-2, cl100k (GPT-4), LLaMA 3, o200k (GPT-4o).
PUBLISHED = {
    50256: Published(GPT2_WORDS, 50256, 50257),
    100256: Published(CL100K_WORDS, 100257, 100277),
    128000: Published(CL100K_WORDS, 128001, 128256),
    199998: Published(O200K_WORDS, 199999, 200019),
}
MEGATRON_SPECIALS = 1000  # ids before the ranks of Megatron's JSON file; <unk>, <s> and </s> are the first of them
MEGATRON_EOD = 2
MEGATRON_VOCAB = 1 << 17  # ids of such a tokenizer, unless --vocab-size says otherwise


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's `vocab.json` and `merges.txt`; `<|endoftext|>`, where the vocabulary has it, ends a document."""

    def __init__(self, vocab_file: str, merge_file: str):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not os.path.isfile(path):
                raise TokenizerError(f"{flag} {path}: no such file")
        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises plain Exception
            both = f"--vocab-file {vocab_file} --merge-file {merge_file}"
            raise TokenizerError(f"{both}: not a GPT-2 vocabulary and its merges ({_first_line(error)})") from None
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        vocabulary = backend.get_vocab()
        if GPT2_EOD in vocabulary:
            backend.add_special_tokens([AddedToken(GPT2_EOD, special=True, normalized=False)])
        size = max(vocabulary.values(), default=-1) + 1
        super().__init__(backend, size, vocabulary.get(GPT2_EOD), f"--vocab-file {vocab_file}: has no {GPT2_EOD}")


class TikTokenizer(LibraryTokenizer):
    """Ranks in a text file (a base64 token and its rank per line), or in Megatron's JSON (a list of token_bytes by rank).

    Text: ids are ranks; a published file is known by their number, and of another one the end of document is the id
    after the last. JSON: `num_special_tokens` ids come first, of which </s> ends a document, and ranks beyond `vocab_size`
    ids are left out. `pattern`: a name in TIKTOKEN_PATTERNS; default v2 for JSON, by the number of ranks for text.
    """

    def __init__(self, path: str, vocab_size: int | None, pattern: str | None, num_special_tokens: int | None):
        if not os.path.isfile(path):
            raise TokenizerError(f"--tokenizer-model {path}: no such file, expected .tiktoken ranks or Megatron's JSON of them")
        if path.endswith(".json"):
            first = MEGATRON_SPECIALS if num_special_tokens is None else num_special_tokens
            whole = MEGATRON_VOCAB if vocab_size is None else vocab_size
            if not MEGATRON_EOD < first < whole:
                text = f"expected {MEGATRON_EOD + 1} (<unk>, <s> and </s>) to {whole - 1}, below the vocabulary of {whole}"
                raise TokenizerError(f"--tiktoken-num-special-tokens {first}: {text}")
            ranks = _json_ranks(path)[: whole - first]
            known = Published(TIKTOKEN_PATTERNS["v2"], MEGATRON_EOD, first + len(ranks))
        else:
            if num_special_tokens is not None:
                text = "no effect on a text file of ranks, leave it out"
                raise TokenizerError(f"--tiktoken-num-special-tokens {num_special_tokens}: {text}")
            first, ranks = 0, _text_ranks(path)
            known = PUBLISHED.get(len(ranks), Published(CL100K_WORDS, len(ranks), len(ranks) + 1))
        words = known.words if pattern is None else TIKTOKEN_PATTERNS[pattern]
        super().__init__(_merging(ranks, first, words), known.vocab_size, known.eod)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return Tokenizer.encode_batch(self, texts, True) if special else super().encode_batch(texts)


def _text_ranks(path: str) -> list[bytes]:
    """Tokens by rank. Raises TokenizerError naming the line."""
    found: dict[int, bytes] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    token, rank = line.split()
                    found[int(rank)] = base64.b64decode(token, validate=True)
                except (ValueError, binascii.Error):
                    text = f"expected a base64 token and its rank, found {line[:40]!r}"
                    raise TokenizerError(f"--tokenizer-model {path}:{number}: {text}") from None
    return _complete(path, [found.get(rank) for rank in range(len(found))])


def _json_ranks(path: str) -> list[bytes]:
    """Tokens by rank out of Megatron's list of {"rank", "token_bytes", "token_str"}."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
        found = {row["rank"]: base64.b64decode(row["token_bytes"], validate=True) for row in rows}
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        text = f"expected a JSON list of rank and token_bytes ({_first_line(error)})"
        raise TokenizerError(f"--tokenizer-model {path}: {text}") from None
    return _complete(path, [found.get(rank) for rank in range(len(found))])


def _complete(path: str, ranks: list[bytes | None]) -> list[bytes]:
    """The tokens, once each of the ranks 0, 1, ... and each of the 256 bytes is among them."""
    if None in ranks:
        raise TokenizerError(f"--tokenizer-model {path}: rank {ranks.index(None)} is missing")
    single = {token for token in ranks if len(token) == 1}
    if len(single) < 256 or len(set(ranks)) < len(ranks):
        what = "a token twice" if len(single) == 256 else f"{len(single)} of the 256 single bytes"
        raise TokenizerError(f"--tokenizer-model {path}: has {what}, expected each once")
    return ranks


def _merging(ranks: list[bytes], first: int, words: str):
    """A byte-level BPE whose token `ranks[i]` has the id `first` + i.

    tiktoken merges the neighbours whose union has the lowest rank, whichever they are: every cut of a token into two tokens
    is a merge, in the order of the unions. A word that is a token is that token, whatever merging would give.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    spelled = _spellings()
    known = set(ranks)
    merges = [(spelled(token[:cut]), spelled(token[cut:])) for token in ranks for cut in range(1, len(token))
              if token[:cut] in known and token[cut:] in known]  # fmt: skip
    vocabulary = {spelled(token): first + rank for rank, token in enumerate(ranks)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(words), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    return backend


def _spellings():
    """bytes -> the characters that stand for them in a byte-level vocabulary: visible ones for themselves, others from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return lambda token: "".join(map(table.__getitem__, token))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
