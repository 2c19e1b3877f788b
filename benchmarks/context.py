"""Shared sequences (--context-parallel-size) on CPU ranks: equal work, memory, what the wires cost, and 128k tokens.

    python benchmarks/context.py [work kernels memory overlap long] [--json benchmarks/results/context.json]

work      pairs of a query and a key per rank and step of a ring, zigzag beside contiguous parts; and the time of each
kernels   the two kernels of models/partial_attention.py, forward and backward, one thread
memory    bytes that autograd keeps of a layer on each rank, at cp 1, 2 and 4
overlap   a ring's hop alone, a block's compute, and how long ranks wait for hops that are under way while they compute. A rank
          that waits for one that is still computing does not wait for the wires; a hop counts from when it was sent
long      one training step on 131072 tokens, with the data segment of each process limited to what it had at the start and
          some more (RLIMIT_DATA): on one rank, and on 4 with the ring
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.arguments import parse  # noqa: E402
from megatron_lite.comm import collectives as comm  # noqa: E402
from megatron_lite.comm.launch import RankError, WorkerPool  # noqa: E402
from megatron_lite.comm.mesh import build_mesh, single  # noqa: E402
from megatron_lite.comm.ring import start_shift  # noqa: E402
from megatron_lite.config import Config  # noqa: E402
from megatron_lite.data.loader import Batch  # noqa: E402
from megatron_lite.grid import Grid  # noqa: E402
from megatron_lite.models import context_attention  # noqa: E402
from megatron_lite.models.partial_attention import BLOCK_ROWS, Blocks, Flash, Grads  # noqa: E402
from megatron_lite.parallel.context import Places, pieces, zigzag  # noqa: E402
from megatron_lite.pipeline.stage import build_chunks  # noqa: E402
from megatron_lite.planner.pipeline import pipeline_of  # noqa: E402
from megatron_lite.training.ledger import Meter  # noqa: E402
from megatron_lite.training.setup import build_trainer, grid_of, peak_memory  # noqa: E402
from megatron_lite.training.step import train_step  # noqa: E402

CPU = torch.device("cpu")
CHUNK = 1024  # tokens of a chunk where work is counted and timed
MODEL = ("--hidden-size 256 --num-attention-heads 8 --swiglu --ffn-hidden-size 704 --normalization RMSNorm --vocab-size 256 "
         "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 "
         "--hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --train-iters 1 --mock-data")  # fmt: skip
LONG = ("--num-layers 1 --hidden-size 64 --num-attention-heads 1 --swiglu --ffn-hidden-size 176 --normalization RMSNorm "
        "--vocab-size 256 --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
        "--micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --train-iters 1 --mock-data "
        "--seq-length 131072")  # fmt: skip
LONG_RANKS = 4
MORE_BYTES = 512 << 20  # that a rank of the long run may add to its data segment


def configuration(flags: str, world: int) -> Config:
    config, problems = parse(flags.split(), world)
    assert not problems, problems
    return config


def table(head: list[str], rows: list[list[str]], widths: list[int]) -> None:
    """The first column to the left, the others to the right."""
    lines = ["".join([line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))])
             for line in (head, *rows)]  # fmt: skip
    print("\n".join([lines[0], "-" * len(lines[0]), *lines[1:], ""]), flush=True)


# ---------------------------------------------------------------------------------------------------------------------


def contiguous(rank: int, size: int, length: int) -> Places:
    return Places(((rank * length // size, length // size),))


def tensors(kernel, tokens: int, groups: int, per_group: int, d: int, dtype: torch.dtype) -> tuple:
    """Folded q, dout and kv, and room for the gradients."""
    q, dout, k, v = (torch.randn(tokens, 1, groups, heads, d).mul_(0.3).to(dtype) for heads in (per_group, per_group, 1, 1))
    q, kv = kernel.fold(q), kernel.fold_keys(k, v)
    wide = torch.promote_types(dtype, torch.float32)
    return q, kernel.fold(dout), kv, Grads(torch.zeros(q.shape, dtype=wide), torch.zeros(kv.shape, dtype=wide))


def block(kernel, q, dout, kv, grads, queries: Places, keys: Places) -> Callable[[], None]:
    """Forward and backward of one block. Sums are those of the queries' own keys, so that every block merges into some."""
    sums = kernel.sums(q)
    kernel.add(sums, q, kv, queries, queries, None)
    out = sums.out.to(q.dtype)

    def run() -> None:
        kernel.add(sums, q, kv, queries, keys, None)
        kernel.differentiate(grads, kernel.whole(dout, out, sums.lse), q, kv, queries, keys, None)

    return run


def seconds(run: Callable[[], None], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_work() -> list[dict]:
    rows = []
    torch.set_num_threads(1)
    for name, cut in (("zigzag", zigzag), ("contiguous", contiguous)):
        for size in (2, 4, 8):
            length = 2 * size * CHUNK
            held = [cut(rank, size, length) for rank in range(size)]
            pairs = [[sum(piece.pairs for piece in pieces(held[rank], held[rank - step])) for rank in range(size)]
                     for step in range(size)]  # fmt: skip
            flat = [count for step in pairs for count in step]
            row = {"cut": name, "cp": size, "pairs": pairs, "least_over_most": min(flat) / max(flat),
                   "efficiency": sum(flat) / (size * sum(map(max, pairs)))}  # fmt: skip
            if size == 4:
                kernel = Flash(1)
                given = tensors(kernel, 2 * CHUNK, 2, 1, 64, torch.float32)
                row["milliseconds"] = [[1e3 * seconds(block(kernel, *given, held[rank], held[rank - step]), 3)
                                        for rank in range(size)] for step in range(size)]  # fmt: skip
            rows.append(row)
    print(f"work of a rank and step, chunks of {CHUNK} tokens; efficiency: all work over cp x the busiest rank of each step")
    cells = [[r["cut"], str(r["cp"]), f"{r['least_over_most']:.4f}", f"{100 * r['efficiency']:.1f}%"] for r in rows]
    table(["cut", "cp", "least/most pairs", "efficiency"], cells, [14, 4, 18, 12])
    for row in rows:
        if "milliseconds" in row:
            print(f"{row['cut']}, cp 4: ms of forward and backward (fp32, 2 heads of 64), a line a step, a column a rank")
            print("\n".join("  " + "".join(f"{ms:>8.1f}" for ms in step) for step in row["milliseconds"]) + "\n", flush=True)
    return rows


def measure_kernels() -> list[dict]:
    rows = []
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, groups, per_group, d in ((2048, 2, 1, 64), (2048, 2, 4, 64), (8192, 1, 1, 64), (4096, 2, 2, 128)):
            row = {"dtype": str(dtype).split(".")[1], "tokens": tokens, "heads": groups * per_group, "kv_heads": groups, "d": d}
            for name, kernel in (("blocks", Blocks(per_group, BLOCK_ROWS[dtype])), ("flash", Flash(per_group))):
                own = zigzag(0, 2, 2 * tokens)
                given = tensors(kernel, tokens, groups, per_group, d, dtype)
                row[name] = 1e3 * seconds(block(kernel, *given, own, own), 3)
            rows.append(row)
    print("forward and backward of one causal block, ms, one thread")
    cells = [[r["dtype"], *(str(r[key]) for key in ("tokens", "heads", "kv_heads", "d")), f"{r['blocks']:.1f}",
              f"{r['flash']:.1f}", f"{r['blocks'] / r['flash']:.2f}"] for r in rows]  # fmt: skip
    table(["dtype", "tokens", "heads", "kv", "d", "blocks", "flash", "ratio"], cells, [10, 8, 8, 6, 6, 10, 10, 8])
    return rows


# ---------------------------------------------------------------------------------------------------------------------


def kept(rank: int, world: int, flags: str) -> tuple[int, int]:
    """(bytes of one layer, all bytes) that autograd keeps of this rank's part of a sequence."""
    sizes = []
    for layers in (2, 1):
        config = configuration(f"{flags} --num-layers {layers}", world)
        mesh = build_mesh(grid_of(config, world), CPU) if world > 1 else single()
        chunk = build_chunks(config, mesh, pipeline_of(config))[0].initialise(1)
        meter, ids = Meter(chunk.parameters()), torch.zeros(1, config.model.seq_length // world)
        with meter.watching():
            _loss = chunk(ids.long(), ids.long(), ids + 1)
        sizes.append(meter.live)
        del _loss
    return sizes[0] - sizes[1], sizes[0]


def measure_memory(pool: WorkerPool) -> list[dict]:
    rows = []
    for kind in ("p2p", "a2a", "allgather"):
        for size in (1, 2, 4):
            shared = f"--context-parallel-size {size} --cp-comm-type {kind}" if size > 1 else ""
            answers = pool.run(kept, size, size, f"{MODEL} --seq-length 4096 --bf16 {shared}", timeout=600)
            layer, whole = (max(column) for column in zip(*answers, strict=True))
            rows.append({"kind": kind, "cp": size, "layer": layer, "all": whole})
            first = next(row for row in rows if row["kind"] == kind)
            rows[-1] |= {"layer_error_percent": 100 * (layer * size / first["layer"] - 1),
                         "error_percent": 100 * (whole * size / first["all"] - 1)}  # fmt: skip
    print("bytes kept for the backward, 4096 tokens in bf16, per rank; difference from 1/cp of one rank's")
    table(["way", "cp", "one layer", "differs", "2 layers + ends", "differs"],
          [[r["kind"], str(r["cp"]), f"{r['layer'] / 2**20:.2f} MiB", f"{r['layer_error_percent']:+.2f}%",
            f"{r['all'] / 2**20:.2f} MiB", f"{r['error_percent']:+.2f}%"] for r in rows], [11, 4, 13, 10, 17, 10])  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------------------------------


def timed_ring(rank: int, size: int, tokens: int, heads: int, shared: bool, rounds: int) -> dict:
    """Of a ring's forward and backward: (sent, asked for, there) of every hop, in order; and hops with nothing else to do."""
    axis = build_mesh(Grid(cp=size), CPU, shared).cp
    q, k, v, dout = (torch.randn(tokens, 1, heads, 1, 64) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    hops: list[list[float]] = []
    shift = start_shift

    def noted(x: torch.Tensor, axis):
        times = [time.perf_counter()]
        handle = shift(x, axis)
        wait = handle.wait

        def waited() -> torch.Tensor:
            times.append(time.perf_counter())
            found = wait()
            times.append(time.perf_counter())
            return found

        handle.wait = waited
        hops.append(times)
        return handle

    context_attention.start_shift = noted
    runs, alone = [], []
    for _ in range(rounds):
        comm.barrier(axis)
        hops.clear()
        started = time.perf_counter()
        context_attention._Ring.apply(q, k, v, axis, None).backward(dout)
        runs.append({"seconds": time.perf_counter() - started, "hops": [list(times) for times in hops]})
    context_attention.start_shift = shift
    message = torch.randn(2, heads, tokens, 64)
    for _ in range(20):
        comm.barrier(axis)
        started = time.perf_counter()
        handle = shift(message, axis)
        sent = time.perf_counter()
        handle.wait()
        alone.append((time.perf_counter() - started, sent - started))
        handle.let_go()
    return {"runs": runs[1:], "alone": alone[2:]}


def measure_overlap(pool: WorkerPool) -> list[dict]:
    rows, size = [], 2
    for shared in (True, False):
        for tokens, heads in ((512, 16), (1024, 16), (2048, 16), (4096, 16)):
            answers = pool.run(timed_ring, size, size, tokens, heads, shared, 6, timeout=600)
            alone = statistics.median(times[0] for a in answers for times in a["alone"])
            own = statistics.median(times[1] for a in answers for times in a["alone"])
            exposed, waits = [], []
            count = len(answers[0]["runs"][0]["hops"])
            for n in range(len(answers[0]["runs"])):
                for rank in range(size):
                    mine, theirs = (answers[r]["runs"][n]["hops"] for r in (rank, (rank - 1) % size))
                    late = [there - max(asked, other[0]) for (_, asked, there), other in zip(mine, theirs, strict=True)]
                    waits.append(sum(there - asked for _, asked, there in mine))
                    exposed.append(sum(late))
            whole = statistics.median(run["seconds"] for a in answers for run in a["runs"])
            row = {"transport": "shared memory" if shared else "gloo", "tokens": tokens, "heads": heads, "hops": count,
                   "step_ms": 1e3 * whole / (2 * size), "alone_ms": 1e3 * alone, "own_ms": 1e3 * own,
                   "waits_ms": 1e3 * statistics.median(waits), "exposed_ms": 1e3 * statistics.median(exposed),
                   "hidden_percent": 100 * (1 - statistics.median(exposed) / (count * alone))}  # fmt: skip
            rows.append(row)
    print(f"a ring of {size}, fp32, 16 heads of 64; ms of one hop alone, of it the sender's own time, a step's work; of a\n"
          "forward and a backward the waiting, and the waiting for hops under way; hidden: the rest of all hops' time")
    times = ("alone_ms", "own_ms", "step_ms", "waits_ms", "exposed_ms")
    cells = [[r["transport"], *(str(r[key]) for key in ("tokens", "hops")), *(f"{r[key]:.2f}" for key in times),
              f"{r['hidden_percent']:.1f}%"] for r in rows]  # fmt: skip
    head = ["transport", "tokens/rank", "hops", "hop", "own", "step", "waits", "for hops", "hidden"]
    table(head, cells, [15, 12, 6, 8, 8, 9, 9, 10, 9])
    return rows


# ---------------------------------------------------------------------------------------------------------------------


def data_segment() -> int:
    """Bytes of this process's private writable memory, which RLIMIT_DATA limits. Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def train_long(rank: int, world: int, flags: str) -> dict:
    config = configuration(flags, world)
    mesh = build_mesh(grid_of(config, world), CPU) if world > 1 else single()
    trainer = build_trainer(config, mesh)
    ids = torch.randint(256, (1, config.model.seq_length + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(1, config.model.seq_length))
    before = data_segment()
    resource.setrlimit(resource.RLIMIT_DATA, (before + MORE_BYTES, resource.RLIM_INFINITY))
    started = time.perf_counter()
    try:
        report = train_step(trainer, [batch], 0, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"loss": report.loss, "norm": report.grad_norm, "seconds": time.perf_counter() - started, "resident": peak_memory(CPU)}


def measure_long() -> list[dict]:
    rows = []
    print(f"one training step on 131072 tokens; each rank may add {MORE_BYTES >> 20} MiB to its data segment", flush=True)
    for world, shared in ((1, ""), (LONG_RANKS, f"--context-parallel-size {LONG_RANKS}")):
        pool = WorkerPool(world, max(1, (torch.get_num_threads() if world == 1 else 1)))
        started = time.perf_counter()
        try:
            answer = pool.run(train_long, world, world, f"{LONG} {shared}", timeout=600)[0]
            rows.append({"ranks": world, "outcome": "trained", **answer})
            found = f"loss {answer['loss']:.4f}, gradient norm {answer['norm']:.4f}"
            print(f"  {world} rank(s): {found}, {answer['seconds']:.1f} s", flush=True)
        except RankError as error:
            reason = error.traceback_text.strip().splitlines()[-1]
            rows.append({"ranks": world, "outcome": "refused", "reason": reason})
            print(f"  {world} rank(s): refused after {time.perf_counter() - started:.1f} s: {reason[:160]}", flush=True)
        finally:
            pool.shutdown()
    print()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["work", "kernels", "memory", "overlap", "long"]
    parser.add_argument("parts", nargs="*", choices=[*every, []], default=every, help="tables to make (default: all)")
    parser.add_argument("--json", type=Path, help="also write the tables here; others of an earlier call are kept")
    args = parser.parse_args()
    threads, found = torch.get_num_threads(), {}
    pool = WorkerPool(4)
    makers = {"work": measure_work, "kernels": measure_kernels, "memory": lambda: measure_memory(pool),
              "overlap": lambda: measure_overlap(pool), "long": measure_long}  # fmt: skip
    for name in args.parts:
        torch.set_num_threads(threads)
        found[name] = makers[name]()
    pool.shutdown()
    if args.json:
        before = json.loads(args.json.read_text()) if args.json.exists() else {}
        same = before if before.get("torch") == torch.__version__ else {}
        args.json.write_text(json.dumps(same | {"torch": torch.__version__} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
