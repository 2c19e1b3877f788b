"""The planner's arithmetic: layer split, parameters per rank, FLOPs, memory, report."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.arguments import parse
from megatron_lite.comm.mesh import Axis, Mesh, single
from megatron_lite.config import ParallelConfig
from megatron_lite.models import attention
from megatron_lite.models.rope import contiguous_like, cos_sin
from megatron_lite.models.transformer import TransformerLayer, TransformerStage
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.pipeline.stage import build_chunks
from megatron_lite.planner.flops import device_peak_tflops, flops_per_iteration, flops_per_token, mfu
from megatron_lite.planner.memory import (
    BLOCK_ROWS,
    KEEP_PROBABILITIES_UP_TO,
    Kept,
    layer_activation_bytes,
    live_microbatches,
    peak_bytes,
    sharded_bytes,
    stage_memory,
    state_bytes,
)
from megatron_lite.planner.params import count_parameters, layer_parts, model_parts, rank_parts
from megatron_lite.planner.pipeline import pipeline_of, plan_pipeline
from megatron_lite.planner.report import count, dry_run_report, size
from megatron_lite.planner.split import layer_ranges, split_layers
from megatron_lite.rng import DropoutKey
from megatron_lite.schedules import SCHEDULES
from megatron_lite.schedules.actions import parse_schedule
from megatron_lite.training.ledger import Meter

GPT = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 250 --lr 1e-3"
LLAMA = GPT + (
    " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0"
    " --attention-dropout 0 --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
RUN = " --micro-batch-size 2 --train-iters 4 --mock-data "


def config_of(flags, world=1):
    config, problems = parse((flags + RUN).split(), world)
    assert problems == []
    return config


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_split_keeps_every_layer_or_says_why(layers, pp, first, last):
    ends = {"first": first or None, "last": last or None}
    try:
        split = split_layers(layers, pp, **ends)
    except ValueError as error:
        assert any(ends.values()) or layers < pp
        assert "layer" in str(error)
        return
    assert len(split) == pp and sum(split) == layers and min(split) >= 1
    assert first in (0, split[0]) and last in (0, split[-1])
    free = split[bool(first) : pp - bool(last)]
    assert not free or (max(free) - min(free) <= 1 and free == sorted(free, reverse=True))


def test_split_examples():
    assert split_layers(8, 4) == [2, 2, 2, 2]
    assert split_layers(30, 4) == [8, 8, 7, 7]
    assert split_layers(30, 4, first=6) == [6, 8, 8, 8]
    assert split_layers(8, 2, first=5, last=3) == [5, 3]
    assert layer_ranges(3, 2) == [range(0, 2), range(2, 3)]
    for arguments in ((3, 4), (8, 2, 5, 4), (8, 3, 4, 4), (8, 4, 0), (8, 1, 3)):
        with pytest.raises(ValueError, match="layer"):
            split_layers(*arguments)


def test_parts_of_a_gpt_by_hand():
    h, f, s, v = 64, 256, 32, 250
    parts = model_parts(config_of(GPT))
    layer = 4 * (h * h + h) + (f * h + f) + (h * f + h) + 4 * h
    assert parts == {"embed_tokens": v * h, "embed_positions": s * h, "layers": 4 * layer, "norm": 2 * h}


def test_parts_of_a_llama_by_hand():
    h, f, kv = 64, 128, 16  # f = 64 * floor(4h * 2/3 / 64)
    config = config_of(LLAMA + " --qk-layernorm --add-qkv-bias")
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h + 2 * 8 + (h + 2 * kv)
    assert sum(layer_parts(config.model).values()) == layer
    assert count_parameters(config) == 2 * 250 * h + 4 * layer + h


@pytest.mark.parametrize("flags", [GPT, LLAMA])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (8, 1), (1, 4), (2, 2)])
def test_ranks_hold_the_model_its_padding_and_its_copies(flags, tp, pp):
    config = config_of(f"{flags} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}", tp * pp)
    model, whole = config.model, count_parameters(config)
    held = sum(tp * sum(rank_parts(config, stage).values()) for stage in range(pp))
    h, padding = model.hidden_size, (config.padded_vocab_size - config.data.vocab_size) * model.hidden_size
    norm = h * (2 if model.normalization == "LayerNorm" else 1)
    replicated = 4 * (2 * norm + (0 if model.disable_bias_linear else 2 * h)) + norm
    if model.position_embedding_type == "learned_absolute":
        replicated += model.max_position_embeddings * h
    kv_copies = max(tp // model.num_kv_heads, 1) - 1
    extra = (tp - 1) * replicated + kv_copies * 4 * 2 * h * model.num_kv_heads * model.head_dim
    extra += padding * (1 if model.tied and pp == 1 else 2)
    extra += config.data.vocab_size * h if model.tied and pp > 1 else 0
    assert held == whole + extra


@pytest.mark.parametrize("flags", [GPT, LLAMA, LLAMA + " --qk-layernorm --add-qkv-bias"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (8, 4)])
def test_counts_are_those_of_the_model_that_is_built(flags, tp, pp):
    config = config_of(f"{flags} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}", tp * pp)
    axis = Axis("tp", rank=tp - 1, ranks=tuple(range(tp)))
    cut = TensorParallel(axis, False, torch.float32, torch.device("meta"))
    for stage, layers in enumerate(layer_ranges(config.model.num_layers, pp)):
        sizes = config.data.vocab_size, config.padded_vocab_size
        built = TransformerStage(config.model, *sizes, layers, stage == 0, stage == pp - 1, cut)
        assert sum(param.numel() for param in built.parameters()) == sum(rank_parts(config, stage).values())


CUTS = {  # chunk flags, 8 layers on 2 ranks -> schedule, layers of every rank's chunks
    "--num-virtual-stages-per-pipeline-rank 2": ("interleaved", [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
    "--num-layers-per-virtual-pipeline-stage 1": ("interleaved", [[(i, i + 1) for i in (0, 2, 4, 6)],
                                                                  [(i, i + 1) for i in (1, 3, 5, 7)]]),
    "--num-layers-per-virtual-pipeline-stage 4": ("1f1b", [[(0, 4)], [(4, 8)]]),
    "--pipeline-schedule zbv": ("zbv", [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]),
    "--pipeline-schedule dualpipe --decoder-last-pipeline-num-layers 3": ("dualpipe", [[(0, 5), (5, 8)], [(5, 8), (0, 5)]]),
    "--pipeline-schedule dualpipe --num-layers-per-virtual-pipeline-stage 4": ("dualpipe", [[(0, 4), (4, 8)], [(4, 8), (0, 4)]]),
    "--pipeline-schedule dualpipev --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1":
        ("dualpipev", [[(0, 1), (7, 8)], [(1, 4), (4, 7)]]),
    "--pipeline-schedule interleaved --decoder-last-pipeline-num-layers 1": ("interleaved", [[(0, 3), (5, 7)], [(3, 5), (7, 8)]]),
}  # fmt: skip


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("flags", CUTS)
def test_chunks_hold_what_the_planner_says(flags, model):
    """Layers by hand; parameters of every rank, tp 2, against the chunks that are built."""
    config = config_of(f"{model} --num-layers 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                       f"--global-batch-size 16 {flags}", 4)  # fmt: skip
    pipeline = pipeline_of(config)
    name, layers = CUTS[flags]
    assert pipeline.schedule == name
    assert [[(c.layers.start, c.layers.stop) for c in pipeline.chunks(rank)] for rank in range(2)] == layers
    for rank in range(2):
        axes = single().axes | {"tp": Axis("tp", rank=1, ranks=(0, 1)), "pp": Axis("pp", rank=rank, ranks=(0, 2))}
        chunks = build_chunks(config, Mesh(config.grid, 0, torch.device("meta"), axes), pipeline)
        assert sum(p.numel() for chunk in chunks for p in chunk.parameters()) == sum(rank_parts(config, rank).values())
        assert [[layer.layer for layer in chunk.layers] for chunk in chunks] == [list(range(*ends)) for ends in layers[rank]]
    assert tuple(map(len, stage_memory(config)[0].layers)) == tuple(b - a for a, b in layers[0])


def test_without_a_pipeline_there_is_one_chunk():
    for name in SCHEDULES:
        pipeline = plan_pipeline(4, ParallelConfig(pipeline_schedule=name, num_virtual_stages_per_pipeline_rank=3))
        assert (pipeline.schedule, pipeline.num_chunks, pipeline.layers) == ("1f1b", 1, (range(4),))


def test_flops_by_hand():
    config = config_of(LLAMA + " --ffn-hidden-size 96 --global-batch-size 4")
    h, f, q, kv, s, layers, vp = 64, 96, 64, 16, 32, 4, 256
    token = 6 * (layers * (3 * h * f + h * (q + 2 * kv) + q * h) + h * vp) + 6 * layers * q * s
    assert flops_per_token(config) == token
    assert flops_per_iteration(config) == 4 * s * token
    wider = replace(config, model=replace(config.model, ffn_hidden_size=192))
    assert flops_per_token(wider) - token == 6 * layers * 3 * h * 96
    assert mfu(config, seconds_per_iteration=0.5, devices=2, peak_tflops=1e-3) == pytest.approx(4 * s * token / 1e9)


def test_flops_agree_with_the_closed_form_of_gpt():
    """72 B L s h^2 (1 + s / 12h + V / 12Lh), the causal form; Megatron's own count for GPT-3."""
    config, _ = parse("--model gpt3-175b --micro-batch-size 1 --dry-run".split(), 1)
    layers, h, s, v = 96, 12288, 2048, config.padded_vocab_size
    closed = 72 * layers * s * h * h * (1 + s / (12 * h) + v / (12 * layers * h))
    assert flops_per_iteration(config) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA A100-SXM4-40GB", "float32", 19.5),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("Something New 9000", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float64", None),
    ],
)
def test_peaks(name, dtype, peak):
    assert device_peak_tflops(name, dtype) == peak


@pytest.mark.parametrize(
    ("flags", "together"),
    [("--bf16", 18), ("", 16), ("--fp64", 32), ("--bf16 --optimizer sgd", 14), ("--optimizer sgd", 12)],
)
def test_state_bytes(flags, together):
    assert sum(state_bytes(config_of(f"{GPT} {flags}"))) == together


def test_zero_paper():
    """Figure 1 of arXiv 1910.02054: 7.5B parameters, 64 ranks, 2 + 2 + 12 bytes. It counts in units of 1000."""
    gigabytes = [sum(sharded_bytes(stage, 64, 2, 2, 12)) * 7.5 for stage in range(4)]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@pytest.mark.parametrize(("flags", "together"), [
    ("", 18), ("--zero-stage 1", 6 + 12 / 4), ("--zero-stage 2", 2 + 16 / 4), ("--zero-stage 3", 18 / 4),
    ("--zero-stage 3 --zero-replica-size 2", 18 / 2), ("--use-distributed-optimizer", 9),
    ("--data-parallel-sharding-strategy optim_grads", 6),
])  # fmt: skip
def test_state_bytes_under_zero(flags, together):
    assert sum(state_bytes(config_of(f"{GPT} --bf16 --global-batch-size 8 {flags}", 4))) == together


def test_transient_bytes_under_zero():
    """Two neighbouring units at once; with a pipeline and stage 3 the whole stage."""
    flags = f"{GPT} --bf16 --global-batch-size 8 --untie-embeddings-and-output-weights"
    parts = rank_parts(config_of(flags, 4), 0)
    layer = parts["layers"] // config_of(flags, 4).model.num_layers
    two = max(2 * layer, parts["embed_tokens"] + parts["embed_positions"], parts["lm_head"] + parts["norm"])
    for stage, bytes_each in ((0, 0), (1, 0), (2, 4), (3, 6)):
        plan = stage_memory(config_of(f"{flags} --zero-stage {stage}", 4))[0]
        assert plan.transient == bytes_each * two
        assert plan.total == plan.weights + plan.gradients + plan.optimizer + plan.activations + plan.transient
    plan = stage_memory(config_of(f"{flags} --zero-stage 3 --pipeline-model-parallel-size 2", 4))[1]
    assert plan.transient == 6 * plan.parameters
    report = dry_run_report(config_of(f"{flags} --zero-stage 2", 4), config_of(flags, 4).grid)
    assert "transient" in report and "bfloat16, ZeRO-2: 2 + 1 + 3 = 6 bytes per parameter" in report


def activation(flags, tp=1):
    """Bytes of a layer per s b h with flash attention, without norm statistics and log-sum-exp (fp32 per token)."""
    config = config_of(f"{flags} --bf16 --tensor-model-parallel-size {tp}", tp)
    tokens = 32 * 2
    statistics = tokens * (16 if config.model.normalization == "LayerNorm" else 8)
    statistics = statistics // tp if config.parallel.sequence_parallel else statistics
    return (layer_activation_bytes(config, "flash") - statistics - tokens * 4 * 8 // tp) / (tokens * 64)


def test_activations_are_the_published_formulas():
    """Korthikanti et al. 2022, table 2, with flash attention. LLaMA: s b h (12 + 4 k/a) + 6 s b f (k = a/4, f = 2h)."""
    assert activation(GPT) == 34
    assert activation(GPT, tp=4) == 10 + 24 / 4
    assert activation(GPT + " --sequence-parallel", tp=4) == 34 / 4
    assert activation(LLAMA) == 12 + 1 + 6 * 2
    assert activation(LLAMA + " --sequence-parallel", tp=2) == (12 + 1 + 6 * 2) / 2


EVERY_MODULE = " --recompute-activations --recompute-modules core_attn layernorm mlp_act"


@pytest.mark.parametrize("recompute", ["", " --recompute-activations", " --recompute-activations --recompute-modules layernorm",
                                       " --recompute-activations --recompute-modules mlp_act", EVERY_MODULE])  # fmt: skip
@pytest.mark.parametrize("flags", [GPT + " --hidden-dropout 0 --attention-dropout 0", GPT, GPT + " --qk-layernorm", LLAMA,
                                   LLAMA + " --bf16", LLAMA + " --qk-layernorm"])  # fmt: skip
def test_activations_are_what_a_layer_keeps(flags, recompute):
    """To the byte, against the tensors that autograd really saves."""
    config = config_of(flags + recompute)
    dtype, cpu = getattr(torch, config.precision.dtype_name), torch.device("cpu")
    layer = TransformerLayer(0, config.model, TensorParallel(single().tp, False, dtype, cpu), config.activations)
    angles = cos_sin(config.model, torch.arange(32), dtype) if config.model.position_embedding_type == "rope" else None
    meter = Meter(layer.parameters())
    x = torch.zeros(32, 2, 64, dtype=dtype, requires_grad=True)
    key = DropoutKey(seed=0, iteration=0, microbatch=0, tp_rank=0) if config.model.hidden_dropout else None
    with meter.watching():
        out = layer(x, angles, key)
    assert meter.live == meter.peak == layer_activation_bytes(config, "block")
    del out
    assert meter.live == 0


@pytest.mark.parametrize("flags", [GPT + " --attention-dropout 0", LLAMA.replace("groups 2", "groups 8")])
def test_activations_with_a_flash_kernel(flags, monkeypatch):
    """The form that CUDA takes, through CPU's flash kernel: Q, K, V, output and log-sum-exp, and never QKV beside them."""
    monkeypatch.setattr(attention, "core_attention", lambda q, k, v, p, generator, documents: attention._sdpa(q, k, v))
    monkeypatch.setattr(attention, "head_first", contiguous_like)  # of the layout that CUDA's core reads
    for recompute in ("", EVERY_MODULE):
        config = config_of(flags + recompute)
        layer = TransformerLayer(0, config.model, TensorParallel(single().tp, False, torch.float32, torch.device("cpu")),
                                 config.activations)  # fmt: skip
        rope = config.model.position_embedding_type == "rope"
        angles = cos_sin(config.model, torch.arange(32), torch.float32) if rope else None
        meter, key = Meter(layer.parameters()), DropoutKey(0, 0, 0, 0) if config.model.hidden_dropout else None
        with meter.watching():
            _out = layer(torch.zeros(32, 2, 64, requires_grad=True), angles, key)
        assert meter.live == layer_activation_bytes(config, "flash")
        del _out


def test_block_attention_holds_half_the_square():
    config = config_of(GPT)  # dropout: probabilities and dropout factors of 8 heads x 2 samples, one block of 32 rows
    extra = layer_activation_bytes(config) - layer_activation_bytes(config, "flash") + 64 * 8 * 4
    assert extra == 2 * (8 * 2) * 32 * 32 * 4
    assert KEEP_PROBABILITIES_UP_TO == attention.KEEP_PROBABILITIES_UP_TO
    assert {str(dtype).removeprefix("torch."): rows for dtype, rows in attention.BLOCK_ROWS.items()} == BLOCK_ROWS


def test_live_microbatches_come_from_the_schedule():
    flags = GPT + " --pipeline-model-parallel-size 4 --global-batch-size 12"
    assert live_microbatches(config_of(flags, 4)) == [4, 3, 2, 1]
    assert live_microbatches(config_of(flags + " --pipeline-schedule gpipe", 4)) == [6, 6, 6, 6]
    plan = stage_memory(config_of(flags, 4))
    assert plan[1].activations == 3 * layer_activation_bytes(config_of(flags, 4))
    assert plan[1].total == plan[1].parameters * 16 + plan[1].activations


def test_live_activations_are_counted_chunk_by_chunk():
    """Rank 1 of 4 holds no end of the model; Megatron's interleaved lists hold 9 chunks there (p 4, v 2, m 8), ZBV 8."""
    flags = GPT + " --num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 16"
    for chosen, live, chunks in ((" --num-virtual-stages-per-pipeline-rank 2", 4.5, 9), (" --pipeline-schedule zbv", 4, 8)):
        config = config_of(flags + chosen, 4)
        plan = stage_memory(config)[1]
        assert live_microbatches(config)[1] == plan.live_microbatches == live
        assert plan.activations == chunks * layer_activation_bytes(config)
    uneven = parse_schedule("F0 F1 F0.1 B0.1 F1.1 W0.1 BW1.1 F2 BW0 BW1 BW2")[0]
    ten, one = Kept(10, 0, 0), Kept(1, 0, 0)
    assert peak_bytes(uneven, (ten, one)) == 30 and peak_bytes(uneven, (one, ten)) == 22


def test_recomputed_layers_come_back_for_their_backward():
    """One unit's worth on top of what waits, at the peak; with a split backward until its W."""
    whole, split = (parse_schedule(text)[0] for text in ("F0 F1 BW0 F2 BW1 BW2", "F0 F1 B0 W0 F2 B1 B2 W1 W2"))
    assert peak_bytes(whole, [Kept(1, 20, 50)]) == 2 + 20
    assert peak_bytes(split, [Kept(1, 20, 50)]) == 2 + 2 * 50
    flags = GPT + " --pipeline-model-parallel-size 4 --global-batch-size 12 --num-layers 16"
    layer, unit = layer_activation_bytes(config_of(flags, 4)), 32 * 2 * 64 * 4
    for form, kept, more in (("uniform --recompute-num-layers 1", 4 * unit, layer - unit),
                             ("uniform --recompute-num-layers 3", 2 * unit, 3 * layer - 2 * unit),  # the last layer is done
                             ("block --recompute-num-layers 3", 3 * unit + layer, 0)):  # fits where the kept layer was
        config = config_of(f"{flags} --recompute-granularity full --recompute-method {form}", 4)
        assert stage_memory(config)[1].activations == 3 * kept + more


def test_the_report_says_what_is_recomputed():
    for flags, text in (("", "no recomputation"), ("--recompute-activations", "core_attn recomputed"),
                        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
                         "first 2 layer(s) of each chunk recomputed"),
                        ("--cpu-offloading-num-layers 1", "first 1 layer(s) of each chunk in host memory")):  # fmt: skip
        config = config_of(f"{GPT} {flags}")
        assert text in dry_run_report(config, config.grid)


def test_report_names_the_layers_of_every_chunk():
    flags = GPT + " --pipeline-model-parallel-size 2 --global-batch-size 48 --num-layers"
    report = [dry_run_report(config, config.grid) for config in (
        config_of(f"{flags} 8 --pipeline-schedule zbv", 2),
        config_of(f"{flags} 40 --num-virtual-stages-per-pipeline-rank 20", 2),
        config_of(f"{flags} 8 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3", 2),
    )]  # fmt: skip
    assert "0..1, 6..7 (4)" in report[0] and "2..3, 4..5 (4)" in report[0] and "schedule zbv: 2 ranks x 2 chunks" in report[0]
    assert "0, 2, ..., 38 (20)" in report[1]
    assert "24 microbatches, of which the picture shows 9" in report[2]  # whole groups
    assert max(len(line) for text in report for line in text[text.index("schedule ") :].splitlines()) <= 100


def test_report_is_complete_and_narrow():
    flags = "--model llama2-70b --bf16 --micro-batch-size 1 --global-batch-size 64 --dry-run --world-size 64"
    flags += " --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8"
    config, problems = parse(flags.split(), 1)
    assert problems == []
    report = dry_run_report(config, config.grid)
    assert max(map(len, report.splitlines())) <= 100
    for text in ("grid: tp 8 x pp 8 x dp 1", "68,976,648,192", "18 bytes per parameter", "262,144 tokens", "1f1b"):
        assert text in report


def test_report_folds_stages_that_are_alike():
    config = config_of(GPT.replace("--num-layers 4", "--num-layers 8") + " --pipeline-model-parallel-size 8"
                       " --pipeline-schedule gpipe --global-batch-size 80", 8)  # fmt: skip
    report = dry_run_report(config, config.grid)
    assert "1..6" in report and "1..6 (1 each)" in report
    assert "40 microbatches, of which the picture shows 8" in report


def test_report_without_pipeline_has_no_schedule():
    config = config_of(GPT)
    assert "schedule 1f1b" not in dry_run_report(config, config.grid)


@pytest.mark.parametrize(("precision", "each"), [("", 12), ("--bf16", 12), ("--bf16 --optimizer sgd", 8), ("--fp64", 24)])
def test_report_says_what_copies_in_peers_take(precision, each):
    """Masters or exact weights, and moments: once for all ranks, whatever the layout."""
    config = config_of(f"{GPT} {precision} --save a --load a --peer-checkpoint-interval 1 --tensor-model-parallel-size 2", 4)
    share = size(count_parameters(config) * each / 4)
    assert f"copies in peers, every step: {share} of host memory" in dry_run_report(config, config.grid)
    assert "copies in peers" not in dry_run_report(config_of(GPT), config_of(GPT).grid)


def test_readable_numbers():
    assert [size(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
    assert [count(n) for n in (12, 6738415616, 999_999)] == ["12 ", "6.74 G", "1 M"]
