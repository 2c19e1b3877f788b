#!/usr/bin/env bash
# Sets up its own environment, then lint and tests.
#
#     bash tests/run.sh                       the fast cover
#     bash tests/run.sh --full                everything
#     bash tests/run.sh tests/schedules -x    other arguments are pytest's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/env.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive # many ranks share few cores: none may spin while it waits

echo "[tests] ruff"
"$PYTHON" -m ruff check
echo "[tests] pytest $*"
if [ -n "${*/--full/}" ]; then exec "$PYTHON" -m pytest "$@"; fi

# The whole suite in two processes side by side: most tests use one core, or wait for each other's ranks.
FIRST=(tests/parity tests/schedules)
LOG=$(mktemp)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$LOG"' EXIT
trap 'exit 130' INT # Ctrl-C reaches only the one in front: do not wait for the other
"$PYTHON" -m pytest "$@" "${FIRST[@]}" >"$LOG" 2>&1 &
failed=0
"$PYTHON" -m pytest "$@" "${FIRST[@]/#/--ignore=}" || failed=$?
wait $! || failed=$?
echo "[tests] ${FIRST[*]}, run at the same time"
cat "$LOG"
[ "$failed" = 0 ] && echo "[tests] all passed" || echo "[tests] FAILED" >&2
exit "$failed"
