"""The driver's side of a contender: start its processes, tell them to run, hear from them."""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.contenders import HEAP, Contender
from benchmarks.peers.spec import Spec

ROOT = Path(__file__).resolve().parent.parent


class ContenderError(RuntimeError):
    """A contender could not start, or died."""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Handle:
    """The processes of one contender, one per rank."""

    def __init__(self, contender: Contender, spec: Spec, folder: Path, python: str = sys.executable):
        self.contender, self.spec = contender, spec
        port = free_port()
        self.logs = [folder / f"{spec.group}-{spec.dtype}-{spec.name}.{rank}.log" for rank in range(spec.world)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            command = [python, "-m", "benchmarks.peers.worker", replace(spec, rank=rank).to_json()]
            with log.open("wb") as stderr:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=self.environment(rank, port), bufsize=0,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                    )
                )  # fmt: skip

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """The driver's environment less its allocator settings, ours if this contender gets them, torchrun's names."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        env |= {"OMP_NUM_THREADS": str(self.spec.threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.spec.world)}
        return env | HEAP if self.contender.heap else env

    def hear(self, timeout: float) -> list[dict]:
        """One answer from every rank. All are watched at once: when one dies, the other may wait for it for ever."""
        answers, buffers = {}, dict.fromkeys(range(len(self.processes)), b"")
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self.processes):
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise ContenderError(f"no answer in {timeout:.0f} s")
                for key, _ in events:
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        raise ContenderError(f"rank {key.data} died: {self.last_words(key.data)}")
                    buffers[key.data] += data
                    if data.endswith(b"\n"):
                        answers[key.data] = json.loads(buffers[key.data])
                        selector.unregister(key.fileobj)
        errors = [answer["error"] for answer in answers.values() if "error" in answer]
        if errors:
            raise ContenderError(errors[0])
        return [answers[rank] for rank in range(len(self.processes))]

    def last_words(self, rank: int) -> str:
        """The last line a process wrote to its log."""
        lines = self.logs[rank].read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def run(self, steps: int, timeout: float = 1800) -> dict:
        """Run steps; the slowest rank's time, the largest rank's memory, rank 0's losses."""
        for process in self.processes:
            try:
                process.stdin.write(json.dumps({"steps": steps}).encode() + b"\n")
            except BrokenPipeError:
                raise ContenderError("a rank is gone") from None
        answers = self.hear(timeout)
        worst = {key: max(answer[key] for answer in answers) for key in ("seconds", "peak_rss_mb", "minor_faults")}
        return answers[0] | worst | {"cpu_seconds": sum(answer["cpu_seconds"] for answer in answers)}

    def close(self) -> None:
        """End of input ends the workers; a worker that does not listen is killed."""
        for process in self.processes:
            process.stdin.close()  # closing twice is fine
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
