"""megatron_lite in the speed table: its own trainer and step, fed with the table's weights and tokens."""

import torch

from benchmarks.peers.spec import BETAS, CLIP, EPS, INIT_STD, LR, NORM_EPS, ROPE_BASE, WEIGHT_DECAY, Spec
from megatron_lite.checkpoint.boxes import flat_requests
from megatron_lite.comm.launch import keep_heap
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megatron_lite.data.loader import Batch
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import tensors
from megatron_lite.training.step import train_step


def config_of(spec: Spec) -> Config:
    """The table's model, layout and recipe as a configuration."""
    shape = spec.shape
    model = ModelConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn, num_attention_heads=shape.heads,
        group_query_attention=True, num_query_groups=shape.kv_heads, kv_channels=shape.head_dim, seq_length=shape.seq,
        max_position_embeddings=shape.seq, position_embedding_type="rope", rotary_base=ROPE_BASE, normalization="RMSNorm",
        norm_epsilon=NORM_EPS, swiglu=True, disable_bias_linear=True, untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=INIT_STD)  # fmt: skip
    split = spec.options.get("split", [None, None])
    parallel = ParallelConfig(
        tensor_model_parallel_size=spec.world if spec.group == "tp" else 1, sequence_parallel=spec.group == "tp",
        pipeline_model_parallel_size=spec.world if spec.group == "pp" else 1,
        pipeline_schedule=spec.options.get("schedule", "1f1b"),
        decoder_first_pipeline_num_layers=split[0], decoder_last_pipeline_num_layers=split[1],
        zero_stage=spec.options.get("zero_stage", 0))  # fmt: skip
    optimizer = OptimizerConfig(lr=LR, lr_decay_style="constant", weight_decay=WEIGHT_DECAY, clip_grad=CLIP,
                                adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS)  # fmt: skip
    train = TrainConfig(micro_batch_size=spec.micro_batch, global_batch_size=spec.global_batch, train_iters=1000,
                        compile=spec.compile)  # fmt: skip
    return Config(model=model, parallel=parallel, optimizer=optimizer, precision=PrecisionConfig(bf16=spec.dtype == "bf16"),
                  data=DataConfig(vocab_size=shape.vocab), train=train)  # fmt: skip


class Ours:
    """The trainer behind the table's protocol."""

    def __init__(self, spec: Spec):
        self.spec, self.done = spec, 0
        keep_heap()
        if spec.world > 1:
            spec.init_process_group()
        config = config_of(spec)
        self.mesh = build_mesh(grid_of(config, spec.world), torch.device("cpu"))
        self.trainer = build_trainer(config, self.mesh)
        held = [part for _, part in tensors(self.trainer, optim=False)]
        wanted = {hf_name(box.name) for _, shard, *_ in held for box in shard.boxes}
        weights = spec.load_weights(wanted.__contains__)
        for request in (request for part in held for request in flat_requests(*part)):
            place = tuple(slice(o, o + n) for o, n in zip(request.offset, request.length, strict=True))
            request.tensor.copy_(weights[hf_name(request.key.removeprefix("model/"))][place])
        self.trainer.optimizer.write_back()
        self.trainer.engine.parameters_changed()

    def batches(self, ids: torch.Tensor) -> list[Batch]:
        """This rank's microbatches of the step's [global_batch, seq + 1] token ids."""
        mine = ids.chunk(self.mesh.dp.size)[self.mesh.dp.rank]
        return [Batch(part[:, :-1], part[:, 1:], torch.ones(part.shape[0], part.shape[1] - 1))
                for part in mine.split(self.spec.micro_batch)]  # fmt: skip

    def run_steps(self, steps: int) -> dict:
        """Run steps on the next batches of the stream."""
        losses, norms = [], []
        for _ in range(steps):
            report = train_step(self.trainer, self.batches(self.spec.batch(self.done)), self.done, 0)
            self.done += 1
            losses.append(report.loss)
            norms.append(report.grad_norm)
        return {"losses": losses, "norms": norms}


def hf_name(name: str) -> str:
    """Canonical name -> Hugging Face's."""
    return name if name.startswith("lm_head") else f"model.{name}"


def build(spec: Spec) -> Ours:
    return Ours(spec)
