"""The GEMM ceiling: how fast this machine multiplies matrices of the model's shapes, and nothing else.

Forward, input gradient and weight gradient of each linear into preallocated outputs, weighted by how often a step
runs them.
"""

import statistics
import time

import torch

from benchmarks.peers.spec import Spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REPEATS = 8


def products(rows: int, k: int, n: int, dtype):
    """(pass, thunk) of the three products of a linear from k to n features over `rows` tokens."""
    x, w, g = (torch.randn(size).to(dtype) for size in ((rows, k), (n, k), (rows, n)))
    y, dx, dw = torch.empty(rows, n, dtype=dtype), torch.empty_like(x), torch.empty_like(w)
    return [
        ("forward", lambda: torch.mm(x, w.t(), out=y)),
        ("dgrad", lambda: torch.mm(g, w, out=dx)),
        ("wgrad", lambda: torch.mm(g.t(), x, out=dw)),
    ]


def seconds(thunk) -> float:
    """Median time of a call, as what is compared with it are medians of whole steps."""
    thunk()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        thunk()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Ceiling:
    """Answers run_steps with GFLOP/s by dtype and pass."""

    def __init__(self, spec: Spec):
        self.spec = spec

    def measure(self, dtype) -> dict[str, float]:
        """GFLOP/s of each pass, and of all of them together."""
        spec, work, spent = self.spec, {}, {}
        rows = spec.micro_batch * spec.shape.seq
        for _, k, n, count in spec.shape.gemms():
            for name, thunk in products(rows, k, n, dtype):
                work[name] = work.get(name, 0) + count * 2 * rows * k * n
                spent[name] = spent.get(name, 0) + count * seconds(thunk)
        rates = {name: work[name] / spent[name] / 1e9 for name in work}
        return rates | {"all": sum(work.values()) / sum(spent.values()) / 1e9}

    def run_steps(self, steps: int) -> dict:
        """Measure once, however many steps are asked for. It has no losses."""
        return {"gflops": self.measure(DTYPES[self.spec.dtype]), "losses": [], "norms": []}


def build(spec: Spec) -> Ceiling:
    """A process that only multiplies."""
    return Ceiling(spec)
