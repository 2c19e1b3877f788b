"""Where copies lie on a node: a folder in host memory and one on the local disk, named after the folder the run saves into.

    /dev/shm/megatron_lite-<user>/<folder>/<run>/iter_0000120/         what peers sent
    <directory>/megatron_lite-<user>/<folder>/<run>/iter_0000120/      what ranks of this node wrote

<folder> is short for the path of --save, <run> the word in its `run.json`: a folder that was deleted and made again is
another run, and never meets the copies of the old one.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from pathlib import Path
from typing import NamedTuple

from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.folder import discard

MEMORY = Path("/dev/shm")  # a file system in memory: its files outlive the process that wrote them


class Place(NamedTuple):
    """The folders of one run on one host. Ranks whose `host` is equal see the same files."""

    host: str
    memory: Path
    disk: Path

    @property
    def roots(self) -> tuple[Path, Path]:
        return self.memory, self.disk

    def prepare(self) -> None:
        """Make the folders, for this user alone, and remove what earlier runs into the same folder left.

        Raises CheckpointError if somebody else owns one of them.
        """
        for root in self.roots:
            for folder in (root.parent.parent, root.parent, root):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if folder.stat().st_uid != os.getuid():
                    raise CheckpointError(f"{folder} belongs to another user; give --peer-checkpoint-dir a folder of your own")
            for other in root.parent.iterdir():
                if other != root:
                    discard(other)

    def remove(self) -> None:
        for root in self.roots:
            discard(root)
            for folder in (root.parent, root.parent.parent):
                try:
                    folder.rmdir()
                except OSError:
                    break  # another run's copies are in there


def place_of(save: str, directory: str | None, run: str) -> Place:
    """This host's place for the copies of a run that saves into `save`; `directory` is on its local disk (default: the
    system's folder for temporary files). Raises CheckpointError where memory has no file system."""
    if not MEMORY.is_dir():
        raise CheckpointError(f"--peer-checkpoint-interval: {MEMORY} is not there; memory that outlives a process is kept in it")
    name = Path(f"megatron_lite-{os.getuid()}", hashlib.sha256(os.path.realpath(save).encode()).hexdigest()[:16], run)
    # Containers may share a host's name, but not the file system in memory.
    host = f"{socket.gethostname()} {boot_id()} {MEMORY.stat().st_dev}"
    return Place(host, MEMORY / name, Path(directory or tempfile.gettempdir()).absolute() / name)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
