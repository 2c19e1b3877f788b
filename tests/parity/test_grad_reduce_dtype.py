"""--grad-reduce-dtype bf16: half the bytes between data-parallel ranks, sums in fp32, the same bits everywhere and every time."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from layouts import GPT, LLAMA, config_for, replace, run_everywhere, slow

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.comm.shared import SharedBoard


def given(size, numel):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(numel, generator=generator) * 10.0**r for r in range(size)]


def check(rank, size, numel):
    """Sum and part against their definition, over both transports, and what travelled."""
    board = SharedBoard.connect(rank, size, dist.group.WORLD, 4, 1024)
    ranks, whole = tuple(range(size)), given(size, numel)
    length = numel // size
    parts = []  # of the owner r: its own in fp32, the others' in bf16, added in rank order in fp32
    for owner in range(size):
        mine = slice(owner * length, (owner + 1) * length)
        total = torch.zeros(length)
        for source, x in enumerate(whole):
            total = total + (x[mine] if source == owner else x[mine].bfloat16().float())
        parts.append(total)
    transport = comm._transport
    for axis in (Axis("shared", rank, ranks, dist.group.WORLD, board), Axis("gloo", rank, ranks, dist.group.WORLD)):
        sent = []

        def spy(x, axis, sent=sent):
            sent.append((x.dtype, x.numel()))
            return transport(x, axis)

        comm._transport = spy
        try:
            x = whole[rank].clone()
            assert comm.start_all_reduce(x, axis, wire_dtype=torch.bfloat16).wait() is not None
            assert torch.equal(x, torch.cat(parts).bfloat16().float()), axis.name
            assert [count for _, count in sent] == [numel, length]  # of 2 bytes: (n - 1) / n of the first leaves the rank
            out = torch.empty(length)
            comm.start_reduce_scatter_into(out, whole[rank], axis, torch.bfloat16).wait()
            assert torch.equal(out, parts[rank])
            x = whole[rank].clone()  # into the rank's own part of what is summed
            mine = x[rank * length : (rank + 1) * length]
            comm.start_reduce_scatter_into(mine, x, axis, torch.bfloat16).wait()
            assert torch.equal(mine, parts[rank])
            for dtype, count in sent:
                assert dtype is torch.bfloat16 and count in (numel, length), sent
        finally:
            comm._transport = transport
        with pytest.raises(ValueError, match="does not travel"):
            comm.start_all_reduce(torch.ones(size + 1), axis, wire_dtype=torch.bfloat16)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_bytes(pool, size):
    pool.run(check, size, size, 12 * 200)


def bf16_wire(config):
    return replace(config, "parallel", grad_reduce_dtype="bf16")


@pytest.mark.parametrize(("model", "world", "flags"), [
    (GPT, 2, {}), (LLAMA, 4, {"pp": 2}), slow(GPT, 4, {}), (LLAMA, 4, {"tp": 2, "sp": True})])  # fmt: skip
def test_training(pool, model, world, flags):
    """Replicas stay equal, gradients are those of an fp32 wire to bf16's digits, overlap changes no bit."""
    config = replace(config_for(dataclasses.replace(model, init_method_std=0.1), precision="fp32", **flags), "optimizer", lr=1e-3)
    exact, run = run_everywhere(pool, config, world, 3), run_everywhere(pool, bf16_wire(config), world, 3)
    without_overlap = replace(bf16_wire(config), "parallel", no_overlap_grad_reduce=True)
    late = run_everywhere(pool, without_overlap, world, 3, shared_memory=False)
    assert run["losses"] == pytest.approx(exact["losses"], rel=1e-4) and run["norms"] != exact["norms"]
    assert run["norms"] == pytest.approx(exact["norms"], rel=4e-3)
    largest = max(g.abs().max().item() for g in exact["grads"].values())
    for name, theirs in exact["grads"].items():
        scale = max(theirs.abs().max().item(), 1e-2 * largest)
        error = (run["grads"][name] - theirs).abs().max().item()
        assert error <= 2.0**-6 * scale, name  # two roundings of 2^-9, of parts that may be larger than their sum
    assert (late["losses"], late["norms"]) == (run["losses"], run["norms"])
    for name, param in run["params"].items():
        assert torch.equal(param, late["params"][name]), name
