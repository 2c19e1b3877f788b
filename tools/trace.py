"""Draw what a run's pipeline really did (pretrain_gpt.py --trace-dir) below what the simulator makes of the same times.

    python tools/trace.py runs/trace                          bubble, times per stage, waits per rank, slow ranks
    python tools/trace.py runs/trace --out trace.html         predicted above measured, in one page
    python tools/trace.py runs/trace --out trace.json         for ui.perfetto.dev

Predicted is the run's own action lists, each action at the median of what its kind took on its stage, with messages that
take no time. What measured has beyond it is wires, uneven actions, and other work of the machine. Here all that is not
an action is bubble, the executor's own time too; the log line's bubble is waiting alone. Slow ranks are looked for among all
ranks of the run, whichever pipeline is drawn.
"""

import argparse
import json
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any folder
from megatron_lite.schedules.actions import Placement, ScheduleError, parse_action
from megatron_lite.schedules.check import peak_live
from megatron_lite.schedules.html import draw_html
from megatron_lite.schedules.simulate import Costs, Span, Timeline, simulate
from megatron_lite.schedules.svg import draw_svg
from megatron_lite.schedules.trace import chrome_trace

MS = 1e3
SLOW = 1.1  # times the median of all ranks, above which a rank is a straggler


class Step(NamedTuple):
    """One iteration of one pipeline: what each of its ranks wrote, in pipeline order."""

    iteration: int
    ranks: list[dict]

    @property
    def placement(self) -> Placement:
        return Placement(*self.ranks[0]["placement"])

    @property
    def start(self) -> float:
        return min(rank["start"] for rank in self.ranks)

    @property
    def seconds(self) -> float:
        return max(rank["end"] for rank in self.ranks) - self.start


def read_records(folder: Path) -> Iterator[dict]:
    """What every rank wrote of one iteration; ScheduleError, in words, where a file is torn."""
    for path in sorted(folder.glob("rank_*.json")):
        try:
            record = json.loads(path.read_text(encoding="ascii"))
            place(record)
        except (ValueError, KeyError) as error:
            raise ScheduleError(f"{path} is no trace of a rank: {error!r}") from None
        yield record


def place(record: dict) -> tuple[int, int, int, int]:
    """(pp, tp, cp, dp) of a rank."""
    return record["pp"], record["tp"], record.get("cp", 0), record["dp"]


def read_step(folder: Path, tp: int, dp: int) -> Step:
    """The pipeline with these coordinates; ScheduleError, in words, where its files are missing or torn."""
    ranks = {record["pp"]: record for record in read_records(folder) if place(record)[1:] == (tp, 0, dp)}
    size = Placement(*next(iter(ranks.values()))["placement"]).pp_size if ranks else 1
    if lacking := sorted(set(range(size)) - set(ranks)):
        raise ScheduleError(f"{folder} lacks pipeline rank {lacking[0]} of tp {tp}, dp {dp}")
    return Step(int(folder.name.removeprefix("iter_")), [ranks[rank] for rank in range(size)])


def read_steps(folder: Path, iteration: int | None, tp: int, dp: int) -> list[Step]:
    """All traced iterations of the pipeline, or one."""
    pattern = "iter_*" if iteration is None else f"iter_{iteration:07d}"
    steps = [read_step(path, tp, dp) for path in sorted(folder.glob(pattern))]
    if not steps:
        raise ScheduleError(f"{folder} holds no {pattern}: is it the --trace-dir of a run?")
    return steps


def measured(step: Step) -> Timeline:
    """The step as a timeline in milliseconds from the first rank's start."""
    spans = []
    for rank in step.ranks:
        times = ((parse_action(text), start - step.start, end - step.start) for text, start, end in rank["actions"])
        spans.append(tuple(Span(action, start * MS, end * MS) for action, start, end in times))
    lists, shares = [[span.action for span in row] for row in spans], step.placement.chunks_per_share
    early = (peak_live(actions, shares, freed_by="B") for actions in lists)
    return Timeline(step.placement, tuple(spans), tuple(peak_live(actions, shares) for actions in lists), tuple(early))


def medians(timelines: Sequence[Timeline]) -> dict[str, dict[int, float]]:
    """kind -> stage -> median milliseconds of its actions."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for rank, spans in enumerate(timeline.spans):
            for action, start, end in spans:
                times[action.kind, timeline.placement.stage(rank, action.chunk)].append(end - start)
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for kind, stage in sorted(times):
        found[kind][stage] = statistics.median(times[kind, stage])
    return found


def stragglers(records: Sequence[dict]) -> list[str]:
    """A line for every rank and kind of action whose median is more than 10 % above the median of all ranks' medians; one line
    for a pipeline rank of which all are slow: that is not a slow device but a stage with more to do."""
    times: dict[str, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))  # kind -> (place, rank) -> seconds
    peers: dict[int, set[int]] = defaultdict(set)  # pipeline rank -> its ranks
    for record in records:
        peers[record["pp"]].add(record["rank"])
        for text, start, end in record["actions"]:
            times[parse_action(text).kind][place(record), record["rank"]].append(end - start)
    lines = []
    for kind, by_rank in sorted(times.items()):
        medians_of = {key: MS * statistics.median(values) for key, values in by_rank.items()}
        usual = statistics.median(medians_of.values())
        slow = {key: value for key, value in medians_of.items() if value > SLOW * usual}
        for pp, ranks in sorted(peers.items()):
            mine = {key: value for key, value in slow.items() if key[0][0] == pp}
            if len(mine) == len(ranks) > 1:
                lines.append(f"all {len(ranks)} ranks of pipeline rank {pp}: {_excess(kind, min(mine.values()), usual)}; "
                             "its stages have more to do (--pipeline-split auto evens stages out)")  # fmt: skip
                continue
            for ((_, tp, cp, dp), rank), value in sorted(mine.items()):
                lines.append(f"rank {rank} (pp {pp}, tp {tp}, cp {cp}, dp {dp}): {_excess(kind, value, usual)}")
    return lines or ["none: no rank's median is more than 10 % above that of all ranks, in any kind of action"]


def _excess(kind: str, value: float, usual: float) -> str:
    return f"{kind} takes {value:.2f} ms, {value / usual - 1:.0%} above the median of all ranks, {usual:.2f} ms"


def costs_of(found: dict[str, dict[int, float]], num_stages: int) -> Costs:
    """The simulator's costs. Where a stage ran its backward in one, all of it counts as the input gradient's."""
    both, table = found.get("BW", {}), []
    for stage in range(num_stages):
        b, w = found.get("B", {}).get(stage), found.get("W", {}).get(stage, 0.0)
        table.append((found["F"][stage], both.get(stage, 0.0) if b is None else b, w))
    return Costs(*([row[part] for row in table] for part in range(3)))


def predicted(timeline: Timeline, costs: Costs) -> Timeline:
    """The same lists, simulated."""
    return simulate([[span.action for span in spans] for spans in timeline.spans], timeline.placement, costs)


def report(steps: Sequence[Step], step: Step, ideal: Timeline, found: dict[str, dict[int, float]]) -> str:
    """What is printed: bubbles, medians per stage, waits per rank."""
    bubbles = [measured(other).sync_fraction for other in steps]
    lines = [f"schedule {step.ranks[0]['schedule']}: iterations {steps[0].iteration} to {steps[-1].iteration}, "
             f"drawn: {step.iteration}",
             f"bubble      predicted {ideal.sync_fraction:.1%}, measured {statistics.median(bubbles):.1%} of the step "
             f"({', '.join(f'{bubble:.1%}' for bubble in bubbles)})",
             f"step        predicted {ideal.makespan:.1f} ms, measured {MS * statistics.median(s.seconds for s in steps):.1f} ms",
             "", "median ms   " + "".join(f"{kind:>10}" for kind in found)]  # fmt: skip
    for stage in range(ideal.placement.num_stages):
        cells = (f"{found[kind][stage]:10.2f}" if stage in found[kind] else " " * 10 for kind in found)
        lines.append(f"stage {stage:<6}" + "".join(cells))
    phases = list(dict.fromkeys(name for rank in step.ranks for name, _, _ in rank["phases"]))
    lines += ["", "ms per step " + "".join(f"{name:>10}" for name in ("p2p wait", "longest", *phases))]
    for pp in range(len(step.ranks)):
        rows = [other.ranks[pp] for other in steps]
        waits = [[end - start for _, start, end in row["waits"]] or [0.0] for row in rows]
        cells = [statistics.median(map(sum, waits)), max(map(max, waits))]
        for name in phases:
            cells.append(statistics.median(sum(e - s for n, s, e in row["phases"] if n == name) for row in rows))
        lines.append(f"rank {pp:<7}" + "".join(f"{MS * cell:10.2f}" for cell in cells))
    return "\n".join(lines)


def perfetto(step: Step, ideal: Timeline, real: Timeline) -> dict:
    """Both timelines as two processes of one Chrome trace; measured with its waits and phases."""
    trace = chrome_trace(real, "measured", MS)
    for rank, record in enumerate(step.ranks):
        for cat, entries in (("wait", record["waits"]), ("phase", record["phases"])):
            for name, start, end in entries:
                text = f"wait {name or 'for messages to leave'}" if cat == "wait" else name
                trace["traceEvents"].append({"name": text, "cat": cat, "ph": "X", "pid": 0, "tid": rank,
                    "ts": (start - step.start) * 1e6, "dur": (end - start) * 1e6})  # fmt: skip
    offset = len(trace["traceEvents"])  # an arrow's two ends share an id, that no other arrow has
    for event in chrome_trace(ideal, "predicted", MS)["traceEvents"]:
        shifted = {"id": event["id"] + offset} if "id" in event else {}
        trace["traceEvents"].append(event | shifted | {"pid": 1})
    trace["otherData"] = {"predicted bubble": ideal.sync_fraction, "measured bubble": real.sync_fraction}
    return trace


def picture(step: Step, ideal: Timeline, real: Timeline, slow: Sequence[str], suffix: str) -> str:
    """The contents of a file with that suffix."""
    name = f"{step.ranks[0]['schedule']}, iteration {step.iteration}"
    if suffix == ".json":
        return json.dumps(perfetto(step, ideal, real))
    if suffix == ".svg":
        return draw_svg(real, f"{name}, ms")
    return draw_html({"predicted, ms": ideal, "measured, ms": real}, f"{name}: predicted and measured",
                     [f"Stragglers: {line}" for line in slow])  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --trace-dir of a run")
    parser.add_argument("--iteration", type=int, help="one iteration (default: all, and the one of median length is drawn)")
    parser.add_argument("--tp", type=int, default=0, help="tensor-parallel rank of the pipeline that is shown")
    parser.add_argument("--dp", type=int, default=0, help="data-parallel rank of the pipeline that is shown")
    parser.add_argument("--out", type=Path, help="file to write: .html, .svg (measured alone) or .json (Chrome trace)")
    args = parser.parse_args(argv)
    if args.out and args.out.suffix not in (".html", ".svg", ".json"):
        parser.error(f"--out {args.out} should end in .html, .svg or .json")
    try:
        steps = read_steps(args.folder, args.iteration, args.tp, args.dp)
        timelines = [measured(step) for step in steps]
        found = medians(timelines)
        step = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
        real = timelines[steps.index(step)]
        ideal = predicted(real, costs_of(found, step.placement.num_stages))
        folders = [args.folder / f"iter_{step.iteration:07d}" for step in steps]
        slow = stragglers([record for folder in folders for record in read_records(folder)])
        print("\n".join([report(steps, step, ideal, found), "", *(f"stragglers  {line}" for line in slow)]))
        if args.out:
            args.out.write_text(picture(step, ideal, real, slow, args.out.suffix), encoding="utf-8")
            print(f"\nwrote {args.out}")
    except (ScheduleError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    main()
