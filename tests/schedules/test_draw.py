"""The drawer and its tool. The pictures in the docstrings are what it draws."""

import importlib
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from textwrap import indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement
from megatron_lite.schedules.actions import Placement, parse_schedule
from megatron_lite.schedules.draw import draw
from megatron_lite.schedules.simulate import Costs, chunk_costs, simulate
from tools import draw_schedule

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def timeline(name, p=4, m=8, costs=None):
    chunks = SCHEDULES[name].default_chunks
    placement = schedule_placement(name, p, chunks)
    costs = costs or chunk_costs(1, 1, 1, placement.chunks_per_share)
    return simulate(build_schedule(name, p, chunks, m), placement, costs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_docstring_holds_what_is_drawn(name):
    picture = draw(timeline(name), title=name, width=122)
    assert max(map(len, picture.splitlines())) <= 122
    assert indent(picture, "    ") in importlib.import_module(SCHEDULES[name].build.__module__).__doc__


def test_small_picture_by_hand():
    assert draw(timeline("1f1b", p=2, m=2), title="1f1b") == (
        "1f1b: 2 ranks, 2 microbatches; makespan 9, bubble 33.3% of the step\n"
        "time    0         5\n"
        "rank 0  0 1 . .[0 ] .[1 ]  peak 2\n"
        "rank 1  . 0[0 ] 1[1 ] . .  peak 1\n"
        "        0 forward   [0] backward   . idle"
    )


def test_split_backward_and_chunks_are_told_apart():
    split = draw(simulate(parse_schedule("F0 B0 F1 B1 W0 W1"), Placement("loop", 1)))
    assert "rank 0  0  b0 1  b1 w0 w1  peak 2" in split and "b0 input gradient   w0 weight gradient" in split
    chunks = draw(simulate(parse_schedule("F0 F0.1 BW0.1 BW0"), Placement("v", 1, 2), chunk_costs(1, 1, 1, 2)))
    assert "rank 0  0  0'[0'  ][0   ]  peak 1" in chunks and "' chunk 1" in chunks


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 12), st.integers(1, 24), st.data())
def test_every_action_is_drawn_once(name, p, m, data):
    """Whatever the costs: rows are equally long, and hold each microbatch once forwards and once backwards."""
    price = st.floats(0.05, 3) | st.integers(1, 5) | st.fractions(Fraction(1, 5), 3, max_denominator=7)
    costs = Costs(data.draw(price), data.draw(price), data.draw(price), data.draw(st.sampled_from([0, 0.1])))
    lines = draw(timeline(name, p, m, costs)).splitlines()
    margin = len(f"rank {p - 1} ")
    rows = [line[margin:].split("  peak")[0] for line in lines if line.startswith("rank")]
    assert len({len(row) for row in rows}) == 1
    for row in rows:
        backwards = re.findall(r"\[(\d+) *\]", row)
        forwards = re.findall(r"\d+", re.sub(r"\[.*?\]", " ", row))
        assert sorted(map(int, backwards)) == sorted(map(int, forwards)) == list(range(m))


def test_tenths_draw_like_ones():
    """0.1 + 0.2 is not 0.3: a cell must not be lost to that."""
    ones, tenths = draw(timeline("1f1b", costs=Costs(5, 1, 1))), draw(timeline("1f1b", costs=Costs(0.5, 0.1, 0.1)))
    times = ones.splitlines()[1].split()[1:]
    assert tenths.splitlines()[1].split()[1:] == [f"{int(time) / 10:g}" for time in times]
    assert ones.splitlines()[2:] == tenths.splitlines()[2:]


def test_rounded_times_are_said_to_be():
    assert "(cells rounded)" in draw(timeline("1f1b", costs=Costs(1, 1.0371, 0.9)))
    assert "(cells rounded)" not in draw(timeline("1f1b", costs=Costs(0.1, 0.1, 0.2)))


def test_folding_and_color_change_nothing_but_the_looks():
    plain = draw(timeline("gpipe"))
    assert ESCAPE.sub("", draw(timeline("gpipe"), color=True)) == plain
    folded = draw(timeline("gpipe"), width=40).splitlines()
    assert max(map(len, folded[1:-1])) <= 40
    row = [line for line in plain.splitlines() if line.startswith("rank 2")][0]
    assert "".join(line[7:] for line in folded if line.startswith("rank 2")) == row[7:]


# ---------------------------------------------------------------------------------------------------------------------
# tools/draw_schedule.py


def test_tool_prints_picture_bubble_and_peaks(capsys):
    draw_schedule.main(["--schedule", "gpipe", "--pp", "4", "--microbatches", "8"])
    out = capsys.readouterr().out
    assert out.startswith(draw(timeline("gpipe"), title="gpipe") + "\n")
    assert "9 of 33 = 27.3% of the step, 37.5% of the work" in out
    assert "peak activations  8 8 8 8" in out


def test_tool_runs_as_a_script_from_anywhere_and_without_torch(tmp_path):
    script = Path(draw_schedule.__file__).resolve()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(script), "--costs", "1,1.2,0.8"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1f1b: 4 ranks, 8 microbatches; makespan 33" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "megatron_lite.schedules" in imported and not imported & {"torch", "numpy"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sched", "1f1b"], "unrecognized arguments"),
        (["--schedule", "1f2b"], "invalid choice"),
        (["--chunks", "2"], "this schedule runs 1 chunk per rank"),
        (["--pp", "0"], "pipeline ranks = 0; at least 1 would work"),
        (["--costs", "1,2"], "should be three times F,B,W"),
        (["--costs", "0,0,0"], "should be three times F,B,W"),
        (["--costs", "1,x,1"], "should be three times F,B,W"),
    ],
)
def test_tool_refuses_in_words(argv, message, capsys):
    with pytest.raises(SystemExit):
        draw_schedule.main(argv)
    assert message in capsys.readouterr().err
