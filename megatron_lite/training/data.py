"""From the configuration to this rank's samples: splits, blends, loaders."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_lite.config import Config
from megatron_lite.data.blend import BlendedSamples, read_blend
from megatron_lite.data.fim import Fim, FimSamples
from megatron_lite.data.indexed import DataError, IndexedDataset
from megatron_lite.data.loader import BatchLoader, Samples
from megatron_lite.data.megatron_order import megatron_samples
from megatron_lite.data.phases import PhasedSamples, read_phases
from megatron_lite.data.samples import MockSamples, WindowSamples, parse_split, split_documents
from megatron_lite.data.sets import EachOnce, read_sets
from megatron_lite.data.streaming import Source, StreamedSamples, open_rows
from megatron_lite.rampup import BatchSizes
from megatron_lite.tokenizers.fingerprint import kept, same
from megatron_lite.training.setup import Trainer
from megatron_lite.training.state import fingerprint_of

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Splits:
    """Sample sources for training, validation (by the name of the set, "" where it has none) and test, with a line for people
    about each; `eod` is None where unknown."""

    train: Samples
    notes: tuple[str, ...]
    eod: int | None
    valid: dict[str, Samples] = field(default_factory=dict)
    test: Samples | None = None


def build_splits(config: Config, eod: int | None, encode: Callable[[str], list[int]] | None = None) -> Splits:
    """Open the data and check it; `encode` is the tokenizer's, for text that is streamed. Raises DataError in one line; done
    on every rank before the model is built."""
    length, seed, data, train = config.model.seq_length, config.train.seed, config.data, config.train
    evaluated = train.eval_iters * train.global_batch_size
    needed = {"train": train.batch_sizes.samples(train.train_iters), "valid": evaluated, "test": evaluated}
    if data.mock_data:
        made = {name: MockSamples(data.vocab_size, length, seed + n) for n, name in enumerate(SPLITS)}
        valid = {"": made["valid"]} if train.eval_interval is not None else {}
        return Splits(made["train"], ("data: --mock-data, made-up tokens",), eod, valid)
    made, notes = {}, []
    if data.dataset_name:
        made["train", ""] = streamed(config, eod, encode)
        notes.append(f"train data: {made['train', ''].describe(needed['train'])}")
    for split, name, words in _named(config):
        try:
            made[split, name] = _samples(config, split, words, None if _own(config) else data.split)
        except DataError as error:
            raise DataError(f"{split} data {' '.join(words)}: {error}") from error
        whole = split == "valid" and train.full_validation
        number = len(EachOnce(made[split, name])) if whole else needed[split]
        notes.append(f"{' '.join(filter(None, (split, 'data', name)))}: {made[split, name].describe(number)}")
        notes += _other_tokenizers(config, split, words)
    valid = {name: samples for (split, name), samples in made.items() if split == "valid"}
    return Splits(made["train", ""], tuple(notes), eod, valid, made.get(("test", "")))


def _samples(config: Config, split: str, words: Sequence[str], parts: str | None) -> Samples:
    """The samples of one split in the order that the flags ask for. `parts`: --split, where one set of data is cut by it."""
    length, seed, data = config.model.seq_length, config.train.seed, config.data
    if split == "train" and data.data_schedule:
        return PhasedSamples(read_phases(data.data_schedule), window_opener(length, seed, split, None))
    if data.data_order == "megatron":
        cut, requested = (parts, SPLITS.index(split)), megatron_request(config)[split]
        read = requested if split == "train" else config.train.eval_iters * config.train.global_batch_size
        return megatron_samples(words, length, seed, requested, cut, data.data_cache_path, read)
    return open_samples(words, length, seed, split, parts)


def _other_tokenizers(config: Config, split: str, words: Sequence[str]) -> Iterator[str]:
    """A warning for each data set that another tokenizer made than the run has."""
    mine, scheduled = fingerprint_of(config), split == "train" and config.data.data_schedule
    blends = [phase.prefixes for phase in read_phases(scheduled)] if scheduled else [read_blend(words)[1]]
    for prefix in dict.fromkeys(prefix for blend in blends for prefix in blend):
        if mine and (was := kept(prefix)) and not same(was, mine):
            yield f"WARNING: the tokenizer is not that of the data: {mine}, {prefix} was made with {was}"


def _own(config: Config) -> bool:
    """Whether every split is named for itself; otherwise one --data-path is cut by --split."""
    return bool(config.data.train_data_path or config.data.data_schedule or config.data.dataset_name)


def _named(config: Config) -> list[tuple[str, str, Sequence[str]]]:
    """(split, name of the set, prefixes and weights) of what is read from files. Only what has its own flag is tested."""
    data, wants_valid = config.data, config.train.eval_interval is not None
    if not _own(config):
        words = data.data_path or words_of_file(data.data_args_path)
        return [("train", "", words), *([("valid", "", words)] if wants_valid else [])]
    sets = read_sets(data.valid_data_path or ()) if wants_valid else {}
    training = (data.data_schedule,) if data.data_schedule else data.train_data_path
    found = [("train", "", training), *(("valid", name, words) for name, words in sets.items()),
             ("test", "", data.test_data_path)]  # fmt: skip
    return [entry for entry in found if entry[2]]


def streamed(config: Config, eod: int | None, encode: Callable[[str], list[int]] | None) -> StreamedSamples:
    """The samples of --dataset-name."""
    data = config.data
    source = Source(data.dataset_name, data.dataset_config, data.dataset_split, data.dataset_text_key)
    if eod is None or encode is None:
        raise DataError(f"{source}: --tokenizer-type {data.tokenizer_type} has no token that ends a document")
    return StreamedSamples(open_rows(source), source, encode, eod, config.model.seq_length)


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
    documents = split_documents(parse_split(split), dataset.num_documents)[SPLITS.index(name)]
    first, last = dataset.token_offset(dataset.document_index[list(documents)])
    try:
        return WindowSamples(dataset, length, seed, int(first), int(last))
    except DataError as error:
        raise DataError(f"{name} split of {prefix} (--split {split}): {error}") from error


def build_loader(trainer: Trainer, splits: Splits, samples: Samples, consumed: int) -> BatchLoader:
    """This rank's microbatches of every training step from sample `consumed` on."""
    return _loader(trainer, splits, samples, trainer.config.train.batch_sizes, consumed_samples=consumed,
                   position=samples.position if isinstance(samples, StreamedSamples) else None)  # fmt: skip


def build_evaluation(trainer: Trainer, splits: Splits, samples: Samples, whole: bool) -> tuple[BatchLoader, int]:
    """This rank's microbatches of an evaluation, and how many global batches it has: --eval-iters of the first samples, or
    the `whole` set, every sample once. It begins at sample 0, so that every evaluation scores the same text."""
    train = trainer.config.train
    sizes = BatchSizes(train.global_batch_size)
    if not whole:
        return _loader(trainer, splits, samples, sizes), train.eval_iters
    once = EachOnce(samples)
    return _loader(trainer, splits, once, sizes, end=len(once)), -(-len(once) // sizes.full)


def _loader(trainer: Trainer, splits: Splits, samples: Samples, sizes: BatchSizes, **options) -> BatchLoader:
    config, mesh, asynchronous = trainer.config, trainer.mesh, trainer.settled.pipeline.asynchronous
    data = config.data
    resetting = data.reset_position_ids or data.reset_attention_mask
    if data.fim_rate:
        fim = Fim(data.fim_rate, data.fim_spm_rate, data.fim_prefix_id, data.fim_middle_id, data.fim_suffix_id, splits.eod)
        samples = FimSamples(samples, fim, config.train.seed, data.vocab_size)
    return BatchLoader(
        samples,
        micro_batch_size=config.train.micro_batch_size,
        batch_sizes=sizes,
        dp_rank=mesh.dp.rank,
        dp_size=mesh.dp.size,
        vocab_size=data.vocab_size,
        eod=splits.eod,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        # the first stage reads tokens, the last labels, all where documents start; all count tokens where each stage ends its
        # steps alone
        needed=asynchronous or resetting or any(chunk.first or chunk.last for chunk in trainer.chunks),
        pin=mesh.device.type == "cuda",
        prefetch=data.num_workers,
        **options,
    )
