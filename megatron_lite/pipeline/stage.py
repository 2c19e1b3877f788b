"""The chunks of the model that one pipeline rank holds."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.context import ContextParallel
from megatron_lite.parallel.expert import ExpertParallel
from megatron_lite.parallel.fp8 import Fp8Recipe
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.planner.pipeline import Chunk, Pipeline


def build_chunks(config: Config, mesh: Mesh, pipeline: Pipeline) -> list[TransformerStage]:
    """This rank's chunks, in chunk order, uninitialised."""
    return [build_chunk(config, mesh, chunk) for chunk in pipeline.chunks(mesh.pp.rank)]


def build_chunk(config: Config, mesh: Mesh, chunk: Chunk) -> TransformerStage:
    parallel = config.parallel
    dtype = getattr(torch, config.precision.dtype_name)
    tp = TensorParallel(mesh.tp, parallel.sequence_parallel and mesh.tp.size > 1, dtype, mesh.device,
                        Fp8Recipe.of(config.precision), ContextParallel.of(mesh, parallel.cp_comm_type))  # fmt: skip
    vocab = config.data.vocab_size, config.padded_vocab_size
    plain = {0, config.model.num_layers - 1} if config.precision.first_last_layers_bf16 else set()
    experts = ExpertParallel(mesh.ep, mesh.cp, cut=parallel.etp > 1)
    stage = TransformerStage(config.model, *vocab, chunk.layers, chunk.first, chunk.last, tp, config.activations, plain, experts)
    if chunk.copy:
        for param in stage.parameters():
            param.shard = replace(param.shard, tied=True)
    return stage
