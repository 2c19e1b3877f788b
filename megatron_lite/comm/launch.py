"""Starting ranks: from torchrun's environment, or as children of this process; and what a process sets for the CPU.

`run` and `WorkerPool` start gloo ranks on this host, forked from a server that has torch loaded; they meet in a file.
The caller sees the traceback of the first rank that failed (`RankError`); no rank outlives its time limit.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

GRACE_SECONDS = 0.3  # after a failure: how long the other ranks may take to report before they are replaced


def init_from_env(backend: str | None = None, timeout_minutes: float = 10.0) -> tuple[int, int, torch.device]:
    """(rank, world size, device) from torchrun's environment; joins the default process group.

    Without torchrun: world 1 and no process group. Backend: nccl where CUDA is, gloo without, unless named.
    """
    cuda = torch.cuda.is_available() and backend != "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise RuntimeError(
                f"LOCAL_RANK {local_rank}, but this machine shows {torch.cuda.device_count()} CUDA devices: "
                "start at most one process per device"
            )
        torch.cuda.set_device(device)
    elif backend == "nccl":
        raise RuntimeError("backend nccl needs CUDA, which this machine does not show; use gloo")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, 1, device
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group(
            backend or ("nccl" if cuda else "gloo"),
            timeout=datetime.timedelta(minutes=timeout_minutes),
            device_id=device if cuda else None,
        )
    return rank, world, device


def shutdown() -> None:
    """Leave all process groups; harmless where none exists."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def set_threads(local_ranks: int, threads: int | None = None) -> int:
    """Threads for CPU kernels: `threads`, else OMP_NUM_THREADS, else this process's share of the cores.

    torchrun sets OMP_NUM_THREADS=1 where it is unset, which cannot be told from a user's own 1: under torchrun with
    several ranks a value of 1 counts as unset. Say `threads=1` to mean it.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said == "1" and "TORCHELASTIC_RUN_ID" in os.environ and local_ranks > 1:
        said = ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = threads or (int(said) if said.isdigit() and int(said) else max(1, cores // local_ranks))
    torch.set_num_threads(count)
    return count


def has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def keep_heap() -> bool:
    """Tell glibc to keep freed memory: torch has no caching allocator on CPU, so every large tensor would otherwise be
    returned to the kernel and faulted in again, page by page. True if it was done; nothing happens without glibc.

    Allocations up to 1 GiB come from the heap; older versions of glibc refuse a threshold above 32 MiB, there all do.
    The heap is put on huge pages where the kernel gives them on request (5 to 10 % of a training step).
    """
    if not has_glibc():
        return False
    libc = ctypes.CDLL(None)
    trim_threshold, top_pad, mmap_threshold, mmap_max = -1, -2, -3, -4
    large_on_heap = libc.mallopt(mmap_threshold, 1 << 30) or libc.mallopt(mmap_max, 0)
    kept = bool(large_on_heap and libc.mallopt(trim_threshold, -1) and libc.mallopt(top_pad, 64 << 20))
    if kept:
        _ask_for_huge_pages(libc)
    return kept


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Grow the heap by half the machine's memory, ask for huge pages there, and free it again: never trimmed, it stays
    mapped with that wish, and costs nothing until it is used. Where the kernel says no, nothing is lost."""
    huge_page, advice, block = 2 << 20, 14, (1 << 30) - (1 << 20)  # MADV_HUGEPAGE; blocks just small enough for the heap
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = []
    for _ in range(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // block):
        start = libc.malloc(block)
        if not start:
            break
        blocks.append(start)
        first, last = -(-start // huge_page) * huge_page, (start + block) // huge_page * huge_page
        libc.madvise(first, last - first, advice)
    for start in blocks:
        libc.free(start)


class RankError(RuntimeError):
    """A rank failed. `rank` is the first that did, `traceback_text` what it said."""

    def __init__(self, rank: int, traceback_text: str):
        super().__init__(f"rank {rank} failed:\n{traceback_text}")
        self.rank, self.traceback_text = rank, traceback_text


def run(fn: Callable, ranks: int, *args: object, timeout: float = 120.0) -> list:
    """[fn(rank, *args) of every rank], each in its own process with a gloo default group of `ranks`."""
    pool = WorkerPool(ranks)
    try:
        return pool.run(fn, ranks, *args, timeout=timeout)
    finally:
        pool.shutdown()


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stacks: Path  # where the worker writes its threads' stacks when asked


class WorkerPool:
    """Long-lived rank processes. Each call joins the first `ranks` of them in a new default group through a new file.

    Workers that failed to answer are killed and replaced at the next call; the others are kept.
    """

    def __init__(self, ranks: int, threads: int = 1):
        self.ranks, self.threads = ranks, threads
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.context = multiprocessing.get_context("forkserver" if sys.platform.startswith("linux") else "spawn")
        if sys.platform.startswith("linux"):
            self.context.set_forkserver_preload(["torch", "torch.distributed", "megatron_lite.comm.launch"])
        self.workers: list[_Worker | None] = [None] * ranks
        self.calls = 0

    def run(self, fn: Callable, ranks: int, *args: object, timeout: float = 120.0) -> list:
        """[fn(rank, *args) of every rank]; fn is importable, arguments and results can be pickled."""
        if ranks > self.ranks:
            raise ValueError(f"{ranks} ranks asked from a pool of {self.ranks}")
        self.calls += 1
        store = self.folder / f"store-{self.calls}"
        payload = pickle.dumps((fn, args))
        for rank in range(ranks):
            if self.workers[rank] is None or not self.workers[rank].process.is_alive():
                self._replace(rank)
        for rank in range(ranks):
            self.workers[rank].pipe.send((sys.path, rank, ranks, str(store), timeout, payload))
        try:
            return self._collect(ranks, timeout)
        except BaseException:
            for rank in range(ranks):
                if self.workers[rank] is not None and self.workers[rank].process.is_alive():
                    continue
                self._kill(rank)
            raise
        finally:
            store.unlink(missing_ok=True)

    def _collect(self, ranks: int, timeout: float) -> list:
        """Answers in rank order; the first failure, once everyone has had a moment to answer too, is raised."""
        results: list = [None] * ranks
        pending = {self.workers[r].pipe: r for r in range(ranks)}
        deadline, failures = time.monotonic() + timeout, []
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    when, good, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self.workers[rank].process.join(1.0)
                    code = self.workers[rank].process.exitcode
                    when, good = 0.0, False
                    answer = f"the process ended with exit code {code} (negative: killed by that signal)"
                if good:
                    results[rank] = answer
                else:
                    failures.append((when, rank, answer))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready and time.monotonic() >= deadline:
                break
        if not failures and not pending:
            return results
        stacks = {} if failures else self._stacks(sorted(pending.values()))
        for rank in pending.values():
            self._kill(rank)
        if failures:
            _, rank, text = min(failures)
            raise RankError(rank, text)
        late = sorted(stacks)
        where = f"rank {late[0]} was here:\n{stacks[late[0]]}"
        raise RankError(late[0], f"ranks {late} did not answer within {timeout:.0f} s; {where}")

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where the ranks are now."""
        for rank in ranks:
            os.kill(self.workers[rank].process.pid, signal.SIGUSR2)
        time.sleep(0.2)
        return {r: self.workers[r].stacks.read_text() if self.workers[r].stacks.exists() else "" for r in ranks}

    def _replace(self, rank: int) -> None:
        self._kill(rank)
        here, there = self.context.Pipe()
        stacks = self.folder / f"stacks-{rank}-{self.calls}"
        process = self.context.Process(target=_work, args=(there, self.threads, str(stacks)), daemon=True)
        process.start()
        there.close()
        self.workers[rank] = _Worker(process, here, stacks)

    def _kill(self, rank: int) -> None:
        worker, self.workers[rank] = self.workers[rank], None
        if worker is not None:
            worker.pipe.close()
            worker.process.kill()
            worker.process.join()
            worker.stacks.unlink(missing_ok=True)

    def shutdown(self) -> None:
        """End all workers."""
        for rank in range(self.ranks):
            self._kill(rank)
        shutil.rmtree(self.folder, ignore_errors=True)


def _work(pipe: Connection, threads: int, stacks: str) -> None:
    """A worker's life: one task after another until the pipe closes."""
    torch.set_num_threads(threads)
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # one host: independent of its name, its network and its firewall
    with open(stacks, "w") as file:
        if hasattr(signal, "SIGUSR2"):
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        while True:
            try:
                path, rank, ranks, store, timeout, payload = pipe.recv()
            except (EOFError, OSError):
                return
            sys.path[:] = path
            try:
                pipe.send_bytes(_answer(rank, ranks, store, timeout, payload))
            except (BrokenPipeError, OSError):
                return
            finally:
                shutdown()


def _answer(rank: int, ranks: int, store: str, timeout: float, payload: bytes) -> bytes:
    """(when, whether it went well, result or traceback), pickled here: torch's own pipes share tensors by handle."""
    try:
        fn, args = pickle.loads(payload)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
                                timeout=datetime.timedelta(seconds=timeout))  # fmt: skip
        return pickle.dumps((time.monotonic(), True, fn(rank, *args)))
    except BaseException:
        return pickle.dumps((time.monotonic(), False, traceback.format_exc()))
