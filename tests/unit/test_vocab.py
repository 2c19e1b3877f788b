"""Embedding and cross-entropy against torch's, for any chunking, padding, smoothing, mask and precision; and their memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.comm.mesh import Axis
from megatron_lite.comm.mesh import build_mesh as mesh_of
from megatron_lite.grid import Grid
from megatron_lite.parallel import vocab
from megatron_lite.parallel.shard import Init, allocate
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.parallel.vocab import cross_entropy, embed, vocab_boxes, vocab_matrix
from megatron_lite.parallel.wgrad import attach_grad_buffers

ONE = Axis("tp")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def case(n, vocabulary, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, width, dtype=torch.float64, generator=generator).mul_(3).to(dtype)
    labels = torch.randint(0, vocabulary, (n,), generator=generator)
    mask = (torch.rand(n, generator=generator) < 0.7).float()
    return logits, labels, mask


def reference(logits, labels, mask, vocabulary, smoothing, scale=1.0):
    """(sum of mask x loss, its gradient) by torch, in fp64, over the true vocabulary alone."""
    exact = logits.detach().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact[:, :vocabulary], labels, reduction="none", label_smoothing=smoothing)
    loss = (losses * mask).sum()
    (loss * scale).backward()
    return loss.detach(), exact.grad


def ours(logits, labels, mask, vocabulary, smoothing, scale=1.0):
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf * 1.0, labels, mask, ONE, vocabulary, smoothing)  # a product: its memory may be consumed
    (loss * scale).backward()
    return loss.detach(), leaf.grad


def assert_alike(mine, theirs, dtype):
    (loss, grad), (true_loss, true_grad) = mine, theirs
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and grad.dtype == dtype
    tolerance = TOLERANCE[dtype]
    assert abs(loss.double() - true_loss) <= max(tolerance if dtype != torch.bfloat16 else 1e-5, 1e-12) * max(1.0, abs(true_loss))
    assert (grad.double() - true_grad).abs().max() <= tolerance * max(true_grad.abs().max(), 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("n", "width", "chunk_rows"), [(1, 50, 8), (7, 50, 8), (8, 50, 8), (33, 50, 8), (9, 64, 1), (9, 96, 9)])
def test_against_torch(monkeypatch, dtype, smoothing, n, width, chunk_rows):
    monkeypatch.setattr(vocab, "LOGITS_CHUNK_BYTES", 4 * width * chunk_rows)
    logits, labels, mask = case(n, 50, width, dtype)
    if width > 50:
        logits[:, 50:] += 50  # padding that would win every softmax if it were seen
    mine = ours(logits, labels, mask, 50, smoothing, scale=0.25)
    assert_alike(mine, reference(logits, labels, mask, 50, smoothing, scale=0.25), dtype)
    assert (mine[1][:, 50:] == 0).all() and (mine[1][mask == 0] == 0).all()


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 40), vocabulary=st.integers(2, 70), padding=st.integers(0, 30), rows=st.integers(1, 50),
       smoothing=st.sampled_from([0.0, 0.05, 0.5]), seed=st.integers(0, 99))  # fmt: skip
def test_any_size(n, vocabulary, padding, rows, smoothing, seed):
    logits, labels, mask = case(n, vocabulary, vocabulary + padding, torch.float64, seed)
    before, vocab.LOGITS_CHUNK_BYTES = vocab.LOGITS_CHUNK_BYTES, 4 * (vocabulary + padding) * rows
    try:
        mine = ours(logits, labels, mask, vocabulary, smoothing)
    finally:
        vocab.LOGITS_CHUNK_BYTES = before
    assert_alike(mine, reference(logits, labels, mask, vocabulary, smoothing), torch.float64)


def test_chunks_are_of_the_size_they_say(monkeypatch):
    """The parametrised chunk sizes above do cut: as many calls as chunks."""
    calls = []
    rows = vocab._rows
    monkeypatch.setattr(vocab, "_rows", lambda logits, *rest: calls.append(len(logits)) or rows(logits, *rest))
    monkeypatch.setattr(vocab, "LOGITS_CHUNK_BYTES", 4 * 50 * 8)
    ours(*case(33, 50, 50, torch.float32), 50, 0.0)
    assert calls == [8, 8, 8, 8, 1]


def test_large_and_equal_logits():
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4], [0.0, 0.0, 0.0], [-80.0, 80.0, 0.0]])
    labels, mask = torch.tensor([1, 2, 0]), torch.ones(3)
    assert_alike(ours(logits, labels, mask, 3, 0.0), reference(logits, labels, mask, 3, 0.0), torch.float32)


def test_without_gradient_the_logits_are_left_alone():
    logits, labels, mask = case(9, 50, 50, torch.float32)
    kept = logits.clone()
    with torch.no_grad():
        loss = cross_entropy(logits, labels, mask, ONE, 50, 0.1)
    assert torch.equal(logits, kept)
    assert loss == pytest.approx(reference(logits, labels, mask, 50, 0.1)[0].item(), rel=1e-6)


class Allocations(TorchDispatchMode):
    """Bytes of the largest new storage, and the most bytes of new storages alive at once."""

    def __init__(self):
        super().__init__()
        self.largest, self.sizes, self.storages = 0, [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.sizes.append(tensor.untyped_storage().nbytes())
        self.largest = max(self.sizes, default=0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_there_is_never_a_second_tensor_of_the_logits_size(monkeypatch, dtype, smoothing):
    n, width, rows = 512, 1000, 16
    monkeypatch.setattr(vocab, "LOGITS_CHUNK_BYTES", 4 * width * rows)
    logits, labels, mask = case(n, width, width, dtype)
    consumed = logits.requires_grad_() * 1.0
    place = consumed.untyped_storage().data_ptr()
    with Allocations() as seen:
        loss = cross_entropy(consumed, labels, mask, ONE, width, smoothing)
        (grad,) = torch.autograd.grad(loss, consumed)
    assert len(seen.sizes) > n // rows
    assert seen.largest <= 4 * width * rows * 2 < consumed.nbytes
    assert grad.untyped_storage().data_ptr() == place  # the gradient lies where the logits were


# ------------------------------------------------------------------------------------------------------------ embedding


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_embedding_gradient(dtype):
    """Repeated ids add up, in the buffer's precision; a second backward adds to the first."""
    tp = TensorParallel(ONE, False, dtype, torch.device("cpu"))
    weight = vocab_matrix("embed_tokens.weight", 30, 32, 8, Init("normal", 1.0), tp)
    allocate(weight)
    torch.nn.init.normal_(weight)
    attach_grad_buffers([weight])
    ids = torch.randint(0, 5, (40, 3), generator=torch.Generator().manual_seed(1))
    dy = torch.randn(40, 3, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    out = embed(weight, ids, tp)
    assert torch.equal(out, weight.detach()[ids])
    out.backward(dy)
    embed(weight, ids[:10], tp).backward(dy[:10])
    twin = weight.detach().double().requires_grad_()
    torch.nn.functional.embedding(ids, twin).backward(dy.double())
    torch.nn.functional.embedding(ids[:10], twin).backward(dy[:10].double())
    assert weight.grad is None and weight.main_grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(weight.main_grad.double(), twin.grad, rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=1e-5)


@given(vocabulary=st.integers(1, 500), tp=st.sampled_from([1, 2, 4, 8]), divisor=st.integers(1, 64))
@settings(deadline=None)
def test_boxes_hold_every_true_row_once(vocabulary, tp, divisor):
    multiple = divisor * tp
    padded = -(-vocabulary // multiple) * multiple
    rows = []
    for rank in range(tp):
        for box in vocab_boxes("w", vocabulary, padded, 4, Axis("tp", rank, tuple(range(tp)))):
            assert box.full_shape == (vocabulary, 4) and box.local == (0, 0) and box.length[0] <= padded // tp
            assert box.offset[0] == rank * (padded // tp)
            rows += range(box.offset[0], box.offset[0] + box.length[0])
    assert rows == list(range(vocabulary))


def over_ranks(rank, vocabulary, padded, smoothing, sequence_parallel):
    """Loss and whole gradients of one rank's part of embedding and loss."""
    world = torch.distributed.get_world_size()
    mesh = mesh_of(Grid(tp=world), torch.device("cpu"))
    tp = TensorParallel(mesh.tp, sequence_parallel, torch.float64, torch.device("cpu"))
    logits, labels, mask = case(24, vocabulary, padded, torch.float64)
    part = slice(rank * padded // world, (rank + 1) * padded // world)
    leaf = logits[:, part].clone().requires_grad_()
    loss = cross_entropy(leaf * 1.0, labels, mask, mesh.tp, vocabulary, smoothing)
    loss.backward()
    weight = vocab_matrix("embed_tokens.weight", vocabulary, padded, 8, Init("normal", 1.0), tp)
    full = torch.randn(padded, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    allocate(weight)
    weight.data.copy_(full[part])
    attach_grad_buffers([weight])
    out = embed(weight, labels.view(8, 3), tp)
    out.sin().sum().backward()
    return loss.item(), leaf.grad, out.detach(), weight.main_grad


@pytest.mark.parametrize(("world", "vocabulary", "padded"), [(2, 50, 64), (4, 50, 64), (2, 30, 64), (4, 9, 64)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cut_over_ranks(pool, world, vocabulary, padded, smoothing):
    """As one process, also where ranks hold padding alone (30 of 64 over 2, 9 of 64 over 4)."""
    logits, labels, mask = case(24, vocabulary, padded, torch.float64)
    loss, grad = reference(logits, labels, mask, vocabulary, smoothing)
    full = torch.randn(padded, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    out = full[labels.view(8, 3)]
    out.sin().sum().backward()
    for sequence_parallel in (False, True):
        results = pool.run(over_ranks, world, vocabulary, padded, smoothing, sequence_parallel)
        assert [r[0] for r in results] == pytest.approx([loss.item()] * world, rel=1e-12)
        torch.testing.assert_close(torch.cat([r[1] for r in results], 1), grad, rtol=1e-10, atol=1e-13)
        outs = [r[2] for r in results]
        if sequence_parallel:
            torch.testing.assert_close(torch.cat(outs), out.detach())
        else:
            assert all(torch.equal(o, out.detach()) for o in outs)
        torch.testing.assert_close(torch.cat([r[3] for r in results]), full.grad, rtol=1e-12, atol=1e-14)
