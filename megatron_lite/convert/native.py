"""Our checkpoints as a converter meets them: written and read one tensor at a time, whatever layout wrote them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import megatron_lite
from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.boxes import Piece, Request
from megatron_lite.checkpoint.folder import (
    TEMPORARY,
    clean,
    complete_iterations,
    discard,
    iteration_name,
    locked,
    publish,
)
from megatron_lite.checkpoint.load import locate, part_of, plan, size_problems
from megatron_lite.checkpoint.manifest import Manifest, assemble, read_manifest
from megatron_lite.checkpoint.shard_file import ShardReader, write_shard
from megatron_lite.config import Config
from megatron_lite.convert.hf_files import Kind, Source, bytes_of
from megatron_lite.convert.links import ConversionError, Link, by_ours

FILE_BYTES = 4 << 30  # a file of a converted checkpoint; only how many there are depends on it
SPACE = "model"
OTHER = "hf"  # tensors of a Hugging Face folder that are no parameters (old attention masks): carried for the way back


def metadata(config: Config, origin: str) -> dict[str, Any]:
    """What a checkpoint says of itself that no run has written: it stands at iteration 0."""
    return {"config": config.as_dict(), "layout": {axis: 1 for axis in ("tp", "cp", "ep", "dp", "pp")}, "iteration": 0,
            "consumed_samples": 0, "optimizer_steps": 0, "wandb_id": None, "converted_from": origin,
            "versions": {"megatron_lite": megatron_lite.__version__, "torch": torch.__version__,
                         "python": platform.python_version()}}  # fmt: skip


def from_links(source: Source, links: Sequence[Link]) -> dict[str, tuple[Kind, Callable[[], torch.Tensor]]]:
    """{key in our checkpoint: (what it is, how to make it)}, in the source's dtypes."""
    made = {}
    for name, own in by_ours(links).items():
        dtypes = sorted({source.kinds[link.theirs].dtype for link in own})
        if len(dtypes) > 1:
            raise ConversionError(f"our tensor {name} would be of several dtypes: {', '.join(dtypes)}")
        kind = Kind(dtypes[0], own[0].box.full_shape)
        made[f"{SPACE}/{name}"] = kind, lambda own=own, kind=kind: gather(source, own, kind)
    return made


def gather(source: Source, links: Iterable[Link], kind: Kind) -> torch.Tensor:
    """One of our tensors, each block read straight into its place."""
    tensor = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
    for link in links:
        target = link.box.of_full(tensor)
        source.read(link.theirs, *link.block, target.t() if link.transposed else target)
    return tensor


def write_native(directory: Path, tensors: Mapping[str, tuple[Kind, Callable[[], torch.Tensor]]], meta: dict,
                 carry: Callable[[Path], None], done: Callable[[int], None]) -> Path:  # fmt: skip
    """Write iteration 0 of a new checkpoint directory, one tensor in memory at a time; its folder.

    carry  puts further files into the folder before it gets its name
    done   is told the bytes of each tensor once it is written
    """
    with locked(directory):
        if complete_iterations(directory):
            raise ConversionError(f"--save {directory} holds checkpoints: give a new folder")
        clean(directory)
        staging = directory / (TEMPORARY + iteration_name(0))
        staging.mkdir()
        try:
            written = []
            for number, keys in enumerate(shards(tensors)):
                pieces = [Piece(key, kind.shape, (0,) * len(kind.shape), kind.shape,
                                torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device="meta"))
                          for key in keys for kind in [tensors[key][0]]]  # fmt: skip

                def produce(piece: Piece) -> torch.Tensor:
                    kind, make = tensors[piece.key]
                    done(bytes_of(kind))
                    return make()

                written += write_shard(staging / f"shard_{number:05d}.safetensors", pieces, produce)
            carry(staging)
            files = {path.name: path.stat().st_size for path in staging.glob("shard_*.safetensors")}
            return publish(directory, staging, assemble(0, files, written, meta))
        except BaseException:
            discard(staging)
            raise


def shards(tensors: Mapping[str, tuple[Kind, Any]]) -> list[list[str]]:
    """Keys, file by file."""
    files: list[list[str]] = [[]]
    filled = 0
    for key, (kind, _) in tensors.items():
        if files[-1] and filled + bytes_of(kind) > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(key)
        filled += bytes_of(kind)
    return files


class NativeReader:
    """A checkpoint of ours, open: any block of any tensor, each stored block verified before it is first used."""

    def __init__(self, directory: Path, iteration: int | None, verify: bool):
        self.folder = locate(directory, iteration)
        self.manifest: Manifest = read_manifest(self.folder, verify)
        if problems := size_problems(self.folder, self.manifest):
            raise CheckpointError(f"{self.folder} is damaged:", problems)
        self.verify, self.readers, self.verified = verify, {}, set()

    def kinds(self, space: str = SPACE) -> dict[str, Kind]:
        """{name: what it is} of a namespace."""
        return {key.removeprefix(f"{space}/"): Kind(entry.dtype, entry.shape)
                for key, entry in self.manifest.tensors.items() if key.startswith(f"{space}/")}  # fmt: skip

    def read(self, requests: list[Request]) -> None:
        """Fill the requests."""
        reads, problems = plan(self.manifest, requests)
        if problems:
            raise CheckpointError(f"{self.folder} lacks what is asked for:", problems)
        for read in reads:
            if read.box.file not in self.readers:
                self.readers[read.box.file] = ShardReader(self.folder / read.box.file)
            file = self.readers[read.box.file]
            if not self.verify or read.box in self.verified:
                file.read_box(read.box, read.dtype, *part_of(read))
                continue
            if file.read_all(read.box, read.dtype, [part_of(read)]) != read.box.checksum:
                raise CheckpointError(f"{file.path} is damaged: the checksum of {read.box.key} does not fit")
            self.verified.add(read.box)

    def scatter(self, links: Sequence[Link], kind: Kind) -> torch.Tensor:
        """One of their tensors, each block read straight into its place."""
        tensor = torch.zeros(kind.shape, dtype=getattr(torch, kind.dtype))
        self.read([Request(f"{SPACE}/{link.box.name}", link.box.full_shape, link.box.offset, link.box.length,
                           link.of_theirs(tensor)) for link in links])  # fmt: skip
        return tensor

    def whole(self, key: str, kind: Kind) -> torch.Tensor:
        """One stored tensor."""
        tensor = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
        self.read([Request(key, kind.shape, (0,) * len(kind.shape), kind.shape, tensor)])
        return tensor

