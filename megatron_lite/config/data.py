"""Flags of where tokens come from."""

from dataclasses import dataclass

from megatron_lite.config.flag import flag


@dataclass(frozen=True)
class DataConfig:
    """data"""

    data_path: tuple[str, ...] | None = flag(None, "prefix of a .bin/.idx pair; several are mixed by size, or by weights given "
        "as: weight prefix weight prefix ...", nargs="+", type=str)  # fmt: skip
    train_data_path: tuple[str, ...] | None = flag(None, "the same for training alone, instead of --data-path and --split",
        nargs="+", type=str)  # fmt: skip
    valid_data_path: tuple[str, ...] | None = flag(None, "the same for validation; name=prefix begins a set of that name, as in: "
        "web=A code=B C, each of which is scored alone", nargs="+", type=str)  # fmt: skip
    dataset_name: str | None = flag(None, "Hugging Face data set, by name or folder, that training text is streamed from",
        type=str)  # fmt: skip
    dataset_config: str | None = flag(None, "configuration of --dataset-name", type=str)
    dataset_split: str = flag("train", "part of --dataset-name that is trained on")
    dataset_text_key: str = flag("text", "column of --dataset-name that holds the text")
    test_data_path: tuple[str, ...] | None = flag(None, "the same for a test at the end of the run", nargs="+", type=str)
    data_args_path: str | None = flag(None, "file that holds what --data-path would be given", type=str)
    data_schedule: str | None = flag(None, "file whose lines are a sample number and what --data-path would be given from there, "
        "for training (curriculum)", type=str)  # fmt: skip
    data_order: str = flag("keyed", "order of samples: keyed (nothing to build, the same for runs of any length) or megatron, to "
        "continue a run of Megatron's", choices=("keyed", "megatron"))  # fmt: skip
    data_cache_path: str | None = flag(None, "folder for the index of --data-order megatron (default: PREFIX_cache)", type=str)
    split: str = flag("969,30,1", "shares of the documents for training, validation, test", type=str)
    mock_data: bool = flag(False, "made-up tokens instead of --data-path")
    tokenizer_type: str | None = flag(None, "tokenizer", type=str,
        choices=("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPT2BPETokenizer", "TikTokenizer", "ByteTokenizer",
                 "NullTokenizer"))  # fmt: skip
    tokenizer_model: str | None = flag(None, "folder or file of the tokenizer", type=str)
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer", type=str)
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer", type=str)
    tiktoken_pattern: str | None = flag(None, "how TikTokenizer cuts text into words (default: v2 for Megatron's JSON, by number "
        "of ranks for a .tiktoken file)", type=str, choices=("v1", "v2"))  # fmt: skip
    tiktoken_num_special_tokens: int | None = flag(None, "ids before those of Megatron's JSON for TikTokenizer (default: 1000)",
        type=int)  # fmt: skip
    vocab_size: int | None = flag(None, "true vocabulary (default: the tokenizer's)", type=int)
    eod_mask_loss: bool = flag(False, "no loss where the input token is the end of a document")
    reset_position_ids: bool = flag(False, "positions start again at 0 behind the end of a document")
    reset_attention_mask: bool = flag(False, "attention stays within a document")
    fim_rate: float = flag(0.0, "share of the documents that are turned for fill-in-the-middle: prefix, suffix, then the middle")
    fim_spm_rate: float = flag(0.5, "share of those that have the suffix first (SPM), not the prefix (PSM)")
    fim_prefix_id: int | None = flag(None, "id of the token that marks the prefix", type=int)
    fim_middle_id: int | None = flag(None, "id of the token that marks the middle", type=int)
    fim_suffix_id: int | None = flag(None, "id of the token that marks the suffix", type=int)
    num_workers: int = flag(2, "steps the loader reads ahead in the background; 0 reads in line")

    @property
    def needs_eod(self) -> bool:
        """Whether the id that ends a document must be known."""
        return self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask or self.fim_rate > 0
