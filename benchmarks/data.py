"""What data costs a run: its start, its reads, its waiting.

    python benchmarks/data.py                                      a minute or two
    python benchmarks/data.py --index-samples 1e6 --megabytes 50 --shape S --steps 3 --out data.json

    start-up    open, check, first batch of 1e3 and of 1e11 samples (a sparse file), turn by turn; memory that Python and numpy
                allocated meanwhile, at its most. Beside it the index arrays that Megatron builds: document, sample and shuffle
                index of --index-samples samples, with numpy
    reads       samples in their permuted order, beside the same windows cut out of the map by hand; both give int64. Then
                batches of the loader, read in line: ids checked, tokens, labels and mask made
    waiting     share of training steps spent waiting for data: the table's model W on one process, its loader reading ahead
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.ours import config_of  # noqa: E402
from benchmarks.peers.spec import SHAPES, Shape, Spec  # noqa: E402
from megatron_lite.comm.launch import keep_heap, set_threads  # noqa: E402
from megatron_lite.comm.mesh import build_mesh  # noqa: E402
from megatron_lite.config import DataConfig  # noqa: E402
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter, write_index  # noqa: E402
from megatron_lite.data.loader import BatchLoader  # noqa: E402
from megatron_lite.data.samples import Order, WindowSamples  # noqa: E402
from megatron_lite.rampup import BatchSizes  # noqa: E402
from megatron_lite.training.data import build_loader, build_splits  # noqa: E402
from megatron_lite.training.setup import build_trainer, grid_of  # noqa: E402
from megatron_lite.training.step import train_step  # noqa: E402

FEW, MANY = 10**3, 10**11  # samples
SHORT = 8  # tokens of a sample at start-up: 1e11 of them are a file of 1.6 TB, which a file system can still name
DOCUMENTS = 1000  # of both sparse files
LENGTH, BATCH = 2048, 8  # of the reads


def sparse(prefix: str, samples: int) -> str:
    """A data set of zeros of so many samples that takes no room on the disk."""
    tokens = samples * SHORT + 1
    lengths = np.full(DOCUMENTS, tokens // DOCUMENTS, np.int64)
    lengths[: tokens % DOCUMENTS] += 1
    write_index(prefix + ".idx", np.uint16, lengths.astype(np.int32), np.arange(DOCUMENTS + 1, dtype=np.int64))
    with open(prefix + ".bin", "wb") as file:
        file.truncate(2 * tokens)
    return prefix


def loader_of(samples: WindowSamples, batch: int) -> BatchLoader:
    return BatchLoader(samples, micro_batch_size=batch, batch_sizes=BatchSizes(batch), dp_rank=0, dp_size=1, vocab_size=1 << 16,
                       prefetch=0)  # fmt: skip


def first_batch(prefix: str) -> None:
    """What a rank does before its first step."""
    loader_of(WindowSamples(IndexedDataset(prefix), SHORT, seed=1), 1).next_step()


def start_up(folder: Path, rounds: int) -> dict:
    """Seconds of both sizes, the ratio round by round, and the most bytes allocated for the large one."""
    few, many = sparse(str(folder / "few"), FEW), sparse(str(folder / "many"), MANY)
    seconds: dict[str, list[float]] = {few: [], many: []}
    for turn in range(rounds + 3):
        for prefix in (few, many) if turn % 2 else (many, few):
            started = time.perf_counter()
            first_batch(prefix)
            if turn >= 3:  # the first ones find the pages of the files
                seconds[prefix].append(time.perf_counter() - started)
    tracemalloc.start()
    first_batch(many)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ratio = statistics.median(seconds[many]) / statistics.median(seconds[few])
    return {"few_ms": 1e3 * statistics.median(seconds[few]), "many_ms": 1e3 * statistics.median(seconds[many]), "ratio": ratio,
            "peak_mb": peak / 1e6}  # fmt: skip


def index_arrays(samples: int) -> dict:
    """Time and bytes of Megatron's three arrays for one epoch of ten samples per document: the order of the documents, where
    (document, offset) each sample begins in it, and the order of the samples."""
    documents = max(1, samples // 10)
    lengths = np.random.default_rng(0).integers(1, 2 * 10 * LENGTH, documents, dtype=np.int32)
    started = time.perf_counter()
    random = np.random.RandomState(1)
    document_index = np.arange(documents, dtype=np.int32)
    random.shuffle(document_index)
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    count = int((ends[-1] - 1) // LENGTH)
    sample_index = np.empty((count + 1, 2), np.int32)
    for low in range(0, count + 1, 1 << 20):
        starts = np.arange(low, min(low + (1 << 20), count + 1), dtype=np.int64) * LENGTH
        place = np.searchsorted(ends, starts, side="right")
        sample_index[low : low + len(starts), 0] = place
        sample_index[low : low + len(starts), 1] = starts - np.where(place, ends[place - 1], 0)
    shuffle_index = np.arange(count, dtype=np.uint32)
    random.shuffle(shuffle_index)
    size = document_index.nbytes + sample_index.nbytes + shuffle_index.nbytes
    return {"samples": count, "seconds": time.perf_counter() - started, "megabytes": size / 1e6}


def random_tokens(prefix: str, tokens: int, vocab: int) -> str:
    """A data set of random ids."""
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for low in range(0, tokens, 1 << 22):
            writer.add_document(generator.integers(0, vocab, min(1 << 22, tokens - low), dtype=np.uint16))
    return prefix


def reads(folder: Path, megabytes: int, rounds: int) -> dict:
    """Samples per second by hand, by number, and by the loader; the shares round by round."""
    prefix = random_tokens(str(folder / "reads"), megabytes * 500_000, 50_000)
    samples = WindowSamples(IndexedDataset(prefix), LENGTH, seed=1)
    loader = loader_of(samples, BATCH)
    raw = np.memmap(prefix + ".bin", np.uint16, "r").view(np.ndarray)
    count = min(4000, len(samples)) // BATCH * BATCH
    rates: dict[str, list[float]] = {"raw": [], "samples": [], "loader": []}
    for turn in range(rounds + 1):
        numbers = range(turn * count, (turn + 1) * count)
        starts = [samples.order[number] * LENGTH for number in numbers]
        samples.order = Order(len(samples), samples.seed)  # nothing is known ahead

        def by_hand(starts: list[int] = starts) -> None:
            for start in starts:
                raw[start : start + LENGTH + 1].astype(np.int64)

        def by_number(numbers: range = numbers) -> None:
            for number in numbers:
                samples[number]

        def by_loader() -> None:
            for _ in range(count // BATCH):
                loader.next_step()

        acts = [("raw", by_hand), ("samples", by_number)]
        for name, act in [*(acts if turn % 2 else acts[::-1]), ("loader", by_loader)]:
            started = time.perf_counter()
            act()
            if turn:  # the first one finds the pages
                rates[name].append(count / (time.perf_counter() - started))
    shares = {f"{name}_share": statistics.median(a / b for a, b in zip(rates[name], rates["raw"], strict=True))
              for name in ("samples", "loader")}  # fmt: skip
    return {**{name: statistics.median(values) for name, values in rates.items()}, **shares, "megabytes": megabytes}


def waiting(folder: Path, shape: Shape, steps: int) -> dict:
    """Seconds of training steps on real files, and of them what was spent waiting for data; the first step is left out."""
    prefix = random_tokens(str(folder / "train"), 2_000_000, shape.vocab)
    config = config_of(Spec("data", "ours", "single", "fp32", "", "", shape=shape))
    data = DataConfig(data_path=(prefix,), split="100", vocab_size=shape.vocab)
    config = replace(config, data=data, train=replace(config.train, train_iters=steps + 1))
    splits, mesh = build_splits(config, None), build_mesh(grid_of(config, 1), torch.device("cpu"))
    trainer, batch = build_trainer(config, mesh), config.train.global_batch_size
    total = waited = 0.0
    with build_loader(trainer, splits, splits.train, 0) as loader:
        for step in range(steps + 1):
            started = time.perf_counter()
            train_step(trainer, loader.next_step(), step, step * batch)
            wait = loader.take_wait_seconds()
            if step:
                total, waited = total + time.perf_counter() - started, waited + wait
    return {"seconds_per_step": total / steps, "wait_percent": 100 * waited / total, "tokens_per_step": batch * shape.seq}


def table(found: dict) -> str:
    """Everything, with what is asked of it."""
    start, index, read, wait = (found[name] for name in ("start-up", "index arrays", "reads", "waiting"))
    rows = [
        (f"start-up, {FEW:.0e} samples", f"{start['few_ms']:.2f} ms", ""),
        (f"start-up, {MANY:.0e} samples", f"{start['many_ms']:.2f} ms", ""),
        ("  ratio", f"{start['ratio']:.3f}", "0.9 to 1.1"),
        ("  memory beside the map", f"{start['peak_mb']:.2f} MB", "below 20 MB"),
        (f"Megatron's index arrays, {index['samples']:.1e} samples", f"{index['seconds']:.1f} s", "none are built here"),
        ("  their size", f"{index['megabytes']:,.0f} MB", ""),
        (f"windows of {LENGTH} cut by hand", f"{read['raw']:,.0f} / s", ""),
        ("samples by number", f"{read['samples']:,.0f} / s = {100 * read['samples_share']:.0f}%", "at least 90%"),
        ("batches of the loader, in line", f"{read['loader']:,.0f} / s = {100 * read['loader_share']:.0f}%", ""),
        (f"a step of model {found['shape']}, {wait['tokens_per_step']} tokens", f"{wait['seconds_per_step']:.2f} s", ""),
        ("  of it waiting for data", f"{wait['wait_percent']:.3f}%", "below 1%"),
    ]
    return "\n".join(f"{what:<48}{value:>26}   {asked}".rstrip() for what, value, asked in rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index-samples", type=float, default=1e8, help="samples of Megatron's index arrays (1e8: 2 GB)")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the file that samples are read from")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shape", choices=list(SHAPES), default="W", help="model of the training steps")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--out", help="write everything measured to this JSON file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict:
    """Measure, print, write."""
    args = parse(argv)
    found: dict = {"torch": torch.__version__, "numpy": np.__version__, "cores": len(os.sched_getaffinity(0)),
                   "shape": args.shape, "sample_length": LENGTH}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        found["start-up"] = start_up(folder, 10 * args.rounds)
        found["reads"] = reads(folder, args.megabytes, args.rounds)
        found["waiting"] = waiting(folder, SHAPES[args.shape], args.steps)
        found["index arrays"] = index_arrays(int(args.index_samples))
    print(table(found))
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    keep_heap()
    set_threads(1)
    main()
