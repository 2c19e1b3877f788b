"""How likely a model finds given text: perplexity of documents, and questions with choices.

    windows(ids, length, stride)       a document cut so that every token is scored once
    score(chunks, windows, ...)        the loss of each window, dealt out over dp
    perplexity(...), answer(...)       what they add up to

Windows are grouped into batches before they are dealt out, and sums are exactly rounded, so that the data-parallel size does
not change a bit of a result; tp changes what it changes in training, the last bits of a sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

import torch

from megatron_lite.comm.collectives import gather_objects
from megatron_lite.comm.mesh import Mesh
from megatron_lite.errors import ReportedError
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.vocab import token_losses

Encode = Callable[[str], list[int]]


class ScoreError(ReportedError):
    """This cannot be scored; the message is one line."""


class Window(NamedTuple):
    """What the model reads at once: `ids` predict one another, and the last `scored` of the predictions count."""

    ids: Sequence[int]
    scored: int


class Question(NamedTuple):
    """One record of a task: a window per choice, their lengths in characters, and which is right."""

    windows: list[Window]
    characters: list[int]
    gold: int


def windows(ids: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """A document whose first id is context alone: at most `length` ids are read at once, each window but the first scores
    `stride` new ids (the last what is left) and sees as many before them as fit. Every id after the first is scored once."""
    done = 1
    while done < len(ids):
        stop = min(len(ids), done + (length if done == 1 else stride))
        yield Window(ids[max(0, stop - 1 - length) : stop], stop - done)
        done = stop


def score(chunks: Sequence[TransformerStage], found: Iterable[Window], mesh: Mesh, batch: int) -> list[float]:
    """The sum of the scored tokens' losses of every window, in order, on every rank. Collective.

    Every rank walks through `found`; batch n of `batch` windows is computed by data-parallel rank n modulo dp.
    """
    mine, rest, axis = [], iter(found), mesh.dp
    for n in count():
        group = list(islice(rest, batch))
        if not group:
            break
        mine.append(window_losses(chunks, group) if n % axis.size == axis.rank else None)
    everyone = gather_objects(mine, axis)
    losses = [loss for n in range(len(mine)) for loss in everyone[n % axis.size][n]]
    if not all(map(math.isfinite, losses)):
        raise ScoreError("the model's losses are not finite: its weights are broken")
    return losses


@torch.no_grad()
def window_losses(chunks: Sequence[TransformerStage], group: Sequence[Window]) -> list[float]:
    """Of one batch. Windows are padded behind their ends, which no token before sees."""
    last, device, longest = chunks[-1], chunks[0].tp.device, max(len(window.ids) for window in group)
    ids, counts = torch.zeros(len(group), longest, dtype=torch.int64), torch.zeros(len(group), longest, dtype=torch.bool)
    for row, (tokens, scored) in enumerate(group):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
        counts[row, len(tokens) - scored : len(tokens)] = True
    ids, counts = ids.to(device), counts[:, 1:].to(device)  # [b, s + 1], [b, s]
    x = ids[:, :-1]
    for chunk in chunks:
        x = chunk.hidden(x, None)  # [s, b, h]
    logits = last.logits(x.transpose(0, 1)[counts][None])[0]  # [n, V/tp]: the head for scored tokens alone
    losses = token_losses(logits, ids[:, 1:][counts], last.tp.axis, last.vocab_size).double().cpu()
    return [float(part.sum()) for part in losses.split([window.scored for window in group])]


def perplexity(chunks: Sequence[TransformerStage], documents: Iterable[Sequence[int]], mesh: Mesh, length: int, stride: int,
               batch: int) -> dict[str, float]:  # fmt: skip
    """exp of the mean loss over all tokens of all documents but each one's first id, which is context. Collective."""
    tokens, vocab = 0, chunks[-1].vocab_size

    def cut() -> Iterator[Window]:
        nonlocal tokens
        for number, ids in enumerate(documents):
            if len(ids) and not 0 <= min(ids) <= max(ids) < vocab:
                raise ScoreError(f"document {number} has ids from {min(ids)} to {max(ids)}, "
                                 f"the model's vocabulary 0 to {vocab - 1}")  # fmt: skip
            for window in windows(ids, length, stride):
                tokens += window.scored
                yield window

    total = math.fsum(score(chunks, cut(), mesh, batch))
    if tokens == 0:
        raise ScoreError("there is nothing to score: no document has a token after its first")
    mean = total / tokens
    return {"loss": mean, "perplexity": math.exp(mean) if mean < 700 else math.inf, "tokens": tokens}


def read_task(path: str, encode: Encode, end: int | None, length: int, delimiter: str, limit: int | None) -> list[Question]:
    """The records of a JSONL file: {"context" or "query", "choices", "gold"}, or {"context", "continuation"} to be
    found likely. At most `limit` records and `length` ids at once, of longer ones the context's beginning is left out."""
    questions = []
    with open(path, encoding="utf-8") as lines:
        for number, line in islice(((n, text) for n, text in enumerate(lines, 1) if text.strip()), limit):
            try:
                questions.append(_question(json.loads(line), encode, end, length, delimiter))
            except (ValueError, ReportedError) as error:  # a JSONDecodeError is a ValueError
                raise ScoreError(f"{path}, line {number}: {error}") from None
    if not questions:
        raise ScoreError(f"{path}: holds no record")
    return questions


def _question(record: object, encode: Encode, end: int | None, length: int, delimiter: str) -> Question:
    """A record with what its choices come to. ValueError says what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError("expected an object {...}")
    context = record.get("context", record.get("query"))
    if not isinstance(context, str):
        raise ValueError('expected "context" or "query" with a text')
    choices, gold = (record.get("choices"), record.get("gold")) if "choices" in record else ([record.get("continuation")], 0)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c.strip() for c in choices):
        raise ValueError('expected "choices", a list of texts that are not empty, or "continuation", one such text')
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(f'expected "gold", a number from 0 to {len(choices) - 1}')
    found = [continuation(encode, context, choice, end, length, delimiter) for choice in choices]
    return Question(found, [len(choice) for choice in choices], gold)


def continuation(encode: Encode, context: str, choice: str, end: int | None, length: int, delimiter: str) -> Window:
    """`choice` after `context`: the blanks between them (`delimiter` where there are none) belong to the choice, and both are
    encoded together, as the evaluation harness does. An empty context is the start of a document."""
    bare = context.rstrip()
    blank = context[len(bare) :] or ("" if choice[0].isspace() or not bare else delimiter)
    whole, before = encode(bare + blank + choice), len(encode(bare))
    if before == 0:
        if end is None:
            raise ValueError("the context is empty, and this tokenizer has no id that ends a document to put there")
        whole, before = [end, *whole], 1
    scored = len(whole) - before
    if scored < 1:
        raise ValueError(f"the choice {choice[:40]!r} adds no token to its context")
    if scored > length:
        raise ValueError(f"a choice has {scored} tokens, but {length} are read at once: a larger --window is needed")
    return Window(whole[-(length + 1) :], scored)


def answer(chunks: Sequence[TransformerStage], questions: Sequence[Question], mesh: Mesh, batch: int) -> dict[str, float]:
    """Shares of questions whose likeliest choice (by sum, and by sum per character) is the right one, the first of equals.
    Collective. With the perplexity of the right ones, over their tokens."""
    flat = [window for question in questions for window in question.windows]
    losses = iter(score(chunks, flat, mesh, batch))
    right, right_by_length, gold_losses, gold_tokens = 0, 0, [], 0
    for found, characters, gold in questions:
        own = [next(losses) for _ in found]
        per = [loss / length for loss, length in zip(own, characters, strict=True)]
        right += own.index(min(own)) == gold
        right_by_length += per.index(min(per)) == gold
        gold_losses.append(own[gold])
        gold_tokens += found[gold].scored
    mean = math.fsum(gold_losses) / gold_tokens
    result = {"questions": len(questions), "gold_loss": mean, "gold_perplexity": math.exp(mean) if mean < 700 else math.inf}
    if all(len(question.windows) == 1 for question in questions):
        return result  # no choice: the likelihood is all there is
    return {"accuracy": right / len(questions), "accuracy_norm": right_by_length / len(questions), **result}
