#!/usr/bin/env bash
# Mixtral 8x7B on 64 GPUs: tensor 2 x pipeline 4 x data 8, an expert on each rank of a data-parallel group, ZeRO-1.
# Variables: examples/launch.sh. Flags given here win.
#
#     NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/corpus_text_document SAVE=runs/mixtral_8x7b bash examples/mixtral_8x7b.sh
#
# DRY_RUN=1 bash examples/mixtral_8x7b.sh prints, among other lines:
#     largest rank: 22.0 GiB on stage 0
#     memory: 22.1 GiB on stage 0, 0.11 of it for communication; 72.7 of 79 can be used: fits
#     bytes on the wires and time of a step: not planned yet with --num-experts
set -euo pipefail
NNODES=${NNODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model mixtral-8x7b --bf16 --seq-length 4096 --vocab-size 32000 \
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 \
    --moe-aux-loss-coeff 0.01 --zero-stage 1 \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
