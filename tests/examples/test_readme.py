"""Every command in a bash block of the README, CONTRIBUTING and docs runs, in order, in a fresh folder.

The large trainings run with small sizes (the last of equal flags wins). Scripts with tests of their own are not run again.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"bash examples/quickstart.sh": "test_examples.py", "bash tests/run.sh": "this very run"}
SMALL = ("--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --seq-length 64 --max-position-embeddings 64 "
         "--micro-batch-size 1 --global-batch-size 2 --lr-warmup-iters 1 --train-iters 2 --distributed-backend gloo")  # fmt: skip


def commands(page):
    """The commands of a page's bash blocks, continued lines joined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def runnable(command):
    """The command with this interpreter, and small where it trains."""
    if "pretrain_gpt.py" in command and "--dry-run" not in command and "--help" not in command:
        command = f"{command} {SMALL}"
    command = re.sub(r"^torchrun ", f"{sys.executable} -m torch.distributed.run ", command)
    return re.sub(r"^python ", f"{sys.executable} ", command)


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like the checkout, with a text of one's own in it."""
    for name in ("pretrain_gpt.py", "megatron_lite", "tools", "examples", "benchmarks", "docs", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": f"This is document {n}. " + "The quick brown fox. " * 40}) for n in range(50)]
    (tmp_path / "my_text.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page, checkout):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_WAIT_POLICY": "passive"}
    for command in commands(page):
        if any(command.startswith(known) for known in ELSEWHERE):
            assert (ROOT / command.split()[1]).exists()
            continue
        done = subprocess.run(["bash", "-c", runnable(command)], cwd=checkout, env=environment, capture_output=True,
                              text=True, timeout=240)  # fmt: skip
        assert done.returncode == 0, f"{page}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"


def test_the_readme_has_commands():
    assert len(commands("README.md")) >= 8
