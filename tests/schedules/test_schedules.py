"""Placements, costs, and the plain schedules (gpipe, 1f1b) at every size: they cost exactly what the papers say."""

from fractions import Fraction
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.schedules import build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import PLACEMENTS, Action, Event, Place, Placement, ScheduleError, gives, needs
from megatron_lite.schedules.check import check
from megatron_lite.schedules.simulate import Costs, chunk_costs, simulate

names = st.sampled_from(["gpipe", "1f1b"])
ranks = st.integers(1, 8)
microbatches = st.integers(1, 32)
cost = st.one_of(st.integers(0, 9), st.fractions(0, 9, max_denominator=20))
quick = settings(max_examples=60, deadline=None)


@quick
@given(names, ranks, microbatches, cost, cost, cost)
def test_bubble_is_exact(name, p, m, forward, input_grad, weight_grad):
    """(p-1)(F+B+W) for GPipe and 1F1B alike, with fewer microbatches than ranks too."""
    whole = forward + input_grad + weight_grad
    timeline = simulate(build_schedule(name, p, 1, m), schedule_placement(name, p, 1), Costs(forward, input_grad, weight_grad))
    assert timeline.busy == (m * whole,) * p
    assert timeline.makespan == (m + p - 1) * whole
    assert timeline.idle == ((p - 1) * whole,) * p
    assert timeline.sync_bubble == (p - 1) * whole
    assert timeline.span_bubble == timeline.sync_bubble
    assert timeline.sync_fraction == pytest.approx((p - 1) / (m + p - 1) if whole else 0)


@quick
@given(names, ranks, microbatches)
def test_checker_passes_and_peaks_are_known(name, p, m):
    report = check(build_schedule(name, p, 1, m), schedule_placement(name, p, 1), m)
    peaks = tuple(m if name == "gpipe" else min(p - rank, m) for rank in range(p))
    assert report.peak_live == report.peak_live_early == peaks
    assert report.num_actions == 2 * m * p
    assert report.num_messages == 2 * m * (p - 1)


def by_longest_path(schedule, placement, costs):
    """End of every event from the dependency graph alone: another way to the same times."""
    graph, price = {}, {}
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            stage = placement.stage(rank, action.chunk)
            price[rank, index] = costs.of(action, stage)
            graph[rank, index] = {(rank, index - 1)} if index else set()
    made_by = {e: (r, i) for r, acts in enumerate(schedule) for i, a in enumerate(acts) for e in gives(a, r)}
    for (rank, index), before in graph.items():
        before.update(made_by[event] for event in needs(schedule[rank][index], rank, placement))
    end = {}
    for node in TopologicalSorter(graph).static_order():
        ready = [end[b] + (costs.latency if b[0] != node[0] else 0) for b in graph[node]]
        end[node] = max(ready, default=0) + price[node]
    return end


@quick
@given(names, st.integers(1, 5), st.integers(1, 9), st.data())
def test_uneven_stages_and_latency_against_the_longest_path(name, p, m, data):
    per_stage = st.lists(st.integers(0, 9), min_size=p, max_size=p)
    costs = Costs(data.draw(per_stage), data.draw(per_stage), data.draw(per_stage), data.draw(st.integers(0, 3)))
    schedule, placement = build_schedule(name, p, 1, m), schedule_placement(name, p, 1)
    end = by_longest_path(schedule, placement, costs)
    timeline = simulate(schedule, placement, costs)
    assert {(r, i): span.end for r, spans in enumerate(timeline.spans) for i, span in enumerate(spans)} == end
    assert timeline.makespan == max(end.values())
    assert sum(timeline.idle) == p * timeline.makespan - sum(timeline.busy)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_worked_example(name):
    timeline = simulate(build_schedule(name, 4, 1, 8), schedule_placement(name, 4, 1))
    assert (timeline.makespan, timeline.sync_bubble) == (33, 9)
    assert timeline.sync_fraction == 9 / 33
    assert timeline.peak_live == ((8, 8, 8, 8) if name == "gpipe" else (4, 3, 2, 1))


def test_gpipe_runs_all_forwards_first():
    expected = [Action("F", 0, i) for i in range(8)] + [Action("BW", 0, i) for i in range(8)]
    assert build_schedule("gpipe", 4, 1, 8) == [expected] * 4


def test_1f1b_does_not_hide_latency():
    """Sends are free, yet each steady-state turn waits for a round trip: (1.5m + 4)c extra for p=4, 4 | m."""
    for m in (4, 8, 12, 32):
        schedule, placement = build_schedule("1f1b", 4, 1, m), schedule_placement("1f1b", 4, 1)
        slow = simulate(schedule, placement, Costs(latency=Fraction(1, 100)))
        assert slow.makespan - 3 * (m + 3) == (Fraction(3, 2) * m + 4) / 100


def test_impossible_settings_are_said_in_words():
    assert schedule_problems("1f1b", 4, 1, 8) == []
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        (text,) = schedule_problems(name, 4, 2, 8)
        assert name in text and "--num-virtual-stages-per-pipeline-rank 2" in text and "1 would work" in text
    with pytest.raises(ScheduleError, match="--pipeline-schedule 1f2b: unknown; choose from gpipe, 1f1b"):
        build_schedule("1f2b", 4, 1, 8)
    with pytest.raises(ScheduleError, match="pipeline ranks = 0 and microbatches = -1; at least 1"):
        build_schedule("gpipe", 0, 1, -1)


def test_impossible_costs_are_refused():
    schedule, placement = build_schedule("1f1b", 2, 1, 2), schedule_placement("1f1b", 2, 1)
    with pytest.raises(ScheduleError, match="forward costs are given for 3 stages, the pipeline has 2"):
        simulate(schedule, placement, Costs(forward=[1, 1, 1]))
    with pytest.raises(ScheduleError, match="overlap 2 is no part of an action"):
        simulate(schedule, placement, Costs(overlap=2))
    with pytest.raises(ScheduleError, match="latency -1 is negative; weight_grad cost -2 is negative"):
        simulate(schedule, placement, Costs(weight_grad=-2, latency=-1))
    assert chunk_costs(1, 2, 3, 2).of(Action("BW", 0, 0), 0) == Fraction(5, 2)


@given(st.integers(1, 9), st.integers(1, 4))
def test_placement_is_a_bijection_and_neighbours_agree(p, chunks):
    for placement in (Placement("loop", p, chunks), Placement("v", p, 2)):
        assert placement.problems() == []
        places = [placement.where(stage) for stage in range(placement.num_stages)]
        assert sorted(places) == [Place(rank, chunk) for rank in range(p) for chunk in range(placement.num_chunks)]
        assert [placement.stage(*place) for place in places] == list(range(placement.num_stages))
        assert [placement.next(*place) for place in places] == [*places[1:], None]
        assert [placement.previous(*place) for place in places] == [None, *places[:-1]]
        assert {placement.mirror(*place) for place in places} == {None}


@given(st.integers(1, 5), st.integers(1, 9))
def test_bidirectional_placement_is_two_pipelines_that_mirror_each_other(half, m):
    placement = Placement("bidirectional", 2 * half, 2)
    assert placement.problems() == []
    assert (placement.num_stages, placement.chunks_per_share) == (2 * half, 1)
    for chunk in (0, 1):
        places = [placement.where(stage, chunk) for stage in range(2 * half)]
        assert [placement.stage(*place) for place in places] == list(range(2 * half))
        assert [placement.next(*place) for place in places] == [*places[1:], None]
        assert [placement.previous(*place) for place in places] == [None, *places[:-1]]
        for place in places:
            other = placement.mirror(*place)
            assert other.rank == 2 * half - 1 - place.rank and placement.mirror(*other) == place
            assert placement.stage(*other) == placement.stage(*place)
    assert [*placement.microbatches(0, m), *placement.microbatches(1, m)] == list(range(m))


def test_placement_pictures():
    stages = {kind: [[Placement(kind, 4, 2).stage(r, c) for r in range(4)] for c in (0, 1)] for kind in PLACEMENTS}
    down = [0, 1, 2, 3]
    assert stages == {"loop": [down, [4, 5, 6, 7]], "v": [down, [7, 6, 5, 4]], "bidirectional": [down, [3, 2, 1, 0]]}
    assert "2 chunks per rank, not 1" in Placement("v", 4, 1).problems()[0]
    assert "'w' is unknown; choose from loop, v, bidirectional" in Placement("w", 4, 1).problems()[0]
    assert "p must be even, not 3" in Placement("bidirectional", 3, 2).problems()[0]
    assert "one each way, not 1" in Placement("bidirectional", 4, 1).problems()[0]


def test_needs_of_a_v():
    """The turn of the v is on the last rank; nothing is sent there, but order still matters."""
    placement = Placement("v", 2, 2)
    assert needs(Action("F", 1, 0), 1, placement) == [Event("F", 1, 0, 0)]
    assert needs(Action("BW", 1, 0), 0, placement) == [Event("F", 0, 1, 0)]  # the last stage: nothing after it
    assert needs(Action("B", 0, 0), 0, placement) == [Event("F", 0, 0, 0), Event("B", 1, 0, 0)]
    assert needs(Action("W", 0, 0), 0, placement) == [Event("B", 0, 0, 0)]
