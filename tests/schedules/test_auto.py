"""The list scheduler keeps its cap and every rule; the automatic choice is never worse than a named schedule that fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import Placement, ScheduleError
from megatron_lite.schedules.auto import GREEDY, Cut, choose, least_held
from megatron_lite.schedules.check import check
from megatron_lite.schedules.greedy import POLICIES, greedy_schedule, list_schedule
from megatron_lite.schedules.simulate import Costs, chunk_costs, simulate

price = st.integers(1, 9)


def even(p, costs=(1, 1, 1), latency=0):
    return lambda placement: [Cut(chunk_costs(*costs, placement.num_stages // p, latency))]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["loop", "v", "bidirectional"]), st.integers(1, 4), st.integers(1, 9), st.data())
def test_every_policy_gives_a_valid_list_under_its_cap(kind, p, m, data):
    p += p % 2 if kind == "bidirectional" else 0
    placement = Placement(kind, p, 1 if kind == "loop" else 2)
    stages = placement.num_stages
    prices = [data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages)) for _ in range(3)]
    costs = Costs(*prices, latency=data.draw(st.integers(0, 2)))
    cap = data.draw(st.integers(placement.num_chunks, 3 * p))
    for policy in POLICIES:
        report = check(list_schedule(placement, m, costs, cap, policy), placement, m)
        assert max(report.peak_live) <= cap / placement.chunks_per_share


@pytest.mark.parametrize(("limit", "makespan"), [(1, None), (4, 27), (7, 27)])
def test_list_scheduler_finds_the_zero_bubble_steps(limit, makespan):
    """Where all cost the same it is as short as ZB-H1 with its memory, and as ZB-H2 with its."""
    placement = Placement("loop", 4)
    run = simulate(greedy_schedule(placement, 8, Costs(), limit), placement)
    assert max(run.peak_live) <= limit
    assert makespan is None or run.makespan == makespan


def test_list_scheduler_beats_every_named_schedule_where_costs_are_uneven():
    """A slow head and a light embedding on a V; and 1F1B on a plain pipeline."""
    forward = [0.6, 1, 1, 1, 1, 1, 1, 1.5]
    costs = Costs([f / 2 for f in forward], [0.55 * f for f in forward], [0.45 * f for f in forward], latency=0.05)
    placement = Placement("v", 4, 2)
    best = simulate(greedy_schedule(placement, 12, costs, 6), placement, costs)
    for name in ("zbv", "dualpipev"):
        assert best.makespan < simulate(build_schedule(name, 4, 2, 12), placement, costs).makespan
    loop, uneven = Placement("loop", 4), Costs([1, 1, 1, 1.5], [1.1, 1.1, 1.1, 1.6], [0.9, 0.9, 0.9, 1.4], 0.05)
    greedy = simulate(greedy_schedule(loop, 12, uneven, 4), loop, uneven)
    assert greedy.makespan < 0.95 * simulate(build_schedule("1f1b", 4, 1, 12), loop, uneven).makespan


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 4), st.integers(1, 8), st.integers(1, 8), st.data())
def test_choice_is_never_worse_than_a_named_schedule_that_fits(p, m, limit, data):
    per_stage = [[data.draw(price) for _ in range(2 * p)] for _ in range(3)]

    def costs_of(placement):
        """Stages of one chunk are pairs of those of two."""
        step = 2 * p // placement.num_stages
        return Costs(*([sum(prices[i : i + step]) for i in range(0, 2 * p, step)] for prices in per_stage))

    choice = choose(p, m, lambda placement: [Cut(costs_of(placement))], limit)
    check(choice.schedule, choice.placement, m)
    assert max(choice.timeline.peak_live) <= limit
    for name, spec in SCHEDULES.items():
        if spec.placement_kind == "bidirectional" or schedule_problems(name, p, spec.default_chunks, m):
            continue
        placement = schedule_placement(name, p, spec.default_chunks)
        schedule = build_schedule(name, p, spec.default_chunks, m)
        run = simulate(schedule, placement, costs_of(placement))
        assert max(run.peak_live) > limit or choice.timeline.makespan <= run.makespan


def test_choice_says_what_and_why():
    name, chunks, schedule, report, placement, *_ = choose(4, 8, even(4), memory_limit=4)
    assert (name, chunks, placement) == ("zbv", 2, Placement("v", 4, 2)) and schedule == build_schedule("zbv", 4, 2, 8)
    lines = report.splitlines()
    assert lines[0].startswith("chosen: zbv with 2 chunks per rank, step 25.5, bubble 5.9% of it, peak 4 microbatches: ")
    assert "that hold at most 4 microbatches per rank" in lines[0]
    rows = {tuple(line.split()[:2]): line for line in lines[2:]}
    assert rows["zbv", "2"].endswith("<- chosen")
    assert rows["zb-h2", "1"].split()[2:] == ["27", "11.1%", "7", "over", "the", "limit", "of", "4"]
    assert len(rows) == 9 and ("dualpipe", "2") not in rows
    assert "dualpipe " in choose(4, 8, even(4), copies=True).report


def test_choice_keeps_to_what_is_allowed():
    assert choose(4, 8, even(4), 4, chunks=[1]).name == "zb-h1"
    assert choose(4, 10, even(4), chunks=[2]).report.count("groups of 5") == 1
    few = choose(4, 3, even(4)).report
    assert "cannot run: --microbatch-group-size" in few and "cannot run: 3 microbatches per step" in few
    only_four = choose(4, 8, lambda placement: [Cut(Costs())] if placement.num_stages == 4 else [])
    assert only_four.num_chunks == 1
    assert only_four.report.count("cannot run: the model's layers cannot be cut into 8 stages") == 4
    with pytest.raises(ScheduleError, match="--pipeline-memory-limit 0.5: no schedule .* least any of them holds is 4"):
        choose(4, 8, even(4), 0.5)


def test_choice_among_cuts_and_names():
    """The better cut wins with any schedule; a list of names restricts the choice."""
    slow_end = [Cut(Costs([1, 1, 1, 3]), note="even"), Cut(Costs([1.5, 1.5, 1.5, 1.5]), note="balanced")]
    choice = choose(4, 8, lambda placement: slow_end, chunks=[1], names=["gpipe"], unit="ms")
    assert (choice.name, choice.cut) == ("gpipe", slow_end[1])
    assert choice.report.startswith("chosen: gpipe with 1 chunk per rank, balanced, step 38.5 ms, ")
    assert len(choice.report.splitlines()) == 4
    assert choose(4, 8, lambda placement: slow_end[::-1], chunks=[1]).cut == slow_end[1]
    assert choose(4, 10, even(4), chunks=[2], names=["interleaved"]).group_size == 5
    assert choose(4, 8, even(4), chunks=[2], names=["interleaved"], group_size=8).group_size == 8


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.sets(st.integers(1, 4), min_size=1))
def test_least_held_is_what_a_limit_can_be(p, m, chunks):
    least = least_held(p, m, chunks)
    if least is None:
        with pytest.raises(ScheduleError, match="no schedule for"):
            choose(p, m, even(p), None, chunks)
        return
    assert max(choose(p, m, even(p), least, chunks).timeline.peak_live) <= least
    with pytest.raises(ScheduleError, match="no schedule for"):
        choose(p, m, even(p), least - 0.01, chunks)


def test_a_list_too_long_to_make_is_left_out():
    choice = choose(8, 840, even(8), chunks=[1], names=["1f1b", GREEDY])
    assert choice.name == "1f1b" and "cannot run: lists of 20160 actions take too long to make" in choice.report


def test_policies_compared_on_few_microbatches_give_a_list_for_all():
    placement, costs = Placement("v", 2, 2), Costs([1, 1, 1, 2], [1, 1, 1, 2], [1, 1, 1, 2])
    schedule = greedy_schedule(placement, 40, costs, 3)
    assert max(check(schedule, placement, 40).peak_live) <= 3
    every = [list_schedule(placement, 40, costs, 6, policy) for policy in POLICIES]
    assert simulate(schedule, placement, costs).makespan == min(simulate(each, placement, costs).makespan for each in every)


def test_list_scheduler_refuses_what_it_cannot_do():
    with pytest.raises(ScheduleError, match="a loop of several chunks shares its links"):
        greedy_schedule(Placement("loop", 2, 2), 4, Costs())
    with pytest.raises(ScheduleError, match="a limit of 0.5 microbatches per rank is below the 1"):
        greedy_schedule(Placement("loop", 2), 4, Costs(), 0.5)
