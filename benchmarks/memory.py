"""Bytes: what a rank holds, measured, beside the formulas of the planner.

    python benchmarks/memory.py --json benchmarks/results/memory.json        activations per layer, and state, 4 ranks
    python benchmarks/memory.py --article --json benchmarks/results/memory_article.json
                                                                            accumulation x bf16 x recompute, 1 rank

The first table: bytes that autograd keeps of one layer and microbatch (tensors counted by storage as they are saved), in
bf16 with dropout, for one rank, tp 4, and tp 4 with sequence parallelism, by what is recomputed. `s b h` is the unit of
Korthikanti et al. 2022, who leave attention's own values out for a flash kernel; the block-causal core of CPU keeps half
of the s x s probabilities and dropout factors as well, and so has a column with and one without.

The second: a small model trained on text that every Python carries, in a process of its own per row. Baseline: fp32, the
batch in one piece, everything kept. Then micro-batches of 2, bf16 with fp32 masters, and full recomputation together.
"""

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.arguments import parse  # noqa: E402
from megatron_lite.comm.launch import WorkerPool  # noqa: E402
from megatron_lite.comm.mesh import build_mesh, single  # noqa: E402
from megatron_lite.config import ActivationConfig, Config  # noqa: E402
from megatron_lite.data.corpus import python_library_texts  # noqa: E402
from megatron_lite.data.loader import Batch  # noqa: E402
from megatron_lite.pipeline.stage import build_chunks  # noqa: E402
from megatron_lite.planner.memory import chunk_bytes  # noqa: E402
from megatron_lite.planner.params import count_parameters  # noqa: E402
from megatron_lite.planner.pipeline import pipeline_of  # noqa: E402
from megatron_lite.rng import DropoutKey  # noqa: E402
from megatron_lite.training.ledger import Meter  # noqa: E402
from megatron_lite.training.setup import build_trainer, grid_of, peak_memory  # noqa: E402
from megatron_lite.training.step import train_step  # noqa: E402

MODELS = {
    "gpt": "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 1024",
    "llama": "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 1024 --swiglu "
             "--ffn-hidden-size 704 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
             "--group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights",
}  # fmt: skip
FORMS = {
    "none": ActivationConfig(),
    "core_attn": ActivationConfig("selective"),
    "core_attn layernorm mlp_act": ActivationConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp_act")),
    "full uniform 1": ActivationConfig("full", "uniform", 1),
}
CUTS = {"1 rank": (1, ""), "tp 4": (4, "--tensor-model-parallel-size 4"),
        "tp 4, sp": (4, "--tensor-model-parallel-size 4 --sequence-parallel")}  # fmt: skip


def configuration(flags: str, world: int) -> Config:
    config, problems = parse(f"{flags} --bf16 --lr 1e-3 --train-iters 1 --mock-data".split(), world)
    assert not problems, problems
    return config


def kept_by_layers(config: Config, mesh) -> int:
    """Bytes of one layer: the difference between a model's and one with a layer less, over their forwards."""
    sizes = []
    for layers in (config.model.num_layers, config.model.num_layers - 1):
        smaller = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))
        chunk = build_chunks(smaller, mesh, pipeline_of(smaller))[0].initialise(1)
        meter, ids = Meter(chunk.parameters()), torch.zeros(config.train.micro_batch_size, config.model.seq_length)
        with meter.watching():
            _loss = chunk(ids.long(), ids.long(), ids, DropoutKey(1, 0, 0, mesh.tp.rank))
        sizes.append(meter.live)
        del _loss
    return sizes[0] - sizes[1]


def planned(config: Config, core: str) -> int:
    """The planner's figure for the same difference."""
    chunk = pipeline_of(config).chunks(0)[0]
    fewer = chunk._replace(layers=chunk.layers[:-1])
    return chunk_bytes(config, chunk, core).forward - chunk_bytes(config, fewer, core).forward


def measure(rank: int, world: int, flags: str) -> dict[str, int]:
    """Measured bytes per layer of each form on this rank."""
    config = configuration(flags, world)
    mesh = build_mesh(grid_of(config, world), torch.device("cpu")) if world > 1 else single()
    return {name: kept_by_layers(dataclasses.replace(config, activations=form), mesh) for name, form in FORMS.items()}


def activation_table(pool: WorkerPool) -> list[dict]:
    rows = []
    for model, sizes in MODELS.items():
        for cut, (world, parallel) in CUTS.items():
            flags = f"{sizes} --micro-batch-size 2 {parallel}"
            answers = pool.run(measure, world, world, flags, timeout=600)
            config = configuration(flags, world)
            unit = config.model.seq_length * config.train.micro_batch_size * config.model.hidden_size
            for name, form in FORMS.items():
                treated = dataclasses.replace(config, activations=form)
                rows.append({"model": model, "cut": cut, "recompute": name, "measured": max(a[name] for a in answers),
                             "planner": planned(treated, "block"), "flash": planned(treated, "flash"), "sbh": unit})  # fmt: skip
    return rows


def show_activations(rows: list[dict]) -> None:
    print("activation bytes per layer and microbatch, bf16, dropout 0.1; unit s b h (sequence x micro-batch x hidden)")
    head = f"{'model':<7}{'cut':<10}{'recomputed':<30}{'measured':>10}{'planner':>10}{'error':>8}{'with flash':>12}"
    print(head + "\n" + "-" * len(head))
    for row in rows:
        measured, planner, flash = (row[key] / row["sbh"] for key in ("measured", "planner", "flash"))
        row["error_percent"] = 100 * (row["planner"] / row["measured"] - 1)
        print(f"{row['model']:<7}{row['cut']:<10}{row['recompute']:<30}{measured:>10.2f}{planner:>10.2f}"
              f"{row['error_percent']:>7.2f}%{flash:>12.2f}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Persistent model state per parameter, bf16 with fp32 gradients, dp 4. A way to keep it is a row: flags, and its formula.

STATES = {"every rank keeps everything": ("", lambda dp: 18.0)}


def state(rank: int, world: int, flags: str) -> tuple[int, int]:
    """(bytes this rank holds from step to step, parameters of the model)."""
    config = configuration(flags, world)
    trainer = build_trainer(config, build_mesh(grid_of(config, world), torch.device("cpu")))
    return sum((trainer.engine.bytes() | trainer.optimizer.bytes()).values()), count_parameters(config)


def state_table(pool: WorkerPool, world: int = 4) -> list[dict]:
    rows = []
    print(f"\npersistent model state, bytes per parameter and rank, bf16, dp {world}")
    for name, (flags, formula) in STATES.items():
        answers = pool.run(state, world, world, f"{MODELS['llama']} --micro-batch-size 1 {flags}", timeout=600)
        measured, expected = max(held for held, _ in answers) / answers[0][1], formula(world)
        rows.append({"state": name, "flags": flags, "bytes_per_parameter": measured, "formula": expected})
        print(f"{name:<32}{measured:>10.3f}{expected:>10.3f}{100 * (measured / expected - 1):>7.2f}%")
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The article's table: one process per row, so that each has a peak of its own.

ARTICLE = ("--num-layers 6 --hidden-size 128 --num-attention-heads 4 --seq-length 512 --vocab-size 256 --swiglu "
           "--ffn-hidden-size 384 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
           "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --global-batch-size 16 --lr 2e-3 "
           "--lr-decay-style cosine --lr-warmup-iters 10 --mock-data")  # fmt: skip
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ROWS = {
    "baseline: fp32, batch in one": "--micro-batch-size 16",
    "accumulation of 8": "--micro-batch-size 2",
    "bf16": "--micro-batch-size 16 --bf16",
    "full recompute": f"--micro-batch-size 16 {RECOMPUTE}",
    "all three": f"--micro-batch-size 2 --bf16 {RECOMPUTE}",
}


def train(flags: str, steps: int) -> dict:
    """Train on bytes of Python's own library; peak growth of resident memory and the loss over the last tenth."""
    config, problems = parse(f"{ARTICLE} --train-iters {steps} {flags}".split(), 1)
    assert not problems, problems
    corpus = "".join(text for _, text in itertools.islice(python_library_texts(), 200)).encode()
    text = torch.frombuffer(bytearray(corpus), dtype=torch.uint8).long()
    trainer = build_trainer(config, single())
    size, length, losses = config.train.micro_batch_size, config.model.seq_length, []
    for step in range(steps):
        starts = torch.randint(len(text) - length - 1, (config.train.global_batch_size,),
                               generator=torch.Generator().manual_seed(step))  # fmt: skip
        rows = torch.stack([text[i : i + length + 1] for i in starts.tolist()])
        batches = [Batch(part[:, :-1], part[:, 1:], torch.ones(size, length)) for part in rows.split(size)]
        losses.append(train_step(trainer, batches, step, step * config.train.global_batch_size).loss)
    last = losses[-max(1, steps // 10) :]
    peak = peak_memory(trainer.mesh.device) - trainer.memory_before
    return {"peak_bytes": peak, "loss": sum(last) / len(last), "losses": losses}


def article(steps: int, only: list[str]) -> list[dict]:
    rows = []
    for name in only:
        command = [sys.executable, __file__, "--one", ROWS[name], "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"row": name, "flags": ROWS[name], **json.loads(done.stdout.splitlines()[-1])})
        base = rows[0]
        rows[-1]["memory_ratio"] = rows[-1]["peak_bytes"] / base["peak_bytes"]
        rows[-1]["loss_difference_percent"] = 100 * abs(rows[-1]["loss"] / base["loss"] - 1)
        print(f"{name:<32}{rows[-1]['peak_bytes'] / 2**20:>9.0f} MiB{rows[-1]['memory_ratio']:>8.3f}"
              f"{rows[-1]['loss']:>10.4f}{rows[-1]['loss_difference_percent']:>9.3f}%", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--article", action="store_true", help="the table of accumulation x bf16 x recompute")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="of the article's table")
    parser.add_argument("--steps", type=int, default=100, help="of training, with --article")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(train(args.one, args.steps)))
        return
    if args.article:
        print(f"{'':<32}{'peak growth':>13}{'ratio':>8}{'loss':>10}{'differs':>10}    ({args.steps} steps)")
        rows = article(args.steps, args.rows)
    else:
        pool = WorkerPool(4)
        rows = activation_table(pool)
        show_activations(rows)
        rows += state_table(pool)
        pool.shutdown()
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "steps": args.steps, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
