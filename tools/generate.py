"""Text from a checkpoint.

    python tools/generate.py --load checkpoints --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 40
    torchrun --nproc-per-node 2 tools/generate.py --load checkpoints --prompt-file prompts.txt --temperature 0

The checkpoint says which model and tokenizer it was trained with, and may have been saved at any layout; the ranks of
torchrun are tensor-parallel. The text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from megatron_lite.training.generate import GenerateError, Sampling, generate_batch
from tools.shared import Using, add_model_flags, model_rules, open_model, run_tool, world_size

NEW_TOKENS = 200  # unless said otherwise


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="generate", description="Text from a checkpoint.", allow_abbrev=False)
    add = result.add_argument
    add_model_flags(add, "all ranks")
    add("--prompt", action="append", metavar="TEXT",
        help="what to continue, may be given several times; empty: the start of a document")  # fmt: skip
    add("--prompt-file", metavar="FILE", help="more prompts, one per line")
    add("--max-new-tokens", type=int, metavar="N",
        help=f"stop after so many (default: {NEW_TOKENS}, or as many as the model has positions for)")  # fmt: skip
    add("--temperature", type=float, default=0.8, metavar="X",
        help="0: always the likeliest token (default: %(default)s)")  # fmt: skip
    add("--top-k", type=int, default=40, metavar="N", help="among the N likeliest; 0: all (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="X",
        help="among the likeliest that together have this probability (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=1, metavar="N", help="of the draws; prompt i has seed + i (default: %(default)s)")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="prompts at a time (default: %(default)s)")
    add("--slide", action="store_true",
        help="text may outgrow the model's positions; it is then seen through its last tokens")  # fmt: skip
    add("--no-kv-cache", action="store_true", help="compute everything anew for every token: slow, the same text")
    add("--jsonl", action="store_true", help="print a line {prompt, text, tokens} per prompt; text without the prompt")
    return result


def prompts_of(a: argparse.Namespace) -> list[str]:
    """All prompts, those of the command line first."""
    prompts = list(a.prompt or [])
    if a.prompt_file is not None:
        lines = Path(a.prompt_file).read_text(encoding="utf-8").splitlines()
        if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
            raise GenerateError(f"--prompt-file {a.prompt_file}: line {empty[0]} is empty; expected a prompt on every line")
        prompts += lines
    if not prompts:
        raise GenerateError(f"--prompt-file {a.prompt_file}: holds no prompt")
    return prompts


def length_of_text(a: argparse.Namespace, longest: int, positions: int) -> int:
    """New tokens to make after a prompt of `longest` tokens. Refuses what the positions have no room for."""
    room = positions - longest + 1  # the last new token is not read any more
    if a.slide:
        return a.max_new_tokens or NEW_TOKENS
    if room < 1:
        raise GenerateError(f"a prompt has {longest} tokens, but the model's positions end after {positions}: shorten it, or "
                            f"use --slide, which reads its last {positions} tokens only")  # fmt: skip
    if a.max_new_tokens is not None and a.max_new_tokens > room:
        raise GenerateError(f"--max-new-tokens {a.max_new_tokens}: a prompt of {longest} tokens leaves room for {room} within "
                            f"the model's {positions} positions: use {room} or less, or --slide")  # fmt: skip
    return min(a.max_new_tokens or NEW_TOKENS, room)


def continue_all(a: argparse.Namespace, using: Using, starts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The new ids after every start, batch by batch. Tokens per second go to stderr."""
    total = length_of_text(a, max(map(len, starts)), using.config.model.max_position_embeddings)
    sampling, texts, began = Sampling(a.temperature, a.top_k, a.top_p), [[] for _ in starts], time.perf_counter()
    for first in range(0, len(starts), a.micro_batch_size):
        batch = starts[first : first + a.micro_batch_size]
        draws = [torch.Generator().manual_seed((a.seed + first + i) % 2**63) for i in range(len(batch))]
        for tokens in generate_batch(using.chunks, batch, total, sampling, draws, using.end, not a.no_kv_cache):
            for text, token in zip(texts[first:], tokens, strict=False):
                text.extend([] if token is None else [token])
    seconds, made = time.perf_counter() - began, sum(map(len, texts))
    if using.mesh.rank == 0:
        print(f"{made} tokens after {sum(map(len, starts))} of {len(starts)} prompt(s) in {seconds:.2f} s: "
              f"{made / seconds:.1f} tokens/s", file=sys.stderr)  # fmt: skip
    return texts


def write_texts(a: argparse.Namespace) -> None:
    """Prompts in, texts out."""
    prompts = prompts_of(a)
    using = open_model(a, a.tensor_model_parallel_size or world_size())
    encoded = [using.tokenizer.encode(prompt) for prompt in prompts]
    # a document starts where the last one ended
    starts = [ids or ([] if using.end is None else [using.end]) for ids in encoded]
    if [] in starts:
        raise GenerateError("an empty prompt starts a document, but this tokenizer has no id that ends one: "
                            "expected at least one id")  # fmt: skip
    new = continue_all(a, using, starts)
    if using.mesh.rank > 0:
        return
    decode = using.tokenizer.decode
    if a.jsonl:
        for prompt, ids in zip(prompts, new, strict=True):
            print(json.dumps({"prompt": prompt, "text": decode(ids), "tokens": len(ids)}, ensure_ascii=False))
    else:
        print("\n\n".join(decode([*prompt, *ids]) for prompt, ids in zip(encoded, new, strict=True)))


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for a checkpoint or prompt that cannot be used."""
    a = parser().parse_args(argv)
    rules = [
        ("--prompt", a.prompt, a.prompt is not None or a.prompt_file is not None, "expected --prompt or --prompt-file"),
        ("--max-new-tokens", a.max_new_tokens, a.max_new_tokens is None or a.max_new_tokens >= 1, "expected 1 or more"),
        ("--temperature", a.temperature, 0 <= a.temperature < float("inf"), "expected 0 or more"),
        ("--top-k", a.top_k, a.top_k >= 0, "expected 0 (all) or more"),
        ("--top-p", a.top_p, 0 < a.top_p <= 1, "expected more than 0, at most 1"),
        ("--seed", a.seed, 0 <= a.seed < 2**63, "expected 0 or more"),
        ("--micro-batch-size", a.micro_batch_size, a.micro_batch_size >= 1, "expected 1 or more"),
        *model_rules(a, a.tensor_model_parallel_size or world_size(), dp=False),
    ]
    return run_tool(parser(), rules, lambda: write_texts(a))


if __name__ == "__main__":
    sys.exit(main())
