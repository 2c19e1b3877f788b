"""What all tests share: the repository on the path, and a pool of rank processes for the whole session."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share few cores; threads that spin would stop the others

from megatron_lite.comm.launch import WorkerPool  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="everything, not only the fast cover")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="only with --full"))


@pytest.fixture(scope="session")
def pool():
    """Eight gloo workers, started when a test first needs them: `pool.run(fn, ranks, *args)`."""
    workers = WorkerPool(8)
    yield workers
    workers.shutdown()
