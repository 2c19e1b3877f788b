"""The peak that MFU is measured against: TFLOP/s of matrix products on one device, in the dtype of the run."""

from __future__ import annotations

import time

import torch

from megatron_lite.planner.flops import device_peak_tflops

SIZES = (256, 512, 1024, 1536, 3072)  # of square matrices; slow machines do not get to the last ones
BUDGET_SECONDS = 0.3


def matmul_peak_tflops(dtype: torch.dtype, device: torch.device, override: float | None = None) -> float | None:
    """Dense peak of this rank's device; None where it is not known. `override` (--peak-tflops) wins.

    A GPU's is its data sheet's. A CPU's is measured, with the threads this process has now: all ranks of a machine
    should measure at the same time, so that each finds the share of the cores that it trains with.
    """
    if override is not None:
        return override
    if device.type == "cpu":
        return measured_tflops(dtype)
    if device.type != "cuda":
        return None
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return None  # TF32 units do the work, and the table holds the figures without them
    return device_peak_tflops(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."))


@torch.no_grad()
def measured_tflops(dtype: torch.dtype) -> float:
    """The fastest y = x W^T (as the linears do it) seen within the budget, over growing sizes."""
    deadline = time.perf_counter() + BUDGET_SECONDS
    best = 0.0
    for n in SIZES:
        flops = 2.0 * n**3
        if best and time.perf_counter() + 3 * flops / best > deadline:
            break  # a machine too slow for this size; the first use of a size also pays for setting it up
        x, w = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
        torch.nn.functional.linear(x, w)
        share = (deadline - time.perf_counter()) / 2 + time.perf_counter()
        while True:
            started = time.perf_counter()
            torch.nn.functional.linear(x, w)
            ended = time.perf_counter()
            best = max(best, flops / (ended - started))
            if ended + flops / best > share:
                break
    return best / 1e12
