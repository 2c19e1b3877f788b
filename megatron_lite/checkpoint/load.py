"""Loading: each rank reads the parts of stored blocks that meet what it asks for, whatever layout wrote them."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint, agree, raise_together
from megatron_lite.checkpoint.boxes import Request, Span, fault_of, overlap, text, uncovered
from megatron_lite.checkpoint.folder import find_latest, iteration_folder
from megatron_lite.checkpoint.manifest import Entry, Manifest, Stored, namespace, read_manifest
from megatron_lite.checkpoint.shard_file import ShardReader
from megatron_lite.comm.mesh import Mesh


class Read(NamedTuple):
    """One copy to make: the block `shared` (in the full tensor) of a stored box into a request."""

    box: Stored
    dtype: str
    shared: Span
    request: Request


def load_checkpoint(
    directory: str | os.PathLike,
    requests: Iterable[Request],
    mesh: Mesh,
    iteration: int | None = None,
    verify: bool = True,
    strict: bool = True,
    check: Callable[[dict], None] | None = None,
) -> dict:
    """Fill every request from an iteration (None: the latest); return the checkpoint's `meta`. Collective, all ranks.

    verify  hold the bytes of every wanted block against its checksum, each block once: by a rank that reads it anyway, in the
            same pass, where there is one
    strict  a tensor of a requested namespace (`model`, `optim/exp_avg`, ...) that no rank asks for is an error
    check   gets the `meta` before any tensor is looked at; its CheckpointError ends the load on every rank

    Besides the targets a rank needs a few MB. Values are converted to the targets' dtypes. Missing, mis-shaped, extra
    and damaged tensors and files are collected and raised as one CheckpointError on every rank (a DamagedCheckpoint
    where bytes are not what was written); targets are then undefined.
    """
    doing = f"loading {'the latest checkpoint' if iteration is None else f'iteration {iteration}'} from {directory}"
    work = (lambda: locate(directory, iteration)) if mesh.world.rank == 0 else (lambda: None)
    folder = agree(work, mesh.world, doing)[0]
    return load_folder(folder, requests, mesh, doing, verify=verify, strict=strict, check=check)


def load_folder(
    folder: Path,
    requests: Iterable[Request],
    mesh: Mesh,
    doing: str,
    *,
    verify: bool = True,
    strict: bool = True,
    check: Callable[[dict], None] | None = None,
    complete: bool = True,
) -> dict:
    """As `load_checkpoint`, from an iteration's folder. `doing` begins an error's text. Not `complete`: each rank's folder has
    the manifest and the files that this rank reads, not all (`verify` then has to be off: each rank verifies a share of all).
    """
    requests, world = list(requests), mesh.world
    loader = Loader(folder, requests, verify)

    check_sizes = complete and world.rank == 0
    answers = agree(lambda: loader.prepare(check_sizes=check_sizes, check=check), world, doing)
    wanted, extra = loader.merge([answer.wanted for answer in answers], [answer.spaces for answer in answers])
    problems = [answer.problems for answer in answers]
    problems[0] = problems[0] + ([f"tensor {key}: stored, but no rank asks for it" for key in extra] if strict else [])
    raise_together(problems, world, doing)

    mine = loader.share(wanted, [answer.reads for answer in answers], world.rank) if verify else []
    agree(lambda: loader.fill(mine), world, doing)
    return loader.manifest.meta


def locate(directory: str | os.PathLike, iteration: int | None) -> Path:
    """The folder of the iteration to load."""
    iteration = find_latest(directory) if iteration is None else iteration
    if iteration is None:
        raise CheckpointError(f"{directory} {'holds no checkpoint' if os.path.exists(directory) else 'does not exist'}")
    return iteration_folder(directory, iteration)


class Answer(NamedTuple):
    """What a rank tells the others before anybody reads: tensors it asks for (one bit per stored tensor), blocks it reads most
    of (one bit per stored block), the namespaces it asks for, what is wrong."""

    wanted: int
    reads: bytes
    spaces: set[str]
    problems: list[str]


class Job(NamedTuple):
    """What is to be done with one stored block: parts of it (placed relative to it) to copy, its checksum to compare."""

    box: Stored
    dtype: str
    verify: bool
    parts: list[tuple[Span, torch.Tensor]]


class Loader:
    """One rank's part of a load; holds no collective."""

    def __init__(self, folder: Path, requests: Sequence[Request], verify: bool):
        self.folder, self.requests, self.verify = folder, requests, verify
        self.manifest: Manifest | None = None
        self.blocks: list[tuple[Stored, Entry]] = []  # of the manifest, numbered alike on every rank
        self.reads: list[Read] = []

    def prepare(self, check_sizes: bool, check: Callable[[dict], None] | None = None) -> Answer:
        """Read the manifest and plan."""
        self.manifest = read_manifest(self.folder, self.verify)
        self.blocks = [(box, entry) for entry in self.manifest.tensors.values() for box in entry.boxes]
        if check:
            check(self.manifest.meta)
        if check_sizes and (wrong := size_problems(self.folder, self.manifest)):
            raise DamagedCheckpoint("files are not as they were written", wrong)
        self.reads, problems = plan(self.manifest, self.requests)
        names = {request.key for request in self.requests}
        wanted = sum(1 << i for i, key in enumerate(self.manifest.tensors) if key in names)
        return Answer(wanted, mostly_read(self.blocks, self.reads), {namespace(name) for name in names}, problems)

    def merge(self, wanted: list[int], spaces: list[set[str]]) -> tuple[list[str], list[str]]:
        """(keys that some rank asks for, keys in a requested namespace that none asks for)."""
        bits, asked = 0, set().union(*spaces)
        for mask in wanted:
            bits |= mask
        keys = list(self.manifest.tensors)
        chosen = [key for i, key in enumerate(keys) if bits >> i & 1]
        return chosen, sorted({key for key in keys if namespace(key) in asked} - set(chosen))

    def share(self, wanted: Iterable[str], reads: Sequence[bytes], rank: int) -> list[int]:
        """Numbers of the blocks that this rank verifies, of the wanted tensors. `reads`: every rank's `Answer.reads`."""
        tensors, keys = self.manifest.tensors, set(wanted)
        of_wanted = [key in keys for key, entry in tensors.items() for _ in entry.boxes]
        return [int(number) for number in np.flatnonzero(turns(reads, rank, len(self.blocks)) & np.array(of_wanted, bool))]

    def fill(self, mine: Iterable[int] = ()) -> None:
        """Read what this rank asks for and verify the blocks `mine`, file by file. Collects all problems."""
        jobs: dict[str, dict[str, Job]] = defaultdict(dict)
        for box, entry in (self.blocks[number] for number in mine):
            jobs[box.file][box.key] = Job(box, entry.dtype, True, [])
        for read in self.reads:
            job = jobs[read.box.file].setdefault(read.box.key, Job(read.box, read.dtype, False, []))
            job.parts.append(part_of(read))
        problems = []
        for name in sorted(jobs):
            try:
                with ShardReader(self.folder / name) as file:
                    for job in sorted(jobs[name].values(), key=lambda job: file.position(job.box, job.dtype)):
                        if job.verify and file.read_all(job.box, job.dtype, job.parts) != job.box.checksum:
                            problems.append(f"{file.path} is damaged: the checksum of {job.box.key} does not fit")
                        for part, target in () if job.verify else job.parts:
                            file.read_box(job.box, job.dtype, part, target)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise DamagedCheckpoint("reading failed", problems)


def plan(manifest: Manifest, requests: Sequence[Request]) -> tuple[list[Read], list[str]]:
    """(the copies that fill the requests, everything that is wrong). Pure."""
    reads, problems = [], []
    for request in requests:
        entry = manifest.tensors.get(request.key)
        fault = fault_of(request)
        if entry is None:
            fault = f"tensor {request.key}: not in the checkpoint"
        elif fault is None and tuple(request.full_shape) != entry.shape:
            fault = f"tensor {request.key}: stored with shape {list(entry.shape)}, wanted {list(request.full_shape)}"
        if fault is None:
            own = [Read(box, entry.dtype, shared, request) for box, shared in meeting(entry, request)]
            fault = cover_fault(request, own)
            reads += own
        if fault:
            problems.append(fault)
    return reads, problems


def meeting(entry: Entry, request: Request) -> list[tuple[Stored, Span]]:
    """The stored blocks that hold a part of the request, and that part."""
    wanted = (tuple(request.offset), tuple(request.length))
    start, end = (wanted[0][0], wanted[0][0] + wanted[1][0]) if entry.shape else (0, 0)
    found = []
    for box in entry.boxes:
        if entry.shape and box.offset[0] >= end:
            break  # they are in order of their offsets
        if entry.shape and box.offset[0] + box.length[0] <= start:
            continue
        shared = overlap(box.span, wanted)
        if shared is not None:
            found.append((box, shared))
    return found


def cover_fault(request: Request, reads: Sequence[Read]) -> str | None:
    """Why the stored blocks do not give each element of the request exactly once, or None."""
    if sum(math.prod(read.shared[1]) for read in reads) == math.prod(request.length):
        return None
    missing = uncovered((tuple(request.offset), tuple(request.length)), [read.shared for read in reads])
    where = f"block {text(*missing[0])} is not in the checkpoint" if missing else "the checkpoint's blocks overlap"
    return f"tensor {request.key}: {where}"


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are gone or do not have the size they were written with."""
    problems = []
    for name, size in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            problems.append(f"cannot open {folder / name}: {error.strerror}")
            continue
        if found != size:
            problems.append(f"{folder / name} has {found} bytes, {size} were written: it is truncated or was changed")
    return problems


def mostly_read(blocks: Sequence[tuple[Stored, Entry]], reads: Iterable[Read]) -> bytes:
    """One bit per block: whether these reads take half of it or more, so that all of it may as well pass by."""
    taken: Counter[tuple[str, str]] = Counter()
    for read in reads:
        taken[read.box.file, read.box.key] += math.prod(read.shared[1])
    most = [2 * taken.get((box.file, box.key), 0) >= math.prod(box.length) for box, _ in blocks]
    return np.packbits(np.array(most, bool)).tobytes()


def turns(reads: Sequence[bytes], rank: int, count: int) -> np.ndarray:
    """Which of `count` blocks it is this rank's turn to verify, [count] bool: of each block it is one rank's.

    One of those that read most of the block anyway (`reads`, a bit per block and rank), where there are any, else of all.
    """
    readers, before = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for other, bits in enumerate(reads):
        has = np.unpackbits(np.frombuffer(bits, np.uint8), count=count)
        readers += has
        before += has if other < rank else 0
    own = np.unpackbits(np.frombuffer(reads[rank], np.uint8), count=count) | (readers == 0)
    before = np.where(readers == 0, rank, before)
    readers = np.where(readers == 0, len(reads), readers)
    # Multiples of the golden ratio fall evenly over the readers, in whatever order large and small blocks take turns.
    chosen = (np.arange(count) * ((math.sqrt(5) - 1) / 2) % 1.0 * readers).astype(np.int64)
    return own.astype(bool) & (chosen == before)


def part_of(read: Read) -> tuple[Span, torch.Tensor]:
    """(the part of the stored block, placed relative to it; the part of the request's tensor that it fills)."""
    offset, length = read.shared
    within = tuple(o - b for o, b in zip(offset, read.box.offset, strict=True))
    place = tuple(slice(o - r, o - r + n) for o, r, n in zip(offset, read.request.offset, length, strict=True))
    return (within, length), read.request.tensor.detach()[place]
