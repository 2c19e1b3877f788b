"""The ledger of --log-memory: whose bytes they are, and that activations at their peak are what the planner says."""

import dataclasses

import pytest
import torch
from layouts import GPT, LLAMA, config_for, local_batches

from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.config import ActivationConfig
from megatron_lite.planner.memory import stage_memory
from megatron_lite.training.ledger import Ledger, Meter
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step


def test_the_meter_counts_storages_not_views():
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(100, 4, requires_grad=True)
    meter = Meter([weight])
    with meter.watching():
        y = x @ weight  # keeps x and, ignored, the weight
        z = (y * y).sum() + (y[:50] * y[:50]).sum()  # keeps y, four times
    assert meter.live == meter.peak == 2 * 100 * 4 * 4
    z.backward()
    assert meter.live == 0 and meter.peak == 2 * 100 * 4 * 4


def ledger_of_a_step(rank, world, config):
    mesh = build_mesh(grid_of(config, world), torch.device("cpu")) if world > 1 else single()
    trainer = build_trainer(config, mesh)
    ledger = Ledger(trainer)
    with ledger.watching():
        train_step(trainer, local_batches(config, mesh, 0), 0, 0)
    return ledger.bytes(), ledger.lines(), [sum(b.layout.size for b in trainer.engine.buckets), ledger.meter.live]


@pytest.mark.parametrize("form", [ActivationConfig(), ActivationConfig("full", "uniform", 1)], ids=["kept", "full"])
@pytest.mark.parametrize("model, parallel", [(GPT, {"pp": 2}), (LLAMA, {"tp": 2, "sp": True}), (LLAMA, {"pp": 2})])
def test_the_ledger_is_what_the_planner_says(pool, model, parallel, form):
    model = dataclasses.replace(model, hidden_dropout=0.1, attention_dropout=0.1)
    config = dataclasses.replace(config_for(model, precision="bf16", **parallel), activations=form)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, world_size=2))
    answers = pool.run(ledger_of_a_step, 2, 2, config)
    for (entries, _, (elements, live)), plan in zip(answers, stage_memory(config) * 2, strict=False):
        assert [entries[name] for name in ("weights", "gradients", "master", "moments")] == [
            2 * elements, 4 * elements, 4 * elements, 8 * elements]  # fmt: skip
        assert live == 0 and abs(entries["activations"] - plan.activations) <= 0.05 * plan.activations
    assert answers[0][1] == answers[1][1]
    lines = answers[0][1]
    names = ["weights", "gradients", "master", "moments", "activations", "transient", "buffers", "ledger", "rest", "measured"]
    assert [line.split()[0] for line in lines[1:]] == names
