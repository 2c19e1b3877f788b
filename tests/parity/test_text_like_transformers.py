"""Greedy text and perplexity against Hugging Face transformers: random tiny models in fp64, with and without kept keys."""

import math

import pytest
import torch
from test_transformers import VOCAB, both

from megatron_lite.comm.mesh import single
from megatron_lite.models.past import Past
from megatron_lite.training.generate import Sampling, following_logits, generate_batch, next_logits
from megatron_lite.training.score import perplexity

MODELS = ("llama_gqa", "qwen2", "qwen3", "gpt2")
GREEDY = Sampling(0.0)


def prompts(*lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def text(ours, rows, new, keep):
    """The new ids of each row, token by token."""
    columns = list(generate_batch([ours], rows, new, GREEDY, keep=keep))
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("case", MODELS)
def test_greedy_text(case):
    reference, ours, _ = both(case)
    rows = prompts(3, 11, 7, 1)
    expected = []
    with torch.no_grad():
        for row in rows:
            ids = list(row)
            for _ in range(24):
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
            expected.append(ids[len(row) :])
    assert text(ours, rows, 24, keep=True) == text(ours, rows, 24, keep=False) == expected
    assert [text(ours, [row], 24, keep=True)[0] for row in rows] == expected
    assert max(len(set(row)) for row in expected) > 4  # not the same token over and over


@pytest.mark.parametrize("case", MODELS)
def test_logits_with_kept_keys(case):
    reference, ours, _ = both(case)
    rows, more = prompts(5, 2, 9), prompts(6, 6, 6)
    past = Past(16)
    seen = [next_logits([ours], rows, past)]
    seen += [following_logits([ours], [row[i] for row in more], past) for i in range(6)]
    for i, logits in enumerate(seen):
        whole = [row + extra[:i] for row, extra in zip(rows, more, strict=True)]
        torch.testing.assert_close(logits, next_logits([ours], whole), rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            alone = torch.stack([reference(torch.tensor([row])).logits[0, -1] for row in whole])
        torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ("llama_gqa", "gpt2"))
@pytest.mark.parametrize("window,stride", ((16, 16), (16, 5), (48, 1), (7, 3)))
def test_perplexity(case, window, stride):
    reference, ours, _ = both(case)
    documents = prompts(50, 1, 16, 17, 30)
    losses = []
    with torch.no_grad():
        for ids in documents:
            for done in range(1, len(ids)):  # token `done`, from what its window lets it see
                ahead = max(0, done - 1 - window + 1)  # tokens beyond the first window, in strides
                begin = 0 if done <= window else min(-(-ahead // stride) * stride, len(ids) - 1 - window)
                logits = reference(torch.tensor([ids[begin:done]])).logits[0, -1]
                losses.append(-float(torch.log_softmax(logits, -1)[ids[done]]))
    found = perplexity([ours], documents, single(), window, stride, 3)
    assert found["tokens"] == len(losses) == sum(len(ids) - 1 for ids in documents)
    assert found["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-12)
