"""Loading: each rank reads the parts of stored blocks that meet what it asks for, whatever layout wrote them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

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

    verify  hold the bytes of every wanted block against its checksum, each block once, dealt out over the ranks
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

    agree(lambda: loader.fill(wanted, world.rank, world.size), world, doing)
    return loader.manifest.meta


def locate(directory: str | os.PathLike, iteration: int | None) -> Path:
    """The folder of the iteration to load."""
    iteration = find_latest(directory) if iteration is None else iteration
    if iteration is None:
        raise CheckpointError(f"{directory} {'holds no checkpoint' if os.path.exists(directory) else 'does not exist'}")
    return iteration_folder(directory, iteration)


class Answer(NamedTuple):
    """What a rank tells the others before anybody reads: the tensors it asks for, their namespaces, what is wrong.

    `wanted` has one bit per stored tensor, so that the wishes of a thousand ranks are a few hundred bytes each.
    """

    wanted: int
    spaces: set[str]
    problems: list[str]


class Loader:
    """One rank's part of a load; holds no collective."""

    def __init__(self, folder: Path, requests: Sequence[Request], verify: bool):
        self.folder, self.requests, self.verify = folder, requests, verify
        self.manifest: Manifest | None = None
        self.reads: list[Read] = []

    def prepare(self, check_sizes: bool, check: Callable[[dict], None] | None = None) -> Answer:
        """Read the manifest and plan."""
        self.manifest = read_manifest(self.folder, self.verify)
        if check:
            check(self.manifest.meta)
        if check_sizes and (wrong := size_problems(self.folder, self.manifest)):
            raise DamagedCheckpoint("files are not as they were written", wrong)
        self.reads, problems = plan(self.manifest, self.requests)
        names = {request.key for request in self.requests}
        wanted = sum(1 << i for i, key in enumerate(self.manifest.tensors) if key in names)
        return Answer(wanted, {namespace(name) for name in names}, problems)

    def merge(self, wanted: list[int], spaces: list[set[str]]) -> tuple[list[str], list[str]]:
        """(keys that some rank asks for, keys in a requested namespace that none asks for)."""
        bits, asked = 0, set().union(*spaces)
        for mask in wanted:
            bits |= mask
        keys = list(self.manifest.tensors)
        chosen = [key for i, key in enumerate(keys) if bits >> i & 1]
        return chosen, sorted({key for key in keys if namespace(key) in asked} - set(chosen))

    def fill(self, wanted: Sequence[str], rank: int, ranks: int) -> None:
        """Check this rank's share of the wanted blocks, read what it asks for, file by file. Collects all problems."""
        checks, reads = defaultdict(list), defaultdict(list)
        for box, entry in share(self.manifest, wanted, rank, ranks) if self.verify else ():
            checks[box.file].append((box, entry))
        for read in self.reads:
            reads[read.box.file].append(read)
        problems = []
        for name in sorted({*checks, *reads}):
            try:
                with ShardReader(self.folder / name) as file:
                    for box, entry in checks[name]:
                        if file.checksum(box, entry) != box.crc32:
                            problems.append(f"{file.path} is damaged: the checksum of {box.key} does not fit")
                    for read in reads[name]:
                        copy(file, read)
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
    found = []
    for box in entry.boxes:
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


def share(manifest: Manifest, wanted: Sequence[str], rank: int, ranks: int) -> list[tuple[Stored, Entry]]:
    """The blocks whose checksums this rank verifies: the wanted blocks in file order, cut into runs of equal bytes.

    At the layout that saved, a rank's run is about its own file: it verifies what it is going to read anyway.
    """
    blocks = sorted(
        ((box, entry) for key in wanted for entry in [manifest.tensors[key]] for box in entry.boxes),
        key=lambda block: (block[0].file, block[0].key),
    )
    sizes = [entry.bytes_of(box) for box, entry in blocks]
    total, start, mine = max(1, sum(sizes)), 0, []
    for block, size in zip(blocks, sizes, strict=True):
        if min(start * ranks // total, ranks - 1) == rank:
            mine.append(block)
        start += size
    return mine


def copy(file: ShardReader, read: Read) -> None:
    """Fill the part of the request that one stored block holds."""
    offset, length = read.shared
    within = tuple(o - b for o, b in zip(offset, read.box.offset, strict=True))
    target = read.request.tensor.detach()
    place = tuple(slice(o - r, o - r + n) for o, r, n in zip(offset, read.request.offset, length, strict=True))
    file.read_box(read.box, read.dtype, (within, length), target[place])
