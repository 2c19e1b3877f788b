"""Rules about mixtures of experts: what a router needs, how experts are cut, which flags say nothing without them."""

from collections.abc import Callable, Iterator

from megatron_lite.config.model import expert_layers
from megatron_lite.rules import Problem, Values, about, have, nearest, nearest_values
from megatron_lite.schedules import ASYNCHRONOUS

EP, ETP, TP = "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size"
WIDTH, SHARED = "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"
GROUPS, BEST = "moe_router_num_groups", "moe_router_group_topk"
ONLY_WITH_EXPERTS = (
    "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk moe_router_score_function "
    "moe_router_pre_softmax moe_router_norm_topk moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor "
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_enable_expert_bias "
    "moe_router_bias_update_rate moe_expert_capacity_factor expert_model_parallel_size expert_tensor_parallel_size"
)
# Flags that do nothing: (flags, when, why and what would give them an effect). As rules.INERT, of runs with experts.
INERT: tuple[tuple[str, Callable[[Values], bool], str], ...] = (
    ("moe_router_pre_softmax", lambda s: s.moe_router_score_function == "sigmoid", "sigmoid scores are taken as they are"),
    ("moe_router_norm_topk", lambda s: s.moe_router_score_function == "softmax" and not s.moe_router_pre_softmax,
     "a softmax over the chosen adds up to 1; needs --moe-router-pre-softmax or --moe-router-score-function sigmoid"),
    ("moe_router_norm_topk", lambda s: s.moe_router_topk == 1, "with one expert a token there is nothing to share out"),
    ("moe_router_load_balancing_type", lambda s: not s.moe_aux_loss_coeff, "needs --moe-aux-loss-coeff above 0"),
    ("moe_router_bias_update_rate", lambda s: not s.moe_router_enable_expert_bias, "needs --moe-router-enable-expert-bias"),
    ("moe_expert_capacity_factor", lambda s: have(s.moe_expert_capacity_factor, s.moe_router_topk)
     and s.moe_expert_capacity_factor * s.moe_router_topk >= s.num_experts,
     "no expert can get more than all tokens, so none is ever dropped; needs a factor below --num-experts / --moe-router-topk"),
    ("expert_tensor_parallel_size", lambda s: s.tensor_model_parallel_size == 1, "needs --tensor-model-parallel-size above 1"),
)  # fmt: skip


def inert(s: Values, given: frozenset[str]) -> Iterator[Problem]:
    """Flags that say nothing here."""
    if s.num_experts is None:
        for name in ONLY_WITH_EXPERTS.split():
            if name in given:
                yield about(s, name, "has no effect: needs --num-experts", "drop it")
        return
    for names, without_effect, why in INERT:
        for name in names.split():
            if name in given and without_effect(s):
                yield about(s, name, f"has no effect: {why}", "drop it")


def experts(s: Values) -> Iterator[Problem]:
    """Everything between sizes."""
    if s.num_experts is None:
        return
    yield from _router(s)
    yield from _groups(s)
    yield from _shared_out(s)
    yield from _matrices(s)
    yield from _not_built(s)
    if have(s.num_layers):
        try:
            expert_layers(s.moe_layer_freq, s.num_layers)
        except ValueError as error:
            yield about(s, "moe_layer_freq num_layers", str(error), "for example 1 (every layer), 2 (every second), [0]+[1]*27")


def _router(s: Values) -> Iterator[Problem]:
    count, k = s.num_experts, s.moe_router_topk
    if have(k) and k > count:
        yield about(s, "moe_router_topk num_experts", "a token cannot go to more experts than there are",
                    nearest_values(moe_router_topk=[count]))  # fmt: skip
    if k == 1 and s.moe_router_score_function == "softmax" and not s.moe_router_pre_softmax and count > 1:
        text = "the softmax over a single chosen expert is always 1, and the router would learn nothing from the loss"
        yield about(s, "moe_router_topk", text, "add --moe-router-pre-softmax, or choose 2")
    if s.moe_router_load_balancing_type == "aux_loss" and s.moe_aux_loss_coeff:
        text = "is the loss over each micro-batch, which changes with --micro-batch-size and the number of ranks"
        yield about(s, "moe_router_load_balancing_type", text, "nearest value that works: seq_aux_loss, over each sequence")


def _groups(s: Values) -> Iterator[Problem]:
    count, groups, best = s.num_experts, s.moe_router_num_groups, s.moe_router_group_topk
    if have(groups) != have(best):
        yield about(s, f"{GROUPS} {BEST}", "one says how many groups there are, the other how many a token may use",
                    "give both, or neither")  # fmt: skip
    if not have(groups, best):
        return
    if count % groups:
        yield about(s, f"num_experts {GROUPS}", f"{count} experts do not fall into {groups} equal groups",
                    nearest_values(moe_router_num_groups=nearest(groups, lambda n: count % n == 0)))  # fmt: skip
    elif best > groups:
        yield about(s, f"{BEST} {GROUPS}", "a token cannot use more groups than there are",
                    nearest_values(moe_router_group_topk=[groups]))  # fmt: skip
    elif have(s.moe_router_topk) and s.moe_router_topk > best * (count // groups):
        text = f"{best} groups of {count // groups} experts are fewer than a token goes to"
        works = nearest(best, lambda n: best <= n <= groups and n * (count // groups) >= s.moe_router_topk)
        fix = nearest_values(moe_router_topk=[best * (count // groups)], moe_router_group_topk=works)
        yield about(s, f"moe_router_topk {BEST}", text, fix)


def _shared_out(s: Values) -> Iterator[Problem]:
    """Experts over ep, ep out of dp x cp."""
    count, ep, tp, pp = s.num_experts, s.expert_model_parallel_size, s.tensor_model_parallel_size, s.pipeline_model_parallel_size
    if not have(ep):
        return
    if count % ep:
        yield about(s, f"num_experts {EP}", f"{count} experts cannot be shared out evenly over {ep} ranks",
                    nearest_values(expert_model_parallel_size=nearest(ep, lambda n: count % n == 0),
                                   num_experts=nearest(count, lambda n: n % ep == 0)))  # fmt: skip
    if have(tp, pp) and s.world % (tp * pp) == 0 and (ranks := s.world // (tp * pp)) % ep:
        works = nearest(ep, lambda n: ranks % n == 0 and count % n == 0)
        yield about(s, f"{EP} world", f"the ranks of ep are taken from the {ranks} of dp x cp, which it must divide",
                    nearest_values(expert_model_parallel_size=works))  # fmt: skip
    if ep > 1 and s.zero_stage and have(s.zero_replica_size) and s.zero_replica_size > 1:
        text = "contradict each other: experts are sharded over all ranks that hold the same ones"
        yield about(s, f"{EP} zero_replica_size", text, "nearest values that work: --zero-replica-size 1")


def _matrices(s: Values) -> Iterator[Problem]:
    """Experts and shared experts over tp."""
    tp, etp = s.tensor_model_parallel_size, s.expert_tensor_parallel_size
    if not s.disable_bias_linear:
        yield about(s, "num_experts", "experts have no biases", "add --disable-bias-linear")
    if not have(tp):
        return
    if have(etp) and etp not in (1, tp):
        yield about(s, f"{ETP} {TP}", "each expert is cut as the other matrices are, or whole",
                    f"nearest values that work: --{ETP.replace('_', '-')} 1 or {tp}")  # fmt: skip
        return
    for name, parts in ((WIDTH, etp or tp), (SHARED, tp)):
        width = getattr(s, name)
        if have(width) and width % parts:
            yield about(s, f"{name} {TP}", f"{width} channels cannot be cut into {parts} equal parts",
                        nearest_values(**{name: nearest(width, lambda n, parts=parts: n % parts == 0)}))  # fmt: skip
    parts = tp * (s.context_parallel_size or 1)
    if etp == 1 and not s.sequence_parallel and have(s.seq_length) and s.seq_length % parts:
        text = f"with whole experts {parts} tp and cp ranks share out a sequence, and {s.seq_length} is no multiple"
        yield about(s, f"seq_length {ETP}", text, nearest_values(seq_length=nearest(s.seq_length, lambda n: n % parts == 0)))


def _not_built(s: Values) -> Iterator[Problem]:
    if s.pipeline_schedule in ASYNCHRONOUS and s.pipeline_model_parallel_size not in (None, 1):
        text = "contradict each other: the load of experts is that of a global batch, and an asynchronous pipeline ends none"
        yield about(s, "num_experts pipeline_schedule", text, "take a schedule that flushes (1f1b)")
    if s.grad_compression != "none":
        text = "contradict each other: gradients of experts are not compressed"
        yield about(s, "num_experts grad_compression", text, "nearest values that work: --grad-compression none")
    if s.fp8_format is not None:
        yield about(s, "num_experts fp8_format", "products of experts are not built in 8 bits", "use --bf16 alone")
