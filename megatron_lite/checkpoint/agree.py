"""All ranks succeed, or all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_lite.comm.collectives import gather_objects
from megatron_lite.comm.mesh import Axis
from megatron_lite.errors import ReportedError

T = TypeVar("T")

# An error text stays readable when a thousand tensors are wrong.
SHOWN = 20


class CheckpointError(ReportedError):
    """What is wrong with a checkpoint: a headline and all problems that were found, each naming its tensor or file."""

    def __init__(self, headline: str, problems: list[str] | None = None):
        self.headline = headline
        self.problems = list(problems or [])
        shown = [f"  {problem}" for problem in self.problems[:SHOWN]]
        hidden = len(self.problems) - len(shown)
        super().__init__("\n".join([headline, *shown, *([f"  ... and {hidden} more"] if hidden else [])]))

    def __reduce__(self):
        # The default would rebuild the error from its text and lose the list; errors travel between processes.
        return type(self), (self.headline, self.problems)


class DamagedCheckpoint(CheckpointError):
    """The bytes of a checkpoint are not those that were written, or not there: an older one may serve."""


def problems_of(error: Exception) -> list[str]:
    """An error as lines: the problems of a CheckpointError, a ReportedError's text, or `TypeName: text`."""
    if isinstance(error, CheckpointError):
        return error.problems or [error.headline]
    if isinstance(error, ReportedError):
        return [str(error)]
    return [f"{type(error).__name__}: {error}"]


def agree(work: Callable[[], T], axis: Axis, doing: str) -> list[T]:
    """Run `work` here and on every rank of `axis`; return what all of them returned, in group order. Collective.

    `work` must hold no collective. If it raises on any rank, every rank raises one CheckpointError that names the ranks
    and causes, so that nobody waits for a rank that gave up and nobody goes on as if all were well. It is a
    DamagedCheckpoint if that is all that any rank found.
    """
    value, found, cause = None, [], None
    try:
        value = work()
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        found, cause = problems_of(error), error
    answers = gather_objects((found, isinstance(cause, DamagedCheckpoint), value), axis)
    kind = DamagedCheckpoint if all(damaged for problems, damaged, _ in answers if problems) else CheckpointError
    raise_together([problems for problems, _, _ in answers], axis, doing, cause, kind)
    return [value for _, _, value in answers]


def raise_together(found: list[list[str]], axis: Axis, doing: str, cause: Exception | None = None,
                   kind: type[CheckpointError] = CheckpointError) -> None:  # fmt: skip
    """One error of all ranks' problems (in group order), the same on each; nothing if there are none."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problems in zip(axis.ranks, found, strict=True):
        for problem in problems:
            ranks = ranks_of.setdefault(problem, [])
            if rank not in ranks:  # one tensor may be asked for block by block
                ranks.append(rank)
    if ranks_of:
        raise kind(f"{doing} failed", [f"{name_ranks(r)}: {p}" for p, r in sorted(ranks_of.items())]) from cause


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2 and 13 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more}"
