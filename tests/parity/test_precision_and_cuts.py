"""What must not change the result: precision within its tolerance; the cut into microbatches, buckets, stages, chunks and
split backwards, and the transport, exactly. And what each part of a step must do to the parameters."""

import dataclasses
import math

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    MODELS,
    assert_equal_runs,
    assert_same_bits,
    config_for,
    global_batch,
    local_batches,
    merge,
    pieces,
    replace,
    run_everywhere,
    run_steps,
    slow,
)

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.schedules.actions import Action, Placement, format_schedule, parse_schedule
from megatron_lite.schedules.check import check
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")
PLAIN = {"clip_grad": 0.0, "weight_decay": 0.0, "optimizer": "sgd"}


@pytest.fixture(scope="module")
def reference():
    """One process, made once per configuration."""
    made = {}

    def of(config, steps=2):
        key = repr((config, steps))
        if key not in made:
            made[key] = run_everywhere(None, config, 1, steps)
        return made[key]

    return of


# --------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(("model", "world", "flags"), [
    ("llama_gqa", 2, {"tp": 2, "sp": True}), ("gpt_tied", 4, {"tp": 2, "pp": 2}), ("llama_gqa", 4, {"pp": 2}),
    ("llama_gqa", 4, {"context_parallel_size": 4, "cp_comm_type": ("p2p", "a2a", "allgather", "a2a+p2p"), "ulysses_degree": 2}),
])  # fmt: skip
@pytest.mark.parametrize(("precision", "loss", "norm", "grad"), [("bf16", 1e-3, 2e-2, 5e-2), ("fp32", 1e-5, 1e-5, 1e-5)])
def test_precision(pool, reference, model, world, flags, precision, loss, norm, grad):
    def ordinary(**flags):  # rates and weights as people have them: rounding does not grow from step to step
        config = config_for(dataclasses.replace(MODELS[model], init_method_std=0.1), precision=precision, **flags)
        return replace(config, "optimizer", lr=1e-3)

    run, one = run_everywhere(pool, ordinary(**flags), world, 2), reference(ordinary())
    assert run["losses"] == pytest.approx(one["losses"], rel=loss)
    assert run["norms"] == pytest.approx(one["norms"], rel=norm)
    largest = max(g.abs().max().item() for g in one["grads"].values())
    for name, theirs in one["grads"].items():
        assert theirs.dtype == torch.float32  # summed in fp32 whatever the weights are
        floor = (1e-2 if precision == "bf16" else 1e-3) * largest  # key biases have gradient zero but for rounding
        scale = max(theirs.abs().max().item(), floor)
        assert (run["grads"][name] - theirs).abs().max().item() <= grad * scale, name


def test_bf16_is_close_to_fp32(reference):
    """Twenty steps at a rate at which the norms' weights move (N21): a bf16 run follows an fp32 one."""
    for model in (LLAMA, GPT):
        runs = {}
        for precision in ("bf16", "fp32"):
            config = replace(config_for(model, precision=precision), "optimizer", lr=1e-3)
            runs[precision] = run_everywhere(None, config, 1, 8)
        assert runs["bf16"]["losses"] == pytest.approx(runs["fp32"]["losses"], rel=1e-2)
        norms = [p for name, p in runs["bf16"]["params"].items() if name.endswith("norm.weight")]
        assert norms and all(p.dtype == torch.bfloat16 for p in norms)


def test_small_updates_are_not_lost_in_bf16():
    """A step far below a bf16 ulp of 1 moves the fp32 master of a norm's weight (N21)."""
    config = replace(config_for(LLAMA, precision="bf16"), "optimizer", lr=1e-4, weight_decay=0.0)
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    run_steps(trainer, range(3))
    moved = 0
    for state in trainer.optimizer.states:
        for slot, param in zip(state.bucket.layout.slots, state.bucket.params, strict=True):
            if param.shard.name.endswith("layernorm.weight"):
                master = state.master[slot.start : slot.start + slot.numel]
                assert ((master - 1).abs() > 1e-5).float().mean() > 0.9 and (master - 1).abs().max() < 4e-4
                assert (param == 1).all()  # bf16 cannot show it yet
                moved += 1
    assert moved == 2 * LLAMA.num_layers


# -------------------------------------------------------------------------------------------------------------- cuts


@pytest.mark.parametrize(("world", "micro_batch", "flags"), [
    (1, 2, {}), slow(1, 4, {}), (1, 8, {}), (2, 4, {}), (4, 2, {}),
    slow(2, 1, {"pp": 2, "pipeline_schedule": "gpipe"}), (2, 4, {"pp": 2, "pipeline_schedule": "gpipe"}),
    slow(2, 2, {"pp": 2}), (2, 8, {"pp": 2}), slow(4, 2, {"pp": 4}), (4, 4, {"pp": 4}),
    (2, 2, {"pp": 2, "decoder_first_pipeline_num_layers": 1}), (2, 2, {"pp": 2, "decoder_last_pipeline_num_layers": 1}),
    (3, 1, {"pp": 3, "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}), (3, 1, {"pp": 3}),
])  # fmt: skip
def test_accumulation_cuts(pool, reference, world, micro_batch, flags):
    """Loss masks are uneven, so a mean of means would show (N01); layers are not dropped by uneven stages (N22)."""
    run = run_everywhere(pool, config_for(GPT, micro_batch=micro_batch, **flags), world, 2)
    assert_equal_runs(run, reference(config_for(GPT)), 1e-10)


@pytest.mark.parametrize(("world", "flags", "model"), [
    (4, {"tp": 2, "sp": True}, "llama_gqa"), (4, {"tp": 2, "sp": True}, "gpt_tied"), (2, {"pp": 2}, "gpt_tied"),
    (4, {"tp": 4}, "llama_gqa"), slow(2, {"pp": 2}, "llama_gqa"), slow(4, {"tp": 4}, "gpt_tied"),
])  # fmt: skip
def test_plain_sgd(pool, reference, model, world, flags):
    """Without Adam and clipping, which both hide a wrong scale of the gradient, parameters still agree."""
    def plain(**flags):
        return replace(config_for(MODELS[model], **flags), "optimizer", **PLAIN)

    run = run_everywhere(pool, plain(**flags), world, 3)
    assert_equal_runs(run, reference(plain(), 3), 1e-10)


def test_sgd_is_the_gradient(reference):
    """p1 = p0 - lr * gradient of the mean loss, for every parameter."""
    config = replace(config_for(GPT), "optimizer", **PLAIN, sgd_momentum=0.0)
    start, after = reference(config, 0), reference(config, 1)
    for name, gradient in after["grads"].items():
        torch.testing.assert_close(after["params"][name], start["params"][name] - 1e-2 * gradient, rtol=0, atol=1e-15)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_loss_is_the_mean_over_unmasked_tokens(micro_batch):
    """Against the sums by hand: one division, by the count of the whole global batch."""
    config = config_for(GPT, micro_batch=micro_batch)
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    tokens, labels, mask = global_batch(0)
    total = sum(float(trainer.chunks[0](*(x[i : i + 1] for x in (tokens, labels, mask)))) for i in range(GLOBAL_BATCH))
    report = train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)
    count = int(mask.sum())
    assert report.tokens == count < mask.numel() and report.loss == pytest.approx(total / count, rel=1e-12)


@pytest.mark.parametrize("size", [1, slow(3000), 10**9])
def test_bucket_size_changes_nothing(pool, size):
    for world, flags in ((2, {}), (4, {"pp": 2})):
        configs = [config_for(GPT, precision="fp32", ddp_bucket_size=s, **flags) for s in (None, size)]
        runs = [run_everywhere(pool, config, world, 2) for config in configs]
        for name, tensor in runs[0]["params"].items():
            assert torch.equal(tensor, runs[1]["params"][name]), name
        assert runs[0]["losses"] == runs[1]["losses"]


@pytest.mark.parametrize(("world", "micro_batch", "flags"), [(2, 2, {}), (4, 1, {"pp": 2}), (4, 2, {"tp": 2, "sp": True})])
def test_overlap_changes_no_bit(pool, world, micro_batch, flags):
    for precision in ("fp32", "bf16"):
        runs = [run_everywhere(pool, config_for(GPT, precision=precision, micro_batch=micro_batch, no_overlap_grad_reduce=off,
                                                **flags), world, 2) for off in (False, True)]  # fmt: skip
        assert_same_bits(*runs)


@pytest.mark.parametrize(("world", "flags"), [(2, {"tp": 2, "sp": True}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {})])
def test_transport_changes_no_bit(pool, world, flags):
    """Through shared memory or through gloo."""
    config = config_for(GPT, precision="fp32", **flags)
    assert_same_bits(*(run_everywhere(pool, config, world, 2, shared_memory=shared) for shared in (True, False)))


def test_two_runs_are_equal_bit_for_bit(pool):
    config = config_for(LLAMA, precision="bf16", tp=2, sp=True, pp=2)
    assert_same_bits(*(run_everywhere(pool, config, 8, 2) for _ in range(2)))


# ------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(("name", "model", "world", "flags"), [
    slow("one KV head", {"num_query_groups": 1}, 2, {"tp": 2, "sp": True}),
    ("one KV head", {"num_query_groups": 1}, 4, {"tp": 4}),
    ("one KV head", {"num_query_groups": 1}, 4, {"tp": 2, "pp": 2}),
    ("two KV heads on four ranks", {"num_query_groups": 2}, 4, {"tp": 4, "sp": True}),
    ("a rank of padding alone", {"make_vocab_size_divisible_by": 96}, 2, {"tp": 2, "sp": True}),
    ("a rank of padding alone", {"make_vocab_size_divisible_by": 32, "label_smoothing": 0.2}, 4, {"tp": 4}),
    ("smoothing", {"label_smoothing": 0.2}, 2, {"tp": 2}),
    ("wide heads", {"kv_channels": 10}, 2, {"tp": 2}),
])  # fmt: skip
def test_shapes(pool, reference, name, model, world, flags):
    model = dataclasses.replace(LLAMA, **model)
    one = reference(dataclasses.replace(config_for(model), model=dataclasses.replace(model, make_vocab_size_divisible_by=8)))
    assert_equal_runs(run_everywhere(pool, config_for(model, **flags), world, 2), one, 1e-10)


def test_tied_padding_over_a_pipeline(pool, reference):
    """GPT with head size != hidden / heads, a tp rank that holds no true row, and two copies of the embedding."""
    model = dataclasses.replace(GPT, kv_channels=6, make_vocab_size_divisible_by=96)
    one = reference(config_for(dataclasses.replace(model, make_vocab_size_divisible_by=8)))
    assert_equal_runs(run_everywhere(pool, config_for(model, tp=2, pp=2, sp=True), 4, 2), one, 1e-10)


# --------------------------------------------------------------------------------------------------- parts of a step


@pytest.mark.parametrize(("model", "world", "flags"), [
    ("gpt_tied", 1, {}), ("gpt_tied", 2, {"pp": 2}), ("gpt_tied", 4, {"tp": 4}), ("llama_gqa", 4, {"tp": 4, "sp": True}),
    ("gpt_tied", 8, {"tp": 2, "pp": 2}),
])  # fmt: skip
def test_the_norm_counts_every_parameter_once(pool, model, world, flags):
    """Replicas of norms, biases and KV heads (N03) and the second copy of a tied embedding (N04) count once."""
    config = replace(config_for(MODELS[model], **flags), "optimizer", clip_grad=0.0)
    run = run_everywhere(pool, config, world, 1)
    squares = sum(gradient.square().sum().item() for gradient in run["grads"].values())
    assert run["norms"][0] == pytest.approx(math.sqrt(squares), rel=1e-12)


@pytest.mark.parametrize(("world", "flags"), [(1, {}), (4, {"tp": 2, "pp": 2})])
def test_clipping_scales_the_step(pool, world, flags):
    """The printed norm is the same, the step is shorter by exactly clip / norm (N07)."""
    runs, start = {}, run_everywhere(pool, config_for(GPT, **flags), world, 0)["params"]
    for clip in (0.0, 1e9, 1e-6):
        config = replace(config_for(GPT, **flags), "optimizer", **{**PLAIN, "clip_grad": clip})
        runs[clip] = run_everywhere(pool, config, world, 1)
    norm = runs[0.0]["norms"][0]
    assert norm > 0.1 and {run["norms"][0] for run in runs.values()} == {norm}
    for name, p0 in start.items():
        free, loose, tight = (runs[clip]["params"][name] - p0 for clip in (0.0, 1e9, 1e-6))
        assert torch.equal(free, loose)
        torch.testing.assert_close(tight, free * (1e-6 / (norm + 1e-6)), rtol=1e-5, atol=1e-16)


def one_step_from_noise(config):
    """{piece: (before, after)} of one step; biases start at zero, so everything is moved away from its start first."""
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    for state in trainer.optimizer.states:
        noise = torch.randn(state.master.shape, dtype=state.master.dtype, generator=torch.Generator().manual_seed(1))
        state.master.add_(noise, alpha=0.1)
    before = {(name, offset): tensor for name, _, offset, _, tensor in pieces(trainer, "param")}
    run_steps(trainer, range(1))
    return {(name, offset): (before[name, offset], tensor) for name, _, offset, _, tensor in pieces(trainer, "param")}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("model", MODELS)
def test_decay_shrinks_matrices_alone(model, optimizer):
    """For LayerNorm and RMSNorm (N18): p_decayed = p_plain - lr * decay * p_start on matrices, vectors are untouched."""
    configs = [replace(config_for(MODELS[model]), "optimizer", weight_decay=decay, optimizer=optimizer) for decay in (0.0, 0.5)]
    plain, decayed = map(one_step_from_noise, configs)
    kinds = set()
    for name, (start, after) in plain.items():
        kinds.add(start.dim())
        assert torch.equal(start, decayed[name][0]) and (start != 0).all()
        if start.dim() == 1:
            assert torch.equal(after, decayed[name][1]), name
        else:
            torch.testing.assert_close(decayed[name][1], after - 1e-2 * 0.5 * start, rtol=1e-12, atol=1e-15)
    assert kinds == {1, 2}


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_trained(reference, model):
    start, run = reference(config_for(MODELS[model]), 0)["params"], reference(config_for(MODELS[model]), 1)
    for name, gradient in run["grads"].items():
        if not name.endswith("k_proj.bias") or MODELS[model].qk_layernorm:  # softmax does not see a key bias
            assert gradient.abs().max() > 1e-5, name
        rows = (run["params"][name] != start[name]).flatten(1 if gradient.dim() > 1 else 0)
        assert (rows.any(1) if gradient.dim() > 1 else rows).float().mean() > 0.9, name


def arrivals(rank, world, config):
    """(expected, arrived) of every bucket, and how many reductions had started when the last backward ended."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    started = []
    finish = trainer.engine.finish

    def look():
        started.append(sum(bucket.reduction is not None for bucket in trainer.engine.buckets))
        finish()

    trainer.engine.finish = look
    train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)
    return [(b.expected, b.arrived) for b in trainer.engine.buckets], started


@pytest.mark.parametrize(("model", "flags"), [
    ("gpt_tied", {}), ("gpt_tied", {"pp": 2}), ("llama_gqa", {"tp": 2}), ("gpt_tied", {"pp": 2, "pipeline_schedule": "zb-h1"}),
    ("gpt_tied", {"pp": 2, "pipeline_schedule": "zbv"}), ("llama_gqa", {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
])  # fmt: skip
def test_every_bucket_is_reduced_inside_the_last_backward(pool, model, flags):
    for counts, started in pool.run(arrivals, 4, 4, config_for(MODELS[model], **flags)):
        assert counts and all(expected == arrived > 0 for expected, arrived in counts)
        assert started == [len(counts)]


def embeddings(rank, world, config, steps):
    """Parameter, master, moments and gradient of this rank's embedding copies, as bytes."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    run_steps(trainer, range(steps))
    found = []
    for state in trainer.optimizer.states:
        for slot, param in zip(state.bucket.layout.slots, state.bucket.params, strict=True):
            if param.shard.name == "embed_tokens.weight":
                flat = (state.bucket.param, state.bucket.grad, state.master, *state.moments.values())
                held = [t[slot.start : slot.start + slot.numel].double().sum().item() for t in flat]
                held += [t[slot.start : slot.start + slot.numel].clone() for t in flat]
                found.append((trainer.mesh.tp.rank, held))
    return found


@pytest.mark.parametrize(("world", "flags"), [
    (4, {"pp": 2}), (4, {"pp": 2, "tp": 2}), (3, {"pp": 3}), (4, {"pp": 2, "pipeline_schedule": "zbv"}),
    (4, {"pp": 2, "tp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
])  # fmt: skip
def test_tied_copies_stay_equal_bit_for_bit(pool, world, flags):
    """Weights, masters and moments, in bf16, with overlapped reduction (C24)."""
    copies = {}
    for found in pool.run(embeddings, world, world, config_for(GPT, precision="bf16", **flags), 4):
        for tp, held in found:
            copies.setdefault(tp, []).append(held)
    for held in copies.values():
        assert len(held) == 2 * world // (flags["pp"] * flags.get("tp", 1))
        for other in held[1:]:
            for mine, theirs in zip(held[0], other, strict=True):
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


# ------------------------------------------------------------------------------------------ other people's schedules

ZB_H1 = """
r0: F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 F4 B3 W3 F5 B4 W4 F6 B5 W5 F7 B6 W6 B7 W7
r1: F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 F4 B4 W3 F5 B5 W4 F6 B6 W5 F7 B7 W6 W7   # holds a second microbatch until its W
"""


def zero_bubble(p, m):
    """ZB-H1 (Qi et al. 2023): 1F1B whose weight gradients on rank r lag r microbatches behind."""
    ranks = []
    for r in range(p):
        warm = min(p - 1 - r, m)
        order = [Action("F", 0, j) for j in range(warm)]
        for j in range(m):
            order += [Action("F", 0, warm + j)] if warm + j < m else []
            order += [Action("B", 0, j)] + ([Action("W", 0, j - r)] if j >= r else [])
        ranks.append(order + [Action("W", 0, j) for j in range(max(m - r, 0), m)])
    return format_schedule(ranks)


def interleaved(p, chunks, m, backward="BW"):
    """Interleaved 1F1B (Narayanan et al. 2021): microbatches go round in groups of p, chunk after chunk."""
    order = [(g, c, j) for g in range(0, m, p) for c in range(chunks) for j in range(g, g + p)]
    ranks = []
    for r in range(p):
        forward = [Action("F", c, j) for _, c, j in order]
        back = [Action(backward, chunks - 1 - c, j) for _, c, j in order]
        warm = min((p - r - 1) * 2 + (chunks - 1) * p, len(forward))
        steady = [a for pair in zip(forward[warm:], back, strict=False) for a in pair]
        ranks.append(forward[:warm] + steady + back[len(forward) - warm :])
    return format_schedule(ranks)


def v_shape(p, m):
    """A folded pipeline, split backwards: chunk 0 goes down the ranks, chunk 1 comes back up; weights at the end."""
    ranks = [[Action("F", c, j) for j in range(m) for c in (0, 1)] for _ in range(p)]
    for actions in ranks:
        actions += [Action("B", c, j) for j in range(m) for c in (1, 0)] + [Action("W", c, j) for c in (0, 1) for j in range(m)]
    return format_schedule(ranks)


def run_text(rank, world, config, text, kind, chunks, steps, shared_memory=True):
    """A schedule from text through the executor, with any placement."""
    config = replace(config, "parallel", num_virtual_stages_per_pipeline_rank=chunks,
                     pipeline_schedule="zbv" if kind == "v" else "1f1b")  # fmt: skip
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU, shared_memory))
    assert trainer.executor.placement == Placement(kind, config.parallel.pp, chunks)
    trainer.actions = parse_schedule(text)[trainer.mesh.pp.rank]
    return run_steps(trainer, range(steps))


LISTS = {  # name -> (model, ranks, flags, text, placement, chunks)
    "zb_h1_pp2": ("gpt_tied", 2, {"pp": 2}, ZB_H1, "loop", 1),
    "zb_h1_pp4": ("llama_gqa", 4, {"pp": 4}, zero_bubble(4, 8), "loop", 1),
    "zb_h1_tp2_pp2": ("gpt_tied", 4, {"tp": 2, "pp": 2, "sp": True}, zero_bubble(2, 8), "loop", 1),
    "zb_h1_pp2_dp2": ("gpt_tied", 4, {"pp": 2}, zero_bubble(2, 4), "loop", 1),
    "interleaved_pp2": ("gpt_tied", 2, {"pp": 2}, interleaved(2, 2, 8), "loop", 2),
    "interleaved_tp2_pp2": ("llama_gqa", 4, {"pp": 2, "tp": 2}, interleaved(2, 2, 8), "loop", 2),
    "v_tied": ("gpt_tied", 2, {"pp": 2}, v_shape(2, 8), "v", 2),  # both copies of the embedding on rank 0
    "v_pp2": ("llama_gqa", 2, {"pp": 2}, v_shape(2, 8), "v", 2),
}


@pytest.mark.parametrize("name", LISTS)
def test_any_list_gives_the_same_gradients(pool, reference, name):
    model, world, flags, text, kind, chunks = LISTS[name]
    m = GLOBAL_BATCH // (world // (flags["pp"] * flags.get("tp", 1)))
    report = check(parse_schedule(text), Placement(kind, flags["pp"], chunks), m)
    results = pool.run(run_text, world, world, config_for(MODELS[model], **flags), text, kind, chunks, 2)
    run = merge(results)
    assert_equal_runs(run, reference(config_for(MODELS[model])), 1e-10)
    for rank, result in enumerate(results):
        stage = rank // (world // flags["pp"])  # pp is the slowest axis
        assert result["peak"] == [report.peak_live_early[stage] * chunks] * 2, "live microbatches"


def contributions(rank, world, config, text):
    """Gradient contributions that arrived during B, and during W, of all that this rank expects."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    trainer.actions = parse_schedule(text)[trainer.mesh.pp.rank]
    during = {"_backward": 0, "_weight_grads": 0}

    def counted(name, run):
        def call(*args):
            before = sum(bucket.arrived for bucket in trainer.engine.buckets)
            run(*args)
            during[name] += sum(bucket.arrived for bucket in trainer.engine.buckets) - before

        return call

    for name in during:
        setattr(trainer.executor, name, counted(name, getattr(trainer.executor, name)))
    run_steps(trainer, range(1))
    return during["_backward"], during["_weight_grads"], sum(bucket.expected for bucket in trainer.engine.buckets)


def test_weight_gradients_wait_for_their_w(pool):
    """B computes none of them: that is what lets it answer the previous stage sooner."""
    for during_b, during_w, expected in pool.run(contributions, 2, 2, config_for(LLAMA, pp=2), ZB_H1):
        assert during_b == 0 and during_w == expected > 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_live_activations_are_those_of_the_checker(pool, schedule):
    run = run_everywhere(pool, config_for(GPT, pp=4, pipeline_schedule=schedule), 4, 1)
    assert run["peak"] == ([8] * 4 if schedule == "gpipe" else [4, 3, 2, 1])


def test_a_split_backward_changes_no_bit(pool):
    """B and a later W add the same numbers in the same order as BW."""
    config = config_for(GPT, precision="bf16", pp=2)
    split = merge(pool.run(run_text, 2, 2, config, ZB_H1, "loop", 1, 2))
    assert_same_bits(split, run_everywhere(pool, config, 2, 2))


def kept_memory(rank, world, config):
    """Whether a sent output's storage is free while its graph lives: the executor keeps the edge alone."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
    seen = []
    forward = trainer.executor._forward

    def watch(action, run):
        forward(action, run)
        seen.append([type(entry[1]).__name__ for entry in run.live.values()])

    trainer.executor._forward = watch
    train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)
    assert pieces(trainer, "param")
    return seen


def test_outputs_are_not_kept(pool):
    for seen in pool.run(kept_memory, 2, 2, config_for(GPT, pp=2)):
        assert len(seen) == GLOBAL_BATCH and {name for names in seen for name in names} == {"GradientEdge"}
