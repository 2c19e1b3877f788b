#!/usr/bin/env bash
# GPT-3 175B on 1024 GPUs: tensor 8 (one node) x pipeline 16 x data 8. Variables: examples/launch.sh. Flags given here win.
#
#     NNODES=128 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/corpus_text_document bash examples/gpt3_175b.sh
set -euo pipefail
NNODES=${NNODES:-128}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model gpt3-175b --bf16 \
    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16 \
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 100000 \
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-iters 300 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
