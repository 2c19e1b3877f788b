"""How good a checkpoint is: perplexity of text, and questions with choices. Prints one JSON object.

    python tools/evaluate.py --load checkpoints --text held_out.txt
    torchrun --nproc-per-node 4 tools/evaluate.py --load checkpoints --tensor-model-parallel-size 2 \\
        --data-path data/held_out_text_document --task arc_easy.jsonl --task piqa.jsonl

Ranks that do not share the model share the documents and questions. The checkpoint may have been saved at any layout.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.training.score import ScoreError, answer, perplexity, read_task
from tools.shared import Using, add_model_flags, model_rules, open_model, run_tool


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="evaluate", description="How good a checkpoint is.", allow_abbrev=False)
    add = result.add_argument
    add_model_flags(add, "1")
    add("--data-path", action="append", default=[], metavar="PREFIX", help="perplexity of the documents of a .bin/.idx pair")
    add("--text", action="append", default=[], metavar="FILE", help="perplexity of a text file, one document")
    add("--task", action="append", default=[], metavar="FILE",
        help='JSONL of {"context" or "query", "choices", "gold"}: accuracy')  # fmt: skip
    add("--window", type=int, metavar="N", help="tokens read at once (default: the sequence length of the training)")
    add("--stride", type=int, metavar="N",
        help="new tokens per window; the others are context (default: --window: no overlap)")  # fmt: skip
    add("--skip-first-token", action="store_true",
        help="a document's first token is context alone (default: it is scored after an end of document)")  # fmt: skip
    add("--delimiter", default=" ", metavar="TEXT", help="between a context and a choice without a blank (default: one blank)")
    add("--limit", type=int, metavar="N", help="the first N documents or questions of each file (default: all)")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="windows at a time on a rank (default: %(default)s)")
    add("--output", metavar="FILE", help="write the JSON there as well")
    return result


def sizes_of(a: argparse.Namespace, using: Using) -> tuple[int, int]:
    """(window, stride), held against what the model's positions allow."""
    model = using.config.model
    longest = model.max_position_embeddings
    window = a.window or min(model.seq_length, longest)
    if window > longest:
        raise ScoreError(f"--window {window}: the model's positions end after {longest}: use {longest} or less")
    if a.stride is not None and a.stride > window:
        raise ScoreError(f"--stride {a.stride}: tokens between windows of {window} would not be scored: use {window} or less")
    return window, a.stride or window


def with_start(a: argparse.Namespace, using: Using, documents: Iterator[list[int]]) -> Iterator[list[int]]:
    """Documents behind the id that ended the one before, so that their first token is scored too."""
    start = [] if a.skip_first_token or using.end is None else [using.end]
    for ids in documents:
        yield [*start, *ids]


def text_result(a: argparse.Namespace, using: Using, path: str, sizes: tuple[int, int]) -> dict[str, float]:
    """Perplexity of a text file, and its loss in bits per byte, which tokenizers do not change."""
    text = Path(path).read_text(encoding="utf-8")
    documents = with_start(a, using, iter([using.tokenizer.encode(text)]))
    found = perplexity(using.chunks, documents, using.mesh, *sizes, a.micro_batch_size)
    bits = found["loss"] * found["tokens"] / math.log(2)
    return found | {"bits_per_byte": bits / len(text.encode())}


def data_result(a: argparse.Namespace, using: Using, prefix: str, sizes: tuple[int, int]) -> dict[str, float]:
    """Perplexity of the documents of a data set."""
    data = IndexedDataset(prefix)
    documents = (data.document(i).tolist() for i in islice(range(data.num_documents), a.limit))
    return perplexity(using.chunks, with_start(a, using, documents), using.mesh, *sizes, a.micro_batch_size)


def task_result(a: argparse.Namespace, using: Using, path: str, sizes: tuple[int, int]) -> dict[str, float]:
    """Accuracy of a task's file."""
    questions = read_task(path, using.tokenizer.encode, using.end, sizes[0], a.delimiter, a.limit)
    return answer(using.chunks, questions, using.mesh, a.micro_batch_size)


def evaluate(a: argparse.Namespace) -> None:
    """Everything that was asked for, file by file, in one JSON object."""
    using = open_model(a, a.tensor_model_parallel_size or 1)
    sizes = sizes_of(a, using)
    kinds: list[tuple[list[str], Callable[..., dict[str, float]]]] = [
        (a.text, text_result), (a.data_path, data_result), (a.task, task_result)]  # fmt: skip
    results = {path: result(a, using, path, sizes) for paths, result in kinds for path in paths}
    if using.mesh.rank > 0:
        return
    text = json.dumps({"load": a.load, "window": sizes[0], "stride": sizes[1], "results": results}, indent=2, ensure_ascii=False)
    print(text)
    if a.output is not None:
        Path(a.output).write_text(text + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for a checkpoint or file that cannot be used."""
    a = parser().parse_args(argv)
    paths = [*a.text, *a.data_path, *a.task]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    positive = [(flag, value, value is None or value >= 1, "expected 1 or more")
                for flag, value in (("--window", a.window), ("--stride", a.stride), ("--limit", a.limit),
                                    ("--micro-batch-size", a.micro_batch_size))]  # fmt: skip
    rules = [
        ("--text, --data-path or --task", "none given", bool(paths), "expected at least one of them"),
        ("the same file", ", ".join(twice), not twice, "expected once"),
        *positive,
        *model_rules(a, a.tensor_model_parallel_size or 1, dp=True),
    ]
    return run_tool(parser(), rules, lambda: evaluate(a))


if __name__ == "__main__":
    sys.exit(main())
