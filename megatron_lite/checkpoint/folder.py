"""The checkpoint folder: names, what killed runs left, publishing an iteration, and which one to start from.

    <dir>/iter_0000100/                         a complete checkpoint: it gets this name only after all ranks succeeded
    <dir>/latest_checkpointed_iteration.txt     "100": written last
    <dir>/.tmp-iter_0000200/                    being written, or left by a killed run: removed by the next save
    <dir>/.old-iter_0000100/                    the one that is being replaced: read, and put back, if no successor came
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint, agree, problems_of
from megatron_lite.checkpoint.manifest import NAME, Manifest, read_manifest, to_text
from megatron_lite.comm.mesh import Mesh

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY = ".tmp-"
REPLACED = ".old-"


class Choice(NamedTuple):
    """Which checkpoint to load: both None for a fresh start. `says` is the line to print."""

    directory: str | None
    iteration: int | None
    says: str


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def iteration_folder(directory: str | os.PathLike, iteration: int) -> Path:
    """Where iteration `iteration` lies. Raises CheckpointError if it is not there, DamagedCheckpoint without a manifest."""
    folder = Path(directory) / iteration_name(iteration)
    # A run killed between the two renames of a replacement leaves the replaced folder, whole, under its other name.
    for path in (folder, folder.with_name(REPLACED + folder.name)):
        if (path / NAME).is_file():
            return path
    if folder.is_dir():
        raise DamagedCheckpoint(f"checkpoint folder {folder} has no manifest")
    raise CheckpointError(f"checkpoint folder {folder} does not exist")


def complete_iterations(directory: str | os.PathLike) -> list[int]:
    """Iterations under this directory that have a manifest, in numeric order."""
    found = (re.fullmatch(r"iter_(\d+)", path.parent.name) for path in Path(directory).glob(f"iter_*/{NAME}"))
    return sorted(int(match[1]) for match in found if match)


def find_latest(directory: str | os.PathLike) -> int | None:
    """The iteration to load: the tracker's. None only where the directory does not exist or holds no checkpoint.

    Without a tracker (a run killed just before it wrote its first one) the newest complete iteration.
    Raises CheckpointError, naming the path, if the tracker's text is no number, or what it names is not there.
    """
    directory = Path(directory)
    if not directory.exists():
        return None
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint path {directory} is not a directory")
    tracker = directory / TRACKER
    try:
        text = tracker.read_bytes()[:64].decode("ascii", "replace").strip()
    except FileNotFoundError:
        return newest_without_tracker(directory)
    except OSError as error:
        raise CheckpointError(f"cannot read {tracker}: {error.strerror}") from error
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise CheckpointError(f"{tracker} must hold an iteration number, not {text!r}")
    try:
        iteration_folder(directory, int(text))
    except CheckpointError as error:
        raise type(error)(f"{error}, but {tracker} names it") from error
    return int(text)


def tracked(directory: str | os.PathLike) -> int | None:
    """The iteration that the tracker names, whether or not it is there; None where no tracker can be read."""
    try:
        return int((Path(directory) / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def newest_without_tracker(directory: Path) -> int | None:
    complete = complete_iterations(directory)
    if complete:
        return complete[-1]
    broken = sorted(path for path in directory.glob("iter_*") if path.is_dir())
    if broken:
        raise CheckpointError(f"{directory} has no {TRACKER}, and checkpoint folder {broken[-1]} has no manifest")
    return None


def decide(load_dir: str | None, save_dir: str | None, mesh: Mesh, iteration: int | None = None) -> Choice:
    """Which checkpoint to start from, decided on one rank and told to all. Collective.

    `load_dir` None: fresh. `iteration`: that one, not the latest. What is not there is a CheckpointError on every rank,
    unless the two directories are the same and empty of checkpoints: the first start of a run that later resumes.
    """
    work = (lambda: choose(load_dir, save_dir, iteration)) if mesh.world.rank == 0 else (lambda: None)
    return agree(work, mesh.world, "choosing the checkpoint to load")[0]


def choose(load_dir: str | None, save_dir: str | None, iteration: int | None) -> Choice:
    """The decision of `decide`, on one rank."""
    if load_dir is None:
        return Choice(None, None, "no checkpoint to load: starting from initial weights")
    if iteration is None:
        try:
            iteration = find_latest(load_dir)
        except DamagedCheckpoint as error:
            return next_older(load_dir, int((Path(load_dir) / TRACKER).read_text()), error)
    else:
        iteration_folder(load_dir, iteration)
    if iteration is not None:
        return Choice(load_dir, iteration, f"loading iteration {iteration} from {load_dir}")
    if save_dir is not None and os.path.realpath(save_dir) == os.path.realpath(load_dir):
        return Choice(None, None, f"{load_dir} holds no checkpoint yet: STARTING FRESH from initial weights")
    what = "holds no checkpoint" if os.path.exists(load_dir) else "does not exist"
    raise CheckpointError(f"--load {load_dir} {what} (starting fresh there needs --save with the same path)")


def older(choice: Choice, error: DamagedCheckpoint, mesh: Mesh) -> Choice:
    """The complete checkpoint before one that turned out to be damaged, decided on one rank and told to all. Collective.

    Raises a CheckpointError that names the damage where there is none: never a fresh start.
    """
    first = mesh.world.rank == 0
    work = (lambda: next_older(choice.directory, choice.iteration, error)) if first else (lambda: None)
    answer = agree(work, mesh.world, "choosing an older checkpoint")[0]
    return answer._replace(says=f"{choice.says}\n{answer.says}")


def next_older(load_dir: str, damaged: int, error: DamagedCheckpoint) -> Choice:
    """The decision of `older`, on one rank."""
    before = [iteration for iteration in complete_iterations(load_dir) if iteration < damaged]
    if not before:
        end = f"{load_dir} holds no older checkpoint to go on from"
        raise CheckpointError("no checkpoint is whole", [*problems_of(error), end]) from error
    return Choice(load_dir, before[-1], f"iteration {damaged} is DAMAGED and is skipped: {error}\n"
                  f"loading iteration {before[-1]} from {load_dir}")  # fmt: skip


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Nobody else saves into this directory meanwhile. Dies with the process; CheckpointError where it is taken."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise CheckpointError(f"another run is saving into {directory} at this moment") from error
    except OSError:
        pass  # a file system without locks: two runs in one folder are then the user's to avoid
    try:
        yield
    finally:
        os.close(fd)


def clean(directory: Path) -> None:
    """Remove what killed runs left; put a replaced folder back if its successor never came."""
    for path in directory.glob(f"{REPLACED}iter_*"):
        successor = directory / path.name.removeprefix(REPLACED)
        if (successor / NAME).is_file():
            shutil.rmtree(path, ignore_errors=True)
        elif not successor.exists():
            os.rename(path, successor)
    for path in directory.glob(f"{TEMPORARY}*"):
        discard(path)


def discard(path: Path) -> None:
    """Remove a file or folder, whether or not it (still) exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish(directory: Path, staging: Path, manifest: Manifest) -> Path:
    """Make a folder of complete files the latest checkpoint: manifest, rename, tracker, each durable first."""
    for name, size in manifest.files.items():
        # Fails where the ranks' folders are not one shared folder.
        if not (staging / name).is_file() or (staging / name).stat().st_size != size:
            raise CheckpointError(f"{name} is not complete in {staging}: do all ranks see the same folder?")
    write_durably(staging / NAME, to_text(manifest))
    sync_folder(staging)
    final = directory / iteration_name(manifest.iteration)
    replaced = final.with_name(REPLACED + final.name)
    discard(replaced)
    if final.exists():
        os.rename(final, replaced)
    try:
        os.rename(staging, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    sync_folder(directory)
    write_durably(directory / (TEMPORARY + TRACKER), f"{manifest.iteration}\n")
    os.replace(directory / (TEMPORARY + TRACKER), directory / TRACKER)
    sync_folder(directory)
    discard(replaced)
    return final


def retire(directory: Path, keep: int, newest: int) -> None:
    """Remove checkpoints older than `newest`, which is safe, but for the last `keep - 1` that are complete.

    Later iterations belong to a run that this one branched off from: they are nobody's to remove here. A folder loses
    its name first: a kill halfway leaves no half checkpoint. What cannot be removed is a warning: the new one is safe.
    """
    before = [iteration for iteration in complete_iterations(directory) if iteration < newest]
    whole = [iteration for iteration in before if has_all_files(iteration_folder(directory, iteration))]
    for iteration in sorted(set(before) - set(whole[max(0, len(whole) - keep + 1) :])):
        path = directory / iteration_name(iteration)
        try:
            os.rename(path, path.with_name(TEMPORARY + path.name))
            shutil.rmtree(path.with_name(TEMPORARY + path.name))
        except OSError as error:
            warnings.warn(f"--save-retain {keep}: cannot remove {path}: {error.strerror}", stacklevel=2)


def has_all_files(folder: Path) -> bool:
    """Whether the files of a checkpoint are there with the sizes they were written with."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (CheckpointError, OSError):
        return False


def write_durably(path: Path, text: str) -> None:
    """A new file with this text, on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make a folder's names durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a folder say so like this
            raise
    finally:
        os.close(fd)
