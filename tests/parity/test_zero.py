"""ZeRO keeps less and computes the same: stages 1 to 3 and hybrid shards against one process in fp64 at 1e-10 (raw gradients,
norm, parameters after five steps of AdamW and SGD); overlap on and off, and a resumed run, to the bit."""


import pytest
import torch
from layouts import GLOBAL_BATCH, GPT, LLAMA, assert_equal_runs, config_for, run_everywhere

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
    ("zero1", "dp2", "gpt_tied", "several", "adam"), ("zero1", "dp4", "llama_untied", "one", "sgd"),
    ("zero1", "tp2_dp2", "llama_untied", "several", "sgd"), ("zero1", "pp2_dp2", "gpt_tied", "several", "adam"),
    ("zero2", "dp2", "gpt_tied", "several", "sgd"), ("zero2", "dp4", "llama_untied", "one", "adam"),
    ("zero2", "tp2_dp2", "gpt_tied", "several", "adam"), ("zero2", "pp2_dp2", "gpt_tied", "several", "sgd"),
    ("zero2", "zb-h1_dp2", "llama_untied", "several", "adam"), ("zero2", "zbv_dp2", "gpt_tied", "several", "adam"),
    ("zero3", "dp2", "gpt_tied", "several", "adam"), ("zero3", "dp4", "llama_untied", "several", "sgd"),
    ("zero3", "dp2", "llama_untied", "one", "sgd"), ("zero3", "tp2_dp2", "llama_untied", "several", "adam"),
    ("zero3", "pp2_dp2", "gpt_tied", "several", "sgd"), ("zero3", "interleaved_dp2", "llama_untied", "several", "adam"),
    ("hybrid1", "dp4", "gpt_tied", "several", "sgd"), ("hybrid2", "dp4", "gpt_tied", "several", "adam"),
    ("hybrid3", "dp4", "llama_untied", "several", "sgd"), ("zero3", "tp2_pp2_dp2", "gpt_tied", "several", "adam"),
}  # fmt: skip


def possible(stage, layout, accumulation):
    """Hybrid needs four ranks to share and repeat; a chunked or split pipeline more than one microbatch."""
    _, dp, flags = LAYOUTS[layout]
    return (dp == 4 or not stage.startswith("hybrid")) and (accumulation == "several" or set(flags) <= {"tp", "sp", "pp"})


CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.full)
         for case in ((s, y, m, a, o) for s in STAGES for y in LAYOUTS for m in MODELS for a in ("one", "several")
                      for o in ("adam", "sgd")) if possible(*case[:2], case[3])]  # fmt: skip


def config_of(stage, layout, model, accumulation="several", optimizer="adam", **options):
    _, dp, flags = LAYOUTS[layout]
    micro = GLOBAL_BATCH // dp if accumulation == "one" else 1
    return config_for(MODELS.get(model, model), micro_batch=micro, optimizer=optimizer, **flags, **STAGES.get(stage, {}), **options)


@pytest.fixture(scope="module")
def references():
    return {(name, optimizer): run_everywhere(None, config_for(model, optimizer=optimizer), 1)
            for name, model in MODELS.items() for optimizer in ("adam", "sgd")}  # fmt: skip


@pytest.mark.parametrize(("stage", "layout", "model", "accumulation", "optimizer"), CASES)
def test_zero_equals_one_process(pool, references, stage, layout, model, accumulation, optimizer):
    config = config_of(stage, layout, model, accumulation, optimizer)
    assert_equal_runs(run_everywhere(pool, config, LAYOUTS[layout][0]), references[model, optimizer], 1e-10)
