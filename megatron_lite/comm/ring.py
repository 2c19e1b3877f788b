"""The ring exchange: a tensor to the next rank of an axis, its like from the one before (ring attention's keys and values).

    one host   the mailbox (comm/mailbox.py): a send is one copy, done at once; what arrives is read where the sender put it,
               without another copy, until it is let go
    gloo       an isend/irecv pair with a tag of the group's own count; gloo's threads carry it
    NCCL       both at once (batch_isend_irecv), on NCCL's stream

All ranks of an axis start its exchanges in the same order. What was given must not change before `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_lite.comm.mailbox import Mailbox
from megatron_lite.comm.mesh import Axis
from megatron_lite.comm.pairwise import Pairwise

TAG = 0  # of all mail here: it is taken in the order sent


class Arriving(Protocol):
    """A tensor on its way. `wait` returns it; it may be used until `let_go`."""

    def wait(self) -> torch.Tensor: ...

    def let_go(self) -> None: ...


class _Lent:
    """Lies in the sender's memory."""

    def __init__(self, mailbox: Mailbox, like: torch.Tensor, peer: int):
        self.mailbox, self.like, self.peer = mailbox, (like.shape, like.dtype), peer
        self.give_back: Callable[[], None] | None = None

    def wait(self) -> torch.Tensor:
        tensor, self.give_back = self.mailbox.borrow(*self.like, self.peer, TAG)
        return tensor

    def let_go(self) -> None:
        if self.give_back is not None:
            self.give_back()
            self.give_back = None


class _Own:
    """Lies in memory of this rank. `sent` stays alive until both ways are done."""

    def __init__(self, works: list, sent: torch.Tensor, result: torch.Tensor):
        self.works, self.sent, self.result = works, sent, result

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        self.works, self.sent = [], None
        return self.result

    def let_go(self) -> None:
        pass


@torch.no_grad()
def start_shift(x: torch.Tensor, axis: Axis) -> Arriving:
    """Send x to the next rank of the axis; the handle gives the tensor of the rank before, of the same shape and dtype."""
    x = x.contiguous()
    following, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if x.device.type == "cpu" and axis.mailbox is not None:
        axis.mailbox.send(x, following, TAG)
        return _Lent(axis.mailbox, x, before)
    out = torch.empty_like(x)
    if x.device.type == "cpu":
        pending = Pairwise(axis.rank, axis.size, axis.group, axis.tags).shift(out, x, following, before)
        return _Own([pending], x, out)
    both = [dist.P2POp(dist.isend, x, group=axis.group, group_peer=following),
            dist.P2POp(dist.irecv, out, group=axis.group, group_peer=before)]  # fmt: skip
    return _Own(dist.batch_isend_irecv(both), x, out)
