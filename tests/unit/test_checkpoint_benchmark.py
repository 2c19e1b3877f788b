"""benchmarks/checkpoint.py on a model of 8 MB: every act runs and loads what was saved (the benchmark compares), and the table
holds each number against its bound."""

import json

import pytest

from benchmarks import checkpoint

PEAKS = {"fresh start tp2·pp2": 10.0, "load tp2·pp2": 16.0, "fresh start tp1·pp4": 10.0, "load tp1·pp4": 15.0,
         "converter's limit": 320.0, "native-to-hf": 320.0, "hf-to-native": 321.0}  # fmt: skip


def test_a_small_state_is_measured(pool, tmp_path, capsys):
    found = pool.run(checkpoint.measure, 4, str(tmp_path / "state"), checkpoint.hidden_size(8), 1, False)
    assert 7 < sum(rank["MB"][0] for rank in found) < 8
    plans = checkpoint.planning(ranks=4, count=3, columns=8)
    assert plans["blocks"] == 36
    rows = checkpoint.rows_of(found[0], PEAKS, plans)
    assert all(row["measured"] > 0 or "slower" in row["what"] for row in rows)
    good = [row["ok"] for row in rows if row["what"].startswith("peak")]
    assert good == [False, True, True, False]  # 16 and 15 of 10 MB, 320 and 321 of 320
    checkpoint.show(found[0], rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 14 + 2 + len(rows)


@pytest.mark.parametrize(("better", "ok"), [(1.2, True), (1.19, False)])
def test_ratios_are_taken_inside_a_round(better, ok):
    """A round in which the disk is half as fast changes nothing: 1 s against `better` s, 2 s against twice that."""
    ours, theirs = [1.0, 2.0, 4.0], [better, 2 * better, 4 * better]
    found = {name: ours for name in ("save", "load", "load dp4 zero-1", "load tp1·pp4", "host copy", "blocked", "step",
                                     "step while writing")}  # fmt: skip
    found |= {"dcp save": theirs, "dcp load": theirs, "cores taken": [1.5, 1.5, 1.5]}
    rows = checkpoint.rows_of(found, PEAKS, {"blocks": 1, "merge": 0.5, "plan": 0.4})
    assert [row["measured"] for row in rows[:2]] == pytest.approx([better] * 2) and [row["ok"] for row in rows[:2]] == [ok] * 2
    assert rows[5]["required"] == 20.0 and rows[5]["ok"]  # 10 % for each core, begun or whole
    assert rows[-1]["measured"] == pytest.approx(0.9)


@pytest.mark.full
def test_the_command(tmp_path, capsys):
    checkpoint.main(["--mb", "8", "--rounds", "1", "--folder", str(tmp_path), "--out", str(tmp_path / "out.json")])
    body = json.loads((tmp_path / "out.json").read_text())
    assert len(body["rows"]) == 11 and "ok" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert all(row["ok"] for row in body["rows"] if "peak" in row["what"])
