"""One process of one contender: builds its model once, then runs steps when told to.

Started as `python -m benchmarks.peers.worker SPEC_JSON`. One JSON object a line, on stdin and stdout:

    <- {"ready": true}                       after the build, or {"error": "..."} and the process ends
    -> {"steps": 4}                          run four steps
    <- {"seconds", "tokens", "losses", "norms", "peak_rss_mb", "minor_faults"}
    -> end of file                           leave

Between commands the process blocks in a read and uses no CPU.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback

from benchmarks.peers.spec import Spec


def peak_rss_mb() -> float:
    """The most memory this process ever held. VmHWM, since ru_maxrss is inherited from the parent across exec."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(contender, spec: Spec, steps: int) -> dict:
    """Run steps and say what they cost."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    answer = contender.run_steps(steps)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "tokens": steps * spec.global_batch * spec.shape.seq,
        "minor_faults": after.ru_minflt - before.ru_minflt,
        "peak_rss_mb": peak_rss_mb(),
        **answer,
    }


def main() -> None:
    """Build, then answer commands until stdin ends."""
    # Libraries print to stdout as they please: the driver's channel becomes a private descriptor, fd 1 goes to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        channel.write(json.dumps(answer) + "\n")

    spec = Spec.from_json(sys.argv[1])
    try:
        import torch

        torch.set_num_threads(spec.threads)
        contender = importlib.import_module(f"benchmarks.peers.{spec.module}").build(spec)
        say({"ready": True})
        # readline, not iteration over the file, which would read ahead.
        while line := sys.stdin.readline():
            say(timed(contender, spec, json.loads(line)["steps"]))
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        sys.exit(1)
    # Process groups and compile workers need no orderly end here, and some peers hang in theirs.
    channel.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
