"""Batches: the same samples for every layout, restarts that change nothing, errors that reach the caller."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.data.loader import BatchLoader
from megatron_lite.data.samples import MockSamples, WindowSamples
from megatron_lite.rampup import BatchSizes
from megatron_lite.training.signals import StopSignal


class Numbered:
    """Sample g is [g, g, g]: shows which samples a rank got."""

    def __getitem__(self, g):
        return np.full(3, g, np.int64)


def loader(samples, mbs=1, count=1, rank=0, size=1, **more):
    more = {"vocab_size": 10**6, "prefetch": 0, "batch_sizes": BatchSizes(mbs * count * size), **more}
    return BatchLoader(samples, micro_batch_size=mbs, dp_rank=rank, dp_size=size, **more)


def numbers(step):
    """The sample numbers in a step of Numbered."""
    return [[int(row[0]) for row in batch.tokens] for batch in step]


@pytest.fixture
def windows(tmp_path):
    """11 windows of 4 tokens an epoch; every 9th token ends a document (id 99)."""
    tokens = np.arange(46) % 97
    tokens[8::9] = 99
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(tokens)
    return WindowSamples(IndexedDataset(tmp_path / "d"), 4, seed=5)


def test_shapes_types_and_shift(windows):
    step = loader(windows, mbs=3, count=2).next_step()
    assert len(step) == 2
    for batch, first in zip(step, (0, 3), strict=True):
        assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (3, 4)
        assert (batch.tokens.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
        assert batch.loss_mask.dtype == torch.float32 and bool((batch.loss_mask == 1).all())
        assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
        for row in range(3):
            sample = windows[first + row]
            assert batch.tokens[row].tolist() == sample[:-1].tolist()
            assert batch.labels[row].tolist() == sample[1:].tolist()


def test_the_global_order():
    assert numbers(loader(Numbered(), mbs=2, count=2, rank=1, size=3, consumed_samples=24).next_step()) == [
        [26, 27],
        [32, 33],
    ]


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (8, 1)]),
    consumed=st.integers(0, 100),
)
def test_every_layout_sees_the_same_samples_in_a_step(layout, consumed):
    mbs, size = layout
    count = 8 // (mbs * size)
    ranks = [loader(Numbered(), mbs, count, rank, size, consumed_samples=consumed) for rank in range(size)]
    for step in range(3):
        seen = [g for rank in ranks for microbatch in numbers(rank.next_step()) for g in microbatch]
        assert sorted(seen) == list(range(consumed + 8 * step, consumed + 8 * step + 8))
    assert {rank.consumed_samples for rank in ranks} == {consumed + 24}


RAMPS = [BatchSizes(16, (8, 8, 40)), BatchSizes(24, (8, 8, 20)), BatchSizes(32, (8, 8, 24)), BatchSizes(24, (16, 8, 1))]


@settings(max_examples=40, deadline=None)
@given(
    ramp=st.sampled_from(RAMPS),
    layout=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (8, 1), (1, 8)]),
    done=st.integers(0, 6),
)
def test_a_growing_batch_takes_the_same_samples_at_every_layout_and_after_a_restart(ramp, layout, done):
    mbs, size = layout
    consumed = ramp.samples(done)
    ranks = [loader(Numbered(), mbs, 1, rank, size, batch_sizes=ramp, consumed_samples=consumed) for rank in range(size)]
    for step in range(done, done + 5):
        steps = [numbers(rank.next_step()) for rank in ranks]
        for j in range(len(steps[0])):  # microbatches side by side are the global order
            row = [g for rank in steps for g in rank[j]]
            assert row == list(range(consumed + j * mbs * size, consumed + (j + 1) * mbs * size))
        consumed += len(steps[0]) * mbs * size
        assert consumed == ramp.samples(step + 1) and {rank.consumed_samples for rank in ranks} == {consumed}


def test_reading_ahead_grows_alike():
    with loader(Numbered(), 4, batch_sizes=RAMPS[0], prefetch=2) as ahead, loader(Numbered(), 4, batch_sizes=RAMPS[0]) as inline:
        assert [numbers(ahead.next_step()) for _ in range(8)] == [numbers(inline.next_step()) for _ in range(8)]


@pytest.mark.parametrize("mbs, size", [(1, 1), (2, 2), (4, 1)])
def test_behind_the_end_are_rows_without_a_loss(mbs, size):
    class Five(Numbered):
        def __getitem__(self, g):
            assert g < 5, "nothing behind the end is read"
            return super().__getitem__(g)

    ranks = [loader(Five(), mbs, 4 // (mbs * size), rank, size, end=5) for rank in range(size)]
    rows = [(int(batch.tokens[row, 0]), float(batch.loss_mask[row].sum())) for _ in range(2) for rank in ranks
            for batch in rank.next_step() for row in range(mbs)]  # fmt: skip
    assert sorted(rows) == [(0, 0.0)] * 3 + [(g, 2.0) for g in range(5)]


def test_ranks_that_need_no_tokens_read_none():
    class Untouchable:
        def __getitem__(self, g):
            raise AssertionError("read")

    source = loader(Untouchable(), mbs=2, count=3, needed=False, position=Untouchable().__getitem__)
    step = source.next_step()
    assert len(step) == 3 and all(batch.tokens.numel() == 0 for batch in step) and source.consumed_samples == 6


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_position_of_a_stream_is_that_of_the_step_handed_over(prefetch):
    """And not that of the steps read ahead."""
    with loader(Numbered(), mbs=2, position=lambda g: {"at": g}, prefetch=prefetch) as source:
        for step in range(1, 6):
            source.next_step()
            assert source.position == {"at": 2 * step}


def test_signals_do_not_disturb_reading_ahead():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = StopSignal().install()
    try:
        with loader(Numbered(), prefetch=2) as source:
            for step in range(20):
                assert numbers(source.next_step()) == [[step]]
                os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received
    finally:
        stop.finished()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_d28_resume_at_another_dp_size_continues_the_order():
    before = loader(Numbered(), mbs=2, count=2, rank=0, size=2)
    before.next_step()
    assert before.consumed_samples == 8
    after = [loader(Numbered(), 2, 1, rank, 4, consumed_samples=8) for rank in range(4)]
    assert sorted(g for rank in after for g in numbers(rank.next_step())[0]) == list(range(8, 16))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_d27_resume_is_bitwise_also_at_and_after_epoch_ends(windows, prefetch):
    """11 samples an epoch, 3 a step: epochs end inside steps; resume at every step of the first four epochs."""
    with loader(windows, mbs=3, prefetch=0) as whole:
        expected = [whole.next_step()[0] for _ in range(18)]
    for done in range(0, 15):
        with loader(windows, mbs=3, prefetch=prefetch, consumed_samples=3 * done) as resumed:
            for want in expected[done : done + 3]:
                got = resumed.next_step()[0]
                assert torch.equal(got.tokens, want.tokens) and torch.equal(got.labels, want.labels)


def test_resume_exactly_at_an_epoch_boundary(windows):
    with loader(windows, mbs=11) as whole:
        epochs = [whole.next_step()[0].tokens for _ in range(3)]
    assert not torch.equal(epochs[0], epochs[1])
    for epoch in (1, 2):
        assert torch.equal(loader(windows, mbs=11, consumed_samples=11 * epoch).next_step()[0].tokens, epochs[epoch])


def test_d25_all_ranks_take_all_steps_whatever_is_left_of_an_epoch(tmp_path):
    """10 samples, micro-batch 2, dp 3, 20 steps: the data goes on with the next epoch."""
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(np.arange(41))
    samples = WindowSamples(IndexedDataset(tmp_path / "d"), 4, seed=0)
    assert len(samples) == 10
    ranks = [loader(samples, 2, 1, rank, 3) for rank in range(3)]
    starts = [int(row[0]) for _ in range(20) for rank in ranks for row in rank.next_step()[0].tokens]
    assert len(starts) == 120
    for epoch in range(12):
        assert sorted(starts[epoch * 10 : epoch * 10 + 10]) == list(range(0, 40, 4))


def test_d30_no_global_random_generator_is_touched(windows):
    states = []
    for prefetch in (0, 2):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        for samples in (windows, MockSamples(50, 4, seed=1)):
            with loader(samples, prefetch=prefetch) as source:
                _ = [source.next_step() for _ in range(3)]
        states.append((torch.rand(1).item(), np.random.rand(), random.random()))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert states == [(torch.rand(1).item(), np.random.rand(), random.random())] * 2


def test_eod_mask_hides_the_loss_of_inputs_that_end_a_document(windows):
    with loader(windows, mbs=11, eod=99, eod_mask_loss=True) as masked:
        batch = masked.next_step()[0]
    assert torch.equal(batch.loss_mask, (batch.tokens != 99).float()) and float(batch.loss_mask.min()) == 0.0
    assert bool((batch.labels == 99).any()), "the end itself is still to be learnt"
    with loader(windows, mbs=11, eod=99) as plain:
        assert float(plain.next_step()[0].loss_mask.min()) == 1.0
    with pytest.raises(ValueError, match="--eod-mask-loss"):
        loader(windows, eod_mask_loss=True)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("token", [100, -1])
def test_an_id_outside_the_vocabulary_names_sample_id_and_vocabulary(prefetch, token):
    class Wrong(Numbered):
        def __getitem__(self, g):
            return np.array([1, 2, token if g == 5 else 3])

    source = loader(Wrong(), mbs=2, vocab_size=100, prefetch=prefetch)
    source.next_step(), source.next_step()
    for _ in range(2):  # asking again fails again; it does not hang
        with pytest.raises(DataError, match=f"sample 5 holds token id {token}, but the vocabulary has 100 entries"):
            source.next_step()
    assert source.consumed_samples == 4
    source.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_any_error_of_the_samples_reaches_the_caller(prefetch):
    class Broken:
        def __getitem__(self, g):
            raise OSError("disk on fire")

    with loader(Broken(), prefetch=prefetch) as source, pytest.raises(OSError, match="disk on fire"):
        source.next_step()


def test_close_ends_the_thread_and_the_queue_bounds_it():
    read = []

    class Counting(Numbered):
        def __getitem__(self, g):
            read.append(g)
            return super().__getitem__(g)

    source = loader(Counting(), prefetch=2)
    assert source._thread is None, "no thread before it is needed"
    source.next_step()
    time.sleep(0.2)
    assert len(read) <= 4  # one taken, two queued, one waiting for room
    source.close()
    source.close()
    assert not any(thread.name == "batch-loader" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        source.next_step()


def test_waiting_is_measured_and_prefetch_hides_it():
    class Slow(Numbered):
        def __getitem__(self, g):
            time.sleep(0.05)
            return super().__getitem__(g)

    with loader(Slow()) as source:
        source.next_step()
        assert source.take_wait_seconds() >= 0.05 and source.wait_seconds == 0.0
    with loader(Slow(), prefetch=2) as source:
        source.next_step()
        source.take_wait_seconds()
        time.sleep(0.4)
        source.next_step()
        assert source.wait_seconds < 0.04


def test_wrong_sizes_are_refused():
    for wrong in ({"mbs": 0}, {"count": 0}, {"rank": 2, "size": 2}, {"rank": -1}, {"consumed_samples": -1},
                  {"mbs": 4, "batch_sizes": BatchSizes(16, (8, 2, 9))}):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            loader(Numbered(), **wrong)
