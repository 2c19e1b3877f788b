"""benchmarks/preparation.py in its small form: every contender runs, the text is the same, the table has its ratios."""

import pytest

from benchmarks import preparation


@pytest.mark.full
def test_small(capsys, tmp_path):
    out = tmp_path / "out.json"
    assert preparation.main(["--megabytes", "1.5", "--vocab-size", "400", "--rounds", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[1:6]] == list(preparation.CONTENDERS)
    assert "ours / bare, one core: " in printed and "2 workers / 1 worker: " in printed and out.exists()
