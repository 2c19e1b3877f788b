"""Every flag does something: changed on the command line, it changes what a run computes, writes or says (F01).

A row: (base flags, changed flags, what must differ). Each runs through pretrain_gpt.main, on one tiny model in fp64, so
that no effect is too small to be seen. A flag of config/ without a row fails the last test.
"""

import base64
import json
import signal
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron_lite import tokenizers
from megatron_lite.arguments import parse
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.peers import Peers
from megatron_lite.comm import launch
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import GROUPS
from megatron_lite.data.indexed import IndexedWriter
from megatron_lite.rules import flag_name
from megatron_lite.schedules import ASYNCHRONOUS
from megatron_lite.training import architecture, data, logging, setup, state
from megatron_lite.training.architecture import stored_settings
from megatron_lite.training.asynchronous import _Stream, _Window, annealing_length, steps_to_drain
from megatron_lite.training.setup import build_trainer, grid_of

TINY = ("--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
        "--global-batch-size 4 --vocab-size 40 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2 --lr 1e-2 "
        "--log-interval 1 --log-params-norm --peak-tflops 1")  # fmt: skip
RUN = "--fp64 --mock-data --train-iters 3"
ROPE = "--position-embedding-type rope"
SCALED = f"{ROPE} --use-rope-scaling --rope-original-max-position 32 --rope-scaling-factor 2"
GQA = "--num-attention-heads 4 --group-query-attention"
CHUNKED = "ranks 2 --pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8"
STALE = "ranks 2 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"
SHARED = "--context-parallel-size 8 --cp-comm-type a2a+p2p --ulysses-degree 2 --num-attention-heads 4"
WARM = "--lr-warmup-iters 2"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 2"
EVAL = "--eval-interval 1 --eval-iters 1"
SAVE = "--save {tmp}/save"
LOAD = "--load {tmp}/start --train-iters 7"  # 4 iterations were saved
WANDB = "--wandb-project p"
TRACE = "--trace-dir {tmp}/traces"
PROFILE = f"{TRACE} --profile --profile-step-start 2 --profile-step-end 3"
PROFILED = "ranks 2 --tensor-model-parallel-size 2 --profile --profile-step-start 2"
REAL = "--fp64 --train-iters 3 --data-path {tmp}/corpus"  # without --mock-data
OWN = "--fp64 --train-iters 3 --train-data-path {tmp}/corpus"
FP32 = "only --mock-data --train-iters 3"
DIVISIBLE = "--num-layers 3 --ffn-hidden-size 32"
FP8 = f"{FP32} --bf16 {DIVISIBLE} --fp8-format hybrid"
BYTES = f"{REAL} --tokenizer-type NullTokenizer --vocab-size 39"
TEXT = f"{REAL} --tokenizer-type ByteTokenizer --vocab-size 257"
STREAM = "--fp64 --train-iters 3 --tokenizer-type ByteTokenizer --vocab-size 257 --dataset-name {tmp}/texts"
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file {tmp}/vocab.json --merge-file {tmp}/merges.txt --vocab-size 300"
RANKS = "--tokenizer-type TikTokenizer --tokenizer-model {tmp}/ranks.json"
EXPERTS = "--disable-bias-linear --num-experts 4"
GROUPED = f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 1"
FIM = f"only {BYTES} --fim-rate 0.5 --fim-prefix-id 1 --fim-middle-id 2 --fim-suffix-id 3"

# field -> (added to the base, added to the changed run, observable that must differ)
ROWS = {
    # model
    "model": ("", "--model gpt2", "loss"),  # its GELU
    "num_layers": ("", "--num-layers 3", "loss"),
    "hidden_size": ("", "--hidden-size 32", "loss"),
    "ffn_hidden_size": ("", "--ffn-hidden-size 32", "loss"),
    "num_attention_heads": ("", "--num-attention-heads 4", "loss"),
    "group_query_attention": ("--num-attention-heads 4", "--group-query-attention --num-query-groups 2", "loss"),
    "num_query_groups": (f"{GQA} --num-query-groups 2", "--num-query-groups 1", "loss"),
    "kv_channels": ("", "--kv-channels 4", "loss"),
    "seq_length": ("", "--seq-length 12 --max-position-embeddings 16", "loss"),
    "max_position_embeddings": ("", "--max-position-embeddings 20", "params"),
    "position_embedding_type": ("", ROPE, "loss"),
    "rotary_base": (ROPE, "--rotary-base 500", "loss"),
    "rotary_percent": (ROPE, "--rotary-percent 0.5", "loss"),
    "rotary_interleaved": (ROPE, "--rotary-interleaved", "loss"),
    "rotary_seq_len_interpolation_factor": (ROPE, "--rotary-seq-len-interpolation-factor 2", "loss"),
    "use_rope_scaling": (ROPE, "--use-rope-scaling --rope-original-max-position 32", "loss"),
    "rope_scaling_factor": (SCALED, "--rope-scaling-factor 4", "loss"),
    "rope_low_freq_factor": (SCALED, "--rope-low-freq-factor 0.5", "loss"),
    "rope_high_freq_factor": (SCALED, "--rope-high-freq-factor 8", "loss"),
    "rope_original_max_position": (SCALED, "--rope-original-max-position 16", "loss"),
    "normalization": ("", "--normalization RMSNorm", "loss"),
    "norm_epsilon": ("", "--norm-epsilon 1e-3", "loss"),
    "swiglu": ("", "--swiglu", "loss"),
    "openai_gelu": ("", "--openai-gelu", "loss"),
    "disable_bias_linear": ("", "--disable-bias-linear", "norm"),
    "add_qkv_bias": ("--disable-bias-linear", "--add-qkv-bias", "norm"),
    "qk_layernorm": ("", "--qk-layernorm", "loss"),
    "untie_embeddings_and_output_weights": ("", "--untie-embeddings-and-output-weights", "loss"),
    "make_vocab_size_divisible_by": ("", "--make-vocab-size-divisible-by 7", "built"),
    "hidden_dropout": ("", "--hidden-dropout 0.1", "loss"),
    "attention_dropout": ("", "--attention-dropout 0.1", "loss"),
    "init_method_std": ("", "--init-method-std 0.1", "loss"),
    "label_smoothing": ("", "--label-smoothing 0.1", "loss"),
    "num_experts": ("--disable-bias-linear", "--num-experts 4", "loss"),
    "moe_layer_freq": (EXPERTS, "--moe-layer-freq 2", "loss"),
    "moe_ffn_hidden_size": (EXPERTS, "--moe-ffn-hidden-size 16", "loss"),
    "moe_shared_expert_intermediate_size": (EXPERTS, "--moe-shared-expert-intermediate-size 16", "loss"),
    "moe_router_topk": (EXPERTS, "--moe-router-topk 3", "loss"),
    "moe_router_score_function": (EXPERTS, "--moe-router-score-function sigmoid", "loss"),
    "moe_router_pre_softmax": (EXPERTS, "--moe-router-pre-softmax", "loss"),
    "moe_router_norm_topk": (f"{EXPERTS} --moe-router-score-function sigmoid", "--moe-router-norm-topk", "loss"),
    "moe_router_num_groups": (GROUPED, "--moe-router-num-groups 4 --moe-router-group-topk 2", "loss"),
    "moe_router_group_topk": (GROUPED, "--moe-router-group-topk 2", "loss"),
    "moe_router_topk_scaling_factor": (EXPERTS, "--moe-router-topk-scaling-factor 2.5", "loss"),
    "moe_router_load_balancing_type": (f"{EXPERTS} --moe-aux-loss-coeff 0.1", "--moe-router-load-balancing-type none", "norm"),
    "moe_aux_loss_coeff": (EXPERTS, "--moe-aux-loss-coeff 0.1", "norm"),
    "moe_z_loss_coeff": (EXPERTS, "--moe-z-loss-coeff 0.1", "norm"),
    "moe_router_enable_expert_bias": (EXPERTS, "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1", "loss"),
    "moe_router_bias_update_rate": (f"{EXPERTS} --moe-router-enable-expert-bias", "--moe-router-bias-update-rate 0.5", "loss"),
    "moe_expert_capacity_factor": (EXPERTS, "--moe-expert-capacity-factor 0.5", "loss"),
    # parallelism: what the ranks build
    "expert_model_parallel_size": (f"ranks 2 {EXPERTS}", "--expert-model-parallel-size 2", "built"),
    "expert_tensor_parallel_size": (f"ranks 2 {EXPERTS} --tensor-model-parallel-size 2", "--expert-tensor-parallel-size 1",
                                    "built"),
    "tensor_model_parallel_size": ("ranks 2", "--tensor-model-parallel-size 2", "built"),
    "sequence_parallel": ("ranks 2 --tensor-model-parallel-size 2", "--sequence-parallel", "built"),
    "pipeline_model_parallel_size": ("ranks 2", "--pipeline-model-parallel-size 2", "built"),
    "context_parallel_size": ("ranks 2", "--context-parallel-size 2", "built"),
    "cp_comm_type": ("ranks 2 --context-parallel-size 2", "--cp-comm-type allgather", "built"),
    "ulysses_degree": (f"ranks 8 {SHARED}", "--ulysses-degree 4", "built"),
    "pipeline_schedule": ("ranks 2 --pipeline-model-parallel-size 2", "--pipeline-schedule gpipe", "built"),
    "pipeline_memory_limit": (f"{CHUNKED} --pipeline-schedule auto", "--pipeline-memory-limit 1", "built"),
    "pipeline_split": (f"{CHUNKED} --vocab-size 9000", "--pipeline-split auto", "built"),  # a slow output layer
    "pipeline_schedule_file": ("ranks 2 --pipeline-model-parallel-size 2", "--pipeline-schedule-file {tmp}/mine.txt", "built"),
    "num_virtual_stages_per_pipeline_rank": (CHUNKED, "--num-virtual-stages-per-pipeline-rank 2", "built"),
    "num_layers_per_virtual_pipeline_stage": (CHUNKED, "--num-layers-per-virtual-pipeline-stage 1", "built"),
    "microbatch_group_size_per_virtual_pipeline_stage": (
        f"{CHUNKED} --num-virtual-stages-per-pipeline-rank 2", "--microbatch-group-size-per-virtual-pipeline-stage 4", "built"),
    "pipeline_drain_interval": (f"{STALE} --pipeline-schedule pipedream", "--pipeline-drain-interval 2", "built"),
    "pipemare_annealing_iters": (f"{STALE} --pipeline-schedule pipemare", "--pipemare-annealing-iters 3", "built"),
    "pipemare_correction_decay": (f"{STALE} --pipeline-schedule pipemare", "--pipemare-correction-decay 0.5", "built"),
    "decoder_first_pipeline_num_layers": ("ranks 2 --num-layers 3 --pipeline-model-parallel-size 2",
                                          "--decoder-first-pipeline-num-layers 1", "built"),
    "decoder_last_pipeline_num_layers": ("ranks 2 --num-layers 3 --pipeline-model-parallel-size 2",
                                         "--decoder-last-pipeline-num-layers 2", "built"),
    "grad_reduce_dtype": ("ranks 2 only --mock-data --train-iters 3", "--grad-reduce-dtype bf16", "built"),
    "grad_compression": ("ranks 2", "--grad-compression powersgd", "built"),
    "grad_compression_rank": ("ranks 2 --grad-compression powersgd", "--grad-compression-rank 2", "built"),
    "grad_compression_start_iter": ("ranks 2 --grad-compression powersgd", "--grad-compression-start-iter 2", "built"),
    "no_overlap_grad_reduce": ("ranks 2", "--no-overlap-grad-reduce", "built"),
    "zero_stage": ("ranks 2", "--zero-stage 2", "built"),
    "data_parallel_sharding_strategy": ("ranks 2", "--data-parallel-sharding-strategy optim", "built"),
    "zero_replica_size": ("ranks 4 --global-batch-size 8 --zero-stage 1", "--zero-replica-size 2", "built"),
    "no_overlap_param_gather": ("ranks 2 --zero-stage 1", "--no-overlap-param-gather", "built"),
    "zero_prefetch_limit": ("ranks 2 --zero-stage 3", "--zero-prefetch-limit 2", "built"),
    "ddp_bucket_size": ("ranks 2", "--ddp-bucket-size 100000", "built"),
    "distributed_backend": ("", "--distributed-backend gloo", "joined"),
    "distributed_timeout_minutes": ("", "--distributed-timeout-minutes 3", "joined"),
    # activation memory: what the ranks build; tests/parity/test_recompute.py counts what it saves
    "recompute_granularity": ("ranks 1", "--recompute-activations", "built"),
    "recompute_method": ("ranks 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                         "--recompute-method block", "built"),
    "recompute_num_layers": ("ranks 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                             "--recompute-num-layers 2", "built"),
    "recompute_modules": ("ranks 1 --recompute-activations", "--recompute-modules layernorm", "built"),
    "cpu_offloading_num_layers": ("", "--cpu-offloading-num-layers 1", "failure"),  # refused where there is no GPU
    # optimizer
    "optimizer": ("", "--optimizer sgd", "params"),
    "lr": ("", "--lr 2e-2", "params"),
    "min_lr": ("", "--min-lr 1e-3", "params"),
    "lr_decay_style": ("", "--lr-decay-style cosine", "params"),
    "lr_decay_iters": ("", "--lr-decay-iters 9", "params"),
    "lr_decay_samples": ("", "--lr-decay-samples 9", "params"),
    "lr_warmup_iters": ("", WARM, "params"),
    "lr_warmup_samples": ("", "--lr-warmup-samples 5", "params"),
    "lr_warmup_fraction": ("", "--lr-warmup-fraction 0.5", "params"),
    "lr_warmup_init": (WARM, "--lr-warmup-init 1e-3", "params"),
    "lr_wsd_decay_style": (WSD, "--lr-wsd-decay-style linear", "params"),
    "lr_wsd_decay_iters": (WSD, "--lr-wsd-decay-iters 3", "params"),
    "lr_wsd_decay_samples": ("--lr-decay-style WSD --lr-wsd-decay-samples 8", "--lr-wsd-decay-samples 7", "params"),
    "weight_decay": ("", "--weight-decay 0.2", "params"),
    "clip_grad": ("--optimizer sgd", "--clip-grad 0.01", "params"),
    "adam_beta1": ("", "--adam-beta1 0.8", "params"),
    "adam_beta2": ("", "--adam-beta2 0.9", "params"),
    "adam_eps": ("", "--adam-eps 1e-3", "params"),
    "sgd_momentum": ("--optimizer sgd", "--sgd-momentum 0.5", "params"),
    # precision
    "bf16": ("only --mock-data --train-iters 3", "--bf16", "loss"),
    "fp16": (FP32, "--fp16 --initial-loss-scale 256", "loss"),
    "fp64": ("only --mock-data --train-iters 3", "--fp64", "loss"),
    "fp8_format": (f"{FP32} --bf16 {DIVISIBLE}", "--fp8-format hybrid", "failure"),  # here is no GPU that has it
    "fp8_recipe": (f"ranks 1 {FP8}", "--fp8-recipe tensorwise", "built"),
    "fp8_amax_history_len": (f"ranks 1 {FP8}", "--fp8-amax-history-len 4", "built"),
    "fp8_margin": (f"ranks 1 {FP8}", "--fp8-margin 1", "built"),
    "first_last_layers_bf16": (f"ranks 1 {FP8}", "--first-last-layers-bf16", "built"),
    "loss_scale": (f"{FP32} --fp16 --initial-loss-scale 256", "without --initial-loss-scale --loss-scale 128", "scale"),
    "initial_loss_scale": (f"{FP32} --fp16", "--initial-loss-scale 256", "scale"),
    "min_loss_scale": (f"{FP32} --fp16 --hysteresis 1", "--min-loss-scale 4e9", "scale"),
    "loss_scale_window": (f"{FP32} --fp16 --initial-loss-scale 256", "--loss-scale-window 1", "scale"),
    "hysteresis": (f"{FP32} --fp16", "--hysteresis 1", "scale"),
    # data
    "data_path": (f"only {REAL}", "--data-path {tmp}/other", "loss"),
    "train_data_path": (f"only {REAL}", "without --data-path --train-data-path {tmp}/other", "loss"),
    "valid_data_path": (f"only {OWN} --valid-data-path {{tmp}}/corpus {EVAL}", "--valid-data-path {tmp}/other", "validation"),
    "test_data_path": (f"only {OWN} --test-data-path {{tmp}}/corpus", "--test-data-path {tmp}/other", "test"),
    "data_args_path": (f"only {REAL}", "without --data-path --data-args-path {tmp}/blend.txt", "loss"),
    "dataset_name": (f"only {TEXT}", "without --data-path --dataset-name {tmp}/texts", "loss"),
    "dataset_config": (f"only {STREAM}", "--dataset-config other", "failure"),
    "dataset_split": (f"only {STREAM}", "--dataset-split test", "loss"),
    "dataset_text_key": (f"only {STREAM}", "--dataset-text-key title", "loss"),
    "data_schedule": (f"only {REAL}", "without --data-path --data-schedule {tmp}/phases.txt", "loss"),
    "data_order": (f"only {REAL}", "--data-order megatron", "loss"),
    "data_cache_path": (f"only {REAL} --data-order megatron", "--data-cache-path {tmp}/corpus.bin", "failure"),  # is no folder
    "split": (f"only {REAL}", "--split 40,60", "loss"),
    "mock_data": (f"only {REAL}", "without --data-path --mock-data", "loss"),
    "tokenizer_type": (f"only {REAL}", "--tokenizer-type NullTokenizer --vocab-size 40", "loss"),  # its own end of document
    "tokenizer_model": (f"only {REAL} --vocab-size 80 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {{tmp}}/small",
                        "--tokenizer-model {tmp}/missing", "failure"),
    "vocab_file": (f"only {REAL} {GPT2}", "--vocab-file {tmp}/other.json", "failure"),
    "merge_file": (f"only {REAL} {GPT2}", "--merge-file {tmp}/other.txt", "failure"),
    "tiktoken_pattern": (f"only {REAL} {RANKS} --tiktoken-num-special-tokens 5", "--tiktoken-pattern v1", "tokenizer"),
    "tiktoken_num_special_tokens": (f"only {REAL} {RANKS}", "--tiktoken-num-special-tokens 5", "failure"),  # 1000 are too many
    "vocab_size": ("", "--vocab-size 41", "loss"),
    "eod_mask_loss": (f"only {BYTES}", "--eod-mask-loss", "loss"),
    "reset_position_ids": (f"only {BYTES}", "--reset-position-ids", "loss"),
    "reset_attention_mask": (f"only {BYTES}", "--reset-attention-mask", "loss"),
    "fim_rate": (FIM, "--fim-rate 1", "loss"),
    "fim_spm_rate": (FIM, "--fim-spm-rate 1", "loss"),
    "fim_prefix_id": (FIM, "--fim-prefix-id 4", "loss"),
    "fim_middle_id": (FIM, "--fim-middle-id 4", "loss"),
    "fim_suffix_id": (FIM, "--fim-suffix-id 4", "loss"),
    "num_workers": ("", "--num-workers 0", "prefetch"),
    # training
    "micro_batch_size": ("", "--micro-batch-size 1", "built"),  # the loss must not change: tests/parity
    "global_batch_size": ("", "--global-batch-size 2", "loss"),
    "train_iters": ("", "--train-iters 2", "iterations"),
    "train_samples": ("only --fp64 --mock-data --train-samples 8", "--train-samples 12", "iterations"),
    "rampup_batch_size": ("only --fp64 --mock-data --train-samples 12", "--rampup-batch-size 2 2 6", "loss"),
    "iterations_to_skip": ("", "--iterations-to-skip 2", "iterations"),
    "max_consecutive_skips": ("only --mock-data --train-iters 20 --lr 1e30", "--max-consecutive-skips 2", "failure"),
    "exit_interval": ("", "--exit-interval 2", "iterations"),
    "exit_duration_in_mins": ("", "--exit-duration-in-mins 1e-9", "iterations"),
    "eval_iters": (EVAL, "--eval-iters 2", "validation"),
    "eval_interval": (EVAL, "--eval-interval 2", "validation"),
    "full_validation": (f"only {REAL} {EVAL} --split 50,50", "without --eval-iters --full-validation", "validation"),
    "seed": ("", "--seed 5", "loss"),
    "compile": ("", "--compile", "compiled"),
    "dry_run": ("", "--dry-run", "iterations"),
    "world_size": ("--dry-run --world-size 1", "--world-size 2", "says"),
    "cluster": ("--dry-run", "--cluster h100", "says"),
    # checkpoint
    "save": ("", SAVE, "files"),
    "load": ("--train-iters 7", LOAD, "loss"),
    "save_interval": (SAVE, "--save-interval 2", "files"),
    "save_interval_minutes": (SAVE, "--save-interval-minutes 1e-9", "files"),
    "save_weights_only_interval": (SAVE, "--save-weights-only-interval 2", "files"),
    "save_retain": (f"{SAVE} --save-interval 1", "--save-retain 1", "files"),
    "async_save": (f"{SAVE} --save-interval 1", "--async-save", "behind"),
    "peer_checkpoint_interval": (f"{SAVE} --load {{tmp}}/save", "--peer-checkpoint-interval 2", "copies"),
    "peer_checkpoint_dir": (f"{SAVE} --load {{tmp}}/save --peer-checkpoint-interval 2",
                            "--peer-checkpoint-dir {tmp}/save/other", "copies"),
    "load_iteration": ("--load {tmp}/start --train-iters 7", "--load-iteration 2", "iterations"),
    "no_verify_checkpoint": ("--load {tmp}/start --train-iters 7", "--no-verify-checkpoint", "verified"),
    "use_checkpoint_args": ("--load {tmp}/start --train-iters 7", "--use-checkpoint-args", "inherited"),
    "no_save_optim": (SAVE, "--no-save-optim", "files"),
    "no_load_optim": (LOAD, "--no-load-optim", "params"),
    "finetune": (LOAD, "--finetune", "iterations"),
    # logging
    "log_interval": ("", "--log-interval 5", "iterations"),
    "jsonl": ("", "--jsonl {tmp}/other.jsonl", "files"),
    "tensorboard_dir": ("", "--tensorboard-dir {tmp}/board", "sinks"),
    "wandb_project": ("", WANDB, "sinks"),
    "wandb_exp_name": (WANDB, "--wandb-exp-name a", "sinks"),
    "wandb_entity": (WANDB, "--wandb-entity a", "sinks"),
    "wandb_group": (WANDB, "--wandb-group a", "sinks"),
    "wandb_tags": (WANDB, "--wandb-tags a b", "sinks"),
    "wandb_save_dir": (WANDB, "--wandb-save-dir {tmp}/w", "sinks"),
    "log_memory": ("", "--log-memory", "ledger"),
    "log_params_norm": ("", "without --log-params-norm", "params"),
    "trace_dir": ("", TRACE, "traces"),
    "trace_start": (TRACE, "--trace-start 3", "traces"),
    "trace_steps": (TRACE, "--trace-steps 1", "traces"),
    "profile": (TRACE, "--profile --profile-step-start 2 --profile-step-end 3", "profiles"),
    "profile_step_start": (PROFILE, "--profile-step-start 1", "profiles"),
    "profile_step_end": (PROFILE, "--profile-step-end 4", "profiles"),
    "profile_ranks": (PROFILED, "--profile-ranks 1", "built"),
    "peak_tflops": ("", "--peak-tflops 2", "mfu"),
}  # fmt: skip


def built(rank, argv, world):
    """What one rank makes of a command line, without training."""
    config, problems = parse(argv, world)
    assert not problems, problems
    mesh = build_mesh(grid_of(config, world), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "require_fp8", lambda *_: None)  # built here, run elsewhere
        trainer = build_trainer(config, mesh)
    sharding = trainer.engine.sharding
    return {
        "shapes": [(p.shard.name, tuple(p.shape)) for chunk in trainer.chunks for p in chunk.parameters()],
        "layers": [layer.layer for chunk in trainer.chunks for layer in chunk.layers],
        "buckets": [bucket.layout.size for bucket in trainer.engine.buckets],
        "cut activations": trainer.chunks[0].tp.sequence_parallel,
        "sharding": (sharding.stage, sharding.shard.ranks, sharding.overlap, sharding.overlap_gather, sharding.limit),
        "wire": (trainer.engine.wire_dtype, sharding.compression and (sharding.compression.rank, sharding.compression.start)),
        "8 bits": [m.self_attn.o_proj.fp8 and m.self_attn.o_proj.fp8.recipe for c in trainer.chunks for m in c.layers],
        "recorded": trainer.recorder is not None,
        "actions": [str(action) for action in trainer.actions],
        "activation": trainer.executor.shape,
        "shared sequences": (tp := trainer.chunks[0].tp).context and (tp.context.kinds, tp.context.a2a.ranks),
        "asynchronous": asynchronous_settings(trainer),
        "recomputed": [chunk.spans for chunk in trainer.chunks],
        "in a layer": [(m.self_attn.recompute_core, m.remake_norms, m.has_experts or m.mlp.remake)
                       for c in trainer.chunks for m in c.layers],
    }


def asynchronous_settings(trainer):
    """What a window of an asynchronous pipeline is made of: its steps, PipeMare's rates, its mean change of an update."""
    if trainer.config.parallel.pipeline_schedule not in ASYNCHRONOUS:
        return None
    window = _Window(trainer, _Stream(trainer, None, 0), 0, 0, 1)
    return steps_to_drain(trainer.config, 0), annealing_length(trainer.config), window.velocity and window.velocity.gamma


def recorder(made, name):
    """A kind of sink that only remembers how it was made."""

    class Sink:
        run = SimpleNamespace(id="an-id")

        def __init__(self, *args):
            made.append((name, *(str(a) for a in args if not isinstance(a, dict))))

        def write(self, iteration, values):
            pass

        def event(self, iteration, kind, text):
            pass

        def close(self):
            pass

    return Sink


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two corpora, a schedule, and a checkpoint of four iterations."""
    folder = tmp_path_factory.mktemp("flags")
    (folder / "mine.txt").write_text("F0 F1 BW1 BW0\nF0 F1 BW1 BW0\n")
    for seed, name in enumerate(("corpus", "other")):
        generator = np.random.default_rng(seed)
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(50):
                writer.add_document([*generator.integers(0, 39, 30), 39])
    (folder / "blend.txt").write_text(f"1 {folder}/other")
    (folder / "texts").mkdir()
    for name in ("train", "test"):
        rows = [json.dumps({"text": f"{name} {n}, some text", "title": f"title {n}"}) for n in range(30)]
        (folder / "texts" / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "phases.txt").write_text(f"0 {folder}/other\n4 {folder}/corpus")
    ranks = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode(), "token_str": ""} for n in range(256)]
    (folder / "ranks.json").write_text(json.dumps(ranks))
    (folder / "vocab.json").write_text(json.dumps({chr(byte): byte - 33 for byte in range(33, 127)} | {"<|endoftext|>": 94}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    flags = f"{TINY} {RUN} --train-iters 4 --save {folder}/start --save-interval 2"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = launch.keep_heap
    launch.keep_heap = lambda: False
    try:
        assert pretrain_gpt.main(flags.split()) == 0
    finally:
        launch.keep_heap = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return folder


@pytest.fixture
def observe(files, tmp_path, monkeypatch, capsys):
    """Runs a command line in this process; everything that a flag may change, by name."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "keep_heap", lambda: False)

    def run(flags, name):
        folder = tmp_path / name
        folder.mkdir()
        seen = {"joined": [], "sinks": [], "prefetch": [], "compiled": 0, "verified": [], "inherited": [], "tokenizer": [],
                "copies": []}  # fmt: skip
        monkeypatch.setattr(launch, "init_from_env", lambda *args: seen["joined"].append(args) or (0, 1, torch.device("cpu")))
        monkeypatch.setattr(logging, "WandbSink", recorder(seen["sinks"], "wandb"))
        monkeypatch.setattr(logging, "TensorBoardSink", recorder(seen["sinks"], "tensorboard"))
        loader, load, stored, copy = setup_loader, load_checkpoint, stored_settings, copy_to_peers

        def recorded(*args, **options):
            seen["prefetch"].append(options["prefetch"])
            return loader(*args, **options)

        def compiled(*args, **options):
            seen["compiled"] += 1

        def loaded(directory, requests, mesh, iteration, verify, **options):
            seen["verified"].append(verify)
            return load(directory, requests, mesh, iteration, verify, **options)

        def copied(self, iteration, *args):
            seen["copies"].append((iteration, self.place.disk.parents[2]))
            return copy(self, iteration, *args)

        def taken(*args):
            seen["inherited"].append(stored(*args))
            return seen["inherited"][-1]

        monkeypatch.setattr(state, "load_checkpoint", loaded)
        monkeypatch.setattr(Peers, "save", copied)
        monkeypatch.setattr(architecture, "stored_settings", taken)
        monkeypatch.setattr(tokenizers, "build_tokenizer", lambda *args: seen["tokenizer"].append(args) or build(*args))
        monkeypatch.setattr(data, "BatchLoader", recorded)
        monkeypatch.setattr(setup, "compile_elementwise", compiled)
        text = flags.replace("{tmp}/save", str(folder / "save")).replace("{tmp}/other.jsonl", str(folder / "other.jsonl"))
        text = text.replace("{tmp}/traces", str(folder / "traces"))
        argv = ["--jsonl", str(folder / "log.jsonl"), *text.replace("{tmp}", str(files)).split()]
        capsys.readouterr()
        code = pretrain_gpt.main(argv)
        out, err = capsys.readouterr()
        log = next(iter(sorted(folder.glob("*.jsonl"))), None)
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log else []
        steps = [row for row in rows if "lm loss" in row]
        return seen | {
            "failure": code and err,
            "loss": [row["lm loss"] for row in steps],
            "norm": [row["grad-norm"] for row in steps],
            "params": [row.get("params-norm") for row in steps],
            "scale": [row["loss-scale"] for row in steps],
            "iterations": [row["iteration"] for row in steps],
            "test": [row["lm loss test"] for row in rows if "lm loss test" in row],
            "validation": [(row["iteration"], row["lm loss validation"]) for row in rows if "lm loss validation" in row],
            "mfu": [round(row["mfu-percent"] / row["throughput"], 6) for row in steps if row["throughput"]],
            "files": sorted(f"{p.relative_to(folder)} {p.stat().st_size if p.suffix == '.safetensors' else ''}"
                            for p in folder.rglob("*")),
            "behind": out.count("behind the training"),
            "copies": seen["copies"],
            "verified": seen["verified"],
            "inherited": len(seen["inherited"]),
            "traces": sorted(path.name for path in folder.glob("traces/*")),
            "profiles": sorted(path.name for path in folder.glob("traces/profile/*")),
            "says": out,
            "ledger": [line.split()[0] for line in out.splitlines() if line.startswith("  activations ")],
        }  # fmt: skip

    setup_loader, copy_to_peers, build = data.BatchLoader, Peers.save, tokenizers.build_tokenizer
    yield run
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command_lines(field):
    """(base, changed) as text, and the number of ranks that build them."""
    base, change, _ = ROWS[field]
    world = 1
    if base.startswith("ranks "):
        _, number, *rest = base.split()
        world, base = int(number), " ".join(rest)
    tiny = TINY.replace(" --log-params-norm", "") if ROWS[field][0].startswith(STALE) else TINY  # no such norm there
    base = f"{tiny} {base.removeprefix('only ')}" if base.startswith("only ") else f"{tiny} {RUN} {base}"
    changed = base
    if change.startswith("without "):
        _, flag, *rest = change.split()
        words = base.split()
        at = words.index(flag)
        takes_value = at + 1 < len(words) and not words[at + 1].startswith("--")
        changed, change = " ".join(words[:at] + words[at + 1 + takes_value :]), " ".join(rest)
    return base, f"{changed} {change}", world


def values_of(text):
    """The last value of each flag of a command line."""
    return parse(text.replace("{tmp}", "/x").split(), 1)[0].as_dict()


@pytest.fixture(scope="module")
def twice():
    """Two runs of a base; many rows share one."""
    made = {}

    def of(base, observe):
        if base not in made:
            made[base] = observe(base, "base"), observe(base, "again")
        return made[base]

    return of


@pytest.mark.parametrize("field", [field for field in ROWS if ROWS[field][2] != "built"])
def test_flag(observe, twice, field):
    observable = ROWS[field][2]
    base, changed, _ = command_lines(field)
    before, again = twice(base, observe)
    after = observe(changed, "changed")
    if observable != "failure":
        assert not before["failure"] and not after["failure"], (before["failure"], after["failure"])
    assert before[observable] != after[observable], f"{flag_name(field)} does not change {observable}: {before[observable]}"
    assert again[observable] == before[observable], f"{observable} differs from run to run: it shows nothing"


@pytest.mark.parametrize("field", [field for field in ROWS if ROWS[field][2] == "built"])
def test_flag_that_shapes_the_ranks(pool, files, field):
    base, changed, world = command_lines(field)
    argvs = [text.replace("{tmp}", str(files)).split() for text in (base, changed)]
    before, after = (pool.run(built, world, argv, world) for argv in argvs)
    assert before != after, f"{flag_name(field)} changes nothing that the ranks build"


def test_every_flag_has_a_row():
    names = [field.name for group in GROUPS.values() for field in fields(group)]
    assert sorted(ROWS) == sorted(names)


@pytest.mark.parametrize("field", ROWS)
def test_the_row_changes_its_flag(field):
    """The two command lines of a row differ in the flag that it is about."""
    base, changed, _ = command_lines(field)
    group = next(name for name, cls in GROUPS.items() if field in {f.name for f in fields(cls)})
    assert values_of(base)[group][field] != values_of(changed)[group][field]
