"""A layer of experts beside transformers' Mixtral block, what its dispatch costs, and expert parallelism over modelled links.

    python benchmarks/moe.py --only layer --rounds 5 --out benchmarks/results/moe_layer.json
    python benchmarks/moe.py --only links --out benchmarks/results/moe_links.json

layer      forward and backward of 8 experts, 2 of them for each token; ours and transformers' block, both of its ways to run
           experts, with the same weights and tokens, in turn: in one process, which has our allocator settings, and theirs in a
           second one as they ship. Gradients: theirs are made anew each time, ours are added to zeroed fp32 buffers.
           dispatch: sort, gather and sum of rows, forward and backward, alone with the same routes
links      ep 1 and ep 2, each rank with as many tokens: products take the time that an H100 takes for Mixtral 8x7B's (400
           TFLOP/s, as sleeps), rows as long as they are on a link of 300 GB/s, all twenty times slowed. Twice the tokens should
           take as long: time per token of ep 2 over half of ep 1's. The fuller rank's rows over the mean are a part of it.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock  # noqa: E402

from megatron_lite.comm import collectives  # noqa: E402
from megatron_lite.comm.launch import WorkerPool, keep_heap  # noqa: E402
from megatron_lite.comm.mesh import Axis, build_mesh  # noqa: E402
from megatron_lite.config import ModelConfig  # noqa: E402
from megatron_lite.grid import Grid  # noqa: E402
from megatron_lite.models.moe import MoE  # noqa: E402
from megatron_lite.parallel import grouped  # noqa: E402
from megatron_lite.parallel.expert import Dispatch, ExpertParallel  # noqa: E402
from megatron_lite.parallel.shard import Init, allocate  # noqa: E402
from megatron_lite.parallel.tensor import TensorParallel  # noqa: E402
from megatron_lite.parallel.wgrad import attach_grad_buffers  # noqa: E402

SHAPES = {"W": (512, 1408)}  # hidden, width of an expert: the model of the speed table
CASES = [("W", tokens, dtype) for tokens in (512, 2048) for dtype in (torch.bfloat16, torch.float32)]
EXPERTS, TOPK, WARM = 8, 2, 4
IMPLEMENTATIONS = ("grouped_mm", "eager")  # transformers' default, and its loop over experts


def ours_and_theirs(hidden: int, width: int, dtype: torch.dtype):
    """(our layer, {implementation: transformers' block}) with the same weights."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=EXPERTS,
                                        num_experts_per_tok=TOPK, num_attention_heads=8)  # fmt: skip
    blocks = {}
    for name in IMPLEMENTATIONS:
        config._experts_implementation = name
        blocks[name] = MixtralSparseMoeBlock(config).to(dtype)
        for param in blocks[name].parameters():
            torch.nn.init.normal_(param, 0.0, 0.02, generator=torch.Generator().manual_seed(param.numel()))
    theirs = next(iter(blocks.values()))
    layer = our_layer(hidden, width, dtype)
    with torch.no_grad():
        layer.router.weight.copy_(theirs.gate.weight)
        layer.up.copy_(theirs.experts.gate_up_proj.flatten(0, 1))
        layer.down.copy_(theirs.experts.down_proj.flatten(0, 1))
    return layer, blocks


def our_layer(hidden: int, width: int, dtype: torch.dtype, experts: ExpertParallel | None = None) -> MoE:
    model = ModelConfig(hidden_size=hidden, num_experts=EXPERTS, moe_router_topk=TOPK, moe_ffn_hidden_size=width, swiglu=True,
                        disable_bias_linear=True)  # fmt: skip
    tp = TensorParallel(Axis("tp"), False, dtype, torch.device("cpu"))
    layer = MoE("mlp", model, tp, experts or ExpertParallel(), Init("normal", 0.02), Init("normal", 0.02))
    for param in layer.parameters():
        allocate(param)
        param.data.normal_(0.0, 0.02)
    attach_grad_buffers(layer.parameters())
    return layer


def contenders(shape: str, tokens: int, dtype: torch.dtype) -> dict:
    """{name: a function that runs forward and backward once}: our layer, theirs, our dispatch alone."""
    hidden, width = SHAPES[shape]
    layer, blocks = ours_and_theirs(hidden, width, dtype)
    x, dy = (torch.randn(tokens, 1, hidden).to(dtype) for _ in range(2))

    def once(module) -> torch.Tensor:
        mine = x.detach().requires_grad_()
        out = module(mine)
        out.backward(dy)
        return out

    def ours() -> torch.Tensor:
        for param in layer.parameters():
            param.main_grad.zero_()
        return once(layer)

    def theirs(block) -> torch.Tensor:
        for param in block.parameters():
            param.grad = None
        return once(block)

    with torch.no_grad():
        routes = layer.router(x, None)

    def dispatch() -> None:
        way = Dispatch(routes.chosen, None, EXPERTS, Axis("ep"))
        rows = way.of_tokens(x.flatten(0, 1))  # there
        way.of_weights(routes.weights)
        way.sum_of_tokens(rows)  # home
        rows = way.of_tokens(dy.flatten(0, 1))  # the same in the backward
        way.to_weights(routes.weights.flatten())
        way.sum_of_tokens(rows)

    exact = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for block in blocks.values():  # their router is in bf16, ours in fp32: a few tokens of a hundred choose otherwise there
        out, expected = ours(), theirs(block)
        near = (out - expected).abs().amax(2) <= exact * expected.abs().max()
        assert near.float().mean() > 0.95, "they do not compute the same"
    return {"ours": ours} | {name: partial(theirs, block) for name, block in blocks.items()} | {"dispatch": dispatch}


def layer_times(rank: int, shape: str, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, in turn; rank 0 has our allocator settings, rank 1 runs theirs as they ship. One at a time."""
    if rank == 0:
        keep_heap()
    runs = contenders(shape, tokens, dtype)
    if rank == 1:
        runs = {f"{name}, as it ships": runs[name] for name in IMPLEMENTATIONS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(WARM + rounds):
        for turn in range(2):
            dist.barrier()
            for name, run in runs.items() if turn == rank else ():
                started = time.perf_counter()
                run()
                if n >= WARM:
                    times[name].append(1e3 * (time.perf_counter() - started))
    return times


# ---------------------------------------------------------------------------------------------------------- modelled links

TFLOPS, SLOWED, LINK = 400e12, 20, 300e9  # of a device; bytes/s between two of them
WIDE = (4096, 14336)  # what a row costs: Mixtral 8x7B's
NARROW = 64  # what a row is made of here


class Product:
    """In place of a grouped product: rows of zeros after the time that the device would take."""

    def __init__(self, flops_per_row: float):
        self.seconds = SLOWED * flops_per_row / TFLOPS

    def __call__(self, x, weights, groups, out: int):
        end = time.perf_counter() + self.seconds * x.shape[0]
        made = x.new_zeros(x.shape[0], out)
        time.sleep(max(0.0, end - time.perf_counter()))
        return made


class Link:
    """A transport that is done when a link of LINK bytes/s would be: rows count as WIDE."""

    def __init__(self, handle, rows: int):
        self.handle, self.end = handle, time.perf_counter() + SLOWED * rows * WIDE[0] * 2 / LINK

    @property
    def result(self) -> torch.Tensor:
        return self.handle.result

    def wait(self) -> torch.Tensor:
        found = self.handle.wait()
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return found


def modelled(rank: int, ranks: int, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """(seconds of forward and backward, rows of the fuller rank over their mean) of each round."""
    mesh = build_mesh(Grid(dp=ranks, ep=ranks), torch.device("cpu"))
    torch.set_num_threads(1)
    layer = our_layer(NARROW, NARROW, torch.float32, ExpertParallel(mesh.ep))
    up, down = Product(2 * WIDE[0] * 2 * WIDE[1]), Product(2 * WIDE[0] * WIDE[1])
    start, seconds, shares = collectives.start_exchange_rows, [], []

    def product(x, weights, groups):
        return (up if weights.shape[1] == 2 * NARROW else down)(x, weights, groups, weights.shape[1])

    def input_grad(dy, weights, groups):
        return (up if weights.shape[1] == 2 * NARROW else down)(dy, weights, groups, weights.shape[2])

    def weight_grad(grad, dy, x, groups):
        (up if grad.shape[1] == 2 * NARROW else down)(x, grad, groups, 1)

    def exchange(x, axis, rows):
        away = sum(n for q, n in enumerate(rows[axis.rank]) if q != axis.rank)
        return Link(start(x, axis, rows), away) if x.dim() > 1 else start(x, axis, rows)

    saved = grouped.linear, grouped.input_grad, grouped.add_weight_grad
    try:
        grouped.linear, grouped.input_grad, grouped.add_weight_grad = product, input_grad, weight_grad
        collectives.start_exchange_rows = exchange
        generator = torch.Generator().manual_seed(rank)
        for _ in range(rounds + 1):
            x = torch.randn(tokens, 1, NARROW, generator=generator).requires_grad_()
            collectives.barrier(mesh.world)
            started = time.perf_counter()
            out = layer(x)
            out.backward(torch.ones_like(out))
            collectives.barrier(mesh.world)
            seconds.append(time.perf_counter() - started)
            with torch.no_grad():
                rows = torch.bincount(layer.router(x, None).chosen.flatten() // (EXPERTS // ranks), minlength=ranks).double()
            collectives.all_reduce(rows, mesh.ep)
            shares.append(float(rows.max() / rows.mean()))
    finally:
        grouped.linear, grouped.input_grad, grouped.add_weight_grad = saved
        collectives.start_exchange_rows = start
    return seconds[1:], shares[1:]


def link_times(rounds: int, tokens: int = 1024) -> dict:
    """Time per token of ep 1 and 2, each rank with `tokens`."""
    pool = WorkerPool(2)
    try:
        found = {ranks: pool.run(modelled, ranks, ranks, tokens, rounds)[0] for ranks in (1, 2)}
    finally:
        pool.shutdown()
    alone, shared = (statistics.median(found[ranks][0]) / (ranks * tokens) for ranks in (1, 2))
    return {"tokens_per_rank": tokens, "us_per_token_ep1": 1e6 * alone, "us_per_token_ep2": 1e6 * shared,
            "over_half": shared / (alone / 2), "fuller_rank": statistics.median(found[2][1])}  # fmt: skip


def layer_row(shape: str, tokens: int, dtype: torch.dtype, rounds: int) -> dict:
    """Medians, and how many times faster ours is: the median over rounds of the ratio within one."""
    pool = WorkerPool(2, threads=torch.get_num_threads())
    try:
        first, second = pool.run(layer_times, 2, shape, tokens, dtype, rounds, timeout=600.0)
    finally:
        pool.shutdown()
    times = first | second
    medians = {name: statistics.median(own) for name, own in times.items()}
    ratios = {name: statistics.median(b / a for a, b in zip(times["ours"], own, strict=True))
              for name, own in times.items() if name not in ("ours", "dispatch")}  # fmt: skip
    share = 100 * medians["dispatch"] / medians["ours"]
    theirs = " | ".join(f"{name} {medians[name]:.1f} ms, {ratio:.2f} x" for name, ratio in ratios.items())
    print(f"{shape:5} {tokens:5} tokens {str(dtype)[6:]:9} ours {medians['ours']:7.1f} ms, dispatch {share:.1f} % of it; "
          f"transformers: {theirs}", flush=True)  # fmt: skip
    return {"shape": shape, "hidden": SHAPES[shape][0], "width": SHAPES[shape][1], "tokens": tokens, "dtype": str(dtype)[6:],
            "ms": medians, "times_faster": ratios, "dispatch_percent": share}  # fmt: skip


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=("layer", "links"), default=("layer", "links"))
    parser.add_argument("--out", help="write everything measured to this JSON file")
    arguments = parser.parse_args(argv)
    report: dict = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads(),
                    "layer": [], "links": None}  # fmt: skip
    for case in CASES if "layer" in arguments.only else ():
        report["layer"].append(layer_row(*case, arguments.rounds))
    if "links" in arguments.only:
        report["links"] = found = link_times(arguments.rounds)
        print(f"links: ep 1 {found['us_per_token_ep1']:.1f} us a token, ep 2 {found['us_per_token_ep2']:.1f}: "
              f"{found['over_half']:.3f} of half; fuller rank {found['fuller_rank']:.3f} of the mean")  # fmt: skip
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
