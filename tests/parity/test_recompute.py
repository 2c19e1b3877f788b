"""Activations computed again: the same bits as when they are kept, fewer bytes, and no collective more than need be."""

import dataclasses
import itertools

import pytest
import torch
from layouts import GPT, LLAMA, SEQ, assert_same_bits, cases, config_for, local_batches, merge, run_everywhere, run_steps, slow

from megatron_lite.arguments import parse
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.config import ActivationConfig
from megatron_lite.offload import HostLayer, Offload
from megatron_lite.parallel.wgrad import attach_grad_buffers
from megatron_lite.pipeline.stage import build_chunks
from megatron_lite.planner.memory import chunk_bytes
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.planner.recompute import KEPT, OFFLOADED, RECOMPUTED, Span, spans
from megatron_lite.rng import DropoutKey
from megatron_lite.training.ledger import Meter
from megatron_lite.training.setup import DeviceError, build_trainer, grid_of

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
FAST = [("tp2_sp", "llama_gqa", "selective"), ("tp2_sp", "llama_gqa", "uniform_1"), ("dp2", "gpt_tied", "block_1"),
        ("pp2_zb-h1", "gpt_tied", "uniform_3"), ("pp2_zbv", "gpt_tied", "uniform_1")]  # fmt: skip
ALONE = [("llama_gqa", "bf16"), ("gpt_tied", "fp64")]  # models and precisions of one process


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "precision"), cases(ALONE, itertools.product(MODELS, ("fp64", "bf16"))))
def test_one_process(kept, model, form, precision):
    reference = kept(None, "alone", model, precision)
    assert_same_bits(run_everywhere(None, config_of(model, form, precision), 1, steps=2), reference)


@pytest.mark.parametrize(("layout", "model", "form"), cases(FAST, itertools.product(LAYOUTS, MODELS, FORMS)))
def test_layouts(pool, kept, layout, model, form):
    world, flags = LAYOUTS[layout]
    run = run_everywhere(pool, config_of(model, form, **flags), world, steps=2)
    assert_same_bits(run, kept(pool, layout, model))


# ------------------------------------------------------------------------------------------------- memory and collectives


def watched(rank, world, config):
    """Of one rank: what autograd keeps after the first forward and at most, and collectives of a step by name."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), torch.device("cpu")))
    chunk, batch = trainer.chunks[0], local_batches(config, trainer.mesh, 0)[0]
    counts = dict.fromkeys(COLLECTIVES, 0)
    originals = {name: getattr(comm, name) for name in COLLECTIVES}

    def counted(name):
        def call(x, axis, *args, **options):
            if axis.name == "tp" and x.dim() == 3:  # activations, not the loss's sums
                counts[name] += 1
            return originals[name](x, axis, *args, **options)

        return call

    meter = Meter(chunk.parameters())
    for name in COLLECTIVES:
        setattr(comm, name, counted(name))
    try:
        with meter.watching():
            key = DropoutKey(config.train.seed, 0, 0, rank)
            loss = chunk(batch.tokens, batch.labels, batch.loss_mask, key)
            forward = meter.live
            loss.backward()
    finally:
        for name in COLLECTIVES:
            setattr(comm, name, originals[name])
    return forward, meter.peak, counts


COLLECTIVES = ("start_all_reduce", "start_all_gather", "start_reduce_scatter")  # the others call these


@pytest.fixture(scope="module")
def seen(pool):
    made = {}

    def of(model, form, world, **parallel):
        key = (model, form, world, *parallel)
        if key not in made:
            config = config_for(MODELS[model], precision="fp32", micro_batch=2, **parallel)
            if form:
                config = dataclasses.replace(config, activations=FORMS[form])
            made[key] = config, pool.run(watched, world, world, config)[0]
        return made[key]

    return of


@pytest.mark.parametrize(("model", "parallel"), cases(
    [("gpt_tied", {}), ("llama_gqa", {"tp": 2, "sp": True})],
    itertools.product(MODELS, ({}, {"tp": 2}, {"tp": 2, "sp": True}))))  # fmt: skip
def test_memory_is_what_the_planner_says(seen, model, parallel):
    """Kept after a forward, to the byte but for the embedding's indices; at most, within 5 %; and it falls."""
    lowest = None
    for form in (None, *FORMS):
        config, (forward, peak, _) = seen(model, form, parallel.get("tp", 1), **parallel)
        chunk = pipeline_of(config).chunks(0)[0]
        plan = chunk_bytes(config, chunk, "block")
        tokens = SEQ * config.train.micro_batch_size
        assert forward - plan.forward == tokens * (8 + 1)
        assert abs(peak - (plan.forward + plan.running)) <= 0.05 * peak, (form, peak, plan)
        if form is None:
            everything = lowest = forward
        else:
            assert forward < everything, f"{form} saves nothing"
            lowest = min(lowest, forward)
    assert lowest < everything / 3


def test_no_collective_more_than_need_be(seen):
    """A layer's forward has 2 gathers and 2 reduce-scatters. Run again, it leaves out the last one, and the backward finds
    both gathered inputs there: one reduce-scatter more in all. Selective recomputation repeats none."""
    layers = LLAMA.num_layers
    for model in MODELS:
        plain, selective, full = (seen(model, form, 2, tp=2, sp=True)[1][2] for form in (None, "selective", "uniform_1"))
        assert selective == plain and min(plain["start_all_gather"], plain["start_reduce_scatter"]) >= 4 * layers
        assert full == plain | {"start_reduce_scatter": plain["start_reduce_scatter"] + layers}
        plain, full = (seen(model, form, 2, tp=2)[1][2] for form in (None, "uniform_1"))
        assert full == plain | {"start_all_reduce": plain["start_all_reduce"] + layers}


# --------------------------------------------------------------------------------------------------------------- offload


def offloaded(chunk, count):
    """The chunk with its first `count` layers offloaded, by plain copies: on CPU the flag itself is refused."""
    chunk.spans = spans(len(chunk.layers), ActivationConfig(cpu_offloading_num_layers=count))
    chunk.offload = Offload(torch.device("cpu"), worth=1024)


@pytest.mark.parametrize("count", [slow(1), 3, slow(4)])
@pytest.mark.parametrize("model", MODELS)
def test_offloaded_layers_give_the_same_bits(kept, model, count):
    trainer = build_trainer(config_for(MODELS[model]), single())
    offloaded(trainer.chunks[0], count)
    run = run_steps(trainer, range(2))
    assert trainer.chunks[0].offload._leaving is None
    assert_same_bits(merge([run]), kept(None, "alone", model))


def test_offloaded_layers_come_back_one_layer_ahead(monkeypatch):
    """Layer i's copies start back when layer i + 1's backward does; before that no copy is on the device."""
    trainer = build_trainer(config_for(MODELS["llama_gqa"], precision="fp32"), single())
    chunk, batch = trainer.chunks[0], local_batches(trainer.config, trainer.mesh, 0)[0]
    offloaded(chunk, 3)
    events, hosts, start, run = [], [], HostLayer.start_return, Offload.run
    monkeypatch.setattr(HostLayer, "start_return", lambda host: (events.append(("back", hosts.index(host))), start(host)))

    def remember(self, layer, x):
        x, host = run(self, layer, x)
        hosts.append(host)
        return x, host

    monkeypatch.setattr(Offload, "run", remember)
    for i, layer in enumerate(chunk.layers):
        layer.register_full_backward_hook(lambda *_, i=i: events.append(("done", i)))
    loss = chunk(batch.tokens, batch.labels, batch.loss_mask, None)
    assert all(copy.returned is None for host in hosts for copy in host.copies.values()) and not hosts[0]._sources
    loss.backward()
    assert [event for event in events if event[0] == "back"] == [("back", 2), ("back", 1), ("back", 0)]
    assert events.index(("back", 2)) < events.index(("done", 3)) and events.index(("back", 1)) < events.index(("done", 2))


def test_offload_is_refused_without_an_accelerator():
    config = dataclasses.replace(config_for(LLAMA), activations=ActivationConfig(cpu_offloading_num_layers=2))
    with pytest.raises(DeviceError, match="--cpu-offloading-num-layers 2.*no accelerator"):
        build_trainer(config, single())


# ------------------------------------------------------------------------------------------------------- the small print


def test_spans_cover_the_chunk():
    assert spans(5, FORMS["uniform_3"]) == [Span(0, 3, RECOMPUTED), Span(3, 5, RECOMPUTED)]
    assert spans(3, FORMS["block_2"]) == [Span(0, 1, RECOMPUTED), Span(1, 2, RECOMPUTED), Span(2, 3, KEPT)]
    assert spans(2, FORMS["block_2"]) == spans(2, FORMS["uniform_1"])
    assert spans(2, FORMS["core_attn"]) == spans(2, ActivationConfig()) == [Span(0, 1, KEPT), Span(1, 2, KEPT)]
    assert spans(2, ActivationConfig(cpu_offloading_num_layers=1)) == [Span(0, 1, OFFLOADED), Span(1, 2, KEPT)]


def test_frozen_layers_below_do_not_stop_the_gradient():
    """The input of the first recomputed layer needs no gradient; the layer's weights do."""
    grads = []
    for form in (ActivationConfig(), FORMS["uniform_1"]):
        config = dataclasses.replace(config_for(MODELS["llama_gqa"]), activations=form)
        chunk = build_chunks(config, single(), pipeline_of(config))[0].initialise(1)
        chunk.embedding.weight.requires_grad_(False)
        attach_grad_buffers(chunk.parameters())
        batch = local_batches(config, single(), 0)[0]
        chunk(batch.tokens, batch.labels, batch.loss_mask, DropoutKey(1, 0, 0, 0)).backward()
        grads.append([p.main_grad for p in chunk.layers[0].parameters()])
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*grads, strict=True))


def test_evaluation_recomputes_nothing(monkeypatch):
    config = config_of("llama_gqa", "uniform_1")
    chunk = build_chunks(config, single(), pipeline_of(config))[0].initialise(1)
    batch = local_batches(config, single(), 0)[0]
    with torch.no_grad():
        assert not chunk(batch.tokens, batch.labels, batch.loss_mask).requires_grad


SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 90 --micro-batch-size 1 --dry-run"
REFUSED = {
    "--recompute-granularity full": "--recompute-method: the second is missing",
    "--recompute-granularity full --recompute-method uniform": "--recompute-num-layers: the second is missing",
    "--recompute-method block": "has no effect: needs --recompute-granularity full",
    "--recompute-activations --recompute-num-layers 2": "has no effect: needs --recompute-granularity full",
    "--recompute-modules layernorm": "has no effect: needs --recompute-granularity selective",
    "--recompute-activations --recompute-modules mlp": "nearest values that work: mlp_act",
    "--recompute-activations --recompute-granularity full": "contradict each other",
    "--recompute-activations --cpu-offloading-num-layers 1": "contradict each other: activations are computed again or",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 9": "nearest values that work: "
                                                                                      "--recompute-num-layers 8",
    "--cpu-offloading-num-layers 9": "no chunk has more than 8 layers",
    "--cpu-offloading-num-layers -1": "must not be negative",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags):
    _, problems = parse(f"{SIZES} {flags}".split(), 1)
    assert any(REFUSED[flags] in str(problem) for problem in problems), problems
