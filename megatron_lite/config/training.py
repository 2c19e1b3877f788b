"""Flags of the step: optimizer, precision, batch and length of the run."""

from dataclasses import dataclass

from megatron_lite.config.flag import flag
from megatron_lite.rampup import BatchSizes, is_ramp


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
