"""The stages of ZeRO beside the peers that keep the same state: model W, two ranks, in one run as benchmarks/throughput.py.

    python benchmarks/zero.py --out zero.json
    python benchmarks/zero.py --dtype fp32 --shape S --rounds 2     two minutes, where bf16 products are slow

    state kept          ours      peers
    everything          zero-0    DDP
    shared optimizer    zero-1    DDP with ZeroRedundancyOptimizer
    shared everything   zero-3    FSDP2, which frees gathered parameters after the forward ("reshard") or keeps them
"""

import argparse
import fnmatch
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report, throughput  # noqa: E402
from benchmarks.contenders import Contender, with_heap  # noqa: E402

PEERS = [
    Contender("ddp", "ddp", "dp"),
    Contender("ddp+zero-redundancy", "zero_redundancy", "dp"),
    Contender("fsdp2-reshard", "fsdp", "dp", options={"reshard": True}),
    Contender("fsdp2-keep", "fsdp", "dp", options={"reshard": False}),
]
OURS = [Contender(f"zero-{stage}", "ours", "dp", options={"zero_stage": stage}) for stage in range(4)]
# Ours -> the peers that keep what it keeps.
SAME_STATE = {"zero-0": ["ddp"], "zero-1": ["ddp+zero-redundancy"], "zero-2": ["ddp+zero-redundancy", "fsdp2-keep"],
              "zero-3": ["fsdp2-reshard", "fsdp2-keep"]}  # fmt: skip


def parse(argv=None) -> argparse.Namespace:
    """The command line: throughput.py's, less what has no meaning here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a contender runs per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns per contender")
    parser.add_argument("--contenders", nargs="+", default=["*"], help="names or patterns, such as 'zero-*' ddp")
    parser.add_argument("--shape", choices=list(throughput.SHAPES), default="W", help="tiny only tries the driver")
    parser.add_argument("--out", help="write everything measured to this JSON file")
    return parser.parse_args(argv)


def ratios(rows: dict[str, dict]) -> list[str]:
    """Each stage against the fastest peer that keeps the same state, and stage 3 against stage 0."""
    lines = []
    for ours, peers in SAME_STATE.items():
        for suffix, how in (("", "as it ships"), ("+heap", "with our allocator settings")):
            peer = report.best(rows, [name + suffix for name in peers])
            if ours in rows and peer:
                lines.append(f"{ours} / {peer}, {how}: {report.paired_ratio(rows[ours], rows[peer]):.3f}")
    if "zero-0" in rows and "zero-3" in rows:
        lines.append(f"zero-3 / zero-0: {report.paired_ratio(rows['zero-3'], rows['zero-0']):.3f}")
    return lines


def main(argv=None) -> None:
    """Measure, print, write."""
    args = parse(argv)
    driver = argparse.Namespace(**vars(args), pp_splits=[], litgpt_python=sys.executable)
    with tempfile.TemporaryDirectory(prefix="zero-", ignore_cleanup_errors=True) as folder:
        run = throughput.Run(driver, Path(folder))
        rows = [*OURS, *(row for peer in PEERS for row in (peer, with_heap(peer)))]
        wanted = [row for row in rows if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in args.contenders)]
        run.measure(wanted, "dp", args.dtype)
        run.summarise()
    block = run.result["blocks"][0]
    block["ratios"], lines = {}, ratios(block["rows"])
    print(report.block_text(block))
    print("\n".join(lines))
    if args.out:
        Path(args.out).write_text(json.dumps(run.result | {"ratios": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
