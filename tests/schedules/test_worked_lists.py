"""Worked schedules for 4 ranks and 8 microbatches, written out as text, and what they turn out to cost.

Interleaved 1F1B (Narayanan et al., 2021), ZB-H1 and ZB-H2 (Qi et al., 2023), ZBV (Qi et al., 2024), DualPipe
(DeepSeek-AI, 2024; the upper half of the ranks, the lower one mirrors it) and DualPipeV (first and last rank).
"""

from fractions import Fraction

import pytest

from megatron_lite.schedules import build_schedule, schedule_placement
from megatron_lite.schedules.actions import Action, Placement, format_schedule, parse_schedule
from megatron_lite.schedules.check import check
from megatron_lite.schedules.simulate import chunk_costs, simulate

ONE_F_ONE_B = """
r0: F0 F1 F2 F3 BW0 F4 BW1 F5 BW2 F6 BW3 F7 BW4 BW5 BW6 BW7
r1: F0 F1 F2 BW0 F3 BW1 F4 BW2 F5 BW3 F6 BW4 F7 BW5 BW6 BW7
r2: F0 F1 BW0 F2 BW1 F3 BW2 F4 BW3 F5 BW4 F6 BW5 F7 BW6 BW7
r3: F0 BW0 F1 BW1 F2 BW2 F3 BW3 F4 BW4 F5 BW5 F6 BW6 F7 BW7
"""
INTERLEAVED = """
r0: F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 BW0.1 F7.0 BW1.1 F4.1 BW2.1 F5.1 BW3.1 F6.1 BW0.0 F7.1 BW1.0 BW2.0 BW3.0 BW4.1 BW5.1 BW6.1 BW7.1 BW4.0 BW5.0 BW6.0 BW7.0
r1: F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 BW0.1 F5.0 BW1.1 F6.0 BW2.1 F7.0 BW3.1 F4.1 BW0.0 F5.1 BW1.0 F6.1 BW2.0 F7.1 BW3.0 BW4.1 BW5.1 BW6.1 BW7.1 BW4.0 BW5.0 BW6.0 BW7.0
r2: F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 BW0.1 F3.1 BW1.1 F4.0 BW2.1 F5.0 BW3.1 F6.0 BW0.0 F7.0 BW1.0 F4.1 BW2.0 F5.1 BW3.0 F6.1 BW4.1 F7.1 BW5.1 BW6.1 BW7.1 BW4.0 BW5.0 BW6.0 BW7.0
r3: F0.0 F1.0 F2.0 F3.0 F0.1 BW0.1 F1.1 BW1.1 F2.1 BW2.1 F3.1 BW3.1 F4.0 BW0.0 F5.0 BW1.0 F6.0 BW2.0 F7.0 BW3.0 F4.1 BW4.1 F5.1 BW5.1 F6.1 BW6.1 F7.1 BW7.1 BW4.0 BW5.0 BW6.0 BW7.0
"""  # noqa: E501
ZB_H1 = """
r0: F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
r1: F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
r2: F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
r3: F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7
"""
ZB_H2 = """
r0: F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7
r1: F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7
r2: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 W0 F7 B5 W1 B6 W2 B7 W3 W4 W5 W6 W7
r3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7
"""
ZBV = """
r0: F0 F1 F2 F3 F4 F5 F6 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F2.1 B2.1 W2.1 F3.1 B3.1 W3.1 F7 B0 W0 F4.1 B4.1 W4.1 B1 W1 F5.1 B5.1 W5.1 B2 W2 F6.1 B6.1 W6.1 B3 W3 F7.1 B7.1 W7.1 B4 W4 B5 W5 B6 W6 B7 W7
r1: F0 F1 F2 F3 F4 F0.1 F5 F1.1 B0.1 W0.1 F2.1 B1.1 W1.1 F3.1 B2.1 W2.1 F6 B0 W0 F4.1 B3.1 W3.1 F7 B1 W1 F5.1 B4.1 W4.1 B2 W2 F6.1 B5.1 W5.1 B3 W3 F7.1 B6.1 W6.1 B4 B7.1 B5 W4 B6 W5 B7 W6 W7.1 W7
r2: F0 F1 F2 F0.1 F3 F1.1 F4 F2.1 B0.1 W0.1 F3.1 B1.1 W1.1 F5 B0 W0 F4.1 B2.1 W2.1 F6 B1 W1 F5.1 B3.1 W3.1 F7 B2 W2 F6.1 B4.1 W4.1 B3 W3 F7.1 B5.1 W5.1 B4 B6.1 B5 B7.1 B6 W4 B7 W5 W6.1 W7.1 W6 W7
r3: F0 F0.1 F1 F1.1 F2 F2.1 F3 F3.1 B0.1 W0.1 F4 B0 W0 F4.1 B1.1 W1.1 F5 B1 W1 F5.1 B2.1 W2.1 F6 B2 W2 F6.1 B3.1 W3.1 F7 B3 W3 F7.1 B4.1 W4.1 B4 B5.1 B5 B6.1 B6 B7.1 B7 W4 W5.1 W6.1 W7.1 W5 W6 W7
"""  # noqa: E501

DUALPIPE = """
r0: F0.0 F1.0 F2.0 F4.1 B4.1 W4.1 F5.1 F3.0 BW5.1 F6.1 BW0.0 BW6.1 F7.1 BW1.0 BW7.1 B2.0 W2.0 B3.0 W3.0
r1: F0.0 F4.1 F1.0 F5.1 F2.0 BW4.1 F6.1 BW0.0 F3.0 BW5.1 F7.1 BW1.0 BW6.1 BW2.0 B7.1 B3.0 W7.1 W3.0
"""
DUALPIPEV_FIRST = "F0 F1 F2 F3 F4 F5 F6 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F2.1 B2.1 W2.1 F3.1 F7 BW3.1 F4.1 BW0 BW4.1 F5.1 BW1 BW5.1 F6.1 BW2 BW6.1 F7.1 BW3 BW7.1 B4 W4 B5 W5 B6 W6 B7 W7"  # noqa: E501
DUALPIPEV_LAST = "F0 F0.1 F1 F1.1 F2 F2.1 F3 F3.1 F4 BW0.1 F4.1 BW0 F5 BW1.1 F5.1 BW1 F6 BW2.1 F6.1 BW2 F7 BW3.1 F7.1 BW3 BW4.1 BW4 BW5.1 BW5 B6.1 B6 B7.1 B7 W6.1 W6 W7.1 W7"  # noqa: E501

# text, placement kind, chunks; makespan, sync bubble, span bubble; peaks held until W, until B
WORKED = {
    "1f1b": (ONE_F_ONE_B, "loop", 1, 33, 9, 9, (4, 3, 2, 1), (4, 3, 2, 1)),
    "interleaved": (INTERLEAVED, "loop", 2, 28.5, 4.5, 4.5, (5.5, 4.5, 3.5, 2.5), (5.5, 4.5, 3.5, 2.5)),
    "zb-h1": (ZB_H1, "loop", 1, 27, 3, 3, (4, 4, 4, 4), (4, 3, 2, 1)),
    "zb-h2": (ZB_H2, "loop", 1, 27, 3, 0, (7, 7, 7, 7), (7, 5, 3, 1)),
    "zbv": (ZBV, "v", 2, 25.5, 1.5, 0, (4, 4, 4, 4), (4, 4, 4, 4)),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_schedule(name):
    text, kind, chunks, makespan, sync, span, peaks, early = WORKED[name]
    schedule, placement = parse_schedule(text), Placement(kind, 4, chunks)
    report = check(schedule, placement, 8)
    assert (report.peak_live, report.peak_live_early) == (peaks, early)
    timeline = simulate(schedule, placement, chunk_costs(1, 1, 1, chunks))
    assert timeline.busy == (24,) * 4
    assert (timeline.makespan, timeline.sync_bubble, timeline.span_bubble) == (makespan, sync, span)
    assert (timeline.peak_live, timeline.peak_live_early) == (peaks, early)


@pytest.mark.parametrize("name", WORKED)
def test_text_form_round_trips(name):
    schedule = parse_schedule(WORKED[name][0])
    assert parse_schedule(format_schedule(schedule)) == schedule


@pytest.mark.parametrize("name", WORKED)
def test_built_schedule_is_the_worked_one(name):
    assert build_schedule(name, 4, WORKED[name][2], 8) == parse_schedule(WORKED[name][0])


def test_built_dualpipe_is_the_worked_one():
    built, upper = build_schedule("dualpipe", 4, 2, 8), parse_schedule(DUALPIPE)
    assert built[:2] == upper
    # Rank p-1-r does the same the other way round: chunks swapped, microbatches 0..3 for 4..7.
    lower = [[Action(a.kind, 1 - a.chunk, (a.microbatch + 4) % 8) for a in actions] for actions in reversed(upper)]
    assert built[2:] == lower


def test_built_dualpipev_is_the_worked_one():
    built = build_schedule("dualpipev", 4, 2, 8)
    assert [built[0], built[3]] == parse_schedule(f"{DUALPIPEV_FIRST}\n{DUALPIPEV_LAST}")


# name: step with pairs F|BW started together, step with one after the other, peak on every rank
@pytest.mark.parametrize(("name", "together", "in_turn", "peak"), [("dualpipe", 26, 25, 5), ("dualpipev", 27, 25.5, 4.5)])
def test_worked_dualpipe(name, together, in_turn, peak):
    schedule, placement = build_schedule(name, 4, 2, 8), schedule_placement(name, 4, 2)
    report = check(schedule, placement, 8)
    assert report.peak_live == report.peak_live_early == (peak,) * 4
    for overlap, makespan in ((0, together), (None, in_turn)):
        timeline = simulate(schedule, placement, chunk_costs(1, 1, 1, placement.chunks_per_share, overlap=overlap))
        assert timeline.busy == (24,) * 4
        assert (timeline.makespan, timeline.sync_bubble, timeline.span_bubble) == (makespan,) + (makespan - 24,) * 2


def test_zero_bubble_ranks_end_one_after_another():
    h2 = simulate(parse_schedule(ZB_H2), Placement("loop", 4))
    assert [spans[-1].end for spans in h2.spans] == [24, 25, 26, 27]
    zbv = simulate(parse_schedule(ZBV), Placement("v", 4, 2), chunk_costs(1, 1, 1, 2))
    assert [spans[-1].end for spans in zbv.spans] == [24, 24.5, 25, 25.5]


def test_zb_h1_bubble_formula():
    """(p-1) max(F, B, F+B-W), Zero Bubble (Qi et al., 2023) and its simulation."""
    for costs in ((1, 1, 1), (2, 3, 1), (3, 4, 4), (5, 2, 2)):
        forward, input_grad, weight_grad = costs
        expected = 3 * max(forward, input_grad, forward + input_grad - weight_grad)
        assert simulate(parse_schedule(ZB_H1), Placement("loop", 4), chunk_costs(*costs, 1)).sync_bubble == expected


def test_interleaving_divides_the_bubble_by_its_chunks():
    costs = chunk_costs(1, Fraction(6, 5), Fraction(4, 5), 2)
    timeline = simulate(parse_schedule(INTERLEAVED), Placement("loop", 4, 2), costs)
    assert timeline.sync_bubble == Fraction(9, 2)  # (p-1)(F+B+W)/v
