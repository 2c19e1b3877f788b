"""tools/report.py: a page that stands alone and says what the log says."""

import json
import re
from html.parser import HTMLParser

import pytest

from tools import report

VOID = {"meta", "path", "circle", "polyline"}


class Nesting(HTMLParser):
    """Fails where an end tag does not close what is open."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def write(path, lr, losses, events=()):
    settings = {"train": {"lr": lr, "name": "<b>&", "seed": 1234}, "parallel": {"world_size": 4}}
    start = {"event": "start", "iteration": 0, "settings": settings}
    rows = [{"iteration": i, "lm loss": loss, "tokens-per-second": 100.0 * i} for i, loss in enumerate(losses, 1)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, [start, *rows, *events])) + '\n{"iteration": 9, "lm lo')


@pytest.fixture
def runs(tmp_path):
    settings = {"train": {"lr": 0.1, "name": "<b>&", "seed": 1234}, "parallel": {"world_size": 4}}
    again = {"event": "start", "iteration": 2, "settings": settings}
    twice = [again, {"iteration": 3, "lm loss": 0.5}, {"event": "warning", "iteration": 3, "text": "a <step> is skipped"}]
    write(tmp_path / "a" / "log.jsonl", 0.1, [3.0, 2.0, 1.0], twice)
    write(tmp_path / "b" / "log.jsonl", 0.2, [3.0, 2.5, None])
    return tmp_path / "a", tmp_path / "b"


def test_a_log_is_read_with_its_restart(runs):
    log = report.read_log(runs[0])
    assert log.curve("lm loss") == [(1, 3.0), (2, 2.0), (3, 0.5)]  # what the restart made of iteration 3
    facts = report.facts(log)
    assert (facts["restarts"], facts["warnings"], facts["last loss"], facts["median tokens/s"]) == ("1", "1", "0.5000", "200")
    assert report.read_log(runs[1]).curve("lm loss") == [(1, 3.0), (2, 2.5)]


def test_the_page_stands_alone_and_shows_both_runs(runs, tmp_path):
    report.main([str(runs[0]), "--against", str(runs[1]), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|url[(]|@import|<script", page.replace("http://www.w3.org/2000/svg", ""))
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    parser = Nesting()
    parser.feed(page)
    assert parser.open == []
    assert page.count("<polyline") == 4  # loss and speed of two runs
    differing = page.split("Settings that differ")[1].split("</section>")[0]
    assert "<td>lr</td><td>0.1</td><td>0.2</td>" in differing and "world_size" not in differing
    chosen, every = page.split("<h2>Settings</h2>")[1].split("<details>")
    assert "<td>name</td>" in chosen and "<td>lr</td>" in chosen and "<td>seed</td>" not in chosen  # 1234 is the default
    assert "<td>seed</td><td>1234</td>" in every
    assert "a &lt;step&gt; is skipped" in page and "&lt;b&gt;&amp;" in page


@pytest.mark.parametrize(("settings", "words"), [
    ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "zero_stage": 1,
      "world_size": 8}, "tp 2 × pp 2 × dp 2, ep 2, ZeRO-1, 8 ranks"),
    ({"context_parallel_size": 2, "zero_stage": 0, "world_size": 2}, "cp 2, 2 ranks"),
    ({"world_size": 1}, "1 process"),
    ({"world_size": None, "tensor_model_parallel_size": 4}, "tp 4, number of ranks not logged"),
])  # fmt: skip
def test_the_grid_in_words(settings, words):
    assert report.grid(settings) == words


def test_ticks_are_round():
    assert report.ticks(1, 30, whole=True) == [10, 20, 30]
    assert report.ticks(1, 3, whole=True) == [1, 2, 3]
    assert report.ticks(0.0, 0.01) == pytest.approx([0, 0.002, 0.004, 0.006, 0.008, 0.01])
    assert report.ticks(3.268, 6.262) == [4, 5, 6]


def test_settings_as_one_would_write_them():
    assert [report.shown(value) for value in (None, True, False, ["a", "b"], 0)] == ["not set", "on", "off", "a b", "0"]


def test_what_is_no_log_is_said(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text("[1]\n")
    for path, words in ((tmp_path / "x.jsonl", "no log line"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(SystemExit):
            report.main([str(path)])
        assert words in capsys.readouterr().err
