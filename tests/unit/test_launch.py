"""Starting ranks, and what the caller sees when one of them fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lite.comm import launch
from megatron_lite.comm.launch import RankError, WorkerPool

ROOT = Path(__file__).resolve().parents[2]


def ranked_sum(rank, x):
    total = x + rank
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total


def test_results_come_in_rank_order(pool):
    for ranks in (4, 2, 4, 1):
        answers = pool.run(ranked_sum, ranks, torch.ones(2))
        total = float(sum(range(1, ranks + 1)))
        assert [(r, n, t.tolist()) for r, n, t in answers] == [(r, ranks, [total] * 2) for r in range(ranks)]


def one_fails(rank):
    if rank == 2:
        raise KeyError("the reason")
    dist.barrier()


def test_the_first_failure_is_what_the_caller_sees(pool):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(one_fails, 4, timeout=60)
    assert caught.value.rank == 2 and "KeyError: 'the reason'" in str(caught.value) and "one_fails" in str(caught.value)
    assert time.monotonic() - began < 20
    assert len(pool.run(ranked_sum, 4, torch.ones(1))) == 4


def hangs(rank):
    if rank == 1:
        time.sleep(600)


def test_a_hang_is_ended_and_located():
    pool = WorkerPool(2)
    try:
        with pytest.raises(RankError, match="ranks \\[1\\] did not answer within 3 s") as caught:
            pool.run(hangs, 2, timeout=3)
        assert "in hangs" in str(caught.value)
        assert len(pool.run(ranked_sum, 2, torch.ones(1), timeout=60)) == 2
    finally:
        pool.shutdown()


def is_killed(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named(pool):
    with pytest.raises(RankError, match="exit code -9") as caught:
        pool.run(is_killed, 2, timeout=60)
    assert caught.value.rank == 0
    assert len(pool.run(ranked_sum, 2, torch.ones(1))) == 2


def test_run_starts_its_own_ranks():
    assert [r for r, _, _ in launch.run(ranked_sum, 2, torch.ones(1))] == [0, 1]


def test_threads(monkeypatch):
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    try:
        assert launch.set_threads(1) == cores == torch.get_num_threads()
        assert launch.set_threads(10_000) == 1
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert launch.set_threads(1) == 3
        assert launch.set_threads(1, threads=2) == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert launch.set_threads(1) == 1
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's own 1 is not a wish
        assert launch.set_threads(2) == max(1, cores // 2)
    finally:
        torch.set_num_threads(before)


def test_without_torchrun_there_is_one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    rank, world, device = launch.init_from_env("gloo")
    assert (rank, world, device) == (0, 1, torch.device("cpu")) and not dist.is_initialized()
    launch.shutdown()


HEAP = """
import resource, torch
from megatron_lite.comm.launch import keep_heap
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before, done = faults(), keep_heap()
after = min(faults() for _ in range(8))
print(done, before, after)
"""


@pytest.mark.skipif(not launch.has_glibc(), reason="glibc's malloc only")
def test_large_tensors_are_reused_once_the_heap_is_kept():
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True, cwd=ROOT)
    out = done.stdout.split()
    assert out[0] == "True"
    assert int(out[1]) > 1000 and int(out[2]) < 100  # four times 40 MiB in pages of 4 KiB


TORCHRUN = """
import torch.distributed as dist
from megatron_lite.comm.launch import init_from_env, shutdown
rank, world, device = init_from_env(timeout_minutes=1)
print(f"{rank} {world} {device} {dist.get_backend()}\\n", end="")  # one write, so that ranks do not mix
shutdown()
"""


def test_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert out.returncode == 0, out.stderr
    assert sorted(out.stdout.split("\n")[:2]) == ["0 2 cpu gloo", "1 2 cpu gloo"]
