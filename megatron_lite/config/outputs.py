"""Flags of what a run leaves behind: checkpoints and logs."""

from dataclasses import dataclass

from megatron_lite.config.flag import flag


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
    wandb_group: str | None = flag(None, "group of runs in W&B that this one belongs to", type=str)
    wandb_tags: tuple[str, ...] | None = flag(None, "tags of the run in W&B", type=str, nargs="+")
    wandb_save_dir: str | None = flag(None, "folder for W&B's files (default: --save, else the working folder)", type=str)
    log_memory: bool = flag(False, "after the first step print what memory is for, beside the measured peak")
    log_params_norm: bool = flag(False, "add the norm of the parameters to the log line")
    trace_dir: str | None = flag(None, "folder for what each rank did and when, one file per rank and step (tools/trace.py)",
        type=str)  # fmt: skip
    trace_start: int | None = flag(None, "first iteration that is traced (default: the second of this run)", type=int)
    trace_steps: int = flag(3, "iterations that are traced")
    profile: bool = flag(False, "run torch's profiler over some iterations: one Chrome trace per profiled rank")
    profile_step_start: int = flag(10, "first iteration that is profiled")
    profile_step_end: int = flag(12, "iteration before which the profile ends")
    profile_ranks: tuple[int, ...] = flag((0,), "ranks that are profiled", type=int, nargs="+")
    peak_tflops: float | None = flag(None, "peak of one device for MFU (default: a known GPU's, measured on CPU)", type=float)
