"""Runs that are killed with copies in peers: they go on from memory, from the disk, from the shared folder, to the same bits.
And runs that are not to start: a second one in the folder, one whose folder cannot be written."""

import json
import os
import random
import re
import shutil
import signal
import time

import pytest

from megatron_lite.checkpoint.claim import FILE
from megatron_lite.checkpoint.places import place_of
from tests.robustness.test_bad_input import MOCK, Job, children_of, rows, torchrun, tracker, wait_for

STEPS = 14
LAYOUTS = {"zero1": ["--zero-stage", 1], "tp2": ["--tensor-model-parallel-size", 2], "pp2": ["--pipeline-model-parallel-size", 2]}


def run_of(layout, save, *more):
    return [*MOCK, *LAYOUTS[layout], "--train-iters", STEPS, "--save", save, "--load", save, *more]


def with_copies(layout, save, *more):
    return run_of(layout, save, "--peer-checkpoint-interval", 2, "--peer-checkpoint-dir", save.parent / "disk", *more)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """{iteration: (loss, norm)} and the last checkpoint's files of a layout, without copies; each is run once."""
    made = {}

    def of(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            Job(folder, *run_of(layout, folder / "save", "--jsonl", folder / "log"), ranks=2).succeeds()
            made[layout] = what_it_was(folder, folder / "log")
        return made[layout]

    return of


def what_it_was(folder, log):
    shards = {path.name: path.read_bytes() for path in (folder / "save" / f"iter_{STEPS:07d}").glob("*.safetensors")}
    return {key: rows(log, key) for key in ("lm loss", "grad-norm")}, shards


def killed(folder, layout, *more):
    """A run whose rank 1 is killed after a copy; where its copies lie."""
    save = folder / "save"
    job = Job(folder, *with_copies(layout, save, *more), ranks=2)
    job.until("iteration 4 is copied to peers")
    job.processes[1].kill()
    codes = job.wait(30)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -1000), (codes, job.err())
    return place_of(str(save), str(folder / "disk"), json.loads((save / FILE).read_text())["run"])


def goes_on(folder, layout, uninterrupted, *more):
    """Started again with the same command line, to the end: what it says it went on from. Losses, norms and the last
    checkpoint are those of a run that nothing happened to, and nothing is left in memory and on the disk."""
    job = Job(folder, *with_copies(layout, folder / "save", "--jsonl", folder / "log", *more), ranks=2).succeeds()
    found, shards = what_it_was(folder, folder / "log")
    wanted, wanted_shards = uninterrupted(layout)
    first = min(found["lm loss"])
    assert found == {key: {i: value for i, value in of.items() if i >= first} for key, of in wanted.items()}
    assert shards == wanted_shards
    return job.out(), first - 1


def nothing_is_left(place):
    return not place.memory.parent.exists() and not place.disk.parent.exists()


@pytest.mark.parametrize("layout", ["zero1", *(pytest.param(name, marks=pytest.mark.full) for name in ("tp2", "pp2"))])
def test_kill_9_and_on_from_memory(tmp_path, uninterrupted, layout):
    place = killed(tmp_path, layout)
    said, iteration = goes_on(tmp_path, layout, uninterrupted)
    assert f"loading iteration {iteration} from copies in host memory (" in said and iteration >= 4 and iteration % 2 == 0
    assert "save holds no checkpoint yet)" in said and nothing_is_left(place)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_kill_9_while_copying(tmp_path, uninterrupted, seed):
    """One rank or all, at a random moment of a run that copies every step: on from the last copy that was said, or a newer."""
    draw = random.Random(seed)
    layout, save, often = draw.choice(list(LAYOUTS)), tmp_path / "save", ("--peer-checkpoint-interval", 1)
    job = Job(tmp_path, *with_copies(layout, save, *often), ranks=2)
    job.until(f"iteration {draw.randrange(1, STEPS - 5):8d}/")
    time.sleep(draw.uniform(0.0, 0.05))
    for process in job.processes if seed % 2 else [draw.choice(job.processes)]:
        process.kill()
    assert -1000 not in job.wait(30), job.err()
    said = [int(number) for number in re.findall(r"iteration (\d+) is copied", job.out())]
    out, iteration = goes_on(tmp_path, layout, uninterrupted, *often)
    assert iteration >= max(said, default=0)
    assert (f"loading iteration {iteration} from copies in host memory" if iteration else "STARTING FRESH") in out


def flip(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


@pytest.mark.full
@pytest.mark.parametrize("lost", ["memory", "memory and a shard"])
def test_local_disk_then_the_shared_folder(tmp_path, uninterrupted, lost):
    """Local disk in place of memory; the shared folder where neither has every shard whole; each step down is named."""
    save = tmp_path / "save"
    Job(tmp_path, *run_of("zero1", save, "--exit-interval", 3), ranks=2).succeeds()
    place = killed(tmp_path, "zero1")
    shutil.rmtree(place.memory)
    if lost != "memory":
        for path in place.disk.glob("iter*/shard_00001.safetensors"):
            flip(path)
    said, iteration = goes_on(tmp_path, "zero1", uninterrupted)
    if lost == "memory":
        assert f"loading iteration {iteration} from copies in local disk ({save} holds iteration 3)" in said and iteration >= 4
    else:
        assert f"loading iteration 3 from {save}" in said and iteration == 3
        assert "shard_00001.safetensors is damaged: the checksum of" in said and "(a copy in local disk)" in said
        assert "no host has shard_00001.safetensors whole" in said
    assert nothing_is_left(place)


@pytest.mark.full
def test_an_elastic_restart(tmp_path, uninterrupted):
    """torchrun starts new processes in place of those of which one was killed; they go on from memory."""
    save, out = tmp_path / "save", tmp_path / "run.out"
    flags = with_copies("zero1", save, "--jsonl", tmp_path / "log", "--train-iters", 4000)
    run = torchrun(tmp_path, "run", *flags, more=["--max-restarts", "1"])
    try:
        wait_for(out, "iteration 4 is copied to peers", run)
        first = json.loads((save / FILE).read_text())
        os.kill(next(pid for pid in children_of(run.pid) if pid != first["pid"]), signal.SIGKILL)  # rank 1
        wait_for(out, "from copies in host memory", run)
        iteration = int(re.search(r"loading iteration (\d+) from copies", out.read_text())[1])
        wait_for(out, f"iteration {iteration + 8:8d}/", run)
        os.kill(run.pid, signal.SIGTERM)
        run.wait(60)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    wanted, log = uninterrupted("zero1")[0]["lm loss"], (tmp_path / "log").read_text().splitlines()
    losses = [(row["iteration"], row["lm loss"]) for row in map(json.loads, log) if "lm loss" in row]
    assert all(loss == wanted[i] for i, loss in losses if i <= STEPS) and max(losses)[0] >= iteration + 8
    assert tracker(save) == max(losses)[0]
    assert nothing_is_left(place_of(str(save), str(tmp_path / "disk"), first["run"]))


def test_two_runs_in_one_folder(tmp_path):
    """The second is refused before it computes anything; the first does not notice."""
    save = tmp_path / "save"
    first = Job(tmp_path, *MOCK, "--train-iters", 100000, "--save", save, "--load", save, "--save-interval", 50)
    first.until("iteration        1")
    second = Job(tmp_path, *MOCK, "--train-iters", 2, "--save", save)
    second.fails("another run saves into it", f"process {first.processes[0].pid} on", "a folder of its own")
    assert "lm loss" not in second.out()
    os.kill(first.processes[0].pid, signal.SIGTERM)
    first.succeeds()
    last = tracker(save)
    Job(tmp_path, *MOCK, "--train-iters", last + 1, "--save", save, "--load", save).succeeds()


def test_a_folder_that_cannot_be_written(tmp_path):
    """Said at the start, not when the first checkpoint is due."""
    job = Job(tmp_path, *MOCK, "--train-iters", 2, "--save", "/proc/no-place-to-save", ranks=2)
    job.fails("--save /proc/no-place-to-save: nothing can be written there: ")
    assert "lm loss" not in job.out()
