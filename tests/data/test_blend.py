"""Blends: weights kept at every prefix, every source's samples in order, words that name them."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config import Config, DataConfig, ModelConfig, TrainConfig
from megatron_lite.data.blend import LONGEST, Blend, BlendedSamples, read_blend, turns_per_period
from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.data.samples import WindowSamples
from megatron_lite.training.data import build_splits, words_of_file

counts_of = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def furthest(turns, slots):
    """Largest |count - n w| over all sources and the prefixes 1 .. slots, times the period: in whole numbers, so exactly."""
    blend = Blend(turns)
    counts, worst = np.zeros(len(turns), np.int64), 0
    for n in range(slots):
        counts[blend[n][0]] += 1
        worst = max(worst, int(np.abs(counts * blend.period - (n + 1) * blend.turns).max()))
    return worst, blend.period


@settings(max_examples=150, deadline=None)
@given(turns=counts_of)
def test_every_prefix_keeps_the_weights_within_one_sample(turns):
    worst, period = furthest(turns, sum(turns))
    assert worst < period


@pytest.mark.parametrize("weights", [["0.001", "0.999"], ["0.999", "0.001"], ["1e-4", "1"], ["3", "1"], ["0.5"] * 7])
def test_uneven_weights(weights):
    turns = turns_per_period([Fraction(weight) for weight in weights])
    worst, period = furthest(turns, min(sum(turns), 20_000))
    assert worst < period
    assert [Fraction(t, sum(turns)) for t in turns] == [Fraction(w) / sum(map(Fraction, weights)) for w in weights]


def test_a_thousand_sources():
    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 50, 1000)]
    worst, period = furthest(sizes, 3000)
    assert worst < period and period == sum(sizes)


@settings(max_examples=60, deadline=None)
@given(turns=counts_of, first=st.integers(0, 10**12))
def test_each_source_gives_its_samples_in_order_and_none_twice(turns, first):
    blend = Blend(turns)
    before = blend.counts(first)
    for sample in range(first, first + 50):
        source, number = blend[sample]
        assert number == before[source]
        before[source] += 1
    assert (blend.counts(first + 50) == before).all() and before.sum() == first + 50


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 10**12), min_size=2, max_size=40))
def test_weights_that_need_a_longer_period_are_rounded(sizes):
    turns, total = turns_per_period(sizes), sum(sizes)
    assert min(turns) >= 1 and sum(turns) <= LONGEST
    for size, count in zip(sizes, turns, strict=True):  # the largest pay for those raised to one
        assert abs(Fraction(count, sum(turns)) - Fraction(size, total)) <= Fraction(1 + len(sizes) * (count > 20), LONGEST)


def test_too_many_sources_are_refused():
    with pytest.raises(DataError, match="a blend of 20000 sources, at most 16384"):
        turns_per_period(range(10**9, 10**9 + 20_000))


@pytest.mark.parametrize("words, weights, prefixes", [
    ("A", None, ["A"]),
    ("1.0 A", [1], ["A"]),
    ("A B C", None, ["A", "B", "C"]),
    ("3 A 1 B", [3, 1], ["A", "B"]),
    ("0.1 A .9 7B", [Fraction(1, 10), Fraction(9, 10)], ["A", "7B"]),
])  # fmt: skip
def test_words(words, weights, prefixes):
    assert read_blend(words.split()) == (weights, prefixes)


@pytest.mark.parametrize("words, message", [
    ("0.3 A 0.7", "3 words are no pairs"),
    ("A 1", "word 1, A, stands where a weight is expected"),
    ("1 2", "word 2, 2, stands where a prefix is expected"),
    ("0 A 1 B", "weight 0 is not"),
    ("-1 A 1 B", "weight -1 is not"),
    ("nan A 1 B", "weight nan is not"),
    ("inf A 1 B", "weight inf is not"),
    ("1e999 A 1 B", "weight 1e999 is not"),
    ("A A", "A is named twice"),
    ("1 A 2 A", "A is named twice"),
])  # fmt: skip
def test_words_that_name_no_blend(words, message):
    with pytest.raises(DataError, match=message):
        read_blend(words.split())


def write(folder, name, tokens):
    with IndexedWriter(folder / name, np.uint16) as writer:
        for document in np.array_split(np.asarray(tokens), 10):
            writer.add_document(document)
    return str(folder / name)


@pytest.fixture
def prefixes(tmp_path):
    """Three sources of 20, 30 and 50 samples of 4 tokens; ids say the source."""
    return [write(tmp_path, name, 1000 * n + np.arange(4 * samples + 1)) for n, (name, samples) in
            enumerate({"a": 20, "b": 30, "c": 50}.items(), start=1)]  # fmt: skip


def config_of(**data):
    train = TrainConfig(micro_batch_size=2, global_batch_size=4, train_iters=50, eval_iters=2, seed=3,
                        eval_interval=10 if "valid_data_path" in data else None)  # fmt: skip
    return Config(model=ModelConfig(seq_length=4), train=train, data=DataConfig(vocab_size=9999, **data))


def sources_of(samples, count):
    return [int(samples[n][0]) // 1000 for n in range(count)]


def test_by_size_all_sources_end_their_epochs_together(prefixes):
    samples = build_splits(config_of(data_path=tuple(prefixes), split="100"), None).train
    starts = [int(samples[n][0]) for n in range(100)]
    assert len(set(starts)) == 100  # nothing twice before everything once
    assert np.bincount([start // 1000 for start in starts]).tolist() == [0, 20, 30, 50]
    second = [int(samples[n][0]) for n in range(100, 200)]
    assert sorted(second) == sorted(starts) and second != starts


def test_small_sources_go_through_epochs_of_their_own(prefixes):
    """0.001 and 0.999 of equal sources: the second is read 50 times, in another order each time (D15)."""
    words = ("0.001", prefixes[0], "0.999", prefixes[1])
    splits = build_splits(config_of(data_path=words, split="100"), None)
    starts = [int(splits.train[n][0]) for n in range(3000)]
    mine = [start for start in starts if start >= 2000]
    assert abs(len(mine) - 2997) <= 1
    epochs = [mine[n : n + 30] for n in range(0, 2970, 30)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len(set(map(tuple, epochs))) == len(epochs)
    assert "0.999000" in splits.notes[0] and "blend of 2 sources by weight" in splits.notes[0]


def test_one_prefix_with_a_weight_is_that_prefix(prefixes):
    alone = build_splits(config_of(data_path=(prefixes[0],)), None).train
    weighted = build_splits(config_of(data_path=("0.4", prefixes[0])), None).train
    plain = WindowSamples(IndexedDataset(prefixes[0]), 4, 3, 0, alone.num_tokens)
    for n in range(30):
        assert alone[n].tolist() == weighted[n].tolist() == plain[n].tolist()


def test_own_data_for_each_split(prefixes):
    made = build_splits(config_of(train_data_path=(prefixes[0], prefixes[1]), valid_data_path=(prefixes[2],),
                                  test_data_path=("2", prefixes[1])), None)  # fmt: skip
    assert set(sources_of(made.train, 40)) == {1, 2} and made.train.turns == [2, 3]
    assert set(sources_of(made.valid[""], 40)) == {3} and set(sources_of(made.test, 40)) == {2}
    assert [note.split(" data")[0] for note in made.notes] == ["train", "valid", "test"]


def test_words_in_a_file(prefixes, tmp_path):
    path = tmp_path / "blend.txt"
    path.write_text(f"# web and books\n0.25 '{prefixes[0]}'\n0.75 {prefixes[1]}  # books\n")
    assert words_of_file(str(path)) == ("0.25", prefixes[0], "0.75", prefixes[1])
    assert build_splits(config_of(data_args_path=str(path)), None).train.turns == [1, 3]


@pytest.mark.parametrize("text, message", [(None, "cannot be read"), ("# nothing\n", "names no data"), ("'a", "No closing")])
def test_files_that_name_no_data(tmp_path, text, message):
    path = tmp_path / "blend.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=f"--data-args-path .*{message}"):
        build_splits(config_of(data_args_path=str(path)), None)


def test_a_missing_source_is_named(prefixes):
    with pytest.raises(DataError, match="train data 1 .*a 2 .*missing: .*missing.idx: no such file"):
        build_splits(config_of(data_path=("1", prefixes[0], "2", prefixes[0] + "missing")), None)


@pytest.mark.parametrize("dp, micro", [(1, 4), (2, 1), (4, 1), (2, 2)])
def test_layouts_and_restarts_read_the_same_blend(prefixes, dp, micro, assert_read_alike):
    samples = BlendedSamples([WindowSamples(IndexedDataset(p), 4, n) for n, p in enumerate(prefixes)], [Fraction(1, 3)] * 3)
    for consumed in (0, 8, 400):
        assert_read_alike(samples, dp, micro, consumed)
