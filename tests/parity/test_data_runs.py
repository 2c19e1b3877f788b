"""Whole runs by their data: a batch that grows, iterations that are left out, several validation sets, streamed text.

Each is compared with one process, or with the same run in one piece.
"""

import json

import numpy as np
import pytest
import torch
from layouts import assemble, pieces, relative, slow

from megatron_lite.arguments import parse
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.data.indexed import IndexedDataset, IndexedWriter
from megatron_lite.data.samples import WindowSamples
from megatron_lite.optim.lr import learning_rate
from megatron_lite.tokenizers import ByteTokenizer
from megatron_lite.training.data import build_splits
from megatron_lite.training.logging import Interval, Sinks
from megatron_lite.training.loop import Run
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.signals import StopSignal
from megatron_lite.training.state import restore

CPU = torch.device("cpu")
TINY = ("--num-layers 4 --num-attention-heads 4 --hidden-size 32 --seq-length 16 --vocab-size 60 --init-method-std 0.2 "
        "--hidden-dropout 0 --attention-dropout 0 --peak-tflops 1 --lr 3e-3 --log-interval 1 --adam-eps 1e-6 "
        "--distributed-backend gloo")  # fmt: skip
GROWING = f"{TINY} --mock-data --global-batch-size 8 --rampup-batch-size 4 2 16 --train-samples 40 --lr-warmup-samples 12"
SIZES = [4, 4, 6, 6, 8, 8]  # 36 samples; borders at 8 and 16


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.rows = []

    def write(self, iteration, values):
        self.rows.append({"iteration": iteration, **values})

    def event(self, iteration, kind, text):
        pass

    def close(self):
        pass


def whole_run(rank, world, argv):
    """What pretrain_gpt.py does, without its start and end: sink rows, what was said, this rank's weights."""
    config, problems = parse(argv, world)
    assert not problems, problems
    mesh, said, sink = build_mesh(grid_of(config, world), CPU), [], Kept()
    splits = build_splits(config, ByteTokenizer().eod, ByteTokenizer().encode)
    trainer = build_trainer(config, mesh)
    progress, _ = restore(trainer)
    sinks = Sinks([sink], config.model.seq_length)
    Run(trainer, splits, sinks, Interval(config, mesh), progress, StopSignal(), said.append).train()
    return sink.rows, said, pieces(trainer, "param") if mesh.dp.rank == 0 else []


def run(pool, world, text):
    """(steps, evaluations, what was said, weights by name)"""
    results = pool.run(whole_run, world, world, text.split()) if world > 1 else [whole_run(0, 1, text.split())]
    rows, said, _ = results[0]
    steps = [row for row in rows if "lm loss" in row]
    return steps, [row for row in rows if "lm loss" not in row], said, assemble(p for *_, parts in results for p in parts)


def column(steps, name):
    return [row[name] for row in steps]


@pytest.fixture(scope="module")
def grown(pool):
    return run(pool, 1, f"{GROWING} --fp64 --micro-batch-size 2")


def test_a_batch_grows_as_its_rule_says(grown):
    steps, _, said, _ = grown
    assert column(steps, "batch-size") == SIZES
    assert column(steps, "consumed-samples") == np.cumsum(SIZES).tolist()
    config, _ = parse(f"{GROWING} --fp64 --micro-batch-size 2".split(), 1)
    rates = [learning_rate(n, config.optimizer, config.train) for n in (0, *np.cumsum(SIZES)[:-1])]
    assert column(steps, "learning-rate") == rates
    assert "global batch size:     6 |" in said[2] and "consumed samples:           14 |" in said[2]
    assert steps[-1]["eta-seconds"] == 0 and all(row["eta-seconds"] > 0 for row in steps[:-1])


@pytest.mark.parametrize(("world", "flags"), [
    (2, "--micro-batch-size 1 --pipeline-model-parallel-size 2"), (2, "--micro-batch-size 1"),
    slow(4, "--micro-batch-size 1 --pipeline-model-parallel-size 2 --zero-stage 2"),
    slow(2, "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule zbv"),
    slow(2, "--micro-batch-size 1 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    slow(4, "--micro-batch-size 2 --pipeline-model-parallel-size 4 --pipeline-schedule zb-h1"),
    slow(4, "--micro-batch-size 1 --tensor-model-parallel-size 2 --zero-stage 3"),
])  # fmt: skip
def test_a_growing_batch_is_the_same_at_every_layout(pool, grown, world, flags):
    steps, _, _, params = run(pool, world, f"{GROWING} --fp64 {flags}")
    assert column(steps, "batch-size") == SIZES
    for kind in ("lm loss", "grad-norm"):
        np.testing.assert_allclose(column(steps, kind), column(grown[0], kind), rtol=1e-10)
    for name, param in grown[3].items():
        assert relative(params[name], param) <= 1e-10, name


@pytest.mark.parametrize(("world", "flags"), [(2, "--pipeline-model-parallel-size 2"), slow(1, ""), slow(2, "--bf16")])
@pytest.mark.parametrize("after", [3, slow(1), slow(4)])
def test_a_run_resumed_while_its_batch_grows_goes_on_bit_for_bit(pool, tmp_path, world, flags, after):
    text = f"{GROWING} --micro-batch-size 1 --hidden-dropout 0.1 {flags}"
    whole, _, _, params = run(pool, world, text)
    save = f"{text} --save {tmp_path} --load {tmp_path}"
    first = run(pool, world, f"{save} --exit-interval {after}")[0]
    rest, _, _, resumed = run(pool, world, save)
    for kind in ("iteration", "lm loss", "grad-norm", "batch-size", "consumed-samples", "learning-rate"):
        assert column(first, kind) + column(rest, kind) == column(whole, kind), kind
    assert all(torch.equal(resumed[name], param) for name, param in params.items())


def test_iterations_left_out_consume_their_samples_and_train_nothing(pool, tmp_path):
    """The run is that of the other samples: losses up to the gap are those of the plain run, and a run that is resumed behind
    it reads what it would have read; the learning rate stands still over the gap."""
    text = f"{TINY} --mock-data --fp64 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr-warmup-iters 4"
    plain = run(pool, 1, text)[0]
    skipped, _, said, params = run(pool, 1, f"{text} --iterations-to-skip 3 4")
    assert column(skipped, "iteration") == [1, 2, 5, 6] and column(skipped, "consumed-samples") == [4, 8, 20, 24]
    assert column(skipped, "lm loss")[:2] == column(plain, "lm loss")[:2]
    assert column(skipped, "learning-rate") == column(plain, "learning-rate")[:4]
    assert [line for line in said if "left out" in line] == [f"iteration {n} is left out: --iterations-to-skip" for n in (3, 4)]
    save = f"{text} --save {tmp_path} --load {tmp_path}"
    run(pool, 1, f"{save} --exit-interval 3 --iterations-to-skip 3 4")  # saved within the gap
    rest, _, _, resumed = run(pool, 1, f"{save} --iterations-to-skip 3 4")
    assert column(rest, "lm loss") == column(skipped, "lm loss")[2:]
    assert all(torch.equal(resumed[name], param) for name, param in params.items())
    two = run(pool, 1, f"{text} --iterations-to-skip 1 2")[0]
    assert column(two, "lm loss")[0] != column(plain, "lm loss")[2], "the weights are those before the gap, not behind it"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three small token files, of 21, 9 and 5 windows of 16 tokens."""
    folder = tmp_path_factory.mktemp("corpora")
    for seed, (name, tokens) in enumerate((("train", 340), ("web", 150), ("code", 90))):
        generator = np.random.default_rng(seed)
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_document(generator.integers(0, 59, tokens))
    return folder


VALIDATED = "--train-iters 2 --eval-interval 2 --global-batch-size 4"


def mean_loss(config, prefix):
    """Of every window of a file, one after the other, through a model as it starts."""
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))
    data, total = IndexedDataset(prefix), 0.0
    windows = len(WindowSamples(data, 16, 0))
    with torch.no_grad():
        for n in range(windows):
            ids = torch.from_numpy(data.window(16 * n, 17).astype(np.int64))[None]
            total += float(trainer.chunks[0](ids[:, :-1], ids[:, 1:], torch.ones(1, 16), None))
    return total / (16 * windows)


@pytest.mark.parametrize(("world", "flags"), [
    (1, "--micro-batch-size 2"), (4, "--micro-batch-size 1 --pipeline-model-parallel-size 4"), (2, "--micro-batch-size 2"),
    slow(2, "--micro-batch-size 1 --pipeline-model-parallel-size 2"),
    slow(2, "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipe"),
])  # fmt: skip
def test_validation_sets_by_name_each_scored_whole(pool, corpora, world, flags):
    """Uneven sets: 9, 5 and 14 samples in batches of 4. With a rate of zero the weights stay as they start."""
    sets = f"web={corpora}/web code={corpora}/code both={corpora}/web {corpora}/code"
    text = f"{TINY} --fp64 --lr 0 {VALIDATED} --full-validation --train-data-path {corpora}/train {flags}"
    _, evaluations, said, _ = run(pool, world, f"{text} --valid-data-path {sets}")
    config, _ = parse(f"{TINY} --fp64 --lr 0 --train-iters 2 --mock-data --micro-batch-size 1".split(), 1)
    web, code = (mean_loss(config, corpora / name) for name in ("web", "code"))
    expected = {"web": web, "code": code, "both": (9 * web + 5 * code) / 14}
    found = {name: [row[f"lm loss validation-{name}"] for row in evaluations if f"lm loss validation-{name}" in row]
             for name in expected}  # fmt: skip
    for name, loss in expected.items():
        assert found[name] == pytest.approx([loss], rel=1e-10)
    lines = "\n".join(said)
    assert all(f"validation loss at iteration 2 on validation set {name} | lm loss value: " in lines for name in expected)


def test_an_evaluation_scores_the_same_samples_each_time(pool, corpora):
    text = f"{TINY} --fp64 --lr 0 --train-iters 3 --eval-interval 1 --eval-iters 2 --global-batch-size 4 --micro-batch-size 2"
    evaluations = run(pool, 1, f"{text} --train-data-path {corpora}/train --valid-data-path {corpora}/web")[1]
    losses = [row["lm loss validation"] for row in evaluations]
    assert len(losses) == 3 and len(set(losses)) == 1


@pytest.mark.parametrize(("world", "flags"), [
    (1, "--micro-batch-size 1"), slow(2, "--micro-batch-size 1 --pipeline-model-parallel-size 2"),
])  # fmt: skip
def test_a_run_on_streamed_text_goes_on_at_another_layout(pool, tmp_path, world, flags):
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": f"line {n}: " + "text " * (n % 9)}) for n in range(60)]
    (folder / "a.jsonl").write_text("\n".join(lines[:25]))
    (folder / "b.jsonl").write_text("\n".join(lines[25:]))
    text = (f"{TINY} --fp64 --vocab-size 257 --dataset-name {folder} --tokenizer-type ByteTokenizer --global-batch-size 4 "
            "--train-iters 6")  # fmt: skip
    whole = run(pool, 1, f"{text} --micro-batch-size 2")[0]
    save = f"{text} --save {tmp_path / 'save'} --load {tmp_path / 'save'}"
    first = run(pool, world, f"{save} {flags} --exit-interval 3")[0]
    rest, _, said, _ = run(pool, 1, f"{save} --micro-batch-size 2")
    losses = column(first, "lm loss") + column(rest, "lm loss")
    np.testing.assert_allclose(losses, column(whole, "lm loss"), rtol=1e-10)
    assert not any("reading on to it" in line for line in said)
