"""Text -> a byte-level BPE tokenizer in a folder that --tokenizer-type HuggingFaceTokenizer reads.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 32000 --output tokenizers/mine

Every text has ids, since single bytes are among them. The end of a document is the token <|endoftext|>, the last id.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron_lite.data.indexed import DataError
from tools.encode_texts import BadDocument, texts_of
from tools.text_inputs import LIBRARY, has_keys, read_documents, there

EOD = "<|endoftext|>"
LEAST = 257  # the bytes and the end of document


def texts(inputs: list[str], key: str, max_bytes: int | None) -> Iterator[str]:
    """The texts to learn from."""
    for document in read_documents(inputs, (key,), max_bytes):
        yield texts_of(document, (key,))[0]


def train(inputs: list[str], key: str, vocab_size: int, output: str, max_bytes: int | None) -> int:
    """Learn merges and write the folder, all at once; the true vocabulary size, smaller where the text has no more pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=sys.stderr.isatty())  # fmt: skip
    tokenizer.train_from_iterator(texts(inputs, key, max_bytes), trainer)
    tokenizer.add_special_tokens([EOD])
    parent = os.path.dirname(os.path.abspath(output))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        made = os.path.join(folder, "made")
        os.mkdir(made)
        tokenizer.save(os.path.join(made, "tokenizer.json"))
        with open(os.path.join(made, "tokenizer_config.json"), "w", encoding="utf-8") as file:
            json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD}, file, indent=2)
        os.rename(made, output)
    return tokenizer.get_vocab_size()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="train_tokenizer", description="Text -> a BPE tokenizer", allow_abbrev=False)
    add = result.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=f"as tools/preprocess_data.py reads them, or {LIBRARY}")
    add("--json-key", default="text", metavar="KEY", help="key or column to read (default text)")
    add("--vocab-size", type=int, required=True, help="ids, the end of document among them")
    add("--output", required=True, metavar="FOLDER", help="a folder that is not there yet")
    add("--max-bytes", type=int, help="learn from this much text at most; some 100 MB are enough")
    return result


def problems(arguments: argparse.Namespace) -> list[str]:
    """Everything wrong with the flags, each with what would work."""
    found = [f"--input {name}: no such file" for name in arguments.input if not there(name)]
    if arguments.vocab_size < LEAST:
        found.append(f"--vocab-size {arguments.vocab_size}: at least {LEAST}, the bytes and the end of document")
    if os.path.exists(arguments.output):
        found.append(f"--output {arguments.output}: is there already; name another folder, or remove it")
    if arguments.max_bytes is not None and arguments.max_bytes < 1:
        found.append(f"--max-bytes {arguments.max_bytes}: expected 1 or more")
    if arguments.json_key != "text" and not any(map(has_keys, arguments.input)):
        found.append(f"--json-key {arguments.json_key}: no effect on plain text, leave it out")
    return found


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for text that cannot be used, with one line each."""
    arguments = parser().parse_args(argv)
    if found := problems(arguments):
        parser().exit(2, "".join(f"train_tokenizer: error: {problem}\n" for problem in found))
    try:
        size = train(arguments.input, arguments.json_key, arguments.vocab_size, arguments.output, arguments.max_bytes)
    except (DataError, BadDocument, OSError) as error:
        parser().exit(1, f"train_tokenizer: error: {error}\n")
    print(f"{arguments.output}: {size} ids, end of document {size - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
