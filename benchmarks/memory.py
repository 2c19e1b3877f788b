"""Bytes: what a rank holds, measured, beside the formulas of the planner.

    python benchmarks/memory.py --json benchmarks/results/memory.json        activations per layer, and state, 4 ranks
    python benchmarks/memory.py --article --json benchmarks/results/memory_article.json
                                                                            accumulation x bf16 x recompute, 1 rank

The first table: bytes that autograd keeps of one layer and microbatch (tensors counted by storage as they are saved), in
bf16 with dropout, for one rank, tp 4, and tp 4 with sequence parallelism, by what is recomputed. `s b h` is the unit of
Korthikanti et al. 2022, who leave attention's own values out for a flash kernel; the block-causal core of CPU keeps half
of the s x s probabilities and dropout factors as well, and so has a column with and one without.

The second: what a rank keeps from step to step at each stage of ZeRO, by its own account and by the growth of its resident
memory, and how many units of full parameters a step brings at most.

The third: a small model trained on text that every Python carries, in a process of its own per row. Baseline: fp32, the
batch in one piece, everything kept. Then micro-batches of 1, bf16 with fp32 masters, and full recomputation together.
"""

import argparse
import ctypes
import dataclasses
import gc
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
from megatron_lite.optim.flat import is_there  # noqa: E402
from megatron_lite.pipeline.stage import build_chunks  # noqa: E402
from megatron_lite.planner.memory import chunk_bytes  # noqa: E402
from megatron_lite.planner.params import count_parameters  # noqa: E402
from megatron_lite.planner.pipeline import pipeline_of  # noqa: E402
from megatron_lite.rng import DropoutKey  # noqa: E402
from megatron_lite.training.ledger import Meter  # noqa: E402
from megatron_lite.training.setup import build_trainer, grid_of, memory_in_use, peak_memory  # noqa: E402
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

STATES = {
    "every rank keeps everything": ("", lambda dp: 18.0),
    "ZeRO-1: masters, moments shared": ("--zero-stage 1", lambda dp: 6 + 12 / dp),
    "ZeRO-2: and gradients": ("--zero-stage 2", lambda dp: 2 + 16 / dp),
    "ZeRO-3: and parameters": ("--zero-stage 3", lambda dp: 18 / dp),
}
# Few tokens and many parameters: a step costs little, and resident memory is the state's.
STATE_MODEL = ("--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 16 --vocab-size 2048 --swiglu "
               "--ffn-hidden-size 1408 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
               "--untie-embeddings-and-output-weights --micro-batch-size 1")  # fmt: skip


def give_back() -> None:
    """The allocator returns what is not in use, and the peak starts from here. Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def private_memory() -> int:
    """Bytes of this process's own resident memory that are in use: not what ranks share. Linux."""
    give_back()
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("RssAnon"))  # fmt: skip


def state(rank: int, world: int, flags: str) -> dict[str, float]:
    """Of this rank: bytes it holds from step to step, by its own account and by the kernel's, and parameters of the model;
    the most bytes of full parameters inside the layers' forwards and backwards, and those of the largest unit."""
    config = configuration(flags, world)
    mesh = build_mesh(grid_of(config, world), torch.device("cpu"))
    ids = torch.zeros(config.train.micro_batch_size, config.model.seq_length)
    batches = [Batch(ids.long(), ids.long(), ids + 1)]
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))
    train_step(build_trainer(small, mesh), batches, 0, 0)  # touches what any first step touches
    before = private_memory()
    trainer = build_trainer(config, mesh)
    buckets, most = trainer.engine.buckets, [0]

    def look(*_) -> None:
        most[0] = max(most[0], sum(bucket.param.nbytes for bucket in buckets if is_there(bucket.param)))

    hooks = [hook for layer in trainer.chunks[0].layers
             for hook in (layer.register_forward_hook(look), layer.register_full_backward_pre_hook(look))]  # fmt: skip
    train_step(trainer, batches, 0, 0)
    for hook in hooks:
        hook.remove()
    if config.parallel.zero_stage in (1, 2):
        trainer.engine.gather_parameters()  # which else happens in the next step
    held = sum((trainer.engine.bytes() | trainer.optimizer.bytes()).values())
    return {"held": held, "resident": private_memory() - before, "parameters": count_parameters(config), "most": most[0],
            "unit": max(bucket.param.numel() * bucket.param.element_size() for bucket in buckets)}  # fmt: skip


def state_table(world: int = 4) -> list[dict]:
    rows = []
    print(f"\npersistent model state, bytes per parameter and rank, bf16, dp {world}")
    head = f"{'':<33}{'held':>8}{'formula':>9}{'error':>8}{'resident':>10}{'error':>8}{'full parameters in a step, units':>34}"
    print(head + "\n" + "-" * len(head))
    for name, (flags, formula) in STATES.items():
        pool = WorkerPool(world)  # fresh processes: what a row left behind would be the next one's to use
        answers = pool.run(state, world, world, f"{STATE_MODEL} {flags}", timeout=600)
        pool.shutdown()
        expected, count = formula(world), answers[0]["parameters"]
        held, resident = (max(a[key] for a in answers) / count for key in ("held", "resident"))
        units = max(a["most"] / a["unit"] for a in answers)
        rows.append({"state": name, "flags": flags, "bytes_per_parameter": held, "formula": expected,
                     "resident_bytes_per_parameter": resident, "units_of_full_parameters": units})  # fmt: skip
        print(f"{name:<33}{held:>8.3f}{expected:>9.3f}{100 * (held / expected - 1):>7.2f}%{resident:>10.3f}"
              f"{100 * (resident / expected - 1):>7.2f}%{units:>34.2f}", flush=True)  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The article's table: one process per row, so that each has a peak of its own.

ARTICLE = ("--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 512 --vocab-size 256 --swiglu "
           "--ffn-hidden-size 96 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
           "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --lr 1e-2 "
           "--lr-decay-style cosine --lr-warmup-iters 5 --mock-data")  # fmt: skip
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ROWS = {
    "baseline: fp32, batch in one": "--micro-batch-size 8",
    "accumulation of 8": "--micro-batch-size 1",
    "bf16": "--micro-batch-size 8 --bf16",
    "full recompute": f"--micro-batch-size 8 {RECOMPUTE}",
    "all three": f"--micro-batch-size 1 --bf16 {RECOMPUTE}",
}


def corpus() -> torch.Tensor:
    """Bytes of Python's own library, one element each."""
    text = "".join(text for _, text in itertools.islice(python_library_texts(), 200)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def run_steps(config: Config, text: torch.Tensor, steps: int) -> list[float]:
    """Losses of a run on random pieces of the text."""
    trainer, losses = build_trainer(config, single()), []
    size, length = config.train.micro_batch_size, config.model.seq_length
    for step in range(steps):
        starts = torch.randint(len(text) - length - 1, (config.train.global_batch_size,),
                               generator=torch.Generator().manual_seed(step))  # fmt: skip
        rows = torch.stack([text[i : i + length + 1] for i in starts.tolist()]).long()
        batches = [Batch(part[:, :-1], part[:, 1:], torch.ones(size, length)) for part in rows.split(size)]
        losses.append(train_step(trainer, batches, step, step * config.train.global_batch_size).loss)
    return losses


def train(flags: str, steps: int) -> dict:
    """Peak growth of resident memory and the loss over the last tenth of the steps.

    A run of one layer and few tokens comes first, so that code, tables and stacks that the first step touches, about
    100 MiB whatever the model, are there before the growth is measured.
    """
    config, problems = parse(f"{ARTICLE} --train-iters {steps} {flags}".split(), 1)
    assert not problems, problems
    text, device = corpus(), torch.device("cpu")
    run_steps(dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1, seq_length=32)), text, 1)
    give_back()
    before = memory_in_use(device)
    losses = run_steps(config, text, steps)
    last = losses[-max(1, steps // 10) :]
    return {"peak_bytes": peak_memory(device) - before, "loss": sum(last) / len(last), "losses": losses}


def article(steps: int, only: list[str], known: dict[str, dict]) -> list[dict]:
    """Measure the rows `only`; the others come from `known`, an earlier call's, as far as they are there."""
    for name in only:
        command = [sys.executable, __file__, "--one", ROWS[name], "--steps", str(steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        known[name] = {"row": name, "flags": ROWS[name], **json.loads(done.stdout.splitlines()[-1])}
    rows = [known[name] for name in ROWS if name in known]
    base = known.get(next(iter(ROWS)))
    print(f"{'':<32}{'peak growth':>13}{'ratio':>8}{'loss':>10}{'differs':>10}    ({steps} steps)")
    for row in rows:
        line = f"{row['row']:<32}{row['peak_bytes'] / 2**20:>9.0f} MiB"
        if base:
            row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"]
            row["loss_difference_percent"] = 100 * abs(row["loss"] / base["loss"] - 1)
            line += f"{row['memory_ratio']:>8.3f}{row['loss']:>10.4f}{row['loss_difference_percent']:>9.3f}%"
        print(line)
    return rows


def measured_before(path: Path | None, steps: int) -> dict[str, dict]:
    """The rows of the article's table in this file, if they are of this torch, model, and number of steps."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    same = (found.get("torch"), found.get("steps"), found.get("model")) == (torch.__version__, steps, ARTICLE)
    return {row["row"]: row for row in found["rows"] if ROWS.get(row["row"]) == row["flags"]} if same else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--article", action="store_true", help="the table of accumulation x bf16 x recompute")
    parser.add_argument("--table", choices=["activations", "state"], help="one of the two tables alone; without, both")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS),
                        help="of the article's table to measure now; the others come from the --json file if it has them")
    parser.add_argument("--steps", type=int, default=40, help="of training, with --article")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(train(args.one, args.steps)))
        return
    if args.article:
        kept = measured_before(args.json, args.steps)
        rows, about = article(args.steps, args.rows, kept), {"steps": args.steps, "model": ARTICLE}
    else:
        rows, about = [], {}
        if args.table != "state":
            pool = WorkerPool(4)
            rows += activation_table(pool)
            show_activations(rows)
            pool.shutdown()
        if args.table != "activations":
            rows += state_table()
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
