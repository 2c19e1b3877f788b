"""The example scripts: each one's plan, two tiny steps of each, and the quickstart from its first to its last section."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATIONS = {"gpt_125m": 1, "gpt2_1.5b": 8, "llama3_8b": 8, "llama2_70b": 64, "gpt3_175b": 1024,
                  "llama3_8b_128k": 64, "mixtral_8x7b": 64}  # script -> ranks
SECTIONS = ["1. The plan", "2. The text", "3. Training", "4. The same first", "5. The checkpoint", "6. Text", "Done in"]


def run(script, *arguments, timeout=180, **variables):
    return subprocess.run(["bash", f"examples/{script}.sh", *arguments], cwd=ROOT, env=os.environ | variables,
                          capture_output=True, text=True, timeout=timeout)  # fmt: skip


def test_all_scripts_are_known():
    assert {path.stem for path in (ROOT / "examples").glob("*.sh")} == {*CONFIGURATIONS, "quickstart", "launch"}


def time_of(script):
    """How the line of the planned step begins."""
    return "bytes on the wires and time of a step" if script in ("llama3_8b_128k", "mixtral_8x7b") else "step"


@pytest.mark.parametrize("script", CONFIGURATIONS)
def test_dry_run(script):
    done = run(script, "--seed", "7", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert f"= {CONFIGURATIONS[script]} rank" in done.stdout
    text = (ROOT / "examples" / f"{script}.sh").read_text(encoding="utf-8")
    figures = re.search(r"prints, among other lines:\n((?:#     .*\n)+)", text).group(1).replace("#     ", "").splitlines()
    assert [figure.split(":")[0] for figure in figures] == ["largest rank", "memory", time_of(script)]
    assert [figure for figure in figures if figure not in done.stdout.splitlines()] == []


@pytest.mark.parametrize("script", ["gpt_125m", "llama2_70b", *(pytest.param(name, marks=pytest.mark.full) for name in
                                    CONFIGURATIONS if name not in ("gpt_125m", "llama2_70b"))])  # fmt: skip
def test_two_tiny_steps(script, tmp_path):
    done = run(script, "--seed", "7", DEBUG_CPU="1", SAVE=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        2/       2" in done.stdout
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.parametrize("script", [*CONFIGURATIONS, "quickstart", "launch"])
def test_syntax(script):
    subprocess.run(["bash", "-n", f"examples/{script}.sh"], cwd=ROOT, check=True)


def test_flags_given_to_a_script_win():
    assert "2 microbatches" in run("llama3_8b", "--global-batch-size", "8", DRY_RUN="1").stdout


def check_quickstart(folder, timeout, **variables):
    done = run("quickstart", DEVICE="cpu", QUICKSTART_OUT=str(folder), timeout=timeout, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    places = [done.stdout.index(title) for title in SECTIONS]
    assert places == sorted(places)
    assert "outside" not in done.stdout and done.stdout.count("largest difference") == 2
    assert done.stderr == ""


def test_short_quickstart(tmp_path):
    check_quickstart(tmp_path / "q", 600, QUICKSTART_ITERS="4")


@pytest.mark.full
def test_quickstart(tmp_path):
    check_quickstart(tmp_path / "q", 900)
