"""The router: which experts each token goes to, with which weights, and how their load is kept even.

    logits = x W^T                          in fp32, whatever x is
    scores = softmax(logits) or sigmoid(logits)
    chosen = the k largest of scores (+ bias), within the best groups where there are groups
    weight = scores of the chosen           softmax over the chosen alone, unless --moe-router-pre-softmax
             / their sum                    --moe-router-norm-topk
             x --moe-router-topk-scaling-factor

The load is evened out by a loss, by a bias on the choice, or by neither. Of a sample with tokens t = 1..S

    f_i = (tokens of it that chose i) / (S k)      P_i = mean over t of probability of i      loss = E sum_i f_i P_i >= 1

is 1 where all experts are chosen alike. Samples weigh as many as they have tokens with a loss, so the sum over a global batch
over its number of such tokens, which all losses are divided by at the end of a step, is a mean; and it is the same however the
batch is cut, since a sample is all that f needs. Megatron's aux_loss takes f of a micro-batch, so that it changes with
--micro-batch-size and the number of ranks; f of the whole global batch is known only when its last forward is over, long after
the first backward, which needs it. The z-loss is the mean of logsumexp(logits)^2 over the tokens with a loss (Zoph et al. 2022,
arXiv 2202.08906). Both enter the backward beside the weights, and never travel between pipeline stages.

The bias (Wang et al. 2024, arXiv 2408.15664) is added to scores for the choice alone, and moved once a step:
b_i += rate * sign(mean count - count_i), with the counts of the whole global batch.

Shapes: s, b sequence and micro-batch as this rank has them here, E experts, k of them chosen, G groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig
from megatron_lite.parallel.shard import Init, Shard, parameter, whole
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.parallel.wgrad import give

GROUP_BEST = 2  # experts whose scores make a group's (DeepSeek-V3, arXiv 2412.19437)


class Routes(NamedTuple):
    """weights [s b, k] in fp32 (fp64 of fp64), chosen int64 [s b, k], kept bool [s b, k] where some are dropped."""

    weights: torch.Tensor
    chosen: torch.Tensor
    kept: torch.Tensor | None


class Training(NamedTuple):
    """What a router is told in training. mask [b, s of the tp group]: tokens with a loss; `again`: the layer was run before
    (recompute.py), so its tokens are counted."""

    mask: torch.Tensor
    again: bool = False


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        exact = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.linear(x.to(exact), weight.to(exact))

    @staticmethod
    def backward(ctx, d_logits):
        (x,), weight = ctx.saved_tensors, ctx.weight
        if weight.requires_grad:
            give(weight, lambda grad: grad.addmm_(d_logits.t(), x.to(d_logits.dtype)))
        return (d_logits @ weight.to(d_logits.dtype)).to(x.dtype), None


class _Beside(torch.autograd.Function):
    """weights as they are; in the backward the loss gets `scale` as its gradient, as the model's own loss does."""

    @staticmethod
    def forward(ctx, weights, loss, scale: float):
        ctx.scale = scale
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, d_weights):
        return d_weights, d_weights.new_full((), ctx.scale), None


class Router(nn.Module):
    """x [s, b, h] -> Routes.

    `over`: the tp axis if its ranks have tokens of their own, else an axis of one; `copies`: tp ranks that route the same
    tokens, each with a part of the weights' gradient.
    tally    fp64 [E + 2]: tokens that chose each expert, sum of balance losses, of z-losses (both before coefficients),
             since the step began
    scale    fp16's loss scale of the step
    """

    def __init__(self, name: str, model: ModelConfig, tp: TensorParallel, cp: Axis, over: Axis, copies: int, init: Init):
        super().__init__()
        self.model, self.cp, self.over, self.copies, self.scale = model, cp, over, copies, 1.0
        shape, exact = (model.num_experts, model.hidden_size), torch.promote_types(tp.dtype, torch.float32)
        box = whole(f"{name}.weight", shape, tp.axis.size, tp.axis.rank, partial=tp.axis.size > 1)
        self.weight = parameter(shape, Shard(box.name, (box,), init, decay=True), tp.dtype, tp.device)
        self.tally = torch.zeros(model.num_experts + 2, dtype=torch.float64, device=tp.device)
        self.bias_name = f"{name}.expert_bias"
        self.bias: torch.Tensor | None = None
        if model.moe_router_enable_expert_bias:
            self.bias = torch.zeros(model.num_experts, dtype=exact, device=tp.device)

    def forward(self, x: torch.Tensor, training: Training | None) -> Routes:
        """`training` None: neither counts nor losses."""
        model, logits = self.model, _Logits.apply(x.flatten(0, 1), self.weight)  # [s b, E]
        weights, chosen, probabilities = route(logits, self.bias, model)
        kept = None
        if model.moe_expert_capacity_factor is not None:
            kept = within_capacity(weights.detach(), chosen, model)
        if training is None:
            return Routes(weights, chosen, kept)
        mask, again = training
        if not again:
            self.tally[:-2] += torch.bincount(chosen.flatten(), minlength=model.num_experts)
        loss = None
        if model.moe_aux_loss_coeff and model.moe_router_load_balancing_type != "none":
            loss = self._add(-2, model.moe_aux_loss_coeff, self._balance(chosen, probabilities, mask, x.shape[:2]), again)
        if model.moe_z_loss_coeff:
            z = self._add(-1, model.moe_z_loss_coeff, self._z(logits, mask, x.shape[:2]), again)
            loss = z if loss is None else loss + z
        if loss is not None:
            weights = _Beside.apply(weights, loss, self.scale / self.copies)
        return Routes(weights, chosen, kept)

    def _add(self, place: int, coefficient: float, loss: torch.Tensor, again: bool) -> torch.Tensor:
        if not again:
            self.tally[place] += loss.detach()
        return coefficient * loss

    def _balance(self, chosen: torch.Tensor, probabilities: torch.Tensor, mask: torch.Tensor, size: torch.Size) -> torch.Tensor:
        """This rank's part of sum over samples of (tokens with a loss) x E sum_i f_i P_i: f of whole samples, P of its tokens."""
        (s, b), experts = size, self.model.num_experts
        sample = torch.arange(b, device=chosen.device).repeat(s).unsqueeze(1)
        counts = torch.bincount((chosen + sample * experts).flatten(), minlength=b * experts).view(b, experts)
        counts = comm.all_reduce(counts.to(probabilities.dtype), self.over)
        found = torch.cat([counts, mask.to(counts.dtype).sum(1, keepdim=True)], 1)
        found = comm.all_reduce(found, self.cp)  # [b, E + 1]
        length = s * self.over.size * self.cp.size
        share = found[:, :-1] * (found[:, -1:] * experts / (length * self.model.moe_router_topk * length))
        return (share * probabilities.view(s, b, experts).sum(0)).sum()

    def _z(self, logits: torch.Tensor, mask: torch.Tensor, size: torch.Size) -> torch.Tensor:
        """Sum over this rank's tokens with a loss."""
        first = self.over.rank * size[0]
        wanted = mask.t()[first : first + size[0]].flatten()
        return (logits.logsumexp(1).square() * wanted).sum()

    @torch.no_grad()
    def move_bias(self, counts: torch.Tensor) -> None:
        """After a step, with the counts [E] of its whole global batch."""
        counts = counts.to(self.bias)
        self.bias += self.model.moe_router_bias_update_rate * (counts.mean() - counts).sign()


def route(logits: torch.Tensor, bias: torch.Tensor | None, model: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [T, E] -> (weights [T, k], chosen [T, k], probabilities [T, E], which add up to 1 for each token)"""
    k, after = model.moe_router_topk, False
    if model.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid()
        probabilities = scores / scores.sum(1, keepdim=True)
    else:
        scores = probabilities = logits.softmax(1)
        after = not model.moe_router_pre_softmax
    chosen = choose(scores.detach() if bias is None else scores.detach() + bias, model)
    if after:
        weights = logits.gather(1, chosen).softmax(1)
    else:
        weights = scores.gather(1, chosen)
    if model.moe_router_norm_topk and k > 1:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    if model.moe_router_topk_scaling_factor is not None:
        weights = weights * model.moe_router_topk_scaling_factor
    return weights, chosen, probabilities


def choose(scores: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """The k best experts of each token, [T, E] -> [T, k]; with groups only those of its best groups, a group being as good as
    its two best experts together."""
    groups = model.moe_router_num_groups
    if groups is not None:
        grouped = scores.view(len(scores), groups, -1)  # [T, G, E/G]
        best = grouped.topk(min(GROUP_BEST, grouped.shape[2]), 2).values.sum(2).topk(model.moe_router_group_topk, 1).indices
        allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(2), float("-inf")).view_as(scores)
    return scores.topk(model.moe_router_topk, 1).indices


def within_capacity(weights: torch.Tensor, chosen: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """bool [T, k]: of the tokens that chose an expert those of largest weight, at most ceil(factor T k / E) of this rank's."""
    experts, flat = model.num_experts, chosen.flatten()
    capacity = math.ceil(model.moe_expert_capacity_factor * flat.numel() / experts)
    order = weights.flatten().argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]  # by expert, within it by weight
    counts = torch.bincount(flat, minlength=experts)
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[flat[order]]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = place < capacity
    return kept.view_as(chosen)
