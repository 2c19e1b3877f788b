# Sourced by the scripts beside it. `launch FLAGS` starts pretrain_gpt.py on this node; run the script on every node.
#
#     NNODES NODE_RANK MASTER_ADDR MASTER_PORT GPUS_PER_NODE    the machines (defaults: one node of 8)
#     RENDEZVOUS=HOST:PORT RENDEZVOUS_ID MAX_RESTARTS         or: nodes meet there and number themselves
#     DATA_PATH    prefix of a .bin/.idx pair (without it: made-up tokens)
#     SAVE         folder of checkpoints, read at the start and written to (without it: none)
#     DRY_RUN=1    print the plan for all ranks on CLUSTER (default h100) and exit; needs no GPU
#     DEBUG_CPU=1  two steps of a tiny model over gloo: tp, cp, pp and ep of 2 where the script has them, dp 2 where it has ZeRO
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/env.sh

NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

# What DEBUG_CPU=1 puts after a script's own flags: the last of equal flags wins.
DEBUG_MODEL=(
    --num-layers 4 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 128 --seq-length 32
    --max-position-embeddings 32 --vocab-size 256 --micro-batch-size 1 --global-batch-size 4 --train-iters 2
    --lr-warmup-iters 1 --log-interval 1 --distributed-backend gloo
)

launch() {
    local files=(--mock-data) machines=(--nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE")
    if [ -n "${DATA_PATH:-}" ]; then files=(--data-path "$DATA_PATH"); fi
    if [ -n "${SAVE:-}" ]; then files+=(--save "$SAVE" --load "$SAVE" --save-interval 500); fi
    if [ -n "${RENDEZVOUS:-}" ]; then
        machines+=(--rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RENDEZVOUS_ID:-pretrain}")
        machines+=(--max-restarts "${MAX_RESTARTS:-0}")
    elif [ "$NNODES" -gt 1 ]; then
        machines+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    else
        machines+=(--standalone) # a free port: two runs on one machine do not meet
    fi
    if [ -n "${DEBUG_CPU:-}" ]; then
        set -- "$@" "${DEBUG_MODEL[@]}"
        local ranks=1 axis
        for axis in --tensor-model-parallel-size --context-parallel-size --pipeline-model-parallel-size; do
            if [[ " $* " == *" $axis "* ]]; then
                set -- "$@" "$axis" 2
                ranks=$((ranks * 2))
            fi
        done
        if [[ " $* " == *" --expert-model-parallel-size "* ]]; then
            set -- "$@" --expert-model-parallel-size 2 --moe-ffn-hidden-size 64
        fi
        if [[ " $* " == *" --zero-stage "* ]]; then ranks=$((ranks * 2)); fi
        machines=(--standalone --nproc-per-node "$ranks")
        export OMP_WAIT_POLICY=passive
    fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # on CPU, 1 among several ranks stands for an even share of the cores
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # after SIGTERM; 30 s are too few to save a large model
    if [ -n "${DRY_RUN:-}" ]; then
        "$PYTHON" pretrain_gpt.py "$@" "${files[@]}" --dry-run \
            --world-size $((NNODES * GPUS_PER_NODE)) --cluster "${CLUSTER:-h100}"
    else # exec: a signal to the script is one to torchrun, which passes it on
        exec "$PYTHON" -m torch.distributed.run "${machines[@]}" pretrain_gpt.py "$@" "${files[@]}"
    fi
}
