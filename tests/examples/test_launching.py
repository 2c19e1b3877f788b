"""Slurm, Kubernetes, Docker: syntax, fields, paths; the batch script, with stand-ins for Slurm's commands, around a trainer."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "examples" / "slurm"
BATCH = (SLURM / "pretrain.sbatch").read_text(encoding="utf-8")
JOB = (ROOT / "examples" / "kubernetes" / "pytorchjob.yaml").read_text(encoding="utf-8")
DOCKER = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["pretrain.sbatch", "check_node.sh"])
def test_syntax(script):
    subprocess.run(["bash", "-n", str(SLURM / script)], check=True)


def test_directives_come_before_the_first_command():
    lines = BATCH.splitlines()
    directives = [n for n, line in enumerate(lines) if line.startswith("#SBATCH ")]
    commands = [n for n, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(directives) < min(commands)  # Slurm reads no further
    said = {line.split()[1] for line in lines if line.startswith("#SBATCH ")}
    assert {"--ntasks-per-node=1", "--signal=B:USR1@120", "--requeue", "--open-mode=append"} <= said


def test_the_pods():
    spec = yaml.safe_load(JOB)
    assert (spec["apiVersion"], spec["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    master, worker = (spec["spec"]["pytorchReplicaSpecs"][kind] for kind in ("Master", "Worker"))
    assert master["template"] == worker["template"] and {master["restartPolicy"], worker["restartPolicy"]} == {"OnFailure"}
    pod = master["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch"
    said = {each["name"]: each["value"] for each in container["env"]}
    assert int(said["NNODES"]) == master["replicas"] + worker["replicas"] and master["replicas"] == 1
    assert int(said["GPUS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert all(any(said[name].startswith(path) for path in mounts.values()) for name in ("DATA_PATH", "SAVE"))
    memory = next(each for each in pod["volumes"] if mounts[each["name"]] == "/dev/shm")
    assert memory["emptyDir"]["medium"] == "Memory"
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert int(said["NNODES"]) * int(said["GPUS_PER_NODE"]) == 64  # of llama2_70b.sh, tests/examples/test_examples.py


def test_paths_exist():
    named = re.findall(r"examples/[\w./]+\.(?:sh|sbatch|yaml)", BATCH + JOB + DOCKER)
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKER, re.MULTILINE) for word in line.split()[:-1]]
    assert len(named) >= 5 and {"pretrain_gpt.py", "megatron_lite", "tools", "examples"} <= set(copied)
    assert [path for path in named + copied if not (ROOT / path).exists()] == []


# ---------------------------------------------------------------------------------------------------------------------
# The batch script
# ---------------------------------------------------------------------------------------------------------------------
STAND_INS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo node7; else echo "$*" >> "$STAND_INS/scontrol.log"; fi',
    "nvidia-smi": 'if [ "$1" = --list-gpus ]; then seq 1 "$GPUS"; else echo "0, [N/A], $USED"; fi',
}
TRAINER = """exec "$PYTHON" pretrain_gpt.py --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 \\
    --vocab-size 64 --micro-batch-size 1 --lr 1e-3 --train-iters 1000000 --log-interval 1 --mock-data \\
    --save "$SAVE" --load "$SAVE" "$@"
"""


@pytest.fixture
def cluster(tmp_path):
    """The environment of a Slurm job of one node, and a script to run there."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.sh").write_text(TRAINER)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_ID": "4711"}
    return {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "STAND_INS": str(tmp_path), "GPUS": "8", "USED": "3",
            "PYTHON": sys.executable, "SAVE": str(tmp_path / "save"), "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_job_that_is_told_to_stop_saves(cluster, tmp_path, number):
    out = tmp_path / "out"
    with out.open("w") as file:
        job = subprocess.Popen(["bash", str(SLURM / "pretrain.sbatch"), str(tmp_path / "train.sh")], env=cluster, stdout=file,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while "iteration        2/" not in out.read_text():
            assert job.poll() is None and time.monotonic() < deadline, out.read_text()[-2000:]
            time.sleep(0.05)
        job.send_signal(number)
        assert job.wait(60) == 0, out.read_text()[-2000:]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    last = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert last >= 2 and f"stopping after iteration {last}: a signal" in out.read_text()
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 4711\n" if number == signal.SIGUSR1 else "")


@pytest.mark.parametrize(("change", "words"), [
    ({"GPUS": "7"}, "7 GPUs answer, 8 are needed"), ({"USED": "70000"}, "GPU 0: 70000 MiB are in use"),
    ({"SAVE": "/proc/none"}, "SAVE=/proc/none cannot be written"),
])  # fmt: skip
def test_a_node_that_is_not_fit_ends_the_job(cluster, tmp_path, change, words):
    done = subprocess.run(["bash", str(SLURM / "pretrain.sbatch"), str(tmp_path / "train.sh")], env=cluster | change, text=True,
                          capture_output=True, timeout=60)  # fmt: skip
    assert done.returncode == 1 and words in done.stderr and "iteration" not in done.stdout


def test_what_a_job_lacks_is_said(cluster, tmp_path):
    unsaved = {name: value for name, value in cluster.items() if name != "SAVE"}
    for environment, arguments, words in ((cluster, [], "usage: sbatch"), (unsaved, ["train.sh"], "SAVE: is not set")):
        command = ["bash", str(SLURM / "pretrain.sbatch"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode != 0 and words in done.stderr


@pytest.mark.parametrize(("variables", "expected"), [
    ({"NNODES": "1"}, "--standalone"), ({"NNODES": "8", "NODE_RANK": "3"}, "--node-rank 3 --master-addr localhost"),
    ({"NNODES": "8", "RENDEZVOUS": "node7:24711", "MAX_RESTARTS": "3"},
     "--rdzv-backend c10d --rdzv-endpoint node7:24711 --rdzv-id pretrain --max-restarts 3"),
])  # fmt: skip
def test_what_torchrun_is_told(tmp_path, variables, expected):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\necho "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*"\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", "examples/llama2_70b.sh", "--seed", "7"], cwd=ROOT, capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHON": str(python)} | variables)  # fmt: skip
    assert done.stdout.startswith("300 -m torch.distributed.run ") and f" {expected} " in done.stdout
