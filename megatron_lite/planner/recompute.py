"""Which layers of a chunk are kept, recomputed or offloaded. Read by the model and by the planner.

    --recompute-granularity full
        --recompute-method uniform    every N layers are one unit: its input is kept, the rest is computed again
        --recompute-method block      each of the first N layers is a unit of its own, the others are kept
    --cpu-offloading-num-layers N     what the first N layers keep waits in host memory

N counts layers of a chunk (without interleaving, of a stage).
"""

from typing import NamedTuple

from megatron_lite.config import ActivationConfig

KEPT, RECOMPUTED, OFFLOADED = "kept", "recomputed", "offloaded"


class Span(NamedTuple):
    """Neighbouring layers of a chunk, [start, stop) from its first, that are treated as one."""

    start: int
    stop: int
    treatment: str


def spans(layers: int, activations: ActivationConfig) -> list[Span]:
    """How a chunk of so many layers is treated; spans cover it in order."""
    first = activations.recompute_num_layers
    if activations.recompute_granularity == "full" and activations.recompute_method == "uniform":
        return [Span(i, min(i + first, layers), RECOMPUTED) for i in range(0, layers, first)]
    treatment = RECOMPUTED
    if activations.recompute_granularity != "full":
        first, treatment = activations.cpu_offloading_num_layers, OFFLOADED
    return [Span(i, i + 1, treatment if i < first else KEPT) for i in range(layers)]


def in_words(activations: ActivationConfig) -> str:
    """What is done about activations, for a report."""
    n = activations.recompute_num_layers
    if activations.recompute_granularity == "selective":
        return f"{', '.join(activations.modules)} recomputed"
    if activations.recompute_granularity == "full" and activations.recompute_method == "uniform":
        return "every layer recomputed" if n == 1 else f"recomputed in units of {n} layers"
    if activations.recompute_granularity == "full":
        return f"the first {n} layer(s) of each chunk recomputed"
    if activations.cpu_offloading_num_layers:
        return f"the first {activations.cpu_offloading_num_layers} layer(s) of each chunk in host memory"
    return "no recomputation"
