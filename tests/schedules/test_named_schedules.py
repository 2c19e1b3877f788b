"""Every named schedule at every size: valid, and with the bubble and the memory that its docstring promises."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import ScheduleError, format_schedule
from megatron_lite.schedules.advice import Forecaster, schedule_warnings
from megatron_lite.schedules.check import check
from megatron_lite.schedules.interleaved import interleaved, order_table, whole_groups
from megatron_lite.schedules.simulate import Costs, chunk_costs, simulate

names = st.sampled_from(sorted(SCHEDULES))
ranks = st.integers(1, 8)
cost = st.integers(0, 9)
quick = settings(max_examples=25, deadline=None)


def timeline(name, p, m, costs=(1, 1, 1), chunks=None, group=None, overlap=None):
    chunks = chunks or SCHEDULES[name].default_chunks
    placement = schedule_placement(name, p, chunks)
    schedule = build_schedule(name, p, chunks, m, group)
    return simulate(schedule, placement, chunk_costs(*costs, placement.chunks_per_share, overlap=overlap))


@settings(max_examples=100, deadline=None)
@given(names, ranks, st.integers(1, 4), st.integers(1, 32), st.none() | st.integers(1, 12), st.data())
def test_what_is_not_refused_passes_the_checker(name, p, chunks, m, group, data):
    """And is busy for exactly as long as its work takes, whatever the stages and the messages cost."""
    if schedule_problems(name, p, chunks, m, group):
        with pytest.raises(ScheduleError, match=f"--pipeline-schedule {name}"):
            build_schedule(name, p, chunks, m, group)
        return
    schedule, placement = build_schedule(name, p, chunks, m, group), schedule_placement(name, p, chunks)
    report = check(schedule, placement, m)
    stages = placement.num_stages
    per_stage = [data.draw(st.lists(cost, min_size=stages, max_size=stages)) for _ in range(3)]
    run = simulate(schedule, placement, Costs(*per_stage, latency=data.draw(st.integers(0, 3))))
    held = [placement.stage(rank, chunk) for rank in range(p) for chunk in range(chunks)]
    assert sorted(held) == sorted(list(range(stages)) * (chunks // placement.chunks_per_share))
    work = [sum(prices[stage] for prices in per_stage) for stage in range(stages)]
    assert sum(run.busy) == m * sum(work) and run.makespan >= max(run.busy)
    assert (report.peak_live, report.peak_live_early) == (run.peak_live, run.peak_live_early)


def test_sizes_that_must_work_are_not_refused():
    for p in range(1, 9):
        for m in (1, 2 * p, 4 * p + 2, 32):
            for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zbv"):
                assert not schedule_problems(name, p, SCHEDULES[name].default_chunks, m)
            assert bool(schedule_problems("dualpipev", p, 2, m)) == (m < 2 * p)
            assert bool(schedule_problems("dualpipe", p, 2, m)) == (m < 2 * p or p % 2 == 1 or m % 2 == 1)
            for group in range(p, m + 1):
                assert not whole_groups(p, m, group) or not schedule_problems("interleaved", p, 3, m, group)


# ---------------------------------------------------------------------------------------------------------------------
# Interleaved


@quick
@given(ranks, st.integers(2, 4), st.integers(1, 4), cost, cost, cost)
def test_interleaving_divides_the_bubble_by_the_chunks(p, v, rounds, forward, input_grad, weight_grad):
    m = p * rounds
    run = timeline("interleaved", p, m, (forward, input_grad, weight_grad), chunks=v)
    assert run.sync_bubble == run.span_bubble == Fraction((p - 1) * (forward + input_grad + weight_grad), v)
    expected = [min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1) / v for rank in range(p)]
    assert list(run.peak_live) == pytest.approx(expected)


@quick
@given(ranks, st.integers(2, 4), st.data())
def test_whole_groups_of_any_size_have_that_bubble_too(p, v, data):
    m = data.draw(st.integers(p, 32))
    group = data.draw(st.sampled_from([size for size in range(p, m + 1) if whole_groups(p, m, size)]))
    assert timeline("interleaved", p, m, chunks=v, group=group).sync_bubble == Fraction(3 * (p - 1), v)


@pytest.mark.parametrize(
    ("p", "v", "m", "group", "warmups", "bubble", "peaks"),
    [
        (2, 2, 4, 2, [4, 2], 0.125, [5, 3]),
        (4, 2, 8, 4, [10, 8, 6, 4], 0.1875, [11, 9, 7, 5]),
        (4, 4, 8, 4, [18, 16, 14, 12], 0.09375, [19, 17, 15, 13]),
        (4, 2, 4, 4, [8, 8, 6, 4], 0.375, [8, 8, 7, 5]),
        (2, 2, 5, 3, [5, 3], 0.1, [6, 4]),
        (4, 2, 12, 6, [12, 10, 8, 6], 0.125, [13, 11, 9, 7]),
        (4, 2, 7, 4, [10, 8, 6, 4], 0.262, [11, 9, 7, 5]),  # the last group is shorter than p: a larger bubble
        (4, 2, 6, 4, [10, 8, 6, 4], 0.528, [11, 9, 7, 5]),
    ],
)
def test_interleaved_warmup_bubble_and_memory(p, v, m, group, warmups, bubble, peaks):
    """Backward twice as long as forward; the bubble as a part of the work, the peaks in chunks."""
    schedule = build_schedule("interleaved", p, v, m, group)
    first_backwards = [next(i for i, a in enumerate(actions) if a.kind == "BW") for actions in schedule]
    # In steady state one forward more runs before the first backward.
    assert first_backwards == [min(warmup + 1, m * v) for warmup in warmups]
    run = timeline("interleaved", p, m, chunks=v, group=group)
    assert float(run.sync_bubble / run.busy[0]) == pytest.approx(bubble, abs=5e-4)
    assert [v * peak for peak in run.peak_live] == peaks


def test_order_table_and_a_small_list():
    chunks, microbatches = zip(*order_table(2, 5, 3), strict=True)
    assert chunks == (0, 0, 0, 1, 1, 1, 0, 0, 1, 1) and microbatches == (0, 1, 2, 0, 1, 2, 3, 4, 3, 4)
    text = "F0.0 F1.0 F0.1 F1.1 F2.0 BW0.1 F3.0 BW1.1 F2.1 BW0.0 F3.1 BW1.0 BW2.1 BW3.1 BW2.0 BW3.0"
    assert format_schedule([interleaved(2, 0, 2, 4)]) == f"r0: {text}"


# ---------------------------------------------------------------------------------------------------------------------
# Zero bubble


@quick
@given(ranks, st.integers(0, 24), cost, cost, cost)
def test_zb_h1(p, more, forward, input_grad, weight_grad):
    """(p-1) max(F, B, F+B-W) for m >= p; min(p, m) microbatches held until W, p-r until B."""
    run = timeline("zb-h1", p, p + more, (forward, input_grad, weight_grad))
    assert run.sync_bubble == (p - 1) * max(forward, input_grad, forward + input_grad - weight_grad)
    assert run.peak_live == (p,) * p
    assert run.peak_live_early == tuple(p - rank for rank in range(p))


@quick
@given(ranks, st.integers(0, 16), cost, cost, cost)
def test_zb_h2(p, more, forward, input_grad, weight_grad):
    """(p-1) max(F, B-F, F+B-2W) for m >= 2p-1."""
    m = 2 * p - 1 + more
    run = timeline("zb-h2", p, m, (forward, input_grad, weight_grad))
    assert run.sync_bubble == (p - 1) * max(forward, input_grad - forward, forward + input_grad - 2 * weight_grad)
    assert run.peak_live == (2 * p - 1,) * p
    assert run.peak_live_early == tuple(2 * (p - rank) - 1 for rank in range(p))


@quick
@given(ranks, st.integers(0, 16), st.integers(1, 9))
def test_zbv_and_zb_h2_have_no_span_bubble_when_all_cost_the_same(p, more, each):
    run = timeline("zbv", p, 2 * p - 1 + more, (each,) * 3)
    assert (run.sync_bubble, run.span_bubble) == (Fraction((p - 1) * each, 2), 0)
    assert run.peak_live == (p,) * p
    assert timeline("zb-h2", p, 2 * p - 1 + more, (each,) * 3).span_bubble == 0


# ---------------------------------------------------------------------------------------------------------------------
# DualPipe


@quick
@given(st.sampled_from(["dualpipe", "dualpipev"]), st.integers(1, 4), st.integers(0, 6), st.sampled_from([0, 1, 3]), cost)
def test_dualpipe_bubble(name, half, more, quarters, each):
    """(p/2-1)(FB + BW - 3W) with pairs that start together, and in chunk costs (p-1)(...) folded into a V."""
    p, m = 2 * half, 4 * half + 2 * more
    factor = half - 1 if name == "dualpipe" else Fraction(p - 1, 2)
    pair = 3 * each - Fraction(quarters, 4) * each
    run = timeline(name, p, m, (each,) * 3, overlap=Fraction(quarters, 4))
    assert max(run.idle) == factor * (pair + 2 * each - 3 * each)
    assert run.peak_live == (p + 1 if name == "dualpipe" else p + 0.5,) * p
    # One after the other the forward's result is there earlier.
    assert timeline(name, p, m, (each,) * 3).sync_bubble == factor * each


@pytest.mark.parametrize("costs", [(3, 3, 3), (3, 4, 3), (5, 4, 3), (6, 7, 5), (2, 2, 1)])
def test_dualpipe_bubble_of_uneven_costs(costs):
    forward, input_grad, weight_grad = costs
    for p in (2, 4, 6, 8):
        together = timeline("dualpipe", p, 2 * p, costs, overlap=0)
        assert together.sync_bubble == (p // 2 - 1) * max(2 * forward, 2 * forward + input_grad - weight_grad)
        in_turn = timeline("dualpipe", p, 2 * p, costs)
        assert in_turn.sync_bubble == (p // 2 - 1) * max(forward, forward + input_grad - weight_grad)


@pytest.mark.parametrize(
    ("name", "percent"),
    [("1f1b", 17.9), ("interleaved", 9.9), ("zb-h1", 6.8), ("zb-h2", 6.8), ("zbv", 3.5), ("dualpipe", 5.9), ("dualpipev", 6.8)],
)
def test_long_steps(name, percent):
    assert 100 * timeline(name, 8, 32, overlap=0).sync_fraction == pytest.approx(percent, abs=0.06)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals and warnings

REFUSED = {
    ("zb-h1", 4, 2, 8, None): "rank 2: this schedule runs 1 chunk per rank; 1 would work",
    ("zbv", 4, 1, 8, None): "--num-virtual-stages-per-pipeline-rank 1: this schedule runs 2 chunks per rank; 2 would work",
    ("interleaved", 4, 1, 8, None): "2 or more chunks per rank; 2 would work",
    ("interleaved", 4, 2, 3, None): "larger than the 3 microbatches per step .*; 4 microbatches would work",
    ("interleaved", 4, 2, 10, 3): "pipeline-stage 3: smaller than the 4 pipeline ranks; --microbatch-group-.* 5 ",
    ("interleaved", 4, 2, 8, 9): "9: larger than the 8 microbatches per step .*pipeline-stage 8 or 9 microbatches would work",
    ("interleaved", 4, 3, 5, 4): "groups of 4 leave a last one of 1, fewer than the 4 pipeline ranks; deadlock: .* 5 or 4 or 8",
    ("dualpipe", 5, 2, 16, None): "--pipeline-model-parallel-size 5: two directions .* even .* 4 or 6 would work",
    ("dualpipe", 4, 2, 11, None): "11 microbatches per step .* 10 or 12 would work",
    ("dualpipe", 4, 2, 6, None): "6 microbatches per step .* at least 2 x 4 ranks; 8 would work",
    ("dualpipev", 4, 2, 7, None): "at least 2 x 4 ranks; 8 would work",
    ("1f1b", 4, 1, 8, 4): "--microbatch-group-size-per-virtual-pipeline-stage 4: this schedule runs no groups",
    ("interleaved", 4, 2, 8, 0): "microbatches per group = 0; at least 1 would work",
}


@pytest.mark.parametrize("sizes", REFUSED)
def test_impossible_sizes_are_refused_with_the_nearest_valid_ones(sizes):
    with pytest.raises(ScheduleError, match=REFUSED[sizes]):
        build_schedule(*sizes)


WARNED = {
    ("interleaved", 4, 2, 10, None): "bubble 9.5 of 39.5, 24.1% .*pipeline-stage 5: 13.0%",
    ("interleaved", 4, 2, 8, 8): "groups of 8 hold 7.5 microbatches; --micro.*-stage 4 takes as long .28.5. with 5.5",
    ("zb-h2", 4, 1, 8, None): "step 27 with 7 microbatches held per rank; zb-h1 takes 27 with 4",
    ("gpipe", 4, 1, 8, None): "step 33 with 8 microbatches held per rank; 1f1b takes 33 with 4",
    ("dualpipev", 4, 2, 8, None): "step 25.5 with 4.5 microbatches held per rank; zbv takes 25.5 with 4",
    ("1f1b", 8, 1, 3, None): "3 microbatches never fill 8 pipeline ranks: predicted bubble 21 of 30, 70.0% .* with 8: 46.7%",
}


@pytest.mark.parametrize("sizes", WARNED)
def test_what_wastes_time_is_said_with_its_cost(sizes):
    assert not schedule_problems(*sizes)
    assert any(re.search(WARNED[sizes], text) for text in schedule_warnings(*sizes))


@settings(max_examples=60, deadline=None)
@given(names, st.integers(2, 6), st.integers(2, 3), st.integers(1, 60), st.none() | st.integers(2, 9), cost, cost, cost)
def test_a_forecast_from_the_first_rounds_is_the_simulation(name, p, chunks, m, group, forward, input_grad, weight_grad):
    """Long steps are not simulated to their end (advice.py): makespan, bubble and peak are the same numbers."""
    chunks = chunks if SCHEDULES[name].has_groups else SCHEDULES[name].default_chunks
    group = group if SCHEDULES[name].has_groups else None
    if schedule_problems(name, p, chunks, m, group):
        return
    costs = (forward, input_grad, weight_grad)
    run = timeline(name, p, m, costs, chunks, group)
    forecast = Forecaster(p, costs, 0)(name, chunks, m, group)
    assert forecast == (run.makespan, run.sync_bubble, max(run.peak_live))


def test_advice_about_a_long_step_is_cheap():
    """As many actions simulated for 4000 microbatches as for 40."""
    text = schedule_warnings("gpipe", 4, 1, 4000)[0]
    assert "step 12009 with 4000 microbatches held per rank; 1f1b takes 12009 with 4" in text.replace("1.201e+04", "12009")


def test_good_sizes_are_not_warned_about():
    good = [("1f1b", 4, 1, 8), ("interleaved", 4, 2, 8), ("zb-h1", 4, 1, 8), ("zbv", 4, 2, 8), ("dualpipe", 4, 2, 8)]
    assert [schedule_warnings(*sizes) for sizes in good] == [[]] * len(good)
    assert schedule_warnings("interleaved", 4, 2, 10, 5) == schedule_warnings("gpipe", 1, 1, 8) == []
    # Where W is short zb-h2's extra memory does buy time: (p-1)F instead of (p-1)(F+B-W).
    assert schedule_warnings("zb-h2", 4, 1, 8, costs=(1, 1.2, 0.8)) == []
    assert schedule_warnings("zbv", 4, 1, 8) == []  # refused, not warned about
