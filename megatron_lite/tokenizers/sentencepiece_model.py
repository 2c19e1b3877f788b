"""A sentencepiece `.model` file."""

import os
from collections.abc import Sequence

from megatron_lite.tokenizers.base import Tokenizer, TokenizerError


class SentencePieceTokenizer(Tokenizer):
    """The tokenizer in a sentencepiece model file; `eod` is the model's own end-of-sequence piece."""

    def __init__(self, path: str):
        from sentencepiece import SentencePieceProcessor

        self.path = path
        if not os.path.isfile(path):
            raise TokenizerError(f"--tokenizer-model {path}: no such file, expected a sentencepiece .model file")
        try:
            self._model = SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            raise TokenizerError(f"--tokenizer-model {path}: not a sentencepiece model ({error})") from None

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size()

    @property
    def eod(self) -> int:
        token = self._model.eos_id()
        if token < 0:
            raise TokenizerError(f"--tokenizer-model {self.path}: has no end-of-sequence piece (eos_id is -1)")
        return token

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_bos=False, add_eos=False)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        if special:
            return super().encode_batch(texts, special)
        return self._model.encode(list(texts), add_bos=False, add_eos=False, num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])
