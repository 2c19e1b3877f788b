"""Memory of twelve layouts: the plan against the run's own ledger within 5 %, and against resident memory within 10 %."""

import dataclasses

import pytest
import torch
from layouts import GPT, LLAMA, config_for, local_batches

from benchmarks.memory import STATE_MODEL, configuration, private_memory
from megatron_lite.comm.launch import WorkerPool
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import ActivationConfig
from megatron_lite.data.loader import Batch
from megatron_lite.planner.memory import stage_memory
from megatron_lite.training.ledger import Ledger
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

FULL = ActivationConfig("full", "uniform", 1)
LAYOUTS = {  # name -> (ranks, flags, activations)
    "tp2": (2, {"tp": 2}, None),
    "tp2 sp": (2, {"tp": 2, "sp": True}, None),
    "tp4 sp full": (4, {"tp": 4, "sp": True}, FULL),
    "pp2": (2, {"pp": 2}, None),
    "pp4 full": (4, {"pp": 4}, FULL),
    "pp2 gpipe": (2, {"pp": 2, "pipeline_schedule": "gpipe"}, None),
    "pp2 interleaved": (2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}, None),
    "dp2": (2, {}, None),
    "dp2 zero1": (2, {"zero_stage": 1}, None),
    "dp4 zero2": (4, {"zero_stage": 2}, None),
    "dp4 zero3": (4, {"zero_stage": 3}, None),
    "tp2 pp2 zero1": (4, {"tp": 2, "sp": True, "pp": 2}, None),
    "pp2 dp2 zero1": (4, {"pp": 2, "zero_stage": 1}, FULL),
}


def ledger(rank, world, config):
    mesh = build_mesh(grid_of(config, world), torch.device("cpu"))
    trainer = build_trainer(config, mesh)
    watch = Ledger(trainer)
    with watch.watching():
        train_step(trainer, local_batches(config, mesh, 0), 0, 0)
    return mesh.pp.rank, {name: size for name, size in watch.bytes().items() if name != "buffers"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_is_the_ledger(pool, name):
    world, flags, activations = LAYOUTS[name]
    model = dataclasses.replace(LLAMA if "tp" in name else GPT, hidden_dropout=0.1, attention_dropout=0.1, hidden_size=128,
                                ffn_hidden_size=256, kv_channels=16)  # fmt: skip
    config = config_for(model, precision="bf16", **flags)
    config = dataclasses.replace(config, activations=activations or config.activations,
                                 train=dataclasses.replace(config.train, world_size=world))  # fmt: skip
    plan = stage_memory(config)
    for stage, entries in pool.run(ledger, world, world, config):
        assert entries.pop("transient") == pytest.approx(plan[stage].transient, rel=0.05), plan[stage]
        planned = plan[stage].total - plan[stage].transient
        assert sum(entries.values()) == pytest.approx(planned, rel=0.05), (entries, plan[stage])


def resident(rank, world, flags):
    """(growth of private memory, the plan's state) of this rank: few tokens, many parameters."""
    config = configuration(flags, world)
    mesh = build_mesh(grid_of(config, world), torch.device("cpu"))
    ids = torch.zeros(config.train.micro_batch_size, config.model.seq_length)
    batches = [Batch(ids.long(), ids.long(), ids + 1)] * config.num_microbatches
    layers = config.parallel.pp * (config.parallel.num_virtual_stages_per_pipeline_rank or 1)
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))
    train_step(build_trainer(small, mesh), batches, 0, 0)  # touches what any first step touches
    before = private_memory()
    trainer = build_trainer(config, mesh)
    train_step(trainer, batches, 0, 0)
    if config.parallel.zero_stage in (1, 2):
        trainer.engine.gather_parameters()
    plan = stage_memory(config)[mesh.pp.rank]
    return private_memory() - before, plan.weights + plan.gradients + plan.optimizer


TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
RESIDENT = ["1 ", f"2 {TP} 2", f"2 {TP} 2 --sequence-parallel", f"4 {TP} 4", f"2 {PP} 2 --global-batch-size 2",
            f"4 {PP} 4 --global-batch-size 4", f"2 {PP} 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2", "2 ",
            "2 --zero-stage 1", "2 --zero-stage 2", "4 --zero-stage 3", f"4 {TP} 2 {PP} 2",
            f"4 {PP} 2 --zero-stage 1"]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", RESIDENT)
def test_the_plan_is_resident_memory(layout):
    world, _, flags = layout.partition(" ")
    workers = WorkerPool(int(world))  # fresh processes: what another run left behind would be this one's to use
    try:
        for grown, planned in workers.run(resident, int(world), int(world), f"{STATE_MODEL} {flags}", timeout=300):
            assert grown == pytest.approx(planned, rel=0.10)
    finally:
        workers.shutdown()
