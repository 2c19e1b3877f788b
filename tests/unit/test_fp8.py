"""8-bit linears in emulation: casts, scales, the three products within the bound of their formats, a model that trains."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.arguments import parse
from megatron_lite.comm.mesh import Axis, single
from megatron_lite.config import PrecisionConfig
from megatron_lite.errors import ReportedError
from megatron_lite.parallel.fp8 import E4M3, E5M2, Fp8Linear, Fp8Recipe, Scaling, cast, product, require_fp8, scale_of
from megatron_lite.parallel.shard import Init, allocate
from megatron_lite.parallel.tensor import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_boxes
from megatron_lite.parallel.wgrad import attach_grad_buffers
from megatron_lite.training import setup
from megatron_lite.training.setup import build_trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
from layouts import GPT, LLAMA, config_for, replace, run_steps  # noqa: E402

CPU = torch.device("cpu")
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # largest rounding error of a normal number, relative to it
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}  # distance of the numbers nearest to zero
NAN = float("nan")


def noise(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_cast_is_off_by_half_a_step(dtype, size):
    x = noise(64, 64) * size
    found = cast(x, scale_of(x.float().abs().max(), dtype, 0), dtype)
    back = found.values.float() / found.scale
    allowed = (x.float().abs() * HALF_STEP[dtype]).clamp(min=float(SMALLEST[dtype] / found.scale))
    assert ((back - x.float()).abs() <= allowed).all()
    assert found.values.float().abs().max() == torch.finfo(dtype).max  # the whole range is used


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_too_large_saturates_and_never_becomes_inf(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[1e4, -1e30, largest * 1.01, 3.0]])
    found = cast(x, torch.tensor(1.0), dtype).values.float()
    assert found.tolist() == [[min(1e4, largest) if dtype == E4M3 else 1e4 // 2048 * 2048 + 2048, -largest, largest, 3.0]]
    assert cast(torch.zeros(2, 2), scale_of(torch.tensor(0.0), dtype, 0), dtype).values.float().eq(0).all()


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("history", [0, 3])
def test_saturation_hides_nothing_that_is_not_finite(bad, history):
    scaling = Scaling(E4M3, Fp8Recipe(history=history), CPU)
    scaling.cast(noise(4, 4))
    x = noise(4, 4)
    x[1, 2] = bad
    assert scaling.cast(x).values.float().isnan().all()
    assert scaling.cast(noise(4, 4)).values.float().isfinite().all()  # and the history has not learnt it


def test_delayed_scales_worked_by_hand():
    """amax of the last two uses; the first use takes its own, what has grown saturates, margin 1 halves the scale."""
    scaling = Scaling(E4M3, Fp8Recipe(history=2, margin=1), CPU)
    scales = []
    for amax in (4.0, 8.0, 2.0, 1.0, 1.0, 1.0):
        found = scaling.cast(torch.tensor([[amax, -amax / 2]]))
        scales.append(found.scale.item())
        assert found.values.float()[0, 0] == min(amax * scales[-1], 448.0)
    assert scales == [448 / 8, 448 / 8, 448 / 16, 448 / 16, 448 / 4, 448 / 2]
    scaling.cast(torch.tensor([[100.0]]), remember=False)  # evaluation leaves no trace
    assert scaling.history.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("layer", ["column", "row"])
@pytest.mark.parametrize(("recipe", "bias"), [
    (Fp8Recipe(), True), (Fp8Recipe(backward=E4M3), False), (Fp8Recipe(history=4), False)])  # fmt: skip
def test_the_three_products_are_within_the_bound(layer, recipe, bias):
    """|error| of a sum of products <= sum of |a| |b| times the relative errors of both casts, for y, dx and dW."""
    tp = TensorParallel(Axis("tp"), False, torch.bfloat16, CPU, recipe)
    if layer == "column":
        boxes = column_boxes([("w.weight", (48, 32))], tp.axis)
        linear = ColumnParallelLinear("w", 48, 32, boxes, Init("normal", 1.0), tp, column_boxes([("w.bias", (48,))], tp.axis))
    else:
        linear = RowParallelLinear("w", 32, 48, Init("normal", 1.0), tp, True)
    for param in linear.parameters():
        allocate(param)
    with torch.no_grad():
        linear.weight.copy_(noise(48, 32, seed=1)), linear.bias.zero_()
        linear.bias.add_(1.0 if bias else 0.0)
    attach_grad_buffers(linear.parameters())
    x, dy = noise(8, 4, 32, seed=2).requires_grad_(), noise(8, 4, 48, seed=3) * 1e-3
    y = linear(x)
    y.backward(dy)
    a, w, g = x.detach().float().flatten(0, 1), linear.weight.detach().float(), dy.float().flatten(0, 1)
    forward, backward = HALF_STEP[E4M3], HALF_STEP[recipe.backward]

    def close(found, left, right, relative, out=2.0**-7):
        exact, bound = left @ right, left.abs() @ right.abs()
        off = (found.float().reshape(exact.shape) - exact).abs()
        assert (off <= relative * 1.1 * bound + out * (exact.abs() + 1)).all() and off.max() > 0

    close(y - linear.bias.detach(), a, w.t(), 2 * forward)
    close(x.grad * 1e3, g * 1e3, w, forward + backward)
    close(linear.weight.main_grad * 1e3, g.t() * 1e3, a, forward + backward)
    assert linear.weight.main_grad.dtype == torch.float32
    torch.testing.assert_close(linear.bias.main_grad, g.sum(0), rtol=1e-4, atol=1e-6)


def test_products_are_those_of_the_numbers_cast():
    """The emulation multiplies exactly what was cast."""
    linear = Fp8Linear(Fp8Recipe(), CPU)
    x, weight = noise(32, 16), noise(48, 16, seed=1)
    y, (scale_x, scale_w) = linear.forward(x, weight, True)
    by_hand = (cast(x, scale_x, E4M3).values.double() / scale_x) @ (cast(weight, scale_w, E4M3).values.double() / scale_w).t()
    torch.testing.assert_close(y.double(), by_hand, rtol=2.0**-8, atol=1e-6)
    try:  # torch's own product, where this build has one for the CPU
        a, b = cast(x, scale_x, E4M3), cast(weight, scale_w, E4M3)
        torchs = torch._scaled_mm(a.values, b.values.t(), scale_a=a.scale.reciprocal(), scale_b=b.scale.reciprocal(),
                                  out_dtype=torch.float32)  # fmt: skip
    except (RuntimeError, NotImplementedError):
        return
    torch.testing.assert_close(torchs, product(a, b, torch.float32, False), rtol=1e-4, atol=1e-4)


def trainer_of(model, **flags):
    config = replace(config_for(model, precision="bf16"), "precision", **flags)
    return build_trainer(replace(config, "optimizer", lr=1e-3), single())


@pytest.fixture
def allowed(monkeypatch):
    """8-bit linears in emulation, which a run is refused."""
    monkeypatch.setattr(setup, "require_fp8", lambda *_: None)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("flags", [{"fp8_format": "hybrid"}, {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}])
def test_a_model_follows_bf16(allowed, model, flags):
    """A scale that is left in, or taken out twice, is off by far more than these bounds; the products' own are above."""
    model = dataclasses.replace(model, init_method_std=0.1)
    fp8, bf16 = (run_steps(trainer_of(model, **f), range(1)) for f in (flags, {}))
    assert fp8["losses"] == pytest.approx(bf16["losses"], rel=1e-2) and fp8["losses"] != bf16["losses"]
    assert fp8["norms"] == pytest.approx(bf16["norms"], rel=0.15)
    for (name, *_, mine), (_, *_, theirs) in zip(fp8["grads"], bf16["grads"], strict=True):
        if name.endswith("proj.weight"):
            assert torch.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.8, name
            assert 0.75 < float(mine.norm() / theirs.norm()) < 1.33, name


def test_first_and_last_layer_stay_in_bf16(allowed):
    def in_8_bits(**flags):
        chunk = trainer_of(GPT, fp8_format="hybrid", **flags).chunks[0]
        return [layer.layer for layer in chunk.layers if layer.mlp.up_proj.fp8 and layer.self_attn.o_proj.fp8]

    assert in_8_bits() == [0, 1, 2, 3] and in_8_bits(first_last_layers_bf16=True) == [1, 2]
    plain = trainer_of(GPT)
    assert all(layer.mlp.down_proj.fp8 is None for layer in plain.chunks[0].layers)


def test_elsewhere_it_is_refused_in_one_line():
    with pytest.raises(ReportedError, match=r"--fp8-format hybrid: needs a GPU of compute capability 8.9 .* this is a CPU"):
        require_fp8(PrecisionConfig(bf16=True, fp8_format="hybrid"), CPU)
    with pytest.raises(ReportedError, match="--bf16 alone runs here"):
        trainer_of(GPT, fp8_format="e4m3")
    require_fp8(PrecisionConfig(bf16=True), CPU)


def test_flags_become_the_recipe():
    line = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --vocab-size 100 "
            "--lr 1 --train-iters 9 --mock-data --bf16")  # fmt: skip
    for flags, expected in (
        ("", None), ("--fp8-format hybrid", Fp8Recipe(E4M3, E5M2, 1, 0)), ("--fp8-format e4m3", Fp8Recipe(E4M3, E4M3, 1, 0)),
        ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 2", Fp8Recipe(E4M3, E5M2, 0, 2)),
        ("--fp8-format hybrid --fp8-amax-history-len 16", Fp8Recipe(E4M3, E5M2, 16, 0)),
    ):  # fmt: skip
        config, problems = parse(f"{line} {flags}".split(), 1)
        assert not problems and Fp8Recipe.of(config.precision) == expected
    assert math.isclose(scale_of(torch.tensor(7.0), E4M3, 2).item(), 16.0)
