#!/usr/bin/env bash
# LLaMA-2 70B on 64 GPUs: tensor 8 (one node) x pipeline 4, two chunks each (interleaved) x data 2.
# Variables: examples/launch.sh. Flags given here win.
#
#     NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/corpus_text_document SAVE=runs/llama2_70b bash examples/llama2_70b.sh
#
# DRY_RUN=1 bash examples/llama2_70b.sh prints, among other lines:
#     largest rank: 50.8 GiB on stage 0
#     memory: 51.0 GiB on stage 0, 0.15 of it for communication; 72.7 of 79 can be used: fits
#     step: 61.28 s, 46.3% MFU, 68,441 tokens/s, 1,069 per device
set -euo pipefail
NNODES=${NNODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model llama2-70b --bf16 \
    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000 \
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
