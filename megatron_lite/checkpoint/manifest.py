"""`manifest.json`: which block of which tensor lies where. Pure: what ranks wrote in, a checked manifest out.

    {"format": "megatron_lite.checkpoint", "version": 2, "iteration": 100,
     "files":   {"shard_00000.safetensors": 73256, ...},                                        bytes
     "tensors": {"model/norm.weight": {"shape": [64], "dtype": "float32", "boxes": [
                    {"file": "shard_00000.safetensors", "key": "model/norm.weight",             key inside the file
                     "offset": [0], "length": [64], "xxh3_64": 7632233996219}]}, ...},          of the block's bytes
     "meta":    {...},                                                                          the caller's
     "crc32":   1774765110}                                                                     of all the above

Keys are `model/<canonical name>` (the fp32 master weight where there is one), `optim/exp_avg/<name>` and
`optim/exp_avg_sq/<name>`, all in parameter space: nothing in a checkpoint remembers the layout that wrote it.
Version 1 differs in the blocks' checksums alone, which were crc32.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint
from megatron_lite.checkpoint.boxes import Span, tiling_fault
from megatron_lite.checkpoint.checksums import ALGORITHMS, XXH3

NAME = "manifest.json"
FORMAT = "megatron_lite.checkpoint"
VERSION = 2
LAST = ',\n"crc32": '  # no JSON string holds a bare line end, so the text has this once, before the checksum

# torch dtype name -> its name in a safetensors header
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
          "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
          "bool": "BOOL"}  # fmt: skip


class Stored(NamedTuple):
    """A block of a full tensor, and where its bytes lie."""

    file: str
    key: str
    offset: tuple[int, ...]
    length: tuple[int, ...]
    checksum: int
    algorithm: str = XXH3

    @property
    def span(self) -> Span:
        return self.offset, self.length


@dataclass(frozen=True)
class Entry:
    """A full tensor: its shape, the name of its torch dtype, and its blocks in order of their offsets."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Stored, ...]

    def bytes_of(self, box: Stored) -> int:
        return math.prod(box.length) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    iteration: int
    files: dict[str, int]
    tensors: dict[str, Entry]
    meta: dict


class Written(NamedTuple):
    """What one rank reports of one block it wrote: the tensor's key, full shape and dtype, and the block."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    box: Stored


def assemble(iteration: int, files: dict[str, int], written: Iterable[Written], meta: dict) -> Manifest:
    """The manifest of what all ranks wrote. Raises CheckpointError naming each tensor whose blocks do not tile it."""
    groups: dict[str, list[Written]] = {}
    for block in written:
        groups.setdefault(block.key, []).append(block)
    tensors, problems = {}, []
    for key in sorted(groups):
        shape, dtype = groups[key][0].shape, groups[key][0].dtype
        boxes = tuple(sorted((block.box for block in groups[key]), key=lambda box: box.offset))
        fault = tiling_fault(shape, [box.span for box in boxes])
        kinds = {(block.dtype, block.shape) for block in groups[key]}
        if len(kinds) > 1:
            names = sorted(f"{kind}{list(size)}" for kind, size in kinds)
            fault = f"its blocks belong to different tensors: {' and '.join(names)}"
        if fault:
            problems.append(f"tensor {key}: {fault}")
        tensors[key] = Entry(shape, dtype, boxes)
    if problems:
        raise CheckpointError("the ranks' pieces do not add up", problems)
    return Manifest(iteration, dict(sorted(files.items())), tensors, meta)


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, a line per file and tensor. Raises TypeError where `meta` is not JSON."""
    tensors = {
        key: {"shape": entry.shape, "dtype": entry.dtype, "boxes": [
            {"file": box.file, "key": box.key, "offset": box.offset, "length": box.length, box.algorithm: box.checksum}
            for box in entry.boxes]}
        for key, entry in manifest.tensors.items()
    }
    body = {"format": FORMAT, "version": VERSION, "iteration": manifest.iteration, "files": manifest.files,
            "tensors": tensors, "meta": manifest.meta}  # fmt: skip
    lines = []
    for name, value in body.items():
        rows = value.items() if name in ("files", "tensors") else ()
        inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows)
        lines.append(f"{json.dumps(name)}: " + (f"{{\n{inner}}}" if inner else json.dumps(value)))
    text = "{" + ",\n".join(lines)
    return f"{text}{LAST}{zlib.crc32(text.encode())}}}\n"


def intact(raw: bytes) -> bool:
    """Whether the manifest's bytes are those that were written: the last line holds the checksum of all before it."""
    text, _, crc = raw.rpartition(LAST.encode())
    return crc == b"%d}\n" % zlib.crc32(text)


def read_manifest(path: str | os.PathLike, verify: bool = True) -> Manifest:
    """The manifest of an iteration folder (or the path of the JSON file itself).

    Raises DamagedCheckpoint, naming the path, if it is missing, not JSON, of another format, damaged (`verify` compares
    its checksum), or names a file outside its own folder; CheckpointError for a newer version.
    """
    path = Path(path)
    path = path / NAME if path.is_dir() or path.suffix != ".json" else path
    try:
        raw = path.read_bytes()
        body = json.loads(raw)
    except OSError as error:
        raise DamagedCheckpoint(f"cannot read the manifest {path}: {error.strerror}") from error
    except ValueError as error:
        raise DamagedCheckpoint(f"the manifest {path} is not JSON: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} is not a manifest of format {FORMAT}")
    if body.get("version") not in (1, VERSION):
        raise CheckpointError(f"{path} has format version {body.get('version')}; this program reads versions 1 and {VERSION}")
    if verify and not intact(raw):
        raise DamagedCheckpoint(f"the manifest {path} is damaged: its checksum does not fit")
    try:
        manifest = parse(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"the manifest {path} is malformed: {type(error).__name__} {error}") from error
    return manifest


def parse(body: dict) -> Manifest:
    """A Manifest from its JSON. Raises KeyError, TypeError, ValueError or AttributeError where the form is wrong."""
    files = {str(name): int(size) for name, size in body["files"].items()}
    for name in files:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"file {name!r} lies outside the folder")
    tensors = {}
    for key, row in body["tensors"].items():
        boxes = tuple(Stored(b["file"], b["key"], tuple(b["offset"]), tuple(b["length"]), *checksum_of(b)) for b in row["boxes"])
        if row["dtype"] not in DTYPES:
            raise ValueError(f"tensor {key} has unknown dtype {row['dtype']!r}")
        for box in boxes:
            if box.file not in files:
                raise ValueError(f"tensor {key} lies in {box.file!r}, which is not listed")
        tensors[key] = Entry(tuple(row["shape"]), row["dtype"], boxes)
    return Manifest(int(body["iteration"]), files, tensors, dict(body["meta"]))


def checksum_of(box: dict) -> tuple[int, str]:
    """(checksum, name of its algorithm). Raises KeyError where it is of none that this program knows."""
    for algorithm in ALGORITHMS:
        if algorithm in box:
            return box[algorithm], algorithm
    raise KeyError(f"checksum of {box['key']}")


def describe(manifest: Manifest) -> str:
    """A few lines for a person: iteration, files, and per namespace the tensors, elements, bytes and dtypes."""
    total = sum(manifest.files.values())
    lines = [f"iteration {manifest.iteration}: {len(manifest.files)} files, {total / 1e6:,.1f} MB"]
    spaces: dict[str, list[Entry]] = {}
    for key, entry in manifest.tensors.items():
        spaces.setdefault(namespace(key), []).append(entry)
    for space, entries in spaces.items():
        elements = sum(math.prod(entry.shape) for entry in entries)
        size = sum(entry.bytes_of(box) for entry in entries for box in entry.boxes)
        dtypes = ", ".join(f"{n} {name}" for name, n in Counter(entry.dtype for entry in entries).most_common())
        lines.append(f"  {space}: {len(entries)} tensors ({dtypes}), {elements:,} elements, {size / 1e6:,.1f} MB")
    return "\n".join(lines)


def namespace(key: str) -> str:
    """`optim/exp_avg` of `optim/exp_avg/layers.0.mlp.down_proj.weight`."""
    return key.rpartition("/")[0]
