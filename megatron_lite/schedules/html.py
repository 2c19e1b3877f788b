"""Timelines as a web page that needs nothing else: the pictures one above the other on one time scale, moved together, and
a table for each."""

from collections.abc import Mapping, Sequence
from html import escape

from megatron_lite.schedules.simulate import Number, Timeline
from megatron_lite.schedules.svg import draw_svg

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f6f7f9; color: #2b3440; line-height: 1.45;
       font-family: system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 2400px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 24px; margin: 0 0 18px; }
section h2 { font-size: 16px; margin: 14px 22px 0; }
section { background: #fff; border: 1px solid #e3e7ec; border-radius: 10px; margin: 0 0 22px; overflow: hidden; }
.picture { overflow-x: auto; padding: 6px 0; }
.picture svg { display: block; }
dl { display: flex; flex-wrap: wrap; gap: 0; margin: 0; border-bottom: 1px solid #e3e7ec; }
dl div { padding: 14px 22px; border-right: 1px solid #e3e7ec; }
dt { font-size: 12px; color: #5a6675; }
dd { margin: 2px 0 0; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: 13px; margin: 4px 22px 18px 74px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 0 3px 26px; }
th { color: #5a6675; font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
p { font-size: 13px; color: #5a6675; max-width: 90ch; margin: 6px 2px; }
"""
NOTES = (
    "A bubble is time in which a rank is idle. The sync bubble counts it until the step ends for all ranks together, as a "
    "training step does; without a barrier counts only what lies between a rank's own first and last action.",
    "Peak live is the most microbatches whose activations a rank holds at once, in microbatches of its own share of the "
    "model, from the forward until the weight gradient (or until the input gradient, if that already frees them).",
)


def draw_html(timelines: Mapping[str, Timeline], title: str, findings: Sequence[str] = ()) -> str:
    """A page with a picture for every name, such as one schedule, several to compare, or predicted and measured; and, below
    them, what was found."""
    everyone = list(timelines.values())
    bubbles = ", ".join(f"{timeline.sync_fraction:.1%}" for timeline in everyone)
    page_title = f"{title}, bubble {bubbles}"
    pictures = "\n".join(draw_svg(timeline, name, everyone) for name, timeline in timelines.items())
    framed = f'<div class="picture">\n{pictures}</div>\n'  # all in one, so that they scroll as one
    if len(timelines) == 1:
        sections = [_section(name, timeline, framed) for name, timeline in timelines.items()]
    else:
        sections = [f"<section>{framed}</section>"]
        sections += [_section(name, timeline, heading=f"<h2>{escape(name)}</h2>") for name, timeline in timelines.items()]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(page_title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(page_title)}</h1>",
            *sections,
            *(f"<p>{escape(finding)}</p>" for finding in findings),
            *(f"<p>{escape(note)}</p>" for note in NOTES),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _number(value: Number) -> str:
    """To hundredths: schedules come in units of a cost, measured steps in milliseconds."""
    return f"{round(float(value), 2):g}"


def _section(name: str, timeline: Timeline, picture: str = "", heading: str = "") -> str:
    facts = {
        "step": _number(timeline.makespan),
        "sync bubble": _number(timeline.sync_bubble),
        "of the step": f"{timeline.sync_fraction:.1%}",
        "without a barrier": _number(timeline.span_bubble),
        "peak live": f"{max(timeline.peak_live):g}",
    }
    cards = "".join(f"<div><dt>{words}</dt><dd>{value}</dd></div>" for words, value in facts.items())
    rows = "".join(
        f"<tr><td>rank {rank}</td><td>{_number(timeline.busy[rank])}</td><td>{_number(timeline.idle[rank])}</td>"
        f"<td>{timeline.peak_live[rank]:g}</td><td>{timeline.peak_live_early[rank]:g}</td></tr>"
        for rank in range(len(timeline.spans))
    )
    head = "<tr><th></th><th>busy</th><th>idle</th><th>peak live</th><th>freed by input gradient</th></tr>"
    return (
        f'<section aria-label="{escape(name)}">{heading}<dl>{cards}</dl>\n{picture}'
        f"<table>{head}{rows}</table></section>"
    )
