"""Shared sequences give the gradients of one process: every way, with every other axis, in fp64 at 1e-10."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    MODELS,
    SEQ,
    assert_equal_runs,
    assert_same_bits,
    cases,
    config_for,
    global_batch,
    merge,
    run_everywhere,
    run_layout,
    run_steps,
    slow,
)
from test_load_matrix import LAYOUTS as SAVED_LAYOUTS
from test_load_matrix import assert_same_state, everywhere, load_and_go_on, save_and_go_on
from test_traffic import Counting

from megatron_lite.comm import collectives
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import ActivationConfig, TrainConfig
from megatron_lite.data.loader import Batch
from megatron_lite.models import context_attention, transformer
from megatron_lite.rng import DropoutKey
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")
STEPS = 1
CP, KINDS, DEGREE = "context_parallel_size", "cp_comm_type", "ulysses_degree"
WAYS = {  # name -> (cp, flags); LLAMA has 2 key/value heads: fewer than ranks at cp 4
    "ring2": (2, {KINDS: ("p2p",)}),
    "ring4": (4, {KINDS: ("p2p",)}),
    "gather2": (2, {KINDS: ("allgather",)}),
    "gather4": (4, {KINDS: ("allgather",)}),
    "heads2": (2, {KINDS: ("a2a",)}),
    "heads4": (4, {KINDS: ("a2a",)}),
    "both4": (4, {KINDS: ("a2a+p2p",), DEGREE: 2}),
    "three2": (2, {KINDS: ("p2p", "a2a", "allgather", "p2p")}),  # a way for each layer
    "all4": (4, {KINDS: ("p2p", "a2a", "allgather", "a2a+p2p"), DEGREE: 2}),
}
FULL, CORE = ActivationConfig("full", "uniform", 2), ActivationConfig("selective")
WITH = {  # name -> (ranks beside cp, flags, activations)
    "alone": (1, {}, None),
    "tp2": (2, {"tp": 2}, None),
    "tp2_sp": (2, {"tp": 2, "sp": True}, None),
    "pp2": (2, {"pp": 2}, None),
    "pp2_v2": (2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}, None),
    "pp2_zbv": (2, {"pp": 2, "pipeline_schedule": "zbv"}, None),
    "pp2_dualpipe": (2, {"pp": 2, "pipeline_schedule": "dualpipe"}, None),
    "dp2": (2, {}, None),
    "zero1": (1, {"zero_stage": 1}, None),
    "zero3": (1, {"zero_stage": 3}, None),
    "dp2_zero2": (2, {"zero_stage": 2}, None),
    "full": (1, {}, FULL),
    "core": (1, {}, CORE),
    "tp2_sp_pp2": (4, {"tp": 2, "sp": True, "pp": 2}, None),
    "tp2_pp2_zbv_core": (4, {"tp": 2, "sp": True, "pp": 2, "pipeline_schedule": "zbv"}, CORE),
}
FAST = {
    ("all4", "alone", "llama_gqa"), ("all4", "zero3", "gpt_tied"), ("three2", "tp2_sp", "gpt_tied"),
    ("three2", "pp2_zbv", "llama_gqa"), ("ring2", "core", "llama_gqa"), ("three2", "tp2_sp_pp2", "llama_gqa"),
}  # fmt: skip
EVERY = [(way, other, model) for way, (cp, _) in WAYS.items() for other, (ranks, *_) in WITH.items() for model in MODELS
         if cp * ranks <= 8]  # fmt: skip


def config_of(model, way, other="alone", **more):
    """(ranks, configuration)"""
    cp, flags = WAYS[way]
    ranks, others, activations = WITH[other]
    config = config_for(model, **{CP: cp}, **flags, **others, **more)
    return cp * ranks, dataclasses.replace(config, activations=activations or config.activations)


@pytest.fixture(scope="module")
def references():
    made = {}

    def of(name):
        if name not in made:
            made[name] = run_everywhere(None, config_for(MODELS[name]), 1, STEPS)
        return made[name]

    return of


@pytest.mark.parametrize(("way", "other", "model"), cases(FAST, EVERY))
def test_as_one_process(pool, references, way, other, model):
    world, config = config_of(MODELS[model], way, other)
    assert_equal_runs(run_everywhere(pool, config, world, STEPS), references(model), 1e-10)


@pytest.mark.parametrize("way", [slow("all4"), "three2"])
def test_over_gloo(pool, way):
    """Without shared memory every exchange is a pair of messages, and the bits are the same."""
    world, config = config_of(LLAMA, way)
    assert_same_bits(run_everywhere(pool, config, world, 1, False), run_everywhere(pool, config, world, 1))


@pytest.mark.full
@pytest.mark.parametrize("form", [FULL, CORE], ids=["full", "core"])
def test_recomputed_bits(pool, form):
    world, config = config_of(LLAMA, "all4")
    again = dataclasses.replace(config, activations=form)
    assert_same_bits(run_everywhere(pool, again, world, 1), run_everywhere(pool, config, world, 1))


def half_masked(first, config, mesh, step):
    """The loss is on one half of every sequence: some ranks have no token that counts."""
    tokens, labels, _ = global_batch(step)
    mask = torch.zeros(GLOBAL_BATCH, SEQ)
    mask[:, slice(0, SEQ // 4) if first else slice(SEQ - SEQ // 4, SEQ)] = 1.0
    rows = range(mesh.dp.rank, GLOBAL_BATCH, mesh.dp.size)
    return [Batch(*(t[row : row + 1] for t in (tokens, labels, mask))) for row in rows]


def run_masked(rank, world, config, first):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    return run_steps(trainer, range(1), partial(half_masked, first))


@pytest.mark.parametrize(("way", "first"), cases([("three2", True)], [(w, f) for w in ("three2", "all4") for f in (True, False)]))
def test_loss_on_one_part_of_the_sequence(pool, way, first):
    world, config = config_of(GPT, way)
    run = merge(pool.run(run_masked, world, world, config, first))
    assert_equal_runs(run, merge([run_masked(0, 1, config_for(GPT), first)]), 1e-10)


@pytest.mark.parametrize(("layout", "model"), cases([("ring2_zero1", "llama")], [
    (layout, model) for layout in ("ring2_zero1", "both4_pp2", "tp2_sp_ring2") for model in ("gpt", "llama")]))  # fmt: skip
def test_a_checkpoint_loads_without_the_axis(pool, tmp_path, layout, model, monkeypatch):
    saves = {"ring2_zero1": (2, {CP: 2, "zero_stage": 1}), "both4_pp2": (8, {CP: 4, "pp": 2, **WAYS["both4"][1]}),
             "tp2_sp_ring2": (4, {CP: 2, "tp": 2, "sp": True})}  # fmt: skip
    monkeypatch.setitem(SAVED_LAYOUTS, "alone", (1, {}))
    state, run = everywhere(pool, save_and_go_on, saves[layout], model, "fp64", tmp_path)
    loaded, after = everywhere(pool, load_and_go_on, "alone", model, "fp64", tmp_path)
    assert_same_state(loaded, state)
    assert_equal_runs(after, run, 1e-10)


def masks(rank, world, config):
    """What a rank drops of hidden values in a step, and the seeds of its attention's dropout."""
    trainer, found, seeds = build_trainer(config, build_mesh(grid_of(config, world), CPU)), [], []
    drop, generator = transformer.dropout, DropoutKey.generator

    def spy(x, p, of):
        found.append(drop(torch.ones_like(x.detach()), p, of) != 0)
        return x * found[-1]

    def spy_generator(key, device, layer, site, role):
        made = generator(key, device, layer, site, role)
        seeds.append((site, made.initial_seed()))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "dropout", spy)
        patch.setattr(DropoutKey, "generator", spy_generator)
        train_step(trainer, run_batches(config, trainer.mesh), 0, 0)
    return found, [seed for site, seed in seeds if site == "attention"]


def run_batches(config, mesh):
    tokens, labels, mask = global_batch(0)
    return [Batch(tokens[row : row + 1], labels[row : row + 1], mask[row : row + 1]) for row in range(2)]


def test_ranks_drop_tokens_and_heads_of_their_own(pool):
    model = dataclasses.replace(GPT, num_layers=2, hidden_dropout=0.3, attention_dropout=0.3)
    train = TrainConfig(micro_batch_size=1, global_batch_size=2, train_iters=10, seed=7)
    (mine, seeds), (other, others) = pool.run(masks, 2, 2, config_for(model, train=train, **{CP: 2, KINDS: ("a2a",)}))
    assert mine[0].shape[0] == SEQ // 2 and len(mine) == len(other) == 2 * 5
    assert not any(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert len(seeds) == 4 and not set(seeds) & set(others)


def counted(rank, world, config):
    """What this rank sends in a step, by operation, in elements of the model's dtype; a sum to be scattered in its own."""
    trainer, seen = build_trainer(config, build_mesh(grid_of(config, world), CPU)), Counter()
    transport, shift = collectives._transport, context_attention.start_shift

    def sent(x, axis):
        seen["shift", x.dtype] += x.numel()
        return shift(x, axis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_transport", lambda x, axis: Counting(transport(x, axis), axis.name, seen))
        patch.setattr(context_attention, "start_shift", sent)
        train_step(trainer, run_batches(config, trainer.mesh), 0, 0)
    return seen


@pytest.mark.parametrize(("model", "way"), [(LLAMA, "heads4"), (GPT, "ring2"), slow(LLAMA, "ring4"), slow(GPT, "heads2"),
                                            slow(LLAMA, "gather4")])  # fmt: skip
def test_bytes_are_the_formulas(pool, model, way):
    """Per layer and microbatch: a ring sends 2 b s k d (c-1)/c elements forward, and backward again and of gradients in fp32;
    Ulysses (b s/c)(2 a d + 2 k d)(c-1)/c each way, k at least c."""
    train = TrainConfig(micro_batch_size=1, global_batch_size=2, train_iters=10, seed=7)
    world, config = config_of(model, way, precision="bf16", train=train)
    c, d, times = world, model.head_dim, 2 * model.num_layers  # microbatches x layers
    for seen in pool.run(counted, world, world, config):
        if way.startswith("ring"):
            keys = 2 * SEQ * model.num_kv_heads * d
            assert seen["shift", torch.bfloat16] * c == times * 2 * keys * (c - 1)
            assert seen["shift", torch.float32] * c == times * keys * (c - 1)
        elif way.startswith("heads"):
            heads = 2 * model.num_attention_heads + 2 * max(c, model.num_kv_heads)
            # the count has a rank's own part in it, which stays
            assert seen["cp", "all_to_all", "bytes"] == times * 2 * 2 * SEQ // c * heads * d
        else:
            keys = 2 * SEQ * model.num_kv_heads * d
            assert seen["cp", "all_gather", "bytes"] == times * 2 * 2 * keys  # forward and backward, 2 bytes
            assert seen["cp", "reduce_scatter", "bytes"] == times * 4 * keys


@pytest.mark.full
def test_the_same_run_twice_has_the_same_bits(pool):
    world, config = config_of(LLAMA, "ring2", precision="bf16")
    first, second = (merge(pool.run(run_layout, world, world, config, 2)) for _ in range(2))
    assert_same_bits(first, second)
