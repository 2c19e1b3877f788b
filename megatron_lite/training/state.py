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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import megatron_lite
from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint, agree
from megatron_lite.checkpoint.boxes import Piece, Request, flat_pieces, flat_requests
from megatron_lite.checkpoint.claim import Claim, claim
from megatron_lite.checkpoint.folder import Choice, decide, iteration_folder, older, tracked
from megatron_lite.checkpoint.load import load_checkpoint, load_folder
from megatron_lite.checkpoint.manifest import Manifest, read_manifest
from megatron_lite.checkpoint.peers import Peers
from megatron_lite.checkpoint.places import place_of
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import Axis, Mesh
from megatron_lite.config import Config
from megatron_lite.models.router import Router
from megatron_lite.optim.scaler import stored
from megatron_lite.parallel.shard import Shard
from megatron_lite.tokenizers.fingerprint import fingerprint
from megatron_lite.training.architecture import check_model
from megatron_lite.training.loads import bias_requests
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


def tensors(trainer: Trainer, optim: bool) -> Iterator[tuple[Axis, tuple[str, Shard, torch.Size, int, torch.Tensor]]]:
    """(ranks that hold the same, (prefix, shard record, shape of the local parameter, start, flat elements of it from there)) of
    all that the optimizer changes on this rank: every parameter whole, or what ZeRO gives the rank of it."""
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
                yield state.bucket.replica, (prefix, param.shard, param.shape, start, flat[slice(*mine)])


def routers(trainer: Trainer) -> list[Router]:
    return [router for _, router in trainer.loads.routers] if trainer.loads else []


def compression(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, flat tensor) of this rank's memory of gradient compression: it fits no other rank and no other layout."""
    for number, bucket in enumerate(trainer.engine.buckets):
        if bucket.low_rank and bucket.low_rank.matrices:
            for name in ("error", "q"):
                yield f"compression/{trainer.mesh.rank}/{name}.{number}", getattr(bucket.low_rank, name)


def pieces_of(trainer: Trainer, optim: bool, dtype: torch.dtype | None = None) -> Iterator[Piece]:
    """What this rank writes. `dtype`: of the pieces (default: as they are held)."""
    # Replicas hold the same bits: the n-th tensor is written by replica n modulo their number.
    for n, (replica, (prefix, shard, shape, start, flat)) in enumerate(tensors(trainer, optim)):
        if n % replica.size == replica.rank:
            yield from flat_pieces(prefix, shard, shape, start, flat if dtype is None else flat.to(dtype))
    if trainer.mesh.tp.rank == trainer.mesh.dp_cp.rank == 0:  # a bias is the same on all ranks of a stage
        for request in bias_requests(router for router in routers(trainer) if not router.weight.shard.tied):
            yield Piece(request.key, request.full_shape, request.offset, request.length, request.tensor)
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


@dataclass
class Home:
    """The folder of --save, which is this run's alone until `leave`, and the copies of its state in peers."""

    claim: Claim | None = None
    peers: Peers | None = None
    tracked: int | None = None  # the iteration that the folder's tracker names
    recovered: bool = False  # the run goes on from a copy in peers

    def leave(self) -> None:
        if self.claim is not None:
            self.claim.release()


def hold(config: Config, mesh: Mesh) -> Home:
    """Take the folder of --save for this run. Collective. Raises CheckpointError where another run has it, or it cannot be
    written."""
    flags, world = config.checkpoint, mesh.world
    if flags.save is None:
        return Home()
    claimed, peers = claim(flags.save, mesh), None
    if flags.peer_checkpoint_interval:
        places = agree(lambda: place_of(flags.save, flags.peer_checkpoint_dir, claimed.run), world, "preparing copies in peers")
        peers = Peers(mesh, places[world.rank])
    latest = agree(lambda: tracked(flags.save) if world.rank == 0 else None, world, "reading the tracker")[0]
    return Home(claimed, peers, latest)


def restore(trainer: Trainer, home: Home | None = None) -> tuple[Progress, str]:
    """Load what the configuration asks for into the trainer; where to go on from, and a line that says what was done."""
    config, mesh, flags = trainer.config, trainer.mesh, trainer.config.checkpoint
    choice = decide(flags.load, flags.save, mesh, flags.load_iteration)
    if home is not None and home.peers is not None:
        meta, says = recover(trainer, home, choice)
        if meta is not None:
            return resume(trainer, meta), says
        choice = choice._replace(says=says)
    if choice.iteration is None:
        return Progress(), choice.says
    weights_only = flags.finetune or flags.no_load_optim
    requests = requests_of(trainer, optim=not weights_only)
    if config.parallel.grad_compression != "none" and not weights_only:
        folder = iteration_folder(choice.directory, choice.iteration)
        if agree(lambda: fits(config, mesh, read_manifest(folder)) if mesh.rank == 0 else None, mesh.world, "loading")[0]:
            requests += compression_requests(trainer)
        else:
            empty = "what gradient compression had left out is not there for these parallel settings: it starts empty"
            choice = choice._replace(says=f"{choice.says} ({empty})")
    choice, meta = load(trainer, choice, requests)
    if meta.get("tokenizer") != fingerprint_of(config) and "tokenizer" in meta:
        says = f"WARNING: the tokenizer is not that of the checkpoint: {fingerprint_of(config)}, was {meta['tokenizer']}"
        choice = choice._replace(says=f"{choice.says}\n{says}")
    if flags.finetune:
        parameters_loaded(trainer)
        return Progress(), choice.says + " (weights only: starting at iteration 0)"
    return resume(trainer, meta, optim=not weights_only), choice.says


def requests_of(trainer: Trainer, optim: bool) -> list[Request]:
    found = [request for _, held in tensors(trainer, optim) for request in flat_requests(*held)]
    return found + bias_requests(routers(trainer))


def compression_requests(trainer: Trainer) -> list[Request]:
    return [Request(key, tuple(flat.shape), (0,), tuple(flat.shape), flat) for key, flat in compression(trainer)]


def parameters_loaded(trainer: Trainer) -> None:
    trainer.optimizer.write_back()
    trainer.engine.parameters_changed()


def resume(trainer: Trainer, meta: Mapping[str, Any], optim: bool = True) -> Progress:
    """Go on where a state whose tensors are loaded was: its counters, and where it stood."""
    parameters_loaded(trainer)
    if optim:
        trainer.optimizer.steps = meta["optimizer_steps"]
        trainer.loss_scale = trainer.scaler.resume(meta.get("loss_scale"))
    samples = meta["consumed_samples"], meta["wandb_id"], meta.get("skipped_samples", 0), meta.get("data_position")
    return Progress(meta["iteration"], *samples)


def recover(trainer: Trainer, home: Home, choice: Choice) -> tuple[dict | None, str]:
    """(meta of the copy in peers that was loaded, None where what --load names is as good or better; what was done).

    A copy as old as the chosen checkpoint is nearer at hand; an older one is nothing to go on from.
    """
    requests = requests_of(trainer, optim=True) + compression_requests(trainer)
    at_least, verify = choice.iteration or 0, not trainer.config.checkpoint.no_verify_checkpoint
    found, notes = home.peers.recover(requests, at_least, lambda meta: refusal(trainer, home, meta), verify)
    if found is None:
        return None, "\n".join([*notes, choice.says])
    try:
        doing = f"loading the copy of iteration {found.iteration}"
        meta = load_folder(found.folder, requests, trainer.mesh, doing, verify=False, complete=False)
    except CheckpointError as error:
        if choice.iteration is None:
            raise  # half of it is in the weights now
        return None, "\n".join([*notes, f"the copy of iteration {found.iteration} in peers is not used: {error}", choice.says])
    finally:
        home.peers.close_view()
    home.recovered = True
    older = "holds no checkpoint yet" if choice.iteration is None else f"holds iteration {choice.iteration}"
    says = f"loading iteration {found.iteration} from copies in {found.says} ({trainer.config.checkpoint.load} {older})"
    return meta, "\n".join([*notes, says])


def refusal(trainer: Trainer, home: Home, meta: Mapping[str, Any]) -> str | None:
    """Why this run does not go on from the state of a copy, or None."""
    config = trainer.config
    try:
        check_model(config, meta)
    except CheckpointError as error:
        return f"it holds another model: {', '.join(error.problems)}"
    if meta["layout"] != layout_of(trainer.mesh):
        sizes = [f"{axis} {size}" for axis, size in meta["layout"].items() if size > 1]
        return f"it was written at {' x '.join(sizes) or '1 rank'}"
    for group in ("parallel", "precision"):
        was, now = meta["config"][group], config.as_dict()[group]
        differing = [f"--{name.replace('_', '-')}" for name in now if was.get(name) != now[name]]
        if differing:
            return f"it was written with other settings of {', '.join(differing)}"
    if meta["tokenizer"] != fingerprint_of(config):
        return f"it was written with the tokenizer {meta['tokenizer']}"
    if home.tracked != meta["tracked"] and home.tracked != meta["being_saved"]:
        names = "no checkpoint" if home.tracked is None else f"iteration {home.tracked}"
        return f"{config.checkpoint.load} holds {names}, which is not what this copy's run had saved"
    return None


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
