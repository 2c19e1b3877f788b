"""From the configuration to this rank's samples: splits, blends, loaders."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.data.blend import BlendedSamples, read_blend
from megatron_lite.data.fim import Fim, FimSamples
from megatron_lite.data.indexed import DataError, IndexedDataset
from megatron_lite.data.loader import BatchLoader, Samples
from megatron_lite.data.samples import MockSamples, WindowSamples, parse_split, split_documents
from megatron_lite.training.setup import num_microbatches

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Splits:
    """Sample sources for training, validation and test, with a line for people about each; `eod` is None where unknown."""

    train: Samples
    valid: Samples | None
    notes: tuple[str, ...]
    eod: int | None
    test: Samples | None = None


def build_splits(config: Config, eod: int | None) -> Splits:
    """Open the data and check it. Raises DataError in one line; done on every rank before the model is built."""
    length, seed, data, batch = config.model.seq_length, config.train.seed, config.data, config.train.global_batch_size
    wants_valid, evaluated = config.train.eval_interval is not None, config.train.eval_iters * batch
    needed = {"train": config.train.train_iters * batch, "valid": evaluated, "test": evaluated}
    if data.mock_data:
        made = {name: MockSamples(data.vocab_size, length, seed + n) for n, name in enumerate(SPLITS)}
        return Splits(made["train"], made["valid"] if wants_valid else None, ("data: --mock-data, made-up tokens",), eod)
    made, notes = {}, []
    for name, words in _named(config).items():
        if name == "valid" and not wants_valid:
            continue
        split = None if data.train_data_path else data.split
        try:
            made[name] = open_samples(words, length, seed, name, split)
        except DataError as error:
            raise DataError(f"{name} data {' '.join(words)}: {error}") from error
        notes.append(f"{name} data: {made[name].describe(needed[name])}")
    return Splits(made["train"], made.get("valid"), tuple(notes), eod, made.get("test"))


def _named(config: Config) -> dict[str, Sequence[str]]:
    """Split -> prefixes and weights. What --data-path names is cut by --split; only what has its own flag is tested."""
    data = config.data
    if data.train_data_path:
        own = {name: getattr(data, f"{name}_data_path") for name in SPLITS}
        return {name: words for name, words in own.items() if words}
    words = data.data_path or words_of_file(data.data_args_path)
    return {"train": words, "valid": words}


def words_of_file(path: str) -> tuple[str, ...]:
    """What --data-args-path stands for: words as in a shell, over any number of lines, # begins a comment."""
    try:
        with open(path, encoding="utf-8") as file:
            words = tuple(shlex.split(file.read(), comments=True))
    except (OSError, ValueError) as error:
        raise DataError(f"--data-args-path {path}: cannot be read ({error})") from None
    if not words:
        raise DataError(f"--data-args-path {path}: names no data")
    return words


def open_samples(words: Sequence[str], length: int, seed: int, name: str, split: str | None) -> WindowSamples | BlendedSamples:
    """The samples that a --data-path stands for. `split`: the part `name` of the documents; None: all of them."""
    weights, prefixes = read_blend(words)
    sources = [_windows(prefix, length, seed ^ number << 32, name, split) for number, prefix in enumerate(prefixes)]
    return sources[0] if len(sources) == 1 else BlendedSamples(sources, weights)


def _windows(prefix: str, length: int, seed: int, name: str, split: str | None) -> WindowSamples:
    dataset = IndexedDataset(prefix)
    if split is None:
        return WindowSamples(dataset, length, seed)
    bounds = dataset.document_token_bounds()
    first, end = split_documents(parse_split(split), dataset.num_documents)[SPLITS.index(name)]
    try:
        return WindowSamples(dataset, length, seed, int(bounds[first]), int(bounds[end]))
    except DataError as error:
        raise DataError(f"{name} split of {prefix} (--split {split}): {error}") from error


def build_loader(config: Config, mesh: Mesh, splits: Splits, samples: Samples, consumed: int) -> BatchLoader:
    """This rank's microbatches of every global batch from sample `consumed` on."""
    data = config.data
    if data.fim_rate:
        fim = Fim(data.fim_rate, data.fim_spm_rate, data.fim_prefix_id, data.fim_middle_id, data.fim_suffix_id, splits.eod)
        samples = FimSamples(samples, fim, config.train.seed, data.vocab_size)
    return BatchLoader(
        samples,
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=num_microbatches(config, mesh.dp.size),
        dp_rank=mesh.dp.rank,
        dp_size=mesh.dp.size,
        consumed_samples=consumed,
        vocab_size=data.vocab_size,
        eod=splits.eod,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        prefetch=data.num_workers,
    )
