"""The floors of docs/architecture.md, read from the imports: a file imports from lower floors or from its own folder."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_lite"
FLOORS = {
    0: "config grid rampup errors schedules planner __init__",
    1: "comm",
    2: "backward offload parallel recompute rng",
    3: "models data tokenizers",
    4: "pipeline optim checkpoint",
    5: "training convert",
    6: "arguments inherit rules batch_rules context_rules expert_rules logging_rules validate pretrain_gpt tools benchmarks",
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names.split()}
LOOSE = {path.stem for path in PACKAGE.glob("*.py")}  # files outside folders; on floors 0 and 6 all stand side by side
# Plain data and plain arithmetic that upper floors share with lower ones: no torch, nothing of ours but floor 0.
PURE = {"megatron_lite.models.zoo", "megatron_lite.optim.buckets"}
# Packages that may be imported inside a function: optional, or heavy and not always needed.
LAZY = {"wandb", "torch", "transformers", "tokenizers", "sentencepiece", "datasets", "matplotlib", "tqdm", "apex", "amp_C",
        "zstandard", "pyarrow"}  # fmt: skip
LAZY_FILES = {"pretrain_gpt", "megatron_lite.inherit"}  # `--help`, `--dry-run` and a bad flag answer without torch
MAX_FILE, MAX_FUNCTION, MAX_ENTRY = 400, 60, 120


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(p): p for folder in ("megatron_lite", "tools") for p in sorted((ROOT / folder).rglob("*.py"))}
FILES["pretrain_gpt"] = ROOT / "pretrain_gpt.py"


def imports(path):
    """[(module, line, whether inside a function)] of one file, `from package import module` resolved."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: imports are absolute"
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    found.append((whole if whole in FILES else child.module, child.lineno, inside))
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(tree, False)
    return found


IMPORTS = {name: imports(path) for name, path in FILES.items()}


def part(module):
    """The room a module is in: `megatron_lite.comm.mesh` -> comm."""
    words = module.split(".")
    return words[0] if words[0] != "megatron_lite" else words[1] if len(words) > 1 else "__init__"


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name):
    assert part(name) in FLOOR, f"{name} is on no floor: add it to FLOORS and to docs/architecture.md"
    for target, line, _ in IMPORTS[name]:
        if target in FILES and target not in PURE and part(target) != part(name):
            here, there = FLOOR[part(name)], FLOOR[part(target)]
            side_by_side = here == there and (here in (0, 6) or part(name) in LOOSE)
            assert there < here or side_by_side, (
                f"{FILES[name]}:{line}: floor {here} ({part(name)}) imports {target} of floor {there}"
            )


@pytest.mark.parametrize("name", [n for n in FILES if FLOOR[part(n)] == 0] + sorted(PURE))
def test_floor_0_needs_no_torch(name):
    for target, line, _ in IMPORTS[name]:
        top = target.split(".")[0]
        assert top == "megatron_lite" or top in sys.stdlib_module_names, f"{FILES[name]}:{line} imports {target}"


def test_a_dry_run_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not to be imported')")
    command = [sys.executable, "pretrain_gpt.py", "--model", "llama3-8b", "--micro-batch-size", "1", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("grid: "), done.stderr


def test_no_import_cycles():
    edges = {name: {t for t, _, inside in found if t in FILES and t != name and not inside} for name, found in IMPORTS.items()}
    done, path = set(), []

    def walk(name):
        assert name not in path, "import cycle: " + " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for target in sorted(edges[name]):
                walk(target)
            path.pop()
            done.add(name)

    for name in edges:
        walk(name)


@pytest.mark.parametrize("name", FILES)
def test_imports_inside_functions_are_of_heavy_packages(name):
    if name in LAZY_FILES:
        return
    for target, line, inside in IMPORTS[name]:
        assert not inside or target.split(".")[0] in LAZY, f"{FILES[name]}:{line}: move `import {target}` to the top"


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_stay_short(name):
    text = FILES[name].read_text(encoding="utf-8")
    limit = MAX_ENTRY if name == "pretrain_gpt" else MAX_FILE
    assert len(text.splitlines()) < limit, f"{FILES[name]} has {len(text.splitlines())} lines, the limit is {limit}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{FILES[name]}:{node.lineno}: {node.name} has {length} lines"
