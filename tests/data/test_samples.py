"""The sample order: a bijection, the same whatever the run; windows that cover the stream; the split parser."""

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.data.samples import (
    MockSamples,
    Order,
    WindowSamples,
    parse_split,
    permute,
    permute_array,
    split_documents,
)

KEYS = st.one_of(st.integers(), st.tuples(st.integers(0, 2**32), st.integers(0, 1000)))


def stream(folder, tokens, documents=1):
    """A data set holding 0, 1, 2, ..."""
    with IndexedWriter(folder / "d", np.int32) as writer:
        for part in np.array_split(np.arange(tokens), documents):
            writer.add_document(part)
    return IndexedDataset(folder / "d")


@settings(max_examples=150, deadline=None)
@given(n=st.one_of(st.integers(1, 40), st.integers(1, 3000)), key=KEYS)
def test_permute_is_a_bijection(n, key):
    image = permute_array(np.arange(n), n, key)
    assert np.array_equal(np.sort(image), np.arange(n))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_permute_scalar_and_array_agree(n, key, data):
    i = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4, unique=True))
    image = permute_array(np.array(i), n, key).tolist()
    assert image == [permute(x, n, key) for x in i]
    assert len(set(image)) == len(i) and all(0 <= x < n for x in image)


def test_permute_refuses_what_is_outside():
    for i, n in ((5, 5), (-1, 5), (0, 0)):
        with pytest.raises(ValueError, match="cannot permute"):
            permute(i, n, 0)
        with pytest.raises(ValueError, match="cannot permute"):
            permute_array(np.array([i]), n, 0)


def test_permute_is_frozen():
    """A changed constant would silently reshuffle every run that is resumed."""
    assert permute_array(np.arange(10), 10, (1234, 0)).tolist() == [1, 3, 8, 5, 6, 7, 0, 4, 9, 2]
    assert permute(123456789, 10**12, (1234, 7)) == 803485252265


@pytest.mark.parametrize("n, i", [(3, 1), (6, 3), (37, 18), (1000, 500), (37, 0), (1000, 999)])
def test_permute_spreads_evenly(n, i):
    """Over many keys, one index lands everywhere equally often: chi-square within five sigma."""
    trials, buckets = 4000, min(n, 40)
    landed = np.array([permute(i, n, (1, key)) for key in range(trials)]) * buckets // n
    expected = trials * np.bincount(np.arange(n) * buckets // n, minlength=buckets) / n
    chi_square = ((np.bincount(landed, minlength=buckets) - expected) ** 2 / expected).sum()
    assert chi_square < buckets - 1 + 5 * math.sqrt(2 * (buckets - 1))


def test_permute_leaves_no_neighbours_and_no_drift():
    n = 10000
    image = permute_array(np.arange(n), n, 5)
    assert (np.abs(np.diff(image)) == 1).sum() < 12  # 2 expected of a random order
    assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < 0.05
    other = permute_array(np.arange(n), n, 6)
    assert (image == other).sum() < 12  # 1 expected


@pytest.mark.parametrize(
    "text, weights",
    [("969, 30, 1", (969, 30, 1)), ("98,2", (98, 2, 0)), ("100", (100, 0, 0)), ("0.5,.25,0.25", (0.5, 0.25, 0.25))],
)
def test_split_is_read(text, weights):
    assert parse_split(text) == pytest.approx([weight / sum(weights) for weight in weights])


@pytest.mark.parametrize(
    "text",
    ["-1,1,0", "90,abc5,5", "0,0,0", "nan,1,1", "inf,1,1", "1,2,3,4", "", "1,,1", "1;2", "1e3,1", "9" * 400, "٣,1"],
)
def test_d17_a_wrong_split_is_refused(text):
    with pytest.raises(DataError, match="--split"):
        parse_split(text)


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), documents=st.integers(0, 10**9))
def test_split_ranges_join_up(weights, documents):
    ranges = split_documents(parse_split(",".join(map(str, weights))), documents)
    assert ranges[0][0] == 0 and ranges[-1][1] == documents
    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))
    for (first, last), fraction in zip(ranges, parse_split(",".join(map(str, weights))), strict=True):
        assert first <= last and abs((last - first) - fraction * documents) <= 1


@settings(max_examples=40, deadline=None)
@given(n=st.sampled_from([1, 2, 7, 1023, 1024, 1025, 5000]), seed=st.integers(0, 9), samples=st.lists(st.integers(0, 20_000)))
def test_the_order_by_blocks_is_the_permutation(n, seed, samples):
    order = Order(n, seed)
    assert [order[g] for g in samples] == [permute(g % n, n, (seed, g // n)) for g in samples]


def test_split_matches_megatron():
    assert split_documents(parse_split("969, 30, 1"), 1000) == [(0, 969), (969, 999), (999, 1000)]


def test_windows_cover_the_stream_once_an_epoch(tmp_path):
    dataset = stream(tmp_path, 103, documents=4)
    samples = WindowSamples(dataset, 10, seed=3)
    assert len(samples) == (103 - 1) // 10 == 10
    for epoch in range(3):
        rows = [samples[epoch * 10 + i] for i in range(10)]
        assert all(row.dtype == np.int64 and len(row) == 11 and (np.diff(row) == 1).all() for row in rows)
        assert sorted(int(row[0]) for row in rows) == list(range(0, 100, 10))
    orders = {tuple(int(samples[epoch * 10 + i][0]) for i in range(10)) for epoch in range(6)}
    assert len(orders) == 6, "each epoch has an order of its own"


def test_windows_stay_inside_their_split(tmp_path):
    dataset = stream(tmp_path, 100, documents=10)
    bounds = dataset.document_token_bounds()
    seen = []
    for first, last in split_documents(parse_split("6,3,1"), dataset.num_documents):
        samples = WindowSamples(dataset, 3, 1, int(bounds[first]), int(bounds[last]))
        rows = np.concatenate([samples[i] for i in range(len(samples))])
        assert rows.min() >= bounds[first] and rows.max() < bounds[last]
        seen.append((rows.min(), rows.max()))
    assert [low for low, _ in seen] == [0, 60, 90]


def test_d24_the_order_does_not_depend_on_the_length_of_the_run(tmp_path):
    """There is nothing about the run that a sample could depend on; nor on what was read before it."""
    dataset = stream(tmp_path, 200)
    forward = [WindowSamples(dataset, 7, seed=1)[i].tolist() for i in range(90)]
    samples = WindowSamples(dataset, 7, seed=1)
    assert [samples[i].tolist() for i in reversed(range(90))] == forward[::-1]
    assert [WindowSamples(dataset, 7, seed=2)[i].tolist() for i in range(90)] != forward
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"], "no index cache"


def test_d23_describe_states_tokens_samples_and_epochs(tmp_path):
    text = WindowSamples(stream(tmp_path, 1025), 64, seed=0).describe(40)
    assert "1,025 tokens" in text and "16 samples per epoch" in text and "40 samples needed = 2.50 epochs" in text


def test_too_small_and_float_data_are_refused_in_words(tmp_path):
    with pytest.raises(DataError, match=r"8 tokens in this split .* --seq-length 8 needs 9"):
        WindowSamples(stream(tmp_path, 8), 8, seed=0)
    assert len(WindowSamples(stream(tmp_path, 9), 8, seed=0)) == 1
    with pytest.raises(DataError, match="0 tokens in this split"):
        WindowSamples(stream(tmp_path, 9), 8, 0, 9, 9)
    with IndexedWriter(tmp_path / "f", np.float32) as writer:
        writer.add_document([0.5] * 20)
    with pytest.raises(DataError, match="holds float32, expected integer"):
        WindowSamples(IndexedDataset(tmp_path / "f"), 8, 0)


@pytest.mark.parametrize("vocab_size", [1, 2, 128, 50304])
def test_mock_samples_are_fixed_valid_and_learnable(vocab_size):
    samples = MockSamples(vocab_size, 256, seed=-7)
    rows = np.stack([samples[i] for i in range(20)])
    assert rows.shape == (20, 257) and rows.dtype == np.int64
    assert rows.min() >= 0 and rows.max() < vocab_size
    assert np.array_equal(rows[13], MockSamples(vocab_size, 256, seed=-7)[13])
    steps = np.diff(rows, axis=1) % vocab_size
    assert (steps == samples.stride % vocab_size).mean() > 0.85
    if vocab_size > 2:
        assert not np.array_equal(rows[0], rows[1]) and "unlimited" in samples.describe(5)
