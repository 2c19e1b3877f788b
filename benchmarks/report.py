"""Medians, ratios and the printed table of the speed table. Plain numbers in, plain numbers out."""

import math
import statistics


def rate(turn: dict) -> float:
    """Tokens per second of one turn."""
    return turn["tokens"] / turn["seconds"]


def summary(rounds: list[dict], warm: dict, cores: int) -> dict:
    """One contender's row from its rounds. `warm` is its first step, which is not timed but does count for losses."""
    rates = [rate(turn) for turn in rounds]
    median = statistics.median(rates)
    return {
        "tokens_per_s": median,
        "spread_percent": 100 * (max(rates) - min(rates)) / median,
        "ms_per_step": 1000 * statistics.median(turn["seconds"] / len(turn["losses"]) for turn in rounds),
        "cpu_percent": statistics.median(100 * turn["cpu_seconds"] / (turn["seconds"] * cores) for turn in rounds),
        "peak_rss_mb": max(turn["peak_rss_mb"] for turn in rounds),
        "faults_per_step": statistics.median(turn["minor_faults"] / len(turn["losses"]) for turn in rounds),
        "first_step_s": warm["seconds"],
        "losses": [x for turn in [warm, *rounds] for x in turn["losses"]],
        "norms": [x for turn in [warm, *rounds] for x in turn["norms"]],
        "rates": rates,
    }


def utilisation(rounds: list[dict], flops_per_token: float, ceilings: list[dict]) -> dict:
    """The model's FLOPs done per second, and as a part of what the machine's matrix products alone reach in the same round
    (`ceilings`, GFLOP/s by pass of each round): the median over rounds, nan where the products were not measured."""
    gflops = [rate(turn) * flops_per_token / 1e9 for turn in rounds]
    parts = [100 * mine / ceiling["all"] for mine, ceiling in zip(gflops, ceilings, strict=True)] if ceilings else [math.nan]
    return {"gflops": statistics.median(gflops), "mfu_percent": statistics.median(parts)}


def paired_ratio(a: dict, b: dict) -> float:
    """How much faster a is than b: the median over rounds of the ratio inside a round, so that drift cancels."""
    return statistics.median(x / y for x, y in zip(a["rates"], b["rates"], strict=True))


def agree(row: dict, reference: dict) -> None:
    """Write the largest differences of loss and gradient norm from the reference into the row."""
    pairs = list(zip(row["losses"], reference["losses"], strict=False))
    row["loss_difference"] = max(abs(a - b) for a, b in pairs)
    norms = list(zip(row["norms"], reference["norms"], strict=False))
    row["norm_difference"] = max(abs(a - b) / b for a, b in norms)


def best(rows: dict[str, dict], names: list[str]) -> str | None:
    """The fastest of the names by median."""
    return max((n for n in names if n in rows), key=lambda n: rows[n]["tokens_per_s"], default=None)


def ratios(rows: dict[str, dict], contenders) -> dict[str, dict]:
    """Ours against the best peer as shipped, and against the best peer with the same allocator settings."""
    ours = best(rows, [c.name for c in contenders if c.ours])
    if ours is None:
        return {}
    answer = {}
    for key, heap in (("ours / best peer as shipped", False), ("ours / best peer with the same allocator", True)):
        peer = best(rows, [c.name for c in contenders if not c.ours and c.heap == heap])
        if peer is not None:
            answer[key] = {"ours": ours, "peer": peer, "ratio": paired_ratio(rows[ours], rows[peer])}
    return answer


COLUMNS = [
    ("tok/s", lambda r: f"{r['tokens_per_s']:.0f}"),
    ("x base", lambda r: f"{r['over_baseline']:.2f}"),
    ("spread %", lambda r: f"{r['spread_percent']:.1f}"),
    ("ms/step", lambda r: f"{r['ms_per_step']:.0f}"),
    ("cpu %", lambda r: f"{r['cpu_percent']:.0f}"),
    ("MFU %", lambda r: f"{r['mfu_percent']:.1f}"),
    ("peak MB/rank", lambda r: f"{r['peak_rss_mb']:.0f}"),
    ("faults/step", lambda r: f"{r['faults_per_step']:.0f}"),
    ("loss diff", lambda r: f"{r['loss_difference']:.1e}"),
    ("norm diff", lambda r: f"{r['norm_difference']:.1e}"),
]


def table(rows: dict[str, dict]) -> str:
    """Aligned text, one line per contender, in the order they are listed."""
    lines = [["contender", *(title for title, _ in COLUMNS)]]
    lines += [[name, *(show(row) for _, show in COLUMNS)] for name, row in rows.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join([line[0].ljust(widths[0]), *cells]))
    text.insert(1, "-" * len(text[0]))
    return "\n".join(text)


def block_text(block: dict) -> str:
    """One block: heading, table, what failed, ratios."""
    head = (
        f"{block['group']} · {block['dtype']} · {block['world']} x {block['threads']} thread(s), "
        f"micro-batch {block['micro_batch']}, global batch {block['global_batch']}; "
        f"base: {block['baseline']}, losses against: {block['reference']}"
    )
    ceilings = block["ceiling"]
    passes = {name: statistics.median(ceiling[name] for ceiling in ceilings) for name in (ceilings[0] if ceilings else ())}
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in passes.items()) or "not measured"
    parts = ["", head, f"matrix products alone, GFLOP/s: {speeds}", table(block["rows"]) if block["rows"] else "(nobody ran)"]
    parts += [f"left out: {name}: {why}" for name, why in block["failed"].items()]
    for key, r in block["ratios"].items():
        parts.append(f"{key}: {r['ratio']:.3f}  ({r['ours']} / {r['peer']})")
    return "\n".join(parts)
