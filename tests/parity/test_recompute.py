"""Activations computed again: the same bits as when they are kept, fewer bytes, and no collective more than need be."""

import dataclasses

import pytest
import torch
from layouts import GPT, LLAMA, assert_equal_runs, config_for, local_batches, replace, run_everywhere, run_layout, run_steps

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.config import ActivationConfig
from megatron_lite.offload import Offload
from megatron_lite.planner.recompute import KEPT, OFFLOADED, RECOMPUTED, Span, spans
from megatron_lite.recompute import recompute
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

MODELS = {name: dataclasses.replace(model, hidden_dropout=0.2, attention_dropout=0.2)
          for name, model in (("llama_gqa", LLAMA), ("gpt_tied", GPT))}  # fmt: skip
ALL_MODULES = ("core_attn", "layernorm", "mlp_act")
FORMS = {
    "core_attn": ActivationConfig("selective"),
    "layernorm": ActivationConfig("selective", recompute_modules=("layernorm",)),
    "mlp_act": ActivationConfig("selective", recompute_modules=("mlp_act",)),
    "selective": ActivationConfig("selective", recompute_modules=ALL_MODULES),
    "uniform_1": ActivationConfig("full", "uniform", 1),
    "uniform_3": ActivationConfig("full", "uniform", 3),  # 4 layers: a unit of three and one of one
    "block_1": ActivationConfig("full", "block", 1),
    "block_2": ActivationConfig("full", "block", 2),
}
LAYOUTS = {  # name -> (ranks, flags)
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "pp2_zb-h1": (2, {"pp": 2, "pipeline_schedule": "zb-h1"}),
    "pp2_zbv": (2, {"pp": 2, "pipeline_schedule": "zbv"}),
    "tp2_sp_pp2_zbv": (4, {"tp": 2, "sp": True, "pp": 2, "pipeline_schedule": "zbv"}),
}
FAST = [("tp2_sp", "llama_gqa", "selective"), ("tp2_sp", "llama_gqa", "uniform_1"), ("tp2", "gpt_tied", "uniform_3"),
        ("tp2_sp", "gpt_tied", "uniform_1"), ("dp2", "gpt_tied", "block_1"), ("pp2", "gpt_tied", "uniform_1"),
        ("pp2", "llama_gqa", "selective"), ("pp2_zb-h1", "llama_gqa", "uniform_3"), ("pp2_zb-h1", "gpt_tied", "selective"),
        ("pp2_zbv", "gpt_tied", "uniform_1"), ("tp2_sp_pp2_zbv", "llama_gqa", "uniform_1")]  # fmt: skip
EVERY = [(layout, model, form) for layout in LAYOUTS for model in MODELS for form in FORMS]


def config_of(model, form, precision="fp64", **parallel):
    return dataclasses.replace(config_for(MODELS[model], precision=precision, **parallel), activations=FORMS[form])


@pytest.fixture(scope="module")
def kept():
    """Runs without recomputation, by layout and model."""
    made = {}

    def of(pool, layout, model, precision="fp64"):
        if (layout, model, precision) not in made:
            world, flags = LAYOUTS.get(layout, (1, {}))
            config = config_for(MODELS[model], precision=precision, **flags)
            made[layout, model, precision] = run_everywhere(pool, config, world, steps=2)
        return made[layout, model, precision]

    return of


def assert_same_bits(run, reference):
    assert run["losses"] == reference["losses"] and run["norms"] == reference["norms"]
    for kind in ("grads", "params"):
        assert run[kind].keys() == reference[kind].keys()
        for name, tensor in reference[kind].items():
            assert torch.equal(run[kind][name], tensor), f"{kind}: {name}"


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_one_process(kept, model, form, precision):
    reference = kept(None, "alone", model, precision)
    assert_same_bits(run_everywhere(None, config_of(model, form, precision), 1, steps=2), reference)


@pytest.mark.parametrize("layout, model, form", [
    pytest.param(*row, marks=() if row in FAST else pytest.mark.full) for row in EVERY])  # fmt: skip
def test_layouts(pool, kept, layout, model, form):
    world, flags = LAYOUTS[layout]
    run = run_everywhere(pool, config_of(model, form, **flags), world, steps=2)
    assert_same_bits(run, kept(pool, layout, model))
