"""Learning rates, bucket layout, AdamW over flat buckets, norm and clipping: each against numbers or torch's own."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint.boxes import flat_pieces, tiling_fault
from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig, OptimizerConfig, TrainConfig
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.optim import clip
from megatron_lite.optim.adamw import Optimizer, step_runs
from megatron_lite.optim.buckets import ALIGN, layout, runs
from megatron_lite.optim.clip import clip_coefficient, owned_spans, square_sum
from megatron_lite.optim.ddp import GradientEngine, Sharding
from megatron_lite.optim.lr import learning_rate, lengths
from megatron_lite.parallel.shard import initialise
from megatron_lite.parallel.tensor import TensorParallel

# ------------------------------------------------------------------------------------------------------- learning rate

TRAIN = TrainConfig(micro_batch_size=10, global_batch_size=10, train_iters=100)  # 1000 samples
PEAK = OptimizerConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=10)  # 100 samples of warm-up, then 900 of decay
WSD = replace(PEAK, lr_decay_style="WSD", lr_wsd_decay_iters=20)  # the last 200 samples decay
SQRT = replace(PEAK, lr_decay_style="inverse-square-root")

RATES = [  # (settings, consumed samples, rate)
    # every style has the same warm-up; the first step has the initial rate, as Megatron's
    *[(replace(PEAK, lr_decay_style=style), samples, rate) for style in ("constant", "linear", "cosine", "inverse-square-root")
      for samples, rate in ((0, 0.0), (10, 0.1), (50, 0.5), (90, 0.9), (100, 1.0))],
    (WSD, 50, 0.5),
    (replace(PEAK, lr_warmup_init=0.2), 0, 0.2), (replace(PEAK, lr_warmup_init=0.2), 50, 0.6),
    # its three spellings
    (replace(PEAK, lr_warmup_iters=0, lr_warmup_samples=100), 50, 0.5),
    (replace(PEAK, lr_warmup_iters=0, lr_warmup_fraction=0.1), 50, 0.5),
    (replace(PEAK, lr_warmup_iters=0, lr_warmup_fraction=0.1, lr_decay_iters=50), 25, 0.5),
    (replace(PEAK, lr_warmup_iters=0), 0, 1.0),
    # the decays, a half and a quarter of their way
    (replace(PEAK, lr_decay_style="constant"), 999, 1.0), (replace(PEAK, lr_decay_style="constant"), 5000, 1.0),
    (PEAK, 550, 0.55), (PEAK, 325, 0.775), (PEAK, 1000, 0.1), (PEAK, 5000, 0.1),
    (replace(PEAK, lr_decay_style="cosine"), 550, 0.55), (replace(PEAK, lr_decay_style="cosine"), 1000, 0.1),
    (replace(PEAK, lr_decay_style="cosine"), 325, 0.1 + 0.9 * (2 + math.sqrt(2)) / 4),
    (WSD, 101, 1.0), (WSD, 800, 1.0), (WSD, 1000, 0.1), (WSD, 900, 0.1 + 0.9 * (math.sqrt(2) - 1)),
    (WSD, 850, 0.1 + 0.9 * (2 * 0.5**0.25 - 1)),
    (replace(WSD, lr_wsd_decay_style="linear"), 900, 0.55), (replace(WSD, lr_wsd_decay_style="linear"), 850, 0.775),
    (replace(WSD, lr_wsd_decay_style="cosine"), 850, 0.1 + 0.9 * (2 + math.sqrt(2)) / 4),
    (replace(WSD, lr_wsd_decay_style="minus_sqrt"), 850, 0.55), (replace(WSD, lr_wsd_decay_style="minus_sqrt"), 1000, 0.1),
    (replace(WSD, lr_wsd_decay_iters=None, lr_wsd_decay_samples=400), 800, 0.1 + 0.9 * (math.sqrt(2) - 1)),
    (SQRT, 400, 0.5), (SQRT, 2500, 0.2), (SQRT, 10**6, 0.1), (replace(SQRT, lr_warmup_iters=0, min_lr=0.0), 400, 0.05),
    # other lengths of the decay
    (replace(PEAK, lr_decay_iters=55), 325, 0.55), (replace(PEAK, lr_decay_samples=550), 325, 0.55),
    (replace(PEAK, lr_decay_samples=550), 551, 0.1), (replace(PEAK, lr_decay_iters=200), 1050, 0.55),
    (replace(WSD, lr_decay_iters=60), 600, 0.1), (replace(WSD, lr_decay_iters=60), 400, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("config", "samples", "rate"), RATES)
def test_rate(config, samples, rate):
    assert learning_rate(samples, config, TRAIN) == pytest.approx(rate, rel=1e-12, abs=1e-15)


def test_length_in_samples():
    train = replace(TRAIN, train_iters=None, train_samples=550)
    assert learning_rate(325, PEAK, train) == pytest.approx(0.55)
    assert lengths(replace(PEAK, lr_warmup_iters=7), TRAIN) == (70.0, 1000.0, 0.0)


STYLES = ["constant", "linear", "cosine", "WSD", "inverse-square-root"]


@settings(deadline=None)
@given(style=st.sampled_from(STYLES), tail=st.sampled_from(["exponential", "linear", "cosine", "minus_sqrt"]),
       warmup=st.integers(0, 40), total=st.integers(41, 100), final=st.integers(1, 30), low=st.floats(0, 0.5))  # fmt: skip
def test_shape_of_every_schedule(style, tail, warmup, total, final, low):
    """Rises to the peak without a jump, then never rises, and stays between both rates."""
    config = replace(PEAK, lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=total, min_lr=low,
                     lr_wsd_decay_style=tail, lr_wsd_decay_iters=min(final, total - warmup))  # fmt: skip
    rates = [learning_rate(samples, config, TRAIN) for samples in range(0, 10 * total + 50, 10)]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1]) and rates[warmup] == pytest.approx(1.0 if warmup else rates[0])
    down = rates[warmup:]
    assert all(a >= b - 1e-12 for a, b in zip(down, down[1:], strict=False))
    assert all(low - 1e-12 <= rate <= 1.0 + 1e-12 for rate in down)
    if style in ("linear", "cosine", "WSD"):
        assert rates[total] == rates[-1] == low and down[0] == pytest.approx(1.0)


# -------------------------------------------------------------------------------------------------------------- buckets

UNITS = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=5), min_size=1, max_size=8)


@settings(deadline=None)
@given(sizes=UNITS, ranks=st.integers(1, 9), bucket_size=st.none() | st.integers(1, 4000))
def test_layout(sizes, ranks, bucket_size):
    counter = iter(range(100))
    units = [[(next(counter), n) for n in unit] for unit in sizes]
    numels = dict(pair for unit in units for pair in unit)
    unit_of = {index: u for u, unit in enumerate(units) for index, _ in unit}
    buckets = layout(units, ranks, bucket_size)
    assert buckets == layout(units, ranks, bucket_size)  # nothing but its arguments
    order = [slot.index for bucket in buckets for slot in bucket.slots]
    assert order == sorted(numels, reverse=True)  # each once, in reverse order of use
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.start % ALIGN == 0 and slot.numel == numels[slot.index]
            assert end <= slot.start < end + ALIGN  # no overlap, no gap beyond alignment
            end = slot.start + slot.numel
        assert end <= bucket.size < end + ALIGN * (ranks + 1) and bucket.size % (ALIGN * ranks) == 0
        assert [bucket.owned(r, ranks)[0] for r in range(1, ranks)] == [bucket.owned(r, ranks)[1] for r in range(ranks - 1)]
        assert bucket.owned(0, ranks)[0] == 0 and bucket.owned(ranks - 1, ranks)[1] == bucket.size
    members = [sorted({unit_of[slot.index] for slot in bucket.slots}) for bucket in buckets]
    for bucket, units_in in zip(buckets, members, strict=True):
        if 0 in units_in or len(units) - 1 in units_in or bucket_size is None:
            assert len(units_in) == 1  # the first and last unit alone: both copies of a tied embedding lie alike
        else:
            assert len(units_in) == 1 or sum(slot.numel for slot in bucket.slots) <= bucket_size
    totals = [sum(slot.numel for slot in bucket.slots) for bucket in buckets]
    inner = [(t, m) for t, m in zip(totals, members, strict=True) if not {0, len(units) - 1} & set(m)]
    if bucket_size is not None:  # no bucket closed early
        for (total, _), (_, following) in zip(inner, inner[1:], strict=False):
            assert total + sum(sizes[following[-1]]) > bucket_size


def test_layout_by_hand():
    units = [[(0, 100)], [(1, 64), (2, 1)], [(3, 10)], [(4, 70)]]
    apart, together = layout(units, 2), layout(units, 2, 75)
    expected = [[(4, 0, 70)], [(3, 0, 10)], [(2, 0, 1), (1, 64, 64)], [(0, 0, 100)]]
    assert [[(s.index, s.start, s.numel) for s in b.slots] for b in apart] == expected
    assert [b.size for b in apart] == [128, 128, 128, 128]
    assert [[s.index for s in b.slots] for b in together] == [[4], [3, 2, 1], [0]]
    assert [b.size for b in together] == [128, 256, 128]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8))
def test_runs_join_neighbours(spans):
    spans = [(20 * i + a % 5, 20 * i + a % 5 + n) for i, (a, n) in enumerate(spans)] + [(1000, 1010), (1010, 1020)]
    joined = runs(spans[::-1])
    assert sorted(x for a, b in joined for x in range(a, b)) == sorted(x for a, b in spans for x in range(a, b))
    assert all(a[1] < b[0] for a, b in zip(joined, joined[1:], strict=False))


# ------------------------------------------------------------------------------------------------------------ optimizer

MODEL = ModelConfig(num_layers=2, hidden_size=24, ffn_hidden_size=40, num_attention_heads=4, kv_channels=6, seq_length=16,
                    max_position_embeddings=16, hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def engine(dtype, normalization="LayerNorm", bucket_size=None):
    tp = TensorParallel(Axis("tp"), False, dtype, torch.device("cpu"))
    model = replace(MODEL, normalization=normalization)
    stage = TransformerStage(model, 50, 64, range(2), True, True, tp).initialise(3)
    return GradientEngine([stage], Sharding(), Axis("tp"), Axis("embedding"), bucket_size)


def parameters(made):
    return [p for bucket in made.buckets for p in bucket.params]


def random_gradients(made, seed):
    """The same gradients in the buffers and as a list of tensors."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for param in parameters(made):
        param.main_grad.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
        found.append(param.main_grad.clone())
    return found


def masters(optimizer):
    return [state.master[slot.start : slot.start + slot.numel].view(param.shape) for state in optimizer.states
            for slot, param in zip(state.bucket.layout.slots, state.bucket.params, strict=True)]  # fmt: skip


@pytest.mark.parametrize("bucket_size", [None, 3000])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_is_torchs(dtype, normalization, bucket_size):
    """Ten steps at changing rates; masters in fp32 under bf16; decay on matrices alone."""
    made = engine(dtype, normalization, bucket_size)
    config = OptimizerConfig(lr=1.0, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    optimizer = Optimizer(made.buckets, config)
    twins = [torch.nn.Parameter(p.detach().to(p.main_grad.dtype, copy=True)) for p in parameters(made)]
    groups = [{"params": [t for t in twins if t.dim() > 1], "weight_decay": 0.3},
              {"params": [t for t in twins if t.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    theirs = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6)
    for step in range(10):
        rate = 0.01 * (step % 3 + 1)
        for twin, gradient in zip(twins, random_gradients(made, step), strict=True):
            twin.grad = gradient * 0.25
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        optimizer.step(rate, torch.tensor(0.25, dtype=torch.float64))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for param, master, twin in zip(parameters(made), masters(optimizer), twins, strict=True):
        torch.testing.assert_close(master, twin.data, rtol=tolerance, atol=tolerance, msg=param.shard.name)
        assert torch.equal(param.data, master.to(dtype))
    assert optimizer.steps == 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_sgd_is_torchs(dtype):
    made = engine(dtype)
    optimizer = Optimizer(made.buckets, OptimizerConfig(lr=1.0, weight_decay=0.0, optimizer="sgd", sgd_momentum=0.7))
    twins = [torch.nn.Parameter(p.detach().to(p.main_grad.dtype, copy=True)) for p in parameters(made)]
    theirs = torch.optim.SGD(twins, lr=0.1, momentum=0.7)
    for step in range(5):
        for twin, gradient in zip(twins, random_gradients(made, step), strict=True):
            twin.grad = gradient * 0.5
        theirs.step()
        optimizer.step(0.1, torch.tensor(0.5, dtype=torch.float64))
    for master, twin in zip(masters(optimizer), twins, strict=True):
        torch.testing.assert_close(master, twin.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_gaps_and_padding_stay_zero(optimizer):
    made = engine(torch.float32)
    made_optimizer = Optimizer(made.buckets, OptimizerConfig(lr=1.0, weight_decay=0.1, optimizer=optimizer))
    for step in range(3):
        random_gradients(made, step)
        made_optimizer.step(0.1, torch.tensor(1.0, dtype=torch.float64))
    for state in made_optimizer.states:
        used = torch.zeros(state.bucket.layout.size, dtype=torch.bool)
        for slot in state.bucket.layout.slots:
            used[slot.start : slot.start + slot.numel] = True
        for flat in (state.bucket.param, state.master, *state.moments.values()):
            assert (flat[~used] == 0).all() and flat[used].abs().max() > 0


def test_bytes():
    made = engine(torch.bfloat16)
    elements = sum(bucket.layout.size for bucket in made.buckets)
    assert made.bytes() == {"weights": 2 * elements, "gradients": 4 * elements}
    assert Optimizer(made.buckets, OptimizerConfig(lr=1.0)).bytes() == {"master": 4 * elements, "moments": 8 * elements}
    assert Optimizer(engine(torch.float32).buckets, OptimizerConfig(lr=1.0)).bytes() == {"master": 0, "moments": 8 * elements}


# --------------------------------------------------------------------------------------------------------------- shards


def shard_engine(rank, ranks, stage, fill=None, dtype=torch.float32):
    """The engine of one of `ranks` that share a model, without the others: nothing is sent when it is built."""
    tp = TensorParallel(Axis("tp"), False, dtype, torch.device("cpu"))
    chunk = TransformerStage(MODEL, 50, 64, range(2), True, True, tp)
    sharding = Sharding(stage, Axis("zero_shard", rank, tuple(range(ranks))))
    return GradientEngine([chunk], sharding, Axis("tp"), Axis("embedding"), fill=fill or partial(initialise, seed=3))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_are_the_whole(stage, ranks):
    """Side by side the ranks' parts, and what they step, count and decay, are those of one rank; no element twice."""
    alone, shared = engine(torch.float32), [shard_engine(rank, ranks, stage) for rank in range(ranks)]
    for parts in zip(alone.buckets, *(made.buckets for made in shared), strict=True):
        one, *of_ranks = parts
        for slot, param in one.slots():
            param.requires_grad_(not param.shard.name.endswith("up_proj.weight"))
            for bucket in of_ranks:
                next(p for s, p in bucket.slots() if s.index == slot.index).requires_grad_(param.requires_grad)
        whole = torch.cat([bucket.param_shard for bucket in of_ranks])
        assert torch.equal(whole[: one.layout.size], one.param) and (whole[one.layout.size :] == 0).all()

        def marked(ranges, whole=whole, of_ranks=of_ranks):
            marks = torch.zeros(len(whole), dtype=torch.int)
            for bucket in of_ranks:
                for start, end, *value in ranges(bucket):
                    assert 0 <= start < end <= len(bucket.param_shard)
                    marks[bucket.owned[0] + start : bucket.owned[0] + end] += 1 + sum(value)
            return marks

        def expected(ranges, whole=whole, one=one):
            marks = torch.zeros(len(whole), dtype=torch.int)
            for start, end, *value in ranges(one):
                marks[start:end] += 1 + sum(value)
            return marks

        assert torch.equal(marked(owned_spans), expected(owned_spans))
        used = torch.zeros(len(whole), dtype=torch.bool)
        for slot, _ in one.slots():
            used[slot.start : slot.start + slot.numel] = True
        assert torch.equal(marked(step_runs)[used], expected(step_runs)[used])


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_blocks_of_full_tensors(ranks):
    """What the ranks would write to a checkpoint tiles every tensor; a part of a matrix is at most three blocks."""
    blocks = {}
    for rank in range(ranks):
        for bucket in shard_engine(rank, ranks, 3).buckets:
            for slot, param in bucket.slots():
                mine = bucket.owned_part(slot.start, slot.start + slot.numel)
                if mine is None:
                    continue
                start = bucket.owned[0] + mine[0] - slot.start
                found = flat_pieces("model", param.shard, param.shape, start, bucket.param_shard[slice(*mine)])
                assert len(found) <= 3 * len(param.shard.boxes)
                for piece in found:
                    blocks.setdefault((piece.key, piece.full_shape), []).append((piece.offset, piece.length))
    assert len(blocks) == len({box.name for p in parameters(engine(torch.float32)) for box in p.shard.boxes})
    for (key, shape), spans in blocks.items():
        assert tiling_fault(shape, spans) is None, key


def test_stage_3_never_holds_the_model():
    """While it is drawn, each rank has memory for one unit and its parts of those before."""
    most, params = [0], []

    def fill(param):
        initialise(param, 3)
        params.append(param)
        alive = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in params}
        most[0] = max(most[0], sum(alive.values()))

    made = shard_engine(0, 2, 3, fill)
    largest = max(bucket.layout.size for bucket in made.buckets) * 4
    assert most[0] == largest and len(params) == len(parameters(made))


# ------------------------------------------------------------------------------------------------------- norm and clip


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_the_concatenation(dtype):
    """Of true rows alone: padding rows of the vocabulary belong to no box."""
    made = engine(dtype)
    random_gradients(made, 1)
    for of, tolerance in (("grad", 1e-6), ("param", 1e-6)):
        parts = []
        for param in parameters(made):
            tensor = param.main_grad if of == "grad" else param.data
            parts.append((tensor[:50] if param.shard.name == "embed_tokens.weight" else tensor).double().flatten())
        norm = square_sum(made.buckets, of, Axis("tp_pp")).sqrt()
        assert norm.dtype == torch.float64 and norm.item() == pytest.approx(torch.cat(parts).norm().item(), rel=tolerance)


def test_norm_of_a_bad_gradient_is_not_finite():
    for value in (float("nan"), float("inf")):
        made = engine(torch.float32)
        random_gradients(made, 1)
        parameters(made)[3].main_grad.view(-1)[-1] = value
        assert not math.isfinite(square_sum(made.buckets, "grad", Axis("tp_pp")).item())


@pytest.mark.parametrize(("norm", "limit", "scale"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (1e9, 0.0, 1.0), (4.0, 1e-6, 2.5e-7)])
def test_clip_coefficient(norm, limit, scale):
    assert clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit).item() == pytest.approx(scale, rel=1e-5)


def test_the_norm_of_millions_is_exact_to_fp32():
    """torch.linalg.vector_norm of 4 M fp32 values on CPU is off by several 1e-4; clipping must not depend on the cut."""
    values = torch.randn(4_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    values[::7] *= 30
    exact = values.double().square().sum()
    assert abs(clip._square_sum(values) / exact - 1) < 1e-7
    parts = sum(clip._square_sum(part) for part in values.split(333_333))
    assert abs(parts / exact - 1) < 1e-7
