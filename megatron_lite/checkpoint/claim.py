"""One run at a time saves into a folder. `run.json` in it says who it is; a lock on that file lasts as long as the process.

    {"run": "5f0c...", "host": "node17", "pid": 4711}      run: drawn once in the life of the folder

The lock of a single save (`folder.locked`) keeps two saves apart; this one keeps two runs apart, whose checkpoints would
take turns in one folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from megatron_lite.checkpoint.agree import CheckpointError, agree
from megatron_lite.comm.mesh import Mesh

FILE = "run.json"
PATIENCE = 2.0  # seconds: a process that a restart replaces may be about to end


class Claim(NamedTuple):
    """`run` is the same word for every run that ever saved into the folder; `file` holds the lock, on rank 0."""

    run: str
    file: BinaryIO | None = None

    def release(self) -> None:
        if self.file is not None:
            self.file.close()


def claim(directory: str | os.PathLike, mesh: Mesh, patience: float = PATIENCE) -> Claim:
    """Take the folder for this run. Collective.

    Raises CheckpointError on every rank where it cannot be written, or where a run that lives has it.
    """
    held: list[Claim] = []

    def take() -> str:
        held.append(take_claim(Path(directory), patience))
        return held[0].run

    work = take if mesh.world.rank == 0 else (lambda: None)
    run = agree(work, mesh.world, f"preparing to save into {directory}")[0]
    return held[0] if held else Claim(run)


def take_claim(directory: Path, patience: float) -> Claim:
    """The claim of `claim`, on one rank."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # permissions do not tell whether a file system is read-only
            pass
        file = open(os.open(directory / FILE, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    except OSError as error:
        raise CheckpointError(f"--save {directory}: nothing can be written there: {error.strerror}") from error
    try:
        lock(file, directory, patience)
        run = read(file).get("run") or secrets.token_hex(8)
        text = json.dumps({"run": run, "host": socket.gethostname(), "pid": os.getpid()}).encode() + b"\n"
        os.pwrite(file.fileno(), text, 0)
        os.ftruncate(file.fileno(), len(text))  # the word stays readable at every moment in between
    except BaseException:
        file.close()
        raise
    return Claim(run, file)


def lock(file: BinaryIO, directory: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                owner = read(file)
                who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'some host')}"
                raise CheckpointError(f"--save {directory}: another run saves into it ({who}); wait for its end, or name "
                                      "a folder of its own: checkpoints of two runs would take turns") from error  # fmt: skip
            time.sleep(0.1)
        except OSError:
            return  # a file system without locks: two runs in one folder are then the user's to avoid


def read(file: BinaryIO) -> dict:
    """What the file says; nothing where it is new or was cut."""
    try:
        found = json.loads(os.pread(file.fileno(), 4096, 0).split(b"\n")[0])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
