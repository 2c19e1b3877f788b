"""The grid brought to life: one `Axis` (process group) per dimension of parallelism, handed to whoever needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron_lite.comm.mailbox import Mailbox
from megatron_lite.comm.shared import SharedBoard
from megatron_lite.grid import Grid

# Every named set of ranks the program talks over, as the grid axes that it spans.
SPANS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "ep": ("ep",),
         "dp_cp": ("dp", "cp"), "tp_pp": ("tp", "pp"), "world": ("tp", "cp", "dp", "pp")}  # fmt: skip


@dataclass
class Axis:
    """One process group as its member sees it. Size 1: no group, and every collective over it is a no-op.

    `ranks` are the global ranks in group order, `rank` is our index among them. `board` is the shared-memory exchange
    between ranks of one host (CPU tensors only), `mailbox` the one for messages around a ring; None where they cannot be used.
    `tags` numbers the group's collectives; axes with equal members share group, board, mailbox and tags.
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    board: SharedBoard | None = None
    mailbox: Mailbox | None = None
    tags: Iterator[int] = field(default_factory=itertools.count, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Mesh:
    """All axes of one rank. `mesh.tp`, `mesh.dp_cp`, `mesh.world`, ... are `Axis` objects."""

    grid: Grid
    rank: int
    device: torch.device
    axes: dict[str, Axis] = field(repr=False)

    def __getattr__(self, name: str) -> Axis:
        axes = self.__dict__.get("axes", {})
        if name in axes:
            return axes[name]
        raise AttributeError(name)


def named_groups(grid: Grid) -> dict[str, list[list[int]]]:
    """Every named set of ranks: the spans; `embedding`, first and last stage of each pipeline, which hold the two
    copies of a tied embedding; `mirror`, the two ranks that hold the same stages where a pipeline runs both ways; `zero_shard`
    and `zero_replica`, which cut dp_cp in two, as `ep` and `expert_dp` (ranks that hold the same experts) do; `cp_a2a` and
    `cp_ring`, which cut cp."""
    groups, pipes = {name: grid.groups(*span) for name, span in SPANS.items()}, grid.groups("pp")
    groups["embedding"] = [[pipe[0], pipe[-1]] for pipe in pipes] if grid.pp > 1 else pipes
    pairs = [[pipe[r], pipe[-1 - r]] for pipe in pipes for r in range(grid.pp // 2)]
    groups["zero_shard"], groups["zero_replica"] = grid.zero_groups()
    groups["expert_dp"] = grid.expert_replicas()
    groups["cp_a2a"], groups["cp_ring"] = grid.context_groups()
    groups["mirror"] = pairs if grid.mirrored else grid.groups()
    return groups


def single(device: str | torch.device = "cpu") -> Mesh:
    """The mesh of one process: every axis has size 1, no process group exists."""
    return Mesh(Grid(), 0, torch.device(device), {name: Axis(name) for name in named_groups(Grid())})


def build_mesh(grid: Grid, device: torch.device, shared_memory: bool = True) -> Mesh:
    """Process groups for every span of the grid. Collective: every rank of the world calls it with the same grid.

    Spans with equal members share one group (at tp 2 alone, `world` is `tp`'s group), so small runs stay small.
    """
    if grid.world_size == 1:
        return single(device)
    rank = dist.get_rank()
    made: dict[tuple[int, ...], Axis] = {}
    axes = {name: Axis(name, ranks=(rank,)) for name in named_groups(grid)}
    for name, groups in named_groups(grid).items():
        for ranks in groups:
            if len(ranks) == 1:
                continue
            key = tuple(ranks)
            if key not in made:
                group = dist.group.WORLD if len(ranks) == grid.world_size else dist.new_group(ranks)
                made[key] = Axis(name, group=group, ranks=key)
            if rank in ranks:
                axes[name] = replace(made[key], name=name, rank=ranks.index(rank))
    if shared_memory and device.type == "cpu":
        memberships = sorted({axis.ranks for axis in axes.values() if axis.size > 1})
        boards = SharedBoard.connect_all(rank, memberships, dist.group.WORLD)
        for axis in axes.values():
            axis.board = boards.get(axis.ranks)
        _connect_rings(axes)
    return Mesh(grid, rank, device, axes)


def _connect_rings(axes: dict[str, Axis]) -> None:
    """Mailboxes for the axes that keys and values go around. Collective over each of them."""
    made: dict[tuple[int, ...], Mailbox | None] = {}
    for axis in (axes["cp"], axes["cp_ring"]):
        if axis.size > 1 and axis.board is not None:
            if axis.ranks not in made:
                made[axis.ranks] = Mailbox.connect(axis.rank, axis.size, axis.group)
            axis.mailbox = made[axis.ranks]
