"""tools/plan.py and --dry-run --cluster as a person calls them; tools/bench_collectives.py and the ring in the pool."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron_lite.arguments import parse
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.grid import Grid
from megatron_lite.planner.cluster import cluster_of, read_cluster
from tools import bench_collectives, plan, ring

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXPERTS = "--model mixtral-8x7b --bf16 --seq-length 2048"
MODEL = "--model llama3.2-1b --bf16 --seq-length 2048"


def run(capsys, command):
    code = plan.main(command.split())
    out, err = capsys.readouterr()
    return code, out + err


def test_one_layout_in_full(capsys):
    code, text = run(capsys, f"{MODEL} --micro-batch-size 1 --global-batch-size 64 --gpus 16 --tensor-model-parallel-size 2 "
                             "--sequence-parallel --pipeline-model-parallel-size 4 --zero-stage 1 --cluster h200")  # fmt: skip
    assert code == 0
    for words in ("grid: tp 2 x pp 4 x dp 2 = 16 ranks", "schedule 1f1b", "h200: 8 devices of 139 GiB", "fits", "MFU",
                  "tied embeddings", "inputs again", "FLOP per step"):  # fmt: skip
        assert words in text, text


def test_a_search_prints_flags_that_run(capsys):
    code, text = run(capsys, f"{MODEL} --global-batch-size 64 --gpus 8 --search --zero-stage 1 --keep 3")
    assert code == 0 and "not among them" in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("      --")]
    assert len(lines) == 3 and all("--zero-stage 1" in line for line in lines)
    for line in lines:
        assert parse(f"{MODEL} --global-batch-size 64 {line} --dry-run --world-size 8".split(), 1)[1] == []


def test_a_search_keeps_chunks_interleaved(capsys):
    code, text = run(capsys, f"{MODEL} --global-batch-size 64 --gpus 8 --search --keep 1 --pipeline-model-parallel-size 2 "
                             "--num-virtual-stages-per-pipeline-rank 2")  # fmt: skip
    assert code == 0 and "interleaved x2" in text and "zbv" not in text


def test_the_search_in_the_docs_is_real(capsys):
    text = (DOCS / "planning.md").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if line.startswith("python tools/plan.py") and "--search" in line)
    shown = re.search(r"<!-- search -->\n```\n(.*?)```\n<!-- /search -->", text, re.DOTALL)[1]
    assert run(capsys, command.removeprefix("python tools/plan.py "))[1] == shown, "the output has changed: copy it anew"


def test_scaling_is_drawn(capsys, tmp_path):
    for name in ("a.svg", "a.png"):
        command = f"{MODEL} --micro-batch-size 1 --global-batch-size 16 --scaling --gpus 64 --out {tmp_path / name}"
        code, text = run(capsys, command)
        assert code == 0 and "speed-up" in text and (tmp_path / name).stat().st_size > 5000
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(("flags", "words"), [
    (f"{MODEL} --micro-batch-size 1 --search", "--search: needs --global-batch-size"),
    (f"{MODEL} --global-batch-size 64 --search --gpus 17", "nearest counts that work: 16 or 18"),
    (f"{MODEL} --global-batch-size 64 --search --pipeline-schedule gpipe", "gpipe: a search has 1f1b, interleaved, zb-h1, zbv"),
    (f"{MODEL} --global-batch-size 64 --search --recompute-granularity full --recompute-method block --recompute-num-layers 2",
     "--recompute-num-layers 2: a search has 1"),
    (f"{MODEL} --global-batch-size 64 --search --recompute-granularity selective --recompute-modules layernorm",
     "--recompute-modules layernorm: a search has core_attn"),
    (f"{EXPERTS} --global-batch-size 64 --search --gpus 16", "--search: the time of a step is not planned yet with"),
    (f"{EXPERTS} --micro-batch-size 1 --scaling", "--scaling: the time of a step is not planned yet with --num-experts"),
    (f"{MODEL} --micro-batch-size 1 --strong", "--strong: needs --scaling"),
    (f"{MODEL} --micro-batch-size 1 --keep 4", "--keep: needs --search"),
    (f"{MODEL} --micro-batch-size 1 --scaling --out x.pdf", "should end in .png or .svg"),
    (f"{MODEL} --micro-batch-size 1 --gpus 0", "--gpus 0: at least 1"),
    (f"{MODEL} --micro-batch-size 1 --cluster nowhere", "no such file and no preset"),
    (f"{MODEL} --micro-batch-size 1 --gpus 6 --tensor-model-parallel-size 4", "nearest values that work"),
    (f"{MODEL} --micro-batch-size 1 --tp 4", "--tensor-model-parallel-size"),
])  # fmt: skip
def test_what_does_not_work_is_said(capsys, flags, words):
    code, text = run(capsys, flags)
    assert code == 2 and words in text and "Traceback" not in text


@pytest.mark.parametrize(("flags", "words"), [
    (f"{EXPERTS} --expert-model-parallel-size 8", "not planned yet with --num-experts"),
    (f"{MODEL} --context-parallel-size 2", "not planned yet with --context-parallel-size"),
])  # fmt: skip
def test_no_time_is_made_up_for_what_is_not_counted(capsys, flags, words):
    code, text = run(capsys, f"{flags} --micro-batch-size 1 --global-batch-size 64 --gpus 16")
    assert code == 0 and words in text and "MFU" not in text and "largest rank" in text


def test_a_dry_run_knows_the_cluster(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    flags = f"{MODEL} --micro-batch-size 1 --dry-run".split()
    assert pretrain_gpt.main(flags) == 0
    before = capsys.readouterr().out
    assert pretrain_gpt.main([*flags, "--cluster", "a100"]) == 0
    after = capsys.readouterr().out
    assert after.startswith(before.rstrip()) and "a100: 8 devices" in after and "MFU" not in before and "MFU" in after
    (tmp_path / "c.json").write_text('{"memory_gib": -1}')
    assert pretrain_gpt.main([*flags, "--cluster", str(tmp_path / "c.json")]) == 1
    assert "memory_gib = -1 is out of range" in capsys.readouterr().err
    _, problems = parse([*flags[:-1], "--cluster", "a100", "--lr", "1", "--train-iters", "1", "--mock-data"], 1)
    assert [str(problem) for problem in problems] == [
        "--cluster a100: has no effect: needs --dry-run, which says what the run would meet there; drop it"]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Wires


def rings(rank, world):
    """For several lengths: whether the ring's sums are those of the inputs, and the bytes that this rank sent."""
    found = []
    for length in (1, 2, world, 7, 64, 1000):
        x = torch.arange(length, dtype=torch.float64) * (rank + 1)
        exchange, sent = ring.between_neighbours(rank, world, dist.group.WORLD), [0]

        def counted(give, take, exchange=exchange, sent=sent):
            sent[0] += give.nbytes
            exchange(give, take)

        ring.ring_all_reduce(x, rank, world, counted)
        expected = torch.arange(length, dtype=torch.float64) * (world * (world + 1) / 2)
        found.append((bool(torch.equal(x, expected)), sent[0], 8 * length))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_ring_sums_and_sends_the_least(pool, world):
    answers = pool.run(rings, world, world)
    for rows in zip(*answers, strict=True):
        assert all(right for right, _, _ in rows)
        assert sum(sent for _, sent, _ in rows) == 2 * (world - 1) * rows[0][2]  # 2 (n-1)/n of the buffer each


def test_the_ring_in_the_docs_is_the_ring():
    text = (DOCS / "planning.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(def ring_all_reduce.*?)```", text, re.DOTALL)[1]
    assert code == inspect.getsource(ring.ring_all_reduce)


def benched(rank, world, flags):
    mesh = build_mesh(Grid(tp=world // 2, dp=2), torch.device("cpu"))
    args, said = bench_collectives.build_parser().parse_args(flags), []
    rows = bench_collectives.measure(mesh, args, said.append)
    return rows, bench_collectives.description(mesh, rows), said


def test_the_bench_measures_a_cluster(pool, tmp_path):
    flags = "--min-size 1K --max-size 16K --factor 16 --dtype float32 --seconds 0.001".split()
    rows, description, said = pool.run(benched, 4, 4, flags)[0]
    assert {row.axis for row in rows} == {"tp", "dp", "world"} and {row.op for row in rows} == set(bench_collectives.OPS)
    assert {row.size for row in rows} == {1024, 16384} and all(row.seconds > 0 for row in rows)
    assert len([line for line in said if line.startswith("all_reduce")]) == 6
    cluster = cluster_of(json.loads(json.dumps(description)), "measured")
    assert cluster.gpus_per_node == 4 and cluster.nodes == 1 and cluster.overlap == 0.0 and cluster.flops("float32") > 1e6
    assert set(cluster.measured) == {("within", op) for op in bench_collectives.OPS if op != "ring"}
    (tmp_path / "c.json").write_text(json.dumps(description))
    assert read_cluster(str(tmp_path / "c.json")) == cluster
    bench_collectives.plot(rows, tmp_path / "wires.svg")
    assert "<svg" in (tmp_path / "wires.svg").read_text() and "fitted" in bench_collectives.report(rows)


def test_a_line_is_found_again():
    def rows(latency, bandwidth, *sizes):
        return [bench_collectives.Row("tp", "within_node", 2, "all_reduce", size, latency + size / bandwidth) for size in sizes]

    assert bench_collectives.fit(rows(1e-4, 1e9, 1024, 1 << 20, 1 << 28)) == pytest.approx((1e-4, 1e9))
    assert bench_collectives.fit(rows(1e-4, 1e9, 1 << 20))[1] > 0  # one size: no line, but no absurd one either
    row = bench_collectives.Row("tp", "within_node", 4, "all_gather", 4000, 2.0)
    assert (row.algorithm_bandwidth, row.bus_bandwidth) == (2000, 1500)


def test_flags_of_the_bench(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert bench_collectives.main("--tp 3 --factor 1 --min-size 2K --max-size 1K --save x --ops ring".split()) == 2
    said = capsys.readouterr().err
    for words in ("4 ranks are no multiple of their product 3", "below --min-size", "--factor 1: at least 2",
                  "--save: needs send among --ops"):  # fmt: skip
        assert words in said
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert bench_collectives.main([]) == 2 and "torchrun --nproc-per-node 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_collectives.main(["--max-size", "big"])
