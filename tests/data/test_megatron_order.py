"""--data-order megatron against a slow walk through the documents, sample by sample; the cache of its index."""

import os
import threading

import numpy as np
import pytest

from megatron_lite.config import Config, DataConfig, ModelConfig, TrainConfig
from megatron_lite.data import megatron_order
from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.data.megatron_order import (
    MegatronSamples,
    epochs_needed,
    greedy_blend,
    index_dtype,
    sample_starts,
    samples_apart,
)
from megatron_lite.training.data import build_splits


def walk(documents, seq_length, num_samples, seed):
    """All samples in order, by going through the documents token by token. `documents`: lists of ids."""
    tokens = sum(map(len, documents))
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * seq_length + 1:
        epochs += 1
    per_epoch, apart, before = (tokens - 1) // seq_length, False, 0
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // seq_length
        apart = num_samples - before < int(0.8 * per_epoch)
    random, order = np.random.RandomState(seed), []
    for passes in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(list(range(len(documents))) * passes)
        random.shuffle(part)
        order += part.tolist()
    stream = []
    for document in order:
        stream += documents[document]
    samples, start = [], 0
    while start + seq_length + 1 <= len(stream):
        samples.append(stream[start : start + seq_length + 1])
        start += seq_length
    ranges = [range(before), range(before, len(samples))] if apart else [range(len(samples))]
    shuffled = []
    for part in ranges:
        numbers = np.array(part)
        random.shuffle(numbers)
        shuffled += numbers.tolist()
    return [samples[number] for number in shuffled], apart, epochs


def corpus(folder, lengths, name="d"):
    """(data set, its documents): ids say document and place."""
    documents = [[100 * n + i % 100 for i in range(length)] for n, length in enumerate(lengths)]
    with IndexedWriter(folder / name, np.int32) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(folder / name), documents


LENGTHS = {
    "even": [10] * 9, "uneven": [1, 50, 3, 3, 8, 1, 27], "empty ones": [0, 7, 0, 0, 13, 5, 0], "one": [40], "exact": [5, 5, 5, 6],
    "long": [200, 3, 1, 90],
}  # fmt: skip


@pytest.mark.parametrize("name", LENGTHS)
def test_equals_a_slow_walk(tmp_path, name):
    dataset, documents = corpus(tmp_path, LENGTHS[name])
    seen = set()
    for seq_length in (1, 4, 13):
        for num_samples in (None, 1, 7, 31, 64, 100):
            expected, apart, epochs = walk(documents, seq_length, num_samples, 7)
            samples = MegatronSamples(dataset, seq_length, 7, num_samples, 0, len(dataset), str(tmp_path / "cache"))
            found = [samples[n] for n in range(len(samples))]
            assert all(sample.dtype == np.int64 and len(sample) == seq_length + 1 for sample in found)
            assert [sample.tolist() for sample in found] == expected
            assert num_samples is None or len(samples) >= num_samples
            seen.add((apart, epochs > 1))
    assert {(False, False), (False, True), (True, True)} <= seen, "all ways to treat the last epoch were met"


def test_the_last_epoch_is_apart_below_four_fifths():
    """100 samples an epoch, two epochs: 79 of the second are apart, 80 are not."""
    tokens, seq_length = 1001, 10
    assert [samples_apart(tokens, seq_length, 2, 100 + more) for more in (1, 79, 80, 100)] == [100, 100, None, None]
    assert samples_apart(tokens, seq_length, 1, 100) is None
    assert [epochs_needed(tokens, seq_length, n) for n in (None, 1, 100, 101, 200, 201)] == [1, 1, 1, 2, 2, 3]


def test_splits(tmp_path):
    dataset, documents = corpus(tmp_path, [9, 14, 3, 30, 8, 8, 21, 5, 6, 17])
    config = config_of(data_path=(str(tmp_path / "d"),), split="6,3,1", iters=6, evaluations=4)
    splits = build_splits(config, None)
    whole, *_ = walk(documents[:6], 4, 6 * 4, 7)
    assert [splits.train[n].tolist() for n in range(len(splits.train))] == whole
    # Megatron asks for the validation samples of all evaluations of the run: 6 // 2 + 1 of them, 4 batches of 4 each
    inside = [[token for token in document] for document in documents[6:9]]
    (samples,) = splits.valid.values()
    valid, *_ = walk(inside, 4, (6 // 2 + 1) * 4 * 4, 7)
    assert [samples[n].tolist() for n in range(len(samples))] == valid
    assert "Megatron's order" in splits.notes[0] and "changes with the length of the run" in splits.notes[0]


def config_of(iters=10, evaluations=None, **data):
    train = TrainConfig(micro_batch_size=4, global_batch_size=4, train_iters=iters, seed=7, eval_iters=evaluations or 1,
                        eval_interval=2 if evaluations else None)  # fmt: skip
    return Config(model=ModelConfig(seq_length=4), train=train, data=DataConfig(vocab_size=9999, data_order="megatron", **data))


def slow_blend(weights, samples):
    """(source, its sample) per step, in plain Python."""
    counts, found = [0] * len(weights), []
    for step in range(samples):
        errors = [weight * max(step, 1) - count for weight, count in zip(weights, counts, strict=True)]
        source = errors.index(max(errors))
        found.append((source, counts[source]))
        counts[source] += 1
    return found


def test_blends(tmp_path):
    made = [corpus(tmp_path, lengths, name) for name, lengths in (("a", [9, 14, 3]), ("b", [30, 8]), ("c", [8, 21, 5, 6]))]
    words = ("0.3", str(tmp_path / "a"), "0.5", str(tmp_path / "b"), "0.2", str(tmp_path / "c"))
    train = build_splits(config_of(train_data_path=words), None).train
    shares = [int(np.ceil(40 * weight)) for weight in (0.3, 0.5, 0.2)]
    sources = [walk(documents, 4, int(np.ceil(share * 1.005)), 7)[0] for (_, documents), share in zip(made, shares, strict=True)]
    expected = [sources[source][sample] for source, sample in slow_blend([0.3, 0.5, 0.2], sum(shares))]
    assert [train[n].tolist() for n in range(len(train))] == expected and len(train) >= 40
    by_size = build_splits(config_of(train_data_path=words[1::2], iters=4), None).train
    sources = [walk(documents, 4, None, 7)[0] for _, documents in made]
    sizes = np.array([len(source) for source in sources])
    expected = [sources[source][sample] for source, sample in slow_blend((sizes / sizes.sum()).tolist(), 16)]
    assert [by_size[n].tolist() for n in range(16)] == expected
    with pytest.raises(DataError, match="a blend by size gives one epoch of .* the run needs 40; give weights"):
        build_splits(config_of(train_data_path=words[1::2]), None)
    paths = {"train_data_path": words[1:2], "valid_data_path": ("web=" + words[1], *words[3::2])}
    valid = build_splits(config_of(evaluations=4, **paths), None).valid["web"]  # six evaluations of the same 16 samples
    assert [valid[n].tolist() for n in range(16)] == expected
    with pytest.raises(DataError, match="the run needs 400; give weights"):
        build_splits(config_of(evaluations=100, **paths), None)


@pytest.mark.parametrize("weights", [[1.0], [0.001, 0.999], [1 / 3] * 3, np.random.default_rng(0).dirichlet([1.0] * 40).tolist()])
def test_greedy_blend(weights):
    source, sample = greedy_blend(weights, 1500)
    assert list(zip(source.tolist(), sample.tolist(), strict=True)) == slow_blend(weights, 1500)
    assert source.dtype == np.int16 and sample.dtype == np.int64


def test_d19_one_of_many_builds_and_all_read_it(tmp_path, monkeypatch):
    dataset, documents = corpus(tmp_path, [9, 14, 3, 30])
    built, build, read = [], megatron_order.build_order, []

    def slowly(*arguments):
        built.append(arguments)
        threading.Event().wait(0.2)
        return build(*arguments)

    monkeypatch.setattr(megatron_order, "build_order", slowly)

    def rank():
        samples = MegatronSamples(dataset, 4, 1, 50, 0, 4, str(tmp_path / "cache"))
        read.append([samples[n].tolist() for n in range(50)])

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(built) == 1 and read == [walk(documents, 4, 50, 1)[0][:50]] * 4
    files = sorted(path.name.split("-")[-1] for path in (tmp_path / "cache").iterdir() if path.suffix == ".npy")
    assert files == ["documents.npy", "shuffle.npy", "starts.npy"]
    MegatronSamples(dataset, 4, 1, 50, 0, 4, str(tmp_path / "cache"))
    assert len(built) == 1, "found in the cache"


def test_a_build_that_is_cut_short_is_done_again(tmp_path, monkeypatch):
    dataset, documents = corpus(tmp_path, [9, 14, 3, 30])
    replace, left = os.replace, 2

    def dies(source, target):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        MegatronSamples(dataset, 4, 1, 50, 0, 4, None)
    monkeypatch.setattr(os, "replace", replace)
    samples = MegatronSamples(dataset, 4, 1, 50, 0, 4, None)
    assert [samples[n].tolist() for n in range(50)] == walk(documents, 4, 50, 1)[0][:50]
    names = [path.name for path in (tmp_path / "d_cache").iterdir()]
    assert len(names) == 4 and all(name.endswith((".npy", ".lock")) for name in names), "no half file is left"


def test_d21_the_cache_is_named_by_what_decides_it(tmp_path):
    """A prefix written anew with other lengths is other data; equal lengths have one order, and so one file."""
    cache = str(tmp_path / "cache")
    for lengths in ([9, 14, 3, 30], [3, 9, 14, 30], [60], [9, 14]):
        dataset, documents = corpus(tmp_path, lengths)
        samples = MegatronSamples(dataset, 4, 1, 50, 0, len(lengths), cache)
        assert [samples[n].tolist() for n in range(50)] == walk(documents, 4, 50, 1)[0][:50]
    assert len(os.listdir(cache)) == 4 * 4
    MegatronSamples(corpus(tmp_path, [9, 14], "elsewhere")[0], 4, 1, 50, 0, 2, cache)
    assert len(os.listdir(cache)) == 4 * 4
    for changed in ((5, 1, 50, 0, 2), (4, 2, 50, 0, 2), (4, 1, 51, 0, 2), (4, 1, 50, 1, 2)):
        before = len(os.listdir(cache))
        MegatronSamples(dataset, *changed, cache)
        assert len(os.listdir(cache)) == before + 4


def test_d11_more_documents_than_32_bits_count_get_64():
    assert index_dtype(2**31 - 1) == np.int32 and index_dtype(2**31) == np.int64
    lengths = np.array([2**31 - 1, 2**31 - 1], np.int32)  # far more than 2^31 tokens, without a file of them
    order = np.array([0, 1] * 3, np.int32)
    samples = (6 * (2**31 - 1) - 1) // 10**9
    starts = sample_starts(order, lengths, 10**9, samples)
    places = starts[:, 0].astype(np.int64) * (2**31 - 1) + starts[:, 1]
    assert samples == 12 and np.diff(places).tolist() == [10**9] * 12 and starts.min() >= 0


def test_what_cannot_be_is_said(tmp_path):
    dataset, _ = corpus(tmp_path, [4, 1])
    with pytest.raises(DataError, match="5 tokens in this split, but one sample of --seq-length 5 needs 6"):
        MegatronSamples(dataset, 5, 1, 3, 0, 2, None)
    samples = MegatronSamples(dataset, 4, 1, 3, 0, 2, None)
    for wrong in (-1, len(samples)):
        with pytest.raises(DataError, match=f"sample {wrong}: --data-order megatron was built for {len(samples)} samples"):
            samples[wrong]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be stored there .*; name another --data-cache-path"):
        MegatronSamples(dataset, 4, 1, 4, 0, 2, str(tmp_path / "file"))
    with IndexedWriter(tmp_path / "f", np.float32) as writer:
        writer.add_document([0.5] * 20)
    with pytest.raises(DataError, match="holds float32, expected integer"):
        MegatronSamples(IndexedDataset(tmp_path / "f"), 4, 1, 4, 0, 1, None)
