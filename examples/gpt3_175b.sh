#!/usr/bin/env bash
# GPT-3 175B on 1024 GPUs: tensor 8 (one node) x pipeline 8 x data 16.
# Variables: examples/launch.sh. Flags given here win.
#
#     NNODES=128 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/corpus_text_document SAVE=runs/gpt3_175b bash examples/gpt3_175b.sh
#
# DRY_RUN=1 bash examples/gpt3_175b.sh prints, among other lines:
#     largest rank: 66.5 GiB on stage 0
#     memory: 66.6 GiB on stage 0, 0.11 of it for communication; 72.7 of 79 can be used: fits
#     step: 8.344 s, 39.5% MFU, 376,986 tokens/s, 368 per device
set -euo pipefail
NNODES=${NNODES:-128}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model gpt3-175b --bf16 \
    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8 \
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 100000 \
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-iters 300 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
