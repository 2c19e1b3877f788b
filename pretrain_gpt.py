#!/usr/bin/env python3
"""Pretrain a GPT or LLaMA model: arguments -> mesh -> data -> model -> train.

    python pretrain_gpt.py ...                          one process
    torchrun --nproc-per-node 4 pretrain_gpt.py ...     tensor x pipeline x data parallel over 4

The same command line starts a run and resumes it (--load equal to --save).
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from megatron_lite.arguments import format_arguments, format_problems, parse, tokenizer_arguments, with_vocab_size
from megatron_lite.config import Config
from megatron_lite.errors import ReportedError, peer_gone
from megatron_lite.planner.pipeline import pipeline_warnings
from megatron_lite.planner.report import dry_run_report


def say(text: str) -> None:
    print(text, flush=True)


def silent(text: str) -> None:
    pass


def pretrain(config: Config, eod: int | None, encode: Callable | None, started: float) -> None:
    """Join the other ranks, build this rank's share, and train to the end."""
    from megatron_lite.comm import launch  # torch takes a second to import: not needed for a dry run or a bad flag
    from megatron_lite.comm.mesh import build_mesh
    from megatron_lite.training.data import build_splits
    from megatron_lite.training.logging import Interval, build_sinks, check_sinks
    from megatron_lite.training.loop import Run
    from megatron_lite.training.setup import build_trainer, grid_of
    from megatron_lite.training.signals import StopSignal
    from megatron_lite.training.state import hold, restore

    check_sinks(config, say if int(os.environ.get("RANK", 0)) == 0 else silent)
    stop = StopSignal().install()
    splits = build_splits(config, eod, encode)
    rank, world, device = launch.init_from_env(config.parallel.distributed_backend, config.parallel.distributed_timeout_minutes)
    if device.type == "cpu":
        launch.set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        launch.keep_heap()
    tell = say if rank == 0 else silent
    mesh = build_mesh(grid_of(config, world), device)
    home = hold(config, mesh)
    trainer = build_trainer(config, mesh)
    progress, what = restore(trainer, home)
    for line in (*splits.notes, *trainer.settled.notes, what, f"ready to train after {time.time() - started:.1f} s"):
        tell(line)
    sinks = build_sinks(config, rank == 0, progress.wandb_id, progress.iteration)
    try:
        Run(trainer, splits, sinks, Interval(config, mesh), progress, stop, tell, home).train()
    finally:
        sinks.close()


def leave() -> None:
    """Let go of process groups while the interpreter is whole: ended later, by chance of order, their threads abort it."""
    from megatron_lite.comm import launch

    gc.collect()  # parameters and the gradient engine refer to each other, and so hold the groups
    launch.shutdown()


def read_tokenizer(config: Config) -> tuple[Config, int | None, Callable | None]:
    """The configuration with the tokenizer's vocabulary, the id that ends a document, and text -> ids (None without one)."""
    if config.data.tokenizer_type is None:
        return config, None, None
    from megatron_lite.tokenizers import TokenizerError, build_tokenizer

    tokenizer = build_tokenizer(*tokenizer_arguments(config))
    try:
        eod = tokenizer.eod
    except TokenizerError:
        if config.data.needs_eod:
            raise
        eod = None
    return with_vocab_size(config, tokenizer.vocab_size), eod, tokenizer.encode


def main(argv: Sequence[str] | None = None) -> int:
    started = time.time()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    config, problems = parse(sys.argv[1:] if argv is None else argv, world)
    tell = partial(print, file=sys.stderr, flush=True) if rank == 0 else silent
    if problems:
        tell(format_problems(problems))
        return 2
    try:
        config, eod, encode = read_tokenizer(config)
        if config.train.dry_run:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--dry-run | head` ends quietly
            say(dry_run_report(config, config.grid))
            return 0
        if rank == 0:
            say("\n".join([format_arguments(config), *pipeline_warnings(config)]))
        pretrain(config, eod, encode, started)
        leave()
    except ReportedError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    except RuntimeError as error:
        if not peer_gone(error):
            raise
        print(f"rank {rank}: another rank ended during the start", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
