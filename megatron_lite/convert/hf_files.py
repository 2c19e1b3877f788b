"""The weights of a Hugging Face folder: read block by block, written tensor by tensor. No pickle is ever executed."""

from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megatron_lite.checkpoint.manifest import DTYPES, Stored
from megatron_lite.checkpoint.shard_file import ShardReader, Writer
from megatron_lite.convert.links import ConversionError

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TORCH_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}  # F32 -> float32


class Kind(NamedTuple):
    """What a tensor is: torch's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Source(Protocol):
    """Tensors that are somewhere else: `kinds` says which, `read` copies a block of one into `target`."""

    kinds: dict[str, Kind]

    def read(self, name: str, offset: Sequence[int], length: Sequence[int], target: torch.Tensor) -> None: ...


class SafetensorsSource:
    """safetensors files. `headers`: each file's JSON header as it stands, so that the same file can be written again."""

    def __init__(self, folder: Path, files: Sequence[str], index: Mapping[str, str] | None):
        self.readers = {name: ShardReader(folder / name) for name in files}
        self.headers = {name: header_text(folder / name) for name in files}
        self.kinds, self.file_of = {}, {}
        for file, reader in self.readers.items():
            for name, entry in entries_of(reader).items():
                if entry.get("dtype") not in TORCH_NAMES:
                    raise ConversionError(f"{reader.path}: tensor {name} has dtype {entry.get('dtype')}, which is not read here")
                if name in self.file_of:
                    raise ConversionError(f"tensor {name} is in {self.file_of[name]} and in {file}")
                self.kinds[name] = Kind(TORCH_NAMES[entry["dtype"]], tuple(entry["shape"]))
                self.file_of[name] = file
        wrong = [f"{name}: the index says {file}: it is {'in ' + self.file_of[name] if name in self.file_of else 'nowhere'}"
                 for name, file in (index or {}).items() if self.file_of.get(name) != file]  # fmt: skip
        if wrong:
            raise ConversionError(f"{folder / SAFE_INDEX} does not fit the files:", wrong)

    def read(self, name: str, offset: Sequence[int], length: Sequence[int], target: torch.Tensor) -> None:
        kind, file = self.kinds[name], self.file_of[name]
        box = Stored(file, name, (0,) * len(kind.shape), kind.shape, 0)
        self.readers[file].read_box(box, kind.dtype, (tuple(offset), tuple(length)), target)


class TorchSource:
    """Tensors of torch.save's files: mapped, not read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = tensors
        self.kinds = {name: Kind(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}

    def read(self, name: str, offset: Sequence[int], length: Sequence[int], target: torch.Tensor) -> None:
        target.copy_(self.tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))])


def safe_load(path: Path) -> Any:
    """What torch.load gives with weights_only=True. Anything but tensors and plain containers is refused, unexecuted."""
    if not path.is_file():
        raise ConversionError(f"{path} does not exist")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "its pickle is not plain data")
        raise ConversionError(f"{path} is refused, nothing in it was executed: {reason}") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read as a file of torch.save: {str(error).splitlines()[0]}") from error


def entries_of(reader: ShardReader) -> dict[str, dict]:
    """{tensor: its entry} of a safetensors header."""
    entries = reader.entries
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConversionError(f"{reader.path} is not a safetensors file: its header is no table of tensors")
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


def header_text(path: Path) -> str:
    """The JSON header of a safetensors file, as it stands (with the blanks that pad it)."""
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


def read_json(path: Path) -> Any:
    """A JSON file; ConversionError, naming it, where that is not what it is."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read as JSON: {error}") from error


def weight_map(path: Path) -> dict[str, str]:
    """{tensor: file} of an index file; files outside its folder are refused."""
    body = read_json(path)
    found = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ConversionError(f"{path} has no weight_map of tensor names to files")
    outside = sorted({file for file in found.values() if os.path.basename(file) != file or file in ("", ".", "..")})
    if outside:
        raise ConversionError(f"{path} names files outside its folder:", outside)
    gone = sorted({file for file in found.values() if not (path.parent / file).is_file()})
    if gone:
        raise ConversionError(f"{path} names files that are not there:", gone)
    return found


def open_weights(folder: Path) -> Source:
    """The weights of a Hugging Face folder: safetensors before torch files, an index before a single file."""
    if not folder.is_dir():
        raise ConversionError(f"--load {folder} is not a folder")
    if (folder / SAFE_INDEX).is_file():
        index = weight_map(folder / SAFE_INDEX)
        return SafetensorsSource(folder, sorted(set(index.values())), index)
    if (folder / SAFE).is_file():
        return SafetensorsSource(folder, [SAFE], None)
    if (folder / BIN_INDEX).is_file():
        return torch_files(folder, sorted(set(weight_map(folder / BIN_INDEX).values())))
    if (folder / BIN).is_file():
        return torch_files(folder, [BIN])
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise ConversionError(f"{folder} has none of {SAFE_INDEX}, {SAFE}, {BIN_INDEX}, {BIN}; it has {names}")


def torch_files(folder: Path, files: Sequence[str]) -> TorchSource:
    """Files that each hold a table of tensors."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        body = safe_load(folder / file)
        if not isinstance(body, dict) or not all(isinstance(value, torch.Tensor) for value in body.values()):
            raise ConversionError(f"{folder / file} holds no table of tensors")
        found |= body
    return TorchSource(found)


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file to be written: its name, its header, its tensors in the order of their bytes."""

    name: str
    header: str
    tensors: tuple[str, ...]


def same_files(headers: Mapping[str, str]) -> list[FilePlan]:
    """Plans that write files with these headers again, byte by byte."""
    plans = []
    for name, header in headers.items():
        entries = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        plans.append(FilePlan(name, header, tuple(sorted(entries, key=lambda k: entries[k]["data_offsets"]))))
    return plans


def plan_files(kinds: Mapping[str, Kind], limit: int) -> list[FilePlan]:
    """Files of at most `limit` bytes each (a single larger tensor has a file of its own), in the order of `kinds`."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, kind in kinds.items():
        size = bytes_of(kind)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    plans = []
    for number, names in enumerate(groups, 1):
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # The widest dtypes first, so that each tensor starts at a multiple of its item size.
        names = sorted(names, key=lambda name: -getattr(torch, kinds[name].dtype).itemsize)
        for name in names:
            start, end = end, end + bytes_of(kinds[name])
            entries[name] = {"dtype": DTYPES[kinds[name].dtype], "shape": list(kinds[name].shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"))
        text += " " * (-len(text.encode()) % 8)
        file = SAFE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        plans.append(FilePlan(file, text, tuple(names)))
    return plans


def bytes_of(kind: Kind) -> int:
    return math.prod(kind.shape) * getattr(torch, kind.dtype).itemsize


def index_text(plans: Sequence[FilePlan], kinds: Mapping[str, Kind]) -> str:
    """The text of model.safetensors.index.json."""
    places = {name: plan.name for plan in plans for name in plan.tensors}
    total = sum(bytes_of(kinds[name]) for name in places)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


def write_file(folder: Path, plan: FilePlan, produce: Callable[[str], torch.Tensor]) -> Iterable[str]:
    """Write one file, a tensor at a time; yields each tensor's name once it is written."""
    raw = plan.header.encode()
    with open(folder / plan.name, "xb", buffering=0) as file:
        out = Writer(file.fileno())
        out.write(memoryview(len(raw).to_bytes(8, "little") + raw))
        for name in plan.tensors:
            out.write_tensor(produce(name))
            yield name
        os.fsync(file.fileno())

