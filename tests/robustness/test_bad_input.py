"""pretrain_gpt.py end to end, when something is wrong: one clear line, every rank ends, what was saved still loads.

Most runs are forked from a server that has everything loaded (a rank then starts at once, not in five seconds); those that
are about starting up or about torchrun use the real command.
"""

import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedWriter

pytestmark = pytest.mark.usefixtures("server")
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30.0  # seconds a failing run may take to be gone
SIZES = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
         "--lr 1e-2 --lr-decay-style constant --log-interval 1 --peak-tflops 1 --distributed-backend gloo").split()  # fmt: skip
MOCK = [*SIZES, "--mock-data", "--vocab-size", "128", "--hidden-dropout", "0.1"]


def be_a_rank(argv, env, folder, rank, file_limit):
    """Body of a forked rank: becomes `python pretrain_gpt.py argv` with its own output files."""
    for fd, name in ((1, f"out-{rank}"), (2, f"err-{rank}")):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), fd)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    os.environ.update(env)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    from pretrain_gpt import main

    sys.exit(main(argv))


class Job:
    """A run of `ranks` processes without a launcher in between: each rank's exit code and output for itself."""

    count = 0

    def __init__(self, folder, *flags, ranks=1, file_limit=None):
        Job.count += 1
        self.folder = folder / f"job-{Job.count}"
        self.folder.mkdir()
        context = multiprocessing.get_context("forkserver")
        self.processes, self.started = [], time.monotonic()
        port = free_port()
        for rank in range(ranks):
            env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            if ranks > 1:
                env |= {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
            env = {key: str(value) for key, value in env.items()}
            arguments = ([str(flag) for flag in flags], env, str(self.folder), rank, file_limit)
            self.processes.append(context.Process(target=be_a_rank, args=arguments, daemon=True))
            self.processes[-1].start()

    def wait(self, limit=60.0):
        """Exit codes of all ranks; -1000 for one that had to be killed."""
        deadline, codes = time.monotonic() + limit, []
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode if process.exitcode is not None else -1000)
            process.kill()
        return codes

    def out(self, rank=0):
        path = self.folder / f"out-{rank}"
        return path.read_text() if path.exists() else ""

    def err(self, rank=0):
        path = self.folder / f"err-{rank}"
        return path.read_text() if path.exists() else ""

    def succeeds(self):
        codes = self.wait()
        assert codes == [0] * len(codes), [self.err(rank)[-2000:] for rank in range(len(codes))]
        return self

    def fails(self, *words, limit=LIMIT):
        """Every rank ends in time with an error code and no traceback; a line somewhere has all the words."""
        codes = self.wait(limit)
        errors = [self.err(rank) for rank in range(len(codes))]
        assert all(code not in (0, -1000) for code in codes), (codes, errors)
        assert not any("Traceback" in text for text in errors), errors
        for text in errors:
            assert 0 < len(text.strip().splitlines()) <= 4, errors
        lines = [line for text in errors for line in text.splitlines()]
        assert any(all(word in line for word in words) for line in lines), (words, errors)
        return codes

    def until(self, text, limit=40.0):
        """Wait for rank 0 to print `text`."""
        deadline = time.monotonic() + limit
        while text not in self.out():
            assert time.monotonic() < deadline and self.processes[0].is_alive(), (text, self.out()[-500:], self.err()[-2000:])
            time.sleep(0.02)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def tracker(folder):
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def rows(path, key="lm loss"):
    """{iteration: value} of a JSONL log."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["iteration"]: row[key] for row in found if key in row}


@pytest.fixture
def corpus(tmp_path):
    """40 documents of 100 ids below 128."""
    generator = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(40):
            writer.add_document(generator.integers(0, 128, 100))
    return tmp_path / "corpus"


def train_on(corpus, *more):
    return [*SIZES, "--data-path", corpus, "--vocab-size", 128, "--split", "100", "--train-iters", 4, *more]


# ------------------------------------------------------------------------------------------------------------- the data


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_file(tmp_path, corpus, missing, ranks):
    Path(f"{corpus}{missing}").unlink()
    Job(tmp_path, *train_on(corpus), ranks=ranks).fails(f"corpus{missing}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_truncated_file(tmp_path, corpus, ranks):
    """Refused at the start, not when training reaches the end (D14), with both sizes."""
    path = Path(f"{corpus}.bin")
    path.write_bytes(path.read_bytes()[:-10])
    Job(tmp_path, *train_on(corpus), ranks=ranks).fails("corpus.bin", "7990", "8000")


@pytest.mark.parametrize("text", [b"", b"not an index\n" * 9, b"MMIDIDX\x00\x00" + bytes(40)], ids=["empty", "text", "zeros"])
def test_a_foreign_index(tmp_path, corpus, text):
    Path(f"{corpus}.idx").write_bytes(text)
    Job(tmp_path, *train_on(corpus)).fails("corpus.idx")


def test_too_little_data(tmp_path, corpus):
    Job(tmp_path, *train_on(corpus, "--seq-length", 5000)).fails("4000 tokens", "5001", "--seq-length")


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, []), (2, ["--tensor-model-parallel-size", 2]),
                                               (2, ["--pipeline-model-parallel-size", 2])])  # fmt: skip
def test_an_id_outside_the_vocabulary(tmp_path, ranks, flags):
    """One document of many has it, so one rank alone may read it, in the middle of training; all ranks must end."""
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        for document in range(40):
            writer.add_document(np.full(100, 777 if document == 5 else 3))
    job = Job(tmp_path, *train_on(tmp_path / "corpus", "--train-iters", 100, *flags), ranks=ranks)
    job.fails("777", "vocabulary", "128")


def test_a_bad_id_in_the_validation_data(tmp_path):
    """One of two ranks meets it in an evaluation, while the other waits for its share of the loss."""
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        for document in range(40):
            writer.add_document(np.full(100, 777 if document == 30 else 3))
    flags = ["--split", "50,50", "--eval-interval", 1, "--eval-iters", 40]
    Job(tmp_path, *train_on(tmp_path / "corpus", *flags), ranks=2).fails("777", "vocabulary", "128")


def test_an_unreadable_tokenizer(tmp_path, corpus):
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{ this is no JSON")
    (tmp_path / "noise.model").write_bytes(b"\x00\x01noise" * 100)
    for kind, path in (("HuggingFaceTokenizer", "nothing-there"), ("HuggingFaceTokenizer", "folder"),
                       ("HuggingFaceTokenizer", "broken"), ("SentencePieceTokenizer", "nothing-there"),
                       ("SentencePieceTokenizer", "noise.model"), ("SentencePieceTokenizer", "folder")):  # fmt: skip
        tokenizer = ["--tokenizer-type", kind, "--tokenizer-model", tmp_path / path]
        Job(tmp_path, *SIZES, "--data-path", corpus, "--train-iters", 4, *tokenizer).fails(path)


def test_a_vocabulary_smaller_than_the_tokenizers(tmp_path, corpus):
    flags = [*SIZES, "--data-path", corpus, "--train-iters", 4, "--tokenizer-type", "ByteTokenizer", "--vocab-size", 100]
    Job(tmp_path, *flags).fails("--vocab-size 100", "257")


# ------------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, ["--tensor-model-parallel-size", 2])])
def test_a_full_disk(tmp_path, ranks, flags):
    """A write error of a save (C03): the run ends, the checkpoint before is the latest and loads."""
    save = tmp_path / "save"
    flags = [*SIZES, "--mock-data", "--vocab-size", 60000, "--save", save, "--load", save, "--save-interval", 2, *flags]
    Job(tmp_path, *flags, "--train-iters", 1, "--no-save-optim", ranks=ranks).succeeds()  # smaller than the limit
    before = sorted(p.name for p in (save / "iter_0000001").iterdir())
    job = Job(tmp_path, *flags, "--train-iters", 9, "--no-load-optim", ranks=ranks, file_limit=10 << 20)
    job.fails("File too large")
    assert tracker(save) == 1 and sorted(p.name for p in (save / "iter_0000001").iterdir()) == before
    job = Job(tmp_path, *flags, "--train-iters", 2, "--no-load-optim", ranks=ranks).succeeds()
    assert "loading iteration 1" in job.out() and tracker(save) == 2
    assert not [path.name for path in save.iterdir() if path.name.startswith(".tmp")]


def test_nothing_to_load(tmp_path):
    """Never from random weights because a path is wrong (C06)."""
    Job(tmp_path, *MOCK, "--train-iters", 2, "--load", tmp_path / "no-such").fails("no-such", "does not exist")
    (tmp_path / "empty").mkdir()
    Job(tmp_path, *MOCK, "--train-iters", 2, "--load", tmp_path / "empty").fails("empty", "holds no checkpoint")
    tracker_file = tmp_path / "empty" / "latest_checkpointed_iteration.txt"
    tracker_file.write_text("garbage")
    Job(tmp_path, *MOCK, "--train-iters", 2, "--load", tmp_path / "empty", ranks=2).fails(tracker_file.name, "garbage")


@pytest.mark.parametrize("how", ["truncated", "deleted"])
def test_a_damaged_checkpoint(tmp_path, how):
    """A lone checkpoint without one of its shards, or with half of it, is refused by name: no random weights (C01)."""
    save = tmp_path / "save"
    flags = [*MOCK, "--save", save, "--load", save]
    Job(tmp_path, *flags, "--train-iters", 1).succeeds()
    shard = next((save / "iter_0000001").glob("*.safetensors"))
    if how == "deleted":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    Job(tmp_path, *flags, "--train-iters", 2).fails(shard.name)


def test_the_same_command_line_resumes(tmp_path):
    """Stopped and started again, with dropout: losses and norms are those of the uninterrupted run, bit for bit (C10);
    the last iteration is saved although it is no multiple of the interval (C20)."""
    flags = [*MOCK, "--train-iters", 5]
    Job(tmp_path, *flags, "--jsonl", tmp_path / "straight").succeeds()
    save = tmp_path / "save"
    again = [*flags, "--save", save, "--load", save, "--save-interval", 2, "--jsonl", tmp_path / "stopped", "--exit-interval", 3]
    job = Job(tmp_path, *again).succeeds()
    assert "STARTING FRESH" in job.out() and tracker(save) == 3
    job = Job(tmp_path, *again).succeeds()
    assert "loading iteration 3" in job.out() and tracker(save) == 5
    for key in ("lm loss", "grad-norm", "learning-rate", "consumed-samples"):
        assert rows(tmp_path / "stopped", key) == rows(tmp_path / "straight", key), key
    assert sorted(p.name for p in save.iterdir() if p.is_dir()) == [f"iter_{n:07d}" for n in (2, 3, 4, 5)]
    job = Job(tmp_path, *again).succeeds()  # nothing left to do
    assert tracker(save) == 5 and "iteration        6" not in job.out()


@pytest.mark.parametrize("every", [1, 3])
def test_weights_that_are_lost_are_not_saved(tmp_path, every):
    """NaN stops the run with a clear line, and the checkpoint before it stays the latest (N11)."""
    save = tmp_path / "save"
    flags = [*MOCK, "--save", save, "--load", save, "--save-interval", every]
    Job(tmp_path, *flags, "--train-iters", 2).succeeds()
    job = Job(tmp_path, *flags, "--train-iters", 40, "--lr", "1e30", ranks=2)
    job.fails("finite", "--lr")
    assert tracker(save) == 2
    skipped = [line for line in job.out().splitlines() if "number of skipped iterations:   1" in line]
    assert len(skipped) >= 5  # shown while it happens


# ------------------------------------------------------------------------------------------------------ ranks that vanish


@pytest.mark.parametrize("flags", [[], ["--tensor-model-parallel-size", 2], ["--pipeline-model-parallel-size", 2]])
def test_a_killed_rank(tmp_path, flags):
    save = tmp_path / "save"
    flags = [*MOCK, "--save", save, "--load", save, "--save-interval", 2, *flags]
    job = Job(tmp_path, *flags, "--train-iters", 100000, ranks=2)
    job.until("saved")
    job.until("iteration        5")
    os.kill(job.processes[1].pid, signal.SIGKILL)
    codes = job.wait(LIMIT)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -1000), (codes, job.err())
    lines = job.err().strip().splitlines()
    assert "Traceback" not in job.err() and 0 < len(lines) <= 3, job.err()
    assert any("rank 1" in line or "peer" in line or "gone" in line for line in lines), job.err()
    last = tracker(save)
    assert last >= 4
    job = Job(tmp_path, *flags, "--train-iters", last + 1, ranks=2).succeeds()
    assert f"loading iteration {last}" in job.out()


def torchrun(folder, name, *flags, ranks=2, more=(), **options):
    """The real command, output to files."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *more,
               str(ROOT / "pretrain_gpt.py"), *map(str, flags)]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(folder / f"{name}.out", "w") as out, open(folder / f"{name}.err", "w") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=folder, start_new_session=True, **options)


def children_of(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def wait_for(path, text, process, limit=60.0):
    deadline = time.monotonic() + limit
    while text not in path.read_text():
        assert time.monotonic() < deadline and process.poll() is None, path.read_text()[-2000:]
        time.sleep(0.05)


@pytest.mark.parametrize("everyone", [False, True])
def test_sigterm_saves(tmp_path, everyone):
    """To torchrun's parent, which passes it on (R01), or as a cluster does it to every process at once, so that the ranks
    get it twice (R02): a checkpoint of the current iteration, and the end, well before torchrun's SIGKILL."""
    save = tmp_path / "save"
    flags = [*MOCK, "--train-iters", 100000, "--save", save, "--load", save, "--pipeline-model-parallel-size", 2]
    flags += ["--eval-interval", 2, "--eval-iters", 100000] if everyone else []  # it would be evaluating for minutes
    run = torchrun(tmp_path, "run", *flags)
    try:
        wait_for(tmp_path / "run.out", f"iteration        {2 if everyone else 5}", run)
        time.sleep(0.5)
        ranks = children_of(run.pid)
        assert len(ranks) == 2
        began = time.monotonic()
        for pid in ([*ranks] if everyone else []) + [run.pid]:
            os.kill(pid, signal.SIGTERM)
        run.wait(LIMIT)
        assert time.monotonic() - began < 20
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    said = (tmp_path / "run.out").read_text()
    assert "stopping after iteration" in said, (tmp_path / "run.err").read_text()[-3000:]
    last = tracker(save)
    assert last == 2 if everyone else last >= 5
    assert f"stopping after iteration {last}: a signal" in said
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    job = Job(tmp_path, *flags, "--eval-iters", 1, "--eval-interval", 1, "--train-iters", last + 1, ranks=2).succeeds()
    assert f"loading iteration {last}" in job.out()


def test_a_second_interrupt_ends_at_once(tmp_path):
    """Somebody who presses Ctrl-C twice does not want to wait."""
    job = Job(tmp_path, *MOCK, "--train-iters", 100000, "--save", tmp_path / "save", "--global-batch-size", 4000)
    job.until("ready to train")
    time.sleep(0.5)
    pid = job.processes[0].pid
    os.kill(pid, signal.SIGINT)
    time.sleep(1.5)
    assert job.processes[0].is_alive()  # finishing its long step
    os.kill(pid, signal.SIGINT)
    assert job.wait(5) == [128 + signal.SIGINT]
    assert "Traceback" not in job.err() and "signal 2" in job.err()


def test_a_second_sigterm_is_no_hurry(tmp_path):
    """A launcher may repeat itself, seconds later: the step is still finished and saved."""
    save = tmp_path / "save"
    job = Job(tmp_path, *MOCK, "--train-iters", 100000, "--save", save, "--global-batch-size", 800)
    job.until("ready to train")
    for pause in (0.5, 1.3):
        time.sleep(pause)
        os.kill(job.processes[0].pid, signal.SIGTERM)
    job.succeeds()
    assert f"stopping after iteration {tracker(save)}: a signal" in job.out()


# ------------------------------------------------------------------------------------------------------------- starting


def test_a_bad_flag_under_a_restarting_launcher(tmp_path):
    """Our message is there, before any process group is made, and the whole ends soon (R04)."""
    began = time.monotonic()
    run = torchrun(tmp_path, "run", *MOCK, "--train-iters", 2, "--num-layer", 3, more=["--max-restarts", "3"])
    assert run.wait(LIMIT) != 0
    assert time.monotonic() - began < LIMIT
    said = (tmp_path / "run.err").read_text()
    ours = [line for line in said.splitlines() if "--num-layer 3" in line]
    assert ours and all("abbreviations are not accepted; did you mean --num-layers or --num-layers-per-" in line for line in ours)
    assert len(ours) <= 4  # once per try: one rank speaks for all
    assert not (tmp_path / "run.out").read_text()


@pytest.mark.full
def test_two_runs_at_the_same_time(tmp_path):
    """Neither takes the other's port (R05), and both compute the same."""
    flags = [*MOCK, "--train-iters", 2, "--tensor-model-parallel-size", 2]
    runs = [torchrun(tmp_path, name, *flags, "--jsonl", tmp_path / f"{name}.jsonl") for name in "ab"]
    for name, run in zip("ab", runs, strict=True):
        assert run.wait(100) == 0, (tmp_path / f"{name}.err").read_text()[-2000:]
    assert rows(tmp_path / "a.jsonl") == rows(tmp_path / "b.jsonl")


def test_starting_needs_nothing_special(tmp_path):
    """Plain python without torchrun; no GPU, no apex, no flash-attn, no Triton, no Transformer Engine (R06)."""
    for name in ("apex", "flash_attn", "transformer_engine", "triton", "wandb", "datasets", "transformers"):
        (tmp_path / "shadow" / name).mkdir(parents=True)
        (tmp_path / "shadow" / name / "__init__.py").write_text("raise ImportError('not here')")
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(tmp_path / "shadow"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *MOCK, "--train-iters", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and "iteration        2/       2" in done.stdout and not done.stderr, done.stderr
    helped = subprocess.run([*command[:2], "--help"], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
    assert helped.returncode == 0 and "--tensor-model-parallel-size" in helped.stdout


# --------------------------------------------------------------------------------------------------- numbers of the loop


def test_validation_loss_does_not_depend_on_the_cut(tmp_path):
    """Micro-batch, data parallel, pipeline, tensor (N13); and evaluating changes nothing in training (N14)."""
    exact = ["--fp64", "--hidden-dropout", "0.1", "--attention-dropout", "0"]
    flags = [*SIZES, "--num-layers", 4, "--mock-data", "--vocab-size", 128, "--train-iters", 1, *exact]
    watch = ["--eval-interval", 1, "--eval-iters", 2, "--lr", "1e-30"]
    cuts = {"micro 2": (1, []), "micro 1": (1, ["--micro-batch-size", 1]), "dp 2": (2, []),
            "pp 2": (2, ["--pipeline-model-parallel-size", 2]), "tp 2": (2, ["--tensor-model-parallel-size", 2]),
            "V": (2, ["--pipeline-model-parallel-size", 2, "--pipeline-schedule", "zbv"])}  # fmt: skip
    found = {}
    for name, (ranks, more) in cuts.items():
        log = tmp_path / name.replace(" ", "")
        Job(tmp_path, *flags, *watch, *more, "--jsonl", log, ranks=ranks).succeeds()
        found[name] = rows(log, "lm loss validation")[1]
    assert found == {name: pytest.approx(found["micro 2"], rel=1e-12) for name in cuts}
    assert 4.5 < found["micro 2"] < 5.3  # ln 128 = 4.85: a mean per token


def test_evaluation_does_not_change_training(tmp_path):
    flags = [*MOCK, "--train-iters", 4]
    Job(tmp_path, *flags, "--jsonl", tmp_path / "without").succeeds()
    Job(tmp_path, *flags, "--jsonl", tmp_path / "with", "--eval-interval", 1, "--eval-iters", 2).succeeds()
    Job(tmp_path, *flags, "--jsonl", tmp_path / "still", "--eval-interval", 1, "--eval-iters", 2, "--lr", 0).succeeds()
    for key in ("lm loss", "grad-norm"):
        assert rows(tmp_path / "with", key) == rows(tmp_path / "without", key)
    seen = rows(tmp_path / "still", "lm loss validation")
    assert len(seen) == 4 and len(set(seen.values())) == 1  # always the same samples
    assert len(set(rows(tmp_path / "with", "lm loss validation").values())) == 4


def test_the_length_of_a_run_does_not_change_its_beginning(tmp_path, corpus):
    """First losses for --train-iters 4 and 40, with several epochs of real data (D24)."""
    for length in (4, 40):
        Job(tmp_path, *train_on(corpus, "--jsonl", tmp_path / f"{length}", "--train-iters", length)).succeeds()
    short, long = rows(tmp_path / "4"), rows(tmp_path / "40")
    assert len(short) == 4 and short == {i: long[i] for i in range(1, 5)} and len(long) == 40


def test_memory_does_not_grow(tmp_path):
    """Peak resident memory after 60 steps against after 20 (R09)."""
    Job(tmp_path, *MOCK, "--train-iters", 60, "--jsonl", tmp_path / "log", "--eval-interval", 10, "--eval-iters", 1).succeeds()
    peak = rows(tmp_path / "log", "mem-max-allocated-bytes")
    assert peak[60] < 1.05 * peak[20]
