"""Every setting of a run, once: name, default, legend.

A field is a flag: `num_layers` is `--num-layers`. `arguments.py` turns the fields into an argparse parser and back, so a
legend is written here and nowhere else. Names and defaults are Megatron's where Megatron has them. The dataclasses are
frozen: what is derived (head size, padded vocabulary, number of microbatches) is a property or is filled in by
`arguments.resolve`, never assigned later.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from megatron_lite.grid import Grid
from megatron_lite.rampup import BatchSizes, is_ramp
from megatron_lite.schedules import EVERY

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # their place is the ZeRO stage


def flag(default: Any, legend: str, **options: Any) -> Any:
    """A dataclass field that is also a command-line flag.

    `options`: `choices`, `nargs`, `type` as in argparse; `alias`, another spelling; `stands_for` = (switch, value), a
    switch that means this value.
    """
    return field(default=default, metadata={"help": legend, **options})


@dataclass(frozen=True)
class ModelConfig:
    """model"""

    model: str | None = flag(None, "preset whose sizes are the defaults of the flags below (see docs/models.md)", type=str)
    num_layers: int | None = flag(None, "transformer layers", type=int)
    hidden_size: int | None = flag(None, "width of the residual stream", type=int)
    ffn_hidden_size: int | None = flag(None, "width of the MLP (default 4h; with --swiglu 2/3 of that, multiple of 64)", type=int)
    num_attention_heads: int | None = flag(None, "query heads", type=int)
    group_query_attention: bool = flag(False, "share key/value heads between query heads")
    num_query_groups: int | None = flag(None, "key/value heads (needs --group-query-attention)", type=int)
    kv_channels: int | None = flag(None, "size of one head (default hidden / heads)", type=int)
    seq_length: int | None = flag(None, "tokens per sample", type=int)
    max_position_embeddings: int | None = flag(None, "longest sequence the positions allow (default --seq-length)", type=int)
    position_embedding_type: str = flag("learned_absolute", "how positions enter", choices=("learned_absolute", "rope", "none"),
        stands_for=("--use-rotary-position-embeddings", "rope"))  # fmt: skip
    rotary_base: float = flag(10000.0, "RoPE theta")
    rotary_percent: float = flag(1.0, "share of each head that RoPE turns")
    rotary_interleaved: bool = flag(False, "RoPE pairs neighbours (2i, 2i+1) instead of halves (i, i + d/2)")
    rotary_seq_len_interpolation_factor: float | None = flag(None, "linear RoPE scaling: positions are divided by it", type=float)
    use_rope_scaling: bool = flag(False, "LLaMA-3's frequency-dependent RoPE scaling")
    rope_scaling_factor: float = flag(8.0, "LLaMA-3 RoPE scaling: factor")
    rope_low_freq_factor: float = flag(1.0, "LLaMA-3 RoPE scaling: low frequency factor")
    rope_high_freq_factor: float = flag(4.0, "LLaMA-3 RoPE scaling: high frequency factor")
    rope_original_max_position: int = flag(8192, "LLaMA-3 RoPE scaling: context length before scaling")
    normalization: str = flag("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "epsilon inside the norms")
    swiglu: bool = flag(False, "gated MLP: down(silu(gate) * up)")
    openai_gelu: bool = flag(False, "tanh form of GELU, as GPT-2 used")
    disable_bias_linear: bool = flag(False, "no biases in the linears")
    add_qkv_bias: bool = flag(False, "bias in the QKV projection only")
    qk_layernorm: bool = flag(False, "norm on every query and key head")
    untie_embeddings_and_output_weights: bool = flag(False, "separate output weights")
    make_vocab_size_divisible_by: int = flag(128, "the vocabulary is padded to a multiple of this times tp, never trained")
    hidden_dropout: float = flag(0.1, "dropout after embedding, attention and MLP")
    attention_dropout: float = flag(0.1, "dropout on attention probabilities")
    init_method_std: float = flag(0.02, "standard deviation of initial weights; output projections get std/sqrt(2 layers)")
    label_smoothing: float = flag(0.0, "share of the target spread over the true vocabulary")

    @property
    def head_dim(self) -> int:
        return self.kv_channels

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def qkv_bias(self) -> bool:
        return self.add_qkv_bias or not self.disable_bias_linear


@dataclass(frozen=True)
class ParallelConfig:
    """parallelism"""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer's matrices (tp)")
    sequence_parallel: bool = flag(False, "cut the activations between tensor-parallel regions over tp along the sequence")
    pipeline_model_parallel_size: int = flag(1, "ranks that share the layers (pp)")
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


@dataclass(frozen=True)
class OptimizerConfig:
    """optimizer"""

    optimizer: str = flag("adam", "adam is AdamW (decoupled weight decay); sgd has momentum", choices=("adam", "sgd"))
    lr: float | None = flag(None, "peak learning rate", type=float)
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = flag("linear", "shape of the decay",
        choices=("constant", "linear", "cosine", "WSD", "inverse-square-root"))  # fmt: skip
    lr_decay_iters: int | None = flag(None, "iterations over which the rate decays (default --train-iters)", type=int)
    lr_decay_samples: int | None = flag(None, "samples over which the rate decays (default --train-samples)", type=int)
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "share of the decay length spent in warm-up", type=float)
    lr_warmup_init: float = flag(0.0, "learning rate that the warm-up starts from")
    lr_wsd_decay_style: str = flag("exponential", "shape of WSD's final decay",
        choices=("exponential", "linear", "cosine", "minus_sqrt"))  # fmt: skip
    lr_wsd_decay_iters: int | None = flag(None, "iterations of WSD's final decay", type=int)
    lr_wsd_decay_samples: int | None = flag(None, "samples of WSD's final decay", type=int)
    weight_decay: float = flag(0.01, "decay of matrices (never of norms and biases)")
    clip_grad: float = flag(1.0, "largest global gradient norm; 0 turns clipping off")
    adam_beta1: float = flag(0.9, "AdamW beta 1")
    adam_beta2: float = flag(0.999, "AdamW beta 2")
    adam_eps: float = flag(1e-8, "AdamW epsilon")
    sgd_momentum: float = flag(0.9, "momentum of --optimizer sgd")


@dataclass(frozen=True)
class PrecisionConfig:
    """precision"""

    bf16: bool = flag(False, "bf16 weights and activations; fp32 master weights, moments and gradient sums")
    fp16: bool = flag(False, "fp16 weights and activations, a loss scale; fp32 master weights, moments and gradient sums")
    fp64: bool = flag(False, "double precision throughout, for parity tests")
    loss_scale: float | None = flag(None, "constant loss scale of --fp16 (default: a dynamic one)", type=float)
    initial_loss_scale: float = flag(2.0**32, "dynamic loss scale: where it starts")
    min_loss_scale: float = flag(1.0, "dynamic loss scale: it never falls below")
    loss_scale_window: int = flag(1000, "dynamic loss scale: steps in a row without overflow after which it doubles")
    hysteresis: int = flag(2, "dynamic loss scale: overflows before it is halved; renewed when it doubles")
    fp8_format: str | None = flag(None, "linears of the layers multiply in 8 bits (with --bf16): e4m3 throughout, or hybrid: "
        "gradients in e5m2", type=str, choices=("e4m3", "hybrid"))  # fmt: skip
    fp8_recipe: str = flag("delayed", "scales from a tensor's last uses (delayed) or from itself (tensorwise)",
        choices=("delayed", "tensorwise"))  # fmt: skip
    fp8_amax_history_len: int = flag(1, "delayed scaling: uses whose largest value sets the scale")
    fp8_margin: int = flag(0, "scales are lower by 2 to this power")
    first_last_layers_bf16: bool = flag(False, "the first and the last layer do not multiply in 8 bits")

    @property
    def dtype_name(self) -> str:
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float64" if self.fp64 else "float32"

    @property
    def master_weights(self) -> bool:
        """Whether the optimizer keeps fp32 weights beside 16-bit ones."""
        return self.bf16 or self.fp16


@dataclass(frozen=True)
class DataConfig:
    """data"""

    data_path: tuple[str, ...] | None = flag(None, "prefix of a .bin/.idx pair; several are mixed by size, or by weights given "
        "as: weight prefix weight prefix ...", nargs="+", type=str)  # fmt: skip
    train_data_path: tuple[str, ...] | None = flag(None, "the same for training alone, instead of --data-path and --split",
        nargs="+", type=str)  # fmt: skip
    valid_data_path: tuple[str, ...] | None = flag(None, "the same for validation; name=prefix begins a set of that name, as in: "
        "web=A code=B C, each of which is scored alone", nargs="+", type=str)  # fmt: skip
    dataset_name: str | None = flag(None, "Hugging Face data set, by name or folder, that training text is streamed from",
        type=str)  # fmt: skip
    dataset_config: str | None = flag(None, "configuration of --dataset-name", type=str)
    dataset_split: str = flag("train", "part of --dataset-name that is trained on")
    dataset_text_key: str = flag("text", "column of --dataset-name that holds the text")
    test_data_path: tuple[str, ...] | None = flag(None, "the same for a test at the end of the run", nargs="+", type=str)
    data_args_path: str | None = flag(None, "file that holds what --data-path would be given", type=str)
    data_schedule: str | None = flag(None, "file whose lines are a sample number and what --data-path would be given from there, "
        "for training (curriculum)", type=str)  # fmt: skip
    data_order: str = flag("keyed", "order of samples: keyed (nothing to build, the same for runs of any length) or megatron, to "
        "continue a run of Megatron's", choices=("keyed", "megatron"))  # fmt: skip
    data_cache_path: str | None = flag(None, "folder for the index of --data-order megatron (default: PREFIX_cache)", type=str)
    split: str = flag("969,30,1", "shares of the documents for training, validation, test", type=str)
    mock_data: bool = flag(False, "made-up tokens instead of --data-path")
    tokenizer_type: str | None = flag(None, "tokenizer", type=str,
        choices=("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPT2BPETokenizer", "TikTokenizer", "ByteTokenizer",
                 "NullTokenizer"))  # fmt: skip
    tokenizer_model: str | None = flag(None, "folder or file of the tokenizer", type=str)
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer", type=str)
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer", type=str)
    tiktoken_pattern: str | None = flag(None, "how TikTokenizer cuts text into words (default: v2 for Megatron's JSON, by number "
        "of ranks for a .tiktoken file)", type=str, choices=("v1", "v2"))  # fmt: skip
    tiktoken_num_special_tokens: int | None = flag(None, "ids before those of Megatron's JSON for TikTokenizer (default: 1000)",
        type=int)  # fmt: skip
    vocab_size: int | None = flag(None, "true vocabulary (default: the tokenizer's)", type=int)
    eod_mask_loss: bool = flag(False, "no loss where the input token is the end of a document")
    reset_position_ids: bool = flag(False, "positions start again at 0 behind the end of a document")
    reset_attention_mask: bool = flag(False, "attention stays within a document")
    fim_rate: float = flag(0.0, "share of the documents that are turned for fill-in-the-middle: prefix, suffix, then the middle")
    fim_spm_rate: float = flag(0.5, "share of those that have the suffix first (SPM), not the prefix (PSM)")
    fim_prefix_id: int | None = flag(None, "id of the token that marks the prefix", type=int)
    fim_middle_id: int | None = flag(None, "id of the token that marks the middle", type=int)
    fim_suffix_id: int | None = flag(None, "id of the token that marks the suffix", type=int)
    num_workers: int = flag(2, "steps the loader reads ahead in the background; 0 reads in line")

    @property
    def needs_eod(self) -> bool:
        """Whether the id that ends a document must be known."""
        return self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask or self.fim_rate > 0


@dataclass(frozen=True)
class TrainConfig:
    """training"""

    micro_batch_size: int | None = flag(None, "samples per forward pass on one data-parallel rank", type=int)
    global_batch_size: int | None = flag(None, "samples per step (default micro-batch times dp)", type=int)
    rampup_batch_size: tuple[int, ...] | None = flag(None, "START INCREMENT SAMPLES: steps begin with START samples and take "
        "INCREMENT more after equal parts of SAMPLES, up to --global-batch-size (needs --train-samples)", nargs="+",
        type=int)  # fmt: skip
    train_iters: int | None = flag(None, "steps to train", type=int)
    train_samples: int | None = flag(None, "samples to train, instead of --train-iters", type=int)
    iterations_to_skip: tuple[int, ...] | None = flag(None, "iterations, as the log line counts them, that consume their samples "
        "and train nothing", nargs="+", type=int)  # fmt: skip
    exit_interval: int | None = flag(None, "stop (and save) at iterations divisible by this", type=int)
    exit_duration_in_mins: float | None = flag(None, "stop (and save) after so many minutes", type=float)
    max_consecutive_skips: int = flag(10, "steps in a row without a finite loss and gradient that end the run; "
        "overflows for which --fp16 has a lower loss scale to try are not counted")  # fmt: skip
    eval_iters: int = flag(100, "batches per evaluation")
    eval_interval: int | None = flag(None, "iterations between evaluations (default: none)", type=int)
    full_validation: bool = flag(False, "an evaluation scores every sample of each validation set once, not --eval-iters batches")
    seed: int = flag(1234, "seed of weights, data order and dropout")
    compile: bool = flag(False, "torch.compile the element-wise parts of every layer")
    dry_run: bool = flag(False, "print grid, stages, schedule, parameters and memory per rank, then exit")
    world_size: int | None = flag(None, "ranks to plan for (given with --dry-run; otherwise it is the launcher's)", type=int)
    cluster: str | None = flag(None, "what --dry-run plans for: a100, h100, h200, b200, this, or a JSON file (docs/planning.md)",
        type=str)  # fmt: skip

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples of every step of the run."""
        ramp = self.rampup_batch_size
        return BatchSizes(self.global_batch_size, ramp if is_ramp(ramp, self.global_batch_size) else None)


@dataclass(frozen=True)
class CheckpointConfig:
    """checkpoint"""

    save: str | None = flag(None, "folder that checkpoints are written to", type=str)
    load: str | None = flag(None, "folder that the newest checkpoint is read from", type=str)
    save_interval: int | None = flag(None, "iterations between checkpoints (the last iteration is always saved)", type=int,
        alias="--persistent-save-interval")  # fmt: skip
    save_interval_minutes: float | None = flag(None, "minutes between checkpoints, by rank 0's clock", type=float)
    save_weights_only_interval: int | None = flag(None, "iterations between copies of the weights alone, in the dtype they are "
        "trained in, in the folder weights/ under --save", type=int)  # fmt: skip
    save_retain: int | None = flag(None, "newest checkpoints that are kept; older ones go once it is safe (default: all)",
        type=int)  # fmt: skip
    async_save: bool = flag(False, "write checkpoints behind the training: a step waits only for a copy in host memory")
    peer_checkpoint_interval: int = flag(0, "iterations between copies of each rank's state in another node's host memory and on "
        "the local disk, from which a restart goes on first; 0: none")  # fmt: skip
    peer_checkpoint_dir: str | None = flag(None, "folder on the local disk for these copies (default: the system's folder for "
        "temporary files)", type=str)  # fmt: skip
    no_save_optim: bool = flag(False, "save weights only")
    load_iteration: int | None = flag(None, "iteration to load (default: the newest)", type=int, alias="--ckpt-step")
    no_verify_checkpoint: bool = flag(False, "load without comparing checksums")
    use_checkpoint_args: bool = flag(False, "take architecture and tokenizer from the checkpoint in --load")
    no_load_optim: bool = flag(False, "load weights only, keep iteration and data position")
    finetune: bool = flag(False, "load weights only, start at iteration 0")


@dataclass(frozen=True)
class LoggingConfig:
    """logging"""

    log_interval: int = flag(100, "iterations between log lines")
    jsonl: str | None = flag(None, "file that gets one JSON object per log line", type=str)
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard", type=str)
    wandb_project: str | None = flag(None, "Weights & Biases project; turns W&B on", type=str)
    wandb_exp_name: str | None = flag(None, "name of the run in W&B", type=str)
    wandb_entity: str | None = flag(None, "W&B team or user", type=str)
    wandb_save_dir: str | None = flag(None, "folder for W&B's files (default: --save, else the working folder)", type=str)
    log_memory: bool = flag(False, "after the first step print what memory is for, beside the measured peak")
    log_params_norm: bool = flag(False, "add the norm of the parameters to the log line")
    trace_dir: str | None = flag(None, "folder for what each rank did and when, one file per rank and step (tools/trace.py)",
        type=str)  # fmt: skip
    trace_start: int | None = flag(None, "first iteration that is traced (default: the second of this run)", type=int)
    trace_steps: int = flag(3, "iterations that are traced")
    peak_tflops: float | None = flag(None, "peak of one device for MFU (default: a known GPU's, measured on CPU)", type=float)


GROUPS = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "activations": ActivationConfig,
    "optimizer": OptimizerConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


@dataclass(frozen=True)
class Config:
    """All groups of a run, and what follows from them together."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def grid(self) -> Grid:
        """The run's grid; the world size is filled in by `arguments.resolve`."""
        return Grid(tp=self.parallel.tp, dp=self.data_parallel_size, pp=self.parallel.pp,
                    zero_replicas=self.parallel.zero_replica_size)  # fmt: skip

    @property
    def data_parallel_size(self) -> int:
        return self.train.world_size // (self.parallel.tp * self.parallel.pp)

    @property
    def num_microbatches(self) -> int:
        """Forward passes per step on each data-parallel rank."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_parallel_size)

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up to a multiple of --make-vocab-size-divisible-by x tp (the padding never enters the loss)."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tp
        return -(-self.data.vocab_size // multiple) * multiple

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dictionary, for JSON, W&B and the checkpoint."""
        return {name: {f.name: getattr(getattr(self, name), f.name) for f in fields(group)} for name, group in GROUPS.items()}
