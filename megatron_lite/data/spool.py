"""A file of numbers that only grows, held by one process at a time: what is too long to be kept in memory until it is done."""

import fcntl
import os
from typing import BinaryIO

import numpy as np

from megatron_lite.errors import DataError


class Spool:
    """Numbers of one dtype are appended; a slice is read back from the file. What was in the file before is kept until `cut`.

    A second process that opens the file is refused (DataError).
    """

    def __init__(self, path: str, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self._file = _open_alone(path)
        self._entries = 0

    def cut(self, entries: int) -> None:
        """Keep the first `entries`. Raises DataError where there are fewer."""
        size, needed = os.path.getsize(self.path), entries * self.dtype.itemsize
        if size < needed:
            raise DataError(f"{self.path}: {size} bytes, but {needed} were written before")
        self._file.truncate(needed)
        self._entries = entries

    def append(self, numbers: np.ndarray) -> None:
        """Add numbers [n], cast to the dtype."""
        self._file.write(np.ascontiguousarray(numbers, self.dtype).data)
        self._entries += len(numbers)

    def sync(self) -> None:
        """Make what was appended durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __len__(self) -> int:
        return self._entries

    def __getitem__(self, part: slice) -> np.ndarray:
        """The numbers of a slice without a step, as far as they were synced."""
        low, high, _ = part.indices(self._entries)
        return np.fromfile(self.path, self.dtype, high - low, offset=low * self.dtype.itemsize)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        """Close the file, which gives up the lock."""
        try:
            self._file.close()
        except OSError:  # what was still buffered did not fit on the disk; whoever closes without a sync gives it up
            pass


def _open_alone(path: str) -> BinaryIO:
    """Open a file for writing at its end, unless another process has it open here. Raises DataError."""
    file = open(path, "ab", buffering=1 << 20)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except BlockingIOError:
        taken = True
    except OSError:  # some network file systems have no locks
        taken = False
    if taken:
        file.close()
        raise DataError(f"{path}: another process is writing this file; wait for it or choose another prefix")
    return file
