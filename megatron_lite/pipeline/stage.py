"""The chunks of the model that one pipeline rank holds."""

from __future__ import annotations

import torch

from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import Config
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.planner.split import layer_ranges
from megatron_lite.schedules.actions import Placement


def build_chunks(config: Config, mesh: Mesh, placement: Placement) -> list[TransformerStage]:
    """This rank's chunks, in chunk order, uninitialised. Stage i of the placement holds the i-th range of layers."""
    parallel, model = config.parallel, config.model
    dtype = getattr(torch, config.precision.dtype_name)
    tp = TensorParallel(mesh.tp, parallel.sequence_parallel and mesh.tp.size > 1, dtype, mesh.device)
    ranges = layer_ranges(model.num_layers, placement.num_stages, parallel.decoder_first_pipeline_num_layers,
                          parallel.decoder_last_pipeline_num_layers)  # fmt: skip
    chunks = []
    for chunk in range(placement.num_chunks):
        stage = placement.stage(mesh.pp.rank, chunk)
        first, last = stage == 0, stage == placement.num_stages - 1
        chunks.append(TransformerStage(model, config.data.vocab_size, config.padded_vocab_size, ranges[stage], first, last, tp))
    return chunks
