#!/usr/bin/env bash
# GPT-2 small (124 M) on one GPU.
# Variables: examples/launch.sh. Flags given here win.
#
#     DATA_PATH=data/corpus_text_document SAVE=runs/gpt_125m bash examples/gpt_125m.sh
#
# DRY_RUN=1 bash examples/gpt_125m.sh prints, among other lines:
#     largest rank: 13.5 GiB on stage 0
#     memory: 13.5 GiB on stage 0, 0 of it for communication; 72.7 of 79 can be used: fits
#     step: 1.207 s, 35.0% MFU, 434,228 tokens/s, 434,228 per device
set -euo pipefail
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model gpt2 --bf16 \
    --micro-batch-size 16 --global-batch-size 512 --train-iters 100000 \
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
