"""Every layout loads what every layout saved: weights and moments bit for bit, and the steps after it."""

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    assemble,
    assert_equal_runs,
    cases,
    config_for,
    merge,
    replace,
    run_steps,
    slow,
)

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, pieces_of, restore, save

CPU = torch.device("cpu")
BEFORE, AFTER = 2, 3
LAYOUTS = {
    "tp2_pp2": (4, {"tp": 2, "pp": 2}),
    "dp4_zero1": (4, {"zero_stage": 1}),
    "dp2_pp2_zero3": (4, {"pp": 2, "zero_stage": 3}),
    "pp2_v2": (2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "zbv": (2, {"pp": 2, "pipeline_schedule": "zbv"}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
}
MODELS = {"gpt": GPT, "llama": LLAMA}


def state_of(trainer):
    """[(key, full shape, offset, length, tensor)] of all that this rank would save."""
    return [(p.key, p.full_shape, p.offset, p.length, p.tensor.detach().clone()) for p in pieces_of(trainer, True)]


def save_and_go_on(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    run_steps(trainer, range(BEFORE))
    save(trainer, Progress(BEFORE, BEFORE * GLOBAL_BATCH))
    return state_of(trainer), run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def load_and_go_on(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    assert restore(trainer)[0] == Progress(BEFORE, BEFORE * GLOBAL_BATCH)
    return state_of(trainer), run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def everywhere(pool, fn, layout, model, precision, folder, **train):
    """({key: full tensor} at the checkpoint, the run after it)."""
    world, flags = LAYOUTS[layout] if isinstance(layout, str) else layout
    config = config_for(MODELS[model], precision=precision, **flags)
    config = replace(config, "checkpoint", **{"save" if fn is save_and_go_on else "load": str(folder)})
    answers = pool.run(fn, world, world, replace(config, "train", **train))
    return assemble(piece for state, _ in answers for piece in state), merge([run for _, run in answers])


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """(folder, state, the run that went on) of a layout; each is run once."""
    made = {}

    def of(*source):
        if source not in made:
            folder = tmp_path_factory.mktemp("_".join(source))
            made[source] = folder, *everywhere(pool, save_and_go_on, *source, folder)
        return made[source]

    return of


def assert_same_state(state, stored):
    assert state.keys() == stored.keys() and any(key.startswith("optim/exp_avg_sq/") for key in stored)
    for key, tensor in stored.items():
        assert torch.equal(state[key], tensor), key


EVERY = [(source, target, model, precision) for precision in ("fp64", "fp32") for source in LAYOUTS for target in LAYOUTS
         for model in MODELS]  # fmt: skip
FAST = [("tp2_pp2", "dp2_pp2_zero3", "llama", "fp64"), ("dp4_zero1", "zbv", "gpt", "fp64"), ("pp2_v2", "tp2_sp", "gpt", "fp32")]


@pytest.mark.parametrize(("source", "target", "model", "precision"), cases(FAST, EVERY))
def test_matrix(pool, saved, source, target, model, precision):
    folder, stored, straight = saved(source, model, precision)
    state, run = everywhere(pool, load_and_go_on, target, model, precision, folder)
    assert_same_state(state, stored)
    if precision == "fp64":
        assert_equal_runs(run, straight, 1e-10)
        return
    for kind in ("losses", "norms"):
        for mine, theirs in zip(run[kind], straight[kind], strict=True):
            assert abs(mine - theirs) <= 1e-6 * abs(theirs), (kind, run[kind], straight[kind])


@pytest.mark.parametrize(("ranks", "stage"), [(3, 1), slow(1, 0), slow(3, 3)])
def test_a_sharded_optimizer_at_a_number_of_ranks_that_divides_nothing(pool, tmp_path, ranks, stage):
    """ZeRO-1 at dp 2 goes on at dp 3 and 1 (C07): other padding, other cuts, a global batch that all of them divide."""
    stored, straight = everywhere(pool, save_and_go_on, (2, {"zero_stage": 1}), "gpt", "fp64", tmp_path, global_batch_size=6)
    layout = ranks, {"zero_stage": stage}
    state, run = everywhere(pool, load_and_go_on, layout, "gpt", "fp64", tmp_path, global_batch_size=6)
    assert_same_state(state, stored)
    assert_equal_runs(run, straight, 1e-10)
