#!/usr/bin/env bash
# GPT-2 XL (1.5 B) on one node of 8 GPUs: data parallel with ZeRO-1.
# Variables: examples/launch.sh. Flags given here win.
#
#     DATA_PATH=data/corpus_text_document SAVE=runs/gpt2_1.5b bash examples/gpt2_1.5b.sh
#
# DRY_RUN=1 bash examples/gpt2_1.5b.sh prints, among other lines:
#     largest rank: 31.8 GiB on stage 0
#     memory: 31.8 GiB on stage 0, 0 of it for communication; 72.7 of 79 can be used: fits
#     step: 1.406 s, 46.2% MFU, 372,878 tokens/s, 46,610 per device
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model gpt2-xl --bf16 --zero-stage 1 \
    --micro-batch-size 4 --global-batch-size 512 --train-iters 100000 \
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
