"""Whatever an automatic pipeline is, it trains like one process; measuring changes nothing; a resumed run keeps the choice."""

import dataclasses

import pytest
import torch
from layouts import GLOBAL_BATCH, GPT, LLAMA, assert_equal_runs, config_for, merge, replace, run_everywhere, run_steps

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.planner.automatic import PartCosts, Price
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, restore, save

CPU = torch.device("cpu")
MODELS = {"llama_untied": dataclasses.replace(LLAMA, num_layers=8), "gpt_tied": dataclasses.replace(GPT, num_layers=8)}
EVEN, SLOW_HEAD, NO_W, FAR = "even", "slow output layer", "no weight gradients", "slow wires"


def costs(name, pp):
    """Costs as measured by nobody, each of which makes another pipeline the shortest."""
    layer = Price(1, 2, 0) if name == NO_W else Price(1, 1, 1)
    head = Price(3, 3, 3) if name == SLOW_HEAD else Price(0, 0, 0)
    return PartCosts((layer,) * pp, (Price(0, 0, 0),) * pp, (head,) * pp, 6 if name == FAR else 0, "units", "given")


def run_automatic(rank, world, config, name, steps):
    """`steps` steps with what the given costs choose, and what it was."""
    mesh = build_mesh(grid_of(config, world), CPU)
    trainer = build_trainer(config, mesh, costs(name, mesh.pp.size))
    pipeline = trainer.settled.pipeline
    layers = [len(own) for own in pipeline.layers]
    return run_steps(trainer, range(steps)) | {"chosen": (pipeline.schedule, pipeline.num_chunks, layers)}


RUNS = [  # ranks, flags, limit, costs, what they choose (None: not looked at), the models of the fast cover
    (2, {"pp": 2}, None, EVEN, ("zbv", 2, [2, 2, 2, 2]), "gpt_tied"),
    (2, {"pp": 2}, 2.5, SLOW_HEAD, ("greedy", 2, [2, 3, 2, 1]), "gpt_tied llama_untied"),
    (2, {"pp": 2}, None, NO_W, ("interleaved", 4, [1] * 8), "llama_untied"),
    (4, {"pp": 2, "tp": 2, "sp": True}, 1, SLOW_HEAD, ("greedy", 2, [2, 3, 2, 1]), "gpt_tied"),
    (4, {"pp": 2}, 2, SLOW_HEAD, None, ""),
    (4, {"pp": 4}, 4, FAR, ("greedy", 1, [2, 2, 2, 2]), ""),
    (4, {"pp": 4}, None, SLOW_HEAD, None, ""),
    (4, {"pp": 4}, 4, EVEN, ("zbv", 2, [1] * 8), ""),
    (8, {"pp": 4, "tp": 2, "sp": True}, 3, SLOW_HEAD, None, ""),
    (8, {"pp": 4}, 1.5, NO_W, None, ""),
]
CASES = [pytest.param(model, *run[:-1], marks=[] if model in run[-1] else pytest.mark.full) for run in RUNS for model in MODELS]


@pytest.mark.parametrize(("model", "world", "flags", "limit", "name", "chosen"), CASES)
def test_whatever_is_chosen_equals_one_process(pool, references, model, world, flags, limit, name, chosen):
    config = config_for(MODELS[model], pipeline_schedule="auto", pipeline_memory_limit=limit, **flags)
    results = pool.run(run_automatic, world, world, config, name, 2)
    assert all(result["chosen"] == results[0]["chosen"] for result in results), "ranks disagree"
    assert chosen is None or results[0]["chosen"] == chosen
    assert_equal_runs(merge(results), references[model], 1e-10)
    if limit is not None:
        chunks = results[0]["chosen"][1]
        assert max(held for result in results for held in result["held"]) <= limit * chunks


@pytest.fixture(scope="module")
def references():
    return {name: run_everywhere(None, config_for(model), 1, 2) for name, model in MODELS.items()}


def test_sgd_steps_are_those_of_one_process(pool):
    """Raw gradients move the weights: no optimizer hides a wrong scale."""
    config = config_for(MODELS["gpt_tied"], optimizer="sgd", pp=2, pipeline_split="auto")
    results = pool.run(run_automatic, 2, 2, config, SLOW_HEAD, 3)
    assert results[0]["chosen"] == ("1f1b", 1, [6, 2])
    assert_equal_runs(merge(results), run_everywhere(None, config_for(MODELS["gpt_tied"], optimizer="sgd"), 1, 3), 1e-10)


def measured(rank, world, config):
    """Training with measured costs: what was said, whether a generator moved, the buffers before a step, two steps."""
    mesh = build_mesh(grid_of(config, world), CPU)
    before = torch.get_rng_state()
    trainer = build_trainer(config, mesh)
    same = torch.equal(before, torch.get_rng_state())
    empty = all(not p.main_grad.any() for chunk in trainer.chunks for p in chunk.parameters())
    return run_steps(trainer, range(2)) | {"notes": trainer.settled.notes, "untouched": same and empty}


def test_measuring_leaves_no_trace_in_training(pool):
    """With dropout, whose masks depend on tp but not on what ran before; all ranks report the same choice."""
    model = dataclasses.replace(MODELS["gpt_tied"], hidden_dropout=0.2, attention_dropout=0.1)
    results = pool.run(measured, 4, 4, config_for(model, pp=2, tp=2, sp=True, pipeline_schedule="auto"))
    assert all(result["untouched"] and result["notes"][0] == results[0]["notes"][0] for result in results)
    said = results[0]["notes"][0]
    assert said.startswith("pipeline chosen: ") and "<- chosen" in said
    assert "costs measured on these ranks, micro-batch 1 x 32 tokens; F B W in ms: layer " in said
    assert_equal_runs(merge(results), run_everywhere(pool, config_for(model, tp=2, sp=True), 2, 2), 1e-10)


def train_and_save(rank, world, config, name):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU), costs(name, 2))
    run_steps(trainer, range(2))
    save(trainer, Progress(2, 2 * GLOBAL_BATCH))
    return run_steps(trainer, range(2, 4))


def load_and_train(rank, world, config, name):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU), costs(name, 2))
    restore(trainer)
    return run_steps(trainer, range(2, 4)) | {"schedule": trainer.settled.pipeline.schedule, "notes": trainer.settled.notes}


@pytest.mark.parametrize(("limit", "first", "then", "schedule"), [(None, EVEN, NO_W, "zbv"), (2.5, SLOW_HEAD, EVEN, "greedy")])
def test_a_resumed_run_keeps_the_choice_bit_for_bit(pool, tmp_path, limit, first, then, schedule):
    """Though what is measured then would choose another: by name, and as lists."""
    config = config_for(MODELS["gpt_tied"], precision="bf16", pp=2, pipeline_schedule="auto", pipeline_memory_limit=limit)
    straight = merge(pool.run(train_and_save, 2, 2, replace(config, "checkpoint", save=str(tmp_path)), first))
    config = replace(config, "checkpoint", load=str(tmp_path))
    results = pool.run(load_and_train, 2, 2, config, then)
    assert results[0]["schedule"] == schedule
    assert results[0]["notes"][0].startswith(f"pipeline kept from the checkpoint: {schedule} with 2 chunks per rank, layers")
    run = merge(results)
    assert run["losses"] == straight["losses"] and run["norms"] == straight["norms"]
    for kind in ("grads", "params"):
        assert all(torch.equal(run[kind][name], tensor) for name, tensor in straight[kind].items())
    anew = replace(config, "parallel", pipeline_memory_limit=1)  # another setting: nothing to keep
    notes = pool.run(load_and_train, 2, 2, anew, then)[1]["notes"]
    assert "chosen for other settings" in notes[0] and notes[1].startswith("pipeline chosen: greedy")
    fresh = pool.run(load_and_train, 2, 2, replace(config, "checkpoint", finetune=True), then)[0]
    assert fresh["notes"][0].startswith("pipeline chosen: ")
