"""ZeRO with what else changes how a step runs: recomputation, fp16 skips, the bf16 wire, mirrored and chunked pipelines,
steps that are not finite, accumulation of three. Where nothing is reordered, to the bit; else fp64 at 1e-10."""

import dataclasses
import itertools

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
    local_batches,
    merge,
    replace,
    run_everywhere,
    run_steps,
    slow,
)

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import ActivationConfig
from megatron_lite.optim import ddp, zero
from megatron_lite.optim import flat as flat_memory
from megatron_lite.optim.flat import is_there
from megatron_lite.optim.scaler import LossScale
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")
MODELS = {"llama_untied": LLAMA, "gpt_tied": GPT}
LAYOUTS = {  # name -> (ranks, flags)
    "dp2": (2, {}),
    "tp2_sp_dp2": (4, {"tp": 2, "sp": True}),
    "pp2_dp2": (4, {"pp": 2}),
    "interleaved_dp2": (4, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "zb-h1_dp2": (4, {"pp": 2, "pipeline_schedule": "zb-h1"}),
    "zbv_dp2": (4, {"pp": 2, "pipeline_schedule": "zbv"}),
    "dualpipe": (2, {"pp": 2, "pipeline_schedule": "dualpipe"}),
    "dualpipe_dp2": (4, {"pp": 2, "pipeline_schedule": "dualpipe"}),
    "dualpipev_dp2": (4, {"pp": 2, "pipeline_schedule": "dualpipev"}),
}
FORMS = {
    "uniform_1": ActivationConfig("full", "uniform", 1),
    "uniform_2": ActivationConfig("full", "uniform", 2),
    "uniform_3": ActivationConfig("full", "uniform", 3),  # 4 layers: a unit of three and one of one
    "block_2": ActivationConfig("full", "block", 2),
    "selective": ActivationConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp_act")),
}


def product(fast, *lists):
    """All combinations of the lists; those not in `fast` run with --full alone."""
    return cases(fast, itertools.product(*lists))


def config_of(layout, model, precision="fp64", **options):
    return config_for(MODELS.get(model, model), precision=precision, **LAYOUTS[layout][1], **options)


def trainer_of(config, world):
    return build_trainer(config, build_mesh(grid_of(config, world), CPU))


# ------------------------------------------------------------------------------------------------------------- recompute


@pytest.fixture(scope="module")
def kept(pool):
    """Runs that keep every activation, by (stage, layout, model)."""
    made = {}

    def of(stage, layout, model):
        if (stage, layout, model) not in made:
            made[stage, layout, model] = run_everywhere(pool, recomputing(stage, layout, model, None), LAYOUTS[layout][0], 2)
        return made[stage, layout, model]

    return of


def recomputing(stage, layout, model, form):
    model = dataclasses.replace(MODELS[model], hidden_dropout=0.2, attention_dropout=0.2)
    config = config_of(layout, model, "fp32", zero_stage=stage)
    return dataclasses.replace(config, activations=FORMS[form]) if form else config


@pytest.mark.parametrize(("stage", "layout", "model", "form"), product(
    {(3, "dp2", "gpt_tied", "uniform_1"), (3, "dp2", "gpt_tied", "uniform_2"), (3, "dp2", "gpt_tied", "block_2"),
     (2, "dp2", "gpt_tied", "uniform_3"), (3, "tp2_sp_dp2", "llama_untied", "uniform_2"),
     (3, "tp2_sp_dp2", "llama_untied", "selective")},
    (1, 2, 3), ("dp2", "tp2_sp_dp2", "pp2_dp2", "zbv_dp2"), MODELS, FORMS))  # fmt: skip
def test_recomputation_changes_no_bit(pool, kept, stage, layout, model, form):
    run = run_everywhere(pool, recomputing(stage, layout, model, form), LAYOUTS[layout][0], 2)
    assert_same_bits(run, kept(stage, layout, model))


def most_at_once(rank, world, config):
    """Most full parameters that are there at once in a step, in buckets; and how often one is brought."""
    trainer, most, brought = trainer_of(config, world), [0], []

    def bring(flat, transient):
        original(flat, transient)
        most[0] = max(most[0], sum(is_there(b.param) for b in trainer.engine.buckets))
        brought.append(next((i for i, b in enumerate(trainer.engine.buckets) if b.param is flat), None))

    original = flat_memory.bring
    ddp.bring = zero.bring = bring
    try:
        run_steps(trainer, range(1))
    finally:
        ddp.bring = zero.bring = original
    return most[0], len([i for i in brought if i is not None])


def test_a_recomputed_span_is_gathered_once_for_its_backward(pool):
    """A span of n layers needs its n units at once, and one is on its way; none is gathered more often for it."""
    (_, plain), *_ = pool.run(most_at_once, 2, 2, recomputing(3, "dp2", "llama_untied", None))
    for form, n in (("uniform_1", 1), ("uniform_2", 2), ("uniform_3", 3)):
        for most, brought in pool.run(most_at_once, 2, 2, recomputing(3, "dp2", "llama_untied", form)):
            assert most == n + 1 and brought == plain, form


# ---------------------------------------------------------------------------------------------------- skips and reports


def layer_of(trainer, number):
    return next((layer for chunk in trainer.chunks for layer in chunk.layers if layer.layer == number), None)


def spoil(trainer, value, layer, microbatch):
    """In one microbatch, on this rank, the gradient that enters `layer` is multiplied by `value`."""
    now, executor = [None], trainer.executor

    def noting(method):
        def call(step, run):
            now[0] = step.action.microbatch
            method(step, run)

        return call

    def hook(_module, _inputs, out):
        if now[0] == microbatch and out.requires_grad:
            out.register_hook(lambda grad: grad * value)

    executor._forward, executor._backward = noting(executor._forward), noting(executor._backward)
    return layer_of(trainer, layer).register_forward_hook(hook)


def skipped_run(rank, world, config, bad_rank, value):
    """A spoiled step, which every rank skips; then what it said, and three steps from the same start."""
    trainer = trainer_of(config, world)
    state = [t.clone() for s in trainer.optimizer.states for t in (s.master, *s.moments.values())]
    hook = spoil(trainer, value, 1, 0) if rank == bad_rank else None
    report = train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)
    after = [t for s in trainer.optimizer.states for t in (s.master, *s.moments.values())]
    assert not report.stepped and trainer.optimizer.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    if hook is not None:
        hook.remove()
    return report.fault, trainer.loss_scale.scale, run_steps(trainer, range(3))


def holder(layout):
    """The first rank that holds layer 1: in a V of four stages the second pipeline rank does."""
    return 2 if layout == "zbv_dp2" else 0


def clean_run(rank, world, config, scale):
    trainer = trainer_of(config, world)
    if scale:
        trainer.loss_scale = LossScale(scale, 0, 0)
    return run_steps(trainer, range(3))


@pytest.mark.parametrize(("stage", "layout"), product({(1, "dp2"), (3, "dp2"), (2, "zb-h1_dp2")}, (1, 2, 3),
                                                    ("dp2", "tp2_sp_dp2", "pp2_dp2", "zb-h1_dp2", "zbv_dp2", "dualpipe_dp2")))
def test_an_overflow_skips_on_all_ranks_and_leaves_no_trace(pool, stage, layout):
    world = LAYOUTS[layout][0]
    config = config_of(layout, dataclasses.replace(GPT, init_method_std=0.1), "fp16", zero_stage=stage)
    config = replace(replace(config, "precision", initial_loss_scale=1024.0, hysteresis=1), "optimizer", lr=1e-3)
    found = pool.run(skipped_run, world, world, config, holder(layout), float("inf"))
    assert {(fault, scale) for fault, scale, _ in found} == {(None, 512.0)}
    assert_same_bits(merge([run for *_, run in found]), merge(pool.run(clean_run, world, world, config, 512.0)))


@pytest.mark.parametrize(("stage", "layout"), product({(2, "dp2"), (3, "dp2"), (3, "pp2_dp2")}, (1, 2, 3),
                                                    ("dp2", "tp2_sp_dp2", "pp2_dp2", "zb-h1_dp2", "zbv_dp2", "dualpipe_dp2")))
@pytest.mark.parametrize("form", [None, slow("uniform_2")])
def test_a_bad_step_is_reported_and_leaves_no_trace(pool, stage, layout, form):
    """The look runs the step again, with parameters that ZeRO may have freed; afterwards all is as before."""
    world = LAYOUTS[layout][0]
    config = config_of(layout, "llama_untied", "bf16", zero_stage=stage)
    if form:
        config = dataclasses.replace(config, activations=FORMS[form])
    found = pool.run(skipped_run, world, world, config, holder(layout), float("nan"))
    faults = {fault for fault, *_ in found}
    place = f"gradient of layers.1.mlp.down_proj.weight, microbatch 0, on rank {holder(layout)}"
    assert len(faults) == 1 and place in faults.pop(), faults
    assert_same_bits(merge([run for *_, run in found]), merge(pool.run(clean_run, world, world, config, None)))


# ------------------------------------------------------------------------------------------------------- wire, pipelines


@pytest.mark.parametrize(("stage", "layout"), product({(1, "dp2"), (3, "dp2")}, (1, 2, 3), ("dp2", "tp2_sp_dp2", "pp2_dp2")))
def test_the_bf16_wire(pool, stage, layout):
    """Gradients are those of an fp32 wire to bf16's digits; neither overlap nor transport changes a bit."""
    world = LAYOUTS[layout][0]
    model = dataclasses.replace(GPT, init_method_std=0.1)
    narrow, wide = (replace(config_of(layout, model, "fp32", zero_stage=stage, **flags), "optimizer", lr=1e-3)
                    for flags in ({"grad_reduce_dtype": "bf16"}, {}))  # fmt: skip
    run, exact = run_everywhere(pool, narrow, world, 3), run_everywhere(pool, wide, world, 3)
    assert run["losses"] == pytest.approx(exact["losses"], rel=1e-4)
    assert run["norms"] == pytest.approx(exact["norms"], rel=4e-3) and run["norms"] != exact["norms"]
    largest = max(grad.abs().max().item() for grad in exact["grads"].values())
    for name, theirs in exact["grads"].items():
        scale = max(theirs.abs().max().item(), 1e-2 * largest)
        assert (run["grads"][name] - theirs).abs().max().item() <= 2.0**-6 * scale, name
    off = replace(narrow, "parallel", no_overlap_grad_reduce=True, no_overlap_param_gather=True)
    assert_same_bits(run_everywhere(pool, off, world, 3, shared_memory=False), run)


@pytest.fixture(scope="module")
def references():
    return {(name, optimizer): run_everywhere(None, config_for(model, optimizer=optimizer), 1)
            for name, model in MODELS.items() for optimizer in ("adam", "sgd")}  # fmt: skip


@pytest.mark.parametrize(("stage", "layout", "model", "optimizer"), product(
    {(2, "dualpipe_dp2", "gpt_tied", "sgd"), (3, "dualpipe_dp2", "llama_untied", "adam"),
     (3, "zbv_dp2", "gpt_tied", "sgd"), (1, "interleaved_dp2", "llama_untied", "adam"),
     (3, "interleaved_dp2", "gpt_tied", "adam")},
    (1, 2, 3), ("dualpipe_dp2", "dualpipev_dp2", "zbv_dp2", "interleaved_dp2"), MODELS, ("adam", "sgd")))  # fmt: skip
def test_chunked_and_mirrored_pipelines_equal_one_process(pool, references, stage, layout, model, optimizer):
    config = config_of(layout, model, zero_stage=stage, optimizer=optimizer)
    assert_equal_runs(run_everywhere(pool, config, LAYOUTS[layout][0]), references[model, optimizer], 1e-10)


# --------------------------------------------------------------------------------------------------- accumulation of three


@pytest.mark.parametrize(("stage", "layout", "model"), product({(2, "dp2", "gpt_tied"), (3, "dp2", "llama_untied")}, (1, 2, 3),
                                                             ("dp2", "tp2_sp_dp2", "pp2_dp2", "zbv_dp2"), MODELS))  # fmt: skip
def test_accumulation_of_three(pool, stage, layout, model):
    assert GLOBAL_BATCH >= 6
    config = replace(config_of(layout, model, zero_stage=stage, optimizer="sgd"), "train", global_batch_size=6)
    alone = replace(config_for(MODELS[model], optimizer="sgd"), "train", global_batch_size=6)
    assert_equal_runs(run_everywhere(pool, config, LAYOUTS[layout][0], 3), run_everywhere(None, alone, 1, 3), 1e-10)
