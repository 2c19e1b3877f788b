"""What a tokenizer is here: text to ids and back, a true vocabulary size, and an end-of-document id."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_lite.errors import ReportedError


class TokenizerError(ReportedError, ValueError):
    """A tokenizer cannot be built or cannot do what is asked; the message is one line that names the file or flag."""


class Tokenizer(ABC):
    """Text to ids and back.

    `encode` adds nothing of its own: no BOS, no EOS. Text that spells out a special token stays text, so a corpus
    cannot forge a document boundary.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, counting added tokens and `eod`: every id lies in [0, vocab_size)."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """The id that ends a document. Raises TokenizerError when the tokenizer has none."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """The ids of each text. `special`: text that spells out a special token is that token.

        Raises TokenizerError for `special` where the tokenizer does not know such tokens by their text.
        """
        if special:
            raise TokenizerError(f"{type(self).__name__} has no special tokens that text could spell")
        return [self.encode(text) for text in texts]
