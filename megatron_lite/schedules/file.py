"""A schedule of one's own: a text file with the list of every pipeline rank, checked and explained by line.

    placement v                  where the chunks lie: loop (if the line is left out), v or bidirectional (actions.py)
    F0 F0.1 B0.1 B0 W0.1 W0      rank 0, a microbatch after each letter, `.1`: of chunk 1; # starts a comment
    r1: F0 F0.1 BW0.1 BW0        rank 1; a line may begin with its rank

`tools/draw_schedule.py --schedule zbv --out mine.txt` writes one to start from.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_lite.schedules.actions import (
    PLACEMENTS,
    Action,
    Placement,
    ScheduleError,
    format_schedule,
    parse_schedule,
    schedule_lines,
)
from megatron_lite.schedules.check import check
from megatron_lite.schedules.sizes import HOW_MANY, RANKS

HEADER = "placement"


class ScheduleFile(NamedTuple):
    """What a file says. `lines`: where the list of each rank stands in it."""

    path: str
    kind: str  # of the placement
    schedule: list[list[Action]]
    lines: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        return 1 + max(action.chunk for actions in self.schedule for action in actions)

    @property
    def num_microbatches(self) -> int:
        return 1 + max(action.microbatch for actions in self.schedule for action in actions)

    def placement(self) -> Placement:
        """Where its stages lie; ScheduleError where they cannot lie so."""
        placement = Placement(self.kind, len(self.schedule), self.num_chunks)
        if problems := placement.problems():
            raise ScheduleError(f"{self.path}: {'; '.join(problems)}")
        return placement

    def problems(self, pp_size: int, num_microbatches: int) -> list[str]:
        """Why it cannot run on so many ranks with so many microbatches; the first bad action by its line.

        ScheduleError where the chunks cannot lie as it says.
        """
        here, ranks, total, placement = self.path, len(self.schedule), self.num_microbatches, self.placement()
        if ranks != pp_size:
            return [f"{here} holds the lists of {ranks} ranks, {RANKS} is {pp_size}; {ranks} would work"]
        if total != num_microbatches:
            said = f"{here} runs {total} microbatches, the run has {num_microbatches} {HOW_MANY}; {total} would work"
            return [said + self._first_beyond(num_microbatches)]
        if self.kind == "bidirectional" and total % 2:
            return [f"{here} runs {total} microbatches: two directions share them evenly; {total + 1} would work"]
        try:
            check(self.schedule, placement, num_microbatches)
        except ScheduleError as error:
            line = "" if error.rank is None else f", line {self.lines[error.rank]}"
            return [f"{here}{line}: {error}"]
        return []

    def _first_beyond(self, num_microbatches: int) -> str:
        for line, actions in zip(self.lines, self.schedule, strict=True):
            for index, action in enumerate(actions):
                if action.microbatch >= num_microbatches:
                    return f" (line {line}, action {index}: {action})"
        return ""


def parse_file(text: str, path: str) -> ScheduleFile:
    """The file at `path`, which holds `text`; ScheduleError with the line that cannot be read."""
    lines, kind = schedule_lines(text), "loop"
    if lines and lines[0][1].split()[0] == HEADER:
        number, words = lines[0][0], lines[0][1].split()
        if len(words) != 2 or words[1] not in PLACEMENTS:
            raise ScheduleError(f"{path}, line {number}: {lines[0][1].strip()!r}: choose {HEADER} {', '.join(PLACEMENTS)}")
        kind, lines = words[1], lines[1:]
        text = "\n".join("" if at == number else line for at, line in enumerate(text.splitlines(), 1))
    try:
        schedule = parse_schedule(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}, {error}") from None
    for rank, actions in enumerate(schedule):
        if not actions:
            raise ScheduleError(f"{path}, line {lines[rank][0]}: rank {rank} has no actions")
    if not schedule:
        raise ScheduleError(f"{path} holds no actions; write a line such as F0 F1 BW0 BW1 for every pipeline rank")
    return ScheduleFile(path, kind, schedule, tuple(number for number, _ in lines))


def read_schedule(path: str) -> ScheduleFile:
    """Read a file; ScheduleError, in words, where that fails."""
    try:
        return parse_file(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path} is no text file") from None


def format_file(schedule: Sequence[Sequence[Action]], placement: Placement) -> str:
    """The text of a file; the inverse of `parse_file`."""
    return f"{HEADER} {placement.kind}\n{format_schedule(schedule)}\n"
