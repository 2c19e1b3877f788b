"""Mixture of experts computes the same however it is cut: experts over ep, their matrices over tp, beside sequence parallelism,
pipelines and ZeRO, against one process in fp64 at 1e-10: raw gradients, norm, parameters after five steps of AdamW. Balance loss,
z-loss and the bias on the choice are on."""

import dataclasses
from collections import Counter

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    LLAMA,
    assemble,
    assert_equal_runs,
    assert_same_bits,
    cases,
    config_for,
    local_batches,
    merge,
    replace,
    run_everywhere,
    run_steps,
    slow,
)

from megatron_lite.comm import collectives
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import ActivationConfig
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, pieces_of, restore, save
from megatron_lite.training.step import train_step, with_keys

EXPERTS = dict(num_experts=4, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02)
MODELS = {
    # A dense layer first, one shared expert, weights of the softmax over the chosen.
    "shared": dataclasses.replace(LLAMA, **EXPERTS, moe_layer_freq="[0]+[1]*3", moe_shared_expert_intermediate_size=16),
    # DeepSeek-V3's router: sigmoid, groups, scaled, a bias on the choice.
    "sigmoid": dataclasses.replace(
        LLAMA, **EXPERTS | dict(num_experts=8), moe_layer_freq="2", moe_router_score_function="sigmoid", moe_router_topk=3,
        moe_router_norm_topk=True, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05),
}  # fmt: skip
TP_SP, PP = {"tp": 2, "sp": True}, {"pp": 2}
LAYOUTS = {  # name -> (ranks, flags)
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "ep2_zero1": (2, {"ep": 2, "zero_stage": 1}),
    "ep2_zero3": (2, {"ep": 2, "zero_stage": 3}),
    "tp2": (2, {"tp": 2}),
    "tp2_etp1": (2, {"tp": 2, "etp": 1}),
    "tp2_sp": (2, TP_SP),
    "tp2_sp_etp1": (2, TP_SP | {"etp": 1}),
    "pp2": (2, PP),
    "ep4": (4, {"ep": 4}),
    "ep2_dp4": (4, {"ep": 2}),
    "ep2_dp4_zero1": (4, {"ep": 2, "zero_stage": 1}),
    "ep2_dp4_zero2": (4, {"ep": 2, "zero_stage": 2}),
    "ep2_dp4_zero3": (4, {"ep": 2, "zero_stage": 3}),
    "dp4_hybrid": (4, {"zero_stage": 3, "zero_replica_size": 2}),
    "ep4_zero3": (4, {"ep": 4, "zero_stage": 3}),
    "tp2_ep2": (4, {"tp": 2, "ep": 2}),
    "tp2_sp_ep2": (4, TP_SP | {"ep": 2}),
    "tp2_sp_ep2_etp1": (4, TP_SP | {"ep": 2, "etp": 1}),
    "tp2_ep2_etp1_zero1": (4, {"tp": 2, "ep": 2, "etp": 1, "zero_stage": 1}),
    "pp2_ep2": (4, PP | {"ep": 2}),
    "pp2_ep2_zb-h1": (4, PP | {"ep": 2, "pipeline_schedule": "zb-h1"}),
    "pp2_ep2_zbv_zero3": (4, PP | {"ep": 2, "pipeline_schedule": "zbv", "zero_stage": 3}),
    "pp2_dualpipe": (2, PP | {"pipeline_schedule": "dualpipe"}),
    "tp2_sp_pp2_ep2": (8, TP_SP | PP | {"ep": 2}),
    "tp2_sp_pp2_ep2_etp1_zero3": (8, TP_SP | PP | {"ep": 2, "etp": 1, "zero_stage": 3}),
    "ep4_dp8_zero2": (8, {"ep": 4, "zero_stage": 2}),
    "cp2_ep2": (2, {"context_parallel_size": 2, "ep": 2}),
    "cp2_ep4": (4, {"context_parallel_size": 2, "ep": 4, "zero_stage": 3}),
    "cp2_tp2_sp_ep2": (8, TP_SP | {"context_parallel_size": 2, "ep": 2, "etp": 1}),
    "tp2_sp_ep4": (8, TP_SP | {"ep": 4}),
}
FAST = {("ep2", "shared"), ("ep2_dp4_zero3", "shared"), ("tp2_sp_ep2", "shared"), ("tp2_sp_ep2_etp1", "sigmoid"),
        ("pp2_ep2", "sigmoid"), ("pp2_ep2_zb-h1", "shared")}  # fmt: skip


@pytest.fixture(scope="module")
def references():
    return {name: run_everywhere(None, config_for(model), 1) for name, model in MODELS.items()}


@pytest.mark.parametrize(("layout", "model"), cases(FAST, ((layout, model) for layout in LAYOUTS for model in MODELS)))
def test_experts_equal_one_process(pool, references, layout, model):
    ranks, flags = LAYOUTS[layout]
    assert_equal_runs(run_everywhere(pool, config_for(MODELS[model], **flags), ranks), references[model], 1e-10)


# ---------------------------------------------------------------------------------------------------- activations, precision


@pytest.mark.parametrize(("layout", "activations"), [
    ("ep2", ActivationConfig("full", "uniform", 2)), slow("tp2_sp_ep2_etp1", ActivationConfig("full", "uniform", 1)),
    slow("pp2_ep2_zb-h1", ActivationConfig("full", "block", 1)), slow("ep2_dp4_zero3", ActivationConfig("full", "uniform", 2)),
    slow("tp2_sp_ep2", ActivationConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp_act"))),
])  # fmt: skip
def test_recomputation_changes_no_bit(pool, layout, activations):
    """Routes and losses of the second run are those of the first, and are not counted twice: the bias moves alike."""
    ranks, flags = LAYOUTS[layout]
    config = config_for(MODELS["shared" if "tp2" in layout else "sigmoid"], **flags)
    again = dataclasses.replace(config, activations=activations)
    assert_same_bits(*(run_everywhere(pool, each, ranks, 2) for each in (again, config)))


@pytest.mark.parametrize(("layout", "flags"), [
    slow("ep2_dp4_zero3", {"no_overlap_grad_reduce": True, "no_overlap_param_gather": True}),
    slow("pp2_ep2_zbv_zero3", {"zero_prefetch_limit": 3}),
])  # fmt: skip
def test_overlap_changes_no_bit(pool, layout, flags):
    ranks, own = LAYOUTS[layout]
    runs = [run_everywhere(pool, config_for(MODELS["shared"], precision="bf16", **own, **more), ranks, 2) for more in ({}, flags)]
    runs.append(run_everywhere(pool, config_for(MODELS["shared"], precision="bf16", **own), ranks, 2, shared_memory=False))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def test_bf16_is_near_fp32():
    """Half precision chooses a few experts otherwise, so only what is summed over all tokens can be compared."""
    runs = [run_everywhere(None, config_for(MODELS["shared"], precision=precision), 1, 1) for precision in ("bf16", "fp32")]
    assert abs(runs[0]["losses"][0] / runs[1]["losses"][0] - 1) < 1e-2
    assert abs(runs[0]["norms"][0] / runs[1]["norms"][0] - 1) < 5e-2


# --------------------------------------------------------------------------------------------------------- load and bias


def loads(rank, world, config, steps):
    """[load of each step], the biases after them, and an evaluation, which leaves both alone."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), torch.device("cpu")))
    found, biases = [], []
    for step in range(steps):
        report = train_step(trainer, local_batches(config, trainer.mesh, step), step, step * GLOBAL_BATCH)
        found.append((report.load.ratios, report.load.balance_loss, report.load.z_loss))
        tallies = [router.tally.clone() for _, router in trainer.loads.routers]

        batches = with_keys(local_batches(config, trainer.mesh, 0), trainer.mesh, 7, None)
        trainer.executor.evaluate(trainer.actions_for(len(batches)), batches)
        assert all(torch.equal(router.tally, tally) for (_, router), tally in zip(trainer.loads.routers, tallies, strict=True))
        biases.append({layer: router.bias.tolist() for layer, router in trainer.loads.routers if router.bias is not None})
    return found, biases


@pytest.mark.parametrize("layout", [
    "tp2_sp_ep2", slow("tp2_sp_ep2_etp1"), slow("pp2_ep2"), slow("pp2_dualpipe"), slow("tp2_etp1")])  # fmt: skip
def test_load_losses_and_biases_are_those_of_one_process(pool, layout):
    ranks, flags = LAYOUTS[layout]
    for model in MODELS.values():
        expected, biases = loads(0, 1, config_for(model), 2)
        seen: dict = {}
        for found, own in pool.run(loads, ranks, ranks, config_for(model, **flags), 2):
            for mine, theirs in zip(found, expected, strict=True):
                assert mine[0] == theirs[0] and mine[1:] == pytest.approx(theirs[1:], rel=1e-12)
            seen |= own[-1]
        assert seen == biases[-1] and bool(seen) == model.moe_router_enable_expert_bias


# ------------------------------------------------------------------------------------------------------------ checkpoints


def saved(rank, world, config):
    trainer = build_trainer(config, build_mesh(grid_of(config, world), torch.device("cpu")))
    if config.checkpoint.save:
        run_steps(trainer, range(2))
        save(trainer, Progress(2, 2 * GLOBAL_BATCH))
    else:
        assert restore(trainer)[0].iteration == 2
    state = [(p.key, p.full_shape, p.offset, p.length, p.tensor.detach().clone()) for p in pieces_of(trainer, True)]
    return state, run_steps(trainer, range(2, 4))


@pytest.mark.parametrize(("source", "targets"), [
    ("ep4", ["ep2", "one"]), slow("ep4_zero3", ["tp2_sp_ep2_etp1", "pp2_ep2", "ep2_dp4_zero1", "one"]),
    slow("tp2_sp_pp2_ep2_etp1_zero3", ["ep4", "one"]), slow("one", ["ep4_zero3", "tp2_sp_ep2_etp1"]),
])  # fmt: skip
def test_experts_come_back_at_any_ep(pool, tmp_path, source, targets):
    """Each expert's own tensors, moments and bias, bit for bit, and the same steps after it."""
    model, first = MODELS["sigmoid"], None
    for name in [source, *targets]:
        ranks, flags = LAYOUTS.get(name, (1, {}))
        config = replace(config_for(model, **flags), "checkpoint", **{"save" if first is None else "load": str(tmp_path)})
        answers = [saved(0, 1, config)] if ranks == 1 else pool.run(saved, ranks, ranks, config)
        state, run = assemble(piece for state, _ in answers for piece in state), merge([run for _, run in answers])
        if first is None:
            first = state, run
            assert not torch.equal(state["model/layers.0.mlp.experts.1.up_proj.weight"],
                                   state["model/layers.0.mlp.experts.6.up_proj.weight"])  # fmt: skip
            assert state["model/layers.2.mlp.router.expert_bias"].abs().max() > 0
        assert state.keys() == first[0].keys() and all(torch.equal(state[key], first[0][key]) for key in state)
        assert_equal_runs(run, first[1], 1e-10)


# ------------------------------------------------------------------------------------------------------- bytes on the wires


def rows_sent(rank, world, config):
    """Elements of rows and of weights that leave this rank over ep in a step, and the number of exchanges."""
    trainer = build_trainer(config, build_mesh(grid_of(config, world), torch.device("cpu")))
    start, seen = collectives.start_exchange_rows, Counter()

    def counted(x, axis, rows):
        assert axis.name == "ep" and x.shape[0] == sum(rows[axis.rank])
        away = sum(n for q, n in enumerate(rows[axis.rank]) if q != axis.rank)
        seen["rows" if x.dim() == 2 else "weights"] += away * x.shape[1:].numel()
        seen["calls"] += 1
        return start(x, axis, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "start_exchange_rows", counted)
        train_step(trainer, local_batches(config, trainer.mesh, 0), 0, 0)
    return seen


@pytest.mark.parametrize("ep", [2, slow(4)])
def test_what_dispatch_sends(pool, ep):
    """4 T k h (E - 1) / E elements a layer for even routes: there and home, in the forward and the backward. Every expert is
    chosen by all tokens here (k = number of experts), so that routes are even."""
    model = dataclasses.replace(MODELS["shared"], moe_router_topk=4)
    tokens, layers = GLOBAL_BATCH * model.seq_length, 3
    total = Counter()
    for seen in pool.run(rows_sent, ep, ep, config_for(model, ep=ep)):
        total.update(seen)
    assert total["rows"] == layers * 4 * tokens * 4 * model.hidden_size * (ep - 1) / ep
    assert total["weights"] == layers * 2 * tokens * 4 * (ep - 1) / ep  # a weight for each row, and its gradient
    assert total["calls"] == layers * 6 * GLOBAL_BATCH
