"""The shard record: what a parameter is, which part of it this rank holds, and who else holds it.

Initialisation, gradient reduction, gradient norm, weight decay, checkpoint, conversion and planner read this record; none
derives it again. A local parameter is a set of boxes. Each box is a block of a *full* tensor with a canonical name (the
Hugging Face LLaMA name without `model.`), as if the model had never been cut or fused:

    qkv_proj.weight on one rank, rows grouped per KV head [kv][q.. k v][d]
      rows  0..127  ->  box of layers.0.self_attn.q_proj.weight rows 0..127
      rows 128..191 ->  box of layers.0.self_attn.k_proj.weight rows 0..63
      rows 192..255 ->  box of layers.0.self_attn.v_proj.weight rows 0..63

Copies: a block that several tp ranks hold (norm weights, biases of row-parallel linears, KV heads when there are fewer of
them than ranks) names how many hold it and which copy this is; copy 0 owns it: only the owner writes it to a checkpoint
and counts it in the norm. `partial` says that each copy's gradient is only a part of the sum (sequence parallelism,
q/k norms, shared KV heads), so that they have to be added up.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Init(NamedTuple):
    """How a full tensor starts: `normal` with `std`, `ones` or `zeros`."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class Box:
    """A block of a full tensor, and where it lies in the local parameter.

    name, full_shape    the full tensor
    offset, length      the block, per dim, in the full tensor
    local               the block's first index, per dim, in the local parameter
    copies, copy        how many tp ranks hold this block, and which of them this is
    partial             the copies' gradients must be summed
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: tuple[int, ...]
    local: tuple[int, ...]
    copies: int = 1
    copy: int = 0
    partial: bool = False

    @property
    def owned(self) -> bool:
        return self.copy == 0

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        """This block, as a view of the full tensor."""
        return full[tuple(slice(o, o + n) for o, n in zip(self.offset, self.length, strict=True))]

    def of_local(self, local: torch.Tensor) -> torch.Tensor:
        """This block, as a view of the local parameter (or of a tensor of its shape: gradient, moment)."""
        return local[tuple(slice(o, o + n) for o, n in zip(self.local, self.length, strict=True))]


@dataclass(frozen=True)
class Shard:
    """The record that hangs on every parameter as `param.shard`.

    name    the local parameter's canonical name (fused ones: `layers.0.self_attn.qkv_proj.weight`)
    boxes   what it holds; rows in no box are vocabulary padding, which starts at zero and stays there
    decay   takes part in weight decay (matrices do; norms and biases do not)
    tied    a second copy of a parameter that another place owns: the output layer's copy of the embedding, and all of a
            stage's parameters on the second of two ranks that hold it (DualPipe)
    expert  of experts that are shared out over ep: reduced over the ranks that hold the same ones, not over dp x cp
    """

    name: str
    boxes: tuple[Box, ...]
    init: Init
    decay: bool
    tied: bool = False
    expert: bool = False


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of part `index` of `size` cut evenly into `parts`."""
    if size % parts:
        raise ValueError(f"{size} cannot be cut evenly into {parts} parts")
    return index * (size // parts), size // parts


def whole(name: str, shape: tuple[int, ...], copies: int = 1, copy: int = 0, partial: bool = False) -> Box:
    """A box that is the full tensor, held by `copies` ranks."""
    zero = (0,) * len(shape)
    return Box(name, shape, zero, shape, zero, copies, copy, partial)


def cut(name: str, shape: tuple[int, ...], dim: int, parts: int, index: int) -> Box:
    """A box that is part `index` of the full tensor, cut along `dim`; the local parameter holds nothing else."""
    start, length = split(shape[dim], parts, index)
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    extent = tuple(length if d == dim else n for d, n in enumerate(shape))
    return Box(name, shape, offset, extent, (0,) * len(shape))


def seed_of(seed: int, name: str) -> int:
    """63-bit seed from (seed, name): the same on every rank, machine and layout."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") >> 1


def draw_full(shape: tuple[int, ...], init: Init, seed: int, name: str) -> torch.Tensor:
    """The full initial tensor in fp32 on the CPU, from (seed, canonical name) alone."""
    if init.kind == "ones":
        return torch.ones(shape)
    if init.kind == "zeros":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.empty(shape).normal_(0.0, init.std, generator=generator)


def allocate(param: torch.nn.Parameter) -> None:
    """Memory of its own, uninitialised."""
    param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device)


@torch.no_grad()
def initialise(param: torch.nn.Parameter, seed: int) -> None:
    """Fill a local parameter with its boxes of the full initial tensors: one rank and a thousand start bit-equal."""
    param.zero_()
    drawn: dict[str, torch.Tensor] = {}
    for box in param.shard.boxes:
        if box.name not in drawn:
            drawn[box.name] = draw_full(box.full_shape, param.shard.init, seed, box.name)
        box.of_local(param.data).copy_(box.of_full(drawn[box.name]))


def parameter(shape: tuple[int, ...], shard: Shard, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """A local parameter that carries its record. It has a shape but no memory: `allocate`, or the gradient engine, gives it
    some, so that a model of any size can be described anywhere."""
    param = torch.nn.Parameter(torch.empty((), dtype=dtype, device=device).expand(shape))
    param.shard = shard
    return param
