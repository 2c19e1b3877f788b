"""Every layout gives the gradients of one process: the table of layouts, in fp64 at 1e-10."""

import itertools

import pytest
from layouts import MODELS, assert_equal_runs, cases, config_for, run_everywhere

LAYOUTS = {  # name -> (ranks, flags)
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "tp4_sp": (4, {"tp": 4, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "dp2": (2, {}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2}),
    "tp2_dp2": (4, {"tp": 2, "sp": True}),
    "pp2_dp2": (4, {"pp": 2}),
    "tp2_pp2_dp2": (8, {"tp": 2, "pp": 2, "sp": True}),
}
FAST = {  # every layout, and both models where layers, stages and replicas are cut
    ("tp2", "llama_gqa"), ("tp2_sp", "llama_gqa"), ("tp2_sp", "gpt_tied"), ("tp4_sp", "llama_gqa"), ("pp2", "gpt_tied"),
    ("pp4", "llama_gqa"), ("dp2", "gpt_tied"), ("tp2_pp2", "gpt_tied"), ("tp2_dp2", "gpt_tied"), ("pp2_dp2", "llama_gqa"),
    ("tp2_pp2_dp2", "llama_gqa"), ("tp2_pp2_dp2", "gpt_tied"),
}  # fmt: skip


@pytest.fixture(scope="module")
def references():
    return {name: run_everywhere(None, config_for(model), 1) for name, model in MODELS.items()}


@pytest.mark.parametrize(("layout", "model"), cases(FAST, itertools.product(LAYOUTS, MODELS)))
def test_layout_equals_one_process(pool, references, layout, model):
    world, flags = LAYOUTS[layout]
    run = run_everywhere(pool, config_for(MODELS[model], **flags), world)
    assert_equal_runs(run, references[model], 1e-10)
