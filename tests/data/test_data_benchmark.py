"""benchmarks/data.py in small: it runs, its numbers have the right order, and start-up does not grow with the samples."""

import json

from benchmarks import data


def test_the_table_in_small(tmp_path, capsys):
    out = tmp_path / "data.json"
    arguments = "--index-samples 2e4 --megabytes 10 --rounds 3 --shape tiny --steps 2"
    found = data.main([*arguments.split(), "--folder", str(tmp_path), "--out", str(out)])
    assert json.loads(out.read_text()) == found and "start-up, 1e+11 samples" in capsys.readouterr().out
    assert found["start-up"]["ratio"] < 10 and found["start-up"]["peak_mb"] < 20  # of 1e8 times as many samples
    index = found["index arrays"]
    assert 1.5e4 < index["samples"] < 2.5e4 and index["megabytes"] * 1e6 > 12 * index["samples"]
    assert 0 < found["reads"]["loader"] < found["reads"]["samples"] < 1.5 * found["reads"]["raw"]
    assert 0 <= found["waiting"]["wait_percent"] <= 100 and found["waiting"]["seconds_per_step"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json"], "the large files are gone"

