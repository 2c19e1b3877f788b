"""A timeline as an SVG picture: a lane per rank, a box per action, hatching where a rank is idle.

Colour says what an action is, its shade which chunk it belongs to, the number which microbatch; the rest is shown
when the pointer rests on a box. The picture stands alone: no script, no font, no other file.
"""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.simulate import Number, Span, Timeline

WORDS = {"F": "forward", "BW": "backward", "B": "input gradient", "W": "weight gradient"}
# Fill and text, one shade per chunk (later chunks take the last): blue, green, teal, amber. In grey only chunks stay apart.
SHADES = {
    "F": (("#bcd6f7", "#12355f"), ("#4a87d6", "#ffffff"), ("#24599f", "#ffffff"), ("#123a70", "#ffffff")),
    "BW": (("#bfe3b4", "#1c4a13"), ("#5da84a", "#ffffff"), ("#37782a", "#ffffff"), ("#1f5016", "#ffffff")),
    "B": (("#a9e2dc", "#0b4a45"), ("#2f9f95", "#ffffff"), ("#12716a", "#ffffff"), ("#074b46", "#ffffff")),
    "W": (("#fbdda0", "#664400"), ("#dd9316", "#ffffff"), ("#a8680a", "#ffffff"), ("#744503", "#ffffff")),
}
LEFT, RIGHT, TOP, LANE, GAP, AXIS = 74, 84, 84, 34, 8, 40  # pixels around the lanes, of a lane, between lanes
NARROWEST, WIDEST = 1140, 6000  # pixels of the time axis
BOX = 15  # pixels that three boxes of four get at least
DIGIT = 6.4  # width of a digit of 11 px
OUTLINED = 4  # pixels of a box that has an outline

STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#2b3440}"
    ".t{font-size:16px;font-weight:600}.s{font-size:12px;fill:#5a6675}.r{font-size:12px;font-weight:600}"
    ".n{font-size:11px;text-anchor:middle;font-variant-numeric:tabular-nums;pointer-events:none}"
    ".a{font-size:11px;fill:#5a6675;text-anchor:middle}.p{font-size:12px;fill:#5a6675}"
)


def draw_svg(timeline: Timeline, title: str = "", beside: Sequence[Timeline] = ()) -> str:
    """The picture, on the time scale that suits it and those that it is shown `beside`."""
    everyone = (timeline, *beside)
    end = float(max(other.makespan for other in everyone)) or 1.0
    scale = max(_axis_length(other, end) for other in everyone) / end
    width = LEFT + RIGHT + round(end * scale)
    ranks = len(timeline.spans)
    bottom = TOP + ranks * (LANE + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + AXIS}" width="{width}" '
        f'height="{bottom + AXIS}" role="img" aria-label="{escape(heading(timeline, title))}">',
        f"<title>{escape(heading(timeline, title))}</title><style>{STYLE}</style>",
        '<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="7" height="7" fill="#f3f4f6"/><rect width="2" height="7" fill="#dfe3e8"/></pattern></defs>',
        f'<rect width="{width}" height="{bottom + AXIS}" fill="#ffffff"/>',
        f'<text class="t" x="{LEFT}" y="26">{escape(heading(timeline, title))}</text>',
        _legend(timeline),
        f'<text class="s" x="{width - RIGHT + 10}" y="{TOP - 10}">peak live</text>',
        _axis(end, scale, bottom),
    ]
    for rank, spans in enumerate(timeline.spans):
        parts.append(_lane(timeline, rank, spans, scale))
        y = TOP + rank * (LANE + GAP) + LANE / 2 + 4
        parts.append(f'<text class="p" x="{width - RIGHT + 10}" y="{y}">{timeline.peak_live[rank]:g}</text>')
    return "\n".join([*parts, "</svg>\n"])


def heading(timeline: Timeline, title: str) -> str:
    """One line: what it is, how long a step takes, how much of it is bubble."""
    placement = timeline.placement
    sizes = f"{placement.pp_size} ranks" + (f" × {placement.num_chunks} chunks" if placement.num_chunks > 1 else "")
    return (
        f"{title + ': ' if title else ''}{sizes}, {timeline.num_microbatches} microbatches, "
        f"step {float(timeline.makespan):.6g}, bubble {timeline.sync_fraction:.1%}"
    )


def shade(action: Action) -> tuple[str, str]:
    """Fill and text colour."""
    shades = SHADES[action.kind]
    return shades[min(action.chunk, len(shades) - 1)]


def _axis_length(timeline: Timeline, end: float) -> float:
    """Pixels for a time axis up to `end`, enough for the numbers in most of the boxes."""
    times = sorted(float(span.end - span.start) for spans in timeline.spans for span in spans if span.end > span.start)
    wanted = BOX * end / times[len(times) // 4] if times else 0
    return min(max(wanted, NARROWEST), WIDEST)


def _lane(timeline: Timeline, rank: int, spans: tuple[Span, ...], scale: float) -> str:
    y = TOP + rank * (LANE + GAP)
    middle = y + LANE / 2 + 4
    length = float(timeline.makespan) * scale
    parts = [
        f'<text class="r" x="{LEFT - 12}" y="{middle}" text-anchor="end">rank {rank}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{length:.2f}" height="{LANE}" fill="url(#idle)"><title>rank {rank}: idle '
        f"{float(timeline.idle[rank]):.6g} of {float(timeline.makespan):.6g}</title></rect>",
    ]
    for action, start, end in spans:
        x, box = LEFT + float(start) * scale, float(end - start) * scale
        fill, ink = shade(action)
        outline = ' stroke="#ffffff"' if box >= OUTLINED else ""  # a narrower box would be nothing but its outline
        parts.append(
            f'<g><title>{_hover(timeline, rank, action, start, end)}</title><rect x="{x:.2f}" y="{y}" width="{box:.2f}" '
            f'height="{LANE}" rx="2" fill="{fill}"{outline}/>'
        )
        number = str(action.microbatch)
        if box >= DIGIT * len(number):
            parts.append(f'<text class="n" x="{x + box / 2:.2f}" y="{middle}" style="fill:{ink}">{number}</text>')
        parts.append("</g>")
    return "".join(parts)


def _hover(timeline: Timeline, rank: int, action: Action, start: Number, end: Number) -> str:
    stage = timeline.placement.stage(rank, action.chunk)
    return (
        f"{action}: {WORDS[action.kind]} of microbatch {action.microbatch}, chunk {action.chunk} (stage {stage}), "
        f"{float(start):.6g} to {float(end):.6g}"
    )


def _legend(timeline: Timeline) -> str:
    """A box per kind and chunk that occurs, with the chunk in it if there are several, and one for idle."""
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    chunks = range(timeline.placement.num_chunks)
    x, parts = LEFT, []
    for kind, words in WORDS.items():
        if kind not in kinds:
            continue
        for chunk in chunks:
            fill, ink = shade(Action(kind, chunk, 0))
            parts.append(f'<rect x="{x}" y="42" width="24" height="16" rx="2" fill="{fill}"/>')
            if len(chunks) > 1:
                parts.append(f'<text class="n" x="{x + 12}" y="54" style="fill:{ink}">c{chunk}</text>')
            x += 26
        parts.append(f'<text class="s" x="{x + 4}" y="54">{kind} {words}</text>')
        x += 24 + round(6.8 * len(f"{kind} {words}"))
    parts.append(f'<rect x="{x}" y="42" width="24" height="16" rx="2" fill="url(#idle)" stroke="#dfe3e8"/>')
    parts.append(f'<text class="s" x="{x + 30}" y="54">idle{"; c0, c1, ...: chunks of a rank" if len(chunks) > 1 else ""}</text>')
    return "".join(parts)


def _axis(end: float, scale: float, bottom: int) -> str:
    """A tick about every 70 pixels, at 1, 2 or 5 times a power of ten."""
    rough = 70 / scale
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    parts = []
    for index in range(floor(end / step + 1e-9) + 1):
        x = LEFT + index * step * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 6}" y2="{bottom + 6}" stroke="#e3e7ec"/>')
        parts.append(f'<text class="a" x="{x:.2f}" y="{bottom + 22}">{index * step:g}</text>')
    return "".join(parts)
