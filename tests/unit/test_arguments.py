"""The command line: what is accepted, what is refused and with which words. No combination may raise."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pretrain_gpt
from megatron_lite.arguments import (
    build_parser,
    format_arguments,
    format_problems,
    parse,
    tokenizer_arguments,
    with_vocab_size,
)
from megatron_lite.config import GROUPS, Config
from megatron_lite.rules import CONFLICTS, INERT, flag_name
from megatron_lite.tokenizers import build_tokenizer

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32"
READ = f"{SIZES} --micro-batch-size 4 --lr 1 --train-iters 3 --vocab-size 9"
RUN = "--micro-batch-size 2 --lr 1e-3 --train-iters 100 --mock-data --vocab-size 250"
BASE = f"{SIZES} {RUN}"
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 16"
CP = "--attention-dropout 0 --context-parallel-size"
STALE = f"{PP2} --untie-embeddings-and-output-weights --pipeline-schedule"
ROPE = f"{BASE} --position-embedding-type rope"
BYTES = "--tokenizer-type ByteTokenizer --vocab-size 260"
FIM = f"{BYTES} --fim-rate 0.5 --fim-prefix-id 1 --fim-middle-id 2 --fim-suffix-id 3"
FIELDS = [field.name for group in GROUPS.values() for field in fields(group)]

# (flags, world size, texts of which each must be in one line of the answer). One mistake each: one problem each.
MOE = "--disable-bias-linear --num-experts 6"
BAD = [
    # read
    ("--num-layer 4", 1, ["--num-layer 4", "abbreviations are not accepted", "--num-layers"]),
    ("--hidden_dropout 0", 1, ["is not a flag", "did you mean --hidden-dropout?"]),
    ("--learning-rate 1", 1, ["--learning-rate 1: is not a flag"]),
    ("--adam-beta3 0.9", 1, ["did you mean", "--adam-beta1"]),
    ("-tp 2", 1, ["-tp 2: is not a flag here; use --tensor-model-parallel-size"]),
    ("--transformer-impl local", 1, ["--transformer-impl local", "drop it"]),
    ("--lr abc", 1, ["--lr abc: is not a number"]),
    ("--seed 1e3", 1, ["--seed 1e3: is not a whole number; nearest value that works: 1000"]),
    ("--seed x", 1, ["--seed x: is not a whole number"]),
    ("--seed", 1, ["--seed: needs a value"]),
    ("--optimizer adamw", 1, ["--optimizer adamw: is not one of the choices", "adam"]),
    ("--model lama2-7b", 1, ["--model lama2-7b", "llama2-7b"]),
    ("--bf16 true", 1, ["--bf16 true: is a switch and takes no value"]),
    ("--bf16=1", 1, ["--bf16 1: is a switch"]),
    ("--split 969, 30, 1", 1, ["--split 969, 30, 1: takes one value, 3 were given; quote"]),
    ("--use-rotary-position-embeddings --position-embedding-type none", 1, ["two spellings of one setting"]),
    # asynchronous pipelines
    (f"{PP2} --pipeline-schedule pipedream", 2, ["--pipeline-schedule pipedream: first and last stage", "--untie-"]),
    (f"{STALE} pipedream --zero-stage 1", 4, ["--zero-stage 1 --pipeline-schedule pipedream: contradict", "several versions"]),
    (f"{STALE} pipedream --fp16", 2, ["--fp16 --pipeline-schedule pipedream: a loss scale", "--bf16"]),
    (f"{STALE} pipemare --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2,
     ["--recompute-granularity full --pipeline-schedule pipemare", "take pipedream"]),
    (f"{STALE} pipedream --pipeline-split auto", 2, ["--pipeline-split auto: has no effect", "split evenly"]),
    (f"{STALE} pipedream --trace-dir x", 2, ["--trace-dir x: has no effect", "asynchronous"]),
    (f"{STALE} pipedream --log-params-norm", 2, ["--log-params-norm --pipeline-schedule pipedream", "drop --log-params-norm"]),
    (f"{STALE} pipedream-2bw --global-batch-size 2", 2, ["--pipeline-schedule pipedream-2bw: 1 microbatches", "2 would work"]),
    (f"{STALE} pipemare --num-virtual-stages-per-pipeline-rank 2", 2, ["--pipeline-schedule pipemare", "1 chunk per rank"]),
    (f"{STALE} pipedream --pipeline-drain-interval 300000", 2, ["--pipeline-drain-interval 300000", "262144"]),
    (f"{STALE} pipedream --pipeline-drain-interval 0", 2, ["--pipeline-drain-interval 0: must be at least 1"]),
    (f"{STALE} pipedream --pipemare-annealing-iters 9", 2, ["--pipemare-annealing-iters 9: has no effect", "pipemare"]),
    (f"{STALE} pipemare --pipemare-correction-decay 1", 2, ["--pipemare-correction-decay 1.0: must lie in [0, 1)"]),
    (f"{PP2} --pipeline-drain-interval 5", 2, ["--pipeline-drain-interval 5: has no effect", "pipedream-2bw"]),
    ("--pipeline-schedule pipedream", 1, ["--pipeline-schedule pipedream: has no effect"]),
    # profiles
    ("--profile-step-end 5", 1, ["--profile-step-end 5: has no effect: needs --profile"]),
    ("--profile-ranks 0", 1, ["--profile-ranks 0: has no effect: needs --profile"]),
    ("--profile --profile-step-start 12", 1, ["--profile-step-start 12 --profile-step-end 12", "--profile-step-end 13"]),
    ("--profile --train-iters 9", 1, ["--profile-step-start 10 --train-iters 9", "--profile-step-start 9"]),
    ("--profile --profile-ranks 1 2", 2, ["--profile-ranks 1 2 world size 2: there is no such rank; ranks are 0 to 1"]),
    ("--profile --profile-step-start 0", 1, ["--profile-step-start 0: must be at least 1"]),
    (f"{STALE} pipedream --profile", 2, ["--profile: has no effect", "asynchronous"]),
    # experts
    ("--moe-router-topk 3", 1, ["--moe-router-topk 3: has no effect: needs --num-experts"]),
    ("--num-experts 6", 1, ["--num-experts 6: experts have no biases; add --disable-bias-linear"]),
    (f"{MOE} --num-experts 0", 1, ["--num-experts 0: must be at least 1"]),
    (f"{MOE} --moe-router-topk 7", 1, ["--moe-router-topk 7 --num-experts 6", "--moe-router-topk 6"]),
    (f"{MOE} --moe-router-topk 1", 1, ["would learn nothing", "--moe-router-pre-softmax"]),
    (f"{MOE} --expert-model-parallel-size 4", 4, ["cannot be shared out evenly over 4", "size 3 or 6, --num-experts 4 or 8"]),
    (f"{MOE} --expert-model-parallel-size 3", 4, ["the 4 of dp x cp, which it must divide", "--expert-model-parallel-size 2"]),
    (f"{MOE} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1", 1, ["micro-batch", "seq_aux_loss"]),
    (f"{MOE} --moe-router-load-balancing-type seq_aux_loss", 1, ["has no effect: needs --moe-aux-loss-coeff above 0"]),
    (f"{MOE} --moe-layer-freq [1]*5", 1, ["--moe-layer-freq [1]*5 --num-layers", "speaks of 5 layers"]),
    (f"{MOE} --moe-layer-freq x", 1, ["'x' is neither a number nor a list"]),
    (f"{MOE} --moe-router-num-groups 3", 1, ["give both, or neither"]),
    (f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 1", 1, ["4 equal groups", "--moe-router-num-groups 3 or 6"]),
    (f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 4", 1, ["--moe-router-group-topk 3"]),
    (f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 1 --moe-router-topk 3", 1,
     ["--moe-router-topk 2, --moe-router-group-topk 2"]),
    (f"{MOE} --moe-expert-capacity-factor 3", 1, ["so none is ever dropped"]),
    (f"{MOE} --moe-expert-capacity-factor 0", 1, ["--moe-expert-capacity-factor 0.0: must be above 0"]),
    (f"{MOE} --moe-router-norm-topk", 1, ["adds up to 1"]),
    (f"{MOE} --moe-router-bias-update-rate 0.1", 1, ["needs --moe-router-enable-expert-bias"]),
    (f"{MOE} --expert-tensor-parallel-size 3 --tensor-model-parallel-size 2", 2, ["--expert-tensor-parallel-size 1 or 2"]),
    (f"{MOE} --moe-ffn-hidden-size 25 --tensor-model-parallel-size 2", 2, ["--moe-ffn-hidden-size 24 or 26"]),
    (f"{MOE} --grad-compression powersgd", 2, ["gradients of experts are not compressed"]),
    (f"{MOE} {STALE} pipedream", 2, ["--num-experts 6 --pipeline-schedule pipedream"]),
    # out of range
    ("--num-layers 0", 1, ["--num-layers 0: must be at least 1; nearest value that works: 1"]),
    ("--tensor-model-parallel-size 0", 1, ["--tensor-model-parallel-size 0: must be at least 1"]),
    ("--pipeline-model-parallel-size -2", 1, ["--pipeline-model-parallel-size -2: must be at least 1"]),
    ("--lr -1e-3", 1, ["--lr -0.001: must not be negative"]),
    ("--lr nan", 1, ["--lr nan: is not a finite number"]),
    ("--lr -inf", 1, ["--lr -inf: is not a finite number"]),
    ("--weight-decay -1", 1, ["--weight-decay"]),
    ("--clip-grad -1", 1, ["--clip-grad"]),
    ("--hidden-dropout 1", 1, ["--hidden-dropout 1.0: must lie in [0, 1)"]),
    ("--attention-dropout -0.1", 1, ["--attention-dropout -0.1", "nearest value that works: 0"]),
    ("--adam-beta2 1.0", 1, ["--adam-beta2 1.0: must lie in [0, 1)"]),
    ("--adam-eps 0", 1, ["--adam-eps 0.0: must be above 0"]),
    ("--label-smoothing 1.5", 1, ["--label-smoothing"]),
    ("--num-workers -1", 1, ["--num-workers"]),
    ("--log-interval 0", 1, ["--log-interval 0"]),
    ("--save ''", 1, ["--save : is empty"]),
    # contradictory
    ("--bf16 --fp64", 1, ["--bf16 --fp64: contradict each other"]),
    ("--bf16 --fp16", 1, ["--bf16 --fp16: contradict each other"]),
    ("--fp16 --fp64", 1, ["--fp16 --fp64: contradict each other"]),
    ("--fp16 --loss-scale 128 --initial-loss-scale 256", 1, ["contradict each other: the scale is constant or dynamic"]),
    ("--fp16 --loss-scale 128 --hysteresis 1", 1, ["--loss-scale 128.0 --hysteresis 1: contradict each other"]),
    ("--fp16 --min-loss-scale 512 --initial-loss-scale 256", 1, ["below its minimum", "--min-loss-scale 256.0"]),
    ("--fp16 --initial-loss-scale 0", 1, ["--initial-loss-scale 0.0: must be above 0"]),
    ("--fp16 --loss-scale inf", 1, ["--loss-scale inf: is not a finite number"]),
    ("--fp16 --loss-scale-window 0", 1, ["--loss-scale-window 0: must be at least 1"]),
    ("--fp16 --hysteresis 0", 1, ["--hysteresis 0: must be at least 1"]),
    ("--fp8-format hybrid", 1, ["--fp8-format hybrid: what is not a product of 8 bits is in bf16; add --bf16"]),
    ("--bf16 --fp8-recipe tensorwise", 1, ["--fp8-recipe tensorwise: has no effect: needs --fp8-format"]),
    ("--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-amax-history-len 4", 1, ["needs --fp8-recipe delayed"]),
    ("--bf16 --fp8-format hybrid --ffn-hidden-size 72", 1, ["--ffn-hidden-size 72: a side of 72 is not a multiple of 16"]),
    ("--bf16 --fp8-format hybrid --seq-length 31", 1, ["--seq-length 31 --micro-batch-size 2: a side of 62"]),
    ("--bf16 --fp8-format hybrid --fp8-margin -1", 1, ["--fp8-margin -1: must not be negative"]),
    ("--bf16 --fp8-format mxfp8", 1, ["--fp8-format mxfp8: is not one of the choices"]),
    ("--max-consecutive-skips 0", 1, ["--max-consecutive-skips 0: must be at least 1"]),
    ("--bf16 --loss-scale 128", 1, ["--loss-scale 128.0: has no effect: needs --fp16"]),
    ("--loss-scale-window 5", 1, ["--loss-scale-window 5: has no effect: needs --fp16"]),
    ("--grad-reduce-dtype bf16", 1, ["--grad-reduce-dtype bf16: has no effect: needs more than one data-parallel rank"]),
    ("--fp64 --grad-reduce-in-bf16", 2, ["has no effect: --fp64 gradients travel in fp64"]),
    ("--grad-compression powersgd", 1, ["--grad-compression powersgd: has no effect: needs more than one data-parallel rank"]),
    ("--grad-compression-rank 2", 2, ["--grad-compression-rank 2: has no effect: needs --grad-compression powersgd"]),
    ("--grad-compression powersgd --grad-compression-rank 0", 2, ["--grad-compression-rank 0: must be at least 1"]),
    ("--grad-compression powersgd --grad-compression-start-iter -1", 2, ["must not be negative"]),
    ("--grad-compression powersgd --grad-compression-start-iter 100", 2, ["has no effect: the run ends before it"]),
    ("--grad-compression powersgd --grad-reduce-dtype bf16", 2, ["contradict each other: both say what travels"]),
    ("--grad-compression powersgd --zero-stage 2", 2, ["--grad-compression powersgd --zero-stage 2: contradict", "0 or 1"]),
    ("--grad-compression powersgd --data-parallel-sharding-strategy optim_grads_params", 2, ["stages 2 and 3 keep no whole"]),
    (f"{PP2} --grad-compression powersgd --pipeline-schedule pipedream --untie-embeddings-and-output-weights", 4,
     ["asynchronous pipeline are late already", "1f1b"]),
    ("--grad-reduce-dtype fp16", 2, ["--grad-reduce-dtype fp16: is not one of the choices"]),
    ("--train-samples 800", 1, ["--train-iters 100 --train-samples 800: contradict"]),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 3", 1, ["--lr-warmup-fraction 0.1 --lr-warmup-iters 3: contradict"]),
    ("--lr-decay-iters 9 --lr-decay-samples 9", 1, ["both set the length of the decay"]),
    (f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2", 2,
     ["contradict each other: both set the chunks"]),
    (f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --decoder-first-pipeline-num-layers 1", 2,
     ["contradict each other: one makes all stages equal", "--num-virtual-stages-per-pipeline-rank"]),
    ("--data-path a", 1, ["--mock-data --data-path a: contradict"]),
    ("--zero-stage 1 --data-parallel-sharding-strategy optim", 2, ["contradict each other: both set what is sharded"]),
    ("--use-distributed-optimizer --zero-stage 2", 2, ["two spellings of one setting"]),
    ("--zero-stage 3 --ddp-bucket-size 1000", 2, ["--zero-stage 3 --ddp-bucket-size 1000", "a layer at a time"]),
    ("--zero-stage 1", 1, ["--zero-stage 1: has no effect", "dp = 1"]),
    ("--data-parallel-sharding-strategy optim_grads", 1, ["has no effect", "dp = 1"]),
    ("--zero-stage 4", 2, ["--zero-stage 4: is not one of the choices"]),
    ("--zero-replica-size 2", 4, ["--zero-replica-size 2: has no effect"]),
    ("--zero-prefetch-limit 2", 2, ["--zero-prefetch-limit 2: has no effect"]),
    ("--no-overlap-param-gather", 2, ["--no-overlap-param-gather: has no effect"]),
    ("--zero-stage 1 --no-overlap-param-gather --zero-prefetch-limit 2", 2, ["nothing is gathered ahead"]),
    ("--zero-stage 2 --zero-prefetch-limit 0", 2, ["--zero-prefetch-limit 0: must be at least 1"]),
    ("--zero-stage 2 --zero-replica-size 3 --global-batch-size 16", 4, ["4 data-parallel ranks", "--zero-replica-size 2"]),
    ("--zero-stage 2 --zero-replica-size 4 --global-batch-size 16", 4, ["4 data-parallel ranks", "--zero-replica-size 2"]),
    ("--train-data-path a", 1, ["--mock-data --train-data-path a: contradict"]),
    ("--data-args-path a", 1, ["--mock-data --data-args-path a: contradict"]),
    ("--load x --finetune --no-load-optim", 1, ["--finetune --no-load-optim: contradict"]),
    # without effect
    ("--sequence-parallel", 1, ["--sequence-parallel: has no effect: needs --tensor-model-parallel-size above 1"]),
    ("--pipeline-schedule gpipe", 1, ["--pipeline-schedule gpipe: has no effect"]),
    ("--num-virtual-stages-per-pipeline-rank 2", 1, ["has no effect: needs --pipeline-model-parallel-size above 1"]),
    ("--num-layers-per-virtual-pipeline-stage 2", 1, ["has no effect: needs --pipeline-model-parallel-size above 1"]),
    (f"{PP2} --microbatch-group-size-per-virtual-pipeline-stage 2", 2, ["has no effect: 1f1b runs no groups"]),
    ("--decoder-first-pipeline-num-layers 2", 1, ["has no effect: needs --pipeline-model-parallel-size"]),
    ("--no-overlap-grad-reduce", 1, ["--no-overlap-grad-reduce: has no effect"]),
    ("--rotary-base 1e4", 1, ["--rotary-base 10000.0: has no effect: needs --position-embedding-type rope"]),
    ("--use-rope-scaling", 1, ["--use-rope-scaling: has no effect"]),
    ("--position-embedding-type rope --rope-scaling-factor 4", 1, ["has no effect: needs --use-rope-scaling"]),
    ("--num-query-groups 2", 1, ["--num-query-groups 2: has no effect: needs --group-query-attention"]),
    ("--swiglu --openai-gelu", 1, ["--openai-gelu: has no effect"]),
    ("--add-qkv-bias", 1, ["--add-qkv-bias: has no effect"]),
    ("--sgd-momentum 0.5", 1, ["--sgd-momentum 0.5: has no effect: needs --optimizer sgd"]),
    ("--optimizer sgd --adam-beta1 0.5", 1, ["--adam-beta1 0.5: has no effect"]),
    ("--lr-wsd-decay-iters 5", 1, ["--lr-wsd-decay-iters 5: has no effect: needs --lr-decay-style WSD"]),
    ("--lr-decay-style constant --min-lr 1e-5", 1, ["--min-lr 1e-05: has no effect"]),
    ("--lr-warmup-init 1e-5", 1, ["--lr-warmup-init 1e-05: has no effect: needs a warm-up"]),
    ("--eval-iters 5", 1, ["--eval-iters 5: has no effect: needs --eval-interval or --test-data-path"]),
    ("--split 9,1", 1, ["--split 9,1: has no effect"]),
    ("--tokenizer-model x", 1, ["--tokenizer-model x: has no effect"]),
    ("--save-interval 10", 1, ["--save-interval 10: has no effect: needs --save"]),
    ("--finetune", 1, ["--finetune: has no effect: needs --load"]),
    ("--save a --peer-checkpoint-interval 5", 1, ["--peer-checkpoint-interval 5: has no effect: needs --save and --load with"]),
    ("--save a --load b --peer-checkpoint-interval 5", 1, ["with the same folder: only then does a restart go on from copies"]),
    ("--save a --load a --load-iteration 3 --peer-checkpoint-interval 5", 1, ["told what to load does not go on from copies"]),
    ("--save a --load a --peer-checkpoint-interval 100", 1, ["has no effect: the run ends before its first copy"]),
    ("--save a --load a --peer-checkpoint-interval -1", 1, ["--peer-checkpoint-interval -1: must not be negative"]),
    ("--peer-checkpoint-dir d", 1, ["--peer-checkpoint-dir d: has no effect: needs --peer-checkpoint-interval"]),
    ("--wandb-exp-name x", 1, ["--wandb-exp-name x: has no effect: needs --wandb-project"]),
    ("--world-size 4 --global-batch-size 8", 1, ["--world-size 4: has no effect: needs --dry-run"]),
    # sizes
    ("--num-attention-heads 6", 1, ["64 is not a multiple of 6", "--num-attention-heads 4 or 8", "--kv-channels"]),
    ("--group-query-attention", 1, ["--num-query-groups: is missing"]),
    ("--group-query-attention --num-query-groups 3", 1, ["8 heads cannot share 3 groups", "--num-query-groups 2 or 4"]),
    ("--max-position-embeddings 16", 1, ["--seq-length 32 --max-position-embeddings 16: samples are longer"]),
    ("--position-embedding-type rope --kv-channels 7", 1, ["RoPE turns pairs", "--kv-channels 6 or 8"]),
    ("--position-embedding-type rope --use-rope-scaling --rope-low-freq-factor 4", 1, ["must be below the high one"]),
    ("--pipeline-model-parallel-size 3", 4, ["not a multiple of tp x pp = 3", "world size 3 or 6"]),
    (f"{CP} 3 --seq-length 48", 4, ["not a multiple of tp x cp x pp = 3", "world size 3 or 6", "parallel-size 2 or 4"]),
    (f"{CP} 4 --seq-length 36", 4, ["36 tokens are not a multiple of 2 x cp 4 = 8", "--seq-length 32 or 40", "size 3 or 6"]),
    (f"{CP} 4 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 24", 16,
     ["24 tokens are not a multiple of cp 4 x tp 4 (--sequence-parallel) = 16", "--seq-length 16 or 32", "size 3 or 6"]),
    ("--context-parallel-size 2", 2, ["--attention-dropout 0.1", "p2p: a query's keys come in parts", "dropout 0;"]),
    ("--context-parallel-size 2 --cp-comm-type a2a a2a allgather p2p", 2, ["allgather and p2p: a query's keys"]),
    (f"{CP} 2 --cp-comm-type a2a p2p", 2, ["--cp-comm-type a2a p2p --num-layers 4: names 2 ways for 4 layers"]),
    (f"{CP} 16 --cp-comm-type a2a", 16, ["8 heads of a tensor-parallel rank cannot be dealt out to 16 ranks", "size 8",
                                         "--num-attention-heads 16"]),
    (f"{CP} 4 --cp-comm-type a2a --num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6", 4,
     ["6 key/value heads of a tensor-parallel rank cannot be dealt out to 4 ranks", "--context-parallel-size 3 or 6"]),
    (f"{CP} 4 --cp-comm-type a2a+p2p", 4, ["it is not said how many ranks trade heads", "--ulysses-degree 2"]),
    (f"{CP} 4 --cp-comm-type a2a+p2p --ulysses-degree 4", 4, ["4 ranks cannot be groups of 4", "--ulysses-degree 2"]),
    (f"{CP} 2 --cp-comm-type a2a+p2p --ulysses-degree 2", 2, ["2 ranks cannot be groups of 2", "--context-parallel-size 4"]),
    (f"{CP} 2 --cp-comm-type a2a --ulysses-degree 2", 2, ["--ulysses-degree 2: has no effect", "a2a+p2p"]),
    ("--cp-comm-type a2a", 1, ["--cp-comm-type a2a: has no effect: needs --context-parallel-size above 1"]),
    (f"{CP} 0", 1, ["--context-parallel-size 0: must be at least 1"]),
    ("--tensor-model-parallel-size 3 --ffn-hidden-size 96", 3, ["8 heads cannot be cut into 3 equal parts", "9 or 6"]),
    ("--tensor-model-parallel-size 8 --ffn-hidden-size 100", 8, ["100 MLP channels", "--ffn-hidden-size 96 or 104"]),
    ("--tensor-model-parallel-size 8 --sequence-parallel --seq-length 36", 8, ["36 tokens of --sequence-parallel"]),
    ("--num-attention-heads 12 --kv-channels 8 --group-query-attention --num-query-groups 6 "
     "--tensor-model-parallel-size 4", 4, ["neither is a multiple of the other", "--num-query-groups 4"]),
    ("--pipeline-model-parallel-size 8", 8, ["4 layers cannot fill 8 stages", "--num-layers 8"]),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4", 2, ["leave 0 of 4 layers"]),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1", 2,
     ["make 3 layers, the model has 4"]),
    (f"{PP2} --pipeline-schedule dualpipe --global-batch-size 6", 2, ["3 microbatches per step", "at least 2 x 2", "4 would"]),
    ("--pipeline-model-parallel-size 3 --pipeline-schedule dualpipe --global-batch-size 12", 3,
     ["an even number of pipeline ranks; 2 or 4 would work"]),
    (f"{PP2} --pipeline-schedule dualpipe --num-virtual-stages-per-pipeline-rank 1", 2,
     ["dualpipe runs 2 chunks per rank, not 1"]),
    (f"{PP2} --pipeline-schedule dualpipe --num-layers-per-virtual-pipeline-stage 1", 2,
     ["dualpipe runs 2 chunks per rank, not 4", "--num-layers-per-virtual-pipeline-stage 2"]),
    ("--pipeline-model-parallel-size 6 --pipeline-schedule dualpipe --global-batch-size 24", 6,
     ["4 layers cannot fill 6 stages"]),
    (f"{PP2} --num-layers-per-virtual-pipeline-stage 3", 2,
     ["4 layers on 2 pipeline ranks are not cut into chunks of 3", "--num-layers 6", "per-virtual-pipeline-stage 2"]),
    (f"{PP2} --num-virtual-stages-per-pipeline-rank 3", 2,
     ["4 layers cannot fill 6 stages", "--num-layers 6", "--num-virtual-stages-per-pipeline-rank 2"]),
    (f"{PP2} --num-layers 3 --pipeline-schedule zbv", 2, ["--pipeline-schedule zbv", "3 layers cannot fill 4", "--num-layers 4"]),
    (f"{PP2} --pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 3", 2,
     ["--pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 3: zbv runs 2 chunks per rank, not 3",
      "nearest values that work: --num-virtual-stages-per-pipeline-rank 2"]),
    (f"{PP2} --pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2", 2,
     ["zb-h1 runs 1 chunk per rank, not 2", "nearest values that work: --num-virtual-stages-per-pipeline-rank 1"]),
    (f"{PP2} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 1", 2,
     ["needs 2 or more", "per-pipeline-rank 2"]),
    (f"{PP2} --pipeline-schedule dualpipev --global-batch-size 6", 2, ["3 microbatches per step", "4 would work"]),
    (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2", 2,
     ["larger than the 1 microbatches per step", "2 microbatches would work"]),
    (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 1", 2,
     ["smaller than the 2 pipeline ranks", "--microbatch-group-size-per-virtual-pipeline-stage 2"]),
    (f"{PP2} --num-layers 1200 --num-virtual-stages-per-pipeline-rank 300", 2, ["300 chunks per rank are more than 256", "256"]),
    (f"{PP2} --num-virtual-stages-per-pipeline-rank 0", 2, ["--num-virtual-stages-per-pipeline-rank 0: must be at least 1"]),
    ("--global-batch-size 5", 1, ["5 is not a multiple of 2 x dp 1 = 2", "--global-batch-size 4 or 6"]),
    ("--global-batch-size 6", 2, ["6 is not a multiple of 2 x dp 2 = 4"]),
    ("--min-lr 1", 1, ["--min-lr 1.0 --lr 0.001: the rate would rise"]),
    ("--lr-warmup-iters 100", 1, ["the warm-up must end before the decay does", "--lr-warmup-iters 99"]),
    ("--lr-decay-style WSD", 1, ["the length of the final decay is missing"]),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 60 --lr-warmup-iters 50", 1, ["--lr-wsd-decay-iters 50"]),
    ("--tokenizer-type HuggingFaceTokenizer", 1, ["reads files, none is named"]),
    ("--tokenizer-type ByteTokenizer", 1, ["the tokenizer has 257 ids"]),
    ("--eod-mask-loss", 1, ["which token ends a document is unknown"]),
    ("--reset-position-ids", 1, ["--reset-position-ids: which token ends a document is unknown"]),
    ("--reset-attention-mask", 1, ["--reset-attention-mask: which token ends a document is unknown"]),
    ("--fim-rate 0.5 --fim-prefix-id 1 --fim-middle-id 2 --fim-suffix-id 3", 1, ["--fim-rate 0.5: which token ends a document"]),
    (f"{BYTES} --fim-rate 0.5 --fim-prefix-id 1", 1, ["--fim-rate 0.5 --fim-middle-id --fim-suffix-id: which tokens mark"]),
    (f"{FIM} --fim-rate 1.5", 1, ["--fim-rate 1.5: must lie in [0, 1]; nearest value that works: 1"]),
    ("--fim-spm-rate 0.1", 1, ["--fim-spm-rate 0.1: has no effect: needs --fim-rate above 0"]),
    (f"{FIM} --fim-middle-id 1", 1, ["--fim-prefix-id 1 --fim-middle-id 1 --fim-suffix-id 3: prefix, middle and suffix need"]),
    (f"{FIM} --fim-suffix-id 999", 1, ["--fim-suffix-id 999 --vocab-size", "nearest values that work: --fim-suffix-id"]),
    (f"{BYTES} --position-embedding-type none --reset-position-ids", 1, ["--reset-position-ids: has no effect: there are no"]),
    ("--dataloader-inter-document-masking", 1, ["use --reset-attention-mask"]),
]  # fmt: skip

BAD_WHOLE = [
    ("", ["--num-layers: is missing", "--hidden-size: is missing", "--lr: is missing", "--data-path: is missing"]),
    (f"stray {BASE}", ["stray: belongs to no flag"]),
    (f"{SIZES} --micro-batch-size 1 --lr 1 --train-iters 5 --mock-data", ["--vocab-size: is missing"]),
    (f"{SIZES} --micro-batch-size 1 --lr 1 --train-iters 5 --mock-data --tokenizer-type NullTokenizer",
     ["--vocab-size: is missing"]),
    (f"{SIZES} --micro-batch-size 4 --lr 1 --train-samples 3 --mock-data --vocab-size 9", ["shorter than a step"]),
    (f"{READ} --data-path a --split 1,x", ["--split 1,x"]),
    (f"{READ} --data-path 0.3 a 0.7", ["--data-path 0.3 a 0.7: 3 words are no pairs of weight and prefix"]),
    (f"{READ} --data-path a 0.3 b 0.7", ["word 1, a, stands where a weight is expected"]),
    (f"{READ} --data-path 0.3 0.7 a b", ["word 2, 0.7, stands where a prefix is expected"]),
    (f"{READ} --data-path 0 a 1 b", ["weight 0 is not a finite number above 0; leave out what is not to be read"]),
    (f"{READ} --data-path -1 a 1 b", ["weight -1 is not a finite number above 0"]),
    (f"{READ} --data-path nan a 1 b", ["weight nan is not a finite number"]),
    (f"{READ} --data-path inf a 1 b", ["weight inf is not a finite number"]),
    (f"{READ} --data-path a b a", ["--data-path a b a: a is named twice; name it once, with the sum of its weights"]),
    (f"{READ} --train-data-path 0 a", ["--train-data-path 0 a: weight 0"]),
    (f"{READ} --tokenizer-type NullTokenizer --data-schedule a --dataset-name b",
     ["--data-schedule a --dataset-name b: contradict each other: both name the training data"]),
    (f"{READ} --data-path a --data-args-path b", ["--data-path a --data-args-path b: contradict each other: both name"]),
    (f"{READ} --data-path a --train-data-path b", ["--data-path a --train-data-path b: contradict each other"]),
    (f"{READ} --train-data-path b --split 9,1", ["--split 9,1: has no effect: --train-data-path is read whole"]),
    (f"{READ} --train-data-path b --valid-data-path c", ["--valid-data-path c: has no effect: needs --eval-interval"]),
    (f"{READ} --train-data-path b --eval-interval 2", ["--valid-data-path: is missing; name the validation data"]),
    (f"{READ} --test-data-path b", ["--train-data-path: is missing; name the training data"]),
    (f"{SIZES} --micro-batch-size 4 --lr 1 --train-iters 3 --data-path a --vocab-size 9 --split 0,1", ["to train on"]),
    (f"{SIZES} --micro-batch-size 4 --lr 1 --train-iters 3 --data-path a --vocab-size 9 --split 1 --eval-interval 2",
     ["--split 1 --eval-interval 2: leaves nothing to evaluate on"]),
    ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --swiglu " + RUN, ["--ffn-hidden-size 0"]),
    ("--model gpt2 --seq-length 2048 " + RUN, ["--seq-length 1024, --max-position-embeddings 2048"]),
]  # fmt: skip

GOOD = [
    (BASE, 1),
    (f"{BASE} --bf16 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 8),
    (f"{ROPE} --use-rope-scaling --rope-scaling-factor 32 --rotary-base 5e5", 1),
    (f"{BASE} --use-rotary-position-embeddings --position-embedding-type rope", 1),
    (f"{BASE} --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 8", 8),
    (f"{BASE} --num-layers 3 --pipeline-model-parallel-size 2 --pipeline-schedule gpipe", 2),
    (f"{BASE} {PP2} --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3", 2),
    (f"{BASE} {PP2} --num-layers-per-virtual-pipeline-stage 1", 2),
    (f"{BASE} {PP2} --num-layers-per-virtual-pipeline-stage 2", 2),  # one chunk
    (f"{BASE} {PP2} --pipeline-schedule interleaved --num-layers 5 --decoder-first-pipeline-num-layers 2", 2),
    (f"{BASE} {PP2} --pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 2", 2),
    (f"{BASE} {PP2} --pipeline-schedule dualpipev", 2),
    (f"{BASE} {PP2} --pipeline-schedule dualpipe", 2),
    (f"{BASE} {PP2} --pipeline-schedule zb-h2", 2),
    (f"{BASE} --use-distributed-optimizer --zero-stage 1 --no-overlap-param-gather", 2),
    (f"{BASE} {CP} 2 --zero-stage 1 --grad-reduce-dtype bf16", 2),
    (f"{BASE} {CP} 4 --cp-comm-type p2p a2a allgather a2a+p2p --ulysses-degree 2", 8),
    (f"{BASE} --context-parallel-size 2 --cp-comm-type a2a", 2),
    (f"{BASE} {CP} 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2", 8),
    (f"{BASE} --zero-stage 3 --num-distributed-optimizer-instances 2 --zero-prefetch-limit 2", 4),
    (f"{BASE} --data-parallel-sharding-strategy no_shard", 1),
    (f"{BASE} --lr 3e-4 --lr-decay-style WSD --lr-wsd-decay-iters 50 --lr-warmup-iters 9 --lr-warmup-init 1e-7", 1),
    (f"{BASE} --lr-decay-style constant --lr-warmup-fraction .1 --lr-decay-iters 50", 1),
    (f"{BASE} --lr 0 --eval-interval 1 --eval-iters 2 --save out --persistent-save-interval 5 --load x --finetune", 1),
    (f"{BASE} --save a --load ./a/ --peer-checkpoint-interval 5 --peer-checkpoint-dir d", 2),
    (f"{BASE} --peer-checkpoint-interval 0", 1),
    (f"{BASE} --tokenizer-type ByteTokenizer --vocab-size 257 --eod-mask-loss --optimizer sgd --sgd-momentum 0", 1),
    (f"{BASE} {FIM} --reset-position-ids --reset-attention-mask --fim-spm-rate 1", 1),
    (f"{BASE} --wandb-project p --wandb-exp-name e --no-overlap-grad-reduce", 2),
    ("--model llama3-8b --micro-batch-size 1 --dry-run --world-size 16 --tensor-model-parallel-size 16", 1),
    (f"{SIZES} --micro-batch-size 4 --lr 1 --train-samples 99 --data-path a --tokenizer-type ByteTokenizer --split=1",
     1),
]  # fmt: skip


def words(flags):
    return [word.replace("''", "") for word in flags.split()]


@pytest.mark.parametrize(("flags", "world", "texts"), BAD)
def test_bad_flags_are_one_problem_in_words(flags, world, texts):
    _, problems = parse(words(f"{BASE} {flags}"), world)
    lines = [str(problem) for problem in problems]
    assert len(lines) == 1, lines
    assert all(text in lines[0] for text in texts), lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize(("line", "texts"), BAD_WHOLE)
def test_bad_command_lines(line, texts):
    _, problems = parse(line.split(), 1)
    report = format_problems(problems)
    assert all(text in report for text in texts), report


@pytest.mark.parametrize(("line", "world"), GOOD)
def test_good_command_lines(line, world):
    config, problems = parse(line.split(), world)
    assert problems == []
    assert config.num_microbatches >= 1 and config.grid.world_size == config.train.world_size
    assert "nan" not in format_arguments(config)


def test_all_problems_come_together():
    line = (
        "--num-layer 4 --lr abc --bf16 --fp64 --tensor-model-parallel-size 3 --sequence-parallel=1 --adam-eps -1 oops"
    )
    _, problems = parse(line.split(), 4)
    report = format_problems(problems)
    for text in (
        "did you mean --num-layers or --num-layers-per-virtual-pipeline-stage?",
        "--lr abc",
        "--bf16 --fp64",
        "tp x pp = 3",
        "is a switch",
        "--adam-eps",
        "--hidden-size",
    ):
        assert text in report
    assert "--num-layers: is missing" not in report and "--lr: is missing" not in report  # they were tried
    assert report.splitlines()[0] == f"pretrain_gpt.py: {len(problems)} problems in the arguments"


def test_derived_values():
    config, _ = parse(f"{SIZES} --swiglu --micro-batch-size 3 --lr 1 --train-samples 100 --mock-data "
                      "--tokenizer-type ByteTokenizer --tensor-model-parallel-size 2".split(), 8)  # fmt: skip
    assert config.model.kv_channels == 8
    assert config.model.ffn_hidden_size == 128  # 64 * floor(4 * 64 * 2/3 / 64)
    assert config.model.max_position_embeddings == 32
    assert (config.data_parallel_size, config.train.global_batch_size, config.num_microbatches) == (4, 12, 1)
    assert config.train.train_iters == 8
    assert config.data.vocab_size == 257 and config.padded_vocab_size == 512


def test_vocabulary_of_the_null_tokenizer_counts_its_end_of_document():
    config, problems = parse(f"{BASE} --tokenizer-type NullTokenizer".split(), 1)
    tokenizer = build_tokenizer(*tokenizer_arguments(config))
    assert problems == [] and config.data.vocab_size == 251 == tokenizer.vocab_size


def test_vocabulary_from_the_tokenizer_is_a_second_step():
    line = f"{SIZES} --micro-batch-size 1 --lr 1 --train-iters 1 --mock-data --tokenizer-type HuggingFaceTokenizer"
    config, problems = parse(f"{line} --tokenizer-model folder".split(), 1)
    assert problems == [] and config.data.vocab_size is None
    assert with_vocab_size(config, 1000).padded_vocab_size == 1024
    chosen, _ = parse(f"{line} --tokenizer-model folder --vocab-size 2000".split(), 1)
    assert with_vocab_size(chosen, 1000).data.vocab_size == 2000


def test_last_of_equal_flags_wins():
    config, problems = parse(f"{BASE} --seed 1 --seed 2".split(), 1)
    assert problems == [] and config.train.seed == 2


def test_every_field_is_a_flag_with_a_legend(capsys):
    text = build_parser().format_help()
    assert all(flag_name(name) in text for name in FIELDS)
    assert len(set(FIELDS)) == len(FIELDS)
    with pytest.raises(SystemExit) as stop:
        parse(["--help"], 1)
    assert stop.value.code == 0 and "--num-layers" in capsys.readouterr().out


def test_tables_name_existing_fields():
    named = [name for names, *_ in INERT for name in names.split()] + [name for pair in CONFLICTS for name in pair[:2]]
    assert set(named) <= set(FIELDS)


def test_arguments_are_dumped_as_megatron_does():
    config, _ = parse(BASE.split(), 1)
    lines = format_arguments(config).splitlines()
    assert lines[0] == "-" * 24 + " arguments " + "-" * 24 and "end of arguments" in lines[-1]
    assert "  num_layers ...................................... 4" in lines
    assert "  padded_vocab_size ............................... 256" in lines
    assert lines[1:-1] == sorted(lines[1:-1])


def test_a_wasteful_schedule_is_told_once(monkeypatch, capsys):
    """By rank 0 at the start of a run, and in a dry run; it is no error."""
    line = f"{BASE} {PP2} --pipeline-schedule gpipe"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(pretrain_gpt, "pretrain", lambda *args: None)
    monkeypatch.setattr(pretrain_gpt, "leave", lambda: None)
    for rank, times in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        assert pretrain_gpt.main(line.split()) == 0
        out, err = capsys.readouterr()
        assert out.count("warning: --pipeline-schedule gpipe: predicted step") == times and err == ""
    monkeypatch.delenv("RANK")
    assert pretrain_gpt.main(f"{line} --dry-run".split()) == 0
    out = capsys.readouterr().out
    assert out.count("warning: --pipeline-schedule gpipe: predicted step") == 1
    assert max(len(line) for line in out[out.index("schedule gpipe") :].splitlines()) <= 100
    assert pretrain_gpt.main(line.replace("gpipe", "1f1b").split()) == 0 and "warning" not in capsys.readouterr().out


VALUES = st.sampled_from(
    ["0", "1", "2", "3", "-1", "8", "1e3", "0.5", "nan", "inf", "abc", "", "1,1", "rope", "9" * 400]
)
FLAGS = st.sampled_from([flag_name(name) for name in FIELDS] + ["--num", "--x", "-q", "word", "--=1", "--"])


@given(st.lists(st.tuples(FLAGS, st.lists(VALUES, max_size=2)), max_size=12), st.integers(1, 9), st.booleans())
@settings(max_examples=200, deadline=None)
def test_nothing_raises(pairs, world, complete):
    argv = BASE.split() if complete else []
    config, problems = parse(argv + [word for flag, values in pairs for word in (flag, *values)], world)
    assert isinstance(config, Config)
    assert all("\n" not in str(problem) for problem in problems)
