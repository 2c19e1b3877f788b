"""Traces of a real run: every action once and in order, the bubble as the log line has it, the tool's page and prints."""

import json
import re
from collections import Counter
from html import escape

import pytest

from megatron_lite.schedules import build_schedule
from megatron_lite.schedules.actions import parse_action
from megatron_lite.schedules.simulate import Costs
from tests.robustness.test_bad_input import Job
from tools import trace

RUN = ("--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --pipeline-model-parallel-size 2 "
       "--pipeline-schedule zbv --micro-batch-size 1 --global-batch-size 6 --lr 1e-3 --train-iters 4 --log-interval 1 "
       "--mock-data --vocab-size 64 --trace-steps 2")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, server):
    """(trace folder, rows of the log) of a small run on two ranks."""
    folder = tmp_path_factory.mktemp("trace")
    Job(folder, *RUN.split(), "--trace-dir", folder / "t", "--jsonl", folder / "log.jsonl", ranks=2).succeeds()
    return folder / "t", [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_every_action_once_and_in_order(run):
    folder, _ = run
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000002", "iter_0000003"]
    schedule = build_schedule("zbv", 2, 2, 6)
    for step in trace.read_steps(folder, None, 0, 0):
        assert [rank["schedule"] for rank in step.ranks] == ["zbv"] * 2 and step.placement == ("v", 2, 2)
        for rank, actions in zip(step.ranks, schedule, strict=True):
            assert [text for text, _, _ in rank["actions"]] == [str(action) for action in actions]
            moments = [moment for _, start, end in rank["actions"] for moment in (start, end)]
            assert moments == sorted(moments) and rank["start"] <= moments[0] and moments[-1] <= rank["end"]
            assert [name for name, _, _ in rank["phases"]] == ["reduce", "norm", "optimizer"]
            assert rank["phases"][0][1] >= rank["end"]
    assert step.iteration == 3


def test_clocks_of_ranks_agree(run):
    """Nothing is used before it was made on the other rank."""
    for step in trace.read_steps(run[0], None, 0, 0):
        ends = [{text: end for text, _, end in rank["actions"]} for rank in step.ranks]
        starts = [{text: start for text, start, _ in rank["actions"]} for rank in step.ranks]
        for m in range(6):
            # F0 of rank 0 feeds rank 1; rank 1's second chunk feeds rank 0's. A copy is on its way before its action ends.
            assert starts[1][f"F{m}"] >= starts[0][f"F{m}"] and starts[0][f"F{m}.1"] >= starts[1][f"F{m}.1"]
            assert ends[0][f"B{m}.1"] >= ends[0][f"F{m}.1"]


def test_bubble_on_the_log_line_is_the_traces(run):
    folder, rows = run
    bubbles = {row["iteration"]: row["bubble-percent"] for row in rows if "bubble-percent" in row}
    assert sorted(bubbles) == [1, 2, 3, 4] and all(0 <= bubble < 100 for bubble in bubbles.values())
    for step in trace.read_steps(folder, None, 0, 0):
        totals = [rank["end"] - rank["start"] for rank in step.ranks]
        waits = [sum(end - start for _, start, end in rank["waits"]) for rank in step.ranks]
        idle = sum(max(totals) - (total - wait) for total, wait in zip(totals, waits, strict=True)) / 2
        assert bubbles[step.iteration] == pytest.approx(100 * idle / max(totals), abs=0.01)


def test_tool_prints_and_draws(run, tmp_path, capsys):
    folder, _ = run
    trace.main([str(folder), "--out", str(tmp_path / "page.html")])
    text = capsys.readouterr().out
    found = re.search(r"bubble +predicted ([\d.]+)%, measured ([\d.]+)% of the step", text)
    assert found and 0 < float(found[1]) < 100 and 0 < float(found[2]) < 100
    assert len(re.findall(r"^stage \d", text, re.MULTILINE)) == 4 and len(re.findall(r"^rank \d", text, re.MULTILINE)) == 2
    page = (tmp_path / "page.html").read_text()
    slow = re.findall(r"^stragglers  (.*)$", text, re.MULTILINE)
    assert slow and all(f"Stragglers: {escape(line)}" in page for line in slow)
    [frame] = re.findall(r'<div class="picture">(.*?)</div>', page, re.DOTALL)
    assert frame.count("<svg") == 2  # they scroll as one
    assert page.count("<svg") == 2 and "predicted, ms" in page and "measured, ms" in page
    assert not re.search(r"(src|href)=|url\((?!#)|@import", page)  # asks for nothing else
    hovers = Counter(re.findall(r"<title>(\w+[\d.]*): ", page))
    assert hovers["F0"] == hovers["W5.1"] == 4  # two pictures, two ranks


def test_tool_writes_a_chrome_trace(run, tmp_path, capsys):
    trace.main([str(run[0]), "--iteration", "3", "--out", str(tmp_path / "page.json")])
    events = json.loads((tmp_path / "page.json").read_text())["traceEvents"]
    slices = Counter((event["pid"], event["cat"]) for event in events if event["ph"] == "X")
    for pid in (0, 1):
        assert slices[pid, "F"] == slices[pid, "B"] + slices[pid, "BW"] == 2 * 2 * 6
    assert slices[0, "wait"] and slices[0, "phase"] == 6
    arrows = Counter((event["id"], event["ph"]) for event in events if event["ph"] in "sf")
    assert set(arrows.values()) == {1}


def test_tool_says_what_is_missing(run, tmp_path, capsys):
    for folder, flags, words in ((tmp_path, [], "holds no iter_*"), (run[0], ["--dp", "1"], "lacks pipeline rank 0"),
                                 (run[0], ["--iteration", "9"], "holds no iter_0000009")):  # fmt: skip
        with pytest.raises(SystemExit):
            trace.main([str(folder), *flags])
        assert words in capsys.readouterr().err


def step_of(*ranks):
    return trace.Step(1, [{"placement": ["loop", len(ranks), 1], "start": 0.0, "end": 9.0, "actions": a} for a in ranks])


def test_costs_are_medians_per_stage_and_the_prediction_runs_the_same_list():
    first = [["F0", 0, 1], ["F1", 1, 4], ["BW0", 7, 9], ["BW1", 9, 13]]
    last = [["F0", 1, 3], ["BW0", 3, 7], ["F1", 7, 9], ["BW1", 9, 13]]
    real = trace.measured(step_of(first, last))
    found = trace.medians([real])
    assert found == {"F": {0: 2000.0, 1: 2000.0}, "BW": {0: 3000.0, 1: 4000.0}}
    costs = trace.costs_of(found, 2)
    assert costs == Costs([2000.0, 2000.0], [3000.0, 4000.0], [0.0, 0.0])
    ideal = trace.predicted(real, costs)
    assert [span.action for span in ideal.spans[1]] == [parse_action(text) for text, _, _ in last]
    assert ideal.makespan == 2000 + 2 * 6000 + 3000
    assert real.sync_fraction == pytest.approx((13 - 10 + 13 - 12) / 2 / 13)


def records(*seconds):
    """Two pipelines of two ranks, rank = 2 pp + dp: seconds of each rank's F actions, in two iterations."""
    return [{"rank": rank, "pp": rank // 2, "tp": 0, "dp": rank % 2, "actions": [["F0", 0, s], ["F1", 1, 1 + s], ["BW0", 3, 5]]}
            for s_of_rank in (seconds, seconds) for rank, s in enumerate(s_of_rank)]  # fmt: skip


def test_stragglers_are_named():
    assert trace.stragglers(records(1.0, 1.0, 1.0, 1.09))[0].startswith("none")
    assert trace.stragglers(records(1.0, 1.25, 1.0, 1.0)) == [
        "rank 1 (pp 0, tp 0, cp 0, dp 1): F takes 1250.00 ms, 25% above the median of all ranks, 1000.00 ms"]  # fmt: skip
    [line] = trace.stragglers(records(1.0, 1.0, 1.5, 1.6))
    assert line.startswith("all 2 ranks of pipeline rank 1: F takes 1500.00 ms, 20% above") and "--pipeline-split auto" in line
