"""benchmarks/pipeline_bubble.py on stages of a millisecond: every schedule runs on the executor, dualpipe and the list
scheduler's too, holds what the simulator says, and its bubble is counted as defined."""

import pytest

from benchmarks import pipeline_bubble
from benchmarks.contenders import PIPELINES, pipelines
from benchmarks.modelled import TORCH, Case, rank_steps

MS = (0.001, 0.001, 0.001)


def test_every_schedule_holds_what_the_simulator_says(pool):
    cases = [Case(name, 8, costs=MS) for name in pipeline_bubble.OURS]
    rows = [pipeline_bubble.summary(list(notes), 4) for notes in zip(*pool.run(rank_steps, 4, cases, 4, 1), strict=True)]
    assert [row["name"] for row in rows] == list(pipeline_bubble.OURS)
    for row in rows:
        assert row["peak"] == row["simulated_peak"], row["name"]
        assert row["step_ms"] >= 24 and 0 < row["bubble_percent"] < 100 and row["overhead_ms"] > 0
    lines = pipeline_bubble.modelled_text(rows).splitlines()
    assert len(lines) == 1 + len(rows) and lines[1].split()[:2] == ["8", "gpipe"]


def test_torch_runs_the_same_stages(pool):
    cases = [Case(name, 4, True, MS) for name in TORCH]
    rows = [pipeline_bubble.summary(list(notes), 2) for notes in zip(*pool.run(rank_steps, 2, cases, 2, 1), strict=True)]
    assert all(row["step_ms"] >= 12 and 0 < row["bubble_percent"] < 100 for row in rows)


def test_bubble_is_what_ranks_do_nothing_in():
    rows = [{"started": 1.0, "ended": 5.0, "busy": 3.0}, {"started": 1.5, "ended": 6.0, "busy": 2.0}]
    assert pipeline_bubble.measured(rows) == pytest.approx((5.0, 1 - 2.5 / 5.0))


def test_rows_cut_the_model_alike():
    for contender in pipelines(list(PIPELINES), heap=False):
        name = contender.name.split()[1]
        assert sum(PIPELINES[name][2]) == 8
