"""A timeline as text: a row per rank, a cell per unit of time. The pictures in the schedules' docstrings are made here.

     0       forward of microbatch 0            b0      input gradient only
    [0 ]     whole backward of microbatch 0     w0      weight gradient only
     0'      the same on chunk 1 (0'' chunk 2)   .      idle

At the end of a row stands the most microbatches that the rank holds at once.
"""

from itertools import groupby
from math import ceil, floor

from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.simulate import Number, Span, Timeline

LEGEND = {"F": "0 forward", "BW": "[0] backward", "B": "b0 input gradient", "W": "w0 weight gradient"}
COLORS = {"F": ("44;97", "104;30"), "BW": ("42;30", "102;30"), "B": ("46;30", "106;30"), "W": ("43;30", "103;30")}
RULER_STEP = 5  # cells between two times on the ruler
FINEST = 6  # cells that the shortest action may be cut into before times are rounded instead

Cell = tuple[str, str]  # text, ANSI color ("" for none)


def draw(timeline: Timeline, title: str = "", width: int | None = None, color: bool = False) -> str:
    """The picture, folded into bands of at most `width` columns if one is given; `color` for terminals (ANSI)."""
    unit, exact = _unit(timeline)
    size = _cell_size(timeline, unit)
    rows = [_row(spans, unit, size, _cells(timeline.makespan, unit)) for spans in timeline.spans]
    length, margin = len(rows[0]), len(f"rank {len(rows) - 1} ")
    band = length if width is None else max(1, (width - margin - len("  peak 99.5")) // size)
    band = ceil(length / ceil(length / band))  # as many bands, but of one length
    lines = [_title(timeline, title, exact)]
    for begin in range(0, length, band):
        end = min(begin + band, length)
        lines.append("time".ljust(margin) + _ruler(unit, size, begin, end))
        for rank, row in enumerate(rows):
            peak = f"  peak {timeline.peak_live[rank]:g}" if end == length else ""
            lines.append((f"rank {rank}".ljust(margin) + _join(row[begin:end], color) + peak).rstrip())
    return "\n".join([*lines, " " * margin + _legend(timeline)])


def _title(timeline: Timeline, title: str, exact: bool) -> str:
    sizes = f"{timeline.placement.pp_size} ranks"
    if timeline.placement.num_chunks > 1:
        sizes += f" x {timeline.placement.num_chunks} chunks"
    text = (
        f"{title + ': ' if title else ''}{sizes}, {timeline.num_microbatches} microbatches; "
        f"makespan {float(timeline.makespan):g}, bubble {100 * timeline.sync_fraction:.1f}% of the step"
    )
    return text if exact else text + " (cells rounded)"


def _legend(timeline: Timeline) -> str:
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    entries = [words for kind, words in LEGEND.items() if kind in kinds]
    if timeline.placement.num_chunks > 1:
        entries.append("' chunk 1")
    return " " + "   ".join([*entries, ". idle"])


def _unit(timeline: Timeline) -> tuple[Number, bool]:
    """The time one cell stands for: the coarsest whole part of the shortest action that meets every start and end.

    If there is none, the shortest action itself: times are then rounded to it, which can neither make two actions
    overlap nor let one vanish.
    """
    spans = [span for spans in timeline.spans for span in spans if span.end > span.start]
    shortest = min((span.end - span.start for span in spans), default=1)
    times = {time for span in spans for time in (span.start, span.end)}
    for parts in range(1, FINEST + 1):
        cells = [float(time * parts / shortest) for time in times]
        if all(abs(cell - round(cell)) < 1e-6 for cell in cells):
            return (shortest if parts == 1 else shortest / parts), True
    return shortest * (1 - 1e-9), False  # a hair less, so that a rounding error in a time does not cost a cell


def _cells(time: Number, unit: Number) -> int:
    return floor(time / unit + 0.5)


def _label(action: Action) -> str:
    chunk = "'" * action.chunk if action.chunk <= 2 else f".{action.chunk}"
    before = {"F": " ", "BW": "[", "B": " b", "W": " w"}[action.kind]
    return f"{before}{action.microbatch}{chunk}{']' if action.kind == 'BW' else ''}"


def _cell_size(timeline: Timeline, unit: Number) -> int:
    """Columns per cell, so that every label fits into its action's time."""
    sizes = [2]
    for spans in timeline.spans:
        for action, start, end in spans:
            if cells := _cells(end, unit) - _cells(start, unit):
                sizes.append(ceil(len(_label(action)) / cells))
    return max(sizes)


def _row(spans: tuple[Span, ...], unit: Number, size: int, length: int) -> list[Cell]:
    """One rank's cells. An action that lasts several cells is cut at their borders, so that a row folds anywhere."""
    row: list[Cell] = [(" .".ljust(size), "")] * length
    for action, start, end in spans:
        first, last = _cells(start, unit), _cells(end, unit)
        columns = (last - first) * size
        text = _label(action).ljust(columns)
        if action.kind == "BW":  # the bracket closes where the time ends
            text = _label(action)[:-1].ljust(columns - 1) + "]"
        shade = COLORS[action.kind][action.chunk % 2]
        row[first:last] = [(text[i * size : (i + 1) * size], shade) for i in range(last - first)]
    return row


def _ruler(unit: Number, size: int, begin: int, end: int) -> str:
    line = ""
    for cell in range(begin, end):
        if cell % RULER_STEP == 0 or cell == begin:
            column, mark = (cell - begin) * size, f" {float(cell * unit):g}"
            if len(line) <= column and column + len(mark) <= (end - begin) * size:
                line = line.ljust(column) + mark
    return line


def _join(cells: list[Cell], color: bool) -> str:
    if not color:
        return "".join(text for text, _ in cells)
    pieces = []
    for shade, group in groupby(cells, key=lambda cell: cell[1]):
        text = "".join(text for text, _ in group)
        pieces.append(f"\x1b[{shade}m{text}\x1b[0m" if shade else text)
    return "".join(pieces)
