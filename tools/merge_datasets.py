"""Several .bin/.idx pairs -> one, their documents one after another.

    python tools/merge_datasets.py --input data/part0_text_document data/part1_text_document --output-prefix data/all

Nothing is held in memory but the index (12 bytes per document), and nothing appears under the output prefix unless
everything went well. Parts need one tokenizer, and so one dtype.
"""

import argparse
import os
import sys
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.tokenizers.fingerprint import keep, kept, same


def merge(prefixes: list[str], output: str) -> IndexedDataset:
    """Write all documents of `prefixes`, in that order, under `output`. Raises DataError where they do not go together."""
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise DataError(f"{part.prefix}.idx: tokens are {part.dtype}, those of {parts[0].prefix} are {parts[0].dtype}: "
                            "made with vocabularies of other sizes")  # fmt: skip
        if os.path.realpath(part.prefix) == os.path.realpath(output):
            raise DataError(f"--output-prefix {output}: is one of the inputs, and would be lost if this were cut short")
    made = [(part.prefix, tokenizer) for part in parts if (tokenizer := kept(part.prefix)) is not None]
    for prefix, tokenizer in made:
        if not same(tokenizer, made[0][1]):
            raise DataError(f"{prefix}: made with tokenizer {tokenizer}, but {made[0][0]} with {made[0][1]}")
    with IndexedWriter(output, parts[0].dtype) as writer:
        for part in parts:
            writer.extend(part)
    if made:
        keep(output, made[0][1])
    return IndexedDataset(output)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="merge_datasets", description="Several .bin/.idx pairs -> one", allow_abbrev=False)
    result.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="prefixes, in the order of the result")
    result.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and .idx")
    return result


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 1 for data that cannot be merged, with one line."""
    arguments = parser().parse_args(argv)
    try:
        merged = merge(arguments.input, arguments.output_prefix)
    except (DataError, OSError) as error:
        parser().exit(1, f"merge_datasets: error: {error}\n")
    parts, documents = len(arguments.input), merged.num_documents
    print(f"{arguments.output_prefix}: {parts} parts, {documents} documents, {merged.num_tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
