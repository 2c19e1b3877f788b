#!/usr/bin/env bash
# LLaMA-3 8B on one node of 8 GPUs: tensor 2 x data 4 with ZeRO-1.
# Variables: examples/launch.sh. Flags given here win.
#
#     DATA_PATH=data/corpus_text_document SAVE=runs/llama3_8b bash examples/llama3_8b.sh
#
# DRY_RUN=1 bash examples/llama3_8b.sh prints, among other lines:
#     largest rank: 51.7 GiB on stage 0
#     memory: 51.8 GiB on stage 0, 0.12 of it for communication; 72.7 of 79 can be used: fits
#     step: 12.79 s, 53.3% MFU, 81,968 tokens/s, 10,246 per device
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model llama3-8b --bf16 \
    --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 \
    --micro-batch-size 1 --global-batch-size 128 --train-iters 500000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
