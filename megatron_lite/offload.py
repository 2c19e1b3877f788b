"""Activations in host memory between a layer's forward and its backward (--cpu-offloading-num-layers).

    forward    what autograd keeps of the layer is copied out, on a stream of its own, while the next layer computes
    backward   the copy back of layer i starts when the backward of layer i + 1 does, and is waited for at its first use

On CUDA the host copies are pinned and the copies run beside the kernels. Two layers of a chunk at most are on the device:
one whose copy is under way and one that computes. Without a stream (CPU tensors) the same code makes plain copies, which is
of use to tests alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WORTH_COPYING = 1 << 16  # bytes; smaller tensors (norm statistics) stay where they are


class _Copy:
    """One kept tensor on its way out and back. All memory on the device belongs to the stream of the computation."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None):
        self.stream, self.device = stream, tensor.device
        self.returned: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        tensor = tensor.detach()
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self.host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))  # the tensor is written by then
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)

    def start_return(self) -> None:
        if self.returned is not None:
            return
        self.returned = torch.empty_like(self.host, device=self.device)
        if self.stream is None:
            self.returned.copy_(self.host)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # whoever had this memory before is through
        with torch.cuda.stream(self.stream):  # behind the copy out, which is on the same stream
            self.returned.copy_(self.host, non_blocking=True)
            self.arrived = self.stream.record_event()

    def take(self) -> torch.Tensor:
        """The tensor on its device, ready for the current stream."""
        self.start_return()
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        return self.returned


class HostLayer:
    """What one layer keeps of one microbatch."""

    def __init__(self, stream: torch.cuda.Stream | None, worth: int):
        self.stream, self.worth = stream, worth
        self.copies: dict[tuple, _Copy] = {}
        self._sources: list[torch.Tensor] = []  # on the device, until their copies are through
        self._left: torch.cuda.Event | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Copy:
        if tensor.nbytes < self.worth:
            return tensor
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if same not in self.copies:
            self.copies[same] = _Copy(tensor, self.stream)
            self._sources.append(tensor.detach())
        return self.copies[same]

    def unpack(self, kept: torch.Tensor | _Copy) -> torch.Tensor:
        return kept.take() if isinstance(kept, _Copy) else kept

    def all_packed(self) -> None:
        """The layer's forward is over."""
        self._left = self.stream.record_event() if self.stream is not None else None

    def let_go(self) -> None:
        """Give the device memory back. The computation waits for the copies out first: without that, a link slower than
        the layers would let their memory pile up."""
        if self._left is not None and self._sources:
            torch.cuda.current_stream(self.stream.device).wait_event(self._left)
        self._sources.clear()

    def start_return(self) -> None:
        """Start all copies back; from then on autograd alone holds them, each until its use."""
        for copy in self.copies.values():
            copy.start_return()
        self.copies.clear()


class Offload:
    """Runs the layers of a chunk whose kept tensors go to host memory."""

    def __init__(self, device: torch.device, worth: int = WORTH_COPYING):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.worth = worth
        self._leaving: HostLayer | None = None

    def run(self, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, HostLayer]:
        """layer(x), and the handle that brings back what it keeps. The layer before has left the device by the end of it."""
        host = HostLayer(self.stream, self.worth)
        with torch.autograd.graph.saved_tensors_hooks(host.pack, host.unpack):
            x = layer(x)
        host.all_packed()
        self.settle()
        self._leaving = host
        return x, host

    def settle(self) -> None:
        """The last layer's device memory is given back; called when the chunk's forward is through."""
        if self._leaving is not None:
            self._leaving.let_go()
            self._leaving = None
