"""What `validate` is made of: the shape of a problem, and the rules that need no arithmetic between sizes.

Most of them are tables: ranges, flags that exclude each other, flags that have no effect. To add a rule, add a row.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron_lite.schedules import ASYNCHRONOUS

BYTE_VOCABULARY = 257  # ByteTokenizer: 256 bytes and the end of document
FARTHEST = 100_000  # how far a suggestion is looked for
FROM_MODEL = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer")  # read what --tokenizer-model names
OWN_VOCABULARY = (*FROM_MODEL, "GPT2BPETokenizer", "ByteTokenizer")

AT_LEAST_ONE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
    "max_position_embeddings rope_original_max_position make_vocab_size_divisible_by tensor_model_parallel_size "
    "context_parallel_size ulysses_degree "
    "pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage "
    "microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "ddp_bucket_size recompute_num_layers zero_replica_size zero_prefetch_limit "
    "lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples vocab_size micro_batch_size "
    "global_batch_size train_iters train_samples exit_interval eval_iters eval_interval world_size save_interval "
    "log_interval pipeline_drain_interval trace_start trace_steps profile_step_start profile_step_end "
    "loss_scale_window hysteresis max_consecutive_skips "
    "fp8_amax_history_len save_weights_only_interval save_retain grad_compression_rank tiktoken_num_special_tokens "
    "num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk moe_router_num_groups "
    "moe_router_group_topk expert_model_parallel_size expert_tensor_parallel_size"
).split()
AT_LEAST_ZERO = (
    "lr min_lr lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay clip_grad num_workers seed "
    "pipemare_annealing_iters fp8_margin cpu_offloading_num_layers load_iteration grad_compression_start_iter "
    "fim_prefix_id fim_middle_id fim_suffix_id peer_checkpoint_interval moe_aux_loss_coeff moe_z_loss_coeff "
    "moe_router_bias_update_rate"
).split()
ABOVE_ZERO = (
    "rotary_base rotary_seq_len_interpolation_factor rope_scaling_factor rope_low_freq_factor rope_high_freq_factor "
    "norm_epsilon init_method_std adam_eps pipeline_memory_limit distributed_timeout_minutes exit_duration_in_mins peak_tflops "
    "loss_scale initial_loss_scale min_loss_scale save_interval_minutes moe_router_topk_scaling_factor "
    "moe_expert_capacity_factor"
).split()
SHARES = (
    "hidden_dropout attention_dropout label_smoothing adam_beta1 adam_beta2 sgd_momentum lr_warmup_fraction "
    "pipemare_correction_decay"
).split()
WHOLE_SHARES = ("fim_rate", "fim_spm_rate")
FIM_IDS = ("fim_prefix_id", "fim_middle_id", "fim_suffix_id")
NEED_EOD = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_rate")

UNEVEN = "one makes all stages equal, the other does not (--num-virtual-stages-per-pipeline-rank goes with it)"
CONSTANT = "the scale is constant or dynamic"

DATA_PATHS = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path", "data_schedule",
              "dataset_name")  # fmt: skip
ONE_OR_EACH = "data is cut by --split, or named for training, validation and test"
FIXED = "one says how the layers are cut, the other leaves it to be found out"
GROWING = "the length of an iteration in samples changes while the batch grows; give it in samples"
BY_ITERATIONS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")

# Flags that exclude each other, and what each of them means.
CONFLICTS = (
    ("bf16", "fp64", "a run has one precision"),
    ("bf16", "fp16", "a run has one precision"),
    ("fp16", "fp64", "a run has one precision"),
    ("loss_scale", "initial_loss_scale", CONSTANT),
    ("loss_scale", "min_loss_scale", CONSTANT),
    ("loss_scale", "loss_scale_window", CONSTANT),
    ("loss_scale", "hysteresis", CONSTANT),
    ("zero_stage", "data_parallel_sharding_strategy", "both set what is sharded"),
    ("grad_compression", "grad_reduce_dtype", "both say what travels; the factors of powersgd are made orthonormal in fp32"),
    ("train_iters", "train_samples", "both set the length of the run"),
    ("lr_decay_iters", "lr_decay_samples", "both set the length of the decay"),
    ("lr_warmup_iters", "lr_warmup_samples", "both set the length of the warm-up"),
    ("lr_warmup_fraction", "lr_warmup_iters", "both set the length of the warm-up"),
    ("lr_warmup_fraction", "lr_warmup_samples", "both set the length of the warm-up"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "both set the length of the final decay"),
    *(("mock_data", name, "the tokens are made up or read, not both") for name in DATA_PATHS),
    ("data_path", "data_args_path", "both name the data"),
    *((name, "dataset_name", "both name the training data")
      for name in ("data_path", "data_args_path", "train_data_path", "data_schedule")),
    *(("rampup_batch_size", name, GROWING) for name in BY_ITERATIONS),
    ("data_path", "train_data_path", ONE_OR_EACH),
    ("data_path", "valid_data_path", ONE_OR_EACH),
    ("data_path", "test_data_path", ONE_OR_EACH),
    ("data_args_path", "train_data_path", ONE_OR_EACH),
    ("data_args_path", "valid_data_path", ONE_OR_EACH),
    ("data_args_path", "test_data_path", ONE_OR_EACH),
    *(("data_schedule", name, "both name the training data") for name in ("data_path", "data_args_path", "train_data_path")),
    ("data_schedule", "data_order", "Megatron's order knows no blend that changes"),
    ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "both stretch the positions"),
    ("pipeline_schedule", "pipeline_schedule_file", "both say what each pipeline rank runs"),
    ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "both set the chunks of a pipeline rank"),
    ("num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers", UNEVEN),
    ("num_layers_per_virtual_pipeline_stage", "decoder_last_pipeline_num_layers", UNEVEN),
    ("pipeline_split", "decoder_first_pipeline_num_layers", FIXED),
    ("pipeline_split", "decoder_last_pipeline_num_layers", FIXED),
    ("pipeline_split", "num_layers_per_virtual_pipeline_stage", FIXED),
    ("recompute_granularity", "cpu_offloading_num_layers", "activations are computed again or brought back, not both"),
    ("finetune", "no_load_optim", "one starts at iteration 0, the other keeps the iteration"),
)

Values = (
    SimpleNamespace  # every setting by its field name, `world` (ranks), `dp` and `dp_cp` (None where they do not come out)
)

# Flags that do nothing: (flags, when, why and what would give them an effect).
INERT: tuple[tuple[str, Callable[[Values], bool], str], ...] = (
    ("sequence_parallel", lambda s: s.tensor_model_parallel_size == 1, "needs --tensor-model-parallel-size above 1"),
    ("pipeline_schedule pipeline_schedule_file num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage "
     "microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
     "pipeline_split pipeline_memory_limit",
     lambda s: s.pipeline_model_parallel_size == 1, "needs --pipeline-model-parallel-size above 1"),
    ("pipeline_memory_limit", lambda s: s.pipeline_model_parallel_size != 1 and s.pipeline_schedule != "auto",
     "needs --pipeline-schedule auto, which chooses by it"),
    ("pipeline_split", lambda s: s.pipeline_model_parallel_size != 1 and s.pipeline_schedule == "auto",
     "--pipeline-schedule auto tries both splits and takes the shorter step"),
    ("pipeline_split", lambda s: s.pipeline_model_parallel_size != 1 and s.pipeline_schedule_file is not None,
     "needs a schedule by name; the layers of --pipeline-schedule-file are split evenly"),
    ("pipeline_split", lambda s: s.pipeline_model_parallel_size != 1 and s.pipeline_schedule in ASYNCHRONOUS,
     "the layers of an asynchronous pipeline are split evenly, or by --decoder-first/last-pipeline-num-layers"),
    ("microbatch_group_size_per_virtual_pipeline_stage",
     lambda s: s.pipeline_model_parallel_size != 1 and s.pipeline_schedule == "auto",
     "--pipeline-schedule auto takes the smallest groups that waste nothing"),
    ("pipeline_drain_interval", lambda s: s.pipeline_schedule not in ASYNCHRONOUS or s.pipeline_model_parallel_size == 1,
     f"needs an asynchronous pipeline: --pipeline-schedule {', '.join(ASYNCHRONOUS)}"),
    ("pipemare_annealing_iters pipemare_correction_decay",
     lambda s: s.pipeline_schedule != "pipemare" or s.pipeline_model_parallel_size == 1, "needs --pipeline-schedule pipemare"),
    ("grad_reduce_dtype", lambda s: s.fp64, "--fp64 gradients travel in fp64"),
    ("loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis", lambda s: not s.fp16,
     "needs --fp16; bf16 reaches as far as fp32"),
    ("fp8_recipe fp8_amax_history_len fp8_margin first_last_layers_bf16", lambda s: s.fp8_format is None,
     "needs --fp8-format"),
    ("fp8_amax_history_len", lambda s: s.fp8_recipe != "delayed", "needs --fp8-recipe delayed"),
    ("grad_compression_rank grad_compression_start_iter", lambda s: s.grad_compression == "none",
     "needs --grad-compression powersgd"),
    ("grad_compression_start_iter", lambda s: have(s.grad_compression_start_iter, s.train_iters)
     and s.grad_compression_start_iter >= s.train_iters > 0, "the run ends before it; nothing would be compressed"),
    ("cp_comm_type", lambda s: s.context_parallel_size == 1, "needs --context-parallel-size above 1"),
    ("ulysses_degree", lambda s: s.context_parallel_size == 1 or "a2a+p2p" not in s.cp_comm_type,
     "needs --context-parallel-size above 1 and --cp-comm-type a2a+p2p"),
    ("no_overlap_grad_reduce grad_reduce_dtype grad_compression", lambda s: s.dp_cp == 1,
     "needs more than one data-parallel rank, here dp = 1"),
    ("recompute_method recompute_num_layers", lambda s: s.recompute_granularity != "full",
     "needs --recompute-granularity full"),
    ("recompute_modules", lambda s: s.recompute_granularity != "selective", "needs --recompute-granularity selective"),
    ("zero_stage data_parallel_sharding_strategy", lambda s: s.dp_cp == 1 and s.zero_stage,
     "needs more than one data-parallel rank, here dp = 1"),
    ("zero_replica_size no_overlap_param_gather zero_prefetch_limit", lambda s: not s.zero_stage,
     "needs --zero-stage 1, 2 or 3"),
    ("zero_prefetch_limit", lambda s: s.no_overlap_param_gather and (s.zero_stage == 1 or s.no_overlap_grad_reduce),
     "nothing is gathered ahead or reduced in the background"),
    ("rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling",
     lambda s: s.position_embedding_type != "rope", "needs --position-embedding-type rope"),
    ("rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_original_max_position",
     lambda s: not s.use_rope_scaling, "needs --use-rope-scaling"),
    ("max_position_embeddings", lambda s: s.position_embedding_type == "none", "there are no positions to limit"),
    ("reset_position_ids", lambda s: s.position_embedding_type == "none", "there are no positions to reset"),
    ("num_query_groups", lambda s: not s.group_query_attention, "needs --group-query-attention"),
    ("openai_gelu", lambda s: s.swiglu, "the MLP's activation is SwiGLU's, not GELU"),
    ("add_qkv_bias", lambda s: not s.disable_bias_linear, "every linear has a bias without --disable-bias-linear"),
    ("sgd_momentum", lambda s: s.optimizer != "sgd", "needs --optimizer sgd"),
    ("adam_beta1 adam_beta2 adam_eps", lambda s: s.optimizer != "adam", "needs --optimizer adam"),
    ("lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
     lambda s: s.lr_decay_style != "WSD", "needs --lr-decay-style WSD"),
    ("min_lr", lambda s: s.lr_decay_style == "constant", "the rate never decays with --lr-decay-style constant"),
    ("lr_decay_iters lr_decay_samples",
     lambda s: s.lr_decay_style in ("constant", "inverse-square-root") and s.lr_warmup_fraction is None,
     "that --lr-decay-style has no end"),
    ("lr_warmup_init", lambda s: not (s.lr_warmup_iters or s.lr_warmup_samples or s.lr_warmup_fraction),
     "needs a warm-up: --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction"),
    ("eval_iters", lambda s: s.eval_interval is None and s.test_data_path is None, "needs --eval-interval or --test-data-path"),
    ("eval_iters", lambda s: s.full_validation and s.eval_interval is not None and s.test_data_path is None,
     "--full-validation scores whole sets"),
    ("full_validation", lambda s: s.eval_interval is None, "needs --eval-interval"),
    ("full_validation", lambda s: s.mock_data, "made-up data has no end"),
    ("full_validation", lambda s: s.data_order == "megatron",
     "Megatron's order has the samples that its evaluations ask for, no whole set"),
    ("split", lambda s: s.mock_data, "made-up tokens are not split"),
    ("split", lambda s: s.train_data_path is not None, "--train-data-path is read whole"),
    ("split", lambda s: s.dataset_name is not None, "--dataset-split names the part of --dataset-name that is read"),
    ("dataset_config dataset_split dataset_text_key", lambda s: s.dataset_name is None, "needs --dataset-name"),
    ("split", lambda s: s.data_schedule is not None, "what --data-schedule names is read whole"),
    ("data_order", lambda s: s.mock_data, "made-up tokens have one order"),
    ("data_order", lambda s: s.dataset_name is not None, "--dataset-name is read in its own order"),
    ("data_cache_path", lambda s: s.data_order != "megatron", "needs --data-order megatron; the keyed order has no index"),
    ("valid_data_path", lambda s: s.eval_interval is None, "needs --eval-interval"),
    ("fim_spm_rate fim_prefix_id fim_middle_id fim_suffix_id", lambda s: s.fim_rate == 0, "needs --fim-rate above 0"),
    ("tokenizer_model", lambda s: s.tokenizer_type not in FROM_MODEL,
     f"needs --tokenizer-type {' or '.join(FROM_MODEL)}"),
    ("vocab_file merge_file", lambda s: s.tokenizer_type != "GPT2BPETokenizer", "needs --tokenizer-type GPT2BPETokenizer"),
    ("tiktoken_pattern tiktoken_num_special_tokens", lambda s: s.tokenizer_type != "TikTokenizer",
     "needs --tokenizer-type TikTokenizer"),
    ("save_interval save_interval_minutes save_weights_only_interval save_retain async_save no_save_optim",
     lambda s: s.save is None, "needs --save"),
    ("peer_checkpoint_interval", lambda s: s.peer_checkpoint_interval and not same_folder(s.save, s.load),
     "needs --save and --load with the same folder: only then does a restart go on from copies"),
    ("peer_checkpoint_interval",
     lambda s: s.peer_checkpoint_interval and (s.finetune or s.no_load_optim or have(s.load_iteration)),
     "a run that is told what to load does not go on from copies"),
    ("peer_checkpoint_interval", lambda s: have(s.peer_checkpoint_interval, s.train_iters)
     and s.peer_checkpoint_interval >= s.train_iters > 0, "the run ends before its first copy"),
    ("peer_checkpoint_dir", lambda s: not s.peer_checkpoint_interval, "needs --peer-checkpoint-interval"),
    ("no_load_optim finetune load_iteration no_verify_checkpoint use_checkpoint_args", lambda s: s.load is None, "needs --load"),
    ("world_size", lambda s: not s.dry_run, "needs --dry-run; a run's world size is the launcher's"),
    ("cluster", lambda s: not s.dry_run, "needs --dry-run, which says what the run would meet there"),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a run from starting: the flags (with their values), what is wrong, and what would work."""

    flags: tuple[str, ...]
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return " ".join(self.flags) + ": " + self.message + (f"; {self.fix}" if self.fix else "")


def flag_name(field_name: str) -> str:
    """num_layers -> --num-layers"""
    return "--" + field_name.replace("_", "-")


def nearest(value: int, works: Callable[[int], bool], low: int = 1) -> list[int]:
    """The closest numbers below and above `value` that work, the closer first; none where there is none near."""
    reach = range(1, min(4 * abs(value) + 130, FARTHEST))
    below = next((value - d for d in reach if value - d >= low and works(value - d)), None)
    above = next((value + d for d in reach if value + d >= low and works(value + d)), None)
    return sorted((n for n in (below, above) if n is not None), key=lambda n: abs(n - value))


def about(s: Values, names: str, message: str, fix: str = "") -> Problem:
    """A problem of the settings in `names`, each shown with its value (switches without)."""
    shown = []
    for name in names.split():
        value = getattr(s, name)
        if name == "world":
            shown.append(f"world size {value}")
        elif value is None or value is True:
            shown.append(flag_name(name))
        else:
            shown.append(f"{flag_name(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}")
    return Problem(tuple(shown), message, fix)


def nearest_values(**choices: list[int]) -> str:
    """`nearest values that work: --num-layers 4 or 8, --x 2`, from {field: numbers}."""
    texts = [f"{'world size' if name == 'world' else flag_name(name)} {' or '.join(map(str, numbers))}"
             for name, numbers in choices.items() if numbers]  # fmt: skip
    return f"nearest values that work: {', '.join(texts)}" if texts else ""


def same_folder(one: str | None, other: str | None) -> bool:
    return have(one, other) and os.path.abspath(one) == os.path.abspath(other)


def have(*values: Any) -> bool:
    return all(value is not None for value in values)


def missing(s: Values) -> Iterator[Problem]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(s, name) is None:
            yield about(s, name, "is missing", "give it, or take sizes from a --model preset")
    if s.micro_batch_size is None:
        yield about(s, "micro_batch_size", "is missing", "give the samples per forward pass, for example 1")
    if s.group_query_attention and s.num_query_groups is None:
        yield about(
            s,
            "num_query_groups",
            "is missing, --group-query-attention needs it",
            "give a divisor of --num-attention-heads",
        )
    if s.vocab_size is None and s.tokenizer_type not in OWN_VOCABULARY:
        yield about(
            s, "vocab_size", "is missing", "give it, or a --tokenizer-type that knows its own (not NullTokenizer)"
        )
    if s.tokenizer_type in FROM_MODEL and s.tokenizer_model is None:
        yield about(s, "tokenizer_type", "reads files, none is named", "add --tokenizer-model")
    for name in ("vocab_file", "merge_file"):
        if s.tokenizer_type == "GPT2BPETokenizer" and getattr(s, name) is None:
            yield about(s, f"tokenizer_type {name}", "the second is missing", "name the file")
    for name, values in (("recompute_method", "uniform or block"), ("recompute_num_layers", "1 for the least memory")):
        if s.recompute_granularity == "full" and getattr(s, name) is None:
            yield about(s, f"recompute_granularity {name}", "the second is missing", f"give it, for example {values}")
    if s.lr_decay_style == "WSD" and s.lr_wsd_decay_iters is None and s.lr_wsd_decay_samples is None:
        yield about(s, "lr_decay_style", "the length of the final decay is missing", "add --lr-wsd-decay-iters")
    for name in NEED_EOD:
        if getattr(s, name) and s.tokenizer_type is None:
            yield about(s, name, "which token ends a document is unknown", "add --tokenizer-type")
    lacking = [name for name in FIM_IDS if s.fim_rate and getattr(s, name) is None]
    if lacking:
        yield about(s, " ".join(["fim_rate", *lacking]), "which tokens mark the parts is unknown", "give their ids")
    if s.dry_run:
        return
    if s.lr is None:
        yield about(s, "lr", "is missing", "give the peak learning rate, for example 3e-4")
    if s.train_iters is None and s.train_samples is None:
        yield about(s, "train_iters", "is missing", "give --train-iters or --train-samples")
    if s.dataset_name is not None and s.tokenizer_type is None:
        yield about(s, "dataset_name", "is text, and nothing says how it becomes tokens", "add --tokenizer-type")
    if s.valid_data_path or s.test_data_path or s.train_data_path or s.data_schedule or s.dataset_name:
        if s.train_data_path is None and not (s.data_path or s.data_args_path or s.data_schedule or s.dataset_name):
            yield about(s, "train_data_path", "is missing", "name the training data beside that for validation and test")
        if s.valid_data_path is None and s.eval_interval is not None:
            yield about(s, "valid_data_path", "is missing", "name the validation data, or drop --eval-interval")
    elif s.data_path is None and s.data_args_path is None and not s.mock_data:
        yield about(s, "data_path", "is missing", "give the prefix of a .bin/.idx pair, or --mock-data")


def ranges(s: Values) -> Iterator[Problem]:
    """Values out of range; each is then set to None, which the rules after this one take as absent."""
    for name, value in list(vars(s).items()):
        problem = _out_of_range(s, name, value)
        if problem:
            yield problem
            setattr(s, name, None)


def _out_of_range(s: Values, name: str, value: Any) -> Problem | None:
    if isinstance(value, str) and not value.strip():
        return about(s, name, "is empty", "leave it out, or give a value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return about(s, name, "is not a finite number", "leave it out, or give a finite one")
    if name in AT_LEAST_ONE and value < 1:
        small = name == "ffn_hidden_size" and (s.hidden_size or 0) > 0
        fix = (
            "with --swiglu 64 is the smallest default, give a value"
            if small and value == 0
            else "nearest value that works: 1"
        )
        return about(s, name, "must be at least 1", fix)
    if name in AT_LEAST_ZERO and value < 0:
        return about(s, name, "must not be negative", "nearest value that works: 0")
    if name in ABOVE_ZERO and value <= 0:
        return about(s, name, "must be above 0", "leave it out for the default, or give a positive number")
    if name in SHARES and not 0 <= value < 1:
        return about(s, name, "must lie in [0, 1)", f"nearest value that works: {0 if value < 0 else 0.99}")
    if name in WHOLE_SHARES and not 0 <= value <= 1:
        return about(s, name, "must lie in [0, 1]", f"nearest value that works: {0 if value < 0 else 1}")
    if name == "rotary_percent" and not 0 < value <= 1:
        return about(
            s, name, "must lie in (0, 1]", "nearest value that works: 1.0" if value > 1 else "for example 0.5 or 1.0"
        )
    return None


def conflicts(s: Values, given: frozenset[str]) -> Iterator[Problem]:
    for one, other, why in CONFLICTS:
        if one in given and other in given:
            yield about(s, f"{one} {other}", f"contradict each other: {why}", "drop one of them")


def inert(s: Values, given: frozenset[str]) -> Iterator[Problem]:
    for names, without_effect, why in INERT:
        for name in names.split():
            if name in given and without_effect(s):
                yield about(s, name, f"has no effect: {why}", "drop it")


def compression(s: Values) -> Iterator[Problem]:
    """Low-rank gradients need whole matrices, once a step, and a step that ends."""
    if s.grad_compression == "none" or s.dp_cp == 1:
        return
    if s.zero_stage in (2, 3):
        stage = "zero_stage" if s.data_parallel_sharding_strategy is None else "data_parallel_sharding_strategy"
        text = "contradict each other: stages 2 and 3 keep no whole gradient over the microbatches of a step"
        yield about(s, f"grad_compression {stage}", text, "nearest values that work: --zero-stage 0 or 1")
    if s.pipeline_schedule in ASYNCHRONOUS and have(s.pipeline_model_parallel_size) and s.pipeline_model_parallel_size != 1:
        text = "contradict each other: gradients of an asynchronous pipeline are late already, and stages skip steps alone"
        yield about(s, "grad_compression pipeline_schedule", text, "take a schedule that flushes (1f1b)")


def marks(s: Values) -> Iterator[Problem]:
    """The three tokens of fill-in-the-middle: different ones, of the vocabulary."""
    ids = [getattr(s, name) for name in FIM_IDS]
    if not s.fim_rate or not have(*ids):
        return
    if len(set(ids)) < len(ids):
        yield about(s, " ".join(FIM_IDS), "prefix, middle and suffix need a token each", "give three different ids")
    for name, mark in zip(FIM_IDS, ids, strict=True):
        if have(s.vocab_size) and mark >= s.vocab_size:
            text = f"the vocabulary has {s.vocab_size} ids, from 0 to {s.vocab_size - 1}"
            yield about(s, f"{name} vocab_size", text, nearest_values(**{name: [s.vocab_size - 1]}))
