"""Training curves for the examples, from the JSONL files that pretrain_gpt.py writes with --jsonl.

    curves.py follow --jsonl FILE --log FILE [--expected FILE --every N] -- COMMAND ...
        runs COMMAND, its output in the log, and prints rows of the curve (means since the last row)
        beside their expected range
    curves.py compare --limit X FILE FILE
        the largest difference in loss and gradient norm over the iterations that both files have

Standard library only. Exit code 1 where the command fails, a loss leaves its range or a difference exceeds the limit.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HEAD = f"  {'iteration':>9}  {'loss':>7}  {'expected':>13}  {'tokens/s':>9}"
POLL_SECONDS = 0.2


def read(path: str) -> dict[int, dict[str, float]]:
    """{iteration: row} of the complete lines that have a training loss."""
    rows = {}
    if Path(path).exists():
        for line in Path(path).read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                if "lm loss" in row:
                    rows[row["iteration"]] = row
    return rows


def read_expected(path: str | None) -> dict[int, tuple[float, float]]:
    """{iteration: (lowest, highest)} from lines `iteration lowest highest`."""
    if path is None:
        return {}
    lines = [line.split("#")[0].split() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {int(words[0]): (float(words[1]), float(words[2])) for words in lines if words}


def follow(arguments: argparse.Namespace) -> int:
    """Run the command; a row of the curve at iteration 1 and every `every`th, as it comes."""
    expected, outside = read_expected(arguments.expected), []
    if arguments.every:
        print(HEAD, flush=True)
    with open(arguments.log, "w", encoding="utf-8") as log:
        process = subprocess.Popen(arguments.command, stdout=log, stderr=subprocess.STDOUT)
        try:
            shown = 0
            while True:
                ended = process.poll() is not None  # asked first, so that the last rows are read after the end
                rows = read(arguments.jsonl) if arguments.every else {}
                for iteration in sorted(i for i in rows if i > shown):
                    if iteration == 1 or iteration % arguments.every == 0:
                        outside += show(rows, shown, iteration, expected.get(iteration))
                        shown = iteration
                if ended:
                    break
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            process.wait()  # the terminal's interrupt has reached it too: it saves and ends
            return 130
    if process.returncode:
        tail = Path(arguments.log).read_text(encoding="utf-8").splitlines()[-15:]
        print("\n".join([*tail, f"failed with exit code {process.returncode}; the whole output is in {arguments.log}"]))
        return 1
    if outside:
        print(f"  the loss left its expected range at iteration {outside[0]}: something is wrong", flush=True)
    return bool(outside)


def show(rows: dict[int, dict[str, float]], after: int, iteration: int, span: tuple[float, float] | None) -> list[int]:
    """Print a row: mean loss and speed over the iterations after `after`. The iteration, if the loss is out of range."""
    steps = [row for i, row in rows.items() if after < i <= iteration]
    losses = [row["lm loss"] for row in steps]
    loss = None if None in losses else sum(losses) / len(losses)
    seconds = sum(row["iteration-time"] for row in steps)
    tokens = sum(row["iteration-time"] * row["tokens-per-second"] for row in steps)
    good = span is None or loss is not None and span[0] <= loss <= span[1]
    text = f"{span[0]:.2f} .. {span[1]:.2f}" if span else ""
    value = "nan" if loss is None else f"{loss:.4f}"
    print(f"  {iteration:>9}  {value:>7}  {text:>13}  {tokens / seconds:>9.0f}{'' if good else '  <-- outside'}", flush=True)
    return [] if good else [iteration]


def compare(arguments: argparse.Namespace) -> int:
    """Largest differences over the common iterations."""
    one, other = map(read, arguments.files)
    common = sorted(one.keys() & other.keys())
    if not common:
        print(f"no iteration is in both {arguments.files[0]} and {arguments.files[1]}")
        return 1
    worst = {key: max(abs(one[i][key] - other[i][key]) for i in common) for key in ("lm loss", "grad-norm")}
    first, last = common[0], common[-1]
    for i in common if len(common) <= 3 else (first, last):
        print(f"  iteration {i:>4}: loss {one[i]['lm loss']:.6f} and {other[i]['lm loss']:.6f}, "
              f"gradient norm {one[i]['grad-norm']:.6f} and {other[i]['grad-norm']:.6f}")  # fmt: skip
    good = all(difference <= arguments.limit for difference in worst.values())
    which = f"iterations {first} to {last}" if len(common) > 1 else f"iteration {first}"
    print(f"  largest difference over {which}: loss {worst['lm loss']:.1e}, gradient norm {worst['grad-norm']:.1e} "
          f"(allowed {arguments.limit:.0e}){'' if good else '  <-- too large'}", flush=True)  # fmt: skip
    return not good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    following = commands.add_parser("follow")
    following.add_argument("--jsonl", required=True)
    following.add_argument("--log", required=True)
    following.add_argument("--expected")
    following.add_argument("--every", type=int, default=0, help="iterations between rows; 0: print none")
    following.add_argument("command", nargs="+")
    following.set_defaults(run=follow)
    comparing = commands.add_parser("compare")
    comparing.add_argument("--limit", type=float, required=True)
    comparing.add_argument("files", nargs=2)
    comparing.set_defaults(run=compare)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
