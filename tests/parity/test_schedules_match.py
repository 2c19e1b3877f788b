"""Every pipeline schedule trains like one process, from its flags alone: gradients, norm and parameters in fp64 at 1e-10, on
any mixture with tensor and data parallelism; twice the same bits; as many activations alive as the checker says."""

import dataclasses

import pytest
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    assert_equal_runs,
    assert_same_bits,
    config_for,
    merge,
    run_everywhere,
    run_layout,
    slow,
)

from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.schedules import SCHEDULES
from megatron_lite.schedules.check import check

# Eight layers: enough for two chunks on each of four ranks.
MODELS = {"llama_untied": dataclasses.replace(LLAMA, num_layers=8), "gpt_tied": dataclasses.replace(GPT, num_layers=8)}
CHUNKS = {"num_virtual_stages_per_pipeline_rank": 2}
FLAGS = {  # name -> flags of the schedule
    "gpipe": {"pipeline_schedule": "gpipe"},
    "1f1b": {},
    "interleaved": CHUNKS,
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zb-h2": {"pipeline_schedule": "zb-h2"},
    "zbv": {"pipeline_schedule": "zbv"},
    "dualpipev": {"pipeline_schedule": "dualpipev"},
    "dualpipe": {"pipeline_schedule": "dualpipe"},
}
MIXED = {  # name -> (ranks, flags); dp is what tp and pp leave
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2_tp2": (4, {"pp": 2, "tp": 2, "sp": True}),
    "pp2_dp2": (4, {"pp": 2}),
    "pp4_tp2": (8, {"pp": 4, "tp": 2, "sp": True}),
    "pp2_tp2_dp2": (8, {"pp": 2, "tp": 2}),
    "pp4_dp2": (8, {"pp": 4}),
}
FAST = {  # what runs on every commit; the rest of schedules x mixtures x models with --full
    ("gpipe", "pp4", "llama_untied"), ("1f1b", "pp2", "gpt_tied"),
    ("interleaved", "pp2", "llama_untied"), ("interleaved", "pp4", "gpt_tied"),
    ("zb-h1", "pp4", "gpt_tied"), ("zb-h1", "pp2_dp2", "llama_untied"),
    ("zb-h2", "pp4", "llama_untied"), ("zb-h2", "pp2_tp2", "gpt_tied"),
    ("zbv", "pp4", "llama_untied"), ("zbv", "pp2_tp2_dp2", "gpt_tied"),
    ("dualpipev", "pp4", "gpt_tied"), ("dualpipev", "pp2_dp2", "llama_untied"),
    ("dualpipe", "pp2", "gpt_tied"), ("dualpipe", "pp4", "gpt_tied"), ("dualpipe", "pp2_dp2", "llama_untied"),
    ("dualpipe", "pp4_tp2", "llama_untied"),
}  # fmt: skip


def needed(schedule, mixture):
    """Whether the schedule runs: DualPipe and DualPipeV want 2p of the 8 / dp microbatches."""
    return mixture != "pp4_dp2" or schedule not in ("dualpipe", "dualpipev")


CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.full)
         for case in ((s, m, model) for s in FLAGS for m in MIXED if needed(s, m) for model in MODELS)]  # fmt: skip


@pytest.fixture(scope="module")
def references():
    return {name: run_everywhere(None, config_for(model), 1, 2) for name, model in MODELS.items()}


def test_every_schedule_is_here():
    assert set(FLAGS) == set(SCHEDULES)
    assert {schedule for schedule, _, _ in FAST} == set(FLAGS) and len(FAST & {case.values for case in CASES}) == len(FAST)


@pytest.mark.parametrize(("schedule", "mixture", "model"), CASES)
def test_schedule_equals_one_process(pool, references, schedule, mixture, model):
    """The loss too, wherever the last stage is; every rank reports it (`merge` compares them)."""
    world, flags = MIXED[mixture]
    config = config_for(MODELS[model], **flags, **FLAGS[schedule])
    results = pool.run(run_layout, world, world, config, 2)
    assert_equal_runs(merge(results), references[model], 1e-10)
    pipeline, replicas = pipeline_of(config), world // flags["pp"]  # pp is the slowest axis
    m = GLOBAL_BATCH // (world // (flags["pp"] * flags.get("tp", 1)))
    report = check(pipeline.actions(m), pipeline.placement, m)
    assert pipeline.schedule == schedule
    for rank, result in enumerate(results):
        stage = rank // replicas
        share = pipeline.placement.chunks_per_share
        assert result["held"] == [report.peak_live[stage] * share] * 2, "held until W"
        assert result["peak"] == [report.peak_live_early[stage] * share] * 2, "held until B"


@pytest.mark.parametrize(("schedule", "world", "flags"), [
    slow("gpipe", 2, {"pp": 2}), ("1f1b", 2, {"pp": 2}), ("interleaved", 4, {"pp": 4}), ("zb-h1", 4, {"pp": 2, "tp": 2}),
    slow("zb-h2", 4, {"pp": 2}), ("zbv", 4, {"pp": 4}), slow("dualpipev", 4, {"pp": 2, "tp": 2}),
    ("dualpipe", 4, {"pp": 4}),
])  # fmt: skip
def test_twice_the_same_bits(pool, schedule, world, flags):
    config = config_for(MODELS["gpt_tied"], precision="bf16", **flags, **FLAGS[schedule])
    assert_same_bits(*(run_everywhere(pool, config, world, 2) for _ in range(2)))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", slow("zbv"), slow("dualpipev"), "dualpipe"])
def test_overlap_changes_no_bit(pool, schedule):
    """A bucket is reduced at its last contribution, whichever of B, W and BW that is in; or after the last backward."""
    runs = [run_everywhere(pool, config_for(MODELS["gpt_tied"], precision="fp32", pp=2, no_overlap_grad_reduce=off,
                                            **FLAGS[schedule]), 4, 2) for off in (False, True)]  # fmt: skip
    assert_same_bits(*runs)


@pytest.mark.parametrize(("schedule", "world", "flags"), [
    ("interleaved", 2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 4}),
    ("interleaved", 2, {"pp": 2, "num_layers_per_virtual_pipeline_stage": 1,
                        "microbatch_group_size_per_virtual_pipeline_stage": 4}),
    ("interleaved", 3, {"pp": 3, "pipeline_schedule": "interleaved"}),  # 8 layers on 6 stages, 8 microbatches in groups of 3
    ("zbv", 2, {"pp": 2, "pipeline_schedule": "zbv", "decoder_first_pipeline_num_layers": 1}),
    ("interleaved", 2, {"pp": 2, **CHUNKS, "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}),
    ("zb-h2", 3, {"pp": 3, "pipeline_schedule": "zb-h2"}),
])  # fmt: skip
def test_other_cuts(pool, references, schedule, world, flags):
    """More chunks, larger groups, uneven stages."""
    config = config_for(MODELS["gpt_tied"], **flags)
    assert pipeline_of(config).schedule == schedule
    assert_equal_runs(run_everywhere(pool, config, world, 2), references["gpt_tied"], 1e-10)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "dualpipe"])
def test_dropout_is_drawn_alike(pool, schedule):
    """By layer and microbatch, whichever chunk runs them and when."""
    model = dataclasses.replace(MODELS["gpt_tied"], hidden_dropout=0.2, attention_dropout=0.1)
    one = run_everywhere(None, config_for(model), 1, 2)
    assert_equal_runs(run_everywhere(pool, config_for(model, pp=2, **FLAGS[schedule]), 2, 2), one, 1e-10)


def test_transport_changes_no_bit(pool):
    """Through shared memory or through gloo, where both neighbours of two ranks are the same rank."""
    for schedule in ("interleaved", "zbv"):
        config = config_for(MODELS["gpt_tied"], precision="fp32", pp=2, **FLAGS[schedule])
        assert_same_bits(*(run_everywhere(pool, config, 2, 2, shared_memory=shared) for shared in (True, False)))
