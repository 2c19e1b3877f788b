"""A conversion as data: which block of our tensors is which block of theirs. Pure; the same links serve both directions.

    ours [3 x h, h]               theirs                              link
    q_proj.weight [a d, h]   <->  model.layers.0...q_proj.weight      the whole tensor, another name
    q_proj.weight [h, h]     <->  h.0.attn.c_attn.weight [h, 3h]      columns 0..h, transposed (GPT-2)
    q_proj.weight [a d, h]   <->  linear_qkv.weight of tp rank 1      one block per KV head (Megatron)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_lite.checkpoint.boxes import tiling_fault
from megatron_lite.comm.mesh import Axis
from megatron_lite.config import ModelConfig
from megatron_lite.errors import ReportedError
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.shard import Box, whole
from megatron_lite.parallel.tensor import TensorParallel

SHOWN = 20  # an error text stays readable when a thousand tensors are wrong


class ConversionError(ReportedError):
    """Why a model cannot be converted; names each tensor or setting."""

    def __init__(self, headline: str, problems: Iterable[str] = ()):
        problems = list(problems)
        shown = [f"  {problem}" for problem in problems[:SHOWN]]
        hidden = len(problems) - len(shown)
        super().__init__("\n".join([headline, *shown, *([f"  ... and {hidden} more"] if hidden else [])]))


@dataclass(frozen=True)
class Link:
    """`box` is a block of one of our full tensors; `box.local` is where it lies in their tensor `theirs`.

    transposed  their tensor has our two dims the other way round; `box.local` counts in our order
    padded      their tensor may have further rows (a padded vocabulary), which are dropped
    alias       their tensor repeats what another one holds (an output layer beside tied embeddings); it may be absent
    """

    box: Box
    theirs: str
    transposed: bool = False
    padded: bool = False
    alias: bool = False

    def of_theirs(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block as a view of their tensor, in our orientation."""
        return self.box.of_local(tensor.t() if self.transposed else tensor)

    @property
    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, length) of the block in their tensor, in their orientation."""
        if self.transposed:
            return self.box.local[::-1], self.box.length[::-1]
        return self.box.local, self.box.length


def renamed(name: str, shape: tuple[int, ...], theirs: str, transposed: bool = False) -> Link:
    """The whole of one of our tensors is the whole of one of theirs."""
    return Link(whole(name, shape), theirs, transposed)


def our_stage(model: ModelConfig, vocab: int, padded: int, layers: range, first: bool, last: bool, axis: Axis):
    """A stage without memory: only its shard records are read."""
    tp = TensorParallel(axis, False, torch.float32, torch.device("meta"))
    return TransformerStage(model, vocab, padded, layers, first, last, tp)


def our_tensors(model: ModelConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """{canonical name: full shape} of a whole model, read from the shard records of its parameters."""
    stage = our_stage(model, vocab, vocab, range(model.num_layers), True, True, Axis("tp"))
    return {box.name: box.full_shape for param in stage.parameters() for box in param.shard.boxes}


def by_theirs(links: Iterable[Link]) -> dict[str, list[Link]]:
    """{their tensor: its links}, in the order of the links."""
    found: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        found[link.theirs].append(link)
    return dict(found)


def by_ours(links: Iterable[Link]) -> dict[str, list[Link]]:
    """{our tensor: the links that fill it}, without aliases."""
    found: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        if not link.alias:
            found[link.box.name].append(link)
    return dict(found)


def their_shape(links: Iterable[Link]) -> tuple[int, ...]:
    """The shape of one of their tensors, from all of its links."""
    ends = [tuple(o + n for o, n in zip(*link.block, strict=True)) for link in links]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def check_links(links: Iterable[Link], targets: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Every target filled once, every source used, every shape right; else one ConversionError that names each.

    targets  {our name: full shape}
    shapes   {their name: shape} of what is there
    """
    links = list(links)
    filled, used, problems = by_ours(links), by_theirs(links), []
    for name, shape in targets.items():
        fault = tiling_fault(shape, [(k.box.offset, k.box.length) for k in filled.get(name, [])])
        if fault:
            problems.append(f"our tensor {name}: {fault if name in filled else 'nothing fills it'}")
    for name, own in used.items():
        if name not in shapes:
            if not own[0].alias:
                problems.append(f"missing tensor {name} (it fills {', '.join(sorted({k.box.name for k in own}))})")
            continue
        expected, found = their_shape(own), tuple(shapes[name])
        longer = own[0].padded and found[1:] == expected[1:] and found[:1] >= expected[:1]
        if found != expected and not longer:
            problems.append(f"wrong shape of tensor {name}: {list(found)}, expected {list(expected)}")
    problems += [f"extra tensor {name} {list(shape)}: this model has no place for it"
                 for name, shape in shapes.items() if name not in used]  # fmt: skip
    if problems:
        raise ConversionError("the tensors are not those of the model that the configuration describes:", problems)
