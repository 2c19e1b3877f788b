"""Every preset at several layouts: parameters, tensors of each unit and gradient buckets are those of the model that is built
(on the meta device: shapes without memory)."""

import pytest
import torch

from megatron_lite.arguments import parse
from megatron_lite.comm.mesh import Axis, Mesh, single
from megatron_lite.models.zoo import PRESETS
from megatron_lite.optim.buckets import layout
from megatron_lite.pipeline.stage import build_chunks
from megatron_lite.planner.params import partial_elements, rank_parameters, unit_tensors
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.planner.search import cuts_evenly
from megatron_lite.planner.traffic import bucket_sizes

LAYOUTS = [(1, 1, 1, ""), (2, 2, 1, "--sequence-parallel"), (8, 4, 2, ""), (4, 2, 1, "--num-virtual-stages-per-pipeline-rank 2"),
           (1, 3, 2, "--pipeline-schedule zbv")]  # fmt: skip
FAST = ("gpt2", "llama3.2-1b", "qwen2.5-0.5b")


def config_of(name, tp, pp, dp, flags):
    command = (f"--model {name} --micro-batch-size 1 --global-batch-size {16 * dp} --tensor-model-parallel-size {tp} "
               f"--pipeline-model-parallel-size {pp} {flags} --dry-run --world-size {tp * pp * dp}")  # fmt: skip
    return parse(command.split(), 1)


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in PRESETS])
def test_the_model_that_is_built(name):
    base, checked = config_of(name, 1, 1, 1, "")[0], 0
    for tp, pp, dp, flags in LAYOUTS:
        if not cuts_evenly(base, tp):
            continue
        config, problems = config_of(name, tp, pp, dp, flags)
        assert problems == []
        pipeline = pipeline_of(config)
        for rank in sorted({0, pp // 2, pp - 1}):
            axes = single().axes | {"tp": Axis("tp", rank=tp - 1, ranks=tuple(range(tp))),
                                    "pp": Axis("pp", rank=rank, ranks=tuple(range(pp)))}  # fmt: skip
            built = build_chunks(config, Mesh(config.grid, 0, torch.device("meta"), axes), pipeline)
            assert sum(p.numel() for chunk in built for p in chunk.parameters()) == rank_parameters(config, rank, pipeline)
            for chunk, plan in zip(built, pipeline.chunks(rank), strict=True):
                units = [sorted(p.numel() for p in params) for _, params in chunk.units()]
                assert [sorted(unit) for unit in unit_tensors(config, plan)] == units
                sizes = [bucket.size for bucket in layout([[(0, n) for n in unit] for unit in units], dp)]
                assert bucket_sizes(config, plan) == sizes
                partial = sum(box.of_full(torch.empty(box.full_shape, device="meta")).numel() * (tp // box.copies)
                              for p in chunk.parameters() for box in p.shard.boxes if box.partial)  # fmt: skip
                assert partial_elements(config, plan) == (partial if tp > 1 else 0)
            checked += 1
    assert checked >= 2
