"""`--use-checkpoint-args`: settings that come from a checkpoint, where the command line does not contradict them."""

from collections.abc import Mapping
from typing import Any

from megatron_lite.errors import ReportedError
from megatron_lite.rules import Problem, flag_name

# Taken where not given; a run may have its own.
OPEN = ("seq_length", "tokenizer_model", "vocab_file", "merge_file")


def inherit(given: Mapping[str, Any], preset: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """(settings that the checkpoint in `--load` adds, what contradicts it). Nothing without the flag or without --load.

    `given`: fields that flags set; `preset`: those that `--model` sets. Both may repeat what the checkpoint says.
    """
    if not given.get("use_checkpoint_args") or given.get("load") is None:
        return {}, []
    from megatron_lite.training.architecture import stored_settings  # torch: only for who asks for it

    place = f"--load {given['load']}"
    try:
        stored = stored_settings(given["load"], given.get("load_iteration"))
    except ReportedError as error:
        return {}, [Problem((place, "--use-checkpoint-args"), str(error), "give the model's flags for a first start")]
    problems = []
    for name, value in (preset | given).items():
        stored_value = ordinary(stored, given) if name == "vocab_size" else stored.get(name, value)
        if name in OPEN or stored_value == value or name not in stored:
            continue
        shown = spelled(name, value) if name in given else f"--model {given['model']}"
        was = "without it" if stored_value in (None, False) else f"with {spelled(name, stored_value)}"
        text = f"contradicts the checkpoint, which was trained {was}"
        problems.append(Problem((shown, "--use-checkpoint-args"), text, "drop one of them"))
    return {name: value for name, value in stored.items() if value is not None and name not in given}, problems


def spelled(name: str, value: Any) -> str:
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"


def ordinary(stored: Mapping[str, Any], given: Mapping[str, Any]) -> int | None:
    """The stored vocabulary as `--vocab-size` spells it: a NullTokenizer's ids without its end of document."""
    null = given.get("tokenizer_type", stored.get("tokenizer_type")) == "NullTokenizer"
    return stored["vocab_size"] - 1 if null else stored["vocab_size"]
