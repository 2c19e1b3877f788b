"""The sizes a schedule is built for, and the words in which impossible ones are refused."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

CHUNKS = "--num-virtual-stages-per-pipeline-rank"
RANKS = "--pipeline-model-parallel-size"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
HOW_MANY = "microbatches per step (--global-batch-size / --micro-batch-size / data-parallel size)"


class Sizes(NamedTuple):
    pp_size: int
    num_chunks: int
    num_microbatches: int
    group_size: int | None = None  # only interleaved has groups; None is its default


def nearest(value: int, works: Callable[[int], bool], among: Iterable[int]) -> str:
    """The nearest value below and above that works, as words: `8 or 12`; `none` if there is none."""
    valid = [number for number in among if works(number)]
    below = [number for number in valid if number < value][-1:]
    above = [number for number in valid if number > value][:1]
    return " or ".join(map(str, below + above)) or "none"


def one_chunk_problems(sizes: Sizes) -> list[str]:
    if sizes.num_chunks == 1:
        return []
    return [f"{CHUNKS} {sizes.num_chunks}: this schedule runs 1 chunk per rank; 1 would work"]


def two_chunk_problems(sizes: Sizes) -> list[str]:
    if sizes.num_chunks == 2:
        return []
    return [f"{CHUNKS} {sizes.num_chunks}: this schedule runs 2 chunks per rank; 2 would work"]
