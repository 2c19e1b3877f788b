"""Tokenizers without a file: numbers that are ids already, and bytes."""

from collections.abc import Sequence

from megatron_lite.tokenizers.base import Tokenizer, TokenizerError


class NullTokenizer(Tokenizer):
    """Text is ids separated by blanks: 0 to `ordinary_ids` - 1. After them comes the end of document."""

    def __init__(self, ordinary_ids: int):
        if ordinary_ids < 1:
            raise TokenizerError(f"--vocab-size {ordinary_ids}: NullTokenizer needs at least 1")
        self._ordinary_ids = ordinary_ids

    @property
    def vocab_size(self) -> int:
        return self._ordinary_ids + 1

    @property
    def eod(self) -> int:
        return self._ordinary_ids

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            plain = word.isascii() and word.isdigit() and len(word) < 20  # int() of a longer one may refuse to work
            if not plain or int(word) >= self._ordinary_ids:
                raise TokenizerError(f"NullTokenizer: {word[:40]!r} is not an id from 0 to {self._ordinary_ids - 1}")
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of the text, 0 to 255, and the end of document, 256."""

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def eod(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            reason = f"{error.reason} at character {error.start}"
            raise TokenizerError(f"text cannot be written as UTF-8: {reason}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The end of document has no text, nor has an id of a padded vocabulary; half a character shows as U+FFFD."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")
