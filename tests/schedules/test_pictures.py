"""SVG, HTML and Chrome traces hold every action at its time; the tool writes them."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement
from megatron_lite.schedules.file import format_file
from megatron_lite.schedules.html import draw_html
from megatron_lite.schedules.simulate import chunk_costs, simulate
from megatron_lite.schedules.svg import draw_svg, shade
from megatron_lite.schedules.trace import chrome_trace
from tools import draw_schedule

SPACE = "{http://www.w3.org/2000/svg}"


def timeline(name, p=4, m=8, latency=0):
    chunks = SCHEDULES[name].default_chunks
    placement = schedule_placement(name, p, chunks)
    costs = chunk_costs(1, 1, 1, placement.chunks_per_share, latency)
    return simulate(build_schedule(name, p, chunks, m), placement, costs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_box_for_every_action(name):
    run = timeline(name)
    root = ElementTree.fromstring(draw_svg(run, title=name))
    assert root.find(f"{SPACE}title").text.startswith(f"{name}: 4 ranks")
    assert f"bubble {run.sync_fraction:.1%}" in root.find(f"{SPACE}title").text
    boxes = [(group.find(f"{SPACE}title").text, group.find(f"{SPACE}rect")) for group in root.iter(f"{SPACE}g")]
    spans = [span for spans in run.spans for span in spans]
    assert len(boxes) == len(spans)
    scale = float(boxes[0][1].get("width")) / float(spans[0].end - spans[0].start)
    for (hover, box), (action, start, end) in zip(boxes, spans, strict=True):
        assert hover.startswith(f"{action}: ") and hover.endswith(f"{float(start):g} to {float(end):g}")
        assert box.get("fill") == shade(action)[0]
        assert float(box.get("width")) == pytest.approx(float(end - start) * scale, abs=0.02)
    idle = [text.text for text in root.iter(f"{SPACE}title") if "idle" in text.text]
    assert idle == [f"rank {rank}: idle {float(run.idle[rank]):g} of {float(run.makespan):g}" for rank in range(4)]
    numbers = [text.text for text in root.iter(f"{SPACE}text") if text.get("class") == "n" and text.text.isdigit()]
    assert sorted(map(int, numbers)) == sorted(span.action.microbatch for span in spans)


def test_svg_of_a_long_step_stays_a_picture():
    width = int(re.search(r'width="(\d+)"', draw_svg(timeline("1f1b", 4, 600)))[1])
    assert width < 6200


def test_colours_tell_kinds_and_chunks_apart():
    fills = {shade(span.action)[0] for spans in timeline("dualpipe").spans for span in spans}
    assert len(fills) == 8  # F, B, W and BW, two chunks


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.sources = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_one_well_formed_file_with_pictures_on_one_scale():
    text = draw_html({"1f1b <a>": timeline("1f1b", m=32), "zbv": timeline("zbv", m=32)}, "two & more")
    page = Page(text)
    assert page.open == [] and page.seen.count("svg") == 2 and not page.sources and "script" not in page.seen
    assert "<title>two &amp; more, bubble 8.6%, 1.5%</title>" in text and "1f1b &lt;a&gt;" in text
    first_boxes = [re.search(r'<g>.*?<rect [^>]*width="([\d.]+)"', part)[1] for part in text.split("<svg")[1:]]
    assert float(first_boxes[0]) == pytest.approx(2 * float(first_boxes[1]), abs=0.02)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_chrome_trace(name):
    run = timeline(name, latency=0.25)
    trace = json.loads(json.dumps(chrome_trace(run, name, unit_us=1000)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    spans = [(rank, span) for rank, spans in enumerate(run.spans) for span in spans]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in slices] == [
        (rank, str(span.action), 1000 * float(span.start), 1000 * float(span.end - span.start)) for rank, span in spans
    ]
    starts = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == {"1f1b": 48, "zbv": 96, "dualpipe": 48}[name]
    assert all(ends[key]["ts"] >= starts[key]["ts"] + 250 and ends[key]["tid"] != starts[key]["tid"] for key in starts)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    for rank in range(4):
        live = [e["args"]["microbatches"] for e in counters if e["name"].endswith(f"rank {rank}")]
        assert max(live) == run.peak_live[rank] and live[-1] == 0


# ---------------------------------------------------------------------------------------------------------------------
# tools/draw_schedule.py


@pytest.mark.parametrize(("suffix", "starts"), [("svg", "<svg"), ("html", "<!doctype html>"), ("json", '{"traceEvents"')])
def test_tool_writes_pictures(suffix, starts, tmp_path, capsys):
    out = tmp_path / f"zbv.{suffix}"
    draw_schedule.main(["--schedule", "zbv", "--latency", "0.1", "--out", str(out)])
    assert out.read_text(encoding="utf-8").startswith(starts)
    printed = capsys.readouterr().out
    assert printed.startswith(f"wrote {out}") and "peak activations  4 4 4 4" in printed


def test_tool_draws_a_file(tmp_path, capsys):
    """One that it has written; when its actions run is no part of it."""
    path = tmp_path / "mine.txt"
    draw_schedule.main(["--schedule", "zbv", "--costs", "1,2,3", "--latency", "0.1", "--out", str(path)])
    schedule, placement = build_schedule("zbv", 4, 2, 8), schedule_placement("zbv", 4, 2)
    assert path.read_text(encoding="utf-8") == format_file(schedule, placement)
    capsys.readouterr()
    draw_schedule.main(["--schedule-file", str(path)])
    assert "mine.txt: 4 ranks x 2 chunks, 8 microbatches; makespan 25.5" in capsys.readouterr().out


def test_tool_warns_overlaps_and_chooses(capsys):
    draw_schedule.main(["--schedule", "zb-h2"])
    assert "zb-h1 takes 27 with 4" in capsys.readouterr().out
    draw_schedule.main(["--schedule", "dualpipe", "--overlap", "0"])
    assert "makespan 26" in capsys.readouterr().out
    draw_schedule.main(["--schedule", "auto", "--memory-limit", "4", "--chunks", "1"])
    out = capsys.readouterr().out
    assert out.startswith("auto (zb-h1): 4 ranks, 8 microbatches; makespan 27") and "chosen: zb-h1" in out


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("F0 BW0 F1 BW1\nF0 F1 BW0 BW1", [], "deadlock: rank 0, action 1 (BW0) waits for B0 of rank 1"),
        ("F0 G0", [], "mine.txt, line 1 (rank 0): 'G0' is no action"),
        ("# nothing", [], "holds no actions"),
        ("placement bidirectional\nF0.0 F0.1 BW0.1 BW0.0", [], "p must be even, not 1"),
        (None, [], "No such file"),
        ("F0 BW0", ["--schedule", "zbv"], "not allowed with argument"),
        ("F0 BW0", ["--out", "x.png"], "should end in .svg, .html, .json, .txt"),
        ("F0 BW0", ["--overlap", "3"], "overlap 3.0 is no part of an action"),
    ],
)
def test_tool_refuses_bad_files_in_words(text, argv, message, tmp_path, capsys):
    path = tmp_path / "mine.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        draw_schedule.main(["--schedule-file", str(path), *argv])
    assert message in capsys.readouterr().err
