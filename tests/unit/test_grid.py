"""Ranks and coordinates are one another's inverse; groups cut the world cleanly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.grid import AXES, Grid

SIZES = st.integers(1, 3)
settings.register_profile("unhurried", deadline=None, max_examples=50)
settings.load_profile("unhurried")


@st.composite
def grids(draw):
    cp, dp = draw(SIZES), draw(SIZES)
    ep = draw(st.sampled_from([e for e in range(1, cp * dp + 1) if (cp * dp) % e == 0]))
    return Grid(tp=draw(SIZES), cp=cp, ep=ep, dp=dp, pp=draw(SIZES))


def test_sixteen_ranks_by_hand():
    grid = Grid(tp=4, dp=2, pp=2)
    assert grid.world_size == 16
    assert grid.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert grid.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert grid.groups("pp") == [[r, r + 8] for r in range(8)]
    assert grid.groups("tp", "pp") == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert grid.coordinates(13) == {"tp": 1, "cp": 0, "ep": 0, "dp": 1, "pp": 1}


def test_experts_borrow_from_cp_and_dp():
    grid = Grid(tp=2, cp=2, ep=4, dp=4)
    assert grid.world_size == 16
    assert grid.groups("ep") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert [grid.coordinates(r)["ep"] for r in (0, 2, 4, 6, 8)] == [0, 1, 2, 3, 0]


def test_shared_sequences_are_cut_in_two():
    grid = Grid(tp=2, cp=4, dp=2, ulysses=2)
    assert grid.groups("cp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    trades, rings = grid.context_groups()
    assert trades[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]] and rings[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert Grid(cp=3).context_groups() == ([[0], [1], [2]], [[0, 1, 2]])
    assert Grid(cp=3, ulysses=3).context_groups() == ([[0, 1, 2]], [[0], [1], [2]])


@given(grids())
def test_rank_and_coordinates_are_inverse(grid):
    for rank in range(grid.world_size):
        where = grid.coordinates(rank)
        ep = where.pop("ep")
        assert grid.rank(**where) == rank
        assert 0 <= ep < grid.ep
        assert all(0 <= where[a] < getattr(grid, a) for a in where)


@given(grids(), st.sampled_from([*((a,) for a in AXES), ("dp", "cp"), ("tp", "pp"), ("tp", "cp", "dp", "pp")]))
def test_groups_partition_the_world(grid, axes):
    groups = grid.groups(*axes)
    size = 1
    for axis in axes:
        size *= getattr(grid, axis)
    assert all(len(g) == size and g == sorted(g) for g in groups)
    assert sorted(r for g in groups for r in g) == list(range(grid.world_size))
    assert [g[0] for g in groups] == sorted(g[0] for g in groups)


@given(grids(), st.sampled_from([("tp", "dp"), ("tp", "pp"), ("dp", "pp"), ("cp", "dp"), ("tp", "ep"), ("ep", "pp")]))
def test_groups_of_two_axes_meet_in_one_rank_at_most(grid, pair):
    for one in map(set, grid.groups(pair[0])):
        for other in map(set, grid.groups(pair[1])):
            assert len(one & other) <= 1
    first, second = ({r: set(g) for g in grid.groups(axis) for r in g} for axis in pair)
    assert all(first[rank] & second[rank] == {rank} for rank in range(grid.world_size))


@given(grids())
def test_ep_groups_lie_inside_dp_cp_groups(grid):
    where = {r: set(g) for g in grid.groups("dp", "cp") for r in g}
    for group in grid.groups("ep"):
        assert set(group) <= where[group[0]]
        assert sorted(grid.coordinates(r)["ep"] for r in group) == list(range(grid.ep))


def test_ranks_outside_the_world_and_mixed_ep_are_refused():
    with pytest.raises(ValueError, match="rank 8 is outside a world of 8"):
        Grid(tp=2, pp=4).coordinates(8)
    with pytest.raises(ValueError, match="ep axis is folded"):
        Grid(ep=2, dp=2).groups("ep", "pp")


@given(grids())
def test_the_drawing_shows_every_rank_once(grid):
    lines = grid.draw().splitlines()
    assert f"= {grid.world_size} rank" in lines[0]
    cells = [cell for line in lines[2:] for cell in line.split("|")[1:]]
    assert sorted(int(n) for cell in cells for n in cell.split()) == list(range(grid.world_size))


def test_zero_groups():
    """Neighbours share a copy of the model state; each rank and its likes in the other copies hold the same part."""
    shards, replicas = Grid(tp=2, dp=4, zero_replicas=2).zero_groups()
    assert shards == [[0, 2], [4, 6], [1, 3], [5, 7]] and replicas == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert Grid(dp=4, pp=2).zero_groups()[0] == [[0, 1, 2, 3], [4, 5, 6, 7]]
