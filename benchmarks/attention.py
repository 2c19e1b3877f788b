"""Attention on CPU, forward and backward: the block-causal form at several block sizes beside torch's SDPA.

    python benchmarks/attention.py [--seq 512] [--documents 100] [--out attention.json]

Model W's shape (micro-batch 4, 8 query heads, 4 KV heads, head size 64). Medians of interleaved rounds, in ms; the last
column is SDPA's time over ours. This is what chose the block sizes in models/attention.py.
`--documents L`: the same with attention confined to documents of L tokens in the mean, drawn at random.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from megatron_lite.comm.launch import keep_heap  # noqa: E402
from megatron_lite.data.documents import document_starts  # noqa: E402
from megatron_lite.models import attention  # noqa: E402
from megatron_lite.models.packing import Documents  # noqa: E402

BLOCKS = (32, 64, 128, 256)


def contender(q, k, v, dout, block: int | None, documents: Documents | None = None):
    """A function that runs forward and backward once; `block` None is SDPA."""

    def run() -> None:
        for x in (q, k, v):
            x.grad = None
        if block is not None:
            out = attention._BlockCausal.apply(q, k, v, 0.0, None, block, documents)
        elif documents is None:
            out = attention._sdpa(q, k, v)
        else:
            out = attention._sdpa_by_document(q, k, v, documents)
        out.backward(dout)

    return run


def draw_documents(seq: int, mean: int) -> Documents:
    """Four rows, in which each token ends a document with probability 1 / mean."""
    ends = torch.rand(4, seq, generator=torch.Generator().manual_seed(0)) < 1 / mean
    return Documents(torch.from_numpy(document_starts(ends.long().numpy(), 1)), torch.device("cpu"))


def measure(seq: int, dtype: torch.dtype, rounds: int, documents: Documents | None = None) -> dict[str, float]:
    """Median ms of each contender, and of each within documents."""

    def leaf(heads: int) -> torch.Tensor:
        return torch.randn(seq, 4, 4, heads, 64).to(dtype).requires_grad_()

    q, k, v = leaf(2), leaf(1), leaf(1)
    dout = torch.randn(seq, 4, 4, 2, 64).to(dtype)
    runs = {"SDPA": contender(q, k, v, dout, None)} | {f"blocks of {b}": contender(q, k, v, dout, b) for b in BLOCKS}
    if documents is not None:
        runs |= {"SDPA, documents": contender(q, k, v, dout, None, documents)}
        runs |= {f"blocks of {b}, documents": contender(q, k, v, dout, b, documents) for b in BLOCKS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if n:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(found) for name, found in times.items()}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--documents", type=int, help="mean tokens of a document")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="write the table as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    keep_heap()
    documents = draw_documents(args.seq, args.documents) if args.documents else None
    table = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        table[name] = measure(args.seq, dtype, args.rounds, documents)
        print(f"{name}, {args.seq} tokens, {args.threads} threads")
        for who, ms in table[name].items():
            print(f"  {who:25} {ms:8.2f} ms   SDPA / this {table[name]['SDPA'] / ms:5.2f}")
    if args.out:
        Path(args.out).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
