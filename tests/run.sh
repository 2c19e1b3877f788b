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
exec "$PYTHON" -m pytest "$@"
