"""What is in a .bin/.idx pair, and which samples a run reads from it.

    python tools/inspect_data.py data/corpus_text_document                                  statistics, lengths as a picture
    python tools/inspect_data.py data/corpus_text_document --document 7 --tokenizer-type ByteTokenizer
    python tools/inspect_data.py 3 data/a 1 data/b --iteration 100 --rank 1 --dp 2 --micro-batch-size 2 --global-batch-size 8 \\
        --seq-length 64 --split 969,30,1

Samples are found by the code that the training uses. `--rank` is the data-parallel rank; iterations count from 1, as in the log.
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from megatron_lite.data.blend import read_blend
from megatron_lite.data.indexed import CHUNK, DataError, IndexedDataset
from megatron_lite.data.loader import Samples, StepReader
from megatron_lite.data.megatron_order import megatron_samples
from megatron_lite.data.phases import PhasedSamples, read_phases
from megatron_lite.rampup import BatchSizes, is_ramp
from megatron_lite.tokenizers import Tokenizer, TokenizerError, build_tokenizer
from megatron_lite.training.data import open_samples, window_opener
from tools.tokenizer_flags import add_tokenizer_flags, tokenizer_values

BAR = 50  # characters of the longest bar


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(first length, last length, documents) by powers of two, from the shortest to the longest."""
    if not len(lengths):
        return []
    classes = np.bincount(np.frexp(lengths.astype(np.float64))[1])  # 0 -> 0, 1 -> 1, 2..3 -> 2, 4..7 -> 3
    used = np.flatnonzero(classes)
    return [(2 ** (int(c) - 1) if c else 0, 2 ** int(c) - 1 if c else 0, int(classes[c])) for c in
            range(used[0], used[-1] + 1)]  # fmt: skip


def statistics(dataset: IndexedDataset) -> str:
    """Counts, lengths, ids, and the histogram as text."""
    lengths = np.diff(dataset.document_token_bounds())
    low, high = None, None
    for start in range(0, dataset.num_tokens, CHUNK):
        piece = dataset.window(start, min(CHUNK, dataset.num_tokens - start))
        low = int(piece.min()) if low is None else min(low, int(piece.min()))
        high = int(piece.max()) if high is None else max(high, int(piece.max()))
    lines = [f"{dataset.prefix}: {dataset.num_documents:,} documents, {len(dataset):,} sequences, {dataset.num_tokens:,} tokens "
             f"of {dataset.dtype}, ids {low} to {high}"]  # fmt: skip
    if len(lengths):
        lines.append(f"tokens per document: mean {lengths.mean():.1f}, median {np.median(lengths):.0f}, "
                     f"shortest {lengths.min()}, longest {lengths.max()}, empty {int((lengths == 0).sum())}")  # fmt: skip
    rows = histogram(lengths)
    most = max((count for *_, count in rows), default=1)
    lines += [f"{first:>12,} - {last:<12,} {count:>12,} {'#' * -(-count * BAR // most)}" for first, last, count in rows]
    return "\n".join(lines)


def plot(dataset: IndexedDataset, path: str) -> None:
    """The histogram as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = histogram(np.diff(dataset.document_token_bounds()))
    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.bar([f"{first:,}" for first, *_ in rows], [count for *_, count in rows])
    axes.set(xlabel="tokens per document, from", ylabel="documents", title=Path(dataset.prefix).name)
    axes.tick_params(axis="x", rotation=45)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def shown(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """Ids as text where there is a tokenizer."""
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode([int(token) for token in ids])


def opened(arguments: argparse.Namespace) -> Samples:
    """The training samples of the run that the flags describe."""
    length, seed = arguments.seq_length, arguments.seed
    if arguments.data_schedule:
        return PhasedSamples(read_phases(arguments.data_schedule), window_opener(length, seed, "train", None))
    if arguments.data_order == "megatron":
        needed, cut = arguments.train_samples or arguments.train_iters * arguments.global_batch_size, (arguments.split, 0)
        return megatron_samples(arguments.data_path, length, seed, needed, cut, arguments.data_cache_path)
    return open_samples(arguments.data_path, length, seed, "train", arguments.split)


def samples_of(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> str:
    """The samples that one data-parallel rank reads in one iteration, as the loader would."""
    samples = opened(arguments)
    sizes = BatchSizes(arguments.global_batch_size, tuple(arguments.rampup_batch_size) if arguments.rampup_batch_size else None)
    reader = StepReader(samples, arguments.micro_batch_size, sizes, arguments.rank, arguments.dp, np.iinfo(np.int64).max, None)
    consumed, lines = sizes.samples(arguments.iteration - 1), []
    for microbatch in range(reader.num_microbatches(consumed)):
        for number in reader.sample_numbers(consumed, microbatch):
            source = ""
            if hasattr(samples, "where"):
                which, inside = samples.where(number)
                source = f" = sample {inside} of {samples.sources[which].dataset.prefix}"
            lines.append(f"microbatch {microbatch} sample {number}{source}: {shown(samples[number], tokenizer)}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="inspect_data", description="What is in a .bin/.idx pair", allow_abbrev=False)
    add = result.add_argument
    add("data_path", nargs="*", metavar="PREFIX", help="a prefix; with --iteration whatever --data-path takes")
    add("--document", type=int, nargs="+", metavar="N", help="show these documents, counted from 0")
    add_tokenizer_flags(result, required=False)
    add("--plot", metavar="FILE.png", help="the histogram of lengths as a picture")
    add("--iteration", type=int, help="show the training samples of this iteration, counted from 1")
    add("--rank", type=int, default=0, help="data-parallel rank whose samples are shown (default 0)")
    add("--dp", type=int, default=1, help="data-parallel size of the run (default 1)")
    add("--micro-batch-size", type=int, default=1)
    add("--global-batch-size", type=int, help="default: micro-batch size x dp")
    add("--rampup-batch-size", type=int, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"), help="of the run")
    add("--seq-length", type=int, help="of the run, for --iteration")
    add("--seed", type=int, default=1234, help="of the run (default 1234)")
    add("--split", default="969,30,1", help="of the run (default 969,30,1)")
    add("--data-schedule", metavar="FILE", help="of the run, instead of a prefix")
    add("--data-order", choices=("keyed", "megatron"), default="keyed", help="of the run (default keyed)")
    add("--train-iters", type=int, help="of the run, which decides Megatron's order")
    add("--train-samples", type=int, help="of the run, instead of --train-iters")
    add("--data-cache-path", metavar="FOLDER", help="of the run, for --data-order megatron")
    return result


def problems(arguments: argparse.Namespace) -> list[str]:
    """Everything wrong with the flags."""
    found = []
    if bool(arguments.data_path) == bool(arguments.data_schedule):
        found.append("name a prefix, or with --iteration a --data-schedule; one of them")
    if arguments.iteration is None:
        if arguments.data_schedule or arguments.data_order != "keyed":
            found.append("--data-schedule, --data-order: no effect without --iteration, leave them out")
        if len(arguments.data_path) > 1:
            found.append(f"{' '.join(arguments.data_path)}: one prefix at a time, except with --iteration")
        return found
    if arguments.seq_length is None:
        found.append("--iteration: needs the run's --seq-length")
    lengths = (arguments.train_iters is not None) + (arguments.train_samples is not None)
    if lengths != (arguments.data_order == "megatron"):
        found.append("--data-order megatron needs the run's --train-iters or --train-samples, which say nothing without it")
    if arguments.rampup_batch_size and arguments.train_iters is not None:
        found.append("--rampup-batch-size --train-iters: such a run has --train-samples")
    if arguments.data_schedule and arguments.data_order == "megatron":
        found.append("--data-schedule --data-order megatron: Megatron's order knows no blend that changes")
    for name in ("train_iters", "train_samples", "iteration", "dp", "micro_batch_size", "global_batch_size", "seq_length"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            found.append(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if not 0 <= arguments.rank < max(arguments.dp, 1):
        found.append(f"--rank {arguments.rank}: expected 0 to {arguments.dp - 1}, below --dp")
    per_pass = arguments.micro_batch_size * arguments.dp
    if not found and arguments.global_batch_size and arguments.global_batch_size % per_pass:
        found.append(f"--global-batch-size {arguments.global_batch_size}: not a multiple of micro-batch size x dp = {per_pass}")
    if not found and arguments.rampup_batch_size and not is_ramp(arguments.rampup_batch_size, arguments.global_batch_size):
        found.append("--rampup-batch-size: does not lead to --global-batch-size in equal steps")
    if not found and arguments.rampup_batch_size and any(size % per_pass for size in arguments.rampup_batch_size[:2]):
        found.append(f"--rampup-batch-size: start and increment are no multiples of micro-batch size x dp = {per_pass}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for data that cannot be read, with one line each."""
    arguments = parser().parse_args(argv)
    if found := problems(arguments):
        parser().exit(2, "".join(f"inspect_data: error: {problem}\n" for problem in found))
    arguments.global_batch_size = arguments.global_batch_size or arguments.micro_batch_size * arguments.dp
    try:
        tokenizer = None
        if arguments.tokenizer_type:
            tokenizer = build_tokenizer(**dict(tokenizer_values(arguments)))
        if arguments.iteration is not None:
            print(samples_of(arguments, tokenizer))
            return 0
        dataset = IndexedDataset(read_blend(arguments.data_path)[1][0])
        if arguments.document is None:
            print(statistics(dataset))
        for number in arguments.document or ():
            print(shown(dataset.document(number), tokenizer))
        if arguments.plot:
            plot(dataset, arguments.plot)
    except (DataError, TokenizerError, IndexError, OSError) as error:
        parser().exit(1, f"inspect_data: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
