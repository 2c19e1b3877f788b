"""Step times, the search and its rules, scaling; and published figures that the formulas give."""

import time
from dataclasses import replace

import pytest

from megatron_lite.arguments import parse
from megatron_lite.grid import Grid
from megatron_lite.planner.cluster import GIB, Link, read_cluster
from megatron_lite.planner.flops import flops_per_iteration, mfu
from megatron_lite.planner.memory import full_state_bytes, stage_memory
from megatron_lite.planner.outlook import outlook, transfers_of_ranks
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.planner.scaling import chosen_layouts, curve, table
from megatron_lite.planner.search import Layout, Pricer, SearchError, layouts, search, with_layout
from megatron_lite.planner.timing import makespan, product_seconds, seconds_of, stage_prices, step_time, wire
from megatron_lite.planner.traffic import Transfer, bytes_by_axis, wire_share
from megatron_lite.schedules.simulate import Costs, simulate

H100 = read_cluster("h100")
A100 = read_cluster("a100")
SMALL = "--model llama3.2-1b --bf16 --seq-length 2048"


def config_of(flags, world=1):
    config, problems = parse(f"{flags} --dry-run --world-size {world}".split(), 1)
    assert problems == []
    return config


def base_of(model, batch, more=""):
    return config_of(f"--model {model} --bf16 --micro-batch-size 1 --global-batch-size {batch} {more}")


# ---------------------------------------------------------------------------------------------------------------------
# Published figures


def test_an_all_reduce_sends_its_buffer_twice_but_for_a_part():
    """Patarasuk & Yuan 2009: 2 (n-1)/n; a gather or a scatter half of it."""
    assert [wire_share("all_reduce", n) for n in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]
    assert all(wire_share("all_gather", n) + wire_share("reduce_scatter", n) == wire_share("all_reduce", n) for n in (1, 2, 3, 9))


def test_state_of_seven_billion_in_fp32():
    config = config_of("--model llama2-7b --micro-batch-size 1")
    assert 7 * sum(full_state_bytes(config)) == 112  # GB


def test_bubble_of_eight_stages_and_sixteen_microbatches():
    """(p-1)/(m+p-1) = 7/23, with every stage alike."""
    config = config_of("--num-layers 8 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 8 "
                       "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 8", 8)  # fmt: skip
    whole = makespan(pipeline_of(config), 16, Costs(1.0, 1.0, 1.0))
    assert (whole - 16 * 3) / whole == pytest.approx(7 / 23)


def test_grid_of_the_published_thousand():
    assert Grid(tp=8, pp=8, dp=16).world_size == 1024


GPT_RUNS = [  # Korthikanti et al. 2022, table 5: layers, hidden, heads, batch, A100s, seconds a step, MFU
    (96, 12288, 96, 64, 64, 13.75, 51.4), (105, 20480, 128, 280, 280, 37.83, 56.0), (128, 25600, 160, 512, 512, 71.49, 56.3),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "hidden", "heads", "batch", "gpus", "seconds", "published"), GPT_RUNS)
def test_mfu_of_megatron(layers, hidden, heads, batch, gpus, seconds, published):
    """Their figures count the whole square of attention; ours, half of it."""
    config = config_of(f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048 "
                       f"--vocab-size 51200 --micro-batch-size 1 --global-batch-size {batch}")  # fmt: skip
    rest = 6 * layers * hidden * 2048 * batch * 2048
    whole = (flops_per_iteration(config) + rest) / (seconds * gpus * 312e12)
    assert 100 * whole == pytest.approx(published, abs=0.15)
    assert mfu(config, seconds, gpus, 312.0) < whole


def test_days_and_shares_of_published_runs():
    """Narayanan et al. 2021, section 5.1: 8 T P / (n X); Llama 3, table 4: TFLOP/s per H100."""
    assert 8 * 300e9 * 175e9 / (1024 * 140e12) / 86400 == pytest.approx(34, abs=0.5)
    assert 8 * 450e9 * 1e12 / (3072 * 163e12) / 86400 == pytest.approx(84, abs=1)
    for teraflops, share in ((430, 43), (400, 41), (380, 38)):
        assert 100 * teraflops * 1e12 / H100.flops("bfloat16") == pytest.approx(share, abs=0.7)


@pytest.mark.parametrize(("layers", "hidden", "heads", "batch", "gpus", "seconds", "published"), 
                         [GPT_RUNS[0], *(pytest.param(*run, marks=pytest.mark.full) for run in GPT_RUNS[1:])])  # fmt: skip
def test_predicted_steps_are_near_published_ones(layers, hidden, heads, batch, gpus, seconds, published):
    """The same runs on the A100 preset: tp 8, sequence parallel, attention recomputed, interleaved pipeline."""
    pp, chunks = gpus // 8, 3 if layers % (3 * gpus // 8) == 0 else 2
    config = config_of(f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048 --bf16 "
                       f"--vocab-size 51200 --micro-batch-size 1 --global-batch-size {batch} --tensor-model-parallel-size 8 "
                       f"--sequence-parallel --recompute-activations --pipeline-model-parallel-size {pp} "
                       f"--num-virtual-stages-per-pipeline-rank {chunks}", gpus)  # fmt: skip
    assert step_time(config, A100, pipeline_of(config)).seconds == pytest.approx(seconds, rel=0.25)


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a step


def test_wires_follow_the_ranks():
    config = config_of("--model llama3-8b --bf16 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 4 "
                       "--pipeline-model-parallel-size 2 --zero-stage 1 --sequence-parallel", 64)  # fmt: skip
    assert wire(config, H100, "tp") == ("within", 4, 4)
    assert wire(config, H100, "zero_shard") == ("between", 2, 8)
    assert wire(config, H100, "pp") == ("between", 1, 2)
    assert wire(config, replace(H100, gpus_per_node=64), "pp") == ("within", 2, 2)


def test_a_collective_takes_latency_and_bytes():
    config = config_of(f"{SMALL} --micro-batch-size 1 --tensor-model-parallel-size 2", 2)
    simple = replace(H100, within=Link(1e9, 1e-3))
    assert seconds_of(config, simple, Transfer("tp", "all_reduce", 2e9)) == pytest.approx(2 + 2e-3)
    assert seconds_of(config, simple, Transfer("tp", "all_gather", 2e9, 3)) == pytest.approx(3 * (1 + 1e-3))
    measured = replace(simple, measured={("within", "all_gather"): Link(2e9, 0.5)})
    assert seconds_of(config, measured, Transfer("tp", "all_gather", 2e9)) == pytest.approx(1.0)
    assert seconds_of(config, simple, Transfer("pp", "send", 1e9)) == 0.0


def test_large_products_are_efficient():
    def share(side):
        return 2 * side**3 / product_seconds(H100, "bfloat16", side, side, side) / H100.flops("bfloat16")

    assert share(128) == pytest.approx(0.75 / 8) and 0.66 < share(4096) < 0.75 and share(64) < share(128) < share(256)


def test_parts_add_up_and_react():
    flags = (f"{SMALL} --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 2 --sequence-parallel "
             "--pipeline-model-parallel-size 4 --zero-stage 1")  # fmt: skip
    config = config_of(flags, 16)
    time_of = step_time(config, H100, pipeline_of(config))
    parts = time_of.compute + time_of.tensor + time_of.bubble + time_of.data + time_of.optimizer
    assert parts == pytest.approx(time_of.seconds) and 0 < time_of.mfu < 0.75 and min(time_of) >= 0
    slow_wires = replace(H100, within=Link(1e9, 1e-5), between=Link(1e8, 1e-5))
    slower = step_time(config, slow_wires, pipeline_of(config))
    assert slower.tensor > time_of.tensor and slower.data > time_of.data and slower.compute == time_of.compute
    again = config_of(f"{flags} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 16)
    assert 1.1 < step_time(again, H100, pipeline_of(again)).compute / time_of.compute < 1.4
    hidden = config_of(f"{flags} --no-overlap-grad-reduce", 16)
    assert step_time(hidden, slow_wires, pipeline_of(hidden)).data > slower.data


@pytest.mark.parametrize("flags", ["", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zb-h1",
                                   "--pipeline-schedule zbv", "--pipeline-schedule gpipe"])  # fmt: skip
def test_long_steps_are_simulated_in_part(flags):
    """The makespan of 40 microbatches from 8 and 12 of them."""
    config = config_of(f"{SMALL} --micro-batch-size 1 --global-batch-size 40 --pipeline-model-parallel-size 4 {flags}", 4)
    pipeline = pipeline_of(config)
    count = len(pipeline.layers)
    costs = Costs([1.0] * (count - 1) + [1.5], [1.2] * count, [0.8] * count, latency=0.1)
    whole = float(simulate(pipeline.actions(40), pipeline.placement, costs).makespan)
    assert makespan(pipeline, 40, costs) == pytest.approx(whole, rel=0.01)


def test_the_outlook_is_short_and_says_what_matters():
    config = config_of("--model llama2-70b --bf16 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 8 "
                       "--sequence-parallel --pipeline-model-parallel-size 4 --zero-stage 1", 64)  # fmt: skip
    text = outlook(config, pipeline_of(config), replace(H100, nodes=2))
    for words in ("too few devices: the run has 64 ranks, the cluster 16", "fits", "8 ranks within a node", "MFU", "bubble"):
        assert words in text
    assert len(text.splitlines()) < 14
    sent = bytes_by_axis(config, transfers_of_ranks(config, pipeline_of(config))[1])
    message = 4096 * 8192 * 2 / 8
    assert sent["pp"] == pytest.approx(2 * 32 * message, rel=1e-6) and sent["tp"] > sent["zero_shard"] > sent["pp"]


# ---------------------------------------------------------------------------------------------------------------------
# Search


def test_what_fits_on_one_device_is_data_parallel():
    best = search(base_of("gpt2-xl", 256), H100, 8).best
    assert (best[0].layout.tp, best[0].layout.pp, best[0].layout.dp) == (1, 1, 8)
    assert len(best) == 10 and all(a.time.seconds <= b.time.seconds for a, b in zip(best, best[1:], strict=False))


def test_what_fits_on_one_node_is_tensor_parallel():
    """Of 13 billion parameters no rank can hold weights and gradients whole beside its share of the optimizer."""
    found = [search(base_of("llama2-13b", 64), H100, 8, {"zero": stage}).best[0].layout for stage in (0, 1)]
    assert all(1 < layout.tp <= 8 for layout in found)


def test_what_fits_on_no_node_takes_all_three():
    found = search(base_of("gpt3-175b", 1536), A100, 1024, {"zero": 1}).best[0].layout
    assert found.tp > 1 and found.pp > 1 and found.dp > 1 and found.tp <= 8


def test_a_thousand_devices_take_seconds():
    began = time.process_time()
    result = search(base_of("llama3-70b", 1024), H100, 1024)
    assert time.process_time() - began < 20
    assert result.valid > 1000 and result.priced < result.valid / 4


def test_every_layout_is_accepted_and_fits():
    model = "--model llama3-8b --bf16 --global-batch-size 64"
    result = search(base_of("llama3-8b", 64), H100, 16)
    for found in result.best:
        config = config_of(f"{model} {found.layout.flags()}", 16)
        assert config.parallel == found.config.parallel and config.activations == found.config.activations
        pipeline = pipeline_of(config)
        assert step_time(config, H100, pipeline) == found.time
        assert max(stage.total for stage in stage_memory(config)) <= found.memory <= H100.usable_memory
    assert result.lost and all(lost.why for lost in result.lost)
    assert any("slower" in lost.why for lost in result.lost) and any("does not fit" in lost.why for lost in result.lost)


def test_all_layouts_are_accepted():
    """Whatever is enumerated, not only what wins."""
    small = ("--num-layers 8 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
             "--seq-length 32 --vocab-size 100 --bf16 --global-batch-size 16 ")  # fmt: skip
    every = list(layouts(config_of(f"{small} --micro-batch-size 1"), H100, 8, {}))
    assert len(every) > 100 and len(set(every)) == len(every)
    for layout in every[:: max(1, len(every) // 40)]:
        config_of(f"{small} {layout.flags()}", 8)


def test_bounds_are_below_the_steps():
    base = base_of("llama3.2-1b", 32, "--seq-length 1024")
    pricer = Pricer(base, H100)
    for layout in list(layouts(base, H100, 8, {"zero": 1, "recompute": ""}))[::5]:
        assert pricer.least_seconds(layout) <= pricer.found(layout, 0).time.seconds * (1 + 1e-9)


def test_what_flags_fix_stays():
    result = search(base_of("llama3.2-1b", 32), H100, 8, {"tp": 2, "recompute": "full"})
    assert {(found.layout.tp, found.layout.recompute) for found in result.best} == {(2, "full")}


def test_no_layout_is_said_in_words():
    base = base_of("llama3.2-1b", 64)
    with pytest.raises(SearchError, match="--gpus 17: no layout can use them: .* nearest counts that work: 16 or 18"):
        search(base, H100, 17)
    with pytest.raises(SearchError, match="h100 has 16; nearest that works: 16"):
        search(base, replace(H100, nodes=2), 32)
    with pytest.raises(SearchError, match="--gpus 0: at least 1"):
        search(base, H100, 0)
    with pytest.raises(SearchError, match=r"no layout fits 8 x 79 GiB.* least any needs is .* nearest that works: --gpus \d+"):
        search(base_of("gpt3-175b", 1024), H100, 8)
    with pytest.raises(SearchError, match="devices with more memory, or a smaller model"):
        search(base_of("gpt3-175b", 64), replace(H100, nodes=1), 8)


# ---------------------------------------------------------------------------------------------------------------------
# Scaling


def test_scaling_from_one_to_thousands():
    base = base_of("llama3.2-1b", 16, "--seq-length 2048")
    counts = 1, 2, 8, 64, 1024, 16384
    curves = {name: curve(name, base, H100, layout, counts) for name, layout in chosen_layouts(base, 8).items()}
    first = next(iter(curves.values())).points
    assert [point.devices for point in first] == [1, 2, 8, 64, 1024, 16384]
    assert first[0].speed_up == pytest.approx(1) and all(a.speed_up < b.speed_up for a, b in zip(first, first[1:], strict=False))
    assert all(0 < point.efficiency <= 1.05 for each in curves.values() for point in each.points)
    tensor = curves["tensor parallel"].points
    assert tensor[-1].devices == 8 and tensor[-1].efficiency < first[2].efficiency
    strong = curve("x", base, H100, Layout(1, 1, 0, "1f1b", 1, 1, 1, ""), (1, 16, 64), strong=True).points
    assert [point.devices for point in strong] == [1, 16]  # 16 samples
    assert "efficiency" in table(curves.values())


def test_layouts_are_what_they_say():
    base = base_of("llama3.2-1b", 16)
    layout = Layout(2, 4, 2, "interleaved", 2, 1, 1, "selective")
    config = with_layout(base, layout)
    assert (config.parallel.tp, config.parallel.pp, config.data_parallel_size, config.num_microbatches) == (2, 4, 2, 8)
    assert pipeline_of(config).num_chunks == 2 and len(stage_prices(config, H100, pipeline_of(config))) == 8
    assert H100.usable_memory < 79 * GIB
