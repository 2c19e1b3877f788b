"""Schedules from files through the whole program, and the split backward: B and W are BW, bit for bit."""

import dataclasses

import pytest
from layouts import GPT, LLAMA, assert_equal_runs, assert_same_bits, config_for, run_everywhere

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement
from megatron_lite.schedules.check import check
from megatron_lite.schedules.file import format_file

MODELS = {"llama_untied": dataclasses.replace(LLAMA, num_layers=8), "gpt_tied": dataclasses.replace(GPT, num_layers=8)}


def whole(actions):
    """Every weight gradient at once with the input gradient."""
    return [action._replace(kind="BW") if action.kind == "B" else action for action in actions if action.kind != "W"]


def apart(actions):
    """Every weight gradient after all else, in the order of the input gradients: the order in which BW adds them up."""
    split = [action._replace(kind="B") if action.kind == "BW" else action for action in whole(actions)]
    return split + [action._replace(kind="W") for action in split if action.kind == "B"]


def halves(actions):
    """Every other microbatch split, its W right after: both kinds in one list."""
    made = []
    for action in whole(actions):
        parts = ("B", "W") if action.kind == "BW" and action.microbatch % 2 else (action.kind,)
        made += [action._replace(kind=kind) for kind in parts]
    return made


def file_of(folder, name, pp, m, form):
    """A named schedule in another form, as a file that the checker accepts."""
    chunks = SCHEDULES[name].default_chunks
    schedule, placement = [form(actions) for actions in build_schedule(name, pp, chunks, m)], schedule_placement(name, pp, chunks)
    check(schedule, placement, m)
    path = folder / f"{name}_{form.__name__}.txt"
    path.write_text(format_file(schedule, placement))
    return str(path)


SPLIT = {  # name -> (model, schedule, ranks, flags, microbatches, precision)
    "1f1b_bf16": ("gpt_tied", "1f1b", 2, {"pp": 2}, 8, "bf16"),
    "interleaved_tp2": ("llama_untied", "interleaved", 4, {"pp": 2, "tp": 2, "sp": True}, 8, "fp32"),
    "zbv_dp2": ("gpt_tied", "zbv", 4, {"pp": 2}, 4, "bf16"),
    "zbv_pp4": ("llama_untied", "zbv", 4, {"pp": 4}, 8, "fp64"),
    "dualpipe": ("gpt_tied", "dualpipe", 2, {"pp": 2}, 8, "fp32"),
    "dualpipe_pp4": ("llama_untied", "dualpipe", 4, {"pp": 4}, 8, "bf16"),
}
FAST = {"interleaved_tp2", "zbv_dp2", "dualpipe"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.full) for n in SPLIT])
def test_b_and_w_are_bw_bit_for_bit(pool, tmp_path, name):
    """Gradients of every parameter, and what two optimizer steps make of them."""
    model, schedule, world, flags, m, precision = SPLIT[name]

    def run(form):
        path = file_of(tmp_path, schedule, flags["pp"], m, form)
        config = config_for(MODELS[model], precision=precision, pipeline_schedule_file=path, **flags)
        return run_everywhere(pool, config, world, 2)

    joined = run(whole)
    for form in (apart, halves):
        assert_same_bits(run(form), joined)


@pytest.mark.parametrize(("schedule", "world", "flags"), [
    ("zbv", 2, {"pp": 2}), ("dualpipe", 4, {"pp": 2, "tp": 2}),
    pytest.param("interleaved", 4, {"pp": 4}, marks=pytest.mark.full),
    pytest.param("zb-h2", 2, {"pp": 2}, marks=pytest.mark.full),
])  # fmt: skip
def test_a_file_runs_as_the_name_does(pool, tmp_path, schedule, world, flags):
    path = file_of(tmp_path, schedule, flags["pp"], 8, list)
    run = run_everywhere(pool, config_for(MODELS["gpt_tied"], precision="fp32", pipeline_schedule_file=path, **flags), world, 2)
    named = config_for(MODELS["gpt_tied"], precision="fp32", pipeline_schedule=schedule, **flags)
    assert_same_bits(run, run_everywhere(pool, named, world, 2))


@pytest.mark.full
def test_a_list_of_ones_own_equals_one_process(pool, tmp_path):
    """A bidirectional list that no name has: each direction's microbatches one by one."""
    path = tmp_path / "mine.txt"
    down = " ".join(f"F{j}.0 F{j + 4}.1 B{j + 4}.1 B{j}.0" for j in range(4)) + " " + " ".join(
        f"W{j}.0 W{j + 4}.1" for j in range(4))  # fmt: skip
    up = " ".join(f"F{j + 4}.1 F{j}.0 B{j}.0 B{j + 4}.1" for j in range(4)) + " " + " ".join(
        f"W{j + 4}.1 W{j}.0" for j in range(4))  # fmt: skip
    path.write_text(f"placement bidirectional\n{down}\n{up}\n")
    for model in MODELS.values():
        config = config_for(model, pp=2, pipeline_schedule_file=str(path))
        assert_equal_runs(run_everywhere(pool, config, 2, 2), run_everywhere(None, config_for(model), 1, 2), 1e-10)
