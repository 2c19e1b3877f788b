#!/usr/bin/env bash
# Is this node fit to train? One line for each thing that is wrong, with the node's name; exit code 1 if there is one.
# It costs a second, and a node that lacks a GPU costs all the others their time at the rendezvous.
set -uo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
wrong=0
problem() {
    echo "$(hostname): $*" >&2
    wrong=1
}

found=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
if [ "$found" -lt "$GPUS_PER_NODE" ]; then problem "$found GPUs answer, $GPUS_PER_NODE are needed"; fi

while IFS=', ' read -r gpu errors used; do
    case $errors in '' | *[!0-9]*) errors=0 ;; esac # "[N/A]" where a GPU counts none
    if [ "$errors" -gt 0 ]; then problem "GPU $gpu: $errors memory errors that were not corrected"; fi
    if [ "${used:-0}" -gt 2048 ]; then problem "GPU $gpu: $used MiB are in use, by a process that is left over?"; fi
done < <(nvidia-smi --query-gpu=index,ecc.errors.uncorrected.volatile.total,memory.used --format=csv,noheader,nounits 2>/dev/null)

if [ -n "${SAVE:-}" ] && ! { mkdir -p "$SAVE" && [ -w "$SAVE" ]; }; then problem "SAVE=$SAVE cannot be written"; fi
exit $wrong
