"""A run that is saved and loaded goes on as if nothing had happened: bit for bit at the same layout, to 1e-10 at another."""

import dataclasses

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    assert_equal_runs,
    config_for,
    merge,
    replace,
    run_steps,
    slow,
)

from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.comm.launch import RankError
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, restore, save, tensors

CPU = torch.device("cpu")
BEFORE, AFTER = 3, 3


def save_and_go_on(rank, world, config):
    """Three steps, a checkpoint, three more: what the resumed runs are compared with."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    run_steps(trainer, range(BEFORE))
    save(trainer, Progress(BEFORE, BEFORE * GLOBAL_BATCH, "a-wandb-id"))
    return run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def load_and_go_on(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    torch.manual_seed(rank + 77)  # a new process has another global generator
    progress, says = restore(trainer)
    assert progress == Progress(BEFORE, BEFORE * GLOBAL_BATCH, "a-wandb-id"), progress
    assert trainer.optimizer.steps == BEFORE and f"loading iteration {BEFORE}" in says
    return run_steps(trainer, range(BEFORE, BEFORE + AFTER))


def everywhere(pool, fn, config, world):
    return merge([fn(0, 1, config)] if world == 1 else pool.run(fn, world, world, config))


def at(folder, model, precision="fp64", save=False, **flags):
    config = replace(config_for(model, precision=precision, **flags), "checkpoint", load=str(folder))
    return replace(config, "checkpoint", save=str(folder), load=None) if save else config


SOURCES = {  # name -> (model, ranks, flags)
    "llama_1": (LLAMA, 1, {}),
    "llama_tp2": (LLAMA, 2, {"tp": 2, "sp": True}),
    "llama_tp2_pp2": (LLAMA, 4, {"tp": 2, "pp": 2}),
    "gpt_pp2_dp2": (GPT, 4, {"pp": 2}),
    "gpt_dp2": (GPT, 2, {}),
    "gpt_tp2": (GPT, 2, {"tp": 2}),
    "gpt_interleaved": (GPT, 2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "gpt_zbv": (GPT, 2, {"pp": 2, "pipeline_schedule": "zbv"}),
    "gpt_dualpipe": (GPT, 4, {"pp": 4, "pipeline_schedule": "dualpipe"}),
}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """(folder, the run that went on) of a source layout; each is run once."""
    made = {}

    def of(name):
        if name not in made:
            model, world, flags = SOURCES[name]
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, everywhere(pool, save_and_go_on, at(folder, model, save=True, **flags), world)
        return made[name]

    return of


@pytest.mark.parametrize(("source", "world", "flags", "divisor"), [
    slow("llama_tp2", 1, {}, 8), ("llama_tp2", 2, {"pp": 2}, 8), ("llama_tp2", 4, {"tp": 4}, 32),
    slow("llama_tp2_pp2", 1, {}, 8), ("llama_tp2_pp2", 2, {"tp": 2}, 45), ("llama_tp2_pp2", 4, {"pp": 4}, 1),
    ("llama_1", 8, {"tp": 2, "pp": 2, "sp": True}, 96), slow("llama_1", 3, {"pp": 3}, 8),
    slow("gpt_pp2_dp2", 2, {}, 8), ("gpt_pp2_dp2", 1, {}, 128), slow("gpt_pp2_dp2", 4, {"pp": 4}, 8),
    slow("gpt_pp2_dp2", 4, {"tp": 4}, 8),
    ("gpt_dp2", 2, {"pp": 2, "decoder_first_pipeline_num_layers": 1}, 8), ("gpt_dp2", 4, {}, 8),
    ("gpt_interleaved", 1, {}, 8), slow("gpt_zbv", 2, {"pp": 2}, 8), ("gpt_zbv", 4, {"pp": 2, "tp": 2}, 16),
    ("gpt_dp2", 2, {"pp": 2, "pipeline_schedule": "zbv"}, 8),
    slow("gpt_dualpipe", 1, {}, 8), ("gpt_dualpipe", 4, {"pp": 2, "pipeline_schedule": "dualpipe"}, 64),
    slow("llama_tp2", 4, {"pp": 2, "tp": 2, "pipeline_schedule": "dualpipe"}, 8),
    ("llama_1", 4, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}, 8),
    ("gpt_tp2", 1, {}, 90), ("gpt_tp2", 2, {"pp": 2, "ddp_bucket_size": 5000}, 64),
])  # fmt: skip
def test_another_layout_goes_on_alike(pool, saved, source, world, flags, divisor):
    """Weights, moments and step count, at any layout and any padding of the vocabulary (C07, C08, C10, C11)."""
    folder, straight = saved(source)
    model = dataclasses.replace(SOURCES[source][0], make_vocab_size_divisible_by=divisor)
    run = everywhere(pool, load_and_go_on, at(folder, model, **flags), world)
    assert_equal_runs(run, straight, 1e-10)


@pytest.mark.parametrize(("model", "world", "flags", "precision"), [
    (GPT, 1, {}, "fp32"), slow(GPT, 1, {}, "bf16"),
    slow(LLAMA, 4, {"tp": 2, "sp": True}, "fp32"), (LLAMA, 4, {"tp": 2, "sp": True}, "bf16"),
    (GPT, 4, {"tp": 2, "pp": 2}, "fp32"), slow(GPT, 4, {"tp": 2, "pp": 2}, "bf16"),
    slow(GPT, 4, {"pp": 2, "pipeline_schedule": "dualpipe"}, "fp32"),
    (GPT, 4, {"pp": 2, "pipeline_schedule": "dualpipe"}, "bf16"),
])  # fmt: skip
def test_the_same_layout_goes_on_bit_for_bit(pool, tmp_path, model, world, flags, precision):
    """With dropout (C12), and from fp32 masters under bf16 (C19)."""
    model = dataclasses.replace(model, hidden_dropout=0.1, attention_dropout=0.1)
    straight = everywhere(pool, save_and_go_on, at(tmp_path, model, precision, save=True, **flags), world)
    run = everywhere(pool, load_and_go_on, at(tmp_path, model, precision, **flags), world)
    assert run["losses"] == straight["losses"] and run["norms"] == straight["norms"]
    for name, param in straight["params"].items():
        assert torch.equal(run["params"][name], param), name
        assert torch.equal(run["grads"][name], straight["grads"][name]), name


def test_sgd_goes_on_with_its_momentum(pool, tmp_path):
    def sgd(config):
        return replace(config, "optimizer", optimizer="sgd", clip_grad=0.0)

    straight = everywhere(pool, save_and_go_on, sgd(at(tmp_path, GPT, save=True, tp=2)), 2)
    assert_equal_runs(everywhere(pool, load_and_go_on, sgd(at(tmp_path, GPT)), 1), straight, 1e-10)


def state_after(config, **checkpoint):
    """(progress, says, optimizer steps, {(prefix, name, offset): tensor}) of one process after loading."""
    config = replace(config, "checkpoint", **checkpoint)
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    progress, says = restore(trainer)
    parts = {}
    for _, (prefix, shard, shape, start, flat) in tensors(trainer, True):
        assert start == 0
        tensor = flat.view(shape)
        for box in shard.boxes:
            parts[prefix, box.name, box.offset] = box.of_local(tensor).clone()
    return progress, says, trainer.optimizer.steps, parts


def test_weights_alone(saved):
    folder, _ = saved("llama_tp2")
    _, _, steps, everything = state_after(at(folder, LLAMA))
    assert steps == BEFORE and any(t.abs().max() > 0 for (prefix, *_), t in everything.items() if prefix != "model")
    for options, progress, said in ((("no_load_optim",), Progress(BEFORE, BEFORE * GLOBAL_BATCH, "a-wandb-id"), "loading"),
                                    (("finetune",), Progress(), "starting at iteration 0")):  # fmt: skip
        where, says, steps, parts = state_after(at(folder, LLAMA), **dict.fromkeys(options, True))
        assert where == progress and said in says and steps == 0
        for (prefix, name, offset), tensor in parts.items():
            expected = everything[prefix, name, offset] if prefix == "model" else torch.zeros_like(tensor)
            assert torch.equal(tensor, expected), (prefix, name)


def test_loading_weights_alone_under_bf16_fills_masters_and_weights(tmp_path):
    save_and_go_on(0, 1, at(tmp_path, GPT, "fp32", save=True))
    config = replace(at(tmp_path, GPT, "bf16"), "checkpoint", finetune=True)
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    restore(trainer)
    exact = state_after(at(tmp_path, GPT, "fp32"))[3]
    for state in trainer.optimizer.states:
        assert torch.equal(state.bucket.param, state.master.bfloat16())
        for slot, param in zip(state.bucket.layout.slots, state.bucket.params, strict=True):
            master = state.master[slot.start : slot.start + slot.numel].view(param.shape)
            for box in param.shard.boxes:
                assert torch.equal(box.of_local(master), exact["model", box.name, box.offset])


def test_a_checkpoint_without_moments(tmp_path):
    config = replace(at(tmp_path, GPT, save=True), "checkpoint", no_save_optim=True)
    save_and_go_on(0, 1, config)
    with pytest.raises(CheckpointError, match="optim/exp_avg"):
        state_after(at(tmp_path, GPT))
    assert state_after(at(tmp_path, GPT), no_load_optim=True)[2] == 0


WRONG = {  # what differs -> (source, how the loading model differs, what the message must name)
    "wider": ("llama_tp2", {"hidden_size": 64}, "--hidden-size"),
    "other MLP": ("llama_tp2", {"ffn_hidden_size": 96}, "--ffn-hidden-size"),
    "more layers": ("llama_tp2", {"num_layers": 6}, "--num-layers"),
    "fewer layers": ("llama_tp2", {"num_layers": 3}, "--num-layers"),
    "now tied": ("llama_tp2", {"untie_embeddings_and_output_weights": False}, "--untie-embeddings-and-output-weights"),
    "now untied": ("gpt_tp2", {"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights"),
    "other KV heads": ("llama_tp2", {"num_query_groups": 4}, "--num-query-groups"),
    "no biases": ("gpt_tp2", {"disable_bias_linear": True}, "--disable-bias-linear"),
    "other norm": ("gpt_tp2", {"normalization": "RMSNorm"}, "--normalization"),
    "rotary": ("gpt_tp2", {"position_embedding_type": "rope"}, "--position-embedding-type"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_architecture_is_refused_by_name(saved, name):
    source, changes, named = WRONG[name]
    folder, _ = saved(source)
    with pytest.raises(CheckpointError) as caught:
        state_after(at(folder, dataclasses.replace(SOURCES[source][0], **changes)))
    assert any(named in problem for problem in caught.value.problems), caught.value.problems


SILENT = {  # the same shapes, another function
    "heads": ("gpt_tp2", {"num_attention_heads": 4, "kv_channels": 8}, "--num-attention-heads"),
    "rope theta": ("llama_tp2", {"rotary_base": 500000.0}, "--rotary-base"),
    "rope pairs": ("llama_tp2", {"rotary_interleaved": True}, "--rotary-interleaved"),
    "gelu": ("gpt_tp2", {"openai_gelu": True}, "--openai-gelu"),
}


@pytest.mark.parametrize("name", SILENT)
def test_another_function_of_the_same_shapes_is_refused(saved, name):
    source, changes, named = SILENT[name]
    folder, _ = saved(source)
    with pytest.raises(CheckpointError) as caught:
        state_after(at(folder, dataclasses.replace(SOURCES[source][0], **changes)))
    assert named in str(caught.value)


def test_fine_tuning_may_stretch_the_positions(saved):
    config = at(saved("llama_tp2")[0], dataclasses.replace(LLAMA, rotary_base=500000.0))
    assert state_after(config, finetune=True)[0] == Progress()


def test_what_may_change_may_change(saved):
    """Batch, dropout, smoothing, rates and data are the command line's, not the checkpoint's (C23)."""
    folder, _ = saved("gpt_tp2")
    config = at(folder, dataclasses.replace(GPT, hidden_dropout=0.3, label_smoothing=0.0, init_method_std=0.5))
    config = replace(replace(config, "train", global_batch_size=16, micro_batch_size=4), "optimizer", lr=3e-5)
    assert state_after(config)[0].iteration == BEFORE


def refused(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    with pytest.raises(CheckpointError) as caught:
        restore(trainer)
    return caught.value.problems


def test_all_ranks_refuse_together(pool, saved):
    folder, _ = saved("llama_tp2")
    config = at(folder, dataclasses.replace(LLAMA, num_layers=6), tp=2, pp=2)
    said = pool.run(refused, 4, 4, config)
    assert said == [said[0]] * 4 and any("--num-layers" in problem for problem in said[0])
    with pytest.raises(RankError):  # and the helper above does notice a load that goes well
        pool.run(refused, 1, 1, at(folder, LLAMA))
