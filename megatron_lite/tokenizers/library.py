"""What tokenizers that the `tokenizers` library runs have in common."""

from collections.abc import Sequence

from megatron_lite.tokenizers.base import Tokenizer, TokenizerError


def library_ids(backend, texts: Sequence[str], special: bool) -> list[list[int]]:
    """`Tokenizer.encode_batch` by a tokenizer of the library, without the offsets that nobody asks for."""
    backend.encode_special_tokens = not special  # the library's name for taking them as text
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library; `eod` None where there is none, which `why` explains."""

    def __init__(self, backend, vocab_size: int, eod: int | None, why: str = ""):
        self._backend, self._vocab_size, self._eod, self._why = backend, vocab_size, eod, why

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise TokenizerError(self._why)
        return self._eod

    def encode(self, text: str) -> list[int]:
        return library_ids(self._backend, [text], special=False)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return library_ids(self._backend, texts, special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)
