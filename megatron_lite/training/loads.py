"""How many tokens each expert was given in a step, the losses that even it out, and the bias that does.

Counts are those of the whole global batch: routers add them up on every rank, microbatch by microbatch, and one message over
the world brings them together, a row for each layer with experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_lite.checkpoint.boxes import Request
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh
from megatron_lite.config import ModelConfig
from megatron_lite.models.router import Router
from megatron_lite.models.transformer import TransformerStage


@dataclass(frozen=True)
class Load:
    """The same on every rank. `ratios` {layer: most tokens of an expert over the mean of all}; losses with their coefficients,
    mean over the layers, None where the run has none."""

    ratios: dict[int, float]
    balance_loss: float | None
    z_loss: float | None

    def fields(self) -> list[str]:
        """For the log line."""
        worst = max(self.ratios, key=self.ratios.get)
        return [f"{name}: {value:.6E}" for name, value in self._losses().items()] + [
            f"expert load max/mean: {self.ratios[worst]:.2f} (layer {worst})"]  # fmt: skip

    def values(self) -> dict[str, float]:
        """For W&B, TensorBoard and JSONL."""
        return self._losses() | {"expert load max/mean": max(self.ratios.values())} | {
            f"expert load max/mean layer {layer}": ratio for layer, ratio in self.ratios.items()}  # fmt: skip

    def _losses(self) -> dict[str, float]:
        found = {"load balancing loss": self.balance_loss, "z loss": self.z_loss}
        return {name: value for name, value in found.items() if value is not None}


class Loads:
    """The routers of a rank's chunks. `mesh` of a run with experts."""

    def __init__(self, chunks: list[TransformerStage], mesh: Mesh):
        self.mesh, self.model = mesh, chunks[0].model
        self.routers: list[tuple[int, Router]] = [found for chunk in chunks for found in chunk.routers()]
        self.layers = [layer for layer, there in enumerate(self.model.expert_layers) if there]

    def begin(self, scale: float) -> None:
        """Forget the last step. `scale`: the loss scale of this one."""
        for _, router in self.routers:
            router.tally.zero_()
            router.scale = scale

    def end(self, tokens: torch.Tensor, move: bool) -> Load:
        """What the step's routers did, of `tokens` with a loss; biases are moved if `move`. Collective."""
        total = torch.zeros(len(self.layers), self.model.num_experts + 2, dtype=torch.float64, device=self.mesh.device)
        for layer, router in self.routers:
            total[self.layers.index(layer)] += router.tally / router.copies
        comm.all_reduce(total, self.mesh.world)
        if move:
            for layer, router in self.routers:
                if router.bias is not None:
                    router.move_bias(total[self.layers.index(layer), :-2])
        return load_of(self.model, self.layers, total, tokens)


def bias_requests(routers: Iterable[Router]) -> list[Request]:
    """What fills the biases of routers that have one, from a checkpoint."""
    return [Request(f"model/{router.bias_name}", tuple(router.bias.shape), (0,), tuple(router.bias.shape), router.bias)
            for router in routers if router.bias is not None]  # fmt: skip


def load_of(model: ModelConfig, layers: list[int], total: torch.Tensor, tokens: torch.Tensor) -> Load:
    """From the sums of all ranks, [layers with experts, E + 2]."""
    counts = total[:, :-2]
    ratios = (counts.max(1).values / counts.mean(1)).tolist()
    balance, z = (total[:, -2:] / tokens).mean(0).tolist()
    balanced = model.moe_aux_loss_coeff and model.moe_router_load_balancing_type != "none"
    return Load(dict(zip(layers, ratios, strict=True)), model.moe_aux_loss_coeff * balance if balanced else None,
                model.moe_z_loss_coeff * z if model.moe_z_loss_coeff else None)  # fmt: skip
