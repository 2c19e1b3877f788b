"""What every contender shares: the model's shape, its FLOPs, the initial weights, the token stream, the recipe.

Nothing here imports torch at the top, so the driver can count FLOPs without it.
"""

import json
import os
from dataclasses import asdict, dataclass, field

# The recipe: AdamW, weight decay on matrices only, the gradient norm clipped.
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
NORM_EPS, ROPE_BASE, INIT_STD, SEED = 1e-5, 10000.0, 0.02, 1234


@dataclass(frozen=True)
class Shape:
    """A LLaMA model: SwiGLU, grouped queries, RMSNorm, rotary positions, untied output. The defaults are model W."""

    layers: int = 8
    hidden: int = 512
    ffn: int = 1408
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 8192
    seq: int = 512

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every parameter under its Hugging Face name, with its shape."""
        h, f = self.hidden, self.ffn
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"model.embed_tokens.weight": (self.vocab, h)}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            shapes[at + "input_layernorm.weight"] = (h,)
            shapes[at + "self_attn.q_proj.weight"] = (q, h)
            shapes[at + "self_attn.k_proj.weight"] = (kv, h)
            shapes[at + "self_attn.v_proj.weight"] = (kv, h)
            shapes[at + "self_attn.o_proj.weight"] = (h, q)
            shapes[at + "post_attention_layernorm.weight"] = (h,)
            shapes[at + "mlp.gate_proj.weight"] = (f, h)
            shapes[at + "mlp.up_proj.weight"] = (f, h)
            shapes[at + "mlp.down_proj.weight"] = (h, f)
        return shapes | {"model.norm.weight": (h,), "lm_head.weight": (self.vocab, h)}

    def parameters(self) -> int:
        """Number of parameters."""
        return sum(s[0] * (s[1] if len(s) == 2 else 1) for s in self.tensors().values())

    def gemms(self) -> list[tuple[str, int, int, int]]:
        """(name, in, out, how many) of each linear, q/k/v and gate/up fused as a fast model has them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            ("qkv", self.hidden, q + 2 * kv, self.layers),
            ("out", q, self.hidden, self.layers),
            ("gate_up", self.hidden, 2 * self.ffn, self.layers),
            ("down", self.ffn, self.hidden, self.layers),
            ("head", self.hidden, self.vocab, 1),
        ]

    def flops_per_token(self) -> float:
        """Forward and backward: 6 per matrix parameter, and attention over the lower triangle with its diagonal."""
        matrices = 6 * sum(k * n * count for _, k, n, count in self.gemms())
        mean_keys = (self.seq + 1) / 2
        attention = 3 * 4 * self.heads * self.head_dim * mean_keys * self.layers
        return matrices + attention


# "tiny" is for trying the driver itself; its numbers say nothing about speed.
# "S" has W's proportions at a tenth of its parameters, for machines without fast matrix products.
SHAPES = {
    "W": Shape(),
    "S": Shape(layers=4, hidden=256, ffn=704, head_dim=32, vocab=4096, seq=256),
    "tiny": Shape(hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=512, seq=64),
}


@dataclass(frozen=True)
class Spec:
    """All that one process of one contender is told."""

    name: str
    module: str
    group: str
    dtype: str
    weights: str
    rendezvous: str
    rank: int = 0
    world: int = 1
    threads: int = 2
    micro_batch: int = 4
    global_batch: int = 8
    compile: bool = False
    shape: Shape = field(default_factory=Shape)
    options: dict = field(default_factory=dict)

    def to_json(self) -> str:
        """One line for the worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Spec":
        """The inverse of to_json."""
        values = json.loads(line)
        return cls(**{**values, "shape": Shape(**values["shape"])})

    def batch(self, step: int):
        """Token ids [global_batch, seq + 1] of one step: a function of the seed and the step alone."""
        import torch

        generator = torch.Generator().manual_seed(SEED + 1 + step)
        uniform = torch.rand(self.global_batch, self.shape.seq + 1, generator=generator, dtype=torch.float64)
        # Cubed, so that small ids are frequent: the loss then falls, which a wrong gradient would show.
        return (uniform.pow(3) * self.shape.vocab).long()

    def load_weights(self, keep=lambda name: True) -> dict:
        """The initial weights in fp32 under their Hugging Face names."""
        from safetensors import safe_open

        with safe_open(self.weights, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if keep(name)}

    def init_process_group(self) -> None:
        """Join this contender's ranks over gloo, through a file: no port to collide with."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{self.rendezvous}", rank=self.rank, world_size=self.world)


def write_weights(shape: Shape, path: str) -> None:
    """Write the initial weights once; every contender starts from this file."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, size in shape.tensors().items():
        weights[name] = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * INIT_STD
    save_file(weights, path + ".part", metadata={"format": "pt"})
    os.replace(path + ".part", path)
