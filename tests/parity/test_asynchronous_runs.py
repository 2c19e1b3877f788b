"""Whole runs through an asynchronous pipeline: where it drains, that a resumed run has the same bits, and that it learns."""

import math

import numpy as np
import pytest
import torch
from layouts import assemble, pieces

from megatron_lite.arguments import parse
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.data.corpus import python_library_texts
from megatron_lite.data.indexed import IndexedWriter
from megatron_lite.training.asynchronous import annealing_length, steps_to_drain
from megatron_lite.training.data import build_splits
from megatron_lite.training.logging import Interval, build_sinks
from megatron_lite.training.loop import Run
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.signals import StopSignal
from megatron_lite.training.state import restore

CPU = torch.device("cpu")
SIZES = ("--num-layers 4 --num-attention-heads 4 --hidden-dropout 0.1 --attention-dropout 0 --peak-tflops 1 --lr 3e-3 "
         "--untie-embeddings-and-output-weights --distributed-backend gloo")  # fmt: skip
TINY = (f"{SIZES} --hidden-size 32 --seq-length 16 --vocab-size 60 --mock-data --micro-batch-size 1 --global-batch-size 4 "
        "--train-iters 10 --log-interval 1 --lr-warmup-iters 2")  # fmt: skip


def whole_run(rank, world, argv):
    """What pretrain_gpt.py does, without its start and end: the log lines and this rank's weights."""
    config, problems = parse(argv, world)
    assert not problems, problems
    mesh, splits, lines = build_mesh(grid_of(config, world), CPU), build_splits(config, None), []
    trainer = build_trainer(config, mesh)
    progress, _ = restore(trainer)
    Run(trainer, splits, build_sinks(config, False, None), Interval(config, mesh), progress, StopSignal(), lines.append).train()
    return lines, pieces(trainer, "param") if mesh.dp.rank == 0 else []


def run(pool, world, text):
    results = pool.run(whole_run, world, world, text.split(), timeout=900)
    return results[0][0], assemble(part for _, parts in results for part in parts)


def losses(lines):
    """Losses of the log, as printed."""
    return [float(line.split("lm loss: ")[1].split(" |")[0]) for line in lines if "lm loss: " in line]


def config_of(text, world=2):
    config, problems = parse(text.split(), world)
    assert not problems, problems
    return config


def test_drains():
    text = f"{TINY} --pipeline-model-parallel-size 2 --pipeline-schedule pipedream"
    assert steps_to_drain(config_of(text), 0) == 10  # the end of the run
    config = config_of(f"{text} --pipeline-drain-interval 4 --eval-interval 7 --save x --save-interval 3")
    at, drains = 0, []
    while at < 10:
        at += steps_to_drain(config, at)
        drains.append(at)
    assert drains == [3, 4, 6, 7, 8, 9, 10]
    assert annealing_length(config_of(f"{text.replace('pipedream', 'pipemare')}")) == 10  # 5 x 2 steps of warm-up
    assert annealing_length(config_of(text.replace("--lr-warmup-iters 2", ""))) == 2  # a quarter of 10 steps
    assert annealing_length(config_of(f"{text.replace('pipedream', 'pipemare')} --pipemare-annealing-iters 3")) == 3


@pytest.mark.parametrize(("rule", "world", "layout"), [
    ("pipedream", 4, "--pipeline-model-parallel-size 4 --bf16"),
    ("pipedream-2bw", 4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ("pipemare", 4, "--pipeline-model-parallel-size 2 --bf16"),
])  # fmt: skip
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(pool, tmp_path, rule, world, layout):
    """It drains where it saves; here in the middle of --pipeline-drain-interval, and evaluates on the way. bf16 and fp32."""
    base = (f"{TINY} {layout} --pipeline-schedule {rule} --pipeline-drain-interval 4 --save-interval 5 --eval-interval 10 "
            "--eval-iters 2")  # fmt: skip
    lines, straight = run(pool, world, f"{base} --save {tmp_path}/straight")
    stopped, _ = run(pool, world, f"{base} --save {tmp_path}/a --exit-interval 5")
    assert any("stopping after iteration 5" in line for line in stopped)
    resumed, params = run(pool, world, f"{base} --save {tmp_path}/a --load {tmp_path}/a")
    assert losses(stopped)[:5] == losses(lines)[:5] and losses(resumed)[:5] == losses(lines)[5:10]
    for name, param in straight.items():
        assert torch.equal(param, params[name]), name


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The first 600 kB of the text that the quickstart trains on, byte by byte."""
    folder, size = tmp_path_factory.mktemp("corpus"), 0
    with IndexedWriter(folder / "text", np.uint16) as writer:
        for _, text in python_library_texts():
            tokens = list(text.encode())
            writer.add_document([*tokens, 256])
            size += len(tokens)
            if size > 600_000:
                break
    return folder / "text"


@pytest.fixture(scope="module")
def learned(pool, corpus):
    """Losses of 300 steps on the corpus with a schedule, every 50 steps; each is run once."""
    made = {}

    def of(rule):
        if rule not in made:
            text = (f"{SIZES} --hidden-size 64 --seq-length 64 --vocab-size 257 --data-path {corpus} --micro-batch-size 4 "
                    "--global-batch-size 16 --train-iters 300 --log-interval 50 --lr-warmup-iters 20 "
                    f"--pipeline-model-parallel-size 4 --pipeline-schedule {rule}")  # fmt: skip
            made[rule] = losses(run(pool, 4, text)[0])
            print(rule, made[rule])
        return made[rule]

    return of


@pytest.mark.full
@pytest.mark.parametrize(("rule", "behind"), [("pipedream", 0.5), ("pipedream-2bw", 0.5), ("pipemare", 0.25)])
def test_they_learn_the_sample_corpus(learned, rule, behind):
    """300 steps at 4 stages: from a random guess (ln 257 = 5.5) to near what 1F1B reaches with gradients that are not old."""
    found, wanted = learned(rule), learned("1f1b")
    assert len(found) == len(wanted) == 7 and abs(found[0] - math.log(257)) < 0.2
    assert found[-1] < wanted[-1] + behind < 3.0
