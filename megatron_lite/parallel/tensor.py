"""Column- and row-parallel linears: a matrix cut over tp, with the communication at its ends.

    column   y_r = x  @ W_r^T        W_r = rows r of W      [out/tp, in]     input is made whole, output stays cut
    row      y   = sum_r x_r @ W_r^T W_r = columns r of W   [out, in/tp]     input is cut, output is summed

                       without sequence parallel            with sequence parallel
    column  forward    nothing                              all-gather the input     [s/tp, b, h] -> [s, b, h]
            backward   all-reduce the input gradient        reduce-scatter it        [s, b, h] -> [s/tp, b, h]
    row     forward    all-reduce the output                reduce-scatter it
            backward   nothing                              all-gather the output gradient

In the column backward the communication of the input gradient starts before the weight-gradient GEMM and is waited on
after it; with sequence parallel the input is gathered again behind the input-gradient GEMM, so only the cut input is kept.

For recomputation (recompute.py) a linear can be told
    again     how to make its input anew, instead of keeping it
    replay    that its backward follows at once: a column linear then keeps the gathered input, a row linear leaves out its
              product and the sum over tp, since no output is needed

Shapes: s sequence, b micro-batch, h hidden. Source: Shoeybi et al. 2019 (arXiv 1909.08053), Korthikanti et al. 2022
(arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Axis
from megatron_lite.parallel.context import ContextParallel
from megatron_lite.parallel.fp8 import Fp8Linear, Fp8Recipe
from megatron_lite.parallel.shard import Box, Init, Shard, cut, parameter, whole
from megatron_lite.parallel.wgrad import give

Again = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class TensorParallel:
    """How layers are cut: the tp axis, whether activations between regions are cut too, what weights are made of, in what
    their products are computed (`fp8` None: as they are), and who shares a sequence (`context` None: nobody)."""

    axis: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    fp8: Fp8Recipe | None = None
    context: ContextParallel | None = None

    def fp8_linear(self) -> Fp8Linear | None:
        """The scales of one more linear."""
        return None if self.fp8 is None else Fp8Linear(self.fp8, self.device)


def give_weight_grad(weight: nn.Parameter, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Hand over dW += dy^T @ x.   x [..., in], dy [..., out]"""
    x2, dy2 = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])

    def add(grad: torch.Tensor) -> torch.Tensor:
        if grad.dtype == dy2.dtype:  # fp32 and fp64: the GEMM itself adds
            return grad.addmm_(dy2.t(), x2)
        return grad.add_(dy2.t() @ x2)

    give(weight, add)


def give_bias_grad(bias: nn.Parameter, dy: torch.Tensor) -> None:
    """Hand over db += sum over tokens of dy, summed in the precision of the buffer."""
    give(bias, lambda grad: grad.add_(dy.reshape(-1, dy.shape[-1]).sum(0, dtype=grad.dtype)))


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, axis: Axis, sequence_parallel: bool, fp8: Fp8Linear | None, again: Again | None,
                replay: bool):  # fmt: skip
        ctx.weight, ctx.bias, ctx.axis, ctx.sequence_parallel, ctx.fp8 = weight, bias, axis, sequence_parallel, fp8
        ctx.again, ctx.gathered = again, replay
        whole_x = comm.all_gather(x, axis) if sequence_parallel else x  # [s, b, h]
        if again is None:
            ctx.save_for_backward(whole_x if replay else x)  # the cut input: [s/tp, b, h] under sequence parallel
        if fp8 is None:
            return nn.functional.linear(whole_x, weight, bias)  # [s, b, out/tp]
        y, ctx.scales = fp8.forward(whole_x, weight, training=ctx.needs_input_grad[0])
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy):
        x = _kept_input(ctx)
        axis, weight, bias, fp8 = ctx.axis, ctx.weight, ctx.bias, ctx.fp8
        cut_x = ctx.sequence_parallel and not ctx.gathered
        gather = comm.start_all_gather(x, axis) if cut_x and weight.requires_grad else None
        dy8 = None if fp8 is None else fp8.cast_grad(dy)
        dx = None
        if ctx.needs_input_grad[0]:  # [s, b, h], a partial sum over tp
            dx = dy @ weight if fp8 is None else fp8.input_grad(dy8, weight, ctx.scales, dy)
        if gather is not None:
            x = gather.wait()
        reduce = None
        if dx is not None:
            reduce = comm.start_reduce_scatter(dx, axis) if ctx.sequence_parallel else comm.start_all_reduce(dx, axis)
        if weight.requires_grad and fp8 is None:
            give_weight_grad(weight, x, dy)
        elif weight.requires_grad:
            give(weight, lambda grad: grad.add_(fp8.weight_grad(dy8, x, ctx.scales)))
        if bias is not None and bias.requires_grad:
            give_bias_grad(bias, dy)
        return (None if reduce is None else reduce.wait()), None, None, None, None, None, None, None


def _kept_input(ctx) -> torch.Tensor:
    """A linear's input in its backward: kept, or made again. The call goes at once, and with it what it holds."""
    if ctx.again is None:
        return ctx.saved_tensors[0]
    again, ctx.again = ctx.again, None
    return again()


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, axis: Axis, sequence_parallel: bool, fp8: Fp8Linear | None, again: Again | None,
                replay: bool):  # fmt: skip
        ctx.weight, ctx.bias, ctx.axis, ctx.sequence_parallel, ctx.fp8 = weight, bias, axis, sequence_parallel, fp8
        ctx.again = again
        if again is None:
            ctx.save_for_backward(x)  # [s, b, in/tp]
        if replay and fp8 is None:
            length = x.shape[0] // (axis.size if sequence_parallel else 1)
            return x.new_zeros(length, x.shape[1], weight.shape[0])
        if fp8 is None:
            y = nn.functional.linear(x, weight)  # [s, b, out], a partial sum over tp
        else:
            y, ctx.scales = fp8.forward(x, weight, training=ctx.needs_input_grad[0])
        y = comm.reduce_scatter(y, axis) if sequence_parallel else comm.all_reduce(y, axis)
        return y if bias is None else y.add_(bias)  # after the sum: once, not tp times

    @staticmethod
    def backward(ctx, dy):
        x = _kept_input(ctx)
        weight, bias, fp8 = ctx.weight, ctx.bias, ctx.fp8
        if bias is not None and bias.requires_grad:
            give_bias_grad(bias, dy)
        whole_dy = comm.all_gather(dy, ctx.axis) if ctx.sequence_parallel else dy  # [s, b, out]
        dy8 = None if fp8 is None else fp8.cast_grad(whole_dy)
        dx = None
        if ctx.needs_input_grad[0]:  # [s, b, in/tp]
            dx = whole_dy @ weight if fp8 is None else fp8.input_grad(dy8, weight, ctx.scales, whole_dy)
        if weight.requires_grad and fp8 is None:
            give_weight_grad(weight, x, whole_dy)
        elif weight.requires_grad:
            give(weight, lambda grad: grad.add_(fp8.weight_grad(dy8, x, ctx.scales)))
        return dx, None, None, None, None, None, None, None


def column_linear(x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel,
                  fp8: Fp8Linear | None = None, again: Again | None = None, replay: bool = False) -> torch.Tensor:  # fmt: skip
    """x W_r^T + b_r with this rank's rows.   x [s/tp or s, b, in] -> [s, b, out/tp]"""
    return _ColumnLinear.apply(x, weight, bias, tp.axis, tp.sequence_parallel, fp8, again, replay)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W cut over tp.   x [s/tp or s, b, in] -> [s, b, out/tp]

    `weight_boxes` / `bias_boxes` say which full tensors the local rows belong to (see `column_boxes`, `attention.qkv_boxes`).
    """

    def __init__(self, name: str, rows: int, in_features: int, weight_boxes: tuple[Box, ...], init: Init,
                 tp: TensorParallel, bias_boxes: tuple[Box, ...] | None = None):  # fmt: skip
        super().__init__()
        self.tp, self.fp8 = tp, tp.fp8_linear()
        shard = Shard(f"{name}.weight", weight_boxes, init, decay=True)
        self.weight = parameter((rows, in_features), shard, tp.dtype, tp.device)
        self.bias = None
        if bias_boxes is not None:
            shard = Shard(f"{name}.bias", bias_boxes, Init("zeros"), decay=False)
            self.bias = parameter((rows,), shard, tp.dtype, tp.device)

    def forward(self, x: torch.Tensor, again: Again | None = None, replay: bool = False) -> torch.Tensor:
        return column_linear(x, self.weight, self.bias, self.tp, self.fp8, again, replay)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W cut over tp.   x [s, b, in/tp] -> [s/tp or s, b, out]

    The bias is whole on every rank. Under sequence parallel each rank adds it to its own positions, so its gradient is partial.
    """

    def __init__(self, name: str, in_features: int, out_features: int, init: Init, tp: TensorParallel, bias: bool):
        super().__init__()
        self.tp, self.fp8 = tp, tp.fp8_linear()
        axis = tp.axis
        box = cut(f"{name}.weight", (out_features, in_features), 1, axis.size, axis.rank)
        self.weight = parameter(box.length, Shard(box.name, (box,), init, decay=True), tp.dtype, tp.device)
        self.bias = replicated_vector(f"{name}.bias", out_features, "zeros", tp) if bias else None

    def forward(self, x: torch.Tensor, again: Again | None = None, replay: bool = False) -> torch.Tensor:
        tp = self.tp
        return _RowLinear.apply(x, self.weight, self.bias, tp.axis, tp.sequence_parallel, self.fp8, again, replay)


def replicated_vector(name: str, size: int, kind: str, tp: TensorParallel, partial: bool | None = None) -> nn.Parameter:
    """A norm weight or bias that every tp rank holds. Its gradient is partial when each rank sees only some positions
    (sequence parallel: the default) or only some heads (q/k norms: always)."""
    partial = tp.sequence_parallel if partial is None else partial
    box = whole(name, (size,), tp.axis.size, tp.axis.rank, partial and tp.axis.size > 1)
    return parameter((size,), Shard(name, (box,), Init(kind), decay=False), tp.dtype, tp.device)


def column_boxes(pieces: list[tuple[str, tuple[int, ...]]], axis: Axis) -> tuple[Box, ...]:
    """Boxes of pieces that are each cut over tp along dim 0 and lie one under the other: [gate_r; up_r].

    The cut keeps pairs together: rank r holds rows r of the gate and rows r of the up projection.
    """
    boxes, start = [], 0
    for name, shape in pieces:
        box = cut(name, shape, 0, axis.size, axis.rank)
        boxes.append(Box(name, shape, box.offset, box.length, (start, *box.local[1:])))
        start += box.length[0]
    return tuple(boxes)
