"""A blend that changes at given samples: exact in every phase, no sample of a source twice, errors in words."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.arguments import parse
from megatron_lite.config import Config, DataConfig, ModelConfig, TrainConfig
from megatron_lite.data.blend import BlendedSamples
from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.data.phases import Phase, PhasedSamples, read_phases
from megatron_lite.data.samples import WindowSamples
from megatron_lite.training.data import build_splits


class Counted:
    """A source of so many samples an epoch; sample j is [j]."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, sample):
        return np.array([sample])

    def describe(self, num_samples):
        return f"{num_samples} of it"


phase_lists = st.lists(
    st.tuples(st.integers(1, 40), st.dictionaries(st.sampled_from("ABCDE"), st.integers(1, 12), min_size=1, max_size=5)),
    min_size=1, max_size=5,
)  # fmt: skip


def phases_of(drawn):
    starts = np.cumsum([0, *(length for length, _ in drawn)])[:-1].tolist()
    return [
        Phase(start, [Fraction(w) for w in blend.values()], list(blend)) for start, (_, blend) in zip(starts, drawn, strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(drawn=phase_lists)
def test_every_prefix_of_every_phase_keeps_its_weights_and_no_sample_comes_twice(drawn):
    phases = phases_of(drawn)
    samples = PhasedSamples(phases, lambda prefix, number: Counted(10))
    names = list(dict.fromkeys(prefix for phase in phases for prefix in phase.prefixes))
    counts = np.zeros(len(names), np.int64)
    ends = [phase.start for phase in phases[1:]] + [phases[-1].start + 90]
    for phase, end in zip(phases, ends, strict=True):
        before, total = counts.copy(), sum(phase.weights)
        for n in range(phase.start, end):
            source, sample = samples.where(n)
            assert sample == counts[source], "the next sample of that source, whichever phase read the one before"
            counts[source] += 1
            for name, weight in zip(phase.prefixes, phase.weights, strict=True):
                read = int(counts[names.index(name)] - before[names.index(name)])
                assert abs(read - (n + 1 - phase.start) * weight / total) < 1
        assert sum(counts[names.index(name)] - before[names.index(name)] for name in phase.prefixes) == end - phase.start


@settings(max_examples=50, deadline=None)
@given(drawn=phase_lists, first=st.integers(0, 10**12))
def test_any_sample_is_found_at_once(drawn, first):
    """Nothing depends on what was read before: far out the counts still go on one by one."""
    samples = PhasedSamples(phases_of(drawn), lambda prefix, number: Counted(10))
    counts = samples._counts(len(drawn) - 1, first)
    for n in range(first, first + 30):
        source, sample = samples.where(samples.starts[-1] + n)
        assert sample == counts[source]
        counts[source] += 1


def test_one_phase_is_a_plain_blend():
    weights = [Fraction(1, 1000), Fraction(999, 1000)]
    phased = PhasedSamples([Phase(0, weights, ["A", "B"])], lambda prefix, number: Counted(10))
    plain = BlendedSamples([Counted(10), Counted(10)], weights)
    assert [phased.where(n) for n in range(3000)] == [plain.where(n) for n in range(3000)]


def test_words(tmp_path):
    path = tmp_path / "phases.txt"
    path.write_text("# web first\n0 0.9 data/web 0.1 'my books'\n\n2_000_000 A B  # by size\n3000000 C\n")
    assert read_phases(str(path)) == [
        Phase(0, [Fraction(9, 10), Fraction(1, 10)], ["data/web", "my books"]), Phase(2_000_000, None, ["A", "B"]),
        Phase(3_000_000, None, ["C"]),
    ]  # fmt: skip


@pytest.mark.parametrize("text, message", [
    (None, "cannot be read"),
    ("# nothing\n", "names no phase"),
    ("0 'A\n", "No closing"),
    ("0\n", ":1: expected the sample from which a blend is read"),
    ("A B\n", ":1: expected the sample from which"),
    ("-5 A\n", ":1: expected the sample from which"),
    ("1e3 A\n", ":1: expected the sample from which"),
    ("5 A\n", ":1: the first phase starts at sample 5, expected 0"),
    ("0 A\n\n10 B\n10 C\n", ":4: starts at sample 10, expected one after 10"),
    ("0 A\n10 0.5 A 0.5\n", ":2: 3 words are no pairs"),
    ("0 A A\n", ":1: A is named twice"),
])  # fmt: skip
def test_files_that_are_no_schedule(tmp_path, text, message):
    path = tmp_path / "phases.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_phases(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --micro-batch-size 2 --lr 1 --vocab-size 99".split()
)


def problems_of(*flags):
    return [str(problem) for problem in parse([*SIZES, "--train-iters", "5", *flags], 1)[1]]


def test_a_run_is_refused_before_it_starts(tmp_path):
    path = tmp_path / "phases.txt"
    path.write_text("0 A\n10 B\n")
    assert problems_of("--data-schedule", str(path)) == []
    assert any("both name the training data" in p for p in problems_of("--data-schedule", str(path), "--data-path", "A"))
    assert any("--split 9,1: has no effect" in p for p in problems_of("--data-schedule", str(path), "--split", "9,1"))
    assert any("valid-data-path" in p for p in problems_of("--data-schedule", str(path), "--eval-interval", "2"))
    assert any("no blend that changes" in p for p in problems_of("--data-schedule", str(path), "--data-order", "megatron"))
    assert any("has no effect: needs --data-order megatron" in p for p in problems_of("--mock-data", "--data-cache-path", "x"))
    path.write_text("3 A\n")
    assert any("phases.txt:1: the first phase starts at sample 3" in p for p in problems_of("--data-schedule", str(path)))


@pytest.fixture
def prefixes(tmp_path):
    """Three sources of 20, 30 and 50 samples of 4 tokens; ids say the source."""
    made = []
    for number, (name, samples) in enumerate({"a": 20, "b": 30, "c": 50}.items(), start=1):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document(1000 * number + np.arange(4 * samples + 1))
        made.append(str(tmp_path / name))
    return made


def test_a_run_with_a_schedule(prefixes, tmp_path):
    a, b, c = prefixes
    path = tmp_path / "phases.txt"
    path.write_text(f"0 {a}\n8 0.25 {a} 0.75 {b}\n24 {b} {c}\n")
    train = TrainConfig(micro_batch_size=2, global_batch_size=4, train_iters=50, seed=3)
    config = Config(model=ModelConfig(seq_length=4), train=train, data=DataConfig(vocab_size=9999, data_schedule=str(path)))
    splits = build_splits(config, None)
    sources = [int(splits.train[n][0]) // 1000 for n in range(104)]
    assert sources[:8] == [1] * 8 and sources[8:24].count(1) == 4 and sources[8:24].count(2) == 12
    assert sources[24:104].count(2) == 30 and sources[24:104].count(3) == 50, "by size: 3 to 5"
    starts = [int(splits.train[n][0]) for n in range(24)]
    assert len(set(starts)) == 24, "a source goes on where the phase before left it"
    alone = WindowSamples(IndexedDataset(a), 4, 3)
    assert [splits.train[n].tolist() for n in range(8)] == [alone[n].tolist() for n in range(8)]
    note = splits.notes[0]
    assert "schedule of 3 blends, 200 samples needed" in note and f"from sample 8: 0.250000 {a}, 0.750000 {b}" in note


@pytest.mark.parametrize("dp, micro", [(1, 4), (2, 1), (4, 1)])
def test_layouts_and_restarts_read_the_same(prefixes, dp, micro, assert_read_alike):
    phases = [Phase(0, None, [prefixes[0]]), Phase(6, [Fraction(1), Fraction(2)], prefixes[1:])]
    samples = PhasedSamples(phases, lambda prefix, number: WindowSamples(IndexedDataset(prefix), 4, number))
    for consumed in (0, 4, 8, 400):
        assert_read_alike(samples, dp, micro, consumed)
