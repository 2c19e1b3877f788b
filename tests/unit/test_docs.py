"""What the pages say is so: the README's tree and outputs, the table of models, flags and files that they name."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.arguments import build_parser, parse
from megatron_lite.convert.links import our_tensors
from megatron_lite.models.zoo import PRESETS
from megatron_lite.planner.params import count_parameters
from megatron_lite.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def block(page, name):
    """What stands between `<!-- name -->` and `<!-- /name -->`, without its fence."""
    inside = re.search(rf"<!-- {name} -->\n```\n(.*?)```\n<!-- /{name} -->", TEXT[page], re.DOTALL)
    assert inside, f"{page} has no block {name}"
    return inside[1]


def tree():
    """{path of each entry: its line} of the README's tree."""
    entries, folders = {}, []
    for line in block("README.md", "tree").splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name] if name.endswith("/") else []
        path = "".join([*folders[:depth], name])
        entries[path] = line
    return entries


def test_the_tree_names_what_is_there():
    for path, line in tree().items():
        assert (ROOT / path).exists(), f"README.md's tree names {path}, which is not there"
        assert len(line.split()) > 1, f"README.md's tree says nothing about {path}"


def test_everything_there_is_in_the_tree():
    named = tree()
    there = [*ROOT.glob("megatron_lite/**/*.py"), *ROOT.glob("tools/*.*"), *ROOT.glob("examples/*.*"), *ROOT.glob("docs/*.md"),
             *ROOT.glob("benchmarks/*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.py")]  # fmt: skip
    paths = [str(path.relative_to(ROOT)) for path in there if path.name != "__init__.py"]
    paths += [f"tests/{path.name}/" for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))]
    lacking = [path for path in paths if path not in named and path != "README.md"]
    assert lacking == [], f"README.md's tree lacks {lacking}: add a line for each"


def test_the_table_of_models_is_the_zoo():
    table = [line for line in TEXT["models.md"].splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table]
    expected = []
    for name in PRESETS:
        config, _ = parse(["--model", name, "--micro-batch-size", "1", "--dry-run"], 1)
        m = config.model
        sizes = (m.num_layers, m.hidden_size, m.num_attention_heads, m.num_kv_heads, m.ffn_hidden_size, config.data.vocab_size)
        built = our_tensors(m, config.data.vocab_size).values()
        number = sum(map(math.prod, built)) if m.num_experts else count_parameters(config)
        expected.append([name, f"{number:,}", *map(str, sizes), str(m.max_position_embeddings)])
    assert rows == expected


def test_the_table_of_schedules_is_what_they_cost():
    inside = TEXT["parallelism.md"].split("<!-- schedules -->")[1].split("<!-- /schedules -->")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in inside.strip().splitlines()[2:]]
    assert [row[0] for row in rows] == list(SCHEDULES)
    for name, chunks, bubble, peaks, _ in rows:
        command = f"--schedule {name} --pp 4 --microbatches 8"
        draw = [sys.executable, str(ROOT / "tools" / "draw_schedule.py"), *command.split()]
        printed = subprocess.run(draw, capture_output=True, text=True, check=True).stdout
        assert f"= {bubble}% of the step," in printed and f"peak activations  {peaks} (" in printed, printed
        assert int(chunks) == SCHEDULES[name].default_chunks


def known_flags():
    """Every flag of the program, the tools, the benchmarks, the scripts, and the launchers that the pages mention."""
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    sources = [*ROOT.glob("tools/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")]
    for path in sources:
        flags |= set(re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf-8")))
    return flags | {"--full", "--standalone", "--nproc-per-node", "--nnodes", "--no-build-isolation", "--nodes", "--signal",
                    "--requeue"}  # fmt: skip


@pytest.mark.parametrize("page", TEXT)
def test_flags_exist(page):
    text = TEXT[page]
    if page == "coming_from.md":  # its first column is other programs': test_docs_tables.py
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - known_flags()
    assert unknown == set(), f"{page} names flags that do not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page):
    text = TEXT[page.name]
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for path in re.findall(r"`((?:megatron_lite|tools|tests|examples|benchmarks|docs)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    rooms = "comm|convert|parallel|models|data|optim|planner|schedules|pipeline|training|checkpoint"
    for path in re.findall(rf"`((?:{rooms})/\w+\.py)`", text):
        assert (ROOT / "megatron_lite" / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("name, start", [("plan", "python pretrain_gpt.py --model llama2-70b"),
                                         ("schedule", "python tools/draw_schedule.py")])  # fmt: skip
def test_outputs_in_the_readme_are_real(name, start):
    text = TEXT["README.md"].replace("\\\n", " ")
    command = next(line for line in text.splitlines() if line.startswith(start))
    done = subprocess.run(["bash", "-c", command.replace("python", sys.executable, 1)], cwd=ROOT, capture_output=True, text=True)
    shown = [line for line in block("README.md", name).splitlines() if line.strip(" .")]
    printed = done.stdout.splitlines()
    assert shown and [line for line in shown if line not in printed] == [], "the output has changed: copy it anew"
