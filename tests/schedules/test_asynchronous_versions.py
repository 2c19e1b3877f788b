"""Which weights an asynchronous pipeline uses, against the closed forms of the papers. Its lists are 1F1B's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.arguments import parse
from megatron_lite.planner.memory import stage_memory
from megatron_lite.planner.report import dry_run_report
from megatron_lite.schedules import ASYNCHRONOUS, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules import asynchronous as definitions
from megatron_lite.schedules.asynchronous import annealed, delay, last_uses, most_versions, weight_uses, weights_text
from megatron_lite.schedules.check import check
from megatron_lite.schedules.simulate import simulate

rules = st.sampled_from(sorted(ASYNCHRONOUS))


@settings(max_examples=150, deadline=None)
@given(rules, st.integers(2, 8), st.integers(1, 12), st.integers(1, 6))
def test_versions_delays_and_copies(rule, p, m, steps):
    if rule == "pipedream-2bw":
        m = max(m, p)
    schedule = build_schedule(rule, p, 1, m * steps)
    check(schedule, schedule_placement(rule, p, 1), m * steps)
    for rank, actions in enumerate(schedule):
        uses = weight_uses(rule, actions, m)
        found = {(use.action.kind, use.action.microbatch): use for use in uses}
        for j in range(m * steps):
            forward, backward = found["F", j].version, found["BW", j].version
            newest = max(0, j - (p - 1 - rank)) // m
            assert forward == (max(0, j // m - 1) if rule == "pipedream-2bw" else newest)
            assert forward <= newest, "a version that is not made yet"
            assert backward == (j // m if rule == "pipemare" else forward)
            assert found["BW", j].lag == backward - forward
            assert found["BW", j].update == ((j + 1) % m == 0)
        assert kept(uses) <= most_versions(rule, p, rank, m)
        if steps > p + 1:
            assert kept(uses) == most_versions(rule, p, rank, m)
            full = range(m * steps - m * (steps // 2), m * steps)
            if rule == "pipemare":
                assert sum(found["BW", j].lag for j in full) / len(full) == pytest.approx(delay(p, rank, m))


def kept(uses):
    """Most versions in memory at once: the newest, and older ones with a use to come."""
    last, newest, most = last_uses(uses), 0, 1
    for index, use in enumerate(uses):
        newest += use.update
        most = max(most, 1 + sum(version < newest and end > index for version, end in last.items()))
    return most


def test_the_papers_numbers():
    """PipeDream at one microbatch per update: p-r versions, delay p-1-r. 2BW: two versions, delay one."""
    assert [most_versions("pipedream", 4, rank, 1) for rank in range(4)] == [4, 3, 2, 1]
    assert [delay(4, rank, 1) for rank in range(4)] == [3, 2, 1, 0]
    assert [most_versions("pipedream-2bw", 4, rank, 4) for rank in range(4)] == [2] * 4
    assert [most_versions("pipedream", 4, rank, 8) for rank in range(4)] == [2, 2, 2, 1]
    for actions in build_schedule("pipedream-2bw", 4, 1, 40):
        uses = weight_uses("pipedream-2bw", actions, 4)
        assert {use.action.microbatch // 4 - use.version for use in uses if use.action.microbatch >= 4} == {1}


def test_no_rank_idles_between_filling_and_draining():
    timeline = simulate(build_schedule("pipedream", 4, 1, 32), schedule_placement("pipedream", 4, 1))
    begin = next(span.start for span in timeline.spans[0] if span.action.kind == "BW")
    end = next(span.end for span in timeline.spans[0] if span.action == ("F", 0, 31))
    for spans in timeline.spans:
        busy = sum(min(span.end, end) - max(span.start, begin) for span in spans if span.end > begin and span.start < end)
        assert busy == end - begin


def test_the_picture_in_the_docstring_is_what_is_drawn():
    for rule in ("pipedream", "pipemare"):
        for actions in build_schedule(rule, 3, 1, 5):
            assert weights_text(rule, actions, 1) in definitions.__doc__


def test_annealing():
    assert annealed(1.0, 4.0, 0, 10) == 0.25 and annealed(1.0, 4.0, 5, 10) == 0.5 and annealed(1.0, 4.0, 10, 10) == 1.0
    assert annealed(1.0, 0.5, 0, 10) == 1.0  # a delay below one update never raises the rate
    assert annealed(1.0, 4.0, 0, 0) == 1.0


def test_refusals():
    assert schedule_problems("pipedream", 4, 1, 1) == [] and schedule_problems("pipemare", 4, 1, 1) == []
    assert "3 microbatches" in schedule_problems("pipedream-2bw", 4, 1, 3)[0]
    assert "runs 1 chunk per rank" in schedule_problems("pipedream", 4, 2, 8)[0]


PLANNED = ("--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --mock-data "
           "--micro-batch-size 1 --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --bf16 --dry-run "
           "--world-size 4")  # fmt: skip


def planned(rule, batch):
    config, problems = parse(f"{PLANNED} --global-batch-size {batch} --pipeline-schedule {rule}".split(), 4)
    assert not problems, problems
    return config, stage_memory(config)


def test_the_plan_counts_versions_and_what_is_alive():
    config, plan = planned("pipedream", 1)
    assert [stage.weights // (2 * stage.parameters) for stage in plan] == [4, 3, 2, 1]
    assert [stage.live_microbatches for stage in plan] == [4, 3, 2, 1]  # though a step has one microbatch
    report = dry_run_report(config, config.grid)
    assert "versions of the weights kept: 4, 3, 2, 1" in report and "up to 3 updates old" in report.replace("\n ", "")
    assert max(len(line) for line in report[report.index("schedule pipedream") :].splitlines()) <= 100
    assert [stage.weights // (2 * stage.parameters) for stage in planned("pipedream-2bw", 8)[1]] == [2] * 4
    estimate = planned("pipemare", 4)[1]
    assert [stage.weights // (2 * stage.parameters) for stage in estimate] == [2, 2, 2, 1]
    assert [stage.optimizer // (4 * stage.parameters) for stage in estimate] == [4, 4, 4, 3]  # with the mean change
