"""--grad-compression powersgd: nothing is lost but for later, the same bits on all ranks, and the bytes that it promises."""

import dataclasses

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    assert_equal_runs,
    config_for,
    local_batches,
    merge,
    replace,
    run_everywhere,
    run_layout,
    run_steps,
    slow,
)

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.optim import compress
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, restore, save
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")
LAYOUTS = [(GPT, 2, {}), (GPT, 2, {"zero_stage": 1}), (LLAMA, 4, {"tp": 2, "sp": True}), (GPT, 4, {"pp": 2}),
           (GPT, 4, {"pp": 2, "pipeline_schedule": "dualpipe"}),
           (LLAMA, 4, {"zero_stage": 1, "zero_replica_size": 2})]  # fmt: skip


def fast(*places):
    """All layouts; those at other places with --full alone. Between them the tests below run each layout on every commit."""
    return [layout if place in places else slow(*layout) for place, layout in enumerate(LAYOUTS)]


def compressed(config, rank=2, **more):
    return replace(config, "parallel", grad_compression="powersgd", grad_compression_rank=rank, **more)


def sgd(model, **flags):
    return config_for(model, optimizer="sgd", **flags)


def full_rank(rank, world, config, steps):
    """As `run_layout`, with every matrix compressed, however many bytes that takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compress, "worthwhile", lambda rows, cols, rank: True)
        return run_layout(rank, world, config, steps)


@pytest.mark.parametrize(("model", "world", "flags"), fast(0, 2, 4))
def test_full_rank_is_exact(pool, model, world, flags):
    """R = min(rows, cols): the gradients, norms and weights of exact sums, where gradients have full rank and where not."""
    config = sgd(model, **flags)
    run = merge(pool.run(full_rank, world, world, compressed(config, 4096), 3))
    assert_equal_runs(run, run_everywhere(pool, config, world, 3), 1e-8)
    if "pp" not in flags:
        assert_equal_runs(run, run_everywhere(None, sgd(model), 1, 3), 1e-8)


def telescoped(rank, world, config, steps):
    """Every step's gradient, its exact sum at the same weights, and what the ranks' memories hold after it."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    engine, dp = trainer.engine, trainer.mesh.dp_cp
    exact, held, found = [], [], []
    decompress = engine._decompress

    def watched():
        for bucket in engine.buckets:  # gradients with the memory of the steps before on top of them
            own = bucket.grad - bucket.low_rank.error * engine._scale
            exact.append(comm.all_reduce(own, dp).clone())
            held.append(comm.all_reduce(bucket.low_rank.error.clone(), dp))
        decompress()
        found.append([bucket.grad.clone() for bucket in engine.buckets])

    engine._decompress = watched
    totals = None
    for step in range(steps):
        exact.clear(), held.clear()
        train_step(trainer, local_batches(config, trainer.mesh, step), step, 0)
        totals = totals or [[torch.zeros_like(e), torch.zeros_like(e)] for e in exact]
        errors = []
        for bucket, total, want, before, applied in zip(engine.buckets, totals, exact, held, found[-1], strict=True):
            after = comm.all_reduce(bucket.low_rank.error.clone(), dp)
            scale = want.abs().max()
            assert (applied - (want + before - after)).abs().max() <= 1e-10 * scale
            total[0] += want
            total[1] += applied
            assert ((total[0] - total[1]) - after).abs().max() <= 1e-10 * scale * (step + 1)
            for start, end in bucket.low_rank.others:
                assert torch.equal(applied[start:end], want[start:end])
            errors.append(float((total[0] - total[1]).norm() / total[0].norm()))
    assert max(errors) > 1e-4  # something was left out
    return [[g.tolist() for g in found[-1]], errors]


@pytest.mark.parametrize("flags", [{}, {"zero_stage": 1}])
def test_what_is_left_out_comes_later(pool, flags):
    """applied = exact + memory before - memory after, and so over all steps; every rank applies the same bits."""
    one, other = pool.run(telescoped, 2, 2, compressed(sgd(LLAMA, **flags)), 4)
    assert one[0] == other[0]


@pytest.mark.parametrize(("model", "world", "flags"), fast(1, 3, 5))
def test_overlap_changes_no_bit(pool, model, world, flags):
    """`merge` in run_everywhere has copies and replicas agree to the bit."""
    config = compressed(config_for(dataclasses.replace(model, init_method_std=0.1), precision="fp32", **flags))
    run = run_everywhere(pool, config, world, 3)
    late = run_everywhere(pool, replace(config, "parallel", no_overlap_grad_reduce=True), world, 3, shared_memory=False)
    assert (late["losses"], late["norms"]) == (run["losses"], run["norms"])
    assert all(torch.equal(param, late["params"][name]) for name, param in run["params"].items())


def test_first_steps_are_exact(pool):
    config = sgd(GPT)
    exact, run = run_everywhere(pool, config, 2, 3), run_everywhere(pool, compressed(config, grad_compression_start_iter=2), 2, 3)
    assert run["norms"][:2] == exact["norms"][:2] and run["norms"][2] != exact["norms"][2]
    assert run["losses"] == exact["losses"]


def counted(rank, world, config):
    """Elements that a step gives to all-reduces over dp, and what the formula says."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    sent, start = [], comm.start_all_reduce

    def counting(x, axis, *args, **kwargs):
        if axis is trainer.mesh.dp_cp:
            sent.append(x.numel())
        return start(x, axis, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "start_all_reduce", counting)
        train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)
    sent.remove(2)  # loss and tokens
    r, wanted, whole = config.parallel.grad_compression_rank, 0, 0
    for param in (p for chunk in trainer.chunks for p in chunk.parameters()):
        whole += param.numel()
        rows, cols = param.shape if param.dim() == 2 else (param.numel(), 1)
        wanted += min(r * (rows + cols), rows * cols) if param.dim() == 2 else param.numel()
    return sum(sent), wanted, whole


@pytest.mark.parametrize(("rank", "world", "flags"), [(1, 2, {}), (4, 2, {"zero_stage": 1}), (2, 4, {"tp": 2})])
def test_bytes(pool, rank, world, flags):
    for sent, wanted, whole in pool.run(counted, world, world, compressed(sgd(LLAMA, **flags), rank)):
        assert sent == wanted < whole / 2


def memories(trainer):
    return [tensor.clone() for bucket in trainer.engine.buckets for tensor in (bucket.low_rank.error, bucket.low_rank.q)]


def overflowing(rank, world, config, bad_rank):
    """Steps 0 to 3; in step 1 a gradient of `bad_rank` overflows. Per step: taken, scale, whether the memory is the old one."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    backward, seen, now, steps = trainer.executor._backward, [], 0, []

    def run_backward(action, run):
        backward(action, run)
        if trainer.mesh.rank == bad_rank and now == 1 and not seen:
            seen.append(action)
            trainer.engine.buckets[-1].params[-1].main_grad.view(-1)[3] = float("inf")

    trainer.executor._backward = run_backward
    for now in range(4):
        before = memories(trainer)
        report = train_step(trainer, local_batches(config, trainer.mesh, now), now, 0)
        same = all(torch.equal(a, b) for a, b in zip(before, memories(trainer), strict=True))
        assert all(torch.isfinite(memory).all() for memory in memories(trainer))
        steps.append((report.stepped, report.loss_scale, same))
    return steps


@pytest.mark.parametrize("flags", [{}, {"pp": 2}])
def test_a_skipped_step_leaves_the_memory_alone(pool, flags):
    world = 4 if flags else 2
    config = compressed(config_for(dataclasses.replace(GPT, init_method_std=0.1), precision="fp16", **flags))
    config = replace(config, "precision", initial_loss_scale=1024.0, hysteresis=1)
    for steps in pool.run(overflowing, world, world, config, world - 1):
        assert steps == [(True, 1024.0, False), (False, 1024.0, True), (True, 512.0, False), (True, 512.0, False)]


def saved(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    run_steps(trainer, range(3))
    save(trainer, Progress(3, 3 * GLOBAL_BATCH))
    return run_steps(trainer, range(3, 5))


def resumed(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    says = restore(trainer)[1]
    empty = all(not bucket.low_rank.error.any() for bucket in trainer.engine.buckets)
    return run_steps(trainer, range(3, 5)) | {"empty": empty, "says": says}


def test_resume(pool, tmp_path):
    """Bit for bit at the same parallel settings; at others the memory starts empty, in so many words, and alike each time."""
    config = compressed(config_for(GPT, precision="bf16", tp=2))
    goes_on = merge(pool.run(saved, 4, 4, replace(config, "checkpoint", save=str(tmp_path))))
    config = replace(config, "checkpoint", load=str(tmp_path))
    again = pool.run(resumed, 4, 4, config)
    assert not any(one["empty"] or "starts empty" in one["says"] for one in again)
    again = merge(again)
    assert (again["losses"], again["norms"]) == (goes_on["losses"], goes_on["norms"])
    assert all(torch.equal(param, again["params"][name]) for name, param in goes_on["params"].items())
    for other in (replace(config, "parallel", zero_stage=1), replace(config, "parallel", grad_compression_rank=3)):
        first, second = pool.run(resumed, 4, 4, other), pool.run(resumed, 4, 4, other)
        assert all(one["empty"] and "starts empty" in one["says"] for one in first)
        assert first[0]["losses"] == second[0]["losses"] and first[0]["norms"] == second[0]["norms"]


def test_memory_is_counted(pool):
    for world, flags in ((2, {}), (2, {"zero_stage": 1})):
        for sizes in pool.run(held, world, world, compressed(config_for(GPT, precision="fp32", **flags))):
            gradients, memory, counted = sizes
            assert counted == gradients + memory and memory > gradients


def held(rank, world, config):
    engine = build_trainer(config, build_mesh(grid_of(config, world), CPU)).engine
    memory = sum(bucket.low_rank.bytes() for bucket in engine.buckets)
    return sum(bucket.grad.nbytes for bucket in engine.buckets), memory, engine.bytes()["gradients"]


def learned(rank, world, config):
    """Losses on one batch, over and over."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    return [train_step(trainer, local_batches(config, trainer.mesh, 0), step, 0).loss for step in range(25)]


def test_it_learns(pool):
    """A quarter of the bytes. One batch learnt by heart is the hardest case: the loss falls more slowly, by more than half."""
    config = config_for(dataclasses.replace(GPT, init_method_std=0.02), precision="fp32")
    exact, low = pool.run(learned, 2, 2, config)[0], pool.run(learned, 2, 2, compressed(config, 4))[0]
    fallen = exact[0] - exact[-1]
    assert fallen > 0.5 and low[0] == exact[0] and low[-1] < exact[0] - 0.5 * fallen, (exact, low)
