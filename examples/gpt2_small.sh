#!/usr/bin/env bash
# GPT-2 small (124 M) on one GPU. The variables that it reads: examples/launch.sh. Flags given here win.
#
#     DATA_PATH=data/corpus_text_document SAVE=runs/gpt2 bash examples/gpt2_small.sh --train-iters 20000
set -euo pipefail
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model gpt2 --bf16 \
    --micro-batch-size 16 --global-batch-size 512 --train-iters 100000 \
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
