#!/bin/sh
# Measures this machine's first GPU: bench/gpu.sh [--dry] [--sections NAMES] [--out DIR]
# bench/gpu.sh --wheels DIR downloads what a GPU machine without a network lacks, to be carried there as .whl/.
# Python with torch is $PYTHON, by default python3.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
if [ "${1:-}" = --wheels ]; then
    exec "$python" -m bench.gpu.wheels "$2"
fi
path="$PWD:$PWD/tests:$PWD/models"
if ls .whl/*.whl >/dev/null 2>&1; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
        --target "$site" .whl/*.whl
    path="$site:$path"
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
# The draws of a CPU are compared with: compiled here, because what was built elsewhere is not carried. Meanwhile the
# first sections run.
if ! ls outrider/engine/ops/*.so >/dev/null 2>&1; then
    { "$python" setup.py --quiet build_ext --inplace -j 2 >/dev/null 2>&1 || echo "The CPU kernels were not built." >&2; } &
fi
"$python" -m bench.gpu "$@"
wait
