"""Command line <-> `Config`. The flags are the fields of `config/`; this file adds what argparse and a person need.

    parse(argv, world_size)      defaults <- --model preset <- --use-checkpoint-args <- given flags -> resolve -> validate
    with_vocab_size(config, n)   the second step where the vocabulary is known only once the tokenizer is read
    format_problems, format_arguments

Stricter than argparse: an abbreviation, a stray word, an unreadable value, an unknown flag are problems like any other,
and all of them are reported together.
"""

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields, replace
from typing import Any, NamedTuple, NoReturn

from megatron_lite.config import GROUPS, SHARDING_STRATEGIES, Config
from megatron_lite.inherit import inherit
from megatron_lite.models.zoo import PRESETS
from megatron_lite.rules import BYTE_VOCABULARY, Problem, flag_name
from megatron_lite.validate import validate

PROGRAM = "pretrain_gpt.py"
RULER = 24  # dashes on either side of a title in the argument dump
COLUMN = 48  # where values begin in it

# Megatron's flags that people bring along in their scripts, and what to do about them here.
ELSEWHERE = {
    "--use-flash-attn": "drop it: the attention kernel follows from the device",
    "--attention-backend": "drop it: the attention kernel follows from the device",
    "--transformer-impl": "drop it: every layer is plain PyTorch",
    "--use-mcore-models": "drop it: there is one model implementation",
    "--use-legacy-models": "drop it: there is one model implementation",
    "--overlap-grad-reduce": "drop it: gradients are reduced inside the backward unless --no-overlap-grad-reduce",
    "--overlap-param-gather": "drop it: parameters are gathered ahead of their use unless --no-overlap-param-gather",
    "--use-megatron-fsdp": "drop it: --zero-stage, or --data-parallel-sharding-strategy, alone says what is sharded",
    "--accumulate-allreduce-grads-in-fp32": "drop it: gradients are always summed in fp32",
    "--attention-softmax-in-fp32": "drop it: softmax is always in fp32",
    "--calculate-per-token-loss": "drop it: the loss is always the mean over all tokens of the step",
    "--use-cpu-initialization": "drop it: weights depend on the seed and their name only, never on the layout",
    "--distribute-saved-activations": "use --sequence-parallel: a recomputed layer then keeps its cut input",
    "--checkpoint-activations": "use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--cpu-offloading": "drop it: --cpu-offloading-num-layers turns it on",
    "--multiple-validation-sets": "name the sets: --valid-data-path web=A code=B",
    "--log-throughput": "drop it: the log line always has the throughput",
    "--save-retain-interval": "use --save-retain N: the newest N checkpoints are kept",
    "--non-persistent-save-interval": "use --peer-checkpoint-interval: copies in the memory of other nodes and on local disks",
    "--non-persistent-local-ckpt-dir": "use --peer-checkpoint-dir",
    "--no-save-rng": "drop it: dropout and data order follow from --seed and the position, there is no random state to save",
    "--no-load-rng": "drop it: dropout and data order follow from --seed and the position, there is no random state to load",
    "--exit-on-missing-checkpoint": "drop it: a missing checkpoint is always an error, unless --save names the same folder",
    "--use-mp-args-from-checkpoint-args": "drop it: every layout loads every checkpoint",
    "--ckpt-format": "drop it: there is one format, safetensors and a manifest",
    "--exit-signal-handler": "drop it: signals are always handled",
    "--no-create-attention-mask-in-dataloader": "drop it: no mask is ever built",
    "--dataloader-inter-document-masking": "use --reset-attention-mask",
    "--fim-data": "drop it: --fim-rate turns it on",
    "--fim-prefix-token": "use --fim-prefix-id, with the number of the token",
    "--fim-middle-token": "use --fim-middle-id, with the number of the token",
    "--fim-suffix-token": "use --fim-suffix-id, with the number of the token",
    "--check-for-nan-in-loss-and-grad": "drop it: a step that is not finite is always found; see --max-consecutive-skips",
    "--no-check-for-nan-in-loss-and-grad": "drop it: a step that is not finite is always found, and skipped",
    "--fp8-amax-compute-algo": "drop it: the largest of the --fp8-amax-history-len counts",
    "--fp16-lm-cross-entropy": "drop it: the loss is always computed in fp32",
    "--tensorboard-log-interval": "use --log-interval",
    "--wandb-run-name": "use --wandb-exp-name",
    "--tp": "use --tensor-model-parallel-size",
    "--pp": "use --pipeline-model-parallel-size",
    "--dp": "drop it: dp is the world size over tp x pp",
    "--batch-size": "use --micro-batch-size",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--use-rmsnorm": "use --normalization RMSNorm",
}


class Reading(NamedTuple):
    """What a command line says: field values, the problems of reading it, and flags whose value is in doubt."""

    values: dict[str, Any]
    problems: list[Problem]
    doubtful: set[str]


class _Unreadable(Exception):
    """argparse would exit; the caller goes on with the next flag."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Unreadable(message)


def build_parser() -> argparse.ArgumentParser:
    """Every field of every group as a flag. No defaults: what is absent from the namespace was not given."""
    parser = _Parser(PROGRAM, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                     description="Pretrain a GPT or LLaMA model.", usage="%(prog)s --flag value ...")  # fmt: skip
    for config_class in GROUPS.values():
        group = parser.add_argument_group(config_class.__doc__)
        for field in fields(config_class):
            names, options = _options(field)
            group.add_argument(*names, **options)
            if "stands_for" in field.metadata:
                switch, value = field.metadata["stands_for"]
                group.add_argument(switch, action="store_const", dest=field.name, const=value,
                                   help=f"the same as {flag_name(field.name)} {value}")  # fmt: skip
    return parser


def _options(field: Field) -> tuple[list[str], dict[str, Any]]:
    """(spellings, keywords of `add_argument`) of a field."""
    meta = field.metadata
    names = [flag_name(field.name), *([meta["alias"]] if "alias" in meta else [])]
    if isinstance(field.default, bool):
        return names, {"action": "store_true", "dest": field.name, "help": meta["help"]}
    legend = meta["help"] if field.default is None else f"{meta['help']} (default: {field.default})"
    kind = _type(field)
    choices = _choices(field)
    options = {
        "dest": field.name,
        "help": legend.replace("%", "%%"),
        "type": kind,
        "choices": choices,
        "nargs": meta.get("nargs"),
    }
    if not choices:
        options["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
    return names, options


def _type(field: Field) -> type:
    return field.metadata.get("type", type(field.default))


def _choices(field: Field) -> tuple[str, ...] | None:
    return tuple(PRESETS) if field.name == "model" else field.metadata.get("choices")


def parse(argv: Sequence[str], world_size: int) -> tuple[Config, list[Problem]]:
    """The resolved configuration of a command line, and everything that is wrong with it (empty: it can run).

    `world_size`: ranks that the launcher started; `--world-size` stands in for it in a dry run. `--help` exits.
    """
    reading = read(argv)
    given = frozenset(reading.values)
    preset = PRESETS.get(reading.values.get("model"), {})
    inherited, contradictions = inherit(reading.values, preset)
    raw = configure(preset | inherited | reading.values)
    config = resolve(raw, given, world_size)
    problems = validate(config, given, world_size)
    # A flag that could not be read is as good as absent; what follows from its absence is not another mistake.
    problems = [p for p in problems if not reading.doubtful & {text.split()[0] for text in p.flags}]
    return config, reading.problems + contradictions + problems


def read(argv: Sequence[str]) -> Reading:
    """Flag by flag through argparse, so that one bad flag does not hide the next. The last of equal flags wins."""
    parser, owners = build_parser(), _owners()
    reading = Reading({}, [], set())
    spelled: dict[str, str] = {}  # field -> the flag that set it
    stray, chunks = _chunks(argv)
    if stray:
        reading.problems.append(Problem(tuple(stray), "belongs to no flag", "drop it, or put its flag before it"))
    for flag, words in chunks:
        if flag in ("-h", "--help"):
            parser.parse_args(["--help"])
        field = owners.get(flag)
        if field is None:
            _unknown(reading, flag, words, owners)
            continue
        try:
            found = vars(parser.parse_args([f"{flag}={words[0]}"] if len(words) == 1 else [flag, *words]))
        except _Unreadable:
            reading.problems.append(_unreadable(field, flag, words))
            reading.doubtful.add(flag_name(field.name))
            continue
        value = found[field.name]
        value = tuple(value) if isinstance(value, list) else value
        if spelled.get(field.name, flag) != flag and reading.values[field.name] != value:
            both = (f"{spelled[field.name]}", " ".join([flag, *words]))
            reading.problems.append(
                Problem(both, "contradict each other: two spellings of one setting", "drop one of them")
            )
        spelled[field.name] = flag
        reading.values[field.name] = value
    return reading


def _chunks(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(words before the first flag, [(flag, its words)]). `--flag=value` is split; a negative number is not a flag."""
    stray: list[str] = []
    chunks: list[tuple[str, list[str]]] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if (
            name.startswith("-")
            and name.lstrip("-")[:1].isalpha()
            and name.lower() not in ("-inf", "-nan", "-infinity")
        ):
            chunks.append((name, [value] if equals else []))
        elif chunks:
            chunks[-1][1].append(word)
        else:
            stray.append(word)
    return stray, chunks


def without(argv: Sequence[str], names: Iterable[str]) -> list[str]:
    """The command line without the flags of these fields, however they are spelled."""
    (stray, chunks), owners, names = _chunks(argv), _owners(), set(names)
    kept = [(flag, words) for flag, words in chunks if flag not in owners or owners[flag].name not in names]
    return stray + [word for flag, words in kept for word in (flag, *words)]


def _owners() -> dict[str, Field]:
    """Every spelling of every flag -> the field that it sets."""
    owners = {}
    for config_class in GROUPS.values():
        for field in fields(config_class):
            names, _ = _options(field)
            owners |= dict.fromkeys(names, field)
            if "stands_for" in field.metadata:
                owners[field.metadata["stands_for"][0]] = field
    return owners


def _unknown(reading: Reading, flag: str, words: list[str], owners: Mapping[str, Field]) -> None:
    """Record an unknown flag; the flags that it may have meant are in doubt."""
    dashed = "--" + flag.lstrip("-").replace("_", "-")
    longer = [name for name in owners if name.startswith(dashed) and name != dashed]
    close = [dashed] if dashed in owners else difflib.get_close_matches(dashed, owners, n=3, cutoff=0.75)
    shown = (" ".join([flag, *words]),)
    if dashed in ELSEWHERE:
        reading.problems.append(Problem(shown, "is not a flag here", ELSEWHERE[dashed]))
        reading.doubtful.update(word for word in ELSEWHERE[dashed].split() if word in owners)
        return
    if longer and dashed not in owners:
        reading.problems.append(
            Problem(shown, "abbreviations are not accepted", f"did you mean {' or '.join(longer)}?")
        )
    else:
        reading.problems.append(
            Problem(shown, "is not a flag", f"did you mean {' or '.join(close)}?" if close else "see --help")
        )
    reading.doubtful.update(flag_name(owners[name].name) for name in longer or close)


def _unreadable(field: Field, flag: str, words: list[str]) -> Problem:
    """Why argparse could not read this flag, in our words."""
    shown = (" ".join([flag, *words]),)
    if "stands_for" in field.metadata and flag == field.metadata["stands_for"][0] or isinstance(field.default, bool):
        return Problem(shown, "is a switch and takes no value", f"give {flag} alone, or leave it out")
    if not words:
        return Problem(
            shown,
            f"needs a value: {field.metadata['help']}",
            f"one of {', '.join(map(str, _choices(field)))}" if _choices(field) else "",
        )
    if len(words) > 1 and "nargs" not in field.metadata:
        return Problem(shown, f"takes one value, {len(words)} were given", "quote a value that has blanks in it")
    if choices := [str(choice) for choice in _choices(field) or ()]:
        close = difflib.get_close_matches(words[0].lower(), [c.lower() for c in choices], n=3)
        nearby = [choice for choice in choices if choice.lower() in close]
        return Problem(shown, "is not one of the choices", f"nearest values that work: {', '.join(nearby or choices)}")
    if _type(field) is int:
        return Problem(shown, "is not a whole number", _whole(next(filter(_not_whole, words), words[0])))
    return Problem(shown, "is not a number", f"for example {field.default}" if field.default is not None else "")


def _not_whole(word: str) -> bool:
    return not word.removeprefix("-").isdigit()


def _whole(word: str) -> str:
    """1e3 and 2.0 are whole numbers that Python's int does not read."""
    try:
        return f"nearest value that works: {round(float(word))}"
    except (ValueError, OverflowError):
        return "give digits"


def configure(values: Mapping[str, Any]) -> Config:
    """A configuration with some fields set, whichever groups they are in."""
    groups = {}
    for name, config_class in GROUPS.items():
        own = {f.name for f in fields(config_class)}
        groups[name] = config_class(**{key: value for key, value in values.items() if key in own})
    return Config(**groups)


def resolve(config: Config, given: Iterable[str], world_size: int) -> Config:
    """Fill in what follows from other settings. What cannot be derived stays None; `validate` says why.

    head size = hidden / heads; MLP = 4h, with SwiGLU 64 * floor(4h * 2/3 / 64); positions = sequence length;
    global batch = micro-batch * dp; iterations = steps that the samples last for; vocabulary = the tokenizer's own, and with
    NullTokenizer one more than a given --vocab-size (its ids are 0 ... N-1, its end of document is N).
    """
    model, train, given = config.model, config.train, frozenset(given)
    world = train.world_size or world_size
    replica = max(config.parallel.tp, 0) * max(config.parallel.pp, 0)
    dp = world // replica if replica and world % replica == 0 else None
    hidden, heads = model.hidden_size, model.num_attention_heads
    sizes: dict[str, Any] = {}
    if model.kv_channels is None and hidden and heads and heads > 0 and hidden % heads == 0:
        sizes["kv_channels"] = hidden // heads
    if model.ffn_hidden_size is None and hidden:
        sizes["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64 if model.swiglu else 4 * hidden
    if model.num_experts and model.moe_ffn_hidden_size is None:
        sizes["moe_ffn_hidden_size"] = sizes.get("ffn_hidden_size", model.ffn_hidden_size)
    if model.max_position_embeddings is None:
        sizes["max_position_embeddings"] = model.seq_length
    batch = train.global_batch_size
    if batch is None and train.micro_batch_size and dp:
        batch = train.micro_batch_size * dp
    iterations = train.train_iters
    if iterations is None and train.train_samples and batch and batch > 0:
        iterations = replace(train, global_batch_size=batch).batch_sizes.steps(train.train_samples) or None
    parallel = config.parallel
    if parallel.data_parallel_sharding_strategy is not None:
        parallel = replace(parallel, zero_stage=SHARDING_STRATEGIES.index(parallel.data_parallel_sharding_strategy))
    train = replace(train, world_size=world, global_batch_size=batch, train_iters=iterations)
    data = replace(config.data, vocab_size=_vocabulary(config.data, given))
    return replace(config, model=replace(model, **sizes), parallel=parallel, train=train, data=data)


def _vocabulary(data: Any, given: frozenset[str]) -> int | None:
    if data.tokenizer_type == "ByteTokenizer" and data.vocab_size is None:
        return BYTE_VOCABULARY
    if (
        data.tokenizer_type == "NullTokenizer"
        and data.vocab_size is not None
        and data.vocab_size > 0
        and "vocab_size" in given
    ):
        return data.vocab_size + 1
    return data.vocab_size


def tokenizer_arguments(config: Config) -> tuple[str | int | None, ...]:
    """What `build_tokenizer` takes, from a resolved configuration: a NullTokenizer is built from its ordinary ids."""
    data = config.data
    ordinary = data.tokenizer_type == "NullTokenizer" and data.vocab_size is not None
    vocab_size = data.vocab_size - 1 if ordinary else data.vocab_size
    return (data.tokenizer_type, data.tokenizer_model, vocab_size, data.vocab_file, data.merge_file, data.tiktoken_pattern,
            data.tiktoken_num_special_tokens)  # fmt: skip


def with_vocab_size(config: Config, tokenizer_vocab: int) -> Config:
    """The configuration once the tokenizer is read: its vocabulary is the model's unless a flag or preset set one."""
    if config.data.vocab_size is not None:
        return config
    return replace(config, data=replace(config.data, vocab_size=tokenizer_vocab))


def format_problems(problems: Sequence[Problem]) -> str:
    """All problems as text, one line each."""
    head = f"{PROGRAM}: {len(problems)} problem{'s' if len(problems) != 1 else ''} in the arguments"
    return "\n".join([head, *(f"  {problem}" for problem in problems)])


def format_arguments(config: Config) -> str:
    """Megatron's dump of the arguments, what was derived from them included."""
    values = {name: value for group in config.as_dict().values() for name, value in group.items()}
    values |= {"data_parallel_size": config.data_parallel_size, "num_microbatches": config.num_microbatches,
               "params_dtype": config.precision.dtype_name}  # fmt: skip
    if config.data.vocab_size is not None:
        values["padded_vocab_size"] = config.padded_vocab_size
    lines = [f"  {name} {'.' * (COLUMN - len(name))} {values[name]}" for name in sorted(values)]
    return "\n".join(
        [f"{'-' * RULER} arguments {'-' * RULER}", *lines, f"{'-' * (RULER - 4)} end of arguments {'-' * (RULER - 3)}"]
    )
