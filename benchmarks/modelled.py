"""Pipeline stages that only take time: each action sleeps what it costs, so that many ranks overlap on few cores.

A kernel wakes a sleeper late, by a tenth of a millisecond here and differently every time, which would be noise in the
costs. So an action sleeps a little less than it costs and gives its core away over and over until its time is up. A
stage's own Python is part of its forward's time, as a real one's is. How long each really took is kept, and goes into the
simulator (`Steps.costs`).

One rank's side of the bubble table (benchmarks/pipeline_bubble.py): our executor and torch.distributed.pipelining over the
same stages, in the same processes, in turn. Of every step it keeps when it began and ended, and how long its stages were
busy; whatever else the time went into, waiting or overhead, is bubble.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from benchmarks.peers.torch_pp import SCHEDULES as TORCH
from benchmarks.peers.torch_pp import stages_of
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh, build_mesh
from megatron_lite.comm.p2p import P2P
from megatron_lite.grid import Grid
from megatron_lite.parallel.wgrad import WeightGradQueue, give
from megatron_lite.pipeline.executor import Executor, Microbatch
from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement
from megatron_lite.schedules.actions import Action, Placement
from megatron_lite.schedules.greedy import greedy_schedule
from megatron_lite.schedules.simulate import chunk_costs

SHAPE = (16, 1, 64)  # of an activation: messages are to cost next to nothing
AWAKE = 0.0004  # seconds of an action that are not slept
PINGS = 20
GREEDY = {"greedy": Placement("loop", 0), "greedy-v": Placement("v", 0, 2)}


@dataclass(frozen=True)
class Case:
    """A schedule of ours or torch's, and its number of microbatches. Costs in seconds, of a rank's whole share."""

    name: str
    microbatches: int
    torch: bool = False
    costs: tuple[float, float, float] = (0.02, 0.02, 0.02)

    def schedule(self, ranks: int) -> tuple[list[list[Action]], Placement]:
        """Our action lists of all ranks."""
        if self.name in GREEDY:
            placement = GREEDY[self.name]._replace(pp_size=ranks)
            costs = chunk_costs(*self.costs, placement.chunks_per_share)
            return greedy_schedule(placement, self.microbatches, costs), placement
        chunks = SCHEDULES[self.name].default_chunks
        placement = schedule_placement(self.name, ranks, chunks)
        return build_schedule(self.name, ranks, chunks, self.microbatches), placement


@dataclass
class Sleeper:
    """Sleeps for forward, input gradient and weight gradient, and notes how long each really took."""

    costs: tuple[float, float, float]
    slept: tuple[list[float], list[float], list[float]] = field(default_factory=lambda: ([], [], []))

    def nap(self, part: int, make: Callable = lambda: None, start: float | None = None):
        """Take the time of a part, from `start` on or from now; what `make` returns is made within it."""
        start = time.perf_counter() if start is None else start
        end, made = start + self.costs[part], make()
        time.sleep(max(0.0, end - time.perf_counter() - AWAKE))
        while (now := time.perf_counter()) < end:
            os.sched_yield()
        self.slept[part].append(now - start)
        return made

    @property
    def spent(self) -> float:
        return sum(map(sum, self.slept))


class _OursNap(torch.autograd.Function):
    """Forward, then input gradient; the weight gradient is handed over as a layer's is (parallel/wgrad.py)."""

    @staticmethod
    def forward(ctx, x, param, chunk, called):
        ctx.chunk = chunk
        return chunk.sleeper.nap(0, lambda: torch.zeros(()) if chunk.last else torch.zeros(SHAPE), called)

    @staticmethod
    def backward(ctx, dy):
        chunk = ctx.chunk
        dx = chunk.sleeper.nap(1, lambda: None if chunk.first else torch.zeros(SHAPE))
        give(chunk.param, lambda grad: chunk.sleeper.nap(2))
        return dx, None, None, None


class OursChunk:
    """What the executor knows of a `TransformerStage`."""

    def __init__(self, sleeper: Sleeper, first: bool, last: bool):
        self.sleeper, self.first, self.last = sleeper, first, last
        self.wgrad_queue = WeightGradQueue()
        self.param = nn.Parameter(torch.zeros(1))
        self.param.main_grad, self.param.wgrad_queue = torch.zeros(1), self.wgrad_queue

    def __call__(self, x, labels, mask, key, packing):
        return _OursNap.apply(x, self.param, self, time.perf_counter())


class Ours:
    """One case on our executor."""

    def __init__(self, case: Case, mesh: Mesh, p2p: P2P):
        schedule, placement = case.schedule(mesh.pp.size)
        shares = placement.chunks_per_share
        self.sleeper = Sleeper(tuple(cost / shares for cost in case.costs))
        stages = [placement.stage(mesh.rank, chunk) for chunk in range(placement.num_chunks)]
        chunks = [OursChunk(self.sleeper, stage == 0, stage == placement.num_stages - 1) for stage in stages]
        self.actions, self.shares = schedule[mesh.rank], shares
        self.executor = Executor(chunks, placement, mesh.rank, p2p, SHAPE, torch.float32, mesh.device)
        tokens = torch.zeros(1, 16, dtype=torch.long)
        self.microbatches = [Microbatch(tokens, tokens, torch.ones(1, 16))] * case.microbatches

    def step(self) -> dict:
        result = self.executor.run(self.actions, self.microbatches)
        return {"wait": result.wait_seconds, "total": result.total_seconds, "actions": len(self.actions),
                "peak": result.peak_held / self.shares}  # fmt: skip


class _InputNap(torch.autograd.Function):
    """The path of the input. `anchor` stands for what the first stage's input gradient goes to: its embedding."""

    @staticmethod
    def forward(ctx, x, anchor, sleeper, called):
        ctx.sleeper = sleeper
        return sleeper.nap(0, x.clone, called)

    @staticmethod
    def backward(ctx, dy):
        # torch receives into a tensor of its strides
        dx = ctx.sleeper.nap(1, lambda: dy.contiguous() if ctx.needs_input_grad[0] else None)
        return dx, torch.zeros(1) if ctx.needs_input_grad[1] else None, None, None


class _WeightNap(torch.autograd.Function):
    """The path of the weights, which torch finds and runs apart where a schedule splits the backward."""

    @staticmethod
    def forward(ctx, param, sleeper):
        ctx.sleeper = sleeper
        return param.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.sleeper.nap(2, lambda: torch.zeros(1)), None


class TorchStage(nn.Module):
    """A stage for torch's schedules."""

    def __init__(self, sleeper: Sleeper, first: bool):
        super().__init__()
        self.sleeper = sleeper
        self.weight = nn.Parameter(torch.zeros(1))
        self.anchor = nn.Parameter(torch.zeros(1)) if first else None

    def forward(self, x):
        called = time.perf_counter()
        return _InputNap.apply(x, self.anchor, self.sleeper, called) + _WeightNap.apply(self.weight, self.sleeper)


class Torch:
    """One case on torch.distributed.pipelining."""

    def __init__(self, case: Case, mesh: Mesh):
        name, per_rank, _ = TORCH[case.name]
        count = mesh.pp.size * per_rank
        self.sleeper = Sleeper(tuple(cost / per_rank for cost in case.costs))
        numbers = stages_of(case.name, mesh.pp.size, mesh.rank)
        stages = [pipelining.PipelineStage(TorchStage(self.sleeper, n == 0), n, count, mesh.device) for n in numbers]
        self.first, self.last = 0 in numbers, count - 1 in numbers
        made = getattr(pipelining, name)
        options = {"loss_fn": lambda y, target: y.sum(), "scale_grads": False}
        self.schedule = made(stages if per_rank > 1 else stages[0], case.microbatches, **options)
        self.x = torch.zeros(case.microbatches, *SHAPE)

    def step(self) -> dict:
        inputs = (self.x,) if self.first else ()
        options = {"target": self.x, "losses": []} if self.last else {}
        self.schedule.step(*inputs, **options, return_outputs=False)
        return {}


@dataclass
class Steps:
    """What one rank noted of a case: a row per step, and how long the parts of an action took, mean seconds."""

    case: Case
    latency: float  # seconds from a send to its waiting receiver, median
    rows: list[dict] = field(default_factory=list)
    costs: tuple[float, ...] = ()


def rank_steps(rank: int, cases: list[Case], ranks: int, rounds: int) -> list[Steps]:
    """All cases in turn, one untimed step each and then `rounds`, in an order that rotates."""
    mesh = build_mesh(Grid(pp=ranks), torch.device("cpu"))
    p2p = P2P(mesh.pp, mesh.device)
    contenders = [Torch(case, mesh) if case.torch else Ours(case, mesh, p2p) for case in cases]
    latency = ping(p2p, mesh) if ranks > 1 else 0.0
    notes = [Steps(case, latency) for case in cases]
    gc.collect()
    gc.freeze()  # a full collection takes tens of milliseconds, and would fall on anybody
    for turn in range(rounds + 1):
        for place in range(len(cases)):
            at = (place + turn) % len(cases)
            row = _step(contenders[at], mesh)
            if turn:
                notes[at].rows.append(row)
    gc.unfreeze()
    for note, contender in zip(notes, contenders, strict=True):
        note.costs = tuple(statistics.fmean(naps) for naps in contender.sleeper.slept)
    return notes


def ping(p2p: P2P, mesh: Mesh) -> float:
    """Seconds, median, that an activation takes from the last rank to the first, which waits for it asleep; on all ranks."""
    taken, last = [], mesh.pp.size - 1
    for number in range(PINGS):
        comm.barrier(mesh.world)
        if mesh.rank == last:
            time.sleep(0.01)
            p2p.send(torch.full(SHAPE, time.perf_counter(), dtype=torch.float64), 0, "activation", 0, number)
        elif mesh.rank == 0:
            sent = p2p.irecv(SHAPE, torch.float64, last, "activation", 0, number).wait()
            taken.append(time.perf_counter() - float(sent[0, 0, 0]))
    p2p.flush()
    answer = torch.tensor([statistics.median(taken) if taken else 0.0], dtype=torch.float64)
    return float(comm.all_reduce(answer, mesh.pp))


def _step(contender, mesh: Mesh) -> dict:
    dist.barrier()
    comm.barrier(mesh.world)  # gloo's lets ranks go one after the other; ours at once
    before = contender.sleeper.spent
    started = time.perf_counter()
    facts = contender.step()
    return {"started": started, "ended": time.perf_counter(), "busy": contender.sleeper.spent - before, **facts}
