"""ZeRO keeps less and computes the same: stages 1 to 3 and hybrid shards against one process in fp64 at 1e-10 (raw gradients,
norm, parameters after five steps of AdamW and SGD); overlap on and off, and a resumed run, to the bit."""


import dataclasses

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    assert_equal_runs,
    assert_same_bits,
    cases,
    config_for,
    full,
    local_batches,
    merge,
    replace,
    run_everywhere,
    run_steps,
    slow,
)

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.optim import ddp, zero
from megatron_lite.optim import flat as flat_memory
from megatron_lite.optim.flat import is_there
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, restore, save

CPU = torch.device("cpu")
# Odd sizes: no bucket is a multiple of the ranks, and slices end inside rows, heads and boxes.
MODELS = {"llama_untied": LLAMA, "gpt_tied": GPT}
STAGES = {  # name -> flags
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "hybrid1": {"zero_stage": 1, "zero_replica_size": 2},
    "hybrid2": {"zero_stage": 2, "zero_replica_size": 2},
    "hybrid3": {"zero_stage": 3, "zero_replica_size": 2},
}
LAYOUTS = {  # name -> (ranks, data-parallel ranks, flags)
    "dp2": (2, 2, {}),
    "dp4": (4, 4, {}),
    "tp2_dp2": (4, 2, {"tp": 2, "sp": True}),
    "pp2_dp2": (4, 2, {"pp": 2}),
    "interleaved_dp2": (4, 2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "zb-h1_dp2": (4, 2, {"pp": 2, "pipeline_schedule": "zb-h1"}),
    "zbv_dp2": (4, 2, {"pp": 2, "pipeline_schedule": "zbv"}),
    "tp2_pp2_dp2": (8, 2, {"tp": 2, "pp": 2, "sp": True}),
    "tp2_dp4": (8, 4, {"tp": 2}),
    "pp2_dp4": (8, 4, {"pp": 2}),
}
FAST = {  # what runs on every commit: (stage, layout, model, accumulation, optimizer)
    ("zero1", "dp2", "gpt_tied", "several", "adam"), ("zero2", "dp2", "gpt_tied", "several", "sgd"),
    ("zero3", "dp2", "gpt_tied", "several", "adam"), ("zero3", "tp2_dp2", "llama_untied", "several", "adam"),
    ("zero3", "dp4", "llama_untied", "one", "sgd"), ("zero3", "pp2_dp2", "gpt_tied", "several", "sgd"),
    ("hybrid2", "dp4", "gpt_tied", "several", "adam"),
}  # fmt: skip


def possible(stage, layout, accumulation):
    """Hybrid needs four ranks to share and repeat; a chunked or split pipeline more than one microbatch."""
    _, dp, flags = LAYOUTS[layout]
    return (dp == 4 or not stage.startswith("hybrid")) and (accumulation == "several" or set(flags) <= {"tp", "sp", "pp"})


CASES = cases(FAST, ((s, y, m, a, o) for s in STAGES for y in LAYOUTS for m in MODELS for a in ("one", "several")
                     for o in ("adam", "sgd") if possible(s, y, a)))  # fmt: skip


def config_of(stage, layout, model, accumulation="several", optimizer="adam", **options):
    _, dp, flags = LAYOUTS[layout]
    micro = GLOBAL_BATCH // dp if accumulation == "one" else 1
    model = MODELS.get(model, model)
    return config_for(model, micro_batch=micro, optimizer=optimizer, **flags, **STAGES.get(stage, {}), **options)


@pytest.fixture(scope="module")
def references():
    return {(name, optimizer): run_everywhere(None, config_for(model, optimizer=optimizer), 1)
            for name, model in MODELS.items() for optimizer in ("adam", "sgd")}  # fmt: skip


@pytest.mark.parametrize(("stage", "layout", "model", "accumulation", "optimizer"), CASES)
def test_zero_equals_one_process(pool, references, stage, layout, model, accumulation, optimizer):
    config = config_of(stage, layout, model, accumulation, optimizer)
    assert_equal_runs(run_everywhere(pool, config, LAYOUTS[layout][0]), references[model, optimizer], 1e-10)


# ------------------------------------------------------------------------------------------------------------- to the bit


@pytest.mark.parametrize(("stage", "layout"), [
    ("zero3", "dp2"), slow("zero1", "dp4"), slow("zero2", "dp2"), slow("hybrid3", "dp4"), slow("zero2", "zb-h1_dp2"),
    slow("zero3", "pp2_dp2")])  # fmt: skip
def test_overlap_changes_no_bit(pool, stage, layout):
    """Nor does the number of units ahead, the transport, or a second run; in bf16, where every rounding shows."""
    off = {"no_overlap_grad_reduce": True, "no_overlap_param_gather": True}
    variants = [{}, {}, off, {"no_overlap_param_gather": True}, {"zero_prefetch_limit": 3}]
    runs = [run_everywhere(pool, config_of(stage, layout, LLAMA, precision="bf16", **options), LAYOUTS[layout][0], 3)
            for options in variants]  # fmt: skip
    runs.append(run_everywhere(pool, config_of(stage, layout, LLAMA, precision="bf16"), LAYOUTS[layout][0], 3, False))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.parametrize("layout", ["dp4", slow("pp2_dp2")])
def test_stage_1_has_the_bits_of_stage_0(pool, layout):
    """An all-reduce is a reduce-scatter and a gather: the same sums in the same order. (Stage 2 adds up in another order.)

    The norm is a sum of parts in fp64 whose last bit depends on where they are cut, so nothing is clipped by it here."""
    config = dataclasses.replace(GPT, hidden_dropout=0.2, attention_dropout=0.2)
    runs = [run_everywhere(pool, replace(config_of(stage, layout, config, precision="fp32"), "optimizer", clip_grad=0.0),
                           LAYOUTS[layout][0], 3) for stage in ("zero0", "zero1")]  # fmt: skip
    norms = [run.pop("norms") for run in runs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-14)
    assert_same_bits(*(run | {"norms": None} for run in runs))


@pytest.mark.parametrize(("stage", "layout"), [slow("zero2", "dp2"), ("zero3", "dp2"), slow("zero3", "tp2_dp2"),
                                               slow("hybrid3", "dp4")])  # fmt: skip
def test_dropout(pool, stage, layout):
    model = dataclasses.replace(GPT, hidden_dropout=0.2, attention_dropout=0.2)
    runs = [run_everywhere(pool, config_of(name, layout, model), LAYOUTS[layout][0], 3) for name in (stage, "zero0")]
    assert_equal_runs(*runs, 1e-10)


# ----------------------------------------------------------------------------------------------------------- checkpoints

BEFORE, AFTER = 2, 2


def save_and_go_on(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    run_steps(trainer, range(BEFORE))
    save(trainer, Progress(BEFORE, BEFORE * GLOBAL_BATCH))
    return run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def load_and_go_on(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    restore(trainer)
    return run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def resumed(pool, fn, folder, stage, layout, precision):
    config = config_of(stage, layout, "gpt_tied", precision=precision)
    world = LAYOUTS[layout][0]
    config = replace(config, "checkpoint", **{"save" if fn is save_and_go_on else "load": str(folder)})
    return merge(pool.run(fn, world, world, config))


@pytest.mark.parametrize(("stage", "layout"), [
    ("zero3", "dp2"), slow("zero1", "dp2"), slow("zero2", "dp2"), slow("zero2", "tp2_dp2"), slow("hybrid2", "dp4"),
    slow("zero3", "pp2_dp2")])  # fmt: skip
def test_a_resumed_run_has_the_same_bits(pool, tmp_path, stage, layout):
    straight = resumed(pool, save_and_go_on, tmp_path, stage, layout, "bf16")
    assert_same_bits(resumed(pool, load_and_go_on, tmp_path, stage, layout, "bf16"), straight)


@pytest.mark.parametrize(("source", "targets"), [
    slow(("zero0", "dp2"), [("zero3", "dp4"), ("zero1", "pp2_dp2")]),
    slow(("zero1", "tp2_dp2"), [("zero2", "dp4"), ("zero0", "dp2")]),
    slow(("zero2", "pp2_dp2"), [("zero3", "tp2_dp2"), ("hybrid1", "dp4")]),
    (("zero3", "dp4"), [("zero0", "dp2"), ("zero2", "zbv_dp2")]),
    slow(("hybrid3", "dp4"), [("zero1", "dp2"), ("zero3", "pp2_dp2")]),
])  # fmt: skip
def test_any_stage_loads_what_any_stage_saved(pool, tmp_path, source, targets):
    straight = resumed(pool, save_and_go_on, tmp_path, *source, "fp64")
    for target in targets:
        assert_equal_runs(resumed(pool, load_and_go_on, tmp_path, *target, "fp64"), straight, 1e-10)


# --------------------------------------------------------------------------------------------------- frozen, evaluation


def frozen_run(rank, world, config, steps):
    """A run in which a whole layer, a matrix, a norm and the embedding do not learn; and what they started as."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    frozen = [p for bucket in trainer.engine.buckets for p in bucket.params
              if p.shard.name.startswith(("layers.2.", "embed_tokens", "layers.1.mlp.down_proj", "norm."))]  # fmt: skip
    for param in frozen:
        param.requires_grad_(False)
    start = {id(p): tensor.clone() for p, tensor in full(trainer, "param")}
    result = run_steps(trainer, range(steps))
    for param, tensor in full(trainer, "param"):
        assert torch.equal(tensor, start[id(param)]) != param.requires_grad, param.shard.name
    return result


@pytest.mark.parametrize(("stage", "layout", "model"), [
    slow("zero0", "dp2", "llama_untied"), slow("zero1", "dp2", "gpt_tied"), slow("zero2", "dp2", "llama_untied"),
    ("zero3", "dp2", "gpt_tied"), slow("zero3", "tp2_dp2", "llama_untied"), slow("hybrid3", "dp4", "llama_untied"),
])  # fmt: skip
def test_frozen_parameters(pool, stage, layout, model):
    config, world = config_of(stage, layout, model), LAYOUTS[layout][0]
    alone = merge([frozen_run(0, 1, config_for(MODELS[model]), 3)])
    assert_equal_runs(merge(pool.run(frozen_run, world, world, config, 3)), alone, 1e-10)


def unused_run(rank, world, config, steps):
    """A run whose engine waits in vain for more contributions to one layer's buckets than the layer makes."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    for param in (p for bucket in trainer.engine.buckets for p in bucket.params):
        if param.shard.name == "layers.1.mlp.down_proj.weight":
            trainer.engine._uses[param] += 1
    return run_steps(trainer, range(steps))


@pytest.mark.parametrize(("stage", "layout"), [slow("zero1", "dp2"), slow("zero2", "dp2"), slow("zero2", "zb-h1_dp2"),
                                               ("zero3", "dp2")])  # fmt: skip
def test_contributions_that_never_come(pool, references, stage, layout):
    world = LAYOUTS[layout][0]
    run = merge(pool.run(unused_run, world, world, config_of(stage, layout, "gpt_tied"), 5))
    assert_equal_runs(run, references["gpt_tied", "adam"], 1e-10)


class Validation:
    """A loader of two global batches, as `evaluate` wants it."""

    def __init__(self, config, mesh):
        self.steps = iter(range(50, 52))
        self.of = lambda step: local_batches(config, mesh, step)

    def next_step(self):
        return self.of(next(self.steps))

    def close(self):
        pass


def evaluated_run(rank, world, config):
    """Evaluation before, between and after steps; the losses."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    found = []
    for step in range(3):
        found.append(evaluate(trainer, Validation(config, trainer.mesh), 2, lambda: False))
        found.append(run_steps(trainer, range(step, step + 1))["losses"][0])
        found.append(run_steps(trainer, range(step, step + 1))["norms"][0])
    return found


@pytest.mark.parametrize(("stage", "layout"), [slow("zero1", "dp2"), slow("zero2", "pp2_dp2"), ("zero3", "dp2"),
                                               slow("zero3", "zbv_dp2")])  # fmt: skip
def test_evaluation_sees_the_newest_parameters(pool, stage, layout):
    world = LAYOUTS[layout][0]
    for found in pool.run(evaluated_run, world, world, config_of(stage, layout, "gpt_tied")):
        assert found == pytest.approx(evaluated_run(0, 1, config_for(GPT)), rel=1e-10)


# ---------------------------------------------------------------------------------------------------------------- memory


def memory(rank, world, config):
    """What a rank holds before a step, after it, and at most within it: full parameters, full gradients, in buckets."""
    seen = {"most": [0, 0]}
    held = lambda: [sum(is_there(b.param) for b in trainer.engine.buckets),  # noqa: E731
                    sum(is_there(b.grad) for b in trainer.engine.buckets)]  # fmt: skip
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    brought = []

    def bring(flat, transient):
        original(flat, transient)
        brought.append(flat)
        seen["most"] = [max(pair) for pair in zip(seen["most"], held(), strict=True)]

    original = flat_memory.bring
    ddp.bring = zero.bring = bring
    try:
        before = held()
        run_steps(trainer, range(2))
    finally:
        ddp.bring = zero.bring = original
    engine, optimizer = trainer.engine, trainer.optimizer
    return {"before": before, "after": held(), "most": seen["most"], "brought": len(brought), "buckets": len(engine.buckets),
            "elements": sum(b.layout.size for b in engine.buckets), **engine.bytes(),
            "optimizer": sum(optimizer.bytes().values())}  # fmt: skip


@pytest.mark.parametrize(("stage", "bytes_per_parameter"), [
    ("zero0", lambda n: 18), ("zero1", lambda n: 6 + 12 / n), ("zero2", lambda n: 2 + 16 / n), ("zero3", lambda n: 18 / n),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["dp2", slow("dp4")])
def test_what_a_rank_keeps(pool, stage, bytes_per_parameter, layout):
    """bf16 weights, fp32 gradients, masters and moments: the formulas of the ZeRO paper with 4 bytes per gradient."""
    world = LAYOUTS[layout][0]
    for found in pool.run(memory, world, world, config_of(stage, layout, LLAMA, precision="bf16")):
        kept = found["weights"] + found["gradients"] + found["optimizer"]
        assert kept == bytes_per_parameter(world) * found["elements"]
        everything = found["buckets"]
        assert found["before"] == found["after"] == [0 if stage == "zero3" else everything,
                                                     0 if stage in ("zero2", "zero3") else everything]  # fmt: skip


@pytest.mark.parametrize("limit", [1, slow(2)])
def test_what_a_step_brings(pool, limit):
    """A unit in use and `limit` on their way, of parameters and of gradients; with a pipeline each unit once a step."""
    config = config_of("zero3", "dp2", LLAMA, zero_prefetch_limit=limit)
    for found in pool.run(memory, 2, 2, config):
        assert found["most"] == [1 + limit, 1 + limit]
    config = config_of("zero2", "zb-h1_dp2", LLAMA, zero_prefetch_limit=limit)
    for found in pool.run(memory, 4, 4, config):
        assert found["most"] == [found["buckets"], 1 + limit]
    off = {"no_overlap_param_gather": True, "no_overlap_grad_reduce": True}
    for found in pool.run(memory, 2, 2, config_of("zero3", "dp2", LLAMA, **off)):
        assert found["most"] == [1, 1]
    for found in pool.run(memory, 4, 4, config_of("zero3", "pp2_dp2", LLAMA)):
        assert found["most"] == [found["buckets"]] * 2 and found["brought"] == 2 * 2 * found["buckets"]  # two steps
