"""Asynchronous pipelines compute what their papers define: every weight after many updates, in fp64 at 1e-10, against one
process that keeps the whole history of weights, and the versions that each action really finds in its parameters."""

import dataclasses

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    assemble,
    config_for,
    copies_agree,
    global_batch,
    local_batches,
    pieces,
    relative,
    replace,
)

from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.optim.versions import WeightVersions
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.parallel.wgrad import attach_grad_buffers
from megatron_lite.schedules.asynchronous import most_versions
from megatron_lite.training.asynchronous import train_window
from megatron_lite.training.setup import build_trainer, grid_of

CPU = torch.device("cpu")
STEPS = 7
MODELS = {"llama": LLAMA, "gpt": dataclasses.replace(GPT, untie_embeddings_and_output_weights=True)}


def config_of(rule, model="llama", optimizer="adam", clip=0.5, **flags):
    config = config_for(MODELS[model], optimizer=optimizer, pipeline_schedule=rule, **flags)
    return replace(config, "optimizer", clip_grad=clip)


def train(rank, world, config, windows, shared_memory=True):
    """What this rank has to show after windows of so many steps each."""
    mesh = build_mesh(grid_of(config, world), CPU, shared_memory)
    trainer, reports = build_trainer(config, mesh), []
    for steps in windows:
        coming, first = iter(range(len(reports), len(reports) + steps)), len(reports)

        def next_step(coming=coming):
            return local_batches(config, mesh, next(coming))

        reports += train_window(trainer, next_step, first, first * config.train.global_batch_size, steps)
    return {
        "losses": [r.loss for r in reports],
        "norms": [r.grad_norm for r in reports],
        "stepped": [r.stepped for r in reports],
        "params": pieces(trainer, "param") if mesh.dp.rank == 0 else [],
        "shared": copies_agree(trainer),
        "live": reports[0].result.peak_live,
    }


def train_everywhere(pool, config, world, windows, shared_memory=True):
    results = pool.run(train, world, world, config, windows, shared_memory)
    shared = {}
    for result in results:
        assert [result[k] for k in ("losses", "norms", "stepped")] == [results[0][k] for k in ("losses", "norms", "stepped")]
        for name, offset, values in result["shared"]:
            assert shared.setdefault((name, tuple(offset)), values) == values, f"copies of {name} drifted apart"
    return results[0] | {"params": assemble(part for r in results for part in r["params"])}


# ---------------------------------------------------------------------------------------------------------------------
# The definition: one process, one microbatch after the other, weights of any age at hand


def version_of(rule, kind, j, rank, pp, m):
    """Updates made before the weights that microbatch `j` (from the last drain on) uses on `rank`, by the papers."""
    if rule == "pipedream-2bw":
        return max(0, j // m - 1)
    if kind == "backward" and rule == "pipemare":
        return j // m
    return max(0, j - (pp - 1 - rank)) // m


class Stage:
    """A stage with the history of its weights, torch's own optimizers, and PipeMare's two remedies."""

    def __init__(self, config, rank, pp):
        self.config, self.rank, self.pp = config, rank, pp
        model, dtype = config.model, getattr(torch, config.precision.dtype_name)
        layers = model.num_layers // pp
        tp = TensorParallel(single().tp, False, dtype, CPU)
        self.module = TransformerStage(model, config.data.vocab_size, config.padded_vocab_size,
                                       range(rank * layers, (rank + 1) * layers), rank == 0, rank == pp - 1, tp)  # fmt: skip
        self.module.initialise(config.train.seed)
        self.params = list(self.module.parameters())
        attach_grad_buffers(self.params)
        self.live = [p.detach().clone().requires_grad_() for p in self.params]
        groups = [{"params": [w for w, p in zip(self.live, self.params, strict=True) if p.shard.decay == decays],
                   "weight_decay": config.optimizer.weight_decay * decays} for decays in (True, False)]  # fmt: skip
        adam = config.optimizer.optimizer == "adam"
        self.optimizer = (torch.optim.AdamW(groups, lr=1.0, eps=config.optimizer.adam_eps) if adam else
                          torch.optim.SGD([g | {"weight_decay": 0.0} for g in groups], lr=1.0,
                                          momentum=config.optimizer.sgd_momentum))  # fmt: skip
        self.decay = None if adam else config.optimizer.weight_decay
        self.restart()

    def restart(self):
        """A drain: only the newest weights are left."""
        self.history = [[w.detach().clone() for w in self.live]]
        self.delta = [torch.zeros_like(w) for w in self.live]

    def use(self, weights):
        for param, weight in zip(self.params, weights, strict=True):
            param.data = weight

    def update(self, tokens, lr, tau, decay):
        """Clip this stage's gradient, step, remember; returns its squared norm before clipping."""
        square = sum((p.main_grad / tokens).square().sum() for p in self.params)
        most = self.config.optimizer.clip_grad / self.pp**0.5
        clip = min(1.0, most / (float(square) ** 0.5 + 1e-6)) if most else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for weight, param in zip(self.live, self.params, strict=True):
            weight.grad = param.main_grad * (clip / tokens)
            if self.decay and param.shard.decay:
                weight.data.mul_(1.0 - lr * self.decay)
            param.main_grad.zero_()
        self.optimizer.step()
        old, new = self.history[-1], [w.detach().clone() for w in self.live]
        self.history.append(new)
        if tau and decay:
            gamma = decay ** (1 / tau)
            self.delta = [gamma * d + (1 - gamma) * (n - o) for d, n, o in zip(self.delta, new, old, strict=True)]
        return square


def defined(config, rule, pp, windows, dp=1):
    """Losses, norms and parameters by the definition."""
    stages = [Stage(config, rank, pp) for rank in range(pp)]
    micro, annealing = config.train.micro_batch_size, config.parallel.pipemare_annealing_iters
    m = config.train.global_batch_size // (micro * dp)
    decay, losses, norms = config.parallel.pipemare_correction_decay, [], []
    for steps in windows:
        for stage in stages:
            stage.restart()
        for t in range(steps):
            k = len(losses)
            tokens, labels, mask = global_batch(k)
            loss = 0.0
            for j in range(m):
                for d in range(dp):
                    rows = slice((j * dp + d) * micro, (j * dp + d + 1) * micro)
                    loss += one_microbatch(stages, rule, t * m + j, m, decay, tokens[rows], labels[rows], mask[rows])
            count, squares = mask.sum().double(), 0.0
            for stage in stages:
                tau = (pp - 1 - stage.rank) / m if rule == "pipemare" else 0.0
                power = max(0.0, 1.0 - k / annealing) if annealing else 0.0
                squares += stage.update(count, config.optimizer.lr / max(1.0, tau) ** power, tau, decay)
            losses.append(float(loss / count))
            norms.append(float(squares) ** 0.5)
    params = {}
    for stage in stages:
        stage.use(stage.history[-1])
        params |= assemble((box.name, box.full_shape, box.offset, box.length, box.of_local(p.data))
                           for p in stage.params for box in p.shard.boxes)  # fmt: skip
    return {"losses": losses, "norms": norms, "params": params}


def one_microbatch(stages, rule, j, m, decay, tokens, labels, mask):
    """Forward and backward of microbatch j, each stage at the weights that the rule gives it; the sum of token losses."""
    pp, x, ends = len(stages), tokens, []
    for stage in stages:
        stage.use(stage.history[version_of(rule, "forward", j, stage.rank, pp, m)])
        x = x.detach().requires_grad_() if stage.rank else x
        ends.append((x, stage.module(x, labels, mask)))
        x = ends[-1][1]
    grad = torch.ones((), dtype=x.dtype)
    for stage, (x, out) in zip(reversed(stages), reversed(ends), strict=True):
        forward, backward = (version_of(rule, kind, j, stage.rank, pp, m) for kind in ("forward", "backward"))
        weights = stage.history[backward]
        if rule == "pipemare" and decay and backward > forward:
            weights = [w - (backward - forward) * d for w, d in zip(weights, stage.delta, strict=True)]
        stage.use(weights)
        out.backward(grad)
        grad = x.grad
    return ends[-1][1].detach()


CASES = {  # rule, world, flags: every rule at p 2 and 4, at one microbatch per update and more, with tp and dp
    "pipedream_p2": ("pipedream", 2, {"pp": 2, "micro_batch": 8}),
    "pipedream_p4": ("pipedream", 4, {"pp": 4, "micro_batch": 8, "optimizer": "sgd"}),
    "pipedream_p4_m2": ("pipedream", 4, {"pp": 4, "micro_batch": 4, "model": "gpt"}),
    "pipedream_p2_tp2_dp2": ("pipedream", 8, {"pp": 2, "tp": 2, "sp": True, "micro_batch": 4}),
    "2bw_p2": ("pipedream-2bw", 2, {"pp": 2, "micro_batch": 2, "optimizer": "sgd", "clip": 0.0}),
    "2bw_p4": ("pipedream-2bw", 4, {"pp": 4, "micro_batch": 2, "model": "gpt"}),
    "2bw_p4_m8_no_overlap_dp2": ("pipedream-2bw", 8, {"pp": 4, "micro_batch": 1, "no_overlap_grad_reduce": True}),
    "pipemare_p2": ("pipemare", 2, {"pp": 2, "micro_batch": 8, "optimizer": "sgd"}),
    "pipemare_p4": ("pipemare", 4, {"pp": 4, "micro_batch": 8}),
    "pipemare_p4_m2_sgd": ("pipemare", 4, {"pp": 4, "micro_batch": 4, "model": "gpt", "optimizer": "sgd"}),
    "pipemare_p4_plain": ("pipemare", 4, {"pp": 4, "micro_batch": 8, "pipemare_annealing_iters": 0,
                                          "pipemare_correction_decay": 0.0}),
    "pipemare_p2_tp2_dp2": ("pipemare", 8, {"pp": 2, "tp": 2, "micro_batch": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_definition(pool, case):
    """Seven updates, a drain, three more: losses, norms and every parameter."""
    rule, world, flags = CASES[case]
    if rule == "pipemare":
        flags = {"pipemare_annealing_iters": 20} | flags
    config = config_of(rule, **flags)
    run = train_everywhere(pool, config, world, [STEPS, 3])
    wanted = defined(config, rule, config.parallel.pp, [STEPS, 3], world // (config.parallel.pp * config.parallel.tp))
    assert run["losses"] == pytest.approx(wanted["losses"], rel=1e-10)
    assert run["norms"] == pytest.approx(wanted["norms"], rel=1e-10)
    assert run["params"].keys() == wanted["params"].keys() and all(run["stepped"])
    for name, param in wanted["params"].items():
        assert relative(run["params"][name], param) <= 1e-10, name


# ---------------------------------------------------------------------------------------------------------------------
# Versions, read off the bits that an action finds in its parameters


def bits(params):
    return hash(tuple(p.detach().double().sum().item() for p in params))


def watched(rank, world, config, steps):
    """[(kind, microbatch, version)] of this rank's actions and its copies, by looking into the parameters."""
    mesh = build_mesh(grid_of(config, world), CPU)
    trainer = build_trainer(config, mesh)
    params, optimizer, executor, seen = list(trainer.chunks[0].parameters()), trainer.optimizer, trainer.executor, []
    known, step, forward, backward = {bits(params): 0}, optimizer.step, executor._forward, executor._backward

    def stepping(*args):
        step(*args)
        flat = {id(p): b.param[s.start : s.start + s.numel] for b in trainer.engine.buckets
                for s, p in zip(b.layout.slots, b.params, strict=True)}  # fmt: skip
        known[bits(flat[id(p)].view(p.shape) for p in params)] = len(known)

    def looking(run):
        def action_with_a_look(planned, state):
            action = planned.action
            seen.append((action.kind, action.microbatch, known.get(bits(params))))
            run(planned, state)

        return action_with_a_look

    optimizer.step, executor._forward, executor._backward = stepping, looking(forward), looking(backward)
    allocated = []
    updated = WeightVersions.updated
    WeightVersions.updated = lambda self: (updated(self), allocated.append(self.allocated))[0]
    try:
        batches = iter(range(steps))
        train_window(trainer, lambda: local_batches(config, mesh, next(batches)), 0, 0, steps)
    finally:
        WeightVersions.updated = updated
    return seen, max(allocated)


@pytest.mark.parametrize(("rule", "pp", "micro"), [
    ("pipedream", 2, 8), ("pipedream", 4, 8), ("pipedream", 4, 4), ("pipedream", 4, 1),
    ("pipedream-2bw", 2, 4), ("pipedream-2bw", 4, 2), ("pipedream-2bw", 4, 1),
    ("pipemare", 2, 8), ("pipemare", 4, 8), ("pipemare", 4, 2),
])  # fmt: skip
def test_versions_are_those_of_the_definition(pool, rule, pp, micro):
    steps, m = 8, GLOBAL_BATCH // micro
    config = config_of(rule, pp=pp, micro_batch=micro, pipemare_correction_decay=0.0)
    for rank, (seen, allocated) in enumerate(pool.run(watched, pp, pp, config, steps)):
        used = {(kind, j): version for kind, j, version in seen}
        assert len(used) == 2 * steps * m
        for j in range(steps * m):
            forward, backward = used["F", j], used["BW", j]
            assert forward == version_of(rule, "forward", j, rank, pp, m), (rank, j)
            assert backward == version_of(rule, "backward", j, rank, pp, m), (rank, j)
            full = j >= max(m, pp)  # the pipeline has filled since the drain
            if full and rule == "pipedream-2bw":
                assert j // m - forward == 1 and backward == forward
            elif full and m == 1:  # the papers' own case
                assert j - forward == pp - 1 - rank
                assert backward == (forward if rule == "pipedream" else j)
        assert allocated == most_versions(rule, pp, rank, m), (rank, allocated)


# ---------------------------------------------------------------------------------------------------------------------
# What else a run relies on


@pytest.mark.parametrize("rule", ["pipedream", "pipedream-2bw", "pipemare"])
def test_transports_and_runs_give_the_same_bits(pool, rule):
    """Twice through shared memory and once over gloo's sockets, with dropout."""
    model = dataclasses.replace(LLAMA, hidden_dropout=0.1, attention_dropout=0.1)
    config = replace(config_of(rule, pp=4, micro_batch=2), "model", **dataclasses.asdict(model))
    first, second, sockets = (train_everywhere(pool, config, 4, [4], shared_memory=shm) for shm in (True, True, False))
    assert first["losses"] == second["losses"] == sockets["losses"]
    for name, param in first["params"].items():
        assert torch.equal(param, second["params"][name]) and torch.equal(param, sockets["params"][name]), name


def test_a_stage_without_a_finite_norm_skips_alone_and_the_step_counts_as_skipped(pool):
    for result in pool.run(poisoned, 2, 2, config_of("pipedream", pp=2, micro_batch=8)):
        assert result["stepped"] == [True, False, True, True] and result["steps"] == 4
        assert not torch.isfinite(torch.tensor(result["norms"][1])) and result["finite"]


def poisoned(rank, world, config):
    """Four steps; in the second the gradient of the first stage alone is not finite."""
    mesh = build_mesh(grid_of(config, world), CPU)
    trainer, updates, batches = build_trainer(config, mesh), [], iter(range(4))
    finish = trainer.engine.finish

    def finishing():
        finish()
        updates.append(1)
        if mesh.pp.rank == 0 and len(updates) == 2:
            trainer.engine.buckets[0].grad.fill_(torch.nan)

    trainer.engine.finish = finishing
    reports = train_window(trainer, lambda: local_batches(config, mesh, next(batches)), 0, 0, 4)
    finite = all(b.param.isfinite().all() for b in trainer.engine.buckets)
    return {"stepped": [r.stepped for r in reports], "norms": [r.grad_norm for r in reports], "finite": finite,
            "steps": trainer.optimizer.steps}  # fmt: skip


@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_the_clipped_global_norm_stays_below_clip_grad(pool, clip):
    config = config_of("pipedream", pp=4, micro_batch=8, clip=clip)
    norms = pool.run(applied_norms, 4, 4, config)
    applied = [sum(squares) ** 0.5 for squares in zip(*norms, strict=True)]
    assert all(norm <= 0.05 * (1 + 1e-9) for norm in applied) if clip else all(norm > 0.05 for norm in applied)


def applied_norms(rank, world, config):
    """Squared norms of this stage's gradient as the optimizer gets it."""
    mesh = build_mesh(grid_of(config, world), CPU)
    trainer, squares, batches = build_trainer(config, mesh), [], iter(range(4))
    step = trainer.optimizer.step

    def stepping(lr, scale):
        squares.append(sum(float((b.grad * scale).square().sum()) for b in trainer.engine.buckets))
        step(lr, scale)

    trainer.optimizer.step = stepping
    train_window(trainer, lambda: local_batches(config, mesh, next(batches)), 0, 0, 4)
    return squares
