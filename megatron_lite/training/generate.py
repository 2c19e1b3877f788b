"""Text from a model: the next token's logits, a choice among them, again.

    load_model(directory)        any checkpoint, whatever layout wrote it, as one whole model in this process
    next_logits(chunks, tokens)  [b, s] -> [b, V]
    sample(logits, ...)          [b, V] -> [b]
    generate(chunks, prompt)     ids, one by one

The whole prefix is computed anew for every token: simple, and the training code is all there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from megatron_lite.checkpoint.boxes import box_requests
from megatron_lite.checkpoint.load import load_checkpoint, locate
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.comm.mesh import single
from megatron_lite.config import GROUPS, Config, ParallelConfig
from megatron_lite.errors import ReportedError
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.shard import allocate
from megatron_lite.parallel.tensor import TensorParallel


class GenerateError(ReportedError):
    """No text can be made of this; the message is one line."""


class Sampling(NamedTuple):
    """How the next token is chosen. temperature 0: the likeliest. top_k 0, top_p 1: no cut."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class Loaded(NamedTuple):
    """A whole model in this process, and the configuration that its checkpoint was trained with."""

    config: Config
    chunks: list[TransformerStage]
    iteration: int


def load_model(directory: str, iteration: int | None = None, device: torch.device | None = None,
               dtype: torch.dtype | None = None) -> Loaded:  # fmt: skip
    """The model of a checkpoint directory (None: its latest iteration), at tp 1 pp 1, in the dtype it was trained in
    unless `dtype` is another.

    Raises CheckpointError where the checkpoint cannot be read, GenerateError where it does not say what model it holds.
    """
    device = device or torch.device("cpu")
    manifest = read_manifest(locate(directory, iteration))
    if "config" not in manifest.meta:
        raise GenerateError(f"{directory}: iteration {manifest.iteration} does not say which model it holds")
    config = config_of(manifest.meta["config"])
    alone = replace(config, parallel=ParallelConfig(), train=replace(config.train, world_size=1))
    mesh = single(device)
    tp = TensorParallel(mesh.tp, False, dtype or getattr(torch, config.precision.dtype_name), device)
    model = TransformerStage(config.model, config.data.vocab_size, alone.padded_vocab_size,
                             range(config.model.num_layers), True, True, tp)  # fmt: skip
    requests = []
    for param in model.parameters():
        allocate(param)
        param.data.zero_()  # rows of vocabulary padding are in no checkpoint
        requests += box_requests("model", param.shard, param.data)
    load_checkpoint(directory, requests, mesh, manifest.iteration)
    return Loaded(config, [model], manifest.iteration)


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
def next_logits(chunks: Sequence[TransformerStage], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the token after each row.   tokens [b, s] -> [b, V] over the true vocabulary

    `chunks`: all of the model's, in order, cut over no ranks.
    """
    x = tokens
    for chunk in chunks:
        x = chunk.hidden(x, None)  # [s, b, h]
    logits = chunks[-1].logits(x[-1:])  # [1, b, Vp]: the head for the last position alone
    return logits[0, :, : chunks[-1].vocab_size]


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


def generate(chunks: Sequence[TransformerStage], prompt: Sequence[int], max_new_tokens: int, sampling: Sampling,
             generator: torch.Generator | None = None, end: int | None = None) -> Iterator[int]:  # fmt: skip
    """New ids after `prompt` (at least one id), as they are made; `end` ends the text and is not given out.

    A prefix longer than the model's sequence is seen through its last seq_length tokens.
    """
    first, vocab = chunks[0], chunks[-1].vocab_size
    if not prompt or not all(0 <= token < vocab for token in prompt):
        raise GenerateError(f"the prompt must be at least one id from 0 to {vocab - 1}, got {list(prompt)[:10]}")
    ids, window, device = list(prompt), first.model.seq_length, first.tp.device
    for _ in range(max_new_tokens):
        tokens = torch.tensor([ids[-window:]], device=device)
        token = int(sample(next_logits(chunks, tokens), *sampling, generator=generator))
        if token == end:
            return
        ids.append(token)
        yield token
