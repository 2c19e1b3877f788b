#!/usr/bin/env bash
# From a fresh checkout to a trained LLaMA in minutes: 4 processes, tensor parallel 2 x pipeline parallel 2, on CPU.
#
#     bash examples/quickstart.sh
#
# Sets up its own environment, trains on text that every Python installation carries, compares the run with one process,
# loads its checkpoint at another layout, and samples text. All files are in runs/quickstart; the prepared text is kept
# there, everything else is made anew each time. DEVICE=cuda uses 4 GPUs (the default where there are 4), else cpu.
# QUICKSTART_ITERS shortens the training, QUICKSTART_OUT is another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/env.sh

ITERS=${QUICKSTART_ITERS:-240}
COMPARED=$((ITERS < 10 ? ITERS : 10)) # first steps that are repeated on one process
OUT=${QUICKSTART_OUT:-runs/quickstart}
DATA=$OUT/data/python_library
RUN=$OUT/run
LOGS=$OUT/logs

MODEL=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 128 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --tokenizer-type ByteTokenizer
)
LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2)
TRAINING=(
    --micro-batch-size 4 --global-batch-size 16 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-decay-iters 240
    --lr-warmup-iters 20 --adam-beta2 0.95 --weight-decay 0.1 --log-interval 1 --data-path "${DATA}_text_document"
)

section() { # a title, underlined, with the seconds since the start
    local title="$1   [$SECONDS s]"
    printf '\n%s\n%s\n' "$title" "$(printf '%*s' "${#title}" '' | tr ' ' '-')"
}

launch() { # launch RANKS CURVE [flags]: train in that many processes; the log and the curve go to files
    local ranks=$1 curve=$2 command=("$PYTHON")
    shift 2
    rm -f "$LOGS/$curve.jsonl"
    if [ "$ranks" -gt 1 ]; then command+=(-m torch.distributed.run --standalone --nproc-per-node "$ranks"); fi
    "$PYTHON" examples/curves.py follow --jsonl "$LOGS/$curve.jsonl" --log "$LOGS/$curve.log" "${FOLLOW[@]}" -- \
        "${command[@]}" pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "${BACKEND[@]}" --jsonl "$LOGS/$curve.jsonl" "$@"
}

if [ -z "${DEVICE:-}" ]; then
    DEVICE=$("$PYTHON" -c 'import torch; print("cuda" if torch.cuda.device_count() >= 4 else "cpu")')
fi
export OMP_WAIT_POLICY=passive # the processes share the cores: none may spin while it waits
unset OMP_NUM_THREADS          # each takes its share of them
BACKEND=()
if [ "$DEVICE" = cpu ]; then BACKEND=(--distributed-backend gloo); fi
rm -rf "$RUN" "$LOGS"
mkdir -p "$LOGS" "$OUT/data"

section "1. The plan: 4 ranks on $DEVICE, tensor parallel 2 x pipeline parallel 2 (nothing is running yet)"
"$PYTHON" pretrain_gpt.py "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${BACKEND[@]}" --train-iters "$ITERS" \
    --dry-run --world-size 4

section "2. The text: Python's own library and language reference, byte by byte"
if [ ! -f "${DATA}_text_document.idx" ]; then
    "$PYTHON" tools/preprocess_data.py --input python-library --max-bytes 4000000 --output-prefix "$DATA" \
        --tokenizer-type ByteTokenizer --append-eod
else
    echo "  already prepared: ${DATA}_text_document.bin"
fi

section "3. Training: $ITERS steps on 4 processes (their own output: $LOGS/train.log)"
FOLLOW=(--expected examples/quickstart.expected --every 20)
launch 4 train "${LAYOUT[@]}" --train-iters "$ITERS" --save "$RUN"

section "4. The same first $COMPARED steps on one process"
FOLLOW=()
launch 1 one --train-iters "$COMPARED"
echo "  4 ranks and 1 rank:"
"$PYTHON" examples/curves.py compare --limit 1e-4 "$LOGS/train.jsonl" "$LOGS/one.jsonl"

section "5. The checkpoint of tp 2 x pp 2 goes on at tp 1 x pp 1 x dp 2, with the same loss"
launch 4 same "${LAYOUT[@]}" --train-iters $((ITERS + 1)) --load "$RUN"
launch 2 other --train-iters $((ITERS + 1)) --load "$RUN"
echo "  the next step at the old and at the new layout:"
"$PYTHON" examples/curves.py compare --limit 1e-4 "$LOGS/same.jsonl" "$LOGS/other.jsonl"

section "6. Text from the model"
"$PYTHON" tools/generate.py --load "$RUN" --prompt "The " --max-new-tokens 240 --temperature 0.8 --top-k 40 --seed 1 --slide \
    --device "$DEVICE" 2>"$LOGS/generate.log"

section "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
echo "  checkpoint  $RUN"
echo "  curves      $LOGS/*.jsonl"
echo "  next        README.md, \"Common commands\""
