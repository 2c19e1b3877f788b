"""Rules about logs, traces and profiles: which flags say nothing here, and which iterations and ranks there are to look at."""

from collections.abc import Callable, Iterator

from megatron_lite.rules import Problem, Values, about, have, nearest_values
from megatron_lite.schedules import ASYNCHRONOUS

# Flags that do nothing: (flags, when, why and what would give them an effect). As rules.INERT.
INERT: tuple[tuple[str, Callable[[Values], bool], str], ...] = (
    ("wandb_exp_name wandb_entity wandb_group wandb_tags wandb_save_dir",
     lambda s: s.wandb_project is None, "needs --wandb-project"),
    ("trace_start trace_steps", lambda s: s.trace_dir is None, "needs --trace-dir"),
    ("trace_dir", lambda s: s.pipeline_schedule in ASYNCHRONOUS and s.pipeline_model_parallel_size != 1,
     "a trace shows single steps, and an asynchronous pipeline does not end them"),
    ("trace_start", lambda s: have(s.trace_start, s.train_iters) and s.trace_start > s.train_iters,
     "the run ends before that iteration"),
    ("profile_step_start profile_step_end profile_ranks", lambda s: not s.profile, "needs --profile"),
    ("profile", lambda s: s.pipeline_schedule in ASYNCHRONOUS and s.pipeline_model_parallel_size != 1,
     "a profile shows single steps, and an asynchronous pipeline does not end them"),
)  # fmt: skip


def inert(s: Values, given: frozenset[str]) -> Iterator[Problem]:
    """Flags that say nothing here."""
    for names, without_effect, why in INERT:
        for name in names.split():
            if name in given and without_effect(s):
                yield about(s, name, f"has no effect: {why}", "drop it")


def profile(s: Values) -> Iterator[Problem]:
    """The window is at least one iteration of the run, and the ranks exist."""
    start, end = s.profile_step_start, s.profile_step_end
    if not s.profile:
        return
    if have(start, end) and end <= start:
        text = "the profile would end before it begins"
        yield about(s, "profile_step_start profile_step_end", text, nearest_values(profile_step_end=[start + 1]))
    if have(start, s.train_iters) and start > s.train_iters > 0:
        text = "the run ends before that iteration"
        yield about(s, "profile_step_start train_iters", text, nearest_values(profile_step_start=[s.train_iters]))
    if [rank for rank in s.profile_ranks if not 0 <= rank < s.world]:
        text = "there is no such rank"
        yield about(s, "profile_ranks world", text, f"ranks are 0 to {s.world - 1}")
