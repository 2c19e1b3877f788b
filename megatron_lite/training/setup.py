"""Everything a run is made of, built once from its configuration and handed on as one object."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from functools import partial

import torch

from megatron_lite.comm.mesh import Axis, Mesh
from megatron_lite.comm.p2p import P2P
from megatron_lite.config import Config
from megatron_lite.errors import ReportedError
from megatron_lite.grid import Grid
from megatron_lite.models.compiled import compile_elementwise
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.optim.adamw import Optimizer
from megatron_lite.optim.clip import square_sum
from megatron_lite.optim.compress import Compression
from megatron_lite.optim.ddp import GradientEngine, Sharding
from megatron_lite.optim.scaler import LossScale, LossScaler
from megatron_lite.parallel.fp8 import require_fp8
from megatron_lite.parallel.shard import initialise
from megatron_lite.pipeline.executor import Executor
from megatron_lite.pipeline.recorder import Recorder, clock_of
from megatron_lite.pipeline.stage import build_chunks
from megatron_lite.planner.automatic import PartCosts, plainest_pipeline
from megatron_lite.schedules.actions import Action
from megatron_lite.training.loads import Loads
from megatron_lite.training.measure import measure_costs
from megatron_lite.training.settle import Settled, settle_pipeline


@dataclass
class Trainer:
    """One rank's share of a run: model chunks, gradient engine, optimizer, pipeline executor and its action list."""

    config: Config
    mesh: Mesh
    chunks: list[TransformerStage]
    engine: GradientEngine
    optimizer: Optimizer
    executor: Executor
    actions: list[Action]  # of a step of the full batch
    settled: Settled  # the pipeline, and why it is this one
    scaler: LossScaler
    loss_scale: LossScale  # of the next step
    loads: Loads | None = None  # of experts, where there are some
    recorder: Recorder | None = None  # with --trace-dir; with --profile on ranks that are profiled
    memory_before: int = 0  # bytes this process held before the model was built
    smaller: dict[int, list[Action]] = field(default_factory=dict)  # microbatches -> actions, while the batch grows

    def square_sum(self, of: str) -> torch.Tensor:
        """Sum of squares of all gradients ("grad") or parameters ("param") of the model, each once: fp64 scalar. Collective."""
        mesh, engine = self.mesh, self.engine
        experts = engine.sharding.experts and (mesh.tp_pp, engine.sharding.experts[0], mesh.ep)
        return square_sum(engine.buckets, of, mesh.tp_pp, engine.shard, experts=experts or ())

    def actions_for(self, microbatches: int) -> list[Action]:
        """This rank's actions of a step of so many microbatches; each list is made once and kept."""
        if microbatches == num_microbatches(self.config, self.mesh.dp.size):
            return self.actions
        if microbatches not in self.smaller:
            self.smaller[microbatches] = self.settled.pipeline.actions(microbatches)[self.mesh.pp.rank]
        return self.smaller[microbatches]


class DeviceError(ReportedError):
    """The run's device cannot do what a flag asks for."""


def grid_of(config: Config, world_size: int) -> Grid:
    """The grid that the configuration makes of `world_size` ranks; what tp, cp and pp leave is dp."""
    parallel = config.parallel
    mirrored = plainest_pipeline(config.model.num_layers, parallel).placement.mirror(0, 0) is not None
    dp = world_size // (parallel.tp * parallel.cp * parallel.pp)
    return Grid(tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, pp=parallel.pp, dp=dp, zero_replicas=parallel.zero_replica_size,
                mirrored=mirrored, ulysses=parallel.ulysses_degree or 1)  # fmt: skip


def num_microbatches(config: Config, dp: int) -> int:
    return config.train.global_batch_size // (config.train.micro_batch_size * dp)


def sharding_of(config: Config, mesh: Mesh) -> Sharding:
    """Who keeps which part of the model state."""
    parallel = config.parallel
    stage = parallel.zero_stage
    shard, replica = (mesh.zero_shard, mesh.zero_replica) if stage else (Axis("zero_shard"), mesh.dp_cp)
    compression = None
    if parallel.grad_compression == "powersgd":
        compression = Compression(parallel.grad_compression_rank, parallel.grad_compression_start_iter, mesh.dp_cp, mesh.tp_pp)
    experts = None
    if mesh.ep.size > 1:
        experts = (mesh.expert_dp, Axis("expert_replica")) if stage else (Axis("expert_shard"), mesh.expert_dp)
    return Sharding(stage, shard, replica, not parallel.no_overlap_grad_reduce, not parallel.no_overlap_param_gather,
                    parallel.zero_prefetch_limit, parallel.pp > 1, mesh.mirror, experts,
                    torch.bfloat16 if parallel.grad_reduce_dtype == "bf16" else None, compression)  # fmt: skip


def build_trainer(config: Config, mesh: Mesh, costs: PartCosts | None = None) -> Trainer:
    """Model with its initial weights, buffers, optimizer and executor of this rank.

    `costs` are what an automatic pipeline is chosen by; without them they are measured here.
    """
    check_device(config, mesh.device)
    model, train = config.model, config.train
    length = model.seq_length // (mesh.cp.size * (mesh.tp.size if config.parallel.sequence_parallel else 1))
    shape = (length, train.micro_batch_size, model.hidden_size)
    p2p = P2P(mesh.pp, mesh.device) if mesh.pp.size > 1 else None
    m = num_microbatches(config, mesh.dp.size)
    settled = settle_pipeline(config, mesh, m, lambda: costs or measure_costs(config, mesh, p2p, shape))
    pipeline, before = settled.pipeline, memory_in_use(mesh.device)
    chunks = build_chunks(config, mesh, pipeline)
    if train.compile:
        for chunk in chunks:
            compile_elementwise(chunk)
    # Parameters get memory and values bucket by bucket: under ZeRO-3 there is never more of them than a rank's share.
    engine = GradientEngine(chunks, sharding_of(config, mesh), mesh.tp, mesh.embedding, config.parallel.ddp_bucket_size,
                            partial(initialise, seed=train.seed))  # fmt: skip
    optimizer = Optimizer(engine.buckets, config.optimizer)
    recorded = config.logging.trace_dir or (config.logging.profile and mesh.rank in config.logging.profile_ranks)
    recorder = Recorder(clock_of(mesh.device)) if recorded else None
    executor = Executor(chunks, pipeline.placement, mesh.pp.rank, p2p, shape, chunks[0].tp.dtype, mesh.device, recorder)
    actions, scaler = pipeline.actions(m)[mesh.pp.rank], LossScaler.of(config.precision)
    loads = Loads(chunks, mesh) if model.num_experts else None
    return Trainer(config, mesh, chunks, engine, optimizer, executor, actions, settled, scaler, scaler.start(), loads, recorder,
                   before)  # fmt: skip


def check_device(config: Config, device: torch.device) -> None:
    """Flags that can be judged only once the device is known."""
    require_fp8(config.precision, device)
    layers = config.activations.cpu_offloading_num_layers
    if layers and device.type == "cpu":
        raise DeviceError(f"--cpu-offloading-num-layers {layers}: has no effect: there is no accelerator, activations are in "
                          "host memory already; drop it, or use --recompute-granularity")  # fmt: skip


def memory_in_use(device: torch.device) -> int:
    """Bytes this process holds now: torch's allocator on CUDA, resident memory on CPU (0 where it cannot be read)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held: torch's allocator on CUDA, resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:  # macOS; its figure is in bytes. Linux's own ru_maxrss would include what the parent held
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
