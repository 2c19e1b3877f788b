# Sourced by examples/*.sh and tests/run.sh: exports PYTHON, an interpreter that has everything in requirements.txt.
# An active environment that has it already is used as it is; otherwise .venv in the checkout is made or brought up to
# date (tools/setup_env.py). Nothing else of the calling shell is changed. PYTHON set beforehand is taken at its word.

if [ -z "${PYTHON:-}" ]; then
    PYTHON="$(
        here="$(cd "${BASH_SOURCE[0]%/*}" && pwd)"
        for name in python3 python python3.13 python3.12 python3.11 python3.10; do
            if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
                exec "$name" "$here/setup_env.py"
            fi
        done
        echo "megatron_lite needs Python 3.10 or newer, and found none on PATH (looked for python3, python3.10 ... 3.13)" >&2
        exit 1
    )" || { unset PYTHON; return 1; }
    export PYTHON
fi
