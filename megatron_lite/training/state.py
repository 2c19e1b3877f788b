"""What a checkpoint holds of a trainer, and how it comes back at any layout.

    model/<name>               fp32 master weights (the weights themselves in fp32 and fp64), canonical names
    optim/exp_avg/<name> ...   moments, in parameter space under the same names
    compression/<rank>/...     with --grad-compression: what each rank still has to add to later gradients, bucket by bucket
    meta                       configuration, layout, iteration, samples, optimizer steps, loss scale, the pipeline if it was
                               chosen automatically, versions

Dropout and data order are functions of seed and position (rng.py, data/samples.py), so there is no generator to store.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import megatron_lite
from megatron_lite.checkpoint.agree import CheckpointError, agree
from megatron_lite.checkpoint.boxes import Piece, Request, flat_pieces, flat_requests
from megatron_lite.checkpoint.folder import decide, iteration_folder
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.manifest import Manifest, read_manifest
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.optim.scaler import stored
from megatron_lite.parallel.shard import Shard
from megatron_lite.training.setup import Trainer

# Settings under which the same tensors compute something else; no shape shows them.
FUNCTION = ("num_attention_heads", "kv_channels", "normalization", "norm_epsilon", "swiglu", "openai_gelu",
            "position_embedding_type")  # fmt: skip
ROPE = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling",
        "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position")  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """Where a run stands: finished iterations, consumed training samples, W&B run to continue, and the samples of skipped
    steps, which moved the data on and the learning rate not."""

    iteration: int = 0
    consumed_samples: int = 0
    wandb_id: str | None = None
    skipped_samples: int = 0

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


def save(trainer: Trainer, progress: Progress) -> Path:
    """Write a checkpoint and make it the latest. Collective. The folder."""
    config, mesh = trainer.config, trainer.mesh
    pieces: list[Piece] = []
    # Replicas hold the same bits: the n-th tensor is written by replica n modulo their number.
    replica = trainer.engine.replica
    for n, held in enumerate(tensors(trainer, not config.checkpoint.no_save_optim)):
        if n % replica.size == replica.rank:
            pieces += flat_pieces(*held)
    if not config.checkpoint.no_save_optim:
        pieces += [Piece(key, tuple(flat.shape), (0,), tuple(flat.shape), flat) for key, flat in compression(trainer)]
    meta = {
        "config": config.as_dict(),
        "layout": layout_of(mesh),
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "skipped_samples": progress.skipped_samples,
        "optimizer_steps": trainer.optimizer.steps,
        "loss_scale": stored(trainer.loss_scale) if trainer.scaler.dynamic else None,
        "wandb_id": progress.wandb_id,
        "pipeline": trainer.settled.record,
        "versions": {"megatron_lite": megatron_lite.__version__, "torch": torch.__version__,
                     "python": platform.python_version()},
    }  # fmt: skip
    return save_checkpoint(config.checkpoint.save, progress.iteration, pieces, meta, mesh)


def restore(trainer: Trainer) -> tuple[Progress, str]:
    """Load what the configuration asks for into the trainer; where to go on from, and a line that says what was done."""
    config, mesh = trainer.config, trainer.mesh
    choice = decide(config.checkpoint.load, config.checkpoint.save, mesh)
    if choice.iteration is None:
        return Progress(), choice.says
    weights_only = config.checkpoint.finetune or config.checkpoint.no_load_optim
    requests: list[Request] = []
    for held in tensors(trainer, optim=not weights_only):
        requests += flat_requests(*held)
    says = choice.says
    if config.parallel.grad_compression != "none" and not weights_only:
        folder = iteration_folder(choice.directory, choice.iteration)
        if agree(lambda: fits(config, mesh, read_manifest(folder)) if mesh.rank == 0 else None, mesh.world, "loading")[0]:
            requests += [Request(key, tuple(flat.shape), (0,), tuple(flat.shape), flat) for key, flat in compression(trainer)]
        else:
            says += " (what gradient compression had left out is not there for these parallel settings: it starts empty)"
    meta = load_checkpoint(choice.directory, requests, mesh, choice.iteration)
    check_model(config, meta)
    trainer.optimizer.write_back()
    trainer.engine.parameters_changed()
    if config.checkpoint.finetune:
        return Progress(), says + " (weights only: starting at iteration 0)"
    if not weights_only:
        trainer.optimizer.steps = meta["optimizer_steps"]
        trainer.loss_scale = trainer.scaler.resume(meta.get("loss_scale"))
    samples = meta["consumed_samples"], meta["wandb_id"], meta.get("skipped_samples", 0)
    return Progress(meta["iteration"], *samples), says


def layout_of(mesh: Mesh) -> dict[str, int]:
    return {axis: getattr(mesh.grid, axis) for axis in ("tp", "cp", "ep", "dp", "pp")}


def fits(config: Config, mesh: Mesh, stored: Manifest) -> bool:
    """Whether the checkpoint holds the memory of gradient compression of the same ranks and buckets."""
    parallel = stored.meta.get("config", {}).get("parallel")
    same = parallel == config.as_dict()["parallel"] and stored.meta.get("layout") == layout_of(mesh)
    return same and any(key.startswith("compression/0/") for key in stored.tensors)


def check_model(config: Config, meta: dict) -> None:
    """Refuse weights of another function: the same on every rank. Fine-tuning may change RoPE, to reach further."""
    stored = meta.get("config", {}).get("model", {})
    wrong = [f"--{name.replace('_', '-')}: trained with {stored[name]}, now {getattr(config.model, name)}"
             for name in FUNCTION + (() if config.checkpoint.finetune else ROPE)
             if name in stored and stored[name] != getattr(config.model, name)]  # fmt: skip
    if wrong:
        raise CheckpointError("the checkpoint holds another model, whose tensors have the same shapes", wrong)
