"""A field that is a flag."""

from dataclasses import field
from typing import Any


def flag(default: Any, legend: str, **options: Any) -> Any:
    """A dataclass field that is also a command-line flag.

    `options`: `choices`, `nargs`, `type` as in argparse; `alias`, another spelling; `stands_for` = (switch, value), a
    switch that means this value.
    """
    return field(default=default, metadata={"help": legend, **options})
