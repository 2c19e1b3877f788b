"""torch's profiler over a window of iterations (--profile): what each operator and kernel took, and in which action.

    --profile-step-start 10 --profile-step-end 12       iterations 10 and 11, as the log line counts them
    --profile-ranks 0 7                                 these ranks; the others only wait for them

The window becomes one Chrome trace per rank (ui.perfetto.dev, chrome://tracing), FOLDER/iter_0000010_to_0000011_rank_00000.json,
where FOLDER is `profile` in --trace-dir, else in --save, else in the working folder. Beside torch's own entries it has ranges
for the iterations ("iteration 10"), for the actions of the pipeline ("F chunk 0 microbatch 3"), and for the other phases of a
step (data, reduce, norm, optimizer). Profiled iterations are slower: their log lines say nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_lite.config import Config
from megatron_lite.errors import ReportedError
from megatron_lite.training.setup import Trainer


class ProfileError(ReportedError):
    """A profile cannot be written."""


def profile_folder(config: Config) -> Path:
    return Path(config.logging.trace_dir or config.checkpoint.save or ".") / "profile"


class Profiler:
    """Begun and ended around every iteration; on ranks that are not profiled it does nothing."""

    def __init__(self, trainer: Trainer, iteration: int, say: Callable[[str], None]):
        """`iteration`: done before this run."""
        logging, self.mesh, self.recorder = trainer.config.logging, trainer.mesh, trainer.recorder
        self.window = range(max(logging.profile_step_start, iteration + 1), logging.profile_step_end)
        self.mine = trainer.mesh.rank in logging.profile_ranks
        self.folder, self.say = profile_folder(trainer.config), say
        self.profile: profile | None = None  # while it runs
        self.iterations: list[int] = []  # that are in it
        if not self.window:
            say(f"nothing is profiled: --profile-step-end {logging.profile_step_end} is past, iteration {iteration} is done")
        elif self.mine:
            self._attempt(lambda: self.folder.mkdir(parents=True, exist_ok=True))

    def begin(self, iteration: int) -> None:
        """`iteration` counts from 1, as on the log line."""
        if not self.mine or iteration not in self.window:
            return
        if self.profile is None:
            activities = [ProfilerActivity.CPU]
            if self.mesh.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=activities)
            self.profile.start()
            self.recorder.naming = True
        self.range = self.recorder.named(f"iteration {iteration}")
        self.range.__enter__()

    def end(self, iteration: int) -> None:
        """The iteration is over; the last of the window ends the profile."""
        if self.profile is None:
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)  # what the iteration launched belongs to it
        self.range.__exit__(None, None, None)
        self.iterations.append(iteration)
        if iteration + 1 not in self.window:
            self.close()

    def close(self) -> None:
        """End the profile, if it is running, and write what it has: the run may end within the window."""
        if self.profile is None:
            return
        finished, self.profile, self.recorder.naming = self.profile, None, False
        finished.stop()
        if self.iterations:
            name = f"iter_{self.iterations[0]:07d}_to_{self.iterations[-1]:07d}_rank_{self.mesh.rank:05d}.json"
            self._attempt(lambda: finished.export_chrome_trace(str(self.folder / name)))
            self.say(f"profile of iterations {self.iterations[0]} to {self.iterations[-1]} written: {self.folder / name}")

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProfileError(f"--profile: {self.folder}: {reason}") from error
