"""The router by hand: weights, choice, counts, losses and their gradients, capacity against a slow reference, the bias against
its definition; the experts' products against single ones."""

import dataclasses
import math

import pytest
import torch

from megatron_lite.comm.mesh import Axis, single
from megatron_lite.config import ModelConfig
from megatron_lite.config.model import expert_layers
from megatron_lite.models.router import Router, Training, choose, route, within_capacity
from megatron_lite.parallel import grouped
from megatron_lite.parallel.expert import Dispatch
from megatron_lite.parallel.grouped import Groups
from megatron_lite.parallel.shard import Init, allocate
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.parallel.wgrad import attach_grad_buffers
from megatron_lite.training.loads import load_of

MODEL = ModelConfig(hidden_size=4, num_experts=4, moe_router_topk=2)
LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 2.0]], dtype=torch.float64)


def of(model=MODEL, **fields):
    return dataclasses.replace(model, **fields)


def router(model, weight=None, dtype=torch.float64):
    tp = TensorParallel(Axis("tp"), False, dtype, torch.device("cpu"))
    made = Router("router", model, tp, Axis("cp"), Axis("tp"), 1, Init("ones"))
    allocate(made.weight)
    made.weight.data.copy_(torch.eye(4, dtype=dtype) if weight is None else weight)
    attach_grad_buffers([made.weight])
    return made


def test_weights_by_hand():
    e = math.e
    weights, chosen, probabilities = route(LOGITS, None, MODEL)
    assert chosen.tolist() == [[0, 1], [2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[e / (e + 1), 1 / (e + 1)]] * 2, dtype=torch.float64))
    torch.testing.assert_close(probabilities, LOGITS.softmax(1))
    before = route(LOGITS, None, of(moe_router_pre_softmax=True))[0]
    torch.testing.assert_close(before, LOGITS.softmax(1).gather(1, chosen))
    normalised = route(LOGITS, None, of(moe_router_pre_softmax=True, moe_router_norm_topk=True))[0]
    torch.testing.assert_close(normalised, weights)
    sigmoid = route(LOGITS, None, of(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5))[0]
    torch.testing.assert_close(sigmoid, 2.5 * LOGITS.gather(1, chosen).sigmoid())


def test_a_bias_moves_the_choice_and_not_the_weights():
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0], dtype=torch.float64)
    weights, chosen, _ = route(LOGITS, bias, of(moe_router_score_function="sigmoid"))
    assert chosen.tolist() == [[2, 0], [2, 3]]
    torch.testing.assert_close(weights, LOGITS.gather(1, chosen).sigmoid())


def test_groups_are_as_good_as_their_two_best():
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.5, 0.5, 0.1]])
    one = of(num_experts=6, moe_router_num_groups=2, moe_router_group_topk=1)
    assert choose(scores, of(num_experts=6)).tolist() == [[0, 3]] or choose(scores, of(num_experts=6)).tolist() == [[0, 4]]
    assert sorted(choose(scores, one)[0].tolist()) == [3, 4]  # 0.5 + 0.5 against 0.9 + 0.0


def trained(model, x, mask):
    """(routes, router) after a forward in training."""
    made = router(model)
    return made(x, Training(mask)), made


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_uniform_routing_has_the_coefficient_as_its_loss(score, masked):
    """Each token likes another expert: counts and probabilities are even, and the loss is at its least."""
    each = torch.eye(4, dtype=torch.float64)
    x = (each + each.roll(1, 1)).repeat(2, 1).unsqueeze(1)
    mask = torch.ones(1, 8)
    if masked:
        mask[0, :3] = 0.0
    model = of(moe_router_score_function=score, moe_aux_loss_coeff=0.03)
    _, made = trained(model, x, mask)
    assert made.tally[:-2].tolist() == [4.0] * 4
    load = load_of(model, [0], made.tally.unsqueeze(0), mask.sum().double())
    assert load.balance_loss == pytest.approx(0.03, rel=1e-12) and load.ratios == {0: 1.0} and load.z_loss is None
    assert load.fields() == ["load balancing loss: 3.000000E-02", "expert load max/mean: 1.00 (layer 0)"]


def test_losses_and_gradients_by_their_formulas():
    """Two samples of different masks; the gradient of the logits against autograd of the formula as the page has it."""
    torch.manual_seed(0)
    s, b, experts, k = 6, 2, 4, 2
    model = of(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
    x = torch.randn(s, b, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1.0] * 6, [1, 0, 1, 0, 0, 1]])
    made = router(model)
    made.scale = 8.0  # fp16's: gradients of all losses carry it
    routes = made(x, Training(mask))
    (0.0 * routes.weights).sum().backward()

    logits = x.detach().clone().requires_grad_()
    probabilities, chosen = logits.softmax(2), routes.chosen.view(s, b, k)
    balance = z = 0.0
    for sample in range(b):
        count = torch.tensor([(chosen[:, sample] == i).sum().item() for i in range(experts)]).double()
        f, p = count / (s * k), probabilities[:, sample].mean(0)
        balance = balance + mask[sample].sum() * experts * (f * p).sum()
        for t in range(s):
            z = z + mask[sample, t] * logits[t, sample].logsumexp(0) ** 2
    (8.0 * (0.5 * balance + 0.25 * z)).backward()
    torch.testing.assert_close(x.grad, logits.grad, rtol=1e-12, atol=1e-12)  # the weight is the identity: logits are x
    expected = torch.einsum("sbe,sbh->eh", logits.grad, x.detach())
    torch.testing.assert_close(made.weight.main_grad, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.tally[-2:], torch.stack([balance, z]).detach(), rtol=1e-12, atol=0)
    assert made.tally[:-2].tolist() == [(chosen == i).sum().item() for i in range(experts)]


def test_a_layer_that_runs_again_is_not_counted_again():
    model, x = of(moe_aux_loss_coeff=0.5), torch.randn(6, 1, 4, dtype=torch.float64)
    made = router(model)
    made(x, Training(torch.ones(1, 6)))
    before = made.tally.clone()
    made(x, Training(torch.ones(1, 6), again=True))
    made(x, None)
    assert torch.equal(made.tally, before)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7])
def test_capacity_against_a_slow_reference(factor):
    torch.manual_seed(3)
    tokens, model = 37, of(num_experts=5, moe_router_topk=3, moe_expert_capacity_factor=factor)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3)
    kept = within_capacity(weights, chosen, model)
    capacity = math.ceil(factor * tokens * 3 / 5)
    for expert in range(5):
        places = [(t, j) for t in range(tokens) for j in range(3) if chosen[t, j] == expert]
        best = sorted(places, key=lambda place: -weights[place].item())[:capacity]
        assert {place for place in places if kept[place]} == set(best)
    dispatch = Dispatch(chosen, kept, 5, single().ep)
    x = torch.randn(tokens, 4)
    rows = dispatch.of_tokens(x)
    assert dispatch.groups.sizes == [min(capacity, (chosen == e).sum().item()) for e in range(5)]
    torch.testing.assert_close(dispatch.sum_of_tokens(rows), x * kept.sum(1, keepdim=True))
    assert torch.equal(dispatch.to_weights(dispatch.of_weights(weights)), weights * kept)


def test_the_bias_moves_by_its_definition():
    made = router(of(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.1))
    made.move_bias(torch.tensor([5.0, 1.0, 3.0, 3.0]))  # mean 3
    torch.testing.assert_close(made.bias, torch.tensor([-0.1, 0.1, 0.0, 0.0], dtype=torch.float64))


def test_router_of_half_precision_works_in_fp32():
    x = torch.randn(64, 1, 4).bfloat16()
    weight = torch.randn(4, 4).bfloat16()
    routes = router(MODEL, weight, torch.bfloat16)(x, None)
    expected = route(x.flatten(0, 1).float() @ weight.float().t(), None, MODEL)
    assert routes.weights.dtype == torch.float32 and torch.equal(routes.weights, expected[0])


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_products_of_groups(sizes, monkeypatch):
    """The loop against single products; and torch's grouped GEMM, which has a form for CPU, as CUDA would be given it."""
    torch.manual_seed(1)
    groups, rows = Groups(torch.tensor(sizes)), sum(sizes)
    x, dy, w = torch.randn(rows, 8).bfloat16(), torch.randn(rows, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()
    for on_gpu in (False, True):
        if on_gpu:
            monkeypatch.setattr(grouped, "is_grouped", lambda x, shape: x.shape[0] > 0)
        grad = torch.ones(4, 16, 8)
        y, dx = grouped.linear(x, w, groups), grouped.input_grad(dy, w, groups)
        grouped.add_weight_grad(grad, dy, x, groups)
        start = 0
        for e, size in enumerate(sizes):
            part = slice(start, start + size)
            torch.testing.assert_close(y[part], x[part] @ w[e].t())
            torch.testing.assert_close(dx[part], dy[part] @ w[e])
            torch.testing.assert_close(grad[e], 1 + (dy[part].t() @ x[part]).float(), rtol=1e-2, atol=1e-2)
            start += size


def test_layers_of_a_pattern():
    assert expert_layers("1", 3) == (True,) * 3 and expert_layers("2", 3) == (True, False, True)
    assert expert_layers("[0]+[1]*2", 3) == (False, True, True) and expert_layers("[0, 1]*2", 4) == (False, True) * 2
    for pattern, message in (("[1]*2", "speaks of 2 layers, and there are 3"), ("0", "'0' is neither"),
                             ("[2]*3", "is neither"), ("__import__('os')", "is neither")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            expert_layers(pattern, 3)
