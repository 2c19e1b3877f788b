"""Bytes on the wire are the planner's, counted at the transports and at the pipeline's sends of real steps."""

import dataclasses
from collections import Counter

import pytest
import torch
from layouts import GPT, LLAMA, config_for, local_batches, slow

from megatron_lite.comm import collectives
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.comm.p2p import P2P
from megatron_lite.config import ActivationConfig
from megatron_lite.planner.outlook import transfers_of_ranks
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

FULL = ActivationConfig("full", "uniform", 1)
PAIRS = ActivationConfig("full", "uniform", 2)
FIRST = ActivationConfig("full", "block", 1)
ALL = {"tp": 2, "pp": 2, "sp": True, "zero_stage": 1}
CASES = [  # model, ranks, activations, flags
    (GPT, 2, None, {"tp": 2}),
    (LLAMA, 2, FULL, {"tp": 2, "sp": True}),
    (GPT, 2, None, {"pp": 2}),
    *[(GPT, 2, None, {"zero_stage": stage}) for stage in range(4)],
    (LLAMA, 8, None, ALL),
    slow(LLAMA, 2, None, {"tp": 2, "sp": True}),
    slow(GPT, 2, PAIRS, {"tp": 2}),
    slow(GPT, 4, FIRST, {"tp": 4, "sp": True}),
    slow(LLAMA, 4, PAIRS, {"tp": 4, "sp": True}),  # two key/value heads on four ranks
    *[slow(LLAMA, 4, FULL, {"zero_stage": stage, "zero_replica_size": 2}) for stage in (1, 2, 3)],
    *[slow(GPT, 4, None, {"pp": 2, "zero_stage": stage}) for stage in (1, 2, 3)],
    *[slow(GPT, 4, None, {"pp": 2, "pipeline_schedule": name, "zero_stage": 1}) for name in ("zbv", "zb-h1", "dualpipe")],
    slow(LLAMA, 4, None, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    slow(LLAMA, 2, None, {"grad_reduce_dtype": "bf16"}),
    slow(LLAMA, 2, None, {"grad_reduce_dtype": "bf16", "zero_stage": 2}),
    slow(GPT, 2, None, {"ddp_bucket_size": 9000, "zero_stage": 1}),
]


class Counting:
    """A transport that notes what it is given."""

    def __init__(self, transport, name, seen):
        self.transport, self.name, self.seen = transport, name, seen

    def note(self, op, buffer):
        self.seen[self.name, op, "bytes"] += buffer.numel() * buffer.element_size()
        self.seen[self.name, op, "calls"] += 1

    def all_gather(self, out, x):
        self.note("all_gather", out)
        return self.transport.all_gather(out, x)

    def reduce_scatter(self, out, x):
        self.note("reduce_scatter", x)
        return self.transport.reduce_scatter(out, x)

    def all_reduce(self, out, x, op):
        self.note("all_reduce", x)
        return self.transport.all_reduce(out, x, op)

    def all_to_all(self, out, x):
        self.note("all_to_all", x)
        return self.transport.all_to_all(out, x)

    def broadcast(self, x, src):
        self.note("broadcast", x)
        return self.transport.broadcast(x, src)


def counted(rank, world, config):
    """What this rank gives the wires in its second step: {(axis, operation, bytes | calls): number}."""
    mesh = build_mesh(grid_of(config, world), torch.device("cpu"))
    trainer, seen = build_trainer(config, mesh), Counter()
    train_step(trainer, local_batches(config, mesh, 0), 0, 0)
    transport, send = collectives._transport, P2P.send

    def sent(self, tensor, *args):
        seen["pp", "send", "bytes"] += tensor.nbytes
        seen["pp", "send", "calls"] += 1
        send(self, tensor, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_transport", lambda x, axis: Counting(transport(x, axis), axis.name, seen))
        patch.setattr(P2P, "send", sent)
        train_step(trainer, local_batches(config, mesh, 1), 1, 0)
    return mesh.pp.rank, dict(seen)


def planned(config):
    """The planner's, per pipeline rank, of all its tp x dp ranks."""
    found = []
    for transfers in transfers_of_ranks(config, pipeline_of(config)):
        seen = Counter()
        for each in transfers:
            seen[each.axis, each.op, "bytes"] += each.calls * each.size * config.parallel.tp * config.data_parallel_size
            seen[each.axis, each.op, "calls"] += each.calls * config.parallel.tp * config.data_parallel_size
        found.append(seen)
    return found


@pytest.mark.parametrize("precision", ["bf16", slow("fp32")])
@pytest.mark.parametrize(("model", "world", "activations", "flags"), CASES)
def test_a_step_sends_what_the_planner_says(pool, model, world, activations, flags, precision):
    config = config_for(model, precision=precision, **flags)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, world_size=world),
                                 activations=activations or config.activations)  # fmt: skip
    plan = planned(config)
    measured = [Counter() for _ in plan]
    for stage, seen in pool.run(counted, world, world, config):
        measured[stage].update(seen)
    for mine, theirs in zip(plan, measured, strict=True):
        keys = {key for key in mine | theirs if key[2] == "bytes" or not config.parallel.zero_stage}
        assert sum(theirs.values()) > 0
        assert {key: theirs[key] for key in keys} == pytest.approx({key: mine[key] for key in keys}, rel=1e-12)
