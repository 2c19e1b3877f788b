"""From the configuration to this rank's samples: splits, blends, loaders."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.data.blend import BlendedSamples, read_blend
from megatron_lite.data.indexed import DataError, IndexedDataset
from megatron_lite.data.loader import BatchLoader, Samples
from megatron_lite.data.megatron_order import megatron_samples
from megatron_lite.data.phases import PhasedSamples, read_phases
from megatron_lite.data.samples import MockSamples, WindowSamples, parse_split, split_documents
from megatron_lite.tokenizers.fingerprint import kept, same
from megatron_lite.training.setup import num_microbatches
from megatron_lite.training.state import fingerprint_of

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
        split = data.split if data.data_path or data.data_args_path else None
        try:
            made[name] = _samples(config, name, words, split)
        except DataError as error:
            raise DataError(f"{name} data {' '.join(words)}: {error}") from error
        notes += [f"{name} data: {made[name].describe(needed[name])}", *_other_tokenizers(config, name, words)]
    return Splits(made["train"], made.get("valid"), tuple(notes), eod, made.get("test"))


def _samples(config: Config, name: str, words: Sequence[str], split: str | None) -> Samples:
    """The samples of one split in the order that the flags ask for."""
    length, seed, data = config.model.seq_length, config.train.seed, config.data
    if name == "train" and data.data_schedule:
        return PhasedSamples(read_phases(data.data_schedule), window_opener(length, seed, name, None))
    if data.data_order == "megatron":
        cut = split, SPLITS.index(name)
        return megatron_samples(words, length, seed, megatron_request(config)[name], cut, data.data_cache_path)
    return open_samples(words, length, seed, name, split)


def _other_tokenizers(config: Config, name: str, words: Sequence[str]) -> Iterator[str]:
    """A warning for each data set that another tokenizer made than the run has."""
    mine, scheduled = fingerprint_of(config), name == "train" and config.data.data_schedule
    blends = [phase.prefixes for phase in read_phases(scheduled)] if scheduled else [read_blend(words)[1]]
    for prefix in dict.fromkeys(prefix for blend in blends for prefix in blend):
        if mine and (was := kept(prefix)) and not same(was, mine):
            yield f"WARNING: the tokenizer is not that of the data: {mine}, {prefix} was made with {was}"


def _named(config: Config) -> dict[str, Sequence[str]]:
    """Split -> prefixes and weights. What --data-path names is cut by --split; only what has its own flag is tested."""
    data = config.data
    if data.train_data_path or data.data_schedule:
        own = {name: getattr(data, f"{name}_data_path") for name in SPLITS}
        own["train"] = own["train"] or (data.data_schedule,)
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
    opened = window_opener(length, seed, name, split)
    sources = [opened(prefix, number) for number, prefix in enumerate(prefixes)]
    return sources[0] if len(sources) == 1 else BlendedSamples(sources, weights)


def window_opener(length: int, seed: int, name: str, split: str | None) -> Callable[[str, int], WindowSamples]:
    """Opens a prefix as source number N of several, each in an order of its own."""
    return lambda prefix, number: _windows(prefix, length, seed ^ number << 32, name, split)


def megatron_request(config: Config) -> dict[str, int]:
    """The samples that Megatron would ask for at these flags; its order depends on them."""
    train, batch = config.train, config.train.global_batch_size
    evaluations = train.train_iters // train.eval_interval + 1 if train.eval_interval else 0
    return {"train": train.train_samples or train.train_iters * batch,
            "valid": evaluations * train.eval_iters * batch, "test": train.eval_iters * batch}  # fmt: skip


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
    return BatchLoader(
        samples,
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=num_microbatches(config, mesh.dp.size),
        dp_rank=mesh.dp.rank,
        dp_size=mesh.dp.size,
        consumed_samples=consumed,
        vocab_size=config.data.vocab_size,
        eod=splits.eod,
        eod_mask_loss=config.data.eod_mask_loss,
        prefetch=config.data.num_workers,
    )
