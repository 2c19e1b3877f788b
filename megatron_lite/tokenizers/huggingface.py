"""A Hugging Face tokenizer from a local folder."""

import os
from collections.abc import Sequence

from megatron_lite.tokenizers.base import Tokenizer, TokenizerError
from megatron_lite.tokenizers.library import LibraryTokenizer, library_ids


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer in a local folder (`tokenizer.json`, or the older files transformers knows how to convert).

    Nothing is downloaded and no code from the folder is run.
    """

    def __init__(self, folder: str):
        self.folder = folder
        if not os.path.isdir(folder):
            raise TokenizerError(f"--tokenizer-model {folder}: no such folder, expected one with tokenizer.json")
        try:
            self._tokenizer = _load(folder)
        except Exception as error:  # transformers raises many kinds for a folder it cannot use
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TokenizerError(f"--tokenizer-model {folder}: transformers cannot load it ({reason})") from error
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)  # None: one that transformers runs in Python
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._no_eod = f"--tokenizer-model {folder}: has no eos_token, so no end-of-document id"
        # len() counts the added tokens, which vocab_size of transformers leaves out; ids may also have gaps
        self._vocab_size = max(len(self._tokenizer), max(self._tokenizer.get_vocab().values(), default=-1) + 1)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eod(self) -> int:
        token = self._tokenizer.eos_token_id
        if token is None:
            raise TokenizerError(self._no_eod)
        return token

    def encode(self, text: str) -> list[int]:
        # verbose=False: a document longer than the model's context is no reason for a warning
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        if self._backend is None:
            return super().encode_batch(texts, special)
        return library_ids(self._backend, texts, special)

    def __reduce__(self):
        """Another process gets the library's tokenizer, which is all that encoding needs: it need not import transformers."""
        if self._backend is None:
            return HuggingFaceTokenizer, (self.folder,)
        return LibraryTokenizer, (self._backend, self._vocab_size, self._tokenizer.eos_token_id, self._no_eod)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], clean_up_tokenization_spaces=False)


def _load(folder: str):
    """The transformers tokenizer that gives the ids its files define."""
    from tokenizers import normalizers, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if os.path.isfile(os.path.join(folder, "tokenizer.json")):
        # As the file says it. AutoTokenizer would pick a class by the configured name, and some of those (LLaMA's)
        # put rules of their own in place of the file's, which gives other ids to text that begins with a blank.
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    marks = getattr(backend, "pre_tokenizer", None)
    if isinstance(marks, pre_tokenizers.Metaspace) and not marks.split and marks.prepend_scheme != "never":
        # Converted from a sentencepiece model, whose rule is to put a mark before any text. Metaspace puts none before
        # text that begins with a blank.
        mark = marks.replacement
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
        backend.pre_tokenizer = None
    return tokenizer
