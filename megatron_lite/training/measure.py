"""What a layer, the embedding, the output layer and a message cost here: timed with the run's own code and shapes.

Each part is built alone, run forward and backward a few times, and dropped: weights, gradients and generators of the run
are not touched. All ranks measure at the same time, as they will run at the same time; what they find is gathered, and
of the ranks of one pipeline stage the slowest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh
from megatron_lite.comm.p2p import P2P
from megatron_lite.config import Config
from megatron_lite.models.compiled import compile_elementwise
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.shard import allocate
from megatron_lite.parallel.wgrad import add_now, attach_grad_buffers
from megatron_lite.pipeline.executor import Microbatch
from megatron_lite.pipeline.stage import build_chunk
from megatron_lite.planner.automatic import PartCosts, Price
from megatron_lite.planner.pipeline import Chunk
from megatron_lite.rng import DropoutKey

PARTS = (Chunk(1, range(1), False, False), Chunk(0, range(0), True, False), Chunk(2, range(0), False, True))
SECONDS = 0.5  # for the repeats of one part
FEWEST, MOST = 3, 30  # repeats


def measure_costs(config: Config, mesh: Mesh, p2p: P2P, shape: tuple[int, int, int]) -> PartCosts:
    """Costs in milliseconds, the same on all ranks. Collective over the world. `shape` [s/tp or s, b, h] is that of a
    stage's output."""
    prices = [measure_part(config, mesh, part, shape) for part in PARTS]
    found = comm.gather_objects((mesh.pp.rank, prices, measure_message(config, mesh, p2p, shape)), mesh.world)
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # what the run allocates should not lie between what was dropped
        torch.cuda.reset_peak_memory_stats(mesh.device)
    slowest = [[_slowest([own[part] for rank, own, _ in found if rank == stage]) for stage in range(mesh.pp.size)]
               for part in range(len(PARTS))]  # fmt: skip
    source = f"costs measured on these ranks, micro-batch {config.train.micro_batch_size} x {config.model.seq_length} tokens"
    return PartCosts(*map(tuple, slowest), max(latency for *_, latency in found), "ms", source)


def _slowest(prices: list[Price]) -> Price:
    return Price(*map(max, zip(*prices, strict=True)))


def measure_part(config: Config, mesh: Mesh, part: Chunk, shape: tuple[int, int, int]) -> Price:
    """Median milliseconds of F, B and W of one part, one microbatch at a time."""
    generator = torch.Generator(mesh.device).manual_seed(config.train.seed)
    stage = build_chunk(config, mesh, part)
    for param in stage.parameters():
        allocate(param)
        param.data.normal_(0.0, config.model.init_method_std, generator=generator)
    attach_grad_buffers(stage.parameters())
    if config.train.compile:
        compile_elementwise(stage)
    size = config.train.micro_batch_size, config.model.seq_length // mesh.cp.size
    tokens = torch.randint(config.data.vocab_size, size, device=mesh.device, generator=generator)
    key = DropoutKey(config.train.seed, 0, 0, mesh.tp.rank, mesh.cp.rank)
    batch = Microbatch(tokens, tokens, torch.ones(size, device=mesh.device), key)
    x = tokens if part.first else torch.randn(shape, device=mesh.device, generator=generator).to(stage.tp.dtype)
    rows = _repeat(mesh, lambda: run_once(stage, x, batch, mesh.device))
    return Price(*(1e3 * median(column) for column in zip(*rows, strict=True)))


def run_once(stage: TransformerStage, x: torch.Tensor, batch: Microbatch, device: torch.device) -> tuple[float, float, float]:
    """Seconds of F, B and W, each as the executor runs it."""
    x = x.detach() if stage.first else x.detach().requires_grad_()
    started = _now(device)
    out = stage(x, batch.labels, batch.mask, batch.key)
    forward = _now(device) - started
    exact = torch.promote_types(stage.tp.dtype, torch.float32)
    grad = torch.ones((), dtype=exact, device=device) if stage.last else torch.full_like(out, 1e-3)
    edge = get_gradient_edge(out)
    started = _now(device)
    stage.wgrad_queue.deferring = True
    torch.autograd.backward(edge, grad)
    stage.wgrad_queue.deferring = False
    queued = stage.wgrad_queue.take()
    middle = _now(device)
    with torch.no_grad():
        for param, add in queued:
            add_now(param, add)
    return forward, middle - started, _now(device) - middle


def measure_message(config: Config, mesh: Mesh, p2p: P2P, shape: tuple[int, int, int]) -> float:
    """Median milliseconds of a stage's output from one pipeline rank to the next: half of there and back.

    Pairs of neighbours at a time, first (0, 1), (2, 3), ..., then (1, 2), ...; the slower of this rank's two links.
    """
    rank, size = mesh.pp.rank, mesh.pp.size
    tensor = torch.zeros(shape, dtype=getattr(torch, config.precision.dtype_name), device=mesh.device)
    slowest = 0.0
    for parity in (0, 1):
        lower = rank % 2 == parity
        peer = rank + 1 if lower else rank - 1

        def once(lower: bool = lower, peer: int = peer) -> tuple[float]:
            if not 0 <= peer < size:
                return (0.0,)
            started = _now(mesh.device)
            if lower:
                p2p.send(tensor, peer, "activation", 0, 0)
            back = p2p.irecv(shape, tensor.dtype, peer, "gradient" if lower else "activation", 0, 0)
            back.wait()
            if not lower:
                p2p.send(tensor, peer, "gradient", 0, 0)
            p2p.flush()
            return ((_now(mesh.device) - started) / 2,)

        slowest = max(slowest, 1e3 * median(seconds for (seconds,) in _repeat(mesh, once)))
    return slowest


def _repeat(mesh: Mesh, once: Callable[[], tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The times of some runs, as many on every rank (tensor-parallel ranks talk in them), after two to warm up."""
    once()  # allocates, compiles
    comm.barrier(mesh.world)
    longest = torch.tensor([sum(once())], dtype=torch.float32, device=mesh.device)
    longest = float(comm.all_reduce(longest, mesh.world, op="max"))
    return [once() for _ in range(min(max(int(SECONDS / max(longest, 1e-6)), FEWEST), MOST))]


def _now(device: torch.device) -> float:
    """The time once everything queued on the device has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
