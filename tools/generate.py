"""Text from a checkpoint.

    python tools/generate.py --load checkpoints --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 40

The checkpoint says which model and tokenizer it was trained with, and may have been saved at any layout. The text goes
to stdout, everything else to stderr.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from megatron_lite.arguments import tokenizer_arguments
from megatron_lite.config import Config
from megatron_lite.errors import ReportedError
from megatron_lite.tokenizers import NullTokenizer, Tokenizer, TokenizerError, build_tokenizer
from megatron_lite.training.generate import Sampling, generate, load_model


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="generate", description="Text from a checkpoint.", allow_abbrev=False)
    add = result.add_argument
    add("--load", required=True, metavar="DIR", help="folder of checkpoints")
    add("--iteration", type=int, metavar="N", help="which one (default: the latest)")
    add("--prompt", required=True, metavar="TEXT", help="what to continue; empty: the start of a document")
    add("--max-new-tokens", type=int, default=200, metavar="N", help="stop after so many (default: %(default)s)")
    add("--temperature", type=float, default=0.8, metavar="X",
        help="0: always the likeliest token (default: %(default)s)")  # fmt: skip
    add("--top-k", type=int, default=40, metavar="N", help="among the N likeliest; 0: all (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="X",
        help="among the likeliest that together have this probability (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=1, metavar="N", help="of the draws (default: %(default)s)")
    add("--tokenizer-model", metavar="PATH", help="where its files are now, if they were moved since training")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    return result


def problems(arguments: argparse.Namespace) -> list[str]:
    """Everything wrong with the flags, each with what would work."""
    a = arguments
    rules = [
        ("--max-new-tokens", a.max_new_tokens, a.max_new_tokens >= 1, "expected 1 or more"),
        ("--temperature", a.temperature, 0 <= a.temperature < float("inf"), "expected 0 or more"),
        ("--top-k", a.top_k, a.top_k >= 0, "expected 0 (all) or more"),
        ("--top-p", a.top_p, 0 < a.top_p <= 1, "expected more than 0, at most 1"),
        ("--seed", a.seed, 0 <= a.seed < 2**63, "expected 0 or more"),
        ("--iteration", a.iteration, a.iteration is None or a.iteration >= 0, "expected 0 or more"),
        ("--device", a.device, a.device != "cuda" or torch.cuda.is_available(), "CUDA is not available here"),
    ]
    return [f"{flag} {value}: {expected}" for flag, value, fine, expected in rules if not fine]


def tokenizer_of(config: Config, moved_to: str | None) -> Tokenizer:
    """The tokenizer of the training. Made-up data has none: its text is ids, and no id ends it."""
    if config.data.tokenizer_type is None:
        return NullTokenizer(config.data.vocab_size)
    if moved_to is not None:
        config = replace(config, data=replace(config.data, tokenizer_model=moved_to))
    return build_tokenizer(*tokenizer_arguments(config))


def end_of(tokenizer: Tokenizer, vocab_size: int) -> int | None:
    """The id that ends a document; None where there is none, and text goes on to --max-new-tokens."""
    try:
        return tokenizer.eod if tokenizer.eod < vocab_size else None
    except TokenizerError:
        return None


def text_from(arguments: argparse.Namespace) -> str:
    """The prompt and what the model makes of it."""
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config, chunks, iteration = load_model(arguments.load, arguments.iteration, device)
    tokenizer = tokenizer_of(config, arguments.tokenizer_model)
    end = end_of(tokenizer, config.data.vocab_size)
    count = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    print(f"iteration {iteration} of {arguments.load}: {count / 1e6:.1f} M parameters on {device}", file=sys.stderr)
    prompt = tokenizer.encode(arguments.prompt)
    start = prompt or ([] if end is None else [end])  # a document starts where the last one ended
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    draws = torch.Generator().manual_seed(arguments.seed)
    return tokenizer.decode([*prompt, *generate(chunks, start, arguments.max_new_tokens, sampling, draws, end)])


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for a checkpoint that cannot be used."""
    arguments = parser().parse_args(argv)
    if found := problems(arguments):
        parser().exit(2, "".join(f"generate: error: {problem}\n" for problem in found))
    try:
        print(text_from(arguments))
    except (ReportedError, OSError) as error:
        parser().exit(1, f"generate: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
