"""Who drops what: the rules of rng.py, seen in the masks of real runs."""

import dataclasses

import pytest
import torch
from layouts import (
    GPT,
    LLAMA,
    assert_equal_runs,
    config_for,
    local_batches,
    replace,
    run_everywhere,
    run_steps,
)

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.models import transformer
from megatron_lite.models.attention import core_attention
from megatron_lite.rng import REPLICATED, SHARDED, DropoutKey, dropout
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")


def with_dropout(model, hidden=0.1, attention=0.1, **layers):
    return dataclasses.replace(model, hidden_dropout=hidden, attention_dropout=attention, **layers)


def masks_of_a_step(rank, world, config, iteration):
    """What one rank drops in a step: hidden masks in the order of the forwards, and attention's (microbatch, layer, seed)."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    hidden, attention = [], []
    drop, generator = transformer.dropout, DropoutKey.generator

    def spy_dropout(x, p, of):
        scale = drop(torch.ones_like(x.detach()), p, of)
        hidden.append(scale != 0)
        return x * scale

    def spy_generator(key, device, layer, site, role):
        made = generator(key, device, layer, site, role)
        if site == "attention":
            attention.append((key.microbatch, layer, made.initial_seed()))
        return made

    transformer.dropout, DropoutKey.generator = spy_dropout, spy_generator
    try:
        train_step(trainer, local_batches(config, trainer.mesh, 0), iteration, 0)
    finally:
        transformer.dropout, DropoutKey.generator = drop, generator
    return hidden, attention


TWO_LAYERS = {"num_layers": 2}
SITES = 1 + 2 * 2  # of a microbatch: embedding, and two in each of two layers


@pytest.fixture(scope="module")
def one():
    return masks_of_a_step(0, 1, config_for(with_dropout(GPT, **TWO_LAYERS)), 3)


def test_tensor_ranks_drop_alike_what_they_hold_alike(pool, one):
    """Without sequence parallel each rank has the whole residual stream (N17): same masks as each other and as one process.
    Heads are cut: their masks differ."""
    (hidden_0, attention_0), (hidden_1, attention_1) = pool.run(
        masks_of_a_step, 2, 2, config_for(with_dropout(GPT, **TWO_LAYERS), tp=2), 3)
    assert len(hidden_0) == 8 * SITES and len(attention_0) == 8 * 2
    for mine, theirs, alone in zip(hidden_0, hidden_1, one[0], strict=True):
        assert torch.equal(mine, theirs) and torch.equal(mine, alone)
    assert not {seed for *_, seed in attention_0} & {seed for *_, seed in attention_1}


def test_sequence_shards_differ(pool):
    results = pool.run(masks_of_a_step, 2, 2, config_for(with_dropout(GPT, **TWO_LAYERS), tp=2, sp=True), 3)
    (hidden_0, _), (hidden_1, _) = results
    assert hidden_0[0].shape[0] == GPT.seq_length // 2
    assert not any(torch.equal(a, b) for a, b in zip(hidden_0, hidden_1, strict=True))


def test_every_site_of_every_microbatch_is_its_own(one):
    hidden, attention = one
    assert len({tuple(mask.flatten().tolist()) for mask in hidden}) == len(hidden) == 8 * SITES
    assert len({seed for *_, seed in attention}) == len(attention) == 8 * 2


def test_replicas_share_out_the_masks_of_one_process(pool, one):
    """Global microbatch j is dropped alike wherever it runs: replicas differ, and the sum does not depend on dp."""
    results = pool.run(masks_of_a_step, 2, 2, config_for(with_dropout(GPT, **TWO_LAYERS)), 3)
    for replica, (hidden, attention) in enumerate(results):
        expected = [one[0][j * SITES : (j + 1) * SITES] for j in range(replica, 8, 2)]
        assert all(torch.equal(a, b) for a, b in zip(hidden, sum(expected, []), strict=True))
        assert attention == [entry for entry in one[1] if entry[0] % 2 == replica]


def test_iterations_and_seeds_differ(one):
    other = masks_of_a_step(0, 1, config_for(with_dropout(GPT, **TWO_LAYERS)), 4)
    assert not any(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert not {entry[2] for entry in one[1]} & {entry[2] for entry in other[1]}
    again = masks_of_a_step(0, 1, config_for(with_dropout(GPT, **TWO_LAYERS)), 3)
    assert all(torch.equal(a, b) for a, b in zip(one[0], again[0], strict=True)) and one[1] == again[1]
    reseeded = masks_of_a_step(0, 1, replace(config_for(with_dropout(GPT, **TWO_LAYERS)), "train", seed=8), 3)
    assert not any(torch.equal(a, b) for a, b in zip(one[0], reseeded[0], strict=True))


def test_keys():
    """The name of a draw is all that counts."""
    key = DropoutKey(1, 2, 3, 0)

    def first(key, layer=0, site="mlp_output", role=REPLICATED):
        return torch.rand(4, generator=key.generator(CPU, layer, site, role)).tolist()

    assert first(key) == first(key) == first(DropoutKey(1, 2, 3, 1))  # replicated: whatever the tp rank
    others = [first(key, role=SHARDED), first(DropoutKey(1, 2, 3, 1), role=SHARDED), first(key, 1), first(key, -1),
              first(key, site="attention"), first(DropoutKey(2, 2, 3, 0)), first(DropoutKey(1, 3, 3, 0)),
              first(DropoutKey(1, 2, 4, 0))]  # fmt: skip
    assert len({tuple(x) for x in [first(key), *others]}) == 9


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_scale_mean_and_gradient(p):
    x = torch.randn(200, 500, dtype=torch.float64).requires_grad_()
    y = dropout(x, p, torch.Generator().manual_seed(5))
    kept = y != 0
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    torch.testing.assert_close(y, torch.where(kept, x / (1 - p), 0.0))
    y.backward(torch.full_like(y, 3.0))
    torch.testing.assert_close(x.grad, torch.where(kept, 3.0 / (1 - p), 0.0).double())
    assert dropout(x, 0.0, torch.Generator()) is x and dropout(x, p, None) is x


def test_attention_drops_probabilities():
    """With the identity for values the output is the dropped probabilities themselves; gradients follow the same mask."""
    s, b, k, g, p = 130, 2, 2, 3, 0.25  # more than one block of rows
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(s, b, k, g, s, dtype=torch.float64, generator=generator).mul_(0.1).requires_grad_()
    keys = torch.randn(s, b, k, 1, s, dtype=torch.float64, generator=generator).requires_grad_()
    eye = torch.eye(s, dtype=torch.float64).view(s, 1, 1, 1, s).expand(s, b, k, 1, s).contiguous().requires_grad_()
    out = core_attention(q, keys, eye, p, torch.Generator().manual_seed(3))

    def reference(mask):
        scores = torch.einsum("ibkgd,jbkd->bkgij", q, keys.squeeze(3))
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        return torch.einsum("bkgij,jbkd->ibkgd", scores.softmax(-1) * mask / (1 - p), eye.squeeze(3))

    mask = (out.detach() != 0).permute(1, 2, 3, 0, 4)  # [b, k, g, i, j]
    torch.testing.assert_close(out, reference(mask), rtol=1e-12, atol=1e-14)
    seen = mask[..., torch.ones(s, s).tril().bool()].double().mean().item()
    assert abs(seen - (1 - p)) < 0.005
    weight = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    mine = torch.autograd.grad(out, (q, keys, eye), weight)
    for a, b_ in zip(mine, torch.autograd.grad(reference(mask), (q, keys, eye), weight), strict=True):
        torch.testing.assert_close(a, b_, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("hidden", "attention"), [(0.2, 0.0), (0.0, 0.2)])
def test_each_kind_has_an_effect_of_its_own(hidden, attention):
    off, on = (run_everywhere(None, config_for(model), 1, 1) for model in (GPT, with_dropout(GPT, hidden, attention)))
    assert abs(on["losses"][0] / off["losses"][0] - 1) > 1e-4


@pytest.mark.parametrize(("world", "flags"), [(2, {"tp": 2}), (2, {"pp": 2}), (2, {}), (4, {"tp": 2, "pp": 2})])
def test_hidden_dropout_does_not_depend_on_the_layout(pool, world, flags):
    """Where no activation is cut, layouts equal one process although they drop (microbatches of equal size)."""
    model = with_dropout(GPT, 0.2, 0.0)
    run = run_everywhere(pool, config_for(model, **flags), world, 3)
    assert_equal_runs(run, run_everywhere(None, config_for(model), 1, 3), 1e-10)


@pytest.mark.parametrize(("model", "world", "flags"), [("gpt", 2, {"tp": 2}), ("gpt", 4, {"tp": 2, "sp": True}),
                                                        ("llama", 4, {"tp": 4, "sp": True})])  # fmt: skip
def test_replicated_weights_stay_equal(pool, model, world, flags):
    """`run_everywhere` compares the copies of norms, biases and shared KV heads bit for bit; and two runs are equal."""
    config = config_for(with_dropout({"gpt": GPT, "llama": LLAMA}[model], 0.3, 0.3), precision="bf16", **flags)
    first, second = (run_everywhere(pool, config, world, 2) for _ in range(2))
    assert first["losses"] == second["losses"] and first["norms"] == second["norms"]
    assert all(torch.equal(p, second["params"][name]) for name, p in first["params"].items())


class SameBatches:
    """A loader that gives the global batch of step 0 for ever."""

    def __init__(self, config, mesh):
        self.batches = local_batches(config, mesh, 0)

    def next_step(self):
        return self.batches

    def close(self):
        pass


def evaluated(rank, world, config):
    """Validation loss, and the training loss of the same samples."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    losses = [evaluate(trainer, SameBatches(config, trainer.mesh), n, lambda: False) for n in (1, 3)]
    return [*losses, train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0).loss]


def test_evaluation_drops_nothing(pool):
    """And it is the training loss of the same samples, whatever the cut (N13)."""
    plain, dropped = (evaluated(0, 1, config_for(model)) for model in (GPT, with_dropout(GPT, 0.5, 0.5)))
    assert plain == pytest.approx([plain[0]] * 3, rel=1e-12) and dropped[:2] == plain[:2]
    assert abs(dropped[2] / plain[2] - 1) > 1e-3
    both_ways = {"pp": 2, "pipeline_schedule": "dualpipe"}  # its losses come from both ends
    for world, micro_batch, flags in ((2, 1, {"pp": 2}), (4, 2, {"tp": 2}), (2, 1, both_ways)):
        config = config_for(with_dropout(GPT, 0.5, 0.5), micro_batch=micro_batch, **flags)
        for losses in pool.run(evaluated, world, world, config):
            assert losses[:2] == pytest.approx(plain[:2], rel=1e-12)


def test_training_goes_on_with_the_masks_of_its_iteration():
    """Steps 2 and 3 draw what they would have drawn had 0 and 1 not been run in this process."""
    config = config_for(with_dropout(GPT))
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    whole = run_steps(trainer, range(4))
    fresh = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    run_steps(fresh, range(2))
    torch.manual_seed(99)  # the global generator is no part of it
    assert run_steps(fresh, range(2, 4))["losses"] == whole["losses"][2:]
