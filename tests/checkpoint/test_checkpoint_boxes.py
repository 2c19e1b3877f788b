"""Box arithmetic: exact tiling, order, and the flat slices of ZeRO."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint.boxes import (
    Piece,
    box_pieces,
    box_requests,
    fault_of,
    flat_boxes,
    flat_pieces,
    joined,
    overlap,
    tiling_fault,
    uncovered,
)
from tests.checkpoint.checkpoint_model import full_state, rank_pieces, shards

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def index(box):
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


@st.composite
def ranges(draw, shape=shapes):
    shape = draw(shape)
    start = draw(st.integers(0, math.prod(shape)))
    return start, draw(st.integers(0, math.prod(shape) - start)), shape


@st.composite
def boxes_in(draw, shape):
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return offset, tuple(draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True))


@given(ranges())
@settings(max_examples=300, deadline=None)
def test_flat_boxes_are_the_range_in_order(case):
    start, length, shape = case
    flat = np.arange(math.prod(shape)).reshape(shape)
    boxes = flat_boxes(start, length, shape)
    found = [flat[index(box)].reshape(-1) for box in boxes]
    assert np.concatenate([*found, np.zeros(0, int)]).tolist() == list(range(start, start + length))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(min(size, default=1) > 0 for _, size in boxes)


def test_flat_boxes_by_hand():
    assert flat_boxes(3, 4, (10,)) == [((3,), (4,))]
    assert flat_boxes(2, 13, (4, 6)) == [((0, 2), (1, 4)), ((1, 0), (1, 6)), ((2, 0), (1, 3))]
    assert flat_boxes(6, 12, (4, 6)) == [((1, 0), (2, 6))]
    assert flat_boxes(0, 1, ()) == [((), ())]
    assert flat_boxes(5, 0, (4, 6)) == []
    for start, length in ((20, 5), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            flat_boxes(start, length, (4, 6))


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
@settings(max_examples=200, deadline=None)
def test_tiling_fault_agrees_with_counting(data, shape):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    if data.draw(st.booleans()):  # complete it, so that exact tilings are met too
        boxes = boxes[:1] + uncovered(((0,) * len(shape), shape), boxes[:1])
    count = np.zeros(shape, int)
    for box in boxes:
        count[index(box)] += 1
    fault = tiling_fault(shape, boxes)
    assert (fault is None) == bool((count == 1).all())
    if fault is not None:
        assert ("overlap" in fault and count.max() > 1) or ("missing" in fault and count.min() == 0)
    left = np.zeros(shape, int)
    for box in uncovered(((0,) * len(shape), shape), boxes):
        left[index(box)] += 1
    assert np.array_equal(left, (count == 0).astype(int))


def test_boxes_outside_and_scalars():
    assert "outside" in tiling_fault((4,), [((2,), (3,))])
    assert "outside" in tiling_fault((4, 4), [((0,), (4,))])
    assert tiling_fault((), [((), ())]) is None
    assert "overlap" in tiling_fault((), [((), ()), ((), ())])
    assert "missing" in tiling_fault((), [])
    assert tiling_fault((0, 3), []) is None
    assert overlap(((0, 0), (2, 2)), ((1, 1), (4, 1))) == ((1, 1), (1, 1))
    assert overlap(((0,), (2,)), ((2,), (2,))) is None


@pytest.mark.parametrize("change", [{"offset": (3, 0)}, {"length": (2, 2)}, {"full_shape": (4,)}, {"offset": (-1, 0)}])
def test_faults_of_pieces_name_the_tensor(change):
    fields = {"key": "model/x", "full_shape": (4, 4), "offset": (0, 0), "length": (2, 4), "tensor": torch.zeros(2, 4)}
    assert fault_of(Piece(**fields)) is None
    assert "model/x" in fault_of(Piece(**(fields | change)))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_owned_boxes_tile_every_tensor(tp):
    state = full_state()
    pieces = [piece for rank in range(tp) for piece in rank_pieces(state, tp, rank)]
    names = {piece.key: piece.full_shape for piece in pieces}
    assert len(names) == 3 * 8
    for key, shape in names.items():
        assert tiling_fault(shape, [(p.offset, p.length) for p in pieces if p.key == key]) is None


def test_tied_copies_are_read_but_not_written():
    shard, shape = shards(1, 0)[-1]
    tied = type(shard)(shard.name, shard.boxes, shard.init, shard.decay, tied=True)
    assert box_pieces("model", tied, torch.zeros(shape)) == []
    assert flat_pieces("model", tied, shape, 0, torch.zeros(math.prod(shape))) == []
    assert len(box_requests("model", tied, torch.zeros(shape))) == 1


@given(st.integers(0, 4), st.lists(st.floats(0, 1), min_size=0, max_size=4), st.sampled_from([(1, 0), (2, 1), (4, 3)]))
@settings(max_examples=60, deadline=None)
def test_flat_slices_give_the_pieces_of_the_parameter(which, cuts, place):
    """However a local parameter is cut into flat slices, their pieces are its boxes: same elements, same places."""
    shard, shape = shards(*place)[which]
    local = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    edges = sorted({0, local.numel(), *(int(c * local.numel()) for c in cuts)})

    def canvas(pieces):
        full = {box.name: torch.full(box.full_shape, -1.0) for box in shard.boxes}
        for piece in pieces:
            assert fault_of(piece) is None
            spot = full[piece.key.removeprefix("m/")][index((piece.offset, piece.length))]
            assert (spot == -1).all()
            spot.copy_(piece.tensor)
        return full

    slices = zip(edges, edges[1:], strict=False)
    pieces = [p for a, b in slices for p in flat_pieces("m", shard, shape, a, local.reshape(-1)[a:b])]
    expected = canvas(box_pieces("m", shard, local))
    for name, full in canvas(pieces).items():
        assert torch.equal(full, expected[name])


def test_pieces_one_under_the_other_are_joined():
    """Heads of a fused projection: apart in the parameter, together in the file; other columns, dtypes or gaps stay apart."""
    x = torch.arange(24.0).view(6, 4)

    def piece(key, first, rows, column=0, columns=4, kind=torch.float32):
        block = x[first : first + rows, column : column + columns].to(kind)
        return Piece(key, (6, 4), (first, column), (rows, columns), block)

    pieces = [piece("q", 4, 2), piece("k", 0, 3), piece("q", 0, 2), piece("k", 4, 2), piece("q", 2, 2),
              piece("v", 0, 3, 0, 2), piece("v", 3, 3, 2, 2), piece("w", 0, 3), piece("w", 3, 3, kind=torch.float16)]  # fmt: skip
    found = [[(p.key, p.offset[0]) for p in group] for group in joined(pieces)]
    assert found == [[("k", 0)], [("k", 4)], [("q", 0), ("q", 2), ("q", 4)], [("v", 0)], [("v", 3)], [("w", 0)], [("w", 3)]]
    scalars = [Piece("a", (), (), (), torch.ones(())), Piece("b", (), (), (), torch.ones(()))]
    assert [len(group) for group in joined(scalars)] == [1, 1]
