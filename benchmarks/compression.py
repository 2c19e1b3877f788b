"""Bytes of gradients that a rank gives to all-reduces in a step, exactly and with --grad-compression powersgd; and the loss.

    python benchmarks/compression.py                     bytes of some models, at some ranks R
    python benchmarks/compression.py --steps 100         the loss of a small model on text that every Python carries, dp 2

Bytes are counted in the parameters of the model itself (which have no memory here), fp32 on the wire.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.arguments import parse  # noqa: E402
from megatron_lite.comm.launch import WorkerPool  # noqa: E402
from megatron_lite.comm.mesh import build_mesh, single  # noqa: E402
from megatron_lite.config import Config  # noqa: E402
from megatron_lite.data.corpus import python_library_texts  # noqa: E402
from megatron_lite.data.loader import Batch  # noqa: E402
from megatron_lite.optim.buckets import layout  # noqa: E402
from megatron_lite.optim.compress import divide, elements  # noqa: E402
from megatron_lite.pipeline.stage import build_chunks  # noqa: E402
from megatron_lite.planner.pipeline import pipeline_of  # noqa: E402
from megatron_lite.training.setup import build_trainer, grid_of  # noqa: E402
from megatron_lite.training.step import train_step  # noqa: E402

MODELS, RANKS = ("gpt2", "llama3.2-1b", "llama3-8b"), (1, 4, 16, 64)
SMALL = ("--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4 --global-batch-size 16 "
         "--vocab-size 256 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --lr-warmup-iters 10 --lr-decay-style constant "
         "--mock-data --train-iters 1000")  # fmt: skip


def configuration(flags: str, world: int) -> Config:
    config, problems = parse(flags.split(), world)
    if problems:
        raise SystemExit("\n".join(map(str, problems)))
    return config


def step_elements(config: Config, rank: int) -> tuple[int, int]:
    """(exactly, with rank R) elements per step of one process that holds the whole model."""
    chunk = build_chunks(config, single(torch.device("cpu")), pipeline_of(config))[0]
    params = list(chunk.parameters())
    bucket = layout([[(i, p.numel()) for i, p in enumerate(params)]], 1)[0]
    return sum(p.numel() for p in params), sum(elements(*divide(bucket.slots, [params[s.index] for s in bucket.slots], rank)))


def print_bytes() -> None:
    print(f"{'model':<14}{'exact, MB':>12}" + "".join(f"{f'R {rank}, MB':>14}{'less by':>9}" for rank in RANKS))
    for model in MODELS:
        config = configuration(f"--model {model} --seq-length 1024 --micro-batch-size 1 --dry-run", 1)
        counts = [step_elements(config, rank) for rank in RANKS]
        cells = "".join(f"{4e-6 * low:>14.1f}{whole / low:>8.0f}x" for whole, low in counts)
        print(f"{model:<14}{4e-6 * counts[0][0]:>12.1f}{cells}")


def batches(config: Config, text: torch.Tensor, step: int, rank: int, size: int) -> list[Batch]:
    length, micro = config.model.seq_length, config.train.micro_batch_size
    count = config.train.global_batch_size // (micro * size)
    generator = torch.Generator().manual_seed(step * size + rank)
    found = []
    for _ in range(count):
        starts = torch.randint(0, len(text) - length - 1, (micro,), generator=generator).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts])
        found.append(Batch(rows[:, :-1], rows[:, 1:], torch.ones(micro, length)))
    return found


def losses(rank: int, flags: str, steps: int) -> list[float]:
    torch.set_num_threads(1)
    config = configuration(flags, 2)
    mesh = build_mesh(grid_of(config, 2), torch.device("cpu"))
    trainer = build_trainer(config, mesh)
    corpus = "".join(text for _, text in itertools.islice(python_library_texts(), 200)).encode()
    text = torch.frombuffer(bytearray(corpus), dtype=torch.uint8).long()
    return [train_step(trainer, batches(config, text, step, mesh.dp.rank, 2), step, step * 16).loss for step in range(steps)]


def print_losses(steps: int) -> None:
    print(f"mean loss of the last {min(10, steps)} of {steps} steps, dp 2")
    pool = WorkerPool(2)
    for r in (0, 1, 4, 16):
        flags = f" --grad-compression powersgd --grad-compression-rank {r}" if r else ""
        last = pool.run(losses, 2, SMALL + flags, steps, timeout=600.0)[0][-10:]
        print(f"{f'R {r}' if r else 'exact':<8}{sum(last) / len(last):.4f}", flush=True)
    pool.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="steps of training instead of the table of bytes")
    steps = parser.parse_args().steps
    print_losses(steps) if steps else print_bytes()
