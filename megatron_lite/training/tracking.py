"""The run in Weights & Biases: what it was, its numbers over iterations, what is worth an alarm, and never a secret.

Its id lies in the checkpoint: a run that goes on there goes on here. WANDB_MODE and W&B's other variables count as ever;
the key comes from W&B's own login, never from a flag.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")  # of environment variables whose values go nowhere
SECRET_NAME = re.compile(r"(^|_)(token|password|passwd|secret|credentials?|(api|access|private)_key)$")
# What the page of a run shows as its result, where its last value would mislead.
SUMMARIES = {"lm loss": "min", "lm loss validation*": "min", "tokens-per-second": "max", "mem-max-allocated-bytes": "max"}
LONGEST_TITLE = 64  # characters of an alert's title that W&B takes


class WandbSink:
    """One W&B run. Given its id from a checkpoint, the run goes on instead of a second one."""

    def __init__(self, project: str, name: str | None, entity: str | None, directory: str | None,
                 config: Mapping[str, Any], run_id: str | None = None, group: str | None = None,
                 tags: Sequence[str] | None = None):  # fmt: skip
        import wandb

        directory = directory or "."
        os.makedirs(directory, exist_ok=True)  # W&B would take a temporary folder instead, and say so in passing
        options = {"project": project, "name": name, "entity": entity, "group": group, "tags": tags, "dir": directory,
                   "config": without_secrets(config),
                   "settings": {"init_timeout": 30.0, "login_timeout": 30}}  # fmt: skip
        if run_id is not None:
            options |= {"id": run_id, "resume": "allow"}
        try:
            self.run = wandb.init(**options)
        except wandb.errors.Error as error:  # no key, no network: no reason not to train
            reason = str(error).strip().splitlines()[0]
            print(f"W&B: {reason} (logging offline; `wandb sync` sends it later)", file=sys.stderr)
            self.run = wandb.init(**options, mode="offline")
        # No explicit step: W&B drops what comes at a step it has seen, and a run resumed from its last checkpoint goes
        # over some iterations twice.
        self.run.define_metric("iteration")
        self.run.define_metric("*", step_metric="iteration")
        for key, summary in SUMMARIES.items():
            self.run.define_metric(key, step_metric="iteration", summary=summary)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        self.run.log({"iteration": iteration, **values})

    def event(self, iteration: int, kind: str, text: str) -> None:
        """A warning is an alert; W&B sends one of the same title at most every five minutes."""
        import wandb

        if kind == "warning":
            self.run.alert(title=f"{self.run.name or self.run.id}: {kind}"[:LONGEST_TITLE], text=f"iteration {iteration}: {text}",
                           level=wandb.AlertLevel.WARN, wait_duration=300)  # fmt: skip

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # closed on the way out of an error: the run is to show as failed
        self.run.finish(exit_code=int(failed))


def login_missing() -> str | None:
    """Why W&B would send nothing, where that is known without asking the network: nobody is logged in."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "run") or os.environ.get("WANDB_API_KEY"):
        return None
    import wandb

    try:
        if wandb.login(prompt=False):
            return None
    except wandb.errors.Error:
        pass
    return "W&B: nobody is logged in (`wandb login`, or WANDB_API_KEY): logging offline; `wandb sync` sends it later"


def without_secrets(value: Any) -> Any:
    """A copy of nested settings without those that are named like a secret, in which no text holds the value of a secret
    environment variable."""
    secrets = [v for k, v in os.environ.items() if k.upper().endswith(SECRET_ENDINGS) and len(v) >= 8]
    if isinstance(value, Mapping):
        return {key: without_secrets(inner) for key, inner in value.items() if not SECRET_NAME.search(str(key).lower())}
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner) for inner in value]
    for secret in secrets:
        value = value.replace(secret, "***") if isinstance(value, str) else value
    return value


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """The values with None for what JSON has no number for."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
