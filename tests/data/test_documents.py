"""Document starts and fill-in-the-middle: against loops over tokens, and undone again."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.documents import Resets, document_starts
from megatron_lite.data.fim import Fim, FimSamples, fill_in_the_middle
from megatron_lite.data.indexed import DataError
from megatron_lite.data.loader import BatchLoader
from megatron_lite.data.samples import MockSamples
from megatron_lite.rampup import BatchSizes

EOD, PREFIX, MIDDLE, SUFFIX, VOCAB = 9, 20, 21, 22, 30
TOKENS = st.integers(5, EOD)
ROWS = st.integers(1, 40).flatmap(lambda n: st.lists(st.lists(TOKENS, min_size=n, max_size=n), min_size=1, max_size=4))


@settings(max_examples=100, deadline=None)
@given(rows=ROWS)
def test_starts(rows):
    tokens = np.array(rows)
    expected = np.zeros_like(tokens)
    for row, column in itertools.product(*map(range, tokens.shape)):
        if column:
            expected[row, column] = column if tokens[row, column - 1] == EOD else expected[row, column - 1]
    assert np.array_equal(document_starts(tokens, EOD), expected)
    positions, starts = Resets(EOD, True, True).of(tokens)
    assert torch.equal(starts, torch.from_numpy(expected))
    assert torch.equal(positions + starts, torch.arange(len(rows[0])).expand_as(starts))


def loader(dp_rank=0, dp_size=1, samples=None, **flags):
    flags = {"eod": EOD, **flags}
    return BatchLoader(samples or MockSamples(VOCAB, 16, 3), micro_batch_size=2, batch_sizes=BatchSizes(8), dp_rank=dp_rank,
                       dp_size=dp_size, vocab_size=VOCAB, prefetch=0, **flags)  # fmt: skip


def test_the_loader_gives_what_its_flags_say():
    plain = loader().next_step()
    assert all(batch.positions is batch.starts is None for batch in plain)
    for flags in ({"reset_position_ids": True}, {"reset_attention_mask": True}):
        ends = 0
        for batch, before in zip(loader(**flags).next_step(), plain, strict=True):
            assert torch.equal(batch.tokens, before.tokens) and torch.equal(batch.loss_mask, before.loss_mask)
            starts = torch.from_numpy(document_starts(batch.tokens.numpy(), EOD))
            if "reset_position_ids" in flags:
                assert batch.starts is None and torch.equal(batch.positions, torch.arange(16) - starts)
            else:
                assert batch.positions is None and torch.equal(batch.starts, starts)
            ends += int(starts.any())
        assert ends > 1, "no document ends in the samples: nothing is tested"
        with pytest.raises(ValueError, match="end-of-document"):
            loader(eod=None, **flags)


def fim(rate=1.0, spm_rate=0.5):
    return Fim(rate, spm_rate, PREFIX, MIDDLE, SUFFIX, EOD)


def cut(ids):
    """The documents in a row of ids, without their ends; what lies behind the last end comes last."""
    found = [[]]
    for token in ids:
        if token == EOD:
            found.append([])
        else:
            found[-1].append(token)
    return found


def undone(document):
    """The text of a turned document. Suffix first and an empty prefix look alike, and mean the same."""
    assert document[0] == PREFIX and [document.count(mark) for mark in (PREFIX, MIDDLE, SUFFIX)] == [1, 1, 1]
    behind, middle = document.index(SUFFIX), document.index(MIDDLE)
    assert behind < middle
    return document[1:behind] + document[middle + 1 :] + document[behind + 1 : middle]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(TOKENS, min_size=1, max_size=60), seed=st.integers(0, 2**64), spm=st.sampled_from([0.0, 0.5, 1.0]))
def test_every_document_can_be_undone(tokens, seed, spm):
    out = fill_in_the_middle(np.array(tokens), fim(1.0, spm), np.random.default_rng(seed))
    assert len(out) == len(tokens) and out.dtype == np.int64
    *whole, last = cut(out.tolist())
    for mine, theirs in zip(whole, cut(tokens), strict=False):
        assert mine == theirs == [] or undone(mine) == theirs
        assert spm < 1.0 or mine == [] or mine[1] == SUFFIX
    assert last == [] or last[0] == PREFIX  # its end may be cut off
    untouched = fill_in_the_middle(np.array(tokens), fim(0.0, spm), np.random.default_rng(seed))
    assert untouched.tolist() == tokens


def test_shares_and_cuts():
    """Half the documents are turned, a quarter of those suffix first; a cut in three of n tokens is two draws of 0 .. n."""
    random, draws, found = np.random.default_rng(1), 8000, Counter()
    row = np.array([5, 6, 7, EOD, EOD, EOD, EOD])  # room for the marks behind the document
    for _ in range(draws):
        found[tuple(cut(fill_in_the_middle(row, fim(0.5, 0.25), random).tolist())[0])] += 1
    assert abs(found.pop((5, 6, 7)) / draws - 0.5) < 0.03
    turned = sum(found.values())
    prefix_first = [count for document, count in found.items() if document[1] != SUFFIX]  # 9 of 16 draws have a prefix
    assert abs(sum(prefix_first) / turned - 0.75 * 9 / 16) < 0.03
    assert len(prefix_first) == 6 and max(prefix_first) < 3 * min(prefix_first)  # two different places: twice as often


def test_what_is_drawn_follows_from_seed_and_number_alone():
    samples = MockSamples(VOCAB, 32, 3)
    turned = FimSamples(samples, fim(), 7, VOCAB)
    state = np.random.get_state()[1].copy()
    forwards, backwards = [turned[n] for n in range(20)], [turned[n] for n in reversed(range(20))][::-1]
    assert all(map(np.array_equal, forwards, backwards)) and np.array_equal(np.random.get_state()[1], state)
    assert sum(not np.array_equal(turned[n], samples[n]) for n in range(20)) > 15
    assert not all(map(np.array_equal, forwards, (FimSamples(samples, fim(), 8, VOCAB)[n] for n in range(20))))
    one = [batch.tokens for batch in loader(samples=turned).next_step()]
    two = [[batch.tokens for batch in loader(rank, 2, turned).next_step()] for rank in range(2)]
    assert all(torch.equal(one[n], two[n % 2][n // 2]) for n in range(4))


@pytest.mark.parametrize("mark", [VOCAB, -1, EOD])
def test_a_mark_must_be_a_token_of_its_own(mark):
    with pytest.raises(DataError, match=f"--fim-middle-id {mark}: expected an id from 0 to {VOCAB - 1}"):
        FimSamples(MockSamples(VOCAB, 8, 3), fim()._replace(middle=mark), 7, VOCAB)
