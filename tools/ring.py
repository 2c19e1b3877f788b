"""An all-reduce made of messages between neighbours: the ring of Patarasuk & Yuan 2009, to read and to measure.

Every rank has the tensor in n parts. In n-1 steps each part travels once round the ring and is summed on its way; in n-1
more its sum travels round. A rank sends 2 (n-1)/n of the tensor, whatever n is: no algorithm sends less.

    3 ranks, which parts rank 0 sends (>) and sums up (+) or takes (=)
    step        0         1     |   2         3
    reduce    > a  + c  > c  + b |                     now b is complete on rank 0
    gather                      | > b  = a  > a  = c   now all are
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

Exchange = Callable[[torch.Tensor, torch.Tensor], None]


def ring_all_reduce(x: torch.Tensor, rank: int, ranks: int, exchange: Exchange) -> torch.Tensor:
    """x = the sum of everyone's x, in place. `exchange(give, take)` sends to the next rank and receives from the previous."""
    parts = x.view(-1).tensor_split(ranks)
    arrived = torch.empty_like(parts[0])  # the first part is the largest
    for step in range(ranks - 1):
        give, take = parts[(rank - step) % ranks], parts[(rank - step - 1) % ranks]
        exchange(give, arrived[: take.numel()])
        take += arrived[: take.numel()]
    for step in range(ranks - 1):
        exchange(parts[(rank + 1 - step) % ranks], parts[(rank - step) % ranks])
    return x


def between_neighbours(rank: int, ranks: int, group: dist.ProcessGroup) -> Exchange:
    """Messages round the ring of a process group, as bytes: any dtype travels."""

    def exchange(give: torch.Tensor, take: torch.Tensor) -> None:
        works = []
        if take.numel():
            works.append(dist.P2POp(dist.irecv, take.view(torch.uint8), group=group, group_peer=(rank - 1) % ranks))
        if give.numel():
            works.append(dist.P2POp(dist.isend, give.view(torch.uint8), group=group, group_peer=(rank + 1) % ranks))
        for work in dist.batch_isend_irecv(works) if works else []:
            work.wait()

    return exchange
