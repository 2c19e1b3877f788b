"""The batch size as a function of consumed samples: against Megatron's rule, against counting, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.arguments import parse
from megatron_lite.planner.report import dry_run_report
from megatron_lite.rampup import BatchSizes, is_ramp

TINY = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 40 --lr 1e-3 --mock-data "
        "--micro-batch-size 2")  # fmt: skip


@st.composite
def ramps(draw):
    start, increment, levels = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 7))
    return BatchSizes(start + increment * levels, (start, increment, draw(st.integers(1, 400))))


def megatrons(sizes, consumed):
    """The rule as Megatron's reference states it: equal parts of the samples, one increment after each."""
    start, increment, samples = sizes.ramp
    if consumed > samples:
        return sizes.full
    each = samples / ((sizes.full - start) // increment)
    return start + int(consumed / each + 1e-9) * increment


@given(sizes=ramps(), consumed=st.integers(0, 500))
def test_megatrons_rule(sizes, consumed):
    assert sizes.at(consumed) == megatrons(sizes, consumed)


def test_the_picture():
    sizes = BatchSizes(32, (8, 8, 600))
    assert [sizes.at(n) for n in (0, 199, 200, 399, 400, 599, 600, 10**9)] == [8, 8, 16, 16, 24, 24, 32, 32]
    assert list(sizes.sizes) == [8, 16, 24, 32] and list(BatchSizes(32).sizes) == [32] and BatchSizes(32).at(5) == 32


@settings(max_examples=200)
@given(sizes=st.one_of(ramps(), st.integers(1, 9).map(BatchSizes)), total=st.integers(0, 700))
def test_steps_and_samples_are_those_of_counting(sizes, total):
    consumed = [0]
    while consumed[-1] <= total:
        consumed.append(consumed[-1] + sizes.at(consumed[-1]))
    assert [sizes.samples(step) for step in range(len(consumed))] == consumed
    assert sizes.steps(total) == len(consumed) - 2  # the last one goes beyond the total


def test_large_runs_are_counted_at_once():
    sizes = BatchSizes(2048, (16, 16, 10**10))
    steps = sizes.steps(10**12)
    assert sizes.samples(steps) <= 10**12 < sizes.samples(steps + 1)


def test_which_numbers_lead_to_the_batch():
    assert is_ramp((8, 8, 600), 32) and is_ramp((8, 24, 1), 32)
    for wrong in ((8, 8), (8, 8, 0), (0, 8, 9), (8, 7, 9), (32, 8, 9), (40, 8, 9), None):
        assert not is_ramp(wrong, 32)
    assert not is_ramp((8, 8, 600), None)


def parsed(text, world=1):
    return parse(f"{TINY} {text}".split(), world)


def test_samples_give_the_iterations():
    config, problems = parsed("--global-batch-size 8 --rampup-batch-size 2 2 12 --train-samples 40")
    assert problems == [] and config.train.train_iters == 7  # 2 2 4 6 8 8 8
    assert config.train.batch_sizes.samples(7) <= 40 < config.train.batch_sizes.samples(8)


def test_a_dry_run_tells():
    config, problems = parsed("--global-batch-size 8 --rampup-batch-size 2 2 12 --train-samples 40 --dry-run")
    text = dry_run_report(config, config.grid)
    assert problems == [] and "at first 2 samples, 2 more each time until 12 samples are consumed" in text
    assert f"run: 7 steps = {config.train.batch_sizes.samples(7) * 8:,} tokens" in text


SAMPLES = "--global-batch-size 16 --train-samples 100"


@pytest.mark.parametrize("text, world, message", [
    (f"{SAMPLES} --rampup-batch-size 4 4", 1, "takes three whole numbers"),
    (f"{SAMPLES} --rampup-batch-size 4 x 3", 1, "--rampup-batch-size 4 x 3: is not a whole number"),
    (f"{SAMPLES} --rampup-batch-size 4 2.0 3", 1, "nearest value that works: 2"),
    (f"{SAMPLES} --rampup-batch-size 4 4 0", 1, "takes three whole numbers"),
    (f"{SAMPLES} --rampup-batch-size 16 4 9", 1, "has no effect: it starts at --global-batch-size 16; drop it"),
    (f"{SAMPLES} --rampup-batch-size 4 5 50", 1, "nearest values that work: --rampup-batch-size 4 4 50"),
    (f"{SAMPLES} --rampup-batch-size 5 4 50", 1, "--rampup-batch-size 4 4 50"),
    (f"{SAMPLES} --rampup-batch-size 20 4 50", 1, "nearest values that work: --rampup-batch-size 14 2 50"),
    (f"{SAMPLES} --rampup-batch-size 4 4 50", 4, "of multiples of micro-batch size x dp = 8; nearest values that work: "
                                                 "--rampup-batch-size 8 8 50"),
    ("--global-batch-size 16 --train-iters 9 --rampup-batch-size 4 4 50", 1,
     "--rampup-batch-size 4 4 50 --train-iters 9: contradict each other"),
    (f"{SAMPLES} --rampup-batch-size 4 4 50 --lr-warmup-iters 2", 1, "give it in samples"),
    (f"{SAMPLES} --rampup-batch-size 4 4 50 --lr-decay-iters 4", 1, "give it in samples"),
    ("--global-batch-size 16 --train-samples 3 --rampup-batch-size 4 4 50", 1, "shorter than a step"),
    (f"{SAMPLES} --rampup-batch-size 4 4 50 --pipeline-model-parallel-size 2 --pipeline-schedule auto", 2, "name a schedule"),
    (f"{SAMPLES} --rampup-batch-size 4 4 50 --pipeline-model-parallel-size 2 --pipeline-schedule pipedream "
     "--untie-embeddings-and-output-weights", 2, "take a schedule that flushes"),
    (f"{SAMPLES} --rampup-batch-size 2 2 50 --pipeline-model-parallel-size 2 --num-layers 4 "
     "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 4", 2,
     "a batch of 2 samples on the way does not run"),
    ("--global-batch-size 16 --train-iters 4 --iterations-to-skip 2 5", 1,
     "--iterations-to-skip 2 5: 5 is no iteration of the run, which are counted from 1 to 4"),
    ("--global-batch-size 16 --train-iters 4 --iterations-to-skip 0", 1, "0 is no iteration"),
    ("--global-batch-size 16 --train-iters 4 --iterations-to-skip 2 --pipeline-model-parallel-size 2 --pipeline-schedule "
     "pipedream --untie-embeddings-and-output-weights", 2, "the steps of an asynchronous pipeline overlap"),
])  # fmt: skip
def test_what_cannot_run_is_refused_in_words(text, world, message):
    _, problems = parsed(text, world)
    assert any(message in str(problem) for problem in problems), [str(problem) for problem in problems]
    assert len(problems) == 1


@pytest.mark.parametrize("text, world", [
    (f"{SAMPLES} --rampup-batch-size 4 4 50", 1), (f"{SAMPLES} --rampup-batch-size 4 4 50", 2),
    (f"{SAMPLES} --rampup-batch-size 8 8 1000", 4),
    (f"{SAMPLES} --rampup-batch-size 4 4 50 --lr-warmup-samples 20 --lr-decay-samples 80", 1),
    (f"{SAMPLES} --rampup-batch-size 4 4 50 --pipeline-model-parallel-size 2 --pipeline-split auto", 2),
    (f"{SAMPLES} --rampup-batch-size 4 4 50 --pipeline-model-parallel-size 2 --pipeline-schedule zbv --num-layers 4", 2),
])  # fmt: skip
def test_what_can_run_is_not(text, world):
    assert parsed(text, world)[1] == []
