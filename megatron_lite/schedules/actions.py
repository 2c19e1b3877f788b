"""A pipeline schedule is data: for each rank the list of actions it runs, in order.

    F    forward of one microbatch through one chunk
    B    backward with respect to the input (what the previous stage waits for)
    W    backward with respect to the weights (nobody waits for it: it may run later)
    BW   both at once, the ordinary backward

Splitting B from W is the idea of Zero Bubble Pipeline Parallelism (Qi et al., 2023). A model is cut into stages; a
rank holds one chunk per turn of the pipeline, and a `Placement` says which stage each chunk is:

    loop, 4 ranks, 2 chunks: chunk 0 = stages 0 1 2 3, chunk 1 = stages 4 5 6 7     (Narayanan et al., 2021)
    v,    4 ranks, 2 chunks: chunk 0 = stages 0 1 2 3, chunk 1 = stages 7 6 5 4     (ZBV: first and last on rank 0)
    bidirectional, 4 ranks:  chunk 0 = stages 0 1 2 3, chunk 1 = stages 3 2 1 0     (DualPipe: DeepSeek-AI, 2024)

A bidirectional placement is two pipelines over the same ranks, one in each direction. Every stage lies on two ranks,
whose gradients have to be summed (`mirror`), and each pipeline runs its half of the microbatches (`microbatches`).

Everything about a run follows from the two: what an action needs (`needs`), what it receives and sends (`received`,
`sent`). They ask a placement only for the neighbours of a place, so none of them knows the kinds of placement.

As text, `F2` is the forward of microbatch 2 and `F2.1` the same on chunk 1; a file has one line per rank.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

PARTS = {"F": ("F",), "B": ("B",), "W": ("W",), "BW": ("B", "W")}  # action kind -> what it gets done
PLACEMENTS = ("loop", "v", "bidirectional")
ACTION_TEXT = re.compile(r"(BW|F|B|W)(\d+)(?:\.(\d+))?")
LINE_LABEL = re.compile(r"\s*(?:rank\s*|r)?(\d+)\s*:")


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run; the message names the first bad action, `rank` whose it is."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class Action(NamedTuple):
    """One thing a rank does: `kind` (F, B, W or BW) of `microbatch` on its `chunk`."""

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS[self.kind]


class Place(NamedTuple):
    """Where a stage lies: `chunk` of pipeline `rank`."""

    rank: int
    chunk: int


class Event(NamedTuple):
    """One part (F, B or W) of one microbatch is done at a place."""

    part: str
    rank: int
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{Action(self.part, self.chunk, self.microbatch)} of rank {self.rank}"


class Message(NamedTuple):
    """What one place hands to a place on another rank: an activation forwards or a gradient backwards."""

    kind: str
    source: Place
    target: Place
    microbatch: int


class Placement(NamedTuple):
    """Which stage each chunk of each rank is.

    loop             stage = chunk * p + rank
    v                rank for chunk 0, 2p - 1 - rank for chunk 1
    bidirectional    rank for chunk 0, p - 1 - rank for chunk 1: each chunk is a stage of a pipeline of its own
    """

    kind: str
    pp_size: int
    num_chunks: int = 1

    @property
    def chunks_per_share(self) -> int:
        """Chunks that make up a rank's share, one p-th of the model: all of them, or one where stages lie twice."""
        return 1 if self.kind == "bidirectional" else self.num_chunks

    @property
    def num_stages(self) -> int:
        return self.pp_size * self.chunks_per_share

    def problems(self) -> list[str]:
        """What makes this placement impossible, in words; empty when nothing does."""
        found = []
        if self.kind not in PLACEMENTS:
            found.append(f"placement {self.kind!r} is unknown; choose from {', '.join(PLACEMENTS)}")
        if self.pp_size < 1 or self.num_chunks < 1:
            found.append(f"a placement of {self.pp_size} ranks x {self.num_chunks} chunks is empty; both must be >= 1")
        if self.kind == "v" and self.num_chunks != 2:
            found.append(f"a v placement folds the pipeline once: it has 2 chunks per rank, not {self.num_chunks}")
        if self.kind == "bidirectional" and self.num_chunks != 2:
            found.append(f"a bidirectional placement has 2 chunks per rank, one each way, not {self.num_chunks}")
        if self.kind == "bidirectional" and self.pp_size % 2:
            found.append(f"a bidirectional placement pairs ranks r and p-1-r: p must be even, not {self.pp_size}")
        return found

    def stage(self, rank: int, chunk: int) -> int:
        if chunk == 1 and self.kind != "loop":
            return self.num_stages - 1 - rank
        return chunk * self.pp_size + rank

    def where(self, stage: int, direction: int = 0) -> Place:
        """The place of a stage; of a bidirectional placement, the one in the pipeline of chunk `direction`."""
        chunk, rank = (direction, stage) if self.kind == "bidirectional" else divmod(stage, self.pp_size)
        return Place(self.pp_size - 1 - rank if chunk == 1 and self.kind != "loop" else rank, chunk)

    def previous(self, rank: int, chunk: int) -> Place | None:
        """The place whose output this one takes; None for the first stage, which takes tokens."""
        stage = self.stage(rank, chunk)
        return self.where(stage - 1, chunk) if stage > 0 else None

    def next(self, rank: int, chunk: int) -> Place | None:
        """The place that takes this one's output; None for the last stage, which makes the loss."""
        stage = self.stage(rank, chunk)
        return self.where(stage + 1, chunk) if stage + 1 < self.num_stages else None

    def mirror(self, rank: int, chunk: int) -> Place | None:
        """The other place with the same stage, whose gradients are summed with this one's; None if there is none."""
        return Place(self.pp_size - 1 - rank, 1 - chunk) if self.kind == "bidirectional" else None

    def microbatches(self, chunk: int, num_microbatches: int) -> range:
        """The microbatches that go through a chunk: all, or with two pipelines the first half and the second half.

        A microbatch keeps its number in the step whichever way it goes: of 8, chunk 0 runs 0..3 and chunk 1 runs 4..7.
        """
        half = (num_microbatches + 1) // 2
        if self.kind != "bidirectional":
            return range(num_microbatches)
        return range(half, num_microbatches) if chunk else range(half)


# ---------------------------------------------------------------------------------------------------------------------
# What an action waits for, and what travels because of it


def needs(action: Action, rank: int, placement: Placement) -> list[Event]:
    """What must come first: for F the previous stage's F, for B its own F and the next stage's B, for W its B."""
    chunk, microbatch = action.chunk, action.microbatch
    events = []
    if "F" in action.parts and (place := placement.previous(rank, chunk)):
        events.append(Event("F", *place, microbatch))
    if "B" in action.parts:
        events.append(Event("F", rank, chunk, microbatch))
        if place := placement.next(rank, chunk):
            events.append(Event("B", *place, microbatch))
    elif "W" in action.parts:
        events.append(Event("B", rank, chunk, microbatch))
    return events


def gives(action: Action, rank: int) -> list[Event]:
    """The events that have happened once `action` has run on `rank`."""
    return [Event(part, rank, action.chunk, action.microbatch) for part in action.parts]


def received(action: Action, rank: int, placement: Placement) -> Message | None:
    """The message `action` waits for; None if it needs nothing, or only something made on its own rank."""
    here = Place(rank, action.chunk)
    if "F" in action.parts:
        kind, place = "activation", placement.previous(*here)
    elif "B" in action.parts:
        kind, place = "gradient", placement.next(*here)
    else:
        return None
    return Message(kind, place, here, action.microbatch) if place and place.rank != rank else None


def sent(action: Action, rank: int, placement: Placement) -> Message | None:
    """The message `action` causes; None if its result is the loss, ends here, or is used on its own rank."""
    here = Place(rank, action.chunk)
    if "F" in action.parts:
        kind, place = "activation", placement.next(*here)
    elif "B" in action.parts:
        kind, place = "gradient", placement.previous(*here)
    else:
        return None
    return Message(kind, here, place, action.microbatch) if place and place.rank != rank else None


def overlap_pairs(actions: Sequence[Action]) -> frozenset[int]:
    """Indexes of every F that may run at the same time as the BW of another chunk that follows it at once (DualPipe).

    Not the rank's first backward: it comes from ranks which may still wait for that very F.
    """
    pairs, seen_backward = [], False
    for index, (action, after) in enumerate(zip(actions, actions[1:])):  # noqa: B905 (one shorter by design)
        seen_backward = seen_backward or "B" in action.parts
        if seen_backward and (action.kind, after.kind) == ("F", "BW") and action.chunk != after.chunk:
            pairs.append(index)
    return frozenset(pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Text form


def parse_action(text: str) -> Action:
    """`F2` -> Action("F", 0, 2); `BW2.1` -> Action("BW", 1, 2)."""
    match = ACTION_TEXT.fullmatch(text)
    if not match:
        raise ScheduleError(f"{text!r} is no action; write F2, B2, W2 or BW2, and F2.1 for microbatch 2 of chunk 1")
    kind, microbatch, chunk = match.groups()
    return Action(kind, int(chunk or 0), int(microbatch))


def schedule_lines(text: str) -> list[tuple[int, str]]:
    """(number, line without its comment) of every line that says something."""
    lines = [(number, raw.split("#")[0]) for number, raw in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line.strip()]


def parse_schedule(text: str) -> list[list[Action]]:
    """One line per rank, in rank order. A line may begin with its rank (`r0:`); # starts a comment."""
    schedule: list[list[Action]] = []
    for number, line in schedule_lines(text):
        if label := LINE_LABEL.match(line):
            if int(label[1]) != len(schedule):
                raise ScheduleError(f"line {number} is labelled rank {label[1]}, but rank {len(schedule)} comes next")
            line = line[label.end() :]
        try:
            schedule.append([parse_action(word) for word in line.split()])
        except ScheduleError as error:
            raise ScheduleError(f"line {number} (rank {len(schedule)}): {error}") from None
    return schedule


def format_schedule(schedule: Sequence[Sequence[Action]]) -> str:
    """The inverse of `parse_schedule`. With more than one chunk every action names its own, chunk 0 too."""
    many = any(action.chunk for actions in schedule for action in actions)
    lines = []
    for rank, actions in enumerate(schedule):
        words = [f"{a.kind}{a.microbatch}.{a.chunk}" if many else str(a) for a in actions]
        lines.append(" ".join([f"r{rank}:", *words]))
    return "\n".join(lines)
