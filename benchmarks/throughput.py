"""The speed table: megatron_lite beside its peers, on the same machine, in the same run.

    python benchmarks/throughput.py --out speed.json

Each contender is a process (or a pair of ranks) that builds model W once, from the same weights, and then waits. The
driver lets them run in turn, a few steps at a time, in an order that changes every round, so that a slow minute of the
machine falls on all of them. Reported are medians over rounds. Every peer runs as it ships and with our allocator
settings ("+heap"). A process that only multiplies matrices of the model's shapes takes its turn in every round: MFU is
the median over rounds of a contender's FLOPs per second as a part of that round's.

Run it on a quiet machine: "cpu %" well under 100 for single-process rows says that somebody else was computing.
"""

import argparse
import fnmatch
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report  # noqa: E402
from benchmarks.contenders import CEILING, HEAP, LAYOUTS, Contender, block  # noqa: E402
from benchmarks.peers.spec import SHAPES, Shape, Spec, write_weights  # noqa: E402
from benchmarks.processes import ContenderError, Handle  # noqa: E402


def parse(argv=None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=["bf16", "fp32"], default=["bf16"])
    parser.add_argument("--groups", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a contender runs per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns per contender")
    parser.add_argument("--contenders", nargs="+", default=["*"], help="names or patterns, such as 'plain*' ours")
    parser.add_argument("--compile", action="store_true", help="also the torch.compile variants (they start slowly)")
    parser.add_argument("--extra", action="store_true", help="also variants known to be slower than their siblings")
    parser.add_argument("--pp-splits", nargs="+", default=["4+4", "5+3"], help="layers per pipeline stage")
    parser.add_argument("--skip-ours", action="store_true")
    parser.add_argument("--litgpt-python", default=sys.executable, help="interpreter that has LitGPT, if another one")
    parser.add_argument("--shape", choices=list(SHAPES), default="W", help="tiny only tries the driver")
    parser.add_argument("--out", help="write everything measured to this JSON file")
    return parser.parse_args(argv)


def memory_mb(field: str) -> float | None:
    """A field of /proc/meminfo, where there is one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), None)


def cpu_model() -> str:
    """The processor's name, and its instruction sets that matter here."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [f for f in fields.get("flags", "").split() if f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")]
    return f"{fields.get('model name', platform.processor())} ({' '.join(flags)})"


def machine_facts() -> dict:
    """What the numbers depend on."""
    import torch

    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mb": memory_mb("MemTotal"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "load_average": os.getloadavg(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "unset (threads spin for a moment, then sleep)"),
        "threads": {group: f"{layout.world} x {layout.threads}" for group, layout in LAYOUTS.items()},
        "heap_settings": HEAP,
    }


class Run:
    """One run of the table: the arguments, the shared files, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.shape: Shape = SHAPES[args.shape]
        self.splits = [[int(n) for n in split.split("+")] for split in args.pp_splits]
        self.weights = str(folder / "weights.safetensors")
        self.references: dict[tuple[str, int], tuple[str, dict]] = {}
        write_weights(self.shape, self.weights)
        self.result = {
            "facts": machine_facts(),
            "shape": asdict(self.shape),
            "parameters": self.shape.parameters(),
            "flops_per_token": self.shape.flops_per_token(),
            "steps_per_turn": args.steps,
            "rounds": args.rounds,
            "blocks": [],
        }

    def start(self, contender: Contender, dtype: str) -> Handle:
        """Start a contender's processes; they build while the driver goes on."""
        spec = Spec(
            name=contender.name,
            module=contender.module,
            group=contender.group,
            dtype=dtype,
            weights=self.weights,
            rendezvous=str(self.folder / f"{contender.group}-{dtype}-{contender.name}.store"),
            compile=contender.compile,
            shape=self.shape,
            options=contender.options,
            **asdict(LAYOUTS[contender.group]),
        )
        python = self.args.litgpt_python if contender.module == "lit" else sys.executable
        return Handle(contender, spec, self.folder, python)

    def block(self, group: str, dtype: str) -> None:
        """Run the contenders of one block and keep what they answered."""
        args = self.args
        contenders = [
            c
            for c in block(group, dtype, self.splits, args.compile, args.extra, not args.skip_ours)
            if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in args.contenders)
        ]
        if contenders:
            self.measure(contenders, group, dtype)

    def measure(self, contenders: list[Contender], group: str, dtype: str) -> None:
        """Run these contenders, and the measure of matrix products alone, beside each other."""
        failed: dict[str, str] = {}
        handles = self.start_all([CEILING, *contenders], dtype, failed)
        try:
            answers = self.rounds(handles, failed)
        finally:
            for handle in handles.values():
                handle.close()
        ran = [c for c in contenders if c.name in answers]
        self.result["blocks"].append(
            {"group": group, "dtype": dtype, "failed": failed, "contenders": ran, "answers": answers}
            | asdict(LAYOUTS[group])
        )

    def start_all(self, contenders: list[Contender], dtype: str, failed: dict) -> dict[str, Handle]:
        """Build everyone. Who cannot is left out with the reason."""
        handles = {}
        for contender in contenders:
            handle = self.start(contender, dtype)
            try:
                handle.hear(180)
                handles[contender.name] = handle
            except ContenderError as error:
                failed[contender.name] = str(error)
                handle.close()
        return handles

    def warm_up(self, handle: Handle) -> dict:
        """The untimed first step, if there is memory for it: all contenders of a block stay in memory together."""
        free = memory_mb("MemAvailable")
        if free is not None and free < 3000 * handle.spec.world:
            raise ContenderError(f"only {free:.0f} MB of memory free")
        return handle.run(1)

    def rounds(self, handles: dict[str, Handle], failed: dict) -> dict[str, list[dict]]:
        """An untimed first step each, then the rounds: the order rotates, and turns around every other round."""
        answers: dict[str, list[dict]] = {}
        for turn in range(self.args.rounds + 1):
            names = [name for name in handles if name not in failed]
            shift = turn % max(1, len(names))
            names = names[shift:] + names[:shift]
            for name in names if turn % 2 == 0 else reversed(names):
                try:
                    answer = handles[name].run(self.args.steps) if turn else self.warm_up(handles[name])
                    answers.setdefault(name, []).append(answer)
                except ContenderError as error:
                    failed[name] = str(error)
                    answers.pop(name, None)
                    handles[name].close()
                    continue
                speed = f"{answer['gflops']['all']:.0f} GFLOP/s" if "gflops" in answer else f"{report.rate(answer):.0f} tok/s"
                print(f"  {f'round {turn}' if turn else 'warm-up'}: {name} {speed}", file=sys.stderr, flush=True)
        return {name: answers[name] for name in handles if name in answers}

    def summarise(self) -> None:
        """Turn the answers into rows."""
        for part in self.result["blocks"]:
            contenders, answers = part.pop("contenders"), part.pop("answers")
            _, *ceilings = [answer["gflops"] for answer in answers.pop(CEILING.name, [])] or [None]
            part["ceiling"], flops = ceilings, self.shape.flops_per_token()
            cores = part["world"] * part["threads"]
            rows = part["rows"] = {
                name: report.summary(rounds, warm, cores) | report.utilisation(rounds, flops, ceilings)
                for name, (warm, *rounds) in answers.items()
            }
            part["baseline"] = next(iter(rows), None)
            key = (part["dtype"], part["global_batch"])
            if rows:
                self.references.setdefault(key, (f"{part['baseline']} ({part['group']})", rows[part["baseline"]]))
            part["reference"] = self.references[key][0] if key in self.references else None
            for row in rows.values():
                row["over_baseline"] = report.paired_ratio(row, rows[part["baseline"]])
                report.agree(row, self.references[key][1])
            part["ratios"] = report.ratios(rows, contenders)


def main(argv=None) -> None:
    """Measure, print, write."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="throughput-", ignore_cleanup_errors=True) as folder:
        run = Run(args, Path(folder))
        for key, value in run.result["facts"].items():
            print(f"{key}: {value}")
        print(f"model {args.shape}: {run.shape}, {run.result['parameters']:,} parameters, "
              f"{run.result['flops_per_token'] / 1e6:.1f} MFLOP per token")  # fmt: skip
        for dtype in args.dtype:
            for group in args.groups:
                run.block(group, dtype)
        run.result["facts"]["load_average_end"] = os.getloadavg()
        run.summarise()
    for part in run.result["blocks"]:
        print(report.block_text(part))
    if args.out:
        Path(args.out).write_text(json.dumps(run.result, indent=1) + "\n")
        print(f"\nwritten: {args.out}")


if __name__ == "__main__":
    main()
