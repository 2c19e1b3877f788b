"""Mixture of experts computes the same however it is cut: experts over ep, their matrices over tp, beside sequence parallelism,
pipelines and ZeRO, against one process in fp64 at 1e-10: raw gradients, norm, parameters after five steps of AdamW. Balance loss,
z-loss and the bias on the choice are on."""

import dataclasses

import pytest
from layouts import LLAMA, assert_equal_runs, cases, config_for, run_everywhere

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
