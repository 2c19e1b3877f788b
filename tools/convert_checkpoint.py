"""Models from and to other programs' files, tensor by tensor.

    python tools/convert_checkpoint.py hf-to-native --load HF_FOLDER --save runs/imported
    python tools/convert_checkpoint.py native-to-hf --load runs/my_llama --save HF_FOLDER
    python tools/convert_checkpoint.py megatron-to-native --load MEGATRON_FOLDER --save runs/imported

A checkpoint of ours has no layout, so none is given: what this writes loads at any. At the end the logits of both sides are
compared where transformers can load the model and the memory suffices. Nothing that is read is ever executed.
"""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

if not __package__:  # run as a script: the repository root takes the place of this folder, so no install is needed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from megatron_lite.arguments import format_problems, read
from megatron_lite.config import Config, DataConfig, ModelConfig
from megatron_lite.convert.hf_files import bytes_of, read_json
from megatron_lite.convert.hugging_face import hf_to_native, native_to_hf, open_folder, plan_export
from megatron_lite.convert.links import ConversionError
from megatron_lite.convert.megatron import megatron_to_native, open_megatron
from megatron_lite.convert.native import NativeReader
from megatron_lite.errors import ReportedError
from megatron_lite.training.generate import config_of, load_model

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
TOLERANCE = 1e-5


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="convert_checkpoint", allow_abbrev=False, description="Models from and to other files.")
    commands = result.add_subparsers(dest="command", required=True)
    for name, what in (("hf-to-native", "a Hugging Face folder -> a checkpoint"),
                       ("native-to-hf", "a checkpoint -> a Hugging Face folder"),
                       ("megatron-to-native", "Megatron-LM's mp_rank_XX files -> a checkpoint; flags of pretrain_gpt.py after "
                        "-- stand in for settings that the files lack")):  # fmt: skip
        command = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        add = command.add_argument
        add("--load", required=True, type=Path, metavar="FOLDER", help="what to read")
        add("--save", required=True, type=Path, metavar="FOLDER", help="what to write; must not hold anything yet")
        if name == "native-to-hf":
            add("--iteration", type=int, metavar="N", help="which one (default: the latest)")
            add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as they are stored)")
            add("--max-shard-size", type=size, metavar="SIZE", help="largest file, such as 5GB or 500MB (default: 5GB, or the "
                "files that were imported)")  # fmt: skip
            add("--like", type=Path, metavar="HF_FOLDER", help="take config.json and tokenizer files from there")
            add("--no-verify-checkpoint", action="store_true", help="do not hold what is read against its checksums")
        if name == "megatron-to-native":
            add("flags", nargs="*", metavar="-- FLAGS", help="model flags")
        else:
            add("--no-check", action="store_true", help="do not compare logits with transformers")
    return result


def size(text: str) -> int:
    """5GB, 500MB, 2GiB -> bytes"""
    for unit, factor in UNITS.items():
        if text.upper().endswith(unit) and text[: -len(unit)].strip().isdigit() and int(text[: -len(unit)]) > 0:
            return int(text[: -len(unit)]) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is no size: expected a number and a unit, such as 5GB or 500MB")


def say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def bar(total: int):
    """A progress bar over bytes; silent where nobody looks."""
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="convert")


def flags_of(config: Config) -> str:
    """The flags of `pretrain_gpt.py` that mean this model, vocabulary and tokenizer."""
    words = []
    for group, defaults in ((config.model, ModelConfig()), (config.data, DataConfig())):
        for field in fields(group):
            value = getattr(group, field.name)
            if value != getattr(defaults, field.name):
                flag = "--" + field.name.replace("_", "-")
                words.append(flag if value is True else f"{flag} {value}")
    return " ".join(words)


def check(native: Path, iteration: int | None, folder: Path) -> str:
    """Compare the logits of both sides in fp32; a line that says how it went. Raises ConversionError where they differ."""
    try:
        import transformers
    except ImportError:
        return "check skipped: transformers is not installed"
    config, (model,), _ = load_model(str(native), iteration, dtype=torch.float32)
    transformers.logging.set_verbosity_error()
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        return f"check skipped: transformers has no model of type {kind}"
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False).eval()  # fmt: skip
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.data.vocab_size, (2, min(32, model.model.seq_length)), generator=draws)
    with torch.no_grad():
        ours = model.logits(model.hidden(tokens, None)).transpose(0, 1)[..., : config.data.vocab_size]
        theirs = reference(tokens).logits
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not difference <= TOLERANCE:
        raise ConversionError(f"the logits of both sides differ by {difference:.1e} of the largest; {TOLERANCE:.0e} is allowed. "
                              f"What was written is in {native} and {folder}: do not use it")  # fmt: skip
    return f"check: logits of both sides agree to {difference:.1e} of the largest"


def check_if_it_fits(arguments: argparse.Namespace, elements: int, native: Path, iteration: int | None, folder: Path) -> None:
    """The check, unless it is not wanted or two models in fp32 would fill the memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if arguments.no_check:
        return
    if 2 * 4 * elements > 0.8 * free:
        say(f"check skipped: two models in fp32 need {8 * elements / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return
    say(check(native, iteration, folder))


def import_hf(arguments: argparse.Namespace) -> None:
    opened = open_folder(arguments.load)
    say(*opened.notes)
    with bar(sum(map(bytes_of, opened.source.kinds.values()))) as progress:
        written, config = hf_to_native(arguments.load, arguments.save, opened, progress.update)
    say(f"written to {written}: all of its tensors filled, all of the folder's used")
    elements = sum(torch.Size(kind.shape).numel() for kind in opened.source.kinds.values())
    check_if_it_fits(arguments, elements, arguments.save, None, arguments.load)
    say("to train on:", f"  pretrain_gpt.py --load {arguments.save} --finetune {flags_of(config)}")


def export_hf(arguments: argparse.Namespace) -> None:
    reader = NativeReader(arguments.load, arguments.iteration, not arguments.no_verify_checkpoint)
    if "config" not in reader.manifest.meta:
        raise ConversionError(f"{reader.folder} does not say which model it holds")
    config = config_of(reader.manifest.meta["config"])
    export = plan_export(reader, config, arguments.dtype, arguments.max_shard_size, arguments.like)
    say(*export.notes)
    with bar(sum(map(bytes_of, export.kinds.values()))) as progress:
        native_to_hf(export, arguments.save, progress.update)
    say(f"written to {arguments.save}: all of the checkpoint's tensors used")
    if arguments.dtype is None:
        elements = sum(torch.Size(kind.shape).numel() for kind in export.kinds.values())
        check_if_it_fits(arguments, elements, arguments.load, reader.manifest.iteration, arguments.save)


def import_megatron(arguments: argparse.Namespace) -> None:
    reading = read(arguments.flags)
    if reading.problems:
        raise ConversionError(format_problems(reading.problems))
    opened = open_megatron(arguments.load, reading.values)
    say(*opened.notes)
    with bar(sum(map(bytes_of, opened.source.kinds.values()))) as progress:
        written = megatron_to_native(arguments.save, opened, progress.update)
    say(f"written to {written}: all of its tensors filled, all of the files' used",
        "to train on:", f"  pretrain_gpt.py --load {arguments.save} --finetune {flags_of(opened.config)}")  # fmt: skip


COMMANDS = {"hf-to-native": import_hf, "native-to-hf": export_hf, "megatron-to-native": import_megatron}


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Exits with 2 for wrong flags, 1 for what cannot be converted."""
    arguments = parser().parse_args(argv)
    try:
        COMMANDS[arguments.command](arguments)
    except (ReportedError, OSError) as error:
        parser().exit(1, f"convert_checkpoint: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
