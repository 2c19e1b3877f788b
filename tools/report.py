"""One page about a run: what was asked for, how it went, and how it differs from another.

    python tools/report.py runs/a/log.jsonl --out report.html
    python tools/report.py runs/a --against runs/b --out report.html

It reads what --jsonl wrote: a file, or the newest .jsonl file in a folder. The page needs nothing else and asks nobody.
"""

import argparse
import json
import math
import sys
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any folder
from megatron_lite.config import GROUPS
from megatron_lite.schedules.html import STYLE

CURVES = {  # key in the log: (title, unit, factor)
    "lm loss": ("Training loss", "", 1), "lm loss validation": ("Validation loss", "", 1), "grad-norm": ("Gradient norm", "", 1),
    "learning-rate": ("Learning rate", "", 1), "tokens-per-second": ("Speed", "tokens/s", 1),
    "mem-max-allocated-bytes": ("Peak memory", "GB", 1e-9), "bubble-percent": ("Pipeline bubble", "%", 1),
    "data-wait-percent": ("Wait for data", "%", 1),
}  # fmt: skip
AXES = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 240, 70, 16, 16, 34
COLOURS = ("#24599f", "#a8680a")  # of the run, and of the one it is held against
MORE = """
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 18px; margin: 0 0 22px; }
figure { background: #fff; border: 1px solid #e3e7ec; border-radius: 10px; margin: 0; padding: 12px; }
figcaption { font-size: 14px; font-weight: 600; margin-bottom: 6px; }
figure svg { width: 100%; height: auto; display: block; }
h2 { font-size: 17px; margin: 26px 0 10px; }
summary { cursor: pointer; margin: 0 0 14px; }
table { margin: 14px 22px; } td { overflow-wrap: anywhere; }
"""


class ReportFailure(Exception):
    """There is no log of a run where one was named."""


class Log(NamedTuple):
    """What a run left: `starts` of its processes with settings, `events` in words, `rows` of numbers, as written."""

    name: str
    starts: list[dict]
    events: list[dict]
    rows: list[dict]

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(iteration, value); of an iteration that a restart went over again the last value."""
        return sorted({row["iteration"]: row[key] for row in self.rows if row.get(key) is not None}.items())

    @property
    def settings(self) -> dict[str, object]:
        """--flag-like names and values of the last start."""
        groups = self.starts[-1]["settings"] if self.starts else {}
        return {name: value for group in groups.values() for name, value in group.items()}


def read_log(path: Path) -> Log:
    """The log in a file, or in the newest .jsonl file of a folder. A torn line (the run was killed in it) is left out."""
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ReportFailure(f"{path} holds no .jsonl file: was the run started with --jsonl {path}/log.jsonl?")
        path = found[-1]
    log = Log(str(path), [], [], [])
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportFailure(f"{path} cannot be read: {error}") from None
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "iteration" in row:
            kind = row.get("event")
            (log.rows if kind is None else log.starts if kind == "start" else log.events).append(row)
    if not log.rows:
        raise ReportFailure(f"{path} holds no log line of a run: is it the file of --jsonl?")
    return log


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """About five round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 5 * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def figure(key: str, logs: list[Log]) -> str:
    """The curve of a key of every log that has it, over iterations; nothing where none has it."""
    title, unit, factor = CURVES[key]
    curves = [[(x, y * factor) for x, y in log.curve(key)] for log in logs]
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    across, up = (right - left) or 1, (high - low) or abs(high) or 1
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" '
             'font-size="12" fill="#5a6675">']  # fmt: skip
    for value in ticks(low, low + up):
        y = TOP + inner_height * (1 - (value - low) / up)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e3e7ec"/><text x="{LEFT - 8}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{value:.6g}</text>')  # fmt: skip
    for value in ticks(left, right, whole=True):
        x = LEFT + inner_width * (value - left) / across
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{value:.0f}</text>')
    for curve, colour in zip(curves, COLOURS, strict=False):
        places = [(LEFT + inner_width * (x - left) / across, TOP + inner_height * (1 - (y - low) / up)) for x, y in curve]
        if len(places) == 1:
            parts.append(f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3" fill="{colour}"/>')
        elif places:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    caption = f"{title}{f', {unit}' if unit else ''}"
    return f"<figure><figcaption>{caption}, over iterations</figcaption>{''.join(parts)}</svg></figure>"


def grid(settings: dict[str, object]) -> str:
    """Who shares what, as far as the log says: `tp 2 × pp 2 × dp 2, ep 2, ZeRO-1, 8 ranks`."""
    world = settings.get("world_size")
    sizes = {axis: settings.get(f"{name}_parallel_size") or 1 for axis, name in AXES.items()}
    sizes["dp"] = world // (sizes["tp"] * sizes["cp"] * sizes["pp"]) if world else 1
    words = [" × ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)]
    for text, size in (("ep {}", settings.get("expert_model_parallel_size")), ("ZeRO-{}", settings.get("zero_stage"))):
        if size and (size != 1 or text == "ZeRO-{}"):
            words.append(text.format(size))
    words.append("1 process" if world == 1 else f"{world} ranks" if world else "number of ranks not logged")
    return ", ".join(word for word in words if word)


def facts(log: Log) -> dict[str, str]:
    """The run in a row of numbers."""
    loss, valid, speed = log.curve("lm loss"), log.curve("lm loss validation"), log.curve("tokens-per-second")
    return {
        "iterations": str(max(row["iteration"] for row in log.rows)),
        "last loss": f"{loss[-1][1]:.4f}" if loss else "none",
        "best validation loss": f"{min(value for _, value in valid):.4f}" if valid else "none",
        "median tokens/s": f"{sorted(value for _, value in speed)[len(speed) // 2]:.0f}" if speed else "none",
        "grid": grid(log.settings),
        "restarts": str(max(len(log.starts) - 1, 0)),
        "warnings": str(sum(event["event"] == "warning" for event in log.events)),
    }


def shown(value: object) -> str:
    """A setting as one would write it on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "on", False: "off"}[value]
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def table(head: list[str], rows: list[list[object]]) -> str:
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return (f"<section><table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"
            f"{''.join(f'<tr>{row}</tr>' for row in cells)}</table></section>")  # fmt: skip


def page(logs: list[Log]) -> str:
    """The page of the first log, held against the second if there is one."""
    parts = [f"<h1>{escape(logs[0].name)}</h1>"]
    for log, colour in zip(logs, COLOURS, strict=False):
        cards = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(log).items())
        label = f'<p><b style="color:{colour}">&#9632;</b> {escape(log.name)}</p>' if len(logs) > 1 else ""
        parts.append(f"{label}<section><dl>{cards}</dl></section>")
    parts.append(f'<div class="curves">{"".join(figure(key, logs) for key in CURVES)}</div>')
    happened = sorted(logs[0].starts[1:] + logs[0].events, key=lambda event: event.get("time", ""))
    if happened:
        rows = [[event["iteration"], event["event"], event.get("text", "went on from here")] for event in happened]
        parts.append("<h2>Restarts and warnings</h2>" + table(["iteration", "what", ""], rows))
    if len(logs) > 1:
        one, other = (log.settings for log in logs)
        differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        rows = [[name, shown(one.get(name)), shown(other.get(name))] for name in differing]
        parts.append("<h2>Settings that differ</h2>" + table(["setting", *(log.name for log in logs)], rows))
    usual = {item.name: item.default for group in GROUPS.values() for item in fields(group)}
    rows = [[name, shown(value)] for name, value in logs[0].settings.items() if value is not None]
    chosen = [row for row in rows if row[1] != shown(usual.get(row[0]))]
    parts.append("<h2>Settings</h2>" + table(["setting other than its default", "value"], chosen))
    parts.append(f"<details><summary>All {len(rows)} settings</summary>{table(['setting', 'value'], rows)}</details>")
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(logs[0].name)}</title>\n'
            f"<style>{STYLE}{MORE}</style>\n</head>\n<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the file of --jsonl, or the folder it lies in")
    parser.add_argument("--against", type=Path, help="another run to hold this one against")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="page to write (default: report.html)")
    args = parser.parse_args(argv)
    try:
        logs = [read_log(path) for path in (args.run, args.against) if path]
        args.out.write_text(page(logs), encoding="utf-8")
    except (ReportFailure, OSError) as error:
        parser.error(str(error))
    for log in logs:
        print(log.name + ": " + ", ".join(f"{name} {value}" for name, value in facts(log).items()))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
