#!/usr/bin/env python3
"""What is in a checkpoint, whether it is whole, and how two differ.

    python tools/inspect_checkpoint.py runs/my_llama                          the newest: what it holds, tensor by tensor
    python tools/inspect_checkpoint.py runs/my_llama --check                  every checksum of every file
    python tools/inspect_checkpoint.py runs/a/iter_0000100 runs/b             largest difference of each tensor

A path is a folder of checkpoints or one iteration of it. Exits with 1 for damage or a difference, 2 for wrong flags.
"""

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from megatron_lite.checkpoint.agree import CheckpointError, problems_of
from megatron_lite.checkpoint.boxes import Request
from megatron_lite.checkpoint.load import Loader, locate, size_problems
from megatron_lite.checkpoint.manifest import Entry, Manifest, describe, read_manifest
from megatron_lite.checkpoint.shard_file import ShardReader
from megatron_lite.errors import ReportedError


def folder_of(path: str, iteration: int | None) -> Path:
    """The iteration's folder that a path means. Raises CheckpointError where there is none."""
    if re.fullmatch(r"(\.old-)?iter_\d+", Path(path).resolve().name):
        if iteration is not None:
            raise CheckpointError(f"--iteration {iteration}: {path} is one iteration already")
        return Path(path)
    return locate(path, iteration)


def damage(folder: Path, manifest: Manifest) -> list[str]:
    """Everything that is not as it was written: sizes, headers, the checksum of every block, files that are in no manifest."""
    problems = size_problems(folder, manifest)
    blocks = defaultdict(list)
    for entry in manifest.tensors.values():
        for box in entry.boxes:
            blocks[box.file].append((box, entry))
    for name in sorted(blocks):
        try:
            with ShardReader(folder / name) as file:
                for box, entry in blocks[name]:
                    if file.checksum(box, entry) != box.checksum:
                        problems.append(f"{file.path} is damaged: the checksum of {box.key} does not fit")
                extra = set(file.entries) - {box.key for box, _ in blocks[name]} - {"__metadata__"}
                problems += [f"{file.path} holds {key}, which is not in the manifest" for key in sorted(extra)]
        except CheckpointError as error:
            if str(error) not in problems:
                problems.append(str(error))
    extra = {path.name for path in folder.glob("*.safetensors")} - set(manifest.files)
    return problems + [f"{folder / name} is not in the manifest" for name in sorted(extra)]


def read(folder: Path, manifest: Manifest, key: str, entry: Entry) -> torch.Tensor:
    """A full tensor in its own dtype."""
    full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    loader = Loader(folder, [Request(key, entry.shape, (0,) * len(entry.shape), entry.shape, full)], verify=False)
    found = loader.prepare(check_sizes=False).problems
    if found:
        raise CheckpointError(f"{folder} cannot be read", found)
    loader.fill()
    return full


def differences(a: Path, b: Path) -> list[dict[str, Any]]:
    """One row per tensor: {"tensor", "largest"} of |a - b|, or {"tensor", "why"} where they cannot be compared."""
    first, second, rows = read_manifest(a), read_manifest(b), []
    for key in sorted({*first.tensors, *second.tensors}):
        ours, theirs = first.tensors.get(key), second.tensors.get(key)
        if ours is None or theirs is None:
            rows.append({"tensor": key, "why": f"only in {a if theirs is None else b}"})
        elif ours.shape != theirs.shape:
            rows.append({"tensor": key, "why": f"shapes {list(ours.shape)} and {list(theirs.shape)}"})
        else:
            x, y = (read(*place, key, entry).double() for place, entry in (((a, first), ours), ((b, second), theirs)))
            same = (x == y) | (x.isnan() & y.isnan())
            gap = torch.where(same, 0.0, (x - y).abs()).nan_to_num(math.inf)
            rows.append({"tensor": key, "largest": float(gap.max()) if gap.numel() else 0.0})
    return rows


def listing(manifest: Manifest) -> list[dict[str, Any]]:
    return [{"tensor": key, "shape": list(entry.shape), "dtype": entry.dtype, "blocks": len(entry.boxes),
             "files": sorted({box.file for box in entry.boxes})} for key, entry in manifest.tensors.items()]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="inspect_checkpoint", allow_abbrev=False,
                                     description="What is in a checkpoint, whether it is whole, how two differ.")  # fmt: skip
    result.add_argument("folders", nargs="+", metavar="DIR", help="a checkpoint; two are compared")
    result.add_argument("--iteration", type=int, metavar="N", help="of a folder with several (default: the newest)")
    result.add_argument("--check", action="store_true", help="read everything and compare all checksums")
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def compare(a: Path, b: Path, as_json: bool) -> int:
    rows = differences(a, b)
    wrong = [row for row in rows if row.get("why") or row.get("largest")]
    if as_json:
        print(json.dumps({"a": str(a), "b": str(b), "tensors": rows, "different": len(wrong)}, indent=1))
    else:
        for row in rows:
            print(f"{row.get('why') or format(row['largest'], '.3e')}  {row['tensor']}")
        print(f"{len(wrong)} of {len(rows)} tensors differ")
    return 1 if wrong else 0


def show(folder: Path, check: bool, as_json: bool) -> int:
    manifest = read_manifest(folder)
    problems = damage(folder, manifest) if check else []
    if as_json:
        print(json.dumps({"folder": str(folder), "iteration": manifest.iteration, "meta": manifest.meta,
                          "files": manifest.files, "tensors": listing(manifest)}
                         | ({"problems": problems} if check else {}), indent=1))  # fmt: skip
        return 1 if problems else 0
    print(describe(manifest))
    for name, value in manifest.meta.items():
        if name != "config":
            print(f"  {name}: {json.dumps(value)}")
    for row in listing(manifest):
        print(f"  {row['dtype']:>9} {row['shape']!s:>16} {row['blocks']:>4} blocks  {row['tensor']}")
    if check:
        print("\n".join(problems) or f"whole: {len(manifest.files)} files, every checksum fits")
    return 1 if problems else 0


def main(argv: list[str] | None = None) -> int:
    """Console entry point."""
    arguments = parser().parse_args(argv)
    if len(arguments.folders) > 2:
        parser().exit(2, "inspect_checkpoint: error: one folder is shown, two are compared\n")
    if len(arguments.folders) == 2 and arguments.check:
        parser().exit(2, "inspect_checkpoint: error: --check is for one folder\n")
    try:
        folders = [folder_of(path, arguments.iteration) for path in arguments.folders]
        if len(folders) == 2:
            return compare(*folders, arguments.json)
        return show(folders[0], arguments.check, arguments.json)
    except ReportedError as error:
        text = {"problems": problems_of(error)}
        if arguments.json:
            print(json.dumps(text))
        parser().exit(1, f"inspect_checkpoint: error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
