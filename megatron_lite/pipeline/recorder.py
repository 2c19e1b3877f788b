"""When things happen on one rank, without ever stopping the device for it.

    HostClock    a stamp is the time itself: CLOCK_MONOTONIC, the same for all processes of a host
    CudaClock    a stamp is an event in the stream; it becomes a time once the step is over

The executor stamps its waits in every step (the bubble on the log line). A `Recorder` keeps what a traced step did besides:
every action, and the phases of the step around them; or it names them for torch's profiler. Without one nothing else is
stamped or named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

from megatron_lite.schedules.actions import Action


class HostClock:
    """Stamps are seconds."""

    def begin(self) -> None:
        """Called when a traced step begins."""

    def stamp(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        """Seconds from one stamp to another."""
        return end - start

    def when(self, stamp: float) -> float:
        """A stamp of the step that `begin` began, as `time.perf_counter` of this host would have shown it."""
        return stamp


class CudaClock:
    """Stamps are events of the current stream. Only events that have happened can be read."""

    def begin(self) -> None:
        # The last step was read from the device, so the stream is empty and the event happens now.
        self.zero, self.zero_event = time.perf_counter(), self.stamp()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def when(self, stamp: torch.cuda.Event) -> float:
        return self.zero + self.between(self.zero_event, stamp)


Clock = HostClock | CudaClock


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


class Recorder:
    """What a traced step did on this rank, in stamps: `actions` with start and end, `phases` by name with start and end.
    While it is `naming`, actions and phases are ranges in the profile that torch takes meanwhile."""

    def __init__(self, clock: Clock):
        self.clock, self.recording, self.naming = clock, False, False
        self.actions: list[tuple[Action, object, object]] = []
        self.phases: list[tuple[str, object, object]] = []

    def begin(self) -> None:
        self.actions, self.phases, self.recording = [], [], True
        self.clock.begin()

    def end(self) -> None:
        self.recording = False

    def named(self, name: str) -> AbstractContextManager:
        """Around work that a profile shows under this name."""
        return record_function(name) if self.naming else nullcontext()

    def action(self, action: Action) -> AbstractContextManager:
        """Around an action of the list."""
        return self.named(f"{action.kind} chunk {action.chunk} microbatch {action.microbatch}")


@contextmanager
def phase(recorder: Recorder | None, name: str) -> Iterator[None]:
    """Around a part of the step: its start and end if the step is recorded, its name if it is profiled."""
    if recorder is None or not (recorder.recording or recorder.naming):
        yield
        return
    start = recorder.clock.stamp()
    with recorder.named(name):
        yield
    if recorder.recording:
        recorder.phases.append((name, start, recorder.clock.stamp()))
