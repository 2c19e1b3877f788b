"""Every setting of a run, once: name, default, legend.

A field is a flag: `num_layers` is `--num-layers`. `arguments.py` turns the fields into an argparse parser and back, so a
legend is written here and nowhere else; each file holds the groups of one concern. Names and defaults are Megatron's where
Megatron has them. The dataclasses are frozen: what is derived (head size, padded vocabulary, number of microbatches) is a
property or is filled in by `arguments.resolve`, never assigned later.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from megatron_lite.config.data import DataConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.outputs import CheckpointConfig, LoggingConfig
from megatron_lite.config.parallel import SHARDING_STRATEGIES, ActivationConfig, ParallelConfig
from megatron_lite.config.training import OptimizerConfig, PrecisionConfig, TrainConfig
from megatron_lite.grid import Grid

__all__ = ["GROUPS", "SHARDING_STRATEGIES", "ActivationConfig", "CheckpointConfig", "Config", "DataConfig", "LoggingConfig",
           "ModelConfig", "OptimizerConfig", "ParallelConfig", "PrecisionConfig", "TrainConfig"]  # fmt: skip

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
        parallel = self.parallel
        return Grid(tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, dp=self.data_parallel_size, pp=parallel.pp,
                    zero_replicas=parallel.zero_replica_size, ulysses=parallel.ulysses_degree or 1)  # fmt: skip

    @property
    def data_parallel_size(self) -> int:
        return self.train.world_size // (self.parallel.tp * self.parallel.cp * self.parallel.pp)

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
        """Plain nested dictionary, for JSON, W&B and the checkpoint: equal to what is read back from there."""
        return {name: {f.name: _plain(getattr(getattr(self, name), f.name)) for f in fields(group)}
                for name, group in GROUPS.items()}  # fmt: skip


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
