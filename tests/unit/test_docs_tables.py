"""Tables of docs: flags and messages that exist, tests that are there, commands that print the figures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.arguments import ELSEWHERE, build_parser

ROOT = Path(__file__).resolve().parents[2]
OURS = {flag for action in build_parser()._actions for flag in action.option_strings}
PROGRAMS = ["Megatron-LM", "DeepSpeed", "PyTorch", "torchtitan"]


def rows(page):
    """The cells of each row of the page's tables, heads left out, under the first word of its table's head."""
    tables, head, before = {}, None, ""
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if set(line) <= set("|- ") and line.startswith("|--"):
            head = before
        elif line.startswith("|") and head:
            tables.setdefault(head, []).append(cells)
        elif not line.startswith("|"):
            head = None
        before = cells[0]
    return tables


def flags(text):
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", text)


@pytest.mark.parametrize("program", PROGRAMS)
def test_flags_of_ours_are_flags(program):
    table = rows("coming_from.md")[program]
    assert all(len(cells) == 2 for cells in table)
    named = [flag for _, ours in table for flag in flags(ours)]
    assert len(named) >= len(table) // 2
    assert [flag for flag in named if flag not in OURS] == []


def test_flags_of_megatron_are_known_or_answered():
    table = rows("coming_from.md")["Megatron-LM"]
    theirs = [(flag, ours) for cell, ours in table for flag in flags(cell)]
    assert [flag for flag, _ in theirs if flag not in OURS and flag not in ELSEWHERE] == []
    assert [flag for flag, ours in theirs if ours.startswith("the same") and flag not in OURS] == []


def test_tests_that_articles_names_are_there():
    text = (ROOT / "docs" / "articles.md").read_text(encoding="utf-8")
    pairs = re.findall(r"((?:`test_\w+`(?:, | and )?)+) in `(tests/[\w/]+\.py)`", text)
    assert len(pairs) >= 12
    for names, path in pairs:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert [name for name in re.findall(r"test_\w+", names) if f"def {name}(" not in text] == [], path


MESSAGES = [  # of the program, as the page shows them, and without what differs
    "another rank is gone", "of its axis, which did not arrive", "are other ranks gone?", "the first value that is not finite is",
    "run again, every microbatch is finite on every rank", "the checkpoint holds another model", "holds no checkpoint",
    "is DAMAGED and is skipped", "no checkpoint is whole", "another run saves into it (", "holds weights only", "format version",
    "data wait:", "bubble:", "peak memory (GB)", "grad norm",
]  # fmt: skip


def test_messages_in_troubleshooting_are_the_programs():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "megatron_lite").rglob("*.py"))
    assert [message for message in MESSAGES if message not in page or message not in sources] == []


@pytest.mark.parametrize(("command", "shares"), [
    ("gpipe --pp 4 --microbatches 8", ("27.3", "37.5")), ("1f1b --pp 4 --microbatches 8", ("27.3", "37.5")),
    ("gpipe --pp 16 --microbatches 16", ("48.4", "93.8")),  # 93.75, rounded
    ("interleaved --pp 4 --chunks 2 --microbatches 8", ("15.8", "18.8")),
])  # fmt: skip
def test_bubbles_in_articles(command, shares):
    text = (ROOT / "docs" / "articles.md").read_text(encoding="utf-8")
    assert f"python tools/draw_schedule.py --schedule {command}\n" in text and f"{shares[0]} %" in text
    draw = [sys.executable, "tools/draw_schedule.py", "--schedule", *command.split()]
    drawn = subprocess.run(draw, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"= {shares[0]}% of the step, {shares[1]}% of the work" in drawn
    assert "interleaved" not in command or "peak activations  5.5 " in drawn
