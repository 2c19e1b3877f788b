"""What the memory of a rank is for: the ledger of --log-memory, beside the measured peak.

    weights gradients    the gradient engine's buffers
    master moments       the optimizer's
    activations          tensors that autograd keeps for the backward, at their most; each storage once
    transient            full parameters and gradients that ZeRO brings within a step, at their most
    buffers              memory shared with other ranks for collectives, and pipeline receives posted ahead
    rest                 what the measurement has beyond them: temporaries of operations, logits' work space, code and
                         thread stacks touched in the first step (CPU), rounding of the allocator (CUDA)

Everyone is asked for what they own; nothing is worked out a second time here. Of split backwards the meter sees what waits
for `B`, not what the queued weight gradients hold until `W`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.pipeline.executor import AHEAD
from megatron_lite.planner.report import size
from megatron_lite.training.setup import Trainer, peak_memory


class _Held:
    """A tensor that autograd keeps; the meter hears when it lets go."""

    def __init__(self, meter: Meter, tensor: torch.Tensor):
        self.meter, self.tensor = meter, tensor
        self.storage = meter.add(tensor)

    def __del__(self):
        self.meter.remove(self.storage)


class Meter:
    """Counts bytes that autograd keeps inside `with meter.watching():`, now (`live`) and at their most (`peak`).

    `ignored` are storages that are there anyway (parameters). A storage counts once, however many views are kept.
    """

    def __init__(self, ignored: Iterable[torch.Tensor] = ()):
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._holders: dict[int, list[int]] = {}  # address -> [holders, bytes]
        self.live = self.peak = 0

    def watching(self) -> AbstractContextManager:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Held(self, tensor), lambda held: held.tensor)

    def add(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        where, number = storage.data_ptr(), 0 if storage.data_ptr() in self._ignored else storage.nbytes()
        entry = self._holders.setdefault(where, [0, number])
        if entry[0] == 0:
            self.live += number
            self.peak = max(self.peak, self.live)
        entry[0] += 1
        return where

    def remove(self, where: int) -> None:
        entry = self._holders[where]
        entry[0] -= 1
        if entry[0] == 0:
            self.live -= entry[1]
            del self._holders[where]


class Ledger:
    """One rank's memory by owner. Made before the first step, which it watches."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.meter = Meter(p for chunk in trainer.chunks for p in chunk.parameters())

    def watching(self) -> AbstractContextManager:
        return self.meter.watching()

    def bytes(self) -> dict[str, int]:
        """Category -> bytes of this rank."""
        trainer = self.trainer
        return {**trainer.engine.bytes(), **trainer.optimizer.bytes(), "activations": self.meter.peak,
                "transient": trainer.engine.transient.peak, "buffers": self._buffers()}  # fmt: skip

    def _buffers(self) -> int:
        executor, axes = self.trainer.executor, self.trainer.mesh.axes.values()
        boards = {id(axis.board): axis.board for axis in axes if axis.board is not None}
        shared = sum(memory.nbytes for board in boards.values() for memory in board.bytes)
        message = torch.Size(executor.shape).numel() * executor.dtype.itemsize
        return shared + (AHEAD * message if executor.p2p is not None else 0)

    def measured(self) -> int:
        """Peak growth since before the model was built: resident memory on CPU, torch's allocator on CUDA."""
        return peak_memory(self.trainer.mesh.device) - self.trainer.memory_before

    def lines(self) -> list[str]:
        """The ledger of the rank with most, after the watched step. Collective."""
        mine = (self.measured(), self.trainer.mesh.rank, self.bytes())
        measured, rank, entries = max(comm.gather_objects(mine, self.trainer.mesh.world), key=lambda row: row[:2])
        known = sum(entries.values())
        what = "allocator" if self.trainer.mesh.device.type == "cuda" else "resident memory"
        rows = [*entries.items(), ("ledger", known), ("rest", measured - known), (f"measured peak ({what})", measured)]
        title = f"memory of rank {rank}, the one with most, after the first step:"
        return [title, *(f"  {name:<32}{size(number):>12}" for name, number in rows)]
