"""fp16: gradients against fp64, a scale that all ranks move together, skipped steps that leave no trace, restarts."""

import dataclasses
import json

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    MODELS,
    cases,
    config_for,
    local_batches,
    merge,
    pieces,
    replace,
    run_everywhere,
    run_steps,
)

import pretrain_gpt
from megatron_lite.comm.mesh import Axis, build_mesh
from megatron_lite.models.norm import LayerNorm
from megatron_lite.optim.scaler import LossScale
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.parallel.vocab import cross_entropy
from megatron_lite.parallel.wgrad import attach_grad_buffers
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, restore, save
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")
LAYOUTS = [(2, {}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2})]


def fp16(model, precision="fp16", scale=2.0**8, window=1000, hysteresis=2, **flags):
    """As people have it: ordinary weights and rate, so that rounding does not grow from step to step."""
    config = config_for(dataclasses.replace(model, init_method_std=0.1), precision=precision, **flags)
    if precision == "fp16":
        config = replace(config, "precision", initial_loss_scale=scale, loss_scale_window=window, hysteresis=hysteresis)
    return replace(config, "optimizer", lr=1e-3)


@pytest.mark.parametrize(("model", "world", "flags"), cases(
    [("llama_gqa", 1, {}), ("gpt_tied", 2, {}), ("llama_gqa", *LAYOUTS[1])],
    [(name, *row) for name in MODELS for row in [(1, {}), *LAYOUTS]]))
def test_gradients_are_those_of_fp64(pool, model, world, flags):
    run = run_everywhere(pool, fp16(MODELS[model], **flags), world, 2)
    exact = run_everywhere(None, fp16(MODELS[model], precision="fp64"), 1, 2)
    assert run["losses"] == pytest.approx(exact["losses"], rel=2e-4)
    assert run["norms"] == pytest.approx(exact["norms"], rel=4e-3)
    largest = max(g.abs().max().item() for g in exact["grads"].values())
    for name, theirs in exact["grads"].items():
        assert run["grads"][name].dtype == torch.float32
        scale = max(theirs.abs().max().item(), 1e-2 * largest)
        assert (run["grads"][name].double() - theirs).abs().max().item() <= 1e-2 * scale, name


def inject(trainer, rank, step_of):
    """One gradient of `rank` overflows in the first backward of the steps for which step_of() is true."""
    backward, seen = trainer.executor._backward, []

    def run_backward(action, run):
        backward(action, run)
        if trainer.mesh.rank == rank and step_of() and not seen:
            seen.append(action)
            trainer.engine.buckets[-1].params[-1].main_grad.view(-1)[3] = float("inf")

    trainer.executor._backward = run_backward
    return seen


def overflow_run(rank, world, config, bad_rank):
    """Steps 0 to 4, the gradient of `bad_rank` overflowing in step 1: what each step did."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    now = [0]
    inject(trainer, bad_rank, lambda: now[0] == 1)
    steps = []
    for now[0] in range(5):
        before = [state.master.clone() for state in trainer.optimizer.states]
        report = train_step(trainer, local_batches(config, trainer.mesh, now[0]), now[0], 0)
        same = all(torch.equal(a, state.master) for a, state in zip(before, trainer.optimizer.states, strict=True))
        moments = sum(float(m.double().sum()) for state in trainer.optimizer.states for m in state.moments.values())
        steps.append((report.stepped, report.loss_scale, same, trainer.optimizer.steps, moments))
        assert report.fault is None  # the scale has somewhere to go
    return steps


@pytest.mark.parametrize(("world", "flags"), cases([LAYOUTS[0], LAYOUTS[2]], LAYOUTS))
def test_an_overflow_on_one_rank_skips_on_all(pool, world, flags):
    config = fp16(GPT, scale=1024.0, window=2, hysteresis=1, **flags)
    for bad_rank in (0, world - 1):
        for steps in pool.run(overflow_run, world, world, config, bad_rank):
            assert [step[:4] for step in steps] == [
                (True, 1024.0, False, 1), (False, 1024.0, True, 1), (True, 512.0, False, 2), (True, 512.0, False, 3),
                (True, 1024.0, False, 4)]  # fmt: skip
            assert steps[1][4] == steps[0][4]  # the moments, too


def clean_run(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    trainer.loss_scale = LossScale(512.0, 0, 0)
    return run_steps(trainer, range(3))


def recovered_run(rank, world, config):
    """The same three steps after an overflow that lowered the scale to what `clean_run` starts from."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    now = [True]
    inject(trainer, 0, lambda: now[0])
    assert not train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0).stepped
    now[0] = False
    assert trainer.loss_scale == LossScale(512.0, 0, 0)
    return run_steps(trainer, range(3))


@pytest.mark.parametrize(("world", "flags"), cases([(2, {})], [(2, {}), (2, {"pp": 2, "pipeline_schedule": "zb-h1"})]))
def test_a_skipped_step_leaves_no_trace(pool, world, flags):
    config = fp16(LLAMA, scale=1024.0, hysteresis=1, **flags)
    clean, recovered = (merge(pool.run(fn, world, world, config)) for fn in (clean_run, recovered_run))
    assert clean["losses"] == recovered["losses"] and clean["norms"] == recovered["norms"]
    for name, param in clean["params"].items():
        assert torch.equal(param, recovered["params"][name]), name


def save_in_the_middle(rank, world, config):
    """Four steps, overflow in the third; saved; two more. The states on the way and the end."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    now = [0]
    inject(trainer, world - 1, lambda: now[0] == 2)
    for now[0] in range(4):
        train_step(trainer, local_batches(config, trainer.mesh, now[0]), now[0], now[0] * GLOBAL_BATCH)
    save(trainer, Progress(4, 4 * GLOBAL_BATCH, None, GLOBAL_BATCH))
    return trainer.loss_scale, run_steps(trainer, range(4, 7)), trainer.loss_scale


def load_in_the_middle(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    progress, _ = restore(trainer)
    assert progress.skipped_samples == GLOBAL_BATCH and progress.scheduled_samples == 3 * GLOBAL_BATCH
    return trainer.loss_scale, run_steps(trainer, range(4, 7)), trainer.loss_scale


@pytest.mark.parametrize(("world", "flags"), cases([(2, {})], [(2, {}), (4, {"tp": 2, "pp": 2})]))
def test_a_restart_goes_on_bit_for_bit(pool, tmp_path, world, flags):
    config = fp16(GPT, scale=1024.0, window=3, hysteresis=1, **flags)
    saving = replace(config, "checkpoint", save=str(tmp_path))
    loading = replace(config, "checkpoint", load=str(tmp_path))
    straight = pool.run(save_in_the_middle, world, world, saving)
    resumed = pool.run(load_in_the_middle, world, world, loading)
    assert straight[0][0] == LossScale(512.0, 1, 0) and straight[0][2] == LossScale(1024.0, 1, 1)
    assert [(r[0], r[2]) for r in resumed] == [(s[0], s[2]) for s in straight]
    before, after = merge([s[1] for s in straight]), merge([r[1] for r in resumed])
    assert before["losses"] == after["losses"] and before["norms"] == after["norms"]
    for name, param in before["params"].items():
        assert torch.equal(param, after["params"][name]), name


def test_small_updates_are_not_lost_in_fp16():
    """A step far below an fp16 ulp of 1 moves the fp32 master of a norm's weight (N21)."""
    config = replace(fp16(LLAMA), "optimizer", lr=2e-5, weight_decay=0.0)
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    run_steps(trainer, range(3))
    for state in trainer.optimizer.states:
        for slot, param in zip(state.bucket.layout.slots, state.bucket.params, strict=True):
            if param.shard.name.endswith("layernorm.weight"):
                moved = (state.master[slot.start : slot.start + slot.numel] - 1).abs()
                assert (moved > 1e-6).float().mean() > 0.9 and moved.max() < 1e-4 and (param == 1).all()
    assert all(tensor.dtype == torch.float16 for *_, tensor in pieces(trainer, "param"))


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**15])
def test_gradients_of_rare_words_do_not_vanish(scale):
    """A probability of 1e-7 is nothing in fp16: the gradient is made at a scale at which it is there."""
    logits = torch.zeros(2, 512, dtype=torch.float64)
    logits[:, 0] = 12.0
    labels, mask = torch.tensor([0, 5]), torch.ones(2)
    found = {}
    for dtype in (torch.float64, torch.float16):
        x = logits.to(dtype, copy=True).requires_grad_()
        loss = cross_entropy(x.clone(), labels, mask, Axis("tp"), 512)
        loss.backward(torch.full((), scale, dtype=loss.dtype))
        found[dtype] = x.grad.double() / scale
    true, half = found[torch.float64], found[torch.float16]
    assert true[0, 1] == pytest.approx(6.1e-6, rel=0.02)
    if scale > 1:
        torch.testing.assert_close(half, true, rtol=2e-3, atol=0.0)


def test_layer_norm_has_fp32_statistics():
    """Far from zero, 16-bit mean and 1/std would cost the gradients of weight and bias half of their digits."""
    tp = TensorParallel(Axis("tp"), False, torch.float16, CPU)
    norm = LayerNorm("norm", 64, 1e-5, tp)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(256, 64, generator=generator) + 8).half()
    dy = torch.randn(256, 64, generator=generator).half()
    with torch.no_grad():
        norm.weight.fill_(1), norm.bias.zero_()
    attach_grad_buffers(norm.parameters())
    norm(x.requires_grad_()).backward(dy)
    wide = x.detach().double()
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm.weight.main_grad.double(), (dy.double() * normed).sum(0), rtol=1e-5, atol=1e-4)


def test_a_run_looks_for_its_scale(tmp_path, capsys):
    """From 2^32 a run finds its scale: skipped steps are counted, their data is consumed, their rate is not."""
    flags = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --vocab-size 40 "
             "--mock-data --lr 1e-3 --lr-warmup-iters 10 --train-iters 30 --log-interval 1 --peak-tflops 1 "
             f"--fp16 --hysteresis 1 --distributed-backend gloo --jsonl {tmp_path}/log.jsonl --save {tmp_path}/s")  # fmt: skip
    assert pretrain_gpt.main(flags.split()) == 0
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "event" not in row]
    skipped = [row["skipped-iterations"] for row in rows]
    first = skipped.index(0)
    assert 10 < first < 30 and skipped[:first] == [1] * first  # more in a row than --max-consecutive-skips
    assert [row["loss-scale"] for row in rows[: first + 1]] == [2.0**32 / 2**i for i in range(first + 1)]
    assert [row["consumed-samples"] for row in rows] == [2 * (i + 1) for i in range(30)]
    taken, rates = 0, []
    for row in rows:
        rates.append(1e-3 * min(taken, 10) / 10)
        taken += 1 - int(row["skipped-iterations"])
        if taken >= 10:
            break
    assert [row["learning-rate"] for row in rows[: len(rates)]] == pytest.approx(rates)
    assert "loss scale: 4294967296.0 |" in said and "number of skipped iterations:   1 |" in said
    meta = json.loads(next((tmp_path / "s").glob("iter_0000030/*.json")).read_text())
    assert "loss_scale" in json.dumps(meta) and "is not finite" not in said
