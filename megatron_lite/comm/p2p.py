"""Pipeline messages: activations forward, gradients backward, between ranks of the pp axis. The executor's alone.

Every message is known by (kind, chunk, microbatch), so that ranks which post in different orders still pair up right:

    one host   through shared memory (comm/mailbox.py): the triple is the message's tag; a send is a copy, done at once
    gloo       the same tag; one group for all
    NCCL       has no tags: messages of one communicator arrive in the order sent. So each kind has two communicators,
               for messages to a higher and to a lower index; within each, sender and receiver must post in the same
               order (schedules/check.py proves that of every schedule). A communicator that carried both ways between
               two ranks could deadlock: each would wait for its own send to be received.

A sent tensor is let go as soon as it has left: `send` keeps it, NCCL sends are polled (`sweep`), gloo's, which cannot
be asked, are waited for by a thread. `flush` returns when all have left.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

import torch
import torch.distributed as dist

from megatron_lite.comm.mailbox import Mailbox
from megatron_lite.comm.mesh import Axis

KINDS = ("activation", "gradient")
CHUNKS = 256  # tags below 2**30 (collectives on the same group are above): microbatches up to 2**21
MICROBATCHES = 1 << 21


class Polled:
    """Sends that can be asked whether they are done (NCCL)."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def add(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self.waiting.append((work, tensor))

    def sweep(self) -> None:
        while self.waiting and self.waiting[0][0].is_completed():
            self.waiting.popleft()[0].wait()

    def flush(self) -> None:
        while self.waiting:
            self.waiting.popleft()[0].wait()


class Reaped:
    """Sends that can only be waited for (gloo): a thread does it, oldest first, and drops each tensor as it leaves.

    Waiting for one in the executor instead could deadlock: its receiver may first need a message we have yet to make.
    """

    def __init__(self) -> None:
        self.waiting: queue.Queue = queue.Queue()
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def add(self, work: dist.Work, tensor: torch.Tensor) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._reap, name="pipeline sends", daemon=True)
            self.thread.start()
        self.waiting.put((work, tensor))

    def _reap(self) -> None:
        while True:
            work, tensor = self.waiting.get()
            try:
                work.wait()
            except RuntimeError as error:  # the peer is gone; `flush` tells
                self.error = self.error or error
            del work, tensor
            self.waiting.task_done()

    def sweep(self) -> None:
        pass

    def flush(self) -> None:
        self.waiting.join()
        if self.error is not None:
            raise self.error


class ReceiveHandle:
    """A message awaited. `wait` returns its tensor."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self.work, self.tensor = work, tensor

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor


class MailHandle:
    """A message awaited from the mailbox. `wait` returns its tensor, which has no memory before."""

    def __init__(self, mailbox: Mailbox, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int):
        self.mailbox, self.shape, self.dtype, self.peer, self.tag = mailbox, shape, dtype, peer, tag
        self.tensor: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype)
            self.mailbox.receive(self.tensor, self.peer, self.tag)
        return self.tensor


class P2P:
    """The links of one rank. `peer` is an index in the axis. Making one is collective over the axis."""

    def __init__(self, axis: Axis, device: torch.device):
        self.axis, self.device = axis, device
        self.links: dict[tuple[str, bool], dist.ProcessGroup] = {}
        self.sends = Polled() if device.type == "cuda" else Reaped()
        self.mailbox: Mailbox | None = None
        if axis.size > 1 and device.type == "cpu" and axis.board is not None:
            self.mailbox = Mailbox.connect(axis.rank, axis.size, axis.group)
        if axis.size > 1 and device.type == "cuda":
            for kind in KINDS:
                for upward in (True, False):
                    self.links[kind, upward] = dist.new_group(list(axis.ranks), use_local_synchronization=True)
                    self._greet(self.links[kind, upward], upward)

    def _greet(self, group: dist.ProcessGroup, upward: bool) -> None:
        """One message over every link between neighbours, one link at a time.

        NCCL connects two ranks at their first message, and blocks until both have come: better here than in a schedule.
        """
        size, hello = self.axis.size, torch.zeros(1, device=self.device)
        links = {(min(r, (r + 1) % size), max(r, (r + 1) % size)) for r in range(size)}
        for low, high in sorted(links):
            source, target = (low, high) if upward else (high, low)
            if self.axis.rank == source:
                dist.send(hello, group=group, group_dst=target)
            elif self.axis.rank == target:
                dist.recv(hello, group=group, group_src=source)

    def send(self, tensor: torch.Tensor, peer: int, kind: str, chunk: int, microbatch: int) -> None:
        """Start sending; the tensor has no graph and must not be written any more."""
        flat, tag = tensor.contiguous(), _tag(kind, chunk, microbatch)
        if self.mailbox is not None:
            self.mailbox.send(flat, peer, tag)
            return
        if self.links:
            work = dist.isend(flat, group=self.links[kind, peer > self.axis.rank], group_dst=peer)
        else:
            work = dist.isend(_bytes(flat), group=self.axis.group, group_dst=peer, tag=tag)
        self.sends.add(work, flat)

    def sweep(self) -> None:
        """Let go of what has left; never blocks."""
        self.sends.sweep()

    def flush(self) -> None:
        """Return when everything sent has left; raises if a peer is gone."""
        self.sends.flush()

    def irecv(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, kind: str, chunk: int, microbatch: int
    ) -> ReceiveHandle | MailHandle:
        """Start receiving a tensor of this shape; the handle's `wait` returns it."""
        tag = _tag(kind, chunk, microbatch)
        if self.mailbox is not None:
            return MailHandle(self.mailbox, shape, dtype, peer, tag)
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if self.links:
            link = self.links[kind, self.axis.rank > peer]
            return ReceiveHandle(dist.irecv(tensor, group=link, group_src=peer), tensor)
        return ReceiveHandle(dist.irecv(_bytes(tensor), group=self.axis.group, group_src=peer, tag=tag), tensor)


def _tag(kind: str, chunk: int, microbatch: int) -> int:
    if not (0 <= chunk < CHUNKS and 0 <= microbatch < MICROBATCHES):
        raise ValueError(f"chunk {chunk}, microbatch {microbatch} outside {CHUNKS} chunks, {MICROBATCHES} microbatches")
    return (microbatch * CHUNKS + chunk) * 2 + KINDS.index(kind)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, so that gloo carries every dtype."""
    return tensor.view(-1).view(torch.uint8)
