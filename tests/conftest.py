"""What all tests share: the repository on the path, and a pool of rank processes for the whole session."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share few cores; threads that spin would stop the others

from megatron_lite.comm.launch import WorkerPool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """Eight gloo workers, started when a test first needs them: `pool.run(fn, ranks, *args)`."""
    workers = WorkerPool(8)
    yield workers
    workers.shutdown()
