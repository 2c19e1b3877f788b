"""Flags of who holds and does what, and of activation memory."""

from dataclasses import dataclass

from megatron_lite.config.flag import flag
from megatron_lite.schedules import EVERY

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # their place is the ZeRO stage


@dataclass(frozen=True)
class ParallelConfig:
    """parallelism"""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer's matrices (tp)")
    sequence_parallel: bool = flag(False, "cut the activations between tensor-parallel regions over tp along the sequence")
    pipeline_model_parallel_size: int = flag(1, "ranks that share the layers (pp)")
    context_parallel_size: int = flag(1, "ranks that share each sequence (cp)")
    cp_comm_type: tuple[str, ...] = flag(("p2p",), "how attention sees the whole sequence, for all layers or one each: p2p sends "
        "keys and values around a ring, a2a trades sequence for heads (Ulysses), allgather gathers keys and values, a2a+p2p does "
        "the first two", nargs="+", type=str, choices=("p2p", "a2a", "allgather", "a2a+p2p"))  # fmt: skip
    ulysses_degree: int | None = flag(None, "ranks of the context-parallel axis that trade heads under a2a+p2p; the rest is the "
        "ring", type=int)  # fmt: skip
    expert_model_parallel_size: int = flag(1, "ranks that share the experts (ep); they are taken from dp x cp")
    expert_tensor_parallel_size: int | None = flag(None, "ranks that share each expert's matrices: 1 or tp (default: tp)",
        type=int)  # fmt: skip
    pipeline_schedule: str = flag("1f1b", "order of forwards and backwards on each pipeline rank (see docs/parallelism.md)",
        choices=(*EVERY, "auto"))  # fmt: skip
    pipeline_memory_limit: float | None = flag(None, "most microbatches of activations per pipeline rank, in units of its share "
        "of the layers, that --pipeline-schedule auto may choose to hold (default: no limit)", type=float)  # fmt: skip
    pipeline_split: str = flag("even", "layers per stage: even, or auto: as many as make all ranks take equally long, embedding "
        "and output layer counted (--pipeline-schedule auto tries both)", choices=("even", "auto"))  # fmt: skip
    pipeline_schedule_file: str | None = flag(None, "text file with a list of actions for each pipeline rank, instead of a "
        "schedule by name (see docs/parallelism.md)", type=str)  # fmt: skip
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "chunks per pipeline rank; with 1f1b 2 or more interleave "
        "them (default: as many as the schedule needs, 1 or 2)", type=int)  # fmt: skip
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "the same, given as layers per chunk", type=int)
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(None, "microbatches that go through one chunk before "
        "the next chunk's turn (interleaved; default: as many as pipeline ranks)", type=int)  # fmt: skip
    pipeline_drain_interval: int = flag(100, "steps after which an asynchronous pipeline runs empty; it does too before it "
        "evaluates, saves, or ends")  # fmt: skip
    pipemare_annealing_iters: int | None = flag(None, "steps in which pipemare's rates rise from lr / delay to lr; 0: at once "
        "(default: 5 x the warm-up, without one a quarter of the run)", type=int)  # fmt: skip
    pipemare_correction_decay: float = flag(0.135, "D of pipemare's estimate of the forward's weights for the backward; 0: none")
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers on the first stage (default: an even split)", type=int)
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers on the last stage (default: an even split)", type=int)
    grad_reduce_dtype: str = flag("fp32", "what gradients travel as between data-parallel ranks; sums are in fp32 either way",
        choices=("fp32", "bf16"), stands_for=("--grad-reduce-in-bf16", "bf16"))  # fmt: skip
    grad_compression: str = flag("none", "what travels of gradient matrices between data-parallel ranks: all, or by powersgd two "
        "factors of low rank, the rest of it in later steps", choices=("none", "powersgd"))  # fmt: skip
    grad_compression_rank: int = flag(4, "columns of the two factors; more are more exact, and more bytes")
    grad_compression_start_iter: int = flag(0, "first iterations, whose gradients are reduced exactly")
    no_overlap_grad_reduce: bool = flag(False, "reduce gradients after the last backward instead of inside it")
    zero_stage: int = flag(0, "what dp x cp shards: 0 nothing, 1 masters and moments, 2 also gradients, 3 also parameters",
        choices=(0, 1, 2, 3), stands_for=("--use-distributed-optimizer", 1))  # fmt: skip
    data_parallel_sharding_strategy: str | None = flag(None, "--zero-stage by Megatron's names: 0, 1, 2, 3 in this order",
        type=str, choices=SHARDING_STRATEGIES)  # fmt: skip
    zero_replica_size: int = flag(1, "complete copies of what ZeRO shards (hybrid shard); dp x cp / this many ranks share one",
        alias="--num-distributed-optimizer-instances")  # fmt: skip
    no_overlap_param_gather: bool = flag(False, "gather parameters when they are needed instead of ahead of it")
    zero_prefetch_limit: int = flag(1, "units (layers) whose parameters are gathered ahead, and whose gradients of --zero-stage "
        "2 and 3 are on their way, at once")  # fmt: skip
    ddp_bucket_size: int | None = flag(None, "parameters per gradient bucket (default: one transformer layer each)", type=int)
    distributed_backend: str | None = flag(None, "nccl or gloo (default: nccl with CUDA, gloo without)", type=str,
        choices=("nccl", "gloo"))  # fmt: skip
    distributed_timeout_minutes: float = flag(10.0, "a collective that waits longer ends the run")

    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        return self.expert_tensor_parallel_size or self.tp

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size


@dataclass(frozen=True)
class ActivationConfig:
    """activation memory"""

    recompute_granularity: str | None = flag(None, "compute activations again in the backward: single ones of every layer, or "
        "layers as a whole", type=str, choices=("selective", "full"),
        stands_for=("--recompute-activations", "selective"))  # fmt: skip
    recompute_method: str | None = flag(None, "full: units of N layers, or the first N layers of each chunk", type=str,
        choices=("uniform", "block"))  # fmt: skip
    recompute_num_layers: int | None = flag(None, "the N of --recompute-method", type=int)
    recompute_modules: tuple[str, ...] | None = flag(None, "selective: what is recomputed (default: core_attn)", nargs="+",
        type=str, choices=("core_attn", "layernorm", "mlp_act"))  # fmt: skip
    cpu_offloading_num_layers: int = flag(0, "first layers of each chunk whose activations wait in host memory (GPU)")

    @property
    def modules(self) -> tuple[str, ...]:
        """What selective recomputation computes again; empty without it."""
        return (self.recompute_modules or ("core_attn",)) if self.recompute_granularity == "selective" else ()
