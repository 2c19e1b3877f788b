"""The checker refuses what cannot run, and says where; the messages that actions cause meet each other."""

from collections import defaultdict, deque
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement
from megatron_lite.schedules.actions import (
    Action,
    Placement,
    ScheduleError,
    format_schedule,
    gives,
    needs,
    parse_action,
    parse_schedule,
    received,
    sent,
)
from megatron_lite.schedules.check import check, execution_order, peak_live

LINE = Placement("loop", 2)
quick = settings(max_examples=80, deadline=None)

BROKEN = {
    "missing forward": ("F0 BW0\nF0 BW0 F1 BW1", "rank 0 never runs F1: a forward is missing"),
    "missing backward": ("F0 F1 BW0 BW1\nF0 BW0 F1", r"rank 1 never runs B1 \(nor BW1\): a backward is missing"),
    "missing W": ("F0 F1 B0 W0 B1\nF0 BW0 F1 BW1", r"rank 0 never runs W1 \(nor BW1\): a weight gradient is missing"),
    "forward twice": ("F0 F1 BW0 BW1\nF0 F0 BW0 F1 BW1", r"rank 1, action 1 \(F0\): F0 of rank 1 runs a second time"),
    "B, then BW": ("F0 B0 BW0\nF0 BW0", r"rank 0, action 2 \(BW0\): B0 of rank 0 runs a second time"),
    "BW, then W": ("F0 BW0 W0\nF0 BW0", r"rank 0, action 2 \(W0\): W0 of rank 0 runs a second time"),
    "backward first": ("F0 BW0 BW1 F1\nF0 BW0 F1 BW1", r"rank 0, action 2 \(BW1\): comes before F1 of rank 0"),
    "W before B": ("F0 F1 BW0 BW1\nF0 F1 W0 B0 BW1", r"rank 1, action 2 \(W0\): comes before B0 of rank 1"),
    "no such microbatch": ("F0 F7 BW0 BW7\nF0 BW0", r"rank 0, action 1 \(F7\): microbatch 7 is not in 0\.\.1"),
    "no such chunk": ("F0 F1.2 BW0 BW1\nF0 BW0", r"rank 0, action 1 \(F1\.2\): chunk 2 is not in 0\.\.0"),
    "rank missing": ("F0 BW0", "the schedule has 1 ranks, the placement 2"),
    # Rank 0 wants the gradient of 0 before it sends 1, rank 1 wants activation 1 before it makes that gradient.
    "deadlock": (
        "F0 BW0 F1 BW1\nF0 F1 BW0 BW1",
        r"deadlock: rank 0, action 1 \(BW0\) waits for B0 of rank 1; rank 1, action 1 \(F1\) waits for F1 of rank 0",
    ),
    "gradients cross": (
        "F0 F1 BW0 BW1\nF0 F1 BW1 BW0",
        "rank 1 -> rank 0, gradient 0: sent is the result of B1, expected that of B0; both ranks must run them in the",
    ),
    "activations cross": (
        "F0 F1 BW0 BW1\nF1 F0 BW0 BW1",
        "rank 0 -> rank 1, activation 0: sent is the result of F0, expected that of F1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_schedule_is_refused_by_name(name):
    text, message = BROKEN[name]
    with pytest.raises(ScheduleError, match=message):
        check(parse_schedule(text), LINE, 1 if name.startswith("B") else 2)


def test_unknown_kind_and_placement():
    with pytest.raises(ScheduleError, match=r"rank 0, action 1 \(X0\): unknown kind 'X'; choose from F, B, W, BW"):
        check([[Action("F", 0, 0), Action("X", 0, 0)]], Placement("loop", 1), 1)
    with pytest.raises(ScheduleError, match="2 chunks per rank, not 1"):
        check([[]], Placement("v", 1, 1), 1)


def test_turn_of_a_v_is_ordered_too():
    """On the last rank chunk 1 takes its input from chunk 0 of the same rank: no message, but an order."""
    placement = Placement("v", 1, 2)
    check(parse_schedule("F0 F0.1 BW0.1 BW0"), placement, 1)
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, action 0 \(F0.1\) waits for F0 of rank 0"):
        check(parse_schedule("F0.1 F0 BW0.1 BW0"), placement, 1)


BIDIRECTIONAL = {
    "wrong half": ("F0.0 F0.1\nF1.1 F0.0", r"rank 0, action 1 \(F0.1\): microbatch 0 is not in 1\.\.1 of chunk 1"),
    "missing": ("F0.0 BW0.0 F1.1\nF0.0 F1.1 BW1.1 BW0.0", r"rank 0 never runs B1.1 \(nor BW1.1\)"),
    # Each rank wants to end its own direction before it starts the other's.
    "deadlock": (
        "F0.0 BW0.0 F1.1 BW1.1\nF1.1 BW1.1 F0.0 BW0.0",
        r"deadlock: rank 0, action 1 \(BW0\) waits for B0 of rank 1; rank 1, action 1 \(BW1.1\) waits for B1.1 of rank 0",
    ),
}


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_broken_bidirectional_schedule_is_refused_by_name(name):
    text, message = BIDIRECTIONAL[name]
    with pytest.raises(ScheduleError, match=message):
        check(parse_schedule(text), Placement("bidirectional", 2, 2), 2)


def test_bidirectional_runs_half_of_the_microbatches_each_way():
    placement = Placement("bidirectional", 2, 2)
    report = check(parse_schedule("F0.0 F1.1 BW1.1 BW0.0\nF1.1 F0.0 BW0.0 BW1.1"), placement, 2)
    assert (report.num_messages, report.peak_live) == (4, (2, 2))


def test_v_with_a_wrong_order_is_refused_by_name():
    schedule = build_schedule("zbv", 4, 2, 8)
    first = schedule[1].index(Action("B", 1, 0))
    schedule[1][first], schedule[1][first + 1] = schedule[1][first + 1], schedule[1][first]
    with pytest.raises(ScheduleError, match=rf"rank 1, action {first} \(W0.1\): comes before B0.1 of rank 1"):
        check(schedule, Placement("v", 4, 2), 8)


def test_pairs_that_start_together_can_wait_for_each_other():
    """Alone F1 comes first and BW0 later; joined they wait for what F1 makes possible."""
    schedule, placement = parse_schedule("F0 F1 BW0 BW1\nF0 F1 BW0 BW1"), Placement("loop", 2)
    assert len(execution_order(schedule, placement)) == 8
    with pytest.raises(ScheduleError, match=r"rank 0, action 1 \(F1\) waits for B0 of rank 1"):
        execution_order(schedule, placement, pairs=[{1}, set()])


def test_long_deadlock_is_cut_short():
    schedule = build_schedule("1f1b", 20, 1, 4)
    schedule[0] = [Action("F", 0, 0), Action("BW", 0, 0)] + [a for a in schedule[0] if a.microbatch]
    schedule[19] = schedule[19][:1] + [Action("F", 0, 1)] + [a for a in schedule[19][1:] if a != Action("F", 0, 1)]
    with pytest.raises(ScheduleError, match="and 12 more ranks"):
        check(schedule, Placement("loop", 20), 4)


@quick
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 8), st.data())
def test_one_action_dropped_or_doubled_is_noticed(name, p, m, data):
    p, chunks, m = sized(name, p, m)
    schedule = build_schedule(name, p, chunks, m)
    actions = schedule[data.draw(st.integers(0, p - 1))]
    at = data.draw(st.integers(0, len(actions) - 1))
    if data.draw(st.booleans()):
        del actions[at]
    else:
        actions.insert(at, actions[at])
    with pytest.raises(ScheduleError):
        check(schedule, schedule_placement(name, p, chunks), m)


def sized(name, p, m):
    """The nearest sizes that the schedule has: (p, chunks, m)."""
    p += p % 2 if name == "dualpipe" else 0
    least = {"interleaved": p, "dualpipe": 2 * p, "dualpipev": 2 * p}.get(name, 1)
    m = max(m, least)
    m += {"interleaved": -m % p, "dualpipe": m % 2}.get(name, 0)
    return p, SCHEDULES[name].default_chunks, m


def has_cycle(schedule, placement):
    """The same question put to the standard library: actions as nodes, what must come before as edges."""
    made_by = {e: (r, i) for r, acts in enumerate(schedule) for i, a in enumerate(acts) for e in gives(a, r)}
    graph = {}
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            graph[rank, index] = {made_by[event] for event in needs(action, rank, placement)}
            graph[rank, index] |= {(rank, index - 1)} if index else set()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


@quick
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(2, 5), st.data())
def test_deadlock_is_found_exactly_when_there_is_a_cycle(name, p, m, data):
    p, chunks, m = sized(name, p, m)
    schedule, placement = build_schedule(name, p, chunks, m), schedule_placement(name, p, chunks)
    for _ in range(data.draw(st.integers(1, 3))):
        actions = schedule[data.draw(st.integers(0, p - 1))]
        i, j = data.draw(st.integers(0, len(actions) - 1)), data.draw(st.integers(0, len(actions) - 1))
        actions[i], actions[j] = actions[j], actions[i]
    if has_cycle(schedule, placement):
        with pytest.raises(ScheduleError, match="deadlock"):
            execution_order(schedule, placement)
    else:
        every = [(rank, index) for rank, actions in enumerate(schedule) for index in range(len(actions))]
        assert sorted(execution_order(schedule, placement)) == every


@quick
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12))
def test_messages_alone_carry_a_schedule(name, p, m):
    """Run it with first-in first-out channels and nothing else: each receive finds the message it expects."""
    p, chunks, m = sized(name, p, m)
    schedule, placement = build_schedule(name, p, chunks, m), schedule_placement(name, p, chunks)
    channels = defaultdict(deque)
    for rank, index in execution_order(schedule, placement):
        action = schedule[rank][index]
        if message := received(action, rank, placement):
            assert channels[message.source.rank, rank, message.kind].popleft() == message
        if message := sent(action, rank, placement):
            channels[rank, message.target.rank, message.kind].append(message)
    assert not any(channels.values())


def test_peak_live_until_w_and_until_b():
    (actions,) = parse_schedule("F0 F1 B0 F2 B1 W0 B2 W1 W2")
    assert peak_live(actions, num_chunks=1) == 3
    assert peak_live(actions, num_chunks=1, freed_by="B") == 2
    assert peak_live(actions, num_chunks=2) == 1.5


# ---------------------------------------------------------------------------------------------------------------------
# Text form


def test_text_form():
    assert parse_action("BW12") == Action("BW", 0, 12)
    assert parse_action("F2.1") == Action("F", 1, 2)
    assert str(Action("W", 1, 3)) == "W3.1" and str(Action("B", 0, 3)) == "B3"
    schedule = parse_schedule("# two ranks\nr0: F0 BW0  # comment\n\nrank 1: F0 B0 W0\n")
    assert schedule == [[Action("F", 0, 0), Action("BW", 0, 0)], [Action(kind, 0, 0) for kind in "FBW"]]
    assert format_schedule(schedule) == "r0: F0 BW0\nr1: F0 B0 W0"
    assert format_schedule([[Action("F", 0, 2), Action("F", 1, 2)]]) == "r0: F2.0 F2.1"


@given(st.lists(st.lists(st.builds(Action, st.sampled_from(["F", "B", "W", "BW"]), *[st.integers(0, 99)] * 2))))
def test_text_form_round_trips(schedule):
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_text_that_is_no_schedule():
    with pytest.raises(ScheduleError, match=r"line 3 \(rank 1\): 'G1' is no action; write F2, B2, W2 or BW2"):
        parse_schedule("F0 BW0\n\nF0 G1")
    with pytest.raises(ScheduleError, match="line 2 is labelled rank 2, but rank 1 comes next"):
        parse_schedule("r0: F0 BW0\nr2: F0 BW0")
