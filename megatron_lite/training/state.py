"""What a checkpoint holds of a trainer, and how it comes back at any layout.

    model/<name>               fp32 master weights (the weights themselves in fp32 and fp64), canonical names
    optim/exp_avg/<name> ...   moments, in parameter space under the same names
    compression/<rank>/...     with --grad-compression: what each rank still has to add to later gradients, bucket by bucket
    meta                       configuration, layout, iteration, samples (which is the data's position; of a stream also where the
                               next one begins), optimizer steps, loss scale, the pipeline if it was chosen automatically,
                               tokenizer's fingerprint, versions

Dropout and data order are functions of seed and position (rng.py, data/samples.py), so there is no generator to store.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import megatron_lite
from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint, agree
from megatron_lite.checkpoint.boxes import Piece, Request, flat_pieces, flat_requests
from megatron_lite.checkpoint.folder import Choice, decide, iteration_folder, older
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.manifest import Manifest, read_manifest
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.optim.scaler import stored
from megatron_lite.parallel.shard import Shard
from megatron_lite.tokenizers.fingerprint import fingerprint
from megatron_lite.training.architecture import check_model
from megatron_lite.training.setup import Trainer

WEIGHTS = "weights"  # folder, and kind in `meta`, of the checkpoints that nothing can resume from


@dataclass(frozen=True)
class Progress:
    """Where a run stands: finished iterations, consumed training samples, W&B run to continue, and the samples of skipped
    steps, which moved the data on and the learning rate not."""

    iteration: int = 0
    consumed_samples: int = 0
    wandb_id: str | None = None
    skipped_samples: int = 0
    data_position: dict | None = None  # of a stream, where the next sample begins (data/streaming.py)

    @property
    def scheduled_samples(self) -> int:
        """Samples that the learning rate has seen."""
        return self.consumed_samples - self.skipped_samples


def tensors(trainer: Trainer, optim: bool) -> Iterator[tuple[str, Shard, torch.Size, int, torch.Tensor]]:
    """(prefix, shard record, shape of the local parameter, start, flat elements of it from there) of all that training
    changes on this rank: every parameter whole, or what ZeRO gives the rank of it."""
    for state in trainer.optimizer.states:
        parts = {"model": state.master}
        if optim:
            parts |= {f"optim/{name}": moment for name, moment in state.moments.items()}
        for slot, param in state.bucket.slots():
            mine = state.bucket.owned_part(slot.start, slot.start + slot.numel)
            if mine is None:
                continue
            for prefix, flat in parts.items():
                start = mine[0] + state.bucket.owned[0] - slot.start
                yield prefix, param.shard, param.shape, start, flat[slice(*mine)]


def compression(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, flat tensor) of this rank's memory of gradient compression: it fits no other rank and no other layout."""
    for number, bucket in enumerate(trainer.engine.buckets):
        if bucket.low_rank and bucket.low_rank.matrices:
            for name in ("error", "q"):
                yield f"compression/{trainer.mesh.rank}/{name}.{number}", getattr(bucket.low_rank, name)


def pieces_of(trainer: Trainer, optim: bool, dtype: torch.dtype | None = None) -> Iterator[Piece]:
    """What this rank writes. `dtype`: of the pieces (default: as they are held)."""
    # Replicas hold the same bits: the n-th tensor is written by replica n modulo their number.
    replica = trainer.engine.replica
    for n, (prefix, shard, shape, start, flat) in enumerate(tensors(trainer, optim)):
        if n % replica.size == replica.rank:
            yield from flat_pieces(prefix, shard, shape, start, flat if dtype is None else flat.to(dtype))
    for key, flat in compression(trainer) if optim else ():
        yield Piece(key, tuple(flat.shape), (0,), tuple(flat.shape), flat)


def meta_of(trainer: Trainer, progress: Progress) -> dict:
    """What the manifest says besides tensors; JSON."""
    config, mesh = trainer.config, trainer.mesh
    return {
        "config": config.as_dict(),
        "layout": layout_of(mesh),
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "skipped_samples": progress.skipped_samples,
        "data_position": progress.data_position,
        "optimizer_steps": trainer.optimizer.steps,
        "loss_scale": stored(trainer.loss_scale) if trainer.scaler.dynamic else None,
        "wandb_id": progress.wandb_id,
        "pipeline": trainer.settled.record,
        "tokenizer": fingerprint_of(config),
        "versions": {"megatron_lite": megatron_lite.__version__, "torch": torch.__version__,
                     "python": platform.python_version()},
    }  # fmt: skip


def fingerprint_of(config: Config) -> str | None:
    data = config.data
    files = data.vocab_file, data.merge_file, data.tiktoken_pattern, data.tiktoken_num_special_tokens
    return fingerprint(data.tokenizer_type, data.tokenizer_model, data.vocab_size, *files)


def save(trainer: Trainer, progress: Progress) -> Path:
    """Write a checkpoint and make it the latest. Collective. The folder."""
    flags = trainer.config.checkpoint
    pieces = pieces_of(trainer, not flags.no_save_optim)
    return save_checkpoint(flags.save, progress.iteration, pieces, meta_of(trainer, progress), trainer.mesh, flags.save_retain)


def restore(trainer: Trainer) -> tuple[Progress, str]:
    """Load what the configuration asks for into the trainer; where to go on from, and a line that says what was done."""
    config, mesh, flags = trainer.config, trainer.mesh, trainer.config.checkpoint
    choice = decide(flags.load, flags.save, mesh, flags.load_iteration)
    if choice.iteration is None:
        return Progress(), choice.says
    weights_only = flags.finetune or flags.no_load_optim
    requests: list[Request] = []
    for held in tensors(trainer, optim=not weights_only):
        requests += flat_requests(*held)
    if config.parallel.grad_compression != "none" and not weights_only:
        folder, mesh = iteration_folder(choice.directory, choice.iteration), trainer.mesh
        if agree(lambda: fits(config, mesh, read_manifest(folder)) if mesh.rank == 0 else None, mesh.world, "loading")[0]:
            requests += [Request(key, tuple(flat.shape), (0,), tuple(flat.shape), flat) for key, flat in compression(trainer)]
        else:
            empty = "what gradient compression had left out is not there for these parallel settings: it starts empty"
            choice = choice._replace(says=f"{choice.says} ({empty})")
    choice, meta = load(trainer, choice, requests)
    if meta.get("tokenizer") != fingerprint_of(config) and "tokenizer" in meta:
        says = f"WARNING: the tokenizer is not that of the checkpoint: {fingerprint_of(config)}, was {meta['tokenizer']}"
        choice = choice._replace(says=f"{choice.says}\n{says}")
    trainer.optimizer.write_back()
    trainer.engine.parameters_changed()
    if flags.finetune:
        return Progress(), choice.says + " (weights only: starting at iteration 0)"
    if not weights_only:
        trainer.optimizer.steps = meta["optimizer_steps"]
        trainer.loss_scale = trainer.scaler.resume(meta.get("loss_scale"))
    samples = meta["consumed_samples"], meta["wandb_id"], meta.get("skipped_samples", 0), meta.get("data_position")
    return Progress(meta["iteration"], *samples), choice.says


def layout_of(mesh: Mesh) -> dict[str, int]:
    return {axis: getattr(mesh.grid, axis) for axis in ("tp", "cp", "ep", "dp", "pp")}


def fits(config: Config, mesh: Mesh, stored: Manifest) -> bool:
    """Whether the checkpoint holds the memory of gradient compression of the same ranks and buckets."""
    parallel = stored.meta.get("config", {}).get("parallel")
    same = parallel == config.as_dict()["parallel"] and stored.meta.get("layout") == layout_of(mesh)
    return same and any(key.startswith("compression/0/") for key in stored.tensors)


def load(trainer: Trainer, choice: Choice, requests: list[Request]) -> tuple[Choice, dict]:
    """Fill the requests from the chosen checkpoint, or from an older one if it is damaged and was not asked for by number;
    what was chosen, and its meta. Collective."""
    config, flags = trainer.config, trainer.config.checkpoint

    def check(meta: dict) -> None:
        if meta.get("kind") == WEIGHTS and not flags.finetune:
            raise CheckpointError(f"{choice.directory} holds weights only (--save-weights-only-interval): resume from the folder "
                                  "that was given as --save, or start from these weights with --finetune")  # fmt: skip
        check_model(config, meta)

    while True:
        verify = not flags.no_verify_checkpoint
        try:
            return choice, load_checkpoint(choice.directory, requests, trainer.mesh, choice.iteration, verify, check=check)
        except DamagedCheckpoint as error:
            if flags.load_iteration is not None:
                raise
            choice = older(choice, error, trainer.mesh)
