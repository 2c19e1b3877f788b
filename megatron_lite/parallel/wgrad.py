"""Weight gradients: where a layer's backward hands them over, now or later.

Layers do not return weight gradients to autograd. They hand a closure that *adds* the gradient to the parameter's
accumulation buffer, so that a matrix is added in fp32 whatever the compute dtype, an embedding adds only the rows it
used, and a pipeline schedule can postpone the whole computation: `B` queues the closures, `W` drains them.

    give(param, add)      called in a layer's backward; add(buffer) accumulates into param.main_grad
    WeightGradQueue       one per model chunk; `deferring` is switched by the pipeline executor
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

AddGrad = Callable[[torch.Tensor], object]


class WeightGradQueue:
    """FIFO of postponed weight gradients of one chunk, one batch of closures per `B` action."""

    def __init__(self) -> None:
        self.deferring = False
        self._pending: deque[tuple[torch.nn.Parameter, AddGrad]] = deque()

    def put(self, param: torch.nn.Parameter, add: AddGrad) -> None:
        self._pending.append((param, add))

    def take(self) -> list[tuple[torch.nn.Parameter, AddGrad]]:
        """What has been queued since the last call, for the executor to run at the matching `W`."""
        taken = list(self._pending)
        self._pending.clear()
        return taken


def give(param: torch.nn.Parameter, add: AddGrad) -> None:
    """Hand over one gradient contribution of `param`: added at once, or queued while its chunk runs a `B` action."""
    queue: WeightGradQueue | None = getattr(param, "wgrad_queue", None)
    if queue is not None and queue.deferring:
        queue.put(param, add)
    else:
        add_now(param, add)


def add_now(param: torch.nn.Parameter, add: AddGrad) -> None:
    """Accumulate into `param.main_grad`. The gradient engine, if there is one, hears of it before, if `main_grad` may have
    no memory yet, and after."""
    comes: Callable[[torch.nn.Parameter], None] | None = getattr(param, "grad_comes", None)
    if comes is not None:
        comes(param)
    add(param.main_grad)
    arrived: Callable[[torch.nn.Parameter], None] | None = getattr(param, "grad_arrived", None)
    if arrived is not None:
        arrived(param)


def attach_grad_buffers(params: Iterable[torch.nn.Parameter]) -> None:
    """Plain zeroed buffers, for using a model without the gradient engine (tests, small scripts)."""
    for param in params:
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        param.main_grad = torch.zeros(param.shape, dtype=dtype, device=param.device)
