"""The cut of a sequence and attention in parts: equal work, nothing seen twice or missed, parts that come to the whole."""

import itertools

import pytest
import torch

from megatron_lite.comm.mesh import Axis
from megatron_lite.data.documents import document_starts
from megatron_lite.models.packing import Documents
from megatron_lite.models.partial_attention import BLOCK_ROWS, Blocks, Flash, Grads, Sums, kernel_for
from megatron_lite.parallel.context import Places, in_order, in_parts, own_part, pieces, zigzag

CPU = torch.device("cpu")
SIZES = [2, 3, 4, 8]


def contiguous(rank, size, length):
    return Places(((rank * length // size, length // size),))


def work(cut, size, length):
    """[step][rank] pairs of a query and a key that it sees, in a ring."""
    held = [cut(rank, size, length) for rank in range(size)]
    return [[sum(piece.pairs for piece in pieces(held[rank], held[rank - step])) for rank in range(size)] for step in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_zigzag_is_equal_work(size):
    length = 2 * size * 500
    steps = work(zigzag, size, length)
    assert sum(map(sum, steps)) == length * (length + 1) // 2
    assert all(len(set(step)) == 1 for step in steps)  # every rank, in every step
    flat = [step[0] for step in steps]
    assert max(flat) <= 1.002 * min(flat)  # every step: the causal squares hold half a diagonal more


@pytest.mark.parametrize(("size", "efficiency"), [(4, 0.57), (8, 0.53)])
def test_contiguous_parts_wait(size, efficiency):
    steps = work(contiguous, size, size * 1000)
    total = sum(map(sum, steps))
    assert total / (size * sum(map(max, steps))) == pytest.approx(efficiency, abs=0.005)
    assert [step[-1] for step in steps] == [max(step) for step in steps]  # the last rank is never idle


@pytest.mark.parametrize("cut", [zigzag, contiguous])
@pytest.mark.parametrize("size", SIZES)
def test_pieces_are_what_is_seen(cut, size):
    """Of every rank's keys, and of all in order; each pair once."""
    length = 2 * size * 3
    everyone = Places(((0, length),))
    for rank in range(size):
        mine, seen = cut(rank, size, length), torch.zeros(length, length, dtype=torch.int64)
        rows, gathered = mine.tensor(CPU), torch.zeros(length, length, dtype=torch.int64)
        for keys, into in [*((cut(other, size, length), seen) for other in range(size)), (everyone, gathered)]:
            columns = keys.tensor(CPU)
            for queries, slots, causal in pieces(mine, keys):
                block = torch.ones(queries.stop - queries.start, slots.stop - slots.start, dtype=torch.int64)
                into[rows[queries][:, None], columns[slots]] += block.tril() if causal else block
        expected = torch.zeros_like(seen)
        expected[rows] = (torch.arange(length) <= rows[:, None]).long()
        assert torch.equal(seen, expected) and torch.equal(gathered, expected)


def test_the_rule_of_a_step():
    """The first of the keys of a lower rank for all queries; all keys of a higher rank for the second chunk."""
    own, lower, higher = zigzag(1, 3, 12), zigzag(0, 3, 12), zigzag(2, 3, 12)
    assert pieces(own, own) == [(slice(0, 4), slice(0, 4), True)]
    assert pieces(own, lower) == [(slice(0, 4), slice(0, 2), False)]
    assert pieces(own, higher) == [(slice(2, 4), slice(0, 4), False)]


@pytest.mark.parametrize("size", SIZES)
def test_cut_and_back(size):
    x = torch.arange(3 * 2 * size * 2 * 5).view(3, 2 * size * 2, 5)
    parts = torch.stack([own_part(x, Axis("cp", rank, tuple(range(size)))) for rank in range(size)])  # [c, 3, s/c, 5]
    for rank in range(size):
        assert torch.equal(parts[rank], x[:, zigzag(rank, size, 4 * size).tensor(CPU)])
    assert torch.equal(in_order(parts, 2), x) and torch.equal(in_parts(x, 2, size), parts)
    assert torch.equal(in_order(in_parts(x.transpose(0, 1), 1, size), 1), x.transpose(0, 1))
    assert own_part(x, Axis("cp")) is x


@pytest.mark.parametrize(("trade", "rings"), [(2, 2), (2, 3), (4, 2)])
def test_neighbours_together_are_one_rank_of_a_smaller_ring(trade, rings):
    size = trade * rings
    length = 2 * size * 3
    for group in range(rings):
        members = [zigzag(group * trade + i, size, length) for i in range(trade)]
        joined = torch.cat([part.tensor(CPU) for part in members]).sort().values
        assert torch.equal(joined, zigzag(group, rings, length).tensor(CPU))
        parts = torch.stack([part.tensor(CPU) for part in members])
        assert torch.equal(in_order(parts, 1), joined)


def test_merging_is_exact():
    """In fp64 to rounding, also where one part outweighs the other by e^1000, or weighs nothing."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(7, 20, dtype=torch.float64, generator=generator)
    scores[1, :8] += 1000
    scores[2, 8:] += 1000
    scores[3, 8:] = -1e300
    values = torch.randn(20, 5, dtype=torch.float64, generator=generator)
    sums = Sums(torch.full((7, 5), float("nan"), dtype=torch.float64), torch.full((7,), float("nan"), dtype=torch.float64))
    for first, part in ((True, slice(0, 8)), (False, slice(8, 20))):
        lse = scores[:, part].logsumexp(1)
        sums.put((slice(None),), scores[:, part].softmax(1) @ values[part], lse, first)
    torch.testing.assert_close(sums.out, scores.softmax(1) @ values, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(sums.lse, scores.logsumexp(1), rtol=1e-14, atol=1e-14)


def tensors(length, g, dtype, b=2, k=2, d=6):
    generator = torch.Generator().manual_seed(1)
    shapes = (length, b, k, g, d), (length, b, k, 1, d), (length, b, k, 1, d), (length, b, k, g, d)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def dense(q, k, v, dout, starts):
    """The definition in fp64: output and gradients."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    at = torch.arange(q.shape[0])
    seen = (at <= at[:, None]) & (at >= starts[:, :, None])
    scores = torch.einsum("ibkgd,jbkd->bkgij", q, k.squeeze(3)).masked_fill(~seen[:, None, None], float("-inf"))
    out = torch.einsum("bkgij,jbkd->ibkgd", scores.softmax(-1), v.squeeze(3))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def in_a_ring(kernel, size, q, k, v, dout, documents, parts):
    """All ranks, one after another, without wires: output and gradients of the whole. `parts`: the keys of each step."""
    length, b = q.shape[0], q.shape[1]
    held = [zigzag(rank, size, length) for rank in range(size)]
    places = [each.tensor(CPU) for each in held]
    out, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))
    folded = [kernel.fold_keys(k[p.tensor(CPU)], v[p.tensor(CPU)]) for p in parts]
    wide = torch.promote_types(q.dtype, torch.float32)
    dkv = [torch.zeros(kv.shape, dtype=wide) for kv in folded]
    for rank in range(size):
        rows = places[rank]
        mine, sums = kernel.fold(q[rows]), None
        sums = kernel.sums(mine)
        order = [(rank - step) % size for step in range(size)] if len(parts) == size else [0]
        for source in order:
            kernel.add(sums, mine, folded[source], held[rank], parts[source], documents)
        out[rows] = kernel.unfold(sums.out, q.dtype, q[rows].shape)
        whole = kernel.whole(kernel.fold(dout[rows]), kernel.fold(out[rows]), sums.lse)
        grad = torch.zeros(mine.shape, dtype=wide)
        for source in order:
            kernel.differentiate(Grads(grad, dkv[source]), whole, mine, folded[source], held[rank], parts[source], documents)
        dq[rows] = kernel.unfold(grad, q.dtype, q[rows].shape)
    for part, grads in zip(parts, dkv, strict=True):
        dk[part.tensor(CPU)], dv[part.tensor(CPU)] = kernel.unfold_keys(grads, q.dtype, b)
    return out, dq, dk, dv


ENDS = {"none": ((), ()), "some": ((3, 11, 12), (20,)), "ends of chunks": ((5, 11, 17), (2, 23)),
        "each token": (tuple(range(24)), (0,))}  # fmt: skip
KERNELS = {  # kernel, dtype, tolerance
    "blocks of 1": (lambda g: Blocks(g, 1), torch.float64, 1e-10),
    "blocks of 4": (lambda g: Blocks(g, 4), torch.float64, 1e-10),
    "blocks of 64": (lambda g: Blocks(g, 64), torch.float64, 1e-10),
    "blocks, fp32": (lambda g: Blocks(g, 4), torch.float32, 1e-5),
    "blocks, bf16": (lambda g: Blocks(g, 4), torch.bfloat16, 5e-2),
    "flash, fp32": (Flash, torch.float32, 1e-5),
    "flash, bf16": (Flash, torch.bfloat16, 5e-2),
}


@pytest.mark.parametrize(("name", "size", "g", "ends"), [case for case in itertools.product(KERNELS, (2, 3, 4), (1, 3), ENDS)
                                                         if case[3] == "none" or not case[0].startswith("flash")])  # fmt: skip
def test_parts_come_to_the_whole(name, size, g, ends):
    """The output, and with the lse and out of the whole every gradient, around a ring and with all keys at once."""
    make, dtype, tolerance = KERNELS[name]
    length, kernel = 24, make(g)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    for row, places in enumerate(ENDS[ends]):
        tokens[row, list(places)] = 1
    starts = torch.from_numpy(document_starts(tokens.numpy(), 1))
    given = tensors(length, g, dtype)
    expected = dense(*given, starts)
    documents = None if ends == "none" else Documents(starts, CPU)
    for parts in ([zigzag(rank, size, length) for rank in range(size)], [Places(((0, length),))]):
        for mine, theirs in zip(in_a_ring(kernel, size, *given, documents, parts), expected, strict=True):
            scale = theirs.abs().max()
            assert (mine.double() - theirs).abs().max() <= tolerance * scale


def test_blocks_wholly_outside_are_left_out():
    """A query of another document multiplies nothing, and no tile is without a key that is seen."""
    length, size = 24, 4
    tokens = torch.zeros(2, length, dtype=torch.int64)
    tokens[:, [5, 11, 17]] = 1  # documents of two chunks
    documents = Documents(torch.from_numpy(document_starts(tokens.numpy(), 1)), CPU)
    held, kernel = [zigzag(rank, size, length) for rank in range(size)], Blocks(1, 3)
    found = {(rank, source): list(kernel._tiles(held[rank], held[source], 4, documents))
             for rank in range(size) for source in range(size)}  # fmt: skip
    assert all(tile.last > tile.first for tiles in found.values() for tile in tiles)
    assert all(bool(tiles) == (rank == source or rank // 2 == source // 2) for (rank, source), tiles in found.items())


def test_which_kernel():
    def chosen(dtype, documents=None):
        return type(kernel_for(torch.empty(1, 1, 1, 1, 8, dtype=dtype), 1, documents))

    assert chosen(torch.float64) is Blocks and chosen(torch.float32) is chosen(torch.bfloat16) is Flash
    assert chosen(torch.float32, object()) is Blocks and set(BLOCK_ROWS) >= {torch.float16, torch.float64}
