#!/usr/bin/env bash
# LLaMA-3 8B on one node of 8 GPUs: tensor parallel 4 inside, pipeline of 2. Variables: examples/launch.sh. Flags given here win.
#
#     DATA_PATH=data/corpus_text_document SAVE=runs/llama3_8b bash examples/llama3_8b.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model llama3-8b --bf16 \
    --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 \
    --micro-batch-size 1 --global-batch-size 128 --train-iters 500000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
