"""Can a run be what its flags say? `validate` answers with every problem at once; it starts nothing and reads no file but
a schedule.

    --num-attention-heads 6 --tensor-model-parallel-size 4: 6 heads cannot be cut into 4 equal parts; nearest values
    that work: --num-attention-heads 4 or 8, --tensor-model-parallel-size 3 or 6

Five kinds of problem, in the order of the functions below: a flag is missing; a value is out of range; two flags
contradict each other; a flag was given that has no effect with the others; sizes do not fit together.
A value out of range is taken as absent by the rules after it, so that one mistake is reported once.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from fractions import Fraction
from functools import partial
from math import prod

from megatron_lite import batch_rules, context_rules, expert_rules, logging_rules
from megatron_lite.config import GROUPS, Config, ParallelConfig
from megatron_lite.data.blend import read_blend
from megatron_lite.data.indexed import DataError
from megatron_lite.data.phases import read_phases
from megatron_lite.data.samples import parse_split
from megatron_lite.data.sets import read_sets
from megatron_lite.planner.automatic import allowed_chunks, plainest_pipeline
from megatron_lite.planner.pipeline import AUTO, Pipeline
from megatron_lite.rules import (
    BYTE_VOCABULARY,
    FARTHEST,
    Problem,
    Values,
    about,
    compression,
    conflicts,
    have,
    inert,
    marks,
    missing,
    nearest,
    nearest_values,
    ranges,
)
from megatron_lite.schedules import ASYNCHRONOUS
from megatron_lite.schedules.actions import ScheduleError
from megatron_lite.schedules.auto import least_held

PP, GROUP = "pipeline_model_parallel_size", "microbatch_group_size_per_virtual_pipeline_stage"
SCHEDULE, FILE = "pipeline_schedule", "pipeline_schedule_file"
CHUNKS, PER_CHUNK = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
MICROBATCHES = 1 << 21  # that a pipeline message can tell apart (comm/p2p.py)
FP8_MULTIPLE = 16  # parallel/fp8.py
ENDS = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


def validate(config: Config, given: Iterable[str], world_size: int) -> list[Problem]:
    """All problems of a resolved configuration. `given`: field names the user set (inert flags are judged on those)."""
    values, given = _values(config, world_size), frozenset(given)
    problems = [*missing(values), *ranges(values)]
    problems += [*conflicts(values, given), *inert(values, given)]
    problems += [*expert_rules.inert(values, given), *logging_rules.inert(values, given)]
    for rules in (_attention, _positions, _layout, context_rules.context, _zero, compression, batch_rules.batch, _rampup,
                  batch_rules.skipping, _pipeline, _asynchronous, _activations, _scale, _fp8, _rate, _warmup, _data,
                  marks, expert_rules.experts, logging_rules.profile):  # fmt: skip
        problems += rules(values)
    return problems


def _values(config: Config, world_size: int) -> Values:
    values = {f.name: getattr(getattr(config, group), f.name) for group, cls in GROUPS.items() for f in fields(cls)}
    values["world"] = config.train.world_size or world_size
    replica = (values["tensor_model_parallel_size"] or 0) * (values["pipeline_model_parallel_size"] or 0)
    replica *= values["context_parallel_size"] or 0
    values["dp"] = values["world"] // replica if replica > 0 and values["world"] % replica == 0 else None
    values["dp_cp"] = values["dp"] and values["dp"] * values["context_parallel_size"]
    return Values(**values)


def _attention(s: Values) -> Iterator[Problem]:
    hidden, heads, groups = s.hidden_size, s.num_attention_heads, s.num_query_groups
    if have(hidden, heads) and s.kv_channels is None and hidden % heads:
        fix = nearest_values(
            num_attention_heads=nearest(heads, lambda n: hidden % n == 0),
            hidden_size=nearest(hidden, lambda n: n % heads == 0),
        )
        text = f"{hidden} is not a multiple of {heads}"
        yield about(s, "hidden_size num_attention_heads", text, f"{fix}, or give --kv-channels")
    if s.group_query_attention and have(heads, groups) and heads % groups:
        fix = nearest_values(num_query_groups=nearest(groups, lambda n: heads % n == 0))
        text = f"{heads} heads cannot share {groups} groups equally"
        yield about(s, "num_attention_heads num_query_groups", text, fix)


def _positions(s: Values) -> Iterator[Problem]:
    length, reach = s.seq_length, s.max_position_embeddings
    if have(length, reach) and length > reach:
        fix = nearest_values(seq_length=[reach], max_position_embeddings=[length])
        yield about(s, "seq_length max_position_embeddings", "samples are longer than the positions reach", fix)
    if s.position_embedding_type != "rope":
        return
    share = s.rotary_percent
    if have(s.kv_channels, share) and not _pairs(s.kv_channels, share):
        names = "kv_channels" if share == 1.0 else "kv_channels rotary_percent"
        text = f"RoPE turns pairs, and {int(s.kv_channels * share)} of each head's values are not pairs"
        yield about(s, names, text, nearest_values(kv_channels=nearest(s.kv_channels, lambda d: _pairs(d, share))))
    low, high = s.rope_low_freq_factor, s.rope_high_freq_factor
    if s.use_rope_scaling and have(low, high) and low >= high:
        text = "the low factor must be below the high one"
        yield about(s, "rope_low_freq_factor rope_high_freq_factor", text, "LLaMA 3 has 1 and 4")


def _pairs(head_size: int, share: float) -> bool:
    turned = int(head_size * share)
    return turned >= 2 and turned % 2 == 0


def _layout(s: Values) -> Iterator[Problem]:
    tp = s.tensor_model_parallel_size
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    if s.context_parallel_size != 1:
        names.insert(1, "context_parallel_size")
    sizes = {name: getattr(s, name) for name in names}
    if have(*sizes.values()) and s.world % prod(sizes.values()):
        each = prod(sizes.values())
        fixes = {name: nearest(size, lambda n, rest=each // size: n <= s.world and s.world % (n * rest) == 0)
                 for name, size in sizes.items()}  # fmt: skip
        text = f"the world size is not a multiple of tp x {'cp x ' * (len(names) == 3)}pp = {each}"
        fix = nearest_values(world=nearest(s.world, lambda n: n % each == 0), **fixes)
        yield about(s, " ".join(["world", *names]), text, fix)
    if tp is None:
        return
    yield from _cut(s, tp)
    groups, heads = s.num_query_groups, s.num_attention_heads
    if s.group_query_attention and have(groups, heads) and groups % tp and tp % groups:
        fix = nearest_values(
            num_query_groups=nearest(groups, lambda n: heads % n == 0 and (n % tp == 0 or tp % n == 0)),
            tensor_model_parallel_size=nearest(tp, lambda n: heads % n == 0 and (n % groups == 0 or groups % n == 0)),
        )
        yield about(s, "num_query_groups tensor_model_parallel_size", "neither is a multiple of the other", fix)


def _zero(s: Values) -> Iterator[Problem]:
    """Copies of a sharded model state, and what is gathered at a time."""
    if not s.zero_stage or not have(s.dp_cp) or s.dp_cp == 1:
        return
    if s.pipeline_schedule in ASYNCHRONOUS and s.pipeline_model_parallel_size != 1:
        text = "contradict each other: an asynchronous pipeline keeps several versions of whole weights"
        yield about(s, "zero_stage pipeline_schedule", text, "nearest values that work: --zero-stage 0")
    copies = s.zero_replica_size
    if have(copies) and (s.dp_cp % copies or copies == s.dp_cp):
        text = f"{s.dp_cp} data-parallel ranks cannot hold {copies} equal, sharded copies"
        works = nearest(copies, lambda n: s.dp_cp % n == 0 and n < s.dp_cp)
        yield about(s, "zero_replica_size", text, nearest_values(zero_replica_size=works))
    if s.zero_stage == 3 and have(s.ddp_bucket_size):
        stage = "zero_stage" if s.data_parallel_sharding_strategy is None else "data_parallel_sharding_strategy"
        text = "contradict each other: stage 3 gathers and frees a layer at a time"
        yield about(s, f"{stage} ddp_bucket_size", text, "drop --ddp-bucket-size")


def _cut(s: Values, tp: int) -> Iterator[Problem]:
    """What tensor parallelism cuts evenly."""
    cuts = {"num_attention_heads": "heads", "ffn_hidden_size": "MLP channels"}
    if s.sequence_parallel:
        cuts["seq_length"] = "tokens of --sequence-parallel"
    for name, what in cuts.items():
        number = getattr(s, name)
        if have(number) and number % tp:
            choices = {
                name: nearest(number, lambda n: n % tp == 0),
                "tensor_model_parallel_size": nearest(tp, lambda n, number=number: number % n == 0),
            }
            text = f"{number} {what} cannot be cut into {tp} equal parts"
            yield about(s, f"{name} tensor_model_parallel_size", text, nearest_values(**choices))


def _rampup(s: Values) -> Iterator[Problem]:
    pipeline = None
    if have(s.num_layers, s.pipeline_model_parallel_size) and min(s.num_layers, s.pipeline_model_parallel_size) <= FARTHEST:
        with suppress(ValueError):  # no stages: `_pipeline` says why
            pipeline = _plan(s)
    return batch_rules.rampup(s, pipeline)


def _pipeline(s: Values) -> Iterator[Problem]:
    """Layers on stages, then microbatches in the schedule."""
    if not have(s.num_layers, s.pipeline_model_parallel_size) or s.pipeline_model_parallel_size == 1:
        return
    if min(s.num_layers, s.pipeline_model_parallel_size) > FARTHEST:
        return  # more stages than can be listed; no world is that large
    try:
        pipeline = _plan(s)
    except ScheduleError as error:
        yield about(s, f"{FILE} {PP}", str(error))
        return
    except ValueError as error:
        yield _no_plan(s, str(error))
        return
    if s.pipeline_schedule == AUTO:
        yield from _automatic(s)
        return
    if have(s.microbatch_group_size_per_virtual_pipeline_stage) and not pipeline.has_groups:
        text = f"has no effect: {pipeline.schedule} runs no groups, the interleaved schedule does"
        yield about(s, GROUP, text, "drop it" if pipeline.file else f"drop it, or give --{CHUNKS.replace('_', '-')}")
    batch, each = s.global_batch_size, (s.micro_batch_size or 0) * (s.dp or 0)
    if batch and each and batch % each == 0:
        named = [FILE] if pipeline.file else [SCHEDULE, *(name for name in (CHUNKS, PER_CHUNK) if getattr(s, name))]
        for text in pipeline.problems(batch // each):
            yield about(s, " ".join(named), text if pipeline.file else text.split(": ", 1)[-1])


def _automatic(s: Values) -> Iterator[Problem]:
    """Whether any schedule that may be chosen runs, and within the memory limit."""
    batch, each = s.global_batch_size, (s.micro_batch_size or 0) * (s.dp or 0)
    if not batch or not each or batch % each:
        return
    chunks = allowed_chunks(s.num_layers, _parallel(s))
    named = " ".join([SCHEDULE, *(name for name in (CHUNKS, PER_CHUNK) if getattr(s, name))])
    least = least_held(s.pipeline_model_parallel_size, batch // each, chunks)
    if least is None:
        text = f"no schedule runs {chunks[0]} chunks per rank and {batch // each} microbatches per step"
        fix = f"{nearest_values(**{CHUNKS: [2]})}; or give a batch of at least --pipeline-model-parallel-size microbatches"
        yield about(s, named, text, fix)
    elif s.pipeline_memory_limit is not None and s.pipeline_memory_limit < least:
        text = f"no schedule holds so little; the least that any does is {least:g} microbatch{'es' * (least != 1)} per rank"
        yield about(s, f"pipeline_memory_limit {named}", text, f"nearest value that works: --pipeline-memory-limit {least:g}")


def _asynchronous(s: Values) -> Iterator[Problem]:
    """What a pipeline that is not flushed between updates cannot do: stages update at different times."""
    if s.pipeline_schedule not in ASYNCHRONOUS or s.pipeline_model_parallel_size in (None, 1):
        return
    if not s.untie_embeddings_and_output_weights:
        text = "first and last stage would update their copies of the tied embedding at different times and drift apart"
        yield about(s, SCHEDULE, text, "add --untie-embeddings-and-output-weights, or take a schedule that flushes (1f1b)")
    if s.log_params_norm:
        text = "while one stage ends a step others are in the next, so the norm of all weights is unknown there"
        yield about(s, f"log_params_norm {SCHEDULE}", text, "drop --log-params-norm")
    if s.pipeline_schedule == "pipemare" and s.recompute_granularity:
        text = "its backward runs with newer weights than its forward, and activations computed again would mix both"
        yield about(s, f"recompute_granularity {SCHEDULE}", text, "drop --recompute-granularity, or take pipedream")
    if s.fp16:
        text = "a loss scale must be the same on all stages, and no message about a step crosses them"
        yield about(s, f"fp16 {SCHEDULE}", text, "--bf16 needs none")
    each = (s.micro_batch_size or 0) * (s.dp or 0)
    if each and have(s.global_batch_size, s.pipeline_drain_interval):
        most = MICROBATCHES // max(1, s.global_batch_size // each)
        if s.pipeline_drain_interval > most:
            text = f"a pipeline message counts {MICROBATCHES} microbatches from one drain to the next"
            yield about(s, "pipeline_drain_interval", text, nearest_values(pipeline_drain_interval=[most]))


def _activations(s: Values) -> Iterator[Problem]:
    """No more layers recomputed or offloaded than the largest chunk has."""
    names = [name for name in ("recompute_num_layers", "cpu_offloading_num_layers") if getattr(s, name)]
    if not names or not have(s.num_layers, s.pipeline_model_parallel_size) or s.num_layers > FARTHEST:
        return
    try:
        most = max(map(len, _plan(s).layers))
    except ValueError:
        return  # no stages: _pipeline says why
    for name in names:
        if getattr(s, name) > most:
            text = f"no chunk has more than {most} layer{'s' if most > 1 else ''}"
            yield about(s, name, text, nearest_values(**{name: [most]}))


def _no_plan(s: Values, why: str) -> Problem:
    """Layers and stages do not go together; which of the settings, changed alone, would make them."""
    names = [name for name in ("num_layers", PP, CHUNKS, PER_CHUNK, *ENDS) if getattr(s, name)]
    lowest = {PP: 1 if names == ["num_layers", PP] else 2}  # without a pipeline the other flags would have no effect
    choices = {name: nearest(getattr(s, name), partial(_plans, s, name), lowest.get(name, 1)) for name in names}
    named = [FILE] if s.pipeline_schedule_file else [SCHEDULE] if s.pipeline_schedule != "1f1b" else []
    named += [name for name in names if choices[name]] or names
    return about(s, " ".join(named), why, nearest_values(**choices))


def _plan(s: Values, **changed: int) -> Pipeline:
    """The pipeline of these settings, some of them changed; ValueError where the layers do not fill it."""
    return plainest_pipeline(changed.get("num_layers", s.num_layers), _parallel(s, **changed))


def _parallel(s: Values, **changed: int) -> ParallelConfig:
    values = vars(s) | changed
    return ParallelConfig(**{f.name: values[f.name] for f in fields(ParallelConfig)})


def _plans(s: Values, name: str, number: int) -> bool:
    """Whether the layers fill the stages if the setting `name` were `number`."""
    try:
        _plan(s, **{name: number})
    except ValueError:
        return False
    return True


def _scale(s: Values) -> Iterator[Problem]:
    first, least = s.initial_loss_scale, s.min_loss_scale
    if s.fp16 and have(first, least) and least > first:
        fix = nearest_values(min_loss_scale=[first], initial_loss_scale=[least])
        yield about(s, "min_loss_scale initial_loss_scale", "the scale would start below its minimum", fix)


def _fp8(s: Values) -> Iterator[Problem]:
    """8-bit products are of bf16 models, and of matrices whose sides are multiples of 16."""
    if s.fp8_format is None:
        return
    if not s.bf16:
        yield about(s, "fp8_format", "what is not a product of 8 bits is in bf16", "add --bf16")
    tp, heads = s.tensor_model_parallel_size, s.num_attention_heads
    sizes = {"hidden_size": (s.hidden_size, 1), "ffn_hidden_size": (s.ffn_hidden_size, tp)}
    if have(heads, s.kv_channels):
        groups = (s.num_query_groups if s.group_query_attention else heads) or heads
        sizes["num_attention_heads kv_channels"] = heads * s.kv_channels, tp
        sizes["num_query_groups kv_channels"] = max(groups, tp or 1) * s.kv_channels, tp
    if have(s.seq_length, s.micro_batch_size):
        sizes["seq_length micro_batch_size"] = s.seq_length * s.micro_batch_size, 1
    for names, (size, parts) in sizes.items():
        if have(size, parts) and size % (FP8_MULTIPLE * parts):
            over = f" over tp {parts}" if parts > 1 else ""
            text = f"a side of {size}{over} is not a multiple of {FP8_MULTIPLE}, which 8-bit products need"
            yield about(s, f"fp8_format {names}", text)


def _rate(s: Values) -> Iterator[Problem]:
    for name, text in (("min_lr", "the rate would rise"), ("lr_warmup_init", "the warm-up would fall")):
        value = getattr(s, name)
        if have(value, s.lr) and value > s.lr:
            yield about(s, f"{name} lr", text, nearest_values(**{name: [s.lr], "lr": [value]}))


def _warmup(s: Values) -> Iterator[Problem]:
    """Warm-up < decay length, and WSD's final decay within what is left; in samples, as both spellings allow."""
    lengths = ("lr_decay_iters", "lr_decay_samples", "train_samples", "train_iters")
    length_name = next((name for name in lengths if have(getattr(s, name))), None)
    batch = s.global_batch_size
    if not have(batch, length_name):
        return
    length = _samples(s, length_name)
    warmup_name = "lr_warmup_iters" if s.lr_warmup_iters else "lr_warmup_samples"
    warmup = _samples(s, warmup_name) or int(Fraction(s.lr_warmup_fraction or 0) * length)  # lengths may exceed floats
    if warmup >= length > 0:
        most = (length - 1) // (batch if warmup_name.endswith("iters") else 1)
        fix = nearest_values(**{warmup_name: [most], length_name: _fitting(length_name, warmup + 1, batch)})
        yield about(s, f"{warmup_name} {length_name}", "the warm-up must end before the decay does", fix)
        return
    name = "lr_wsd_decay_iters" if have(s.lr_wsd_decay_iters) else "lr_wsd_decay_samples"
    final = _samples(s, name)
    if s.lr_decay_style == "WSD" and have(final) and warmup + final > length:
        most = (length - warmup) // (batch if name.endswith("iters") else 1)
        fix = nearest_values(
            **{name: [most] if most else [], length_name: _fitting(length_name, warmup + final, batch)}
        )
        yield about(s, f"{name} {length_name}", "warm-up and final decay are longer than the whole", fix)


def _samples(s: Values, name: str) -> int | None:
    value = getattr(s, name)
    return value * s.global_batch_size if value is not None and name.endswith("iters") else value


def _fitting(name: str, samples: int, batch: int) -> list[int]:
    """The least value of the length `name` that covers so many samples."""
    return [-(-samples // batch)] if name.endswith("iters") else [samples]


def _data(s: Values) -> Iterator[Problem]:
    if s.tokenizer_type == "ByteTokenizer" and have(s.vocab_size) and s.vocab_size < BYTE_VOCABULARY:
        text, fix = f"the tokenizer has {BYTE_VOCABULARY} ids", nearest_values(vocab_size=[BYTE_VOCABULARY])
        yield about(s, "vocab_size tokenizer_type", text, fix)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = getattr(s, name) or ()
        try:
            for own in read_sets(words).values() if name == "valid_data_path" else (words,):
                weights, _ = read_blend(own)
                if weights is not None and name == "valid_data_path" and s.full_validation and len(weights) > 1:
                    text = "contradict each other: each set is scored whole, so weights have no effect"
                    yield about(s, "valid_data_path full_validation", text, "drop the weights, or --full-validation")
        except DataError as error:
            yield about(s, name, str(error))
    if s.data_schedule is not None:
        try:
            read_phases(s.data_schedule)
        except DataError as error:
            yield about(s, "data_schedule", str(error))
    if s.split is None or s.mock_data or s.train_data_path or s.data_schedule or s.dataset_name:
        return
    try:
        training, validation, _ = parse_split(s.split)
    except DataError as error:
        yield about(s, "split", str(error).split(": ", 1)[-1])
        return
    if training == 0:
        yield about(s, "split", "leaves nothing to train on", "the default is 969,30,1")
    if have(s.eval_interval) and validation == 0:
        fix = "raise the second share, or drop --eval-interval"
        yield about(s, "split eval_interval", "leaves nothing to evaluate on", fix)
