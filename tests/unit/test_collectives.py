"""Every collective against its definition, over shared memory and over gloo: equal bits, in rank order."""

import functools
import itertools
import platform
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from megatron_lite.comm import collectives as comm
from megatron_lite.comm import pairwise
from megatron_lite.comm.mailbox import ENTRIES, Mailbox
from megatron_lite.comm.mesh import SPANS, Axis, build_mesh, single
from megatron_lite.comm.p2p import KINDS, P2P
from megatron_lite.comm.ring import start_shift
from megatron_lite.comm.shared import SharedBoard
from megatron_lite.grid import Grid

MACHINE = platform.machine
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
LENGTHS = [1, 7, 64, 1000]
DUALS = ["copy_to", "reduce_from", "gather_sequence", "reduce_scatter_sequence", "split_sequence", "gather_replicated",
         "all_to_all_autograd"]  # fmt: skip


def axes(rank, size, slots=4, slot_bytes=1024):
    """The world as an axis, over shared memory with slots so small that everything goes in pieces, and over gloo.

    Over gloo, 512 bytes count as large, so that both of its ways are taken.
    """
    pairwise.SMALL_BYTES = 512
    board = SharedBoard.connect(rank, size, dist.group.WORLD, slots, slot_bytes)
    assert board is not None
    ranks = tuple(range(size))
    return Axis("shared", rank, ranks, dist.group.WORLD, board), Axis("gloo", rank, ranks, dist.group.WORLD)


def inputs(size, shape, dtype, seed=0):
    """What each rank brings; every rank can make them all."""
    made = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for _ in range(size)]
    return [torch.randint(-1000, 1000, shape, generator=made).to(dtype) for _ in range(size)]


def plain_sum(tensors):
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    return functools.reduce(torch.add, [t.to(wide) for t in tensors]).to(tensors[0].dtype)


def check_ops(rank, size, dtype, length):
    for axis in axes(rank, size):
        given = inputs(size, (length, 3), dtype)
        whole = inputs(size, (size * length, 3), dtype, seed=1)
        total, mine = plain_sum(whole), slice(rank * length, (rank + 1) * length)
        expected = {
            "all_reduce": plain_sum(given),
            "max": functools.reduce(torch.maximum, given),
            "min": functools.reduce(torch.minimum, given),
            "all_gather": torch.cat(given),
            "reduce_scatter": total[mine],
            "all_to_all": torch.cat([w[mine] for w in whole]),
            "broadcast": given[size - 1],
        }
        got = {
            "all_reduce": comm.all_reduce(given[rank].clone(), axis),
            "max": comm.all_reduce(given[rank].clone(), axis, "max"),
            "min": comm.all_reduce(given[rank].clone(), axis, "min"),
            "all_gather": comm.all_gather(given[rank], axis),
            "reduce_scatter": comm.reduce_scatter(whole[rank], axis),
            "all_to_all": comm.all_to_all(whole[rank], axis),
            "broadcast": comm.broadcast(given[rank].clone(), axis, src=size - 1),
        }
        check_rows(axis, whole)
        for name, value in expected.items():
            assert torch.equal(got[name], value), (axis.name, name, dtype, length)
        assert torch.equal(given[rank], inputs(size, (length, 3), dtype)[rank])
        check_into(axis, given, whole, total, mine)


def check_rows(axis, whole):
    """Parts of every size, none among them, one way and back."""
    size, length = axis.size, whole[0].shape[0]
    for rows in ([[(p + 2 * q) % 4 * length // (4 * size) for q in range(size)] for p in range(size)],
                 [[length if q == size - 1 else 0 for q in range(size)] for _ in range(size)],
                 [[0] * size] * size):  # fmt: skip
        parts = [whole[p][: sum(row)].split(row) for p, row in enumerate(rows)]
        got = comm.start_exchange_rows(torch.cat(parts[axis.rank]), axis, rows).wait()
        assert torch.equal(got, torch.cat([parts[p][axis.rank] for p in range(size)]))
        back = comm.start_exchange_rows(got, axis, [list(column) for column in zip(*rows, strict=True)]).wait()
        assert torch.equal(back, torch.cat(parts[axis.rank]))


def check_into(axis, given, whole, total, mine):
    """Into buffers, also where the input is a part of the output or the other way round."""
    full = torch.empty_like(whole[0])
    full[mine].copy_(given[axis.rank])
    comm.all_gather_into(full, full[mine], axis)
    assert torch.equal(full, torch.cat(given))
    comm.all_gather_into(full, given[axis.rank], axis)
    assert torch.equal(full, torch.cat(given))
    out = torch.empty_like(given[0])
    assert torch.equal(comm.reduce_scatter_into(out, whole[axis.rank], axis), total[mine])
    work = whole[axis.rank].clone()
    comm.reduce_scatter_into(work[mine], work, axis)
    assert torch.equal(work[mine], total[mine])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_op_in_every_dtype_and_length(pool, size):
    pool.run(every_case, size, size)


def every_case(rank, size):
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        check_ops(rank, size, dtype, length)


def shapes(rank, size):
    for axis in axes(rank, size):
        empty = torch.empty(0, 5)
        assert comm.all_reduce(empty, axis).shape == (0, 5)
        assert comm.all_gather(empty, axis).shape == (0, 5)
        assert comm.reduce_scatter(empty, axis).shape == (0, 5)
        assert comm.all_to_all(empty, axis).shape == (0, 5)
        assert comm.broadcast(empty, axis).shape == (0, 5)
        scalar = torch.tensor(float(rank))
        assert comm.all_reduce(scalar, axis) is scalar and scalar == size * (size - 1) / 2
        strided = [t.t() for t in inputs(size, (6, size * 5), torch.float32)]
        x = strided[rank]
        assert torch.equal(comm.all_gather(x, axis), torch.cat(strided))
        assert torch.equal(comm.reduce_scatter(x, axis), plain_sum(strided)[rank * 5 : rank * 5 + 5])
        target = x.clone(memory_format=torch.preserve_format)
        assert comm.all_reduce(target, axis) is target and torch.equal(target, plain_sum(strided))
        target = x.clone(memory_format=torch.preserve_format)
        assert comm.broadcast(target, axis, src=1) is target and torch.equal(target, strided[1])
        flags = torch.tensor([rank == 0, True, False])
        assert comm.all_gather(flags, axis).sum() == size + 1
        assert comm.gather_objects({"rank": rank}, axis) == [{"rank": r} for r in range(size)]
        comm.barrier(axis)
        with pytest.raises(ValueError, match="cannot be cut into"):
            comm.reduce_scatter(torch.zeros(size + 1), axis)
        with pytest.raises(ValueError, match="does not fit"):
            comm.all_gather_into(torch.zeros(3 * size), torch.zeros(2), axis)


def test_empty_scalar_and_strided_tensors(pool):
    pool.run(shapes, 2, 2)
    pool.run(shapes, 3, 3)


def in_flight(rank, size, slots, slot_bytes):
    """More operations of all kinds than slots, waited for in another order than they were started."""
    for axis in axes(rank, size, slots, slot_bytes):
        started, expected = [], []
        for seed in range(12):
            length = size * (seed * 37 % 100 + 1)
            given = inputs(size, (length,), torch.float32, seed)
            part = slice(rank * length // size, (rank + 1) * length // size)
            start = [comm.start_all_reduce, comm.start_all_gather, comm.start_reduce_scatter][seed % 3]
            started.append(start(given[rank].clone(), axis))
            expected.append([plain_sum(given), torch.cat(given), plain_sum(given)[part]][seed % 3])
            if seed % 5 == 4:
                comm.barrier(axis)
                assert comm.all_reduce(torch.ones(3), axis).tolist() == [size] * 3
        for i in [5, 0, 11, 3, 3, *range(12)]:
            assert torch.equal(started[i].wait(), expected[i]), (axis.name, i)


@pytest.mark.parametrize("slots, slot_bytes", [(1, 256), (2, 64), (8, 1 << 16)])
def test_many_operations_in_flight(pool, slots, slot_bytes):
    pool.run(in_flight, 2, 2, slots, slot_bytes)
    pool.run(in_flight, 4, 4, slots, slot_bytes)


def gradients(rank, size):
    """The whole program, all ranks' inputs to all ranks' outputs, is differentiated as one function and compared.

    loss = sum over ranks of <w[rank], f(x)[rank]>. Where every rank holds the same value (an all-reduce's output, a
    copied input) Megatron's pairs count it once: the backward of reduce_from is the identity, that of copy_to sums.
    """
    n, d = size * 2, 3
    own = slice(rank * 2, rank * 2 + 2)
    for axis, name in itertools.product(axes(rank, size), DUALS):
        short = name in ("gather_sequence", "gather_replicated")
        xs = [x.requires_grad_() for x in inputs(size, (2 if short else n, d), torch.float64, seed=3)]
        if name in ("copy_to", "split_sequence"):
            xs = [xs[0].detach().clone().requires_grad_() for _ in range(size)]
        value = getattr(comm, name)(xs[rank], axis)
        per_rank = inputs(size, tuple(value.shape), torch.float64, seed=4)
        if name in ("reduce_from", "gather_replicated"):
            per_rank = [per_rank[0]] * size
        value.backward(per_rank[rank])
        grad = {
            "copy_to": lambda w: plain_sum(w),
            "reduce_from": lambda w: w[0],
            "gather_sequence": lambda w: plain_sum(w)[own],
            "reduce_scatter_sequence": lambda w: torch.cat(w),
            "split_sequence": lambda w: torch.cat(w),
            "gather_replicated": lambda w: w[0][own],
            "all_to_all_autograd": lambda w: torch.cat([one[own] for one in w]),
        }[name](per_rank)
        out = {
            "copy_to": lambda x: x[rank],
            "reduce_from": lambda x: plain_sum(x),
            "gather_sequence": lambda x: torch.cat(x),
            "reduce_scatter_sequence": lambda x: plain_sum(x)[own],
            "split_sequence": lambda x: x[0][own],
            "gather_replicated": lambda x: torch.cat(x),
            "all_to_all_autograd": lambda x: torch.cat([one[own] for one in x]),
        }[name]([x.detach() for x in xs])
        assert torch.equal(value, out), (axis.name, name)
        assert torch.allclose(xs[rank].grad, grad, rtol=1e-12, atol=1e-12), (axis.name, name)


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_the_dual_pairs(pool, size):
    pool.run(gradients, size, size)


def adjoint(rank, size):
    """<f(x), y> = <x, f'(y)> summed over ranks: each true linear map's backward is its transpose."""
    maps = ["gather_sequence", "reduce_scatter_sequence", "all_to_all_autograd"]
    for axis, name in itertools.product(axes(rank, size), maps):
        x = inputs(size, (2 * size, 3), torch.float64, seed=5)[rank].requires_grad_()
        value = getattr(comm, name)(x, axis)
        y = inputs(size, tuple(value.shape), torch.float64, seed=6)[rank]
        value.backward(y.expand_as(value))
        sides = torch.stack([(value.detach() * y).sum(), (x.detach() * x.grad).sum()])
        comm.all_reduce(sides, axis)
        assert torch.allclose(sides[0], sides[1], rtol=1e-12)


def test_backward_is_the_transpose(pool):
    pool.run(adjoint, 3, 3)


def shared_gradient(rank, size):
    """copy_to's backward must not write into a gradient that another branch also receives."""
    for axis in axes(rank, size):
        x = torch.ones(4, requires_grad=True)
        other = torch.ones(4, requires_grad=True)
        (comm.copy_to(x, axis) + other).backward(torch.full((4,), 2.0))
        assert x.grad.tolist() == [2.0 * size] * 4 and other.grad.tolist() == [2.0] * 4


def test_gradients_are_not_changed_in_place(pool):
    pool.run(shared_gradient, 2, 2)


def test_a_single_rank_does_nothing():
    axis = single().tp
    x = torch.randn(4, 3, requires_grad=True)
    for name in [*DUALS, "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]:
        assert getattr(comm, name)(x, axis) is x
    for start in (comm.start_all_reduce, comm.start_all_gather, comm.start_reduce_scatter):
        assert start(x, axis).wait() is x
    out = torch.empty(4, 3)
    assert torch.equal(comm.all_gather_into(out, x.detach(), axis), x.detach())
    assert comm.gather_objects("a", axis) == ["a"]
    comm.barrier(axis)


def all_axes(rank, shared_memory):
    grid = Grid(tp=2, dp=2, pp=2)
    mesh = build_mesh(grid, torch.device("cpu"), shared_memory)
    for name in SPANS:
        axis = getattr(mesh, name)
        assert axis.ranks[axis.rank] == rank
        assert comm.all_gather(torch.tensor([rank]), axis).tolist() == list(axis.ranks)
        assert axis.size == 1 or (axis.board is not None) == shared_memory
    assert mesh.dp.board is mesh.dp_cp.board and mesh.dp.tags is mesh.dp_cp.tags


@pytest.mark.parametrize("shared_memory", [True, False])
def test_every_axis_of_a_mesh_talks_to_its_own_ranks(pool, shared_memory):
    pool.run(all_axes, 8, shared_memory)


def one_cannot(rank, size):
    """One rank that cannot share memory makes all ranks use gloo."""
    if rank == 1:
        platform.machine = lambda: "aarch64"
    board = SharedBoard.connect(rank, size, dist.group.WORLD)
    platform.machine = MACHINE
    return board is None


def test_one_rank_without_shared_memory_means_none_for_all(pool):
    assert pool.run(one_cannot, 3, 3) == [True] * 3


def late_rank(rank, size):
    board = SharedBoard.connect(rank, size, dist.group.WORLD)
    board.timeout = 1.5
    axis = Axis("dp", rank, tuple(range(size)), dist.group.WORLD, board)
    if rank == 0:
        with pytest.raises(TimeoutError, match=r"rank 0 of 3 waited 1.5 s for ranks \[2\] of its axis"):
            comm.all_reduce(torch.ones(2), axis)
    elif rank == 1:
        comm.start_all_reduce(torch.ones(2), axis)
    dist.barrier()


def test_a_rank_that_does_not_come_is_named(pool):
    pool.run(late_rank, 3, 3)


def pipeline_messages(rank, size):
    """Neighbours post messages of both kinds and several chunks in different orders; each arrives where it belongs."""
    names = list(itertools.product(KINDS, (0, 1), (0, 1, 2)))

    def content(source, kind, chunk, microbatch):
        return torch.full((4, 3), 100 * source + 10 * chunk + microbatch + (0.5 if kind == KINDS[0] else 0)).bfloat16()

    every_link = [P2P(axis, torch.device("cpu")) for axis in axes(rank, size)]
    assert [links.mailbox is not None for links in every_link] == [True, False]
    for links, peer in itertools.product(every_link, sorted({(rank - 1) % size, (rank + 1) % size})):
        awaited = {n: links.irecv((4, 3), torch.bfloat16, peer, *n) for n in sorted(names, reverse=rank % 2 == 0)}
        for name in sorted(names, key=lambda n: n[::-1]):
            links.send(content(rank, *name), peer, *name)
            links.sweep()
        for name, handle in awaited.items():
            assert torch.equal(handle.wait(), content(peer, *name)), name
            assert torch.equal(handle.wait(), content(peer, *name))
        links.flush()
        with pytest.raises(ValueError, match="chunk 256"):
            links.send(torch.ones(1), 0, KINDS[0], 256, 0)


def mail(rank, size):
    """More messages than a ring has entries, of several lengths, both ways; places in the heap are used again."""
    box = Mailbox.connect(rank, size, dist.group.WORLD)
    for number in range(ENTRIES + 300):
        box.send(torch.full((number % 3 * 1000,), number), 1 - rank, number)
        if number >= 5:
            tensor = torch.empty((number - 5) % 3 * 1000, dtype=torch.int64)
            box.receive(tensor, 1 - rank, number - 5)
            assert (tensor == number - 5).all()
    assert box.top < 60 * 4096 * 4
    dist.barrier()
    box.send(torch.ones(2), 1 - rank, 7)
    with pytest.raises(ValueError, match="awaits 4 bytes, rank . sent 8 with tag 7"):
        box.receive(torch.ones(1), 1 - rank, 7)
    dist.barrier()


def test_a_mailbox_goes_round(pool):
    pool.run(mail, 2, 2)


def asleep(rank, size):
    """A sleeping receiver is woken by the message it waits for, not by another; and by the end of its sender."""
    box = Mailbox.connect(rank, size, dist.group.WORLD)
    tensor = torch.zeros(3)
    if rank == 1:
        for number in (5, 6):
            time.sleep(0.05)
            box.send(torch.full((3,), float(number)), 0, number)
    else:
        began, used = time.perf_counter(), time.process_time()
        box.receive(tensor, 1, 6)
        assert (tensor == 6).all() and time.perf_counter() - began > 0.04
        assert time.process_time() - used < 0.04  # no spinning
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        box.pids = [ended.pid] * size
        with pytest.raises(RuntimeError, match=r"waited for ranks \[1\] of its axis, whose processes have ended"):
            box.receive(tensor, 1, 7)
    dist.barrier()


def test_a_mailbox_sleeps(pool):
    pool.run(asleep, 2, 2)


def round_the_ring(rank, size):
    """Two kinds of tensor in turn, as ring attention sends them, each read in the sender's memory where ranks share some."""
    shared, gloo = axes(rank, size)
    shared.mailbox = Mailbox.connect(rank, size, dist.group.WORLD)
    for axis in (shared, gloo):
        held = torch.full((3, 4), float(rank), dtype=torch.bfloat16)
        sums, gone = None, torch.empty(0)
        for step in range(2 * size):
            coming = start_shift(held, axis)
            mine = torch.full((1000,), float(rank))
            if sums is not None:
                mine += sums.wait()
                sums.let_go()
            sums = start_shift(mine, axis)
            held, gone = coming.wait(), held
            assert (held == (rank - step - 1) % size).all() and held.dtype == torch.bfloat16 and held.shape == (3, 4)
            assert axis.mailbox is None or held.data_ptr() != gone.data_ptr()
            held = held.clone()
            coming.let_go()
        total = sums.wait()
        assert (total == sum((rank - 1 - step) % size for step in range(2 * size))).all()
        sums.let_go()
        assert axis.mailbox is None or axis.mailbox.top < 1 << 20  # places are used again


def test_a_ring_shifts(pool):
    pool.run(round_the_ring, 2, 2)
    pool.run(round_the_ring, 3, 3)


def test_pipeline_messages_are_paired_by_name(pool):
    pool.run(pipeline_messages, 2, 2)
    pool.run(pipeline_messages, 4, 4)
