"""A step that is not finite is never taken in silence: every rank skips, and one line says where the first bad value arose."""

import pytest
import torch
from layouts import GPT, LLAMA, config_for, local_batches, merge, replace, run_everywhere, run_steps, slow

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.training.nonfinite import FINITE_AGAIN
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")



def layer_of(trainer, number):
    return next((layer for chunk in trainer.chunks for layer in chunk.layers if layer.layer == number), None)


def spoil(trainer, what, layer, microbatch, times):
    """On this rank, `times` times: the output of `layer` ("activation") or the gradient that enters it ("gradient") is NaN
    in one microbatch."""
    now, left = [None], [times]
    forward = trainer.executor._forward

    def run_forward(step, run):
        now[0] = step.action.microbatch
        forward(step, run)

    def hook(_module, _inputs, out):
        if now[0] != microbatch or not left[0]:
            return None
        left[0] -= 1
        if what == "activation":
            return out * float("nan")
        out.register_hook(lambda grad: grad * float("nan"))
        return None

    trainer.executor._forward = run_forward
    return layer_of(trainer, layer).register_forward_hook(hook)


def faults(rank, world, config, bad_rank, what, layer, microbatch, times=1000):
    """What each of three steps said; the second is spoiled."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    reports = [train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)]
    before = [state.master.clone() for state in trainer.optimizer.states]
    hook = spoil(trainer, what, layer, microbatch, times) if rank == bad_rank else None
    reports.append(train_step(trainer, local_batches(config, trainer.mesh, 1), 1, 0))
    assert all(torch.equal(a, state.master) for a, state in zip(before, trainer.optimizer.states, strict=True))
    if hook is not None:
        hook.remove()
    reports.append(train_step(trainer, local_batches(config, trainer.mesh, 1), 1, 0))
    assert [report.stepped for report in reports] == [True, False, True]
    assert reports[0].fault is None and reports[2].fault is None
    return reports[1].fault


@pytest.mark.parametrize(("precision", "model", "world", "flags", "bad_rank", "what", "layer", "microbatch", "expected"), [
    ("fp64", GPT, 1, {}, 0, "activation", 1, 5, "is the output of layers.1, microbatch 5, on rank 0 (tp 0, dp 0, pp 0)"),
    ("fp32", GPT, 2, {}, 1, "activation", 2, 3, "is the output of layers.2, microbatch 3, on rank 1 (tp 0, dp 1, pp 0)"),
    slow("bf16", LLAMA, 2, {"pp": 2}, 1, "activation", 3, 6, "output of layers.3, microbatch 6, on rank 1 (tp 0, dp 0, pp 1)"),
    ("fp16", LLAMA, 2, {"pp": 2}, 0, "activation", 0, 2, "the output of layers.0, microbatch 2, on rank 0 (tp 0, dp 0, pp 0)"),
    slow("fp32", LLAMA, 2, {"tp": 2}, 1, "activation", 2, 1, "output of layers.2, microbatch 1, on rank 1 (tp 1, dp 0, pp 0)"),
    slow("fp64", LLAMA, 2, {}, 1, "gradient", 2, 1,
     "the gradient of layers.2.mlp.down_proj.weight, microbatch 1, on rank 1 (tp 0, dp 1, pp 0)"),
    slow("bf16", GPT, 2, {"pp": 2}, 0, "gradient", 1, 4, "the gradient of layers.1.mlp.down_proj.bias, microbatch 4, on rank 0"),
    ("fp32", LLAMA, 2, {"pp": 2, "pipeline_schedule": "zb-h1"}, 1, "gradient", 2, 4,
     "the gradient of layers.2.mlp.down_proj.weight, microbatch 4, on rank 1"),
    slow("fp32", LLAMA, 4, {"tp": 2, "sp": True, "pp": 2}, 2, "gradient", 3, 7,
     "down_proj.weight, microbatch 7, on rank 2 (tp 0, dp 0, pp 1)"),
])  # fmt: skip
def test_the_report_names_the_first(pool, precision, model, world, flags, bad_rank, what, layer, microbatch, expected):
    config = config_for(model, precision=precision, **flags)
    if precision == "fp16":  # a loss that is not finite is reported whatever scale could be tried
        config = replace(config, "precision", initial_loss_scale=16.0)
    arguments = (config, bad_rank, what, layer, microbatch)
    said = [faults(0, 1, *arguments)] if world == 1 else pool.run(faults, world, world, *arguments)
    assert len(set(said)) == 1 and expected in said[0], said
    assert ("every loss and activation of it is finite" in said[0]) == (what == "gradient")


def test_what_does_not_come_again_is_no_fault_of_the_data(pool):
    """A bit that flipped: the step is skipped all the same, and running it again shows where not to look."""
    for what in ("activation", "gradient"):
        said = pool.run(faults, 2, 2, config_for(GPT, precision="fp32"), 1, what, 2, 3, 1)
        assert set(said) == {FINITE_AGAIN}


def bad_weight(rank, world, config, bad_rank, name):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    if rank == bad_rank:
        for param in (p for chunk in trainer.chunks for p in chunk.parameters()):
            for box in param.shard.boxes:
                if box.name == name:
                    box.of_local(param.data).view(-1)[0] = float("inf")
    return train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0).fault


@pytest.mark.parametrize(("world", "flags", "bad_rank", "name"), [
    (2, {"tp": 2}, 1, "layers.2.self_attn.k_proj.weight"), slow(2, {}, 1, "layers.0.mlp.up_proj.weight"),
    slow(2, {"pp": 2}, 1, "layers.3.input_layernorm.weight"), slow(4, {"tp": 2, "pp": 2}, 3, "lm_head.weight"),
])  # fmt: skip
def test_a_bad_weight_is_named(pool, world, flags, bad_rank, name):
    said = pool.run(bad_weight, world, world, config_for(LLAMA, precision="fp32", **flags), bad_rank, name)
    assert len(set(said)) == 1 and f"is the weight {name}, on rank {bad_rank} (" in said[0], said


def bad_copy(rank, world, config):
    """The gradient of one rank's copy of a norm weight, which another rank counts in the norm, is not finite."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    finish = trainer.engine.finish

    def finish_and_spoil():
        finish()
        if rank == world - 1:
            layer_of(trainer, 3).input_layernorm.weight.main_grad[0] = float("nan")

    trainer.engine.finish = finish_and_spoil
    report = train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)
    return report.stepped, report.fault


def test_a_copy_that_is_not_counted_is_looked_at(pool):
    assert set(pool.run(bad_copy, 2, 2, config_for(LLAMA, precision="fp32", tp=2))) == {(False, FINITE_AGAIN)}


def run_after_a_skip(rank, world, config):
    """A spoiled step, then three from the same start."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    hook = spoil(trainer, "gradient", 1, 2, 1000) if layer_of(trainer, 1) is not None else None
    assert not train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0).stepped
    if hook is not None:
        hook.remove()
    return run_steps(trainer, range(3))


@pytest.mark.parametrize(("world", "flags"), [(2, {}), slow(4, {"tp": 2, "pp": 2})])
def test_looking_leaves_no_trace(pool, world, flags):
    config = config_for(GPT, precision="bf16", **flags)
    run, clean = merge(pool.run(run_after_a_skip, world, world, config)), run_everywhere(pool, config, world, 3)
    assert run["losses"] == clean["losses"] and run["norms"] == clean["norms"]
    for name, param in clean["params"].items():
        assert torch.equal(run["params"][name], param), name
