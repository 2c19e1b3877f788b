"""What generate.py and evaluate.py share: a checkpoint as a model over the ranks that torchrun started, and its tokenizer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_lite.arguments import tokenizer_arguments
from megatron_lite.comm import launch
from megatron_lite.comm.mesh import Mesh, build_mesh
from megatron_lite.config import Config
from megatron_lite.errors import ReportedError
from megatron_lite.grid import Grid
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.tokenizers import NullTokenizer, Tokenizer, TokenizerError, build_tokenizer
from megatron_lite.training.generate import load_model

Rule = tuple[str, object, bool, str]  # flag, value, whether it is fine, what would be


class Using(NamedTuple):
    """A model that is loaded, and what its ids mean. `end` is the id that ends a document, None where there is none."""

    config: Config
    chunks: list[TransformerStage]
    mesh: Mesh
    tokenizer: Tokenizer
    end: int | None


def world_size() -> int:
    """Ranks that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def add_model_flags(add: Callable[..., object], tp_default: str) -> None:
    """Which checkpoint, where, and cut how."""
    add("--load", required=True, metavar="DIR", help="folder of checkpoints")
    add("--iteration", type=int, metavar="N", help="which one (default: the latest)")
    add("--tokenizer-model", metavar="PATH", help="where its files are now, if they were moved since training")
    add("--tensor-model-parallel-size", type=int, metavar="N", help=f"ranks that share the model (default: {tp_default})")
    add("--pipeline-model-parallel-size", type=int, default=1, help=argparse.SUPPRESS)
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def model_rules(a: argparse.Namespace, tp: int, dp: bool) -> list[Rule]:
    """What can be wrong with these flags. `dp`: whether ranks beyond tp have work."""
    world = world_size()
    sizes = [n for n in range(1, world + 1) if world % n == 0] if dp else [world]
    fits = f"the launcher started {world} rank(s): expected {' or '.join(map(str, sizes))}"
    return [
        ("--iteration", a.iteration, a.iteration is None or a.iteration >= 0, "expected 0 or more"),
        ("--tensor-model-parallel-size", tp, tp in sizes, fits),
        ("--pipeline-model-parallel-size", a.pipeline_model_parallel_size, a.pipeline_model_parallel_size == 1,
         "models are used without a pipeline; a checkpoint of any layout loads: use --tensor-model-parallel-size alone"),
        ("--device", a.device, a.device != "cuda" or torch.cuda.is_available(), "CUDA is not available here"),
    ]  # fmt: skip


def open_model(a: argparse.Namespace, tp: int) -> Using:
    """Join the other ranks and load. Collective."""
    rank, world, device = launch.init_from_env("gloo" if a.device == "cpu" else None)
    if device.type == "cpu" and world > 1:
        launch.set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    mesh = build_mesh(Grid(tp=tp, dp=world // tp), device)
    config, chunks, iteration = load_model(a.load, a.iteration, mesh)
    tokenizer = tokenizer_of(config, a.tokenizer_model)
    if rank == 0:
        count = sum(param.numel() for chunk in chunks for param in chunk.parameters())
        each = f" on each of {tp} tensor-parallel ranks" if tp > 1 else ""
        print(f"iteration {iteration} of {a.load}: {count / 1e6:.1f} M parameters on {device}{each}", file=sys.stderr)
    return Using(config, chunks, mesh, tokenizer, end_of(tokenizer, config.data.vocab_size))


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


def run_tool(parser: argparse.ArgumentParser, rules: list[Rule], work: Callable[[], None]) -> int:
    """`work`, unless a rule is broken. Exits with 2 for wrong flags, 1 for what cannot be done, in words."""
    rank, name = int(os.environ.get("RANK", 0)), parser.prog
    if broken := [f"{name}: error: {flag} {value}: {expected}\n" for flag, value, fine, expected in rules if not fine]:
        parser.exit(2, "".join(broken) if rank == 0 else None)
    try:
        work()
    except (ReportedError, OSError, UnicodeDecodeError) as error:
        where = f"rank {rank}: " if world_size() > 1 else ""
        parser.exit(1, f"{name}: error: {where}{error}\n")
    finally:
        launch.shutdown()
    return 0
