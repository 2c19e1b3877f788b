"""Keys and values of the tokens that a batch of texts has been through, so that the next token costs one row.

    reading    the prompts in one pass, by the core that training uses; every layer's keys and values are kept
    writing    one new token per row: its key and value are put behind the row's others, its query sees all of them

Rows start together at slot 0 and end where their prompt ends: slot = position. What a shorter row computes behind its end is
padding; causality hides it from the row while reading, the row's length while writing, and the next tokens overwrite it.

Shapes: S slots, n slots in use, b rows, k key/value heads, g queries per key/value head, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Past:
    """What all layers keep, by layer number: keys and values [S, b, k, d] of this tp rank's heads.

    `lengths` are the tokens each row has behind it; empty while the prompts are being read. On the host, since every
    step's shapes follow from them.
    """

    slots: int
    lengths: list[int] = field(default_factory=list)
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def read(self, lengths: Sequence[int]) -> None:
        """The prompts have been read; row r has `lengths[r]` tokens."""
        self.lengths = list(lengths)

    def advance(self) -> None:
        """Every layer has the new tokens."""
        self.lengths = [length + 1 for length in self.lengths]

    def positions(self, device: torch.device) -> torch.Tensor:
        """Of the tokens that come next.   [1, b]"""
        return torch.tensor([self.lengths], device=device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: Core) -> torch.Tensor:
        """Keep k and v [s, b, k, 1, d] and attend with scaled q [s, b, k, g, d] -> the same shape.

        `core(q, k, v)` is training's, for the prompts; after them s is 1.
        """
        s, b = k.shape[:2]
        if layer not in self.layers:
            shape = (self.slots, b, k.shape[2], k.shape[4])
            # zeros: a slot that no row has reached is masked, and 0 x NaN would be NaN
            self.layers[layer] = k.new_zeros(shape), v.new_zeros(shape)
        keys, values = self.layers[layer]
        if not self.lengths:
            keys[:s], values[:s] = k.squeeze(3), v.squeeze(3)
            return core(q, k, v)
        slots, rows = self.positions(k.device)[0], torch.arange(b, device=k.device)
        keys[slots, rows], values[slots, rows] = k[0].squeeze(2), v[0].squeeze(2)
        n = max(self.lengths) + 1
        return attend_one(q[0], keys[:n], values[:n], slots)[None]


def attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """One new token per row: q [b, k, g, d] scaled, keys and values [n, b, k, d]; row r sees slots 0..last[r] -> as q.

    The g queries of a key/value head take the place of a sequence, so K and V are read once and never expanded. The same
    kernel on CPU and CUDA: here the time goes into reading K and V, not into products.
    """
    seen = torch.arange(keys.shape[0], device=q.device) <= last[:, None]  # [b, n]
    k, v = keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)  # [b, k, n, d]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=1.0)
