"""Runs that are killed while they save, or that find a damaged checkpoint: they go on from a whole one, to the same loss."""

import json
import random
import signal
import time

import numpy as np
import pytest

from megatron_lite.checkpoint.folder import TRACKER
from megatron_lite.data.indexed import IndexedWriter
from tests.robustness.test_bad_input import MOCK, SIZES, Job, rows, tracker

pytestmark = pytest.mark.usefixtures("server")
STEPS = 12
RUN = [*MOCK, "--train-iters", STEPS]


def losses(path):
    return {row["iteration"]: row["lm loss"] for row in map(json.loads, path.read_text().splitlines()) if "lm loss" in row}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, server):
    folder = tmp_path_factory.mktemp("whole")
    Job(folder, *RUN, "--jsonl", folder / "log", ranks=2).succeeds()
    return losses(folder / "log")


def killed_somewhere(folder, everyone, asynchronous, draw):
    """One run that is killed at a random moment of a random step while it saves after each; its flags, and the latest then."""
    save = folder / "save"
    flags = [*RUN, "--save", save, "--load", save, "--save-interval", 1, *(["--async-save"] if asynchronous else [])]
    job = Job(folder, *flags, ranks=2)
    job.until(draw.choice(["ready to train", *(f"iteration {n:8d}/" for n in range(1, STEPS - 3))]))
    time.sleep(draw.uniform(0.0, 0.05))
    victims = job.processes if everyone else [draw.choice(job.processes)]
    for process in victims:
        process.kill()
    codes = job.wait(30)
    assert -1000 not in codes, (codes, job.err())
    latest = tracker(save) if (save / TRACKER).exists() else None
    assert latest == STEPS or any(process.exitcode == -signal.SIGKILL for process in victims), codes
    return flags, latest


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 40))])
def test_kill_9_at_a_random_moment(tmp_path, uninterrupted, seed):
    draw = random.Random(seed)
    flags, latest = killed_somewhere(tmp_path, everyone=seed % 4 >= 2, asynchronous=seed % 2 == 0, draw=draw)
    job = Job(tmp_path, *flags, "--jsonl", tmp_path / "log", ranks=2).succeeds()
    begun = f"loading iteration {latest} from" if latest else "STARTING FRESH"
    assert begun in job.out() or not latest and "loading iteration 1 from" in job.out()  # killed before its first tracker
    assert "DAMAGED" not in job.out()
    found = losses(tmp_path / "log") if (tmp_path / "log").exists() else {}
    assert latest == STEPS or STEPS in found
    assert found == {iteration: loss for iteration, loss in uninterrupted.items() if iteration in found}
    assert tracker(tmp_path / "save") == STEPS
    assert not list((tmp_path / "save").glob(".*"))


def test_behind_the_training_it_is_drained_and_the_same(tmp_path, uninterrupted):
    """The tracker is moved (C04), and the save of the last iteration is finished before the run ends (C05)."""
    save = tmp_path / "save"
    flags = [*RUN, "--save", save, "--load", save, "--async-save", "--save-interval", 5, "--save-weights-only-interval", 4]
    job = Job(tmp_path, *flags, "--jsonl", tmp_path / "log", "--save-retain", 2, ranks=2).succeeds()
    assert losses(tmp_path / "log") == uninterrupted
    assert tracker(save) == STEPS and tracker(save / "weights") == STEPS
    assert sorted(path.name for path in save.glob("iter*")) == ["iter_0000010", "iter_0000012"]
    assert job.out().count("behind the training") == 6
    weights = [*MOCK, "--train-iters", STEPS + 1, "--load", save / "weights"]
    Job(tmp_path, *weights).fails("holds weights only", "--finetune")
    Job(tmp_path, *MOCK, "--train-iters", 1, "--finetune", "--load", save / "weights").succeeds()


def test_a_full_disk_behind_the_training(tmp_path):
    save = tmp_path / "save"
    flags = [*MOCK, "--train-iters", 1000, "--save", save, "--async-save", "--save-interval", 2]
    Job(tmp_path, *flags, ranks=2, file_limit=60_000).fails("File too large", "rank")
    assert not (save / "latest_checkpointed_iteration.txt").exists() and not list(save.glob("*iter*"))


def test_a_damaged_newest_is_named_and_skipped_to_an_older_one(tmp_path):
    """Never to random weights (C01)."""
    save = tmp_path / "save"
    flags = [*MOCK, "--save", save, "--load", save, "--save-interval", 1]
    Job(tmp_path, *flags, "--train-iters", 3, ranks=2).succeeds()
    shard = save / "iter_0000003" / "shard_00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    Job(tmp_path, *flags, "--train-iters", 4, "--load-iteration", 3, ranks=2).fails("shard_00001.safetensors is damaged")
    job = Job(tmp_path, *flags, "--train-iters", 4, "--no-verify-checkpoint", ranks=2).succeeds()
    assert "loading iteration 3" in job.out()
    (save / "iter_0000004" / "manifest.json").unlink()
    job = Job(tmp_path, *flags, "--train-iters", 4, ranks=2).succeeds()
    said = job.out()
    assert "iteration 4 is DAMAGED and is skipped" in said and "iter_0000004 has no manifest" in said
    assert "iteration 3 is DAMAGED and is skipped" in said and "shard_00001.safetensors is damaged" in said
    assert "loading iteration 2" in said and tracker(save) == 4
    for shard in save.glob("iter*/shard_00000.safetensors"):
        shard.unlink()
    Job(tmp_path, *flags, "--train-iters", 5, ranks=2).fails("holds no older checkpoint to go on from")


def test_an_older_iteration_and_another_model(tmp_path):
    save = tmp_path / "save"
    Job(tmp_path, *MOCK, "--save", save, "--save-interval", 1, "--train-iters", 3).succeeds()
    job = Job(tmp_path, *MOCK, "--load", save, "--ckpt-step", 2, "--train-iters", 3).succeeds()
    assert "loading iteration 2" in job.out()
    Job(tmp_path, *MOCK, "--load", save, "--load-iteration", 9, "--train-iters", 3).fails("iter_0000009 does not exist")
    flags = ["--load", save, "--train-iters", 4, "--num-attention-heads", 2, "--num-layers", 3]
    job = Job(tmp_path, *MOCK, *flags)
    job.wait(30)
    assert "--num-layers: trained with 2, now 3" in job.err() and "--num-attention-heads: trained with 4, now 2" in job.err()
    mine = ["--micro-batch-size", 2, "--global-batch-size", 4, "--lr", "1e-2", "--mock-data", "--load", save,
            "--use-checkpoint-args", "--train-iters", 4, "--distributed-backend", "gloo", "--peak-tflops", 1]  # fmt: skip
    assert "loading iteration 3" in Job(tmp_path, *mine).succeeds().out()
    job = Job(tmp_path, *mine, "--num-layers", 3, "--swiglu")
    assert job.wait(30) == [2]
    assert "--num-layers 3 --use-checkpoint-args: contradicts" in job.err() and "trained without it" in job.err()


@pytest.mark.full
def test_at_and_after_the_edge_of_an_epoch(tmp_path):
    """Two steps are an epoch: stopped at an edge and within one, in fp16 with dropout and a sharded optimizer, a run has the
    losses, norms, loss scales and last checkpoint of one that was not (C10, D27)."""
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, 128, 8 * 32 + 1))
    base = [*SIZES, "--data-path", tmp_path / "corpus", "--split", "100", "--vocab-size", 128, "--hidden-dropout", "0.1",
            "--fp16", "--initial-loss-scale", 256, "--loss-scale-window", 2, "--zero-stage", 1, "--train-iters", 7]  # fmt: skip
    Job(tmp_path, *base, "--save", tmp_path / "a", "--jsonl", tmp_path / "straight", ranks=2).succeeds()
    again = [*base, "--save", tmp_path / "b", "--load", tmp_path / "b", "--jsonl", tmp_path / "stopped"]
    for stop in (2, 3):
        Job(tmp_path, *again, "--exit-interval", stop, ranks=2).succeeds()
        assert tracker(tmp_path / "b") == stop
    Job(tmp_path, *again, ranks=2).succeeds()
    for key in ("lm loss", "grad-norm", "loss-scale", "consumed-samples"):
        assert rows(tmp_path / "stopped", key) == rows(tmp_path / "straight", key), key
    assert len(set(rows(tmp_path / "straight", "loss-scale").values())) > 1
    for shard in (tmp_path / "a" / "iter_0000007").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "b" / "iter_0000007" / shard.name).read_bytes()


@pytest.mark.full
def test_a_resume_takes_no_more_memory_than_a_start(tmp_path):
    """100 MB of weights, as much again twice in moments: the peak of resuming is at most 1.5 times that of starting (C22)."""
    flags = [*SIZES, "--mock-data", "--vocab-size", 100000, "--hidden-size", 256, "--save", tmp_path / "save", "--load",
             tmp_path / "save", "--tensor-model-parallel-size", 2]  # fmt: skip
    peaks = []
    for iteration in (1, 2):
        log = tmp_path / f"log-{iteration}"
        Job(tmp_path, *flags, "--train-iters", iteration, "--jsonl", log, ranks=2).succeeds()
        peaks.append(rows(log, "mem-max-allocated-bytes")[iteration])
    assert peaks[0] > 200e6 and peaks[1] <= 1.5 * peaks[0], peaks
