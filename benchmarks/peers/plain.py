"""Plain PyTorch, written as a competent user writes it: nn.Module, SDPA, a loop. The baseline of the table.

Options: masters (bf16 weights with fp32 masters instead of autocast).
"""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.loops import Loop, Masters, token_loss
from benchmarks.peers.spec import NORM_EPS, ROPE_BASE, Shape, Spec


def rotate(x, cos, sin):
    """Rotary positions on x [b, heads, s, head_dim], halves paired as Hugging Face pairs them."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention. The number of heads is read from the projections, so that a cut model works too."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head_dim
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp = MLP(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The model, or with `layers` a run of its layers: the first stage keeps the embedding, the last the head."""

    def __init__(self, shape: Shape, layers: range | None = None):
        super().__init__()
        layers = layers if layers is not None else range(shape.layers)
        first, last = layers.start == 0, layers.stop == shape.layers
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in layers})
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS) if last else None
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None
        inverse = ROPE_BASE ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.seq).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


def load_plain(spec: Spec, layers: range | None = None) -> Llama:
    """The model with the shared initial weights, in fp32."""
    with torch.device("meta"):
        names = set(Llama(spec.shape, layers).state_dict())
    weights = {name.removeprefix("model."): tensor for name, tensor in spec.load_weights().items()}
    model = Llama(spec.shape, layers)
    model.load_state_dict({name: weights[name] for name in names})
    return model


def build(spec: Spec) -> Loop:
    """One process: the whole model, eager or compiled."""
    model = load_plain(spec)
    masters = None
    if spec.options.get("masters"):
        masters = Masters(model.parameters())
        masters.attach()
    run = torch.compile(model) if spec.compile else model
    return Loop(spec, lambda tokens, targets: token_loss(run(tokens), targets), model.parameters(), masters)
