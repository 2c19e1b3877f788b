"""From the configuration to this rank's samples: tokenizer, splits, loaders."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.data.indexed import DataError, IndexedDataset
from megatron_lite.data.loader import BatchLoader, Samples
from megatron_lite.data.samples import MockSamples, WindowSamples, parse_split, split_documents
from megatron_lite.training.setup import num_microbatches


@dataclass(frozen=True)
class Splits:
    """Sample sources for training and validation, with a line for people about each; `eod` is None where unknown."""

    train: Samples
    valid: Samples | None
    notes: tuple[str, ...]
    eod: int | None


def build_splits(config: Config, eod: int | None) -> Splits:
    """Open the data and check it. Raises DataError in one line; done on every rank before the model is built."""
    length, seed, wants_valid = config.model.seq_length, config.train.seed, config.train.eval_interval is not None
    needed = {"train": config.train.train_iters * config.train.global_batch_size,
              "valid": config.train.eval_iters * config.train.global_batch_size}  # fmt: skip
    if config.data.mock_data:
        made = {name: MockSamples(config.data.vocab_size, length, seed + n) for n, name in enumerate(needed)}
        return Splits(made["train"], made["valid"] if wants_valid else None, ("data: --mock-data, made-up tokens",), eod)
    dataset = IndexedDataset(config.data.data_path[0])
    bounds = dataset.document_token_bounds()
    ranges = split_documents(parse_split(config.data.split), dataset.num_documents)
    made, notes = {}, []
    for name, (first, end) in zip(needed, ranges, strict=False):
        if name == "valid" and not wants_valid:
            continue
        try:
            made[name] = WindowSamples(dataset, length, seed, int(bounds[first]), int(bounds[end]))
        except DataError as error:
            raise DataError(f"{name} split of {config.data.data_path[0]} (--split {config.data.split}): {error}") from error
        notes.append(f"{name} data: {made[name].describe(needed[name])}")
    return Splits(made["train"], made.get("valid"), tuple(notes), eod)


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
