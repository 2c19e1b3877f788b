#!/usr/bin/env bash
# LLaMA-3 8B at 131,072 tokens on 64 GPUs: tensor 8 (one node) x context 8 (a ring over nodes), ZeRO-1.
# Variables: examples/launch.sh. Flags given here win.
#
#     NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=data/corpus_text_document SAVE=runs/llama3_8b_128k bash examples/llama3_8b_128k.sh
#
# DRY_RUN=1 bash examples/llama3_8b_128k.sh prints, among other lines:
#     largest rank: 16.1 GiB on stage 0
#     memory: 16.3 GiB on stage 0, 0.25 of it for communication; 72.7 of 79 can be used: fits
#     bytes on the wires and time of a step: not planned yet with --context-parallel-size
set -euo pipefail
NNODES=${NNODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch \
    --model llama3-8b --use-rope-scaling --bf16 --seq-length 131072 --max-position-embeddings 131072 \
    --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size 8 --cp-comm-type p2p --zero-stage 1 \
    --micro-batch-size 1 --global-batch-size 32 --train-iters 10000 \
    --lr 2e-5 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-iters 100 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 \
    "$@"
