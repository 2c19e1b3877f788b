"""Attention within documents: both forms against a dense mask in fp64, what is multiplied, and how large a tensor gets."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.data.documents import document_starts
from megatron_lite.models import attention
from megatron_lite.models.attention import _BlockCausal, _sdpa_by_document, _tiles
from megatron_lite.models.packing import NOT_PACKED, Documents, packing_of

CPU = torch.device("cpu")
S = 37
ENDS = {  # where the documents of each row end
    "none": [(), (), ()],
    "with the window": [(S - 1,), (), (11, S - 1)],
    "one token each": [tuple(range(S)), (0,), (S - 2,)],
    "different": [(4, 5, 20), (15,), (7, 8, 9, 31)],
    "in a block": [(16, 17, 18), (17,), (18,)],
}


def documents_of(ends, s=S):
    tokens = torch.zeros(len(ends), s, dtype=torch.int64)
    for row, places in enumerate(ends):
        tokens[row, list(places)] = 1
    return Documents(torch.from_numpy(document_starts(tokens.numpy(), 1)), CPU)


def tensors(b, s=S, k=2, g=3, d=4):
    """q, k, v that want gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = (s, b, k, g, d), (s, b, k, 1, d), (s, b, k, 1, d), (s, b, k, g, d)
    q, key, value, dout = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return [x.requires_grad_() for x in (q, key, value)], dout


def dense(q, k, v, documents, drop=None):
    """The definition. `drop`: factors of the probabilities [b, k, g, i, j]."""
    at = torch.arange(q.shape[0])
    seen = (at <= at[:, None]) & (at >= documents.starts[:, :, None])  # [b, i, j]
    scores = torch.einsum("ibkgd,jbkd->bkgij", q, k.squeeze(3)).masked_fill(~seen[:, None, None], float("-inf"))
    probabilities = scores.softmax(-1) if drop is None else scores.softmax(-1) * drop
    return torch.einsum("bkgij,jbkd->ibkgd", probabilities, v.squeeze(3))


def blocks(size, p=0.0, generator=None):
    return lambda q, k, v, documents: _BlockCausal.apply(q, k, v, p, generator, size, documents)


FORMS = {f"blocks of {n}": blocks(n) for n in (1, 8, 16, 64)} | {"by document": _sdpa_by_document}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("form", FORMS)
def test_output_and_gradients(form, ends, keep, monkeypatch):
    monkeypatch.setattr(attention, "KEEP_PROBABILITIES_UP_TO", 2048 if keep else 0)
    documents = documents_of(ENDS[ends])
    inputs, dout = tensors(3)
    out, expected = FORMS[form](*inputs, documents), dense(*inputs, documents)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_one_head_per_group_in_low_precision():
    """bf16 through both forms, against fp64: -inf in a mask is -inf in 16 bits too."""
    documents = documents_of(ENDS["different"])
    inputs, _ = tensors(3, g=1)
    expected = dense(*inputs, documents)
    for form in (blocks(8), _sdpa_by_document):
        out = form(*(x.detach().bfloat16() for x in inputs), documents)
        torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)


def test_dropout_within_documents():
    """With the identity for values the output is the dropped probabilities; gradients follow the same mask."""
    documents, p = documents_of(ENDS["different"]), 0.25
    (q, k, _), dout = tensors(3, d=S)
    eye = torch.eye(S, dtype=torch.float64).view(S, 1, 1, 1, S).expand(S, 3, 2, 1, S).contiguous().requires_grad_()
    out = blocks(8, p, torch.Generator().manual_seed(3))(q, k, eye, documents)
    drop = (out.detach() != 0).permute(1, 2, 3, 0, 4).double() / (1 - p)  # [b, k, g, i, j]
    whole = dense(q, k, eye, documents).permute(1, 2, 3, 0, 4) != 0
    assert abs((drop[whole] != 0).double().mean().item() - (1 - p)) < 0.03 and not drop[~whole].any()
    expected = dense(q, k, eye, documents, drop)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    mine, theirs = (torch.autograd.grad(o, (q, k, eye), dout) for o in (out, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ends", ENDS)
def test_a_tile_begins_at_the_start_that_its_first_query_needs(ends):
    documents = documents_of(ENDS[ends])
    tiles = _tiles(S, 8, 2, documents)
    assert [tile[2:] for tile in tiles] == [(i, min(i + 8, S), row) for row in range(3) for i in range(0, S, 8)]
    for heads, first, begin, end, row in tiles:
        assert heads == slice(2 * row, 2 * row + 2)
        starts = documents.starts[row, begin:end]
        assert first == int(starts.min())
        seen = starts[:, None] <= torch.arange(first, end)
        mask = documents.mask(row, begin, end, torch.float64)
        if mask is None:
            assert seen.all(), "a key of another document is not masked"
        else:
            n = mask.shape[1]
            assert torch.equal(mask == 0, seen[:, :n]) and seen[:, n:].all() and not seen[:, n - 1].all()
    assert _tiles(S, 8, 2, None) == [(slice(None), 0, i, min(i + 8, S), None) for i in range(0, S, 8)]


def test_lengths():
    assert documents_of([(2,), (), (0, 6)], 7).lengths == [3, 4, 7, 1, 6]
    assert sum(documents_of(ENDS["one token each"]).lengths) == 3 * S


class _Largest(TorchDispatchMode):
    """Most elements of any tensor that an operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("form", ["blocks of 16", "by document"])
def test_no_tensor_is_as_large_as_the_square(form):
    s = 512
    (q, k, v), dout = tensors(1, s, k=1, g=1)
    with _Largest() as largest:
        documents = documents_of([range(39, s, 40)], s)
        FORMS[form](q, k, v, documents).backward(dout)
    assert largest.numel <= 4 * s, f"{largest.numel} elements; a square has {s * s}"


def test_without_flags_there_is_no_packing():
    assert packing_of(None, None, CPU) is NOT_PACKED and NOT_PACKED == (None, None)
    starts = torch.zeros(2, 5, dtype=torch.int64)
    assert packing_of(starts, None, CPU).documents is None and packing_of(None, starts, CPU).positions is None
