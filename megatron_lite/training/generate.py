"""Text from a model: the next token's logits, a choice among them, again.

    load_model(directory)          any checkpoint, whatever layout wrote it, as one whole model, cut over tp at most
    next_logits(chunks, rows)      prompts -> [b, V]
    sample(logits, ...)            [b, V] -> [b]
    generate_batch(chunks, rows)   the next id of every row, again and again
    generate(chunks, prompt)       of one row

Prompts of different lengths start together and are padded behind their ends, where nothing they see lies: a row is what it
would be alone. Keys and values are kept (models/past.py); `keep=False` computes everything anew for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from megatron_lite.checkpoint.boxes import box_requests
from megatron_lite.checkpoint.load import load_checkpoint, locate
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import Mesh, single
from megatron_lite.config import GROUPS, Config, ModelConfig, ParallelConfig
from megatron_lite.errors import ReportedError
from megatron_lite.models.past import Past
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.shard import allocate
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.training.loads import bias_requests


class GenerateError(ReportedError):
    """No text can be made of this; the message is one line."""


class Sampling(NamedTuple):
    """How the next token is chosen. temperature 0: the likeliest. top_k 0, top_p 1: no cut."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class Loaded(NamedTuple):
    """All layers of a model (this tp rank's part of each), and the configuration that its checkpoint was trained with."""

    config: Config
    chunks: list[TransformerStage]
    iteration: int


def load_model(directory: str, iteration: int | None = None, mesh: Mesh | None = None,
               dtype: torch.dtype | None = None) -> Loaded:  # fmt: skip
    """The model of a checkpoint directory (None: its latest iteration) cut over `mesh.tp` (None: alone on the CPU), without a
    pipeline, in the dtype it was trained in unless `dtype` is another. Collective over the mesh.

    Raises CheckpointError where the checkpoint cannot be read, GenerateError where it does not say what model it holds, or
    tp does not divide it.
    """
    mesh = mesh or single()
    manifest = read_manifest(locate(directory, iteration))
    if "config" not in manifest.meta:
        raise GenerateError(f"{directory}: iteration {manifest.iteration} does not say which model it holds")
    config = config_of(manifest.meta["config"])
    check_cut(config.model, mesh.tp.size)
    here = replace(config, parallel=ParallelConfig(tensor_model_parallel_size=mesh.tp.size))
    tp = TensorParallel(mesh.tp, False, dtype or getattr(torch, config.precision.dtype_name), mesh.device)
    model = TransformerStage(config.model, config.data.vocab_size, here.padded_vocab_size,
                             range(config.model.num_layers), True, True, tp)  # fmt: skip
    requests = []
    for param in model.parameters():
        allocate(param)
        param.data.zero_()  # rows of vocabulary padding are in no checkpoint
        requests += box_requests("model", param.shard, param.data)
    requests += bias_requests(router for _, router in model.routers())
    load_checkpoint(directory, requests, mesh, manifest.iteration)
    return Loaded(config, [model], manifest.iteration)


def check_cut(model: ModelConfig, tp: int) -> None:
    """Refuse a tp that does not divide the model; names those that do."""
    widths = [model.ffn_hidden_size]
    if model.num_experts:
        widths += [model.moe_ffn_hidden_size, model.moe_shared_expert_intermediate_size or 0]
    fits = [n for n in range(1, model.num_attention_heads + 1)
            if model.num_attention_heads % n == 0 and all(width % n == 0 for width in widths)
            and (model.num_kv_heads % n == 0 or n % model.num_kv_heads == 0)]  # fmt: skip
    if tp not in fits:
        raise GenerateError(f"--tensor-model-parallel-size {tp}: {model.num_attention_heads} query heads, {model.num_kv_heads} "
                            f"key/value heads and {model.ffn_hidden_size} MLP channels cannot be cut so; these work: "
                            + ", ".join(map(str, fits)))  # fmt: skip


def config_of(stored: Mapping[str, Mapping[str, Any]]) -> Config:
    """`Config.as_dict` undone. Settings that this version does not know are left out, those it knows but that were not
    stored have their defaults."""
    groups = {}
    for name, group in GROUPS.items():
        values = stored.get(name, {})
        known = {f.name: values[f.name] for f in fields(group) if f.name in values}
        groups[name] = group(**{key: tuple(v) if isinstance(v, list) else v for key, v in known.items()})
    return Config(**groups)


@torch.no_grad()
def next_logits(chunks: Sequence[TransformerStage], rows: Sequence[Sequence[int]], past: Past | None = None) -> torch.Tensor:
    """Logits of the token after each row of ids.   b rows -> [b, V] over the true vocabulary, the same on all tp ranks

    `chunks`: all of the model's, in order, cut over no ranks but tp. A `past` gets the rows' keys and values.
    """
    longest, device = max(map(len, rows)), chunks[0].tp.device
    x = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)  # [b, s]
    for chunk in chunks:
        x = chunk.hidden(x, None, past)  # [s, b, h]
    if past is not None:
        past.read([len(row) for row in rows])
    ends = torch.tensor([len(row) - 1 for row in rows], device=device)
    return _over_vocabulary(chunks[-1], x[ends, torch.arange(len(rows), device=device)])


@torch.no_grad()
def following_logits(chunks: Sequence[TransformerStage], tokens: Sequence[int], past: Past) -> torch.Tensor:
    """Logits of the token after one more token per row.   b ids -> [b, V]"""
    x = torch.tensor(tokens, device=chunks[0].tp.device)[:, None]  # [b, 1]
    for chunk in chunks:
        x = chunk.hidden(x, None, past)  # [1, b, h]
    past.advance()
    return _over_vocabulary(chunks[-1], x[0])


def _over_vocabulary(last: TransformerStage, x: torch.Tensor) -> torch.Tensor:
    """The output layer for one position per row.   [b, h] -> [b, V]"""
    logits = last.logits(x[None])[0]  # [b, V/tp]
    return comm.all_gather(logits.t().contiguous(), last.tp.axis)[: last.vocab_size].t()


def sample(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
           generator: torch.Generator | None = None) -> torch.Tensor:  # fmt: skip
    """One id per row.   logits [b, V] -> [b], on the CPU, so that a seed gives the same draw on every device

    Temperature first, then the `top_k` likeliest, then of these the fewest whose probabilities reach `top_p`.
    """
    if not torch.isfinite(logits).all():
        raise GenerateError("the model's logits are not finite: its weights are broken")
    if temperature == 0.0:
        return logits.argmax(-1).cpu()
    return torch.multinomial(probabilities(logits, temperature, top_k, top_p), 1, generator=generator).squeeze(1)


def probabilities(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """What `sample` draws from.   [b, V] -> [b, V], fp64 on the CPU"""
    # Less the largest first: a tiny temperature then gives -inf beside a 0, never inf - inf.
    scores = logits.double().cpu()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)  # equal ones: the lower id first
    if top_k > 0:
        ordered[:, top_k:] = float("-inf")
    chances = torch.softmax(ordered, -1)
    if top_p < 1.0:
        before = chances.cumsum(-1) - chances  # of the likelier ones; the likeliest has 0 before it and always stays
        chances = chances.masked_fill(before >= top_p, 0.0)
        chances = chances / chances.sum(-1, keepdim=True)
    return torch.zeros_like(chances).scatter_(-1, order, chances)


def generate_batch(chunks: Sequence[TransformerStage], prompts: Sequence[Sequence[int]], max_new_tokens: int,
                   sampling: Sampling, draws: Sequence[torch.Generator] | None = None, end: int | None = None,
                   keep: bool = True) -> Iterator[list[int | None]]:  # fmt: skip
    """The new id of every row, token by token; None once a row has come to `end`, which is not given out.

    draws   a generator per row, so that a row's text does not depend on the others
    keep    keys and values are kept, instead of computed anew for every token: the same text

    Ends when all rows have. A row longer than the positions that the model has is seen through its last ones.
    """
    first, tp = chunks[0], chunks[0].tp.axis
    check_prompts(prompts, chunks[-1].vocab_size)
    rows, window = [list(prompt) for prompt in prompts], first.model.max_position_embeddings
    longest = max(map(len, rows))
    past = Past(min(window, longest + max_new_tokens)) if keep and longest <= window else None
    ended = [False] * len(rows)
    for n in range(max_new_tokens):
        if past is not None and longest + n > window:
            past = None  # a window that moves gives every token another position, and with it other keys
        if n == 0 or past is None:
            logits = next_logits(chunks, [row[-window:] for row in rows], past)
        else:
            logits = following_logits(chunks, [row[-1] for row in rows], past)
        # what one rank draws is what all go on with, whatever the last bits of their arithmetic
        drawn = comm.broadcast(_choose(logits, sampling, draws).to(first.tp.device), tp).tolist()
        for row, token in zip(rows, drawn, strict=True):
            row.append(token)
        ended = [was or token == end for was, token in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        yield [None if over else token for over, token in zip(ended, drawn, strict=True)]


def _choose(logits: torch.Tensor, sampling: Sampling, draws: Sequence[torch.Generator] | None) -> torch.Tensor:
    """`sample`, each row from its own generator.   [b, V] -> [b]"""
    if sampling.temperature == 0.0 or draws is None:
        return sample(logits, *sampling)
    return torch.cat([sample(row[None], *sampling, generator=draw) for row, draw in zip(logits.cpu(), draws, strict=True)])


def check_prompts(prompts: Sequence[Sequence[int]], vocab: int) -> None:
    """At least one row, each of at least one id of the vocabulary."""
    if not prompts:
        raise GenerateError("no prompt is given: expected at least one")
    for prompt in prompts:
        if not prompt or not all(0 <= token < vocab for token in prompt):
            raise GenerateError(f"the prompt must be at least one id from 0 to {vocab - 1}, got {list(prompt)[:10]}")


def generate(chunks: Sequence[TransformerStage], prompt: Sequence[int], max_new_tokens: int, sampling: Sampling,
             generator: torch.Generator | None = None, end: int | None = None,
             keep: bool = True) -> Iterator[int]:  # fmt: skip
    """New ids after `prompt` (at least one id), as they are made; `generate_batch` of one row."""
    draws = None if generator is None else [generator]
    for (token,) in generate_batch(chunks, [prompt], max_new_tokens, sampling, draws, end, keep):
        yield token
