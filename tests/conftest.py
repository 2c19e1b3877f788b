"""What all tests share: the repository on the path, and a pool of rank processes for the whole session."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share few cores; threads that spin would stop the others

from megatron_lite.comm.launch import WorkerPool  # noqa: E402

# What a rank would otherwise import for two seconds in each process. autograd.grad wants symbolic_shapes, and so sympy.
LOADED = ["torch.distributed", "torch.fx.experimental.symbolic_shapes", "pretrain_gpt", "megatron_lite.training.data",
          "megatron_lite.training.logging", "megatron_lite.training.loop", "megatron_lite.training.setup",
          "megatron_lite.training.state"]  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="everything, not only the fast cover")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="only with --full"))


@pytest.fixture(scope="session")
def server():
    """The server that ranks are forked from, with everything that they import loaded: for all of the session."""
    if sys.platform.startswith("linux"):
        multiprocessing.set_forkserver_preload(LOADED)
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def pool(server):
    """Eight gloo workers, started when a test first needs them: `pool.run(fn, ranks, *args)`."""
    workers = WorkerPool(8)
    yield workers
    workers.shutdown()
