"""One transformer class that can be any pipeline stage or chunk of a GPT or LLaMA model.

    first stage   tokens -> embedding (+ learned positions)
    every stage   layers:  x += dropout(attention(norm(x)));  x += dropout(mlp(norm(x)))
    last stage    final norm -> logits over the vocabulary -> summed token losses

Activations are [s, b, h], or [s/tp, b, h] under sequence parallelism. Canonical parameter names are Hugging Face LLaMA's
without the `model.` prefix, so that a checkpoint is one rename away from a Hugging Face folder.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron_lite.backward import in_backward
from megatron_lite.config import ActivationConfig, ModelConfig
from megatron_lite.models.attention import SelfAttention
from megatron_lite.models.mlp import MLP
from megatron_lite.models.moe import MoE
from megatron_lite.models.norm import NORMS
from megatron_lite.models.packing import NOT_PACKED, Documents, Packing
from megatron_lite.models.past import Past
from megatron_lite.models.rope import cos_sin
from megatron_lite.models.router import Router, Training
from megatron_lite.offload import HostLayer, Offload
from megatron_lite.parallel.context import Places
from megatron_lite.parallel.expert import ExpertParallel
from megatron_lite.parallel.shard import Init, Shard, allocate, initialise, parameter, whole
from megatron_lite.parallel.tensor import Again, TensorParallel, column_linear
from megatron_lite.parallel.vocab import cross_entropy, embed, vocab_matrix
from megatron_lite.parallel.wgrad import WeightGradQueue, give
from megatron_lite.planner.recompute import OFFLOADED, RECOMPUTED, Span, spans
from megatron_lite.recompute import recompute, remade
from megatron_lite.rng import REPLICATED, SHARDED, DropoutKey, dropout

KEEP_ALL = ActivationConfig()


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP with residuals.   x [s/tp or s, b, h] -> the same shape"""

    def __init__(self, layer: int, model: ModelConfig, tp: TensorParallel, activations: ActivationConfig = KEEP_ALL,
                 experts: ExpertParallel | None = None):  # fmt: skip
        super().__init__()
        self.layer, self.p, self.remake_norms = layer, model.hidden_dropout, "layernorm" in activations.modules
        self.role = SHARDED if tp.sequence_parallel else REPLICATED
        init = Init("normal", model.init_method_std)
        output_init = Init("normal", model.init_method_std / math.sqrt(2 * model.num_layers))
        norm, name = NORMS[model.normalization], f"layers.{layer}"
        self.input_layernorm = norm(f"{name}.input_layernorm", model.hidden_size, model.norm_epsilon, tp)
        self.self_attn = SelfAttention(f"{name}.self_attn", layer, model, tp, init, output_init,
                                       "core_attn" in activations.modules)  # fmt: skip
        self.post_attention_layernorm = norm(f"{name}.post_attention_layernorm", model.hidden_size, model.norm_epsilon, tp)
        remake = "mlp_act" in activations.modules
        self.has_experts = model.expert_layers[layer]
        if self.has_experts:
            self.mlp = MoE(f"{name}.mlp", model, tp, experts or ExpertParallel(), init, output_init, remake)
        else:
            self.mlp = MLP(f"{name}.mlp", model, tp, init, output_init, remake)

    def forward(self, x: torch.Tensor, angles, key: DropoutKey | None, replay: bool = False, past: Past | None = None,
                documents: Documents | None = None, training: Training | None = None) -> torch.Tensor:  # fmt: skip
        """In a replay (recompute.py) the output's values are not needed, and the backward follows at once. `training` is for
        routers."""
        norm = self.input_layernorm
        out = self.self_attn(norm(x), angles, key, self._again(norm, x), replay, past, documents)
        x = self._drop(out, "attention_output", key).add_(x)
        norm = self.post_attention_layernorm
        seen = (norm(x), self._again(norm, x), replay)
        return self._drop(self.mlp(*seen, training) if self.has_experts else self.mlp(*seen), "mlp_output", key).add_(x)

    def _again(self, norm: nn.Module, x: torch.Tensor) -> Again | None:
        """How the linear behind a norm gets its input again, where --recompute-modules has layernorm; the norm keeps x."""
        return remade(norm, x) if self.remake_norms else None

    def _drop(self, x: torch.Tensor, site: str, key: DropoutKey | None) -> torch.Tensor:
        if key is None or self.p == 0.0:
            return x
        return dropout(x, self.p, key.generator(x.device, self.layer, site, self.role))


class _AddPositions(torch.autograd.Function):
    """x [s', b, h] + table[at] of learned positions; each rank adds the positions it holds. `at`: a slice of them or int64
    [s'], the same for every row of the batch, or int64 [s', b]."""

    @staticmethod
    def forward(ctx, x, table, at: slice | torch.Tensor):
        ctx.table, ctx.at = table, at
        return x + (table[at].unsqueeze(1) if isinstance(at, slice) or at.dim() == 1 else table[at])

    @staticmethod
    def backward(ctx, dy):
        at = ctx.at
        if not ctx.table.requires_grad:
            return dy, None, None
        if isinstance(at, slice):
            give(ctx.table, lambda grad: grad[at].add_(dy.sum(1, dtype=grad.dtype)))
        elif at.dim() == 1:
            give(ctx.table, lambda grad: grad.index_add_(0, at, dy.sum(1, dtype=grad.dtype)))
        else:
            give(ctx.table, lambda grad: grad.index_add_(0, at.flatten(), dy.flatten(0, 1).to(grad.dtype)))
        return dy, None, None


class Embedding(nn.Module):
    """tokens [b, s] -> [s/tp or s, b, h]"""

    def __init__(self, model: ModelConfig, vocab_size: int, padded_size: int, tp: TensorParallel):
        super().__init__()
        self.tp, self.p = tp, model.hidden_dropout
        init = Init("normal", model.init_method_std)
        self.weight = vocab_matrix("embed_tokens.weight", vocab_size, padded_size, model.hidden_size, init, tp)
        self.positions = None
        if model.position_embedding_type == "learned_absolute":
            name, shape = "embed_positions.weight", (model.max_position_embeddings, model.hidden_size)
            partial = tp.sequence_parallel and tp.axis.size > 1
            box = whole(name, shape, tp.axis.size, tp.axis.rank, partial)
            self.positions = parameter(shape, Shard(name, (box,), init, decay=True), tp.dtype, tp.device)

    def forward(self, tokens: torch.Tensor, key: DropoutKey | None, past: Past | None = None,
                positions: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        """`positions` int64 [b, s] where they are not 0, 1, 2, ... in every row."""
        x = embed(self.weight, tokens.t(), self.tp)
        if self.positions is not None and past is not None and past.lengths:
            x = x + self.positions[past.positions(x.device)]  # [1, b, h]
        elif self.positions is not None:
            first = self.tp.axis.rank * x.shape[0] if self.tp.sequence_parallel else 0
            rows = slice(first, first + x.shape[0])
            if positions is not None:
                rows = positions.t()[rows]
            elif self.tp.context is not None:
                rows = self.tp.context.places(tokens.shape[1]).tensor(x.device)[rows]
            x = _AddPositions.apply(x, self.positions, rows)
        if key is None or self.p == 0.0:
            return x
        role = SHARDED if self.tp.sequence_parallel else REPLICATED
        return dropout(x, self.p, key.generator(x.device, -1, "embedding", role))


class Weights:
    """How a unit's parameters come to be there for its use. Here they always are; under ZeRO the gradient engine puts
    `optim.zero.UnitParameters` in this place, which all-gathers and frees them where these two are called.

    x is the unit's input or output, and comes back unchanged, so that the backward passes the same places in reverse:

        x = gather(unit, x)     forward: all-gather the unit      backward: free it
        x = ...                 the unit
        x = free(unit, x)       forward: free it                  backward: all-gather it again
    """

    def gather(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        return x

    def free(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        return x


def units_of(layer: TransformerLayer) -> list[str]:
    """The names of a layer's units."""
    name = f"layers.{layer.layer}"
    return [name, f"{name}.experts"] if layer.has_experts else [name]


class TransformerStage(nn.Module):
    """The layers `layers` of the model, with the embedding if `first` and the output layer and loss if `last`.

    `activations` says which layers are computed again in the backward, or wait in host memory (planner/recompute.py).
    A stage that is `last` but not `first` holds its own copy of a tied embedding; the gradient engine keeps both equal.
    """

    def __init__(self, model: ModelConfig, vocab_size: int, padded_size: int, layers: range, first: bool, last: bool,
                 tp: TensorParallel, activations: ActivationConfig = KEEP_ALL,
                 without_fp8: Collection[int] = (), experts: ExpertParallel | None = None):  # fmt: skip
        super().__init__()
        self.model, self.vocab_size, self.first, self.last, self.tp = model, vocab_size, first, last, tp
        self.embedding = Embedding(model, vocab_size, padded_size, tp) if first else None
        self.layers = nn.ModuleList(
            TransformerLayer(i, model, replace(tp, fp8=None) if i in without_fp8 else tp, activations, experts) for i in layers)
        self.spans = spans(len(layers), activations)
        self.offload = Offload(tp.device) if activations.cpu_offloading_num_layers else None
        self.norm = self.head = None
        if last:
            self.norm = NORMS[model.normalization]("norm", model.hidden_size, model.norm_epsilon, tp)
            if not (model.tied and first):
                name = "embed_tokens.weight" if model.tied else "lm_head.weight"
                init = Init("normal", model.init_method_std)
                self.head = vocab_matrix(name, vocab_size, padded_size, model.hidden_size, init, tp, tied=model.tied)
        self.angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self.weights = Weights()
        self.wgrad_queue = WeightGradQueue()
        for param in self.parameters():
            param.wgrad_queue = self.wgrad_queue

    def initialise(self, seed: int) -> TransformerStage:
        """Give every parameter memory, and fill it from (seed, canonical name)."""
        for param in self.parameters():
            allocate(param)
            initialise(param, seed)
        return self

    @property
    def output_weight(self) -> nn.Parameter:
        return self.embedding.weight if self.head is None else self.head

    def routers(self) -> Iterator[tuple[int, Router]]:
        """(layer, its router) of the layers with experts."""
        return ((layer.layer, layer.mlp.router) for layer in self.layers if layer.has_experts)

    def units(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Parameters in groups that are used together, in order of use. The token embedding and the output layer are
        units of their own, so that a tied copy has the same buffer layout on both stages; a layer's experts too, which other
        ranks hold than the rest of it."""
        if self.first:
            yield "embed_tokens", [self.embedding.weight]
            if self.embedding.positions is not None:
                yield "embed_positions", [self.embedding.positions]
        for layer in self.layers:
            params, names = list(layer.parameters()), units_of(layer)
            yield names[0], [param for param in params if not param.shard.expert]
            for name in names[1:]:
                yield name, [param for param in params if param.shard.expert]
        if self.last:
            yield "norm", list(self.norm.parameters())
            if self.head is not None:
                yield "head", [self.head]

    def order(self) -> list[str]:
        """The units in order of use; `head` is the output layer, whichever unit its weight belongs to."""
        names = [name for name, _ in self.units()]
        return names + ["head"] if self.last and self.head is None else names

    def uses(self, param: nn.Parameter) -> int:
        """Gradient contributions of a parameter per microbatch: two for an embedding that is also the output layer."""
        return 2 if self.last and self.first and self.head is None and param is self.embedding.weight else 1

    def hidden(self, x: torch.Tensor, key: DropoutKey | None, past: Past | None = None, packing: Packing = NOT_PACKED,
               mask: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        """tokens [b, s] on the first stage, else [s/tp or s, b, h]  ->  [s/tp or s, b, h] after this stage's layers.

        With `past` (no gradients, no sequence parallelism): the prompts, then [b, 1], the next token of each row.
        `packing`: what the documents in the rows change.
        """
        length = x.shape[1] if self.first else x.shape[0] * (self.tp.axis.size if self.tp.sequence_parallel else 1)
        if self.first:
            x = self._embedded(x, key, past, packing)
        angles = self._angles(length, x.device, past, packing)
        below: HostLayer | None = None  # what the layer before keeps, where that is in host memory
        for span in self.spans:
            units = [unit for layer in self.layers[span.start : span.stop] for unit in units_of(layer)]
            for unit in units:
                x = self.weights.gather(unit, x)
            run, here = partial(self._through, span, angles, key, past, packing.documents, mask), None
            if span.treatment == RECOMPUTED:
                x = recompute(run, x)
            elif span.treatment == OFFLOADED and torch.is_grad_enabled():
                x, here = self.offload.run(run, x)
            else:
                x = run(x)
            if below is not None:  # it comes back while the backward of this span computes
                x = in_backward(x, below.start_return)
            below = here
            for unit in units:  # the backward passes them last to first, as a recomputed span needs them gathered
                x = self.weights.free(unit, x)
        if self.offload is not None:
            self.offload.settle()
        return x

    def _through(self, span: Span, angles, key: DropoutKey | None, past: Past | None, documents: Documents | None,
                 mask: torch.Tensor | None, x: torch.Tensor, replay: bool = False) -> torch.Tensor:  # fmt: skip
        """x after the layers of a span. Of a replay the last layer's output is not needed."""
        training = None if mask is None else Training(mask, again=replay)
        for i in range(span.start, span.stop):
            x = self.layers[i](x, angles, key, replay and i == span.stop - 1, past, documents, training)
        return x

    def _embedded(self, tokens: torch.Tensor, key: DropoutKey | None, past: Past | None, packing: Packing) -> torch.Tensor:
        """tokens [b, s] -> [s/tp or s, b, h]"""
        units = [unit for unit in self.order() if unit.startswith("embed_")]
        for unit in units:
            tokens = self.weights.gather(unit, tokens)
        x = self.embedding(tokens, key, past, packing.positions)
        for unit in units:
            x = self.weights.free(unit, x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[s/tp or s, b, h] -> [s, b, V/tp], on the last stage. The head's weight is still there."""
        x = self.weights.gather("norm", x)
        x = self.norm(x)
        x = self.weights.free("norm", x)
        x = self.weights.gather("head", x)
        return column_linear(x, self.output_weight, None, self.tp)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, mask: torch.Tensor | None = None,
                key: DropoutKey | None = None, packing: Packing = NOT_PACKED) -> torch.Tensor:  # fmt: skip
        """The activation for the next stage, or on the last stage the sum over tokens of mask x loss.

        labels [b, s] are read on the last stage alone, mask [b, s] there and by routers. `key` is None in evaluation: no
        dropout. `packing` is needed on every stage.
        """
        x = self.hidden(x, key, packing=packing, mask=mask if torch.is_grad_enabled() else None)
        if not self.last:
            return x
        logits = self.logits(x).flatten(0, 1)  # [s b, V/tp]
        loss = cross_entropy(logits, labels.t().flatten(), mask.t().flatten(), self.tp.axis, self.vocab_size,
                             self.model.label_smoothing)  # fmt: skip
        return self.weights.free("head", loss)

    def _angles(self, length: int, device: torch.device, past: Past | None, packing: Packing):
        """cos and sin of the rotary positions of this rank's `length` tokens, computed once per length, or of each row's own or
        next ones."""
        if self.model.position_embedding_type != "rope":
            return None
        if past is not None and past.lengths:
            return cos_sin(self.model, past.positions(device), self.tp.dtype)
        whole = Places(((0, length),))
        if self.tp.context is not None:  # a row's own positions may be any of the sequence
            whole = self.tp.context.places(length) if packing.positions is None else self.tp.context.all_places(length)
        if self.angles is None or self.angles[0].shape[0] != whole.count:
            self.angles = cos_sin(self.model, whole.tensor(device), self.tp.dtype)
        if packing.positions is None:
            return self.angles
        at = packing.positions.t()
        return tuple(table[at] for table in self.angles)  # [s, b, rot/2]
