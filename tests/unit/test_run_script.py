"""tests/run.sh with a Python that only notes how it is called."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = "tests/parity tests/schedules", "--ignore=tests/parity --ignore=tests/schedules"


def start(tmp_path, body, *arguments):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$# $*" >> "{tmp_path}/calls"\n[ "$2" = ruff ] && exit 0\n{body}\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "TMPDIR": str(tmp_path)}
    return subprocess.Popen(["bash", str(ROOT / "tests" / "run.sh"), *arguments], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def calls(tmp_path):
    return sorted((tmp_path / "calls").read_text().splitlines())


@pytest.mark.parametrize("fails", ["none", "first", "second"])
def test_either_process_that_fails_is_told(tmp_path, fails):
    fault = {"none": "false", "first": '[[ "$*" != *ignore* ]]', "second": '[[ "$*" = *ignore* ]]'}[fails]
    run = start(tmp_path, f'echo "ran $*"; if {fault}; then exit 3; fi', "--full")
    said = run.communicate(timeout=30)[0]
    assert run.returncode == (0 if fails == "none" else 3)
    assert said.rstrip().endswith("[tests] all passed" if fails == "none" else "[tests] FAILED")
    assert f"ran -m pytest --full {FIRST}" in said and f"ran -m pytest --full {SECOND}" in said
    assert [path.name for path in tmp_path.glob("tmp.*")] == []


def test_other_arguments_are_one_process_as_given(tmp_path):
    run = start(tmp_path, "exit 5", "-k", "one or two")
    run.communicate(timeout=30)
    assert run.returncode == 5 and calls(tmp_path) == ["3 -m ruff check", "4 -m pytest -k one or two"]


def test_an_interrupt_ends_both(tmp_path):
    run = start(tmp_path, f"echo ready $$ >> '{tmp_path}/calls'; exec sleep 20")
    deadline = time.monotonic() + 20
    while not (tmp_path / "calls").exists() or len(ready := re.findall(r"ready (\d+)", (tmp_path / "calls").read_text())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=10)  # also the end of everybody who holds its output
    assert run.returncode == 130 and list(tmp_path.glob("tmp.*")) == []
    assert not any(Path("/proc", pid).exists() for pid in ready)
