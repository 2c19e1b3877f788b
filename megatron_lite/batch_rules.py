"""Rules about batches: what a step is cut into, a batch size that grows (`--rampup-batch-size`), steps that are left out."""

from collections.abc import Callable, Iterator

from megatron_lite.planner.pipeline import AUTO, Pipeline
from megatron_lite.rampup import is_ramp
from megatron_lite.rules import Problem, Values, about, have, nearest, nearest_values
from megatron_lite.schedules import ASYNCHRONOUS

RAMP = "rampup_batch_size"


def batch(s: Values) -> Iterator[Problem]:
    """A step is whole microbatches on every data-parallel rank, and the run is at least one."""
    micro, full = s.micro_batch_size, s.global_batch_size
    first = s.rampup_batch_size[0] if is_ramp(s.rampup_batch_size, full) else full
    if have(full, s.train_samples) and s.train_samples < first:
        names = "train_samples global_batch_size" if first == full else f"train_samples {RAMP}"
        yield about(s, names, "the run would be shorter than a step", nearest_values(train_samples=[first]))
    if not have(micro, full, s.dp):
        return
    each = micro * s.dp
    if full % each:
        fix = nearest_values(
            global_batch_size=nearest(full, lambda n: n % each == 0),
            micro_batch_size=nearest(micro, lambda n: full % (n * s.dp) == 0),
        )
        text = f"{full} is not a multiple of {micro} x dp {s.dp} = {each}"
        yield about(s, "global_batch_size micro_batch_size", text, fix)


def rampup(s: Values, pipeline: Pipeline | None) -> Iterator[Problem]:
    """Every batch size on the way is whole microbatches, and the pipeline runs them."""
    ramp, full = s.rampup_batch_size, s.global_batch_size
    if ramp is None:
        return
    if len(ramp) != 3 or min(ramp) < 1:
        text = "takes three whole numbers from 1 on: the first batch size, what is added each time, and the samples it all takes"
        yield about(s, RAMP, text, "for example 16 8 1000")
        return
    if full is None:
        return
    if ramp[0] == full:
        yield about(s, RAMP, f"has no effect: it starts at --global-batch-size {full}", "drop it")
        return
    each = (s.micro_batch_size or 0) * (s.dp or 0) or 1
    if full % each:
        return  # `batch` says what is wrong
    if not is_ramp(ramp, full) or ramp[0] % each or ramp[1] % each:
        text = f"does not lead to --global-batch-size {full} in equal steps"
        text += f" of multiples of micro-batch size x dp = {each}" if each > 1 else ""
        yield about(s, RAMP, text, _nearest_ramp(ramp, full, each))
    elif pipeline is not None and s.pipeline_model_parallel_size != 1 and have(s.micro_batch_size, s.dp):
        yield from _pipelined(s, pipeline, each)


def _nearest_ramp(ramp: tuple[int, int, int], full: int, each: int) -> str:
    """The closest start and increment that work."""
    def closest(value: int, works: Callable[[int], bool]) -> list[int]:
        return [value] if works(value) else nearest(value, works)

    found = [(abs(start - ramp[0]) + abs(step - ramp[1]), start, step)
             for start in closest(ramp[0], lambda n: n % each == 0 and n < full)
             for step in closest(ramp[1], lambda n, start=start: n % each == 0 and (full - start) % n == 0)]  # fmt: skip
    if not found:
        return "drop it: there is no smaller batch"
    _, start, step = min(found)
    return f"nearest values that work: --rampup-batch-size {start} {step} {ramp[2]}"


def _pipelined(s: Values, pipeline: Pipeline, each: int) -> Iterator[Problem]:
    """Whether there are lists of actions for every number of microbatches on the way."""
    if s.pipeline_schedule == AUTO:
        text = "contradict each other: a schedule is chosen for one number of microbatches, a growing batch has several"
        yield about(s, f"pipeline_schedule {RAMP}", text, "name a schedule; --pipeline-split auto goes with any")
        return
    if s.pipeline_schedule in ASYNCHRONOUS:
        text = "contradict each other: the delays of an asynchronous pipeline are those of one number of microbatches"
        yield about(s, f"pipeline_schedule {RAMP}", text, "take a schedule that flushes (1f1b), or drop --rampup-batch-size")
        return
    start, increment, samples = s.rampup_batch_size
    bad = [size for size in range(start, s.global_batch_size, increment) if pipeline.problems(size // each)]
    if bad:
        later = bad[-1] + increment
        fix = f"nearest values that work: --rampup-batch-size {later} {increment} {samples}"
        text = f"a batch of {bad[0]} samples on the way does not run: {pipeline.problems(bad[0] // each)[0]}"
        yield about(s, RAMP, text, fix if later < s.global_batch_size else "drop it")


def skipping(s: Values) -> Iterator[Problem]:
    """Iterations that are left out lie within the run, and steps are single ones."""
    skipped = s.iterations_to_skip
    if skipped is None:
        return
    if s.pipeline_schedule in ASYNCHRONOUS and s.pipeline_model_parallel_size not in (None, 1):
        text = "contradict each other: the steps of an asynchronous pipeline overlap"
        yield about(s, "iterations_to_skip pipeline_schedule", text, "take a schedule that flushes (1f1b)")
    outside = [n for n in skipped if n < 1 or n > (s.train_iters or n)]
    if outside:
        last = f" to {s.train_iters}" if s.train_iters else " on"
        text = f"{outside[0]} is no iteration of the run, which are counted from 1{last}"
        yield about(s, "iterations_to_skip", text, "drop it")
