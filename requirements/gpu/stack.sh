#!/usr/bin/env bash
# The GPU stack that verl 0.9.1 itself pins, on this CPU: bash requirements/gpu/stack.sh [pytest's arguments]
# Makes .cache/gpu-stack (10 GB, two minutes with a fast network) with the versions of lock.txt, all but flash-attn, which has
# no wheel on a package index; says whether verl_ba attaches there; runs the tests of hooks and policy losses.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(realpath "$here/../..")
venv=$root/.cache/gpu-stack
stamp=$(cat "$here/lock.txt" "$here/stack.sh" "$root/pyproject.toml" | sha256sum)
if [[ $(cat "$venv/.done" 2>/dev/null) != "$stamp" ]]; then
    rm -rf "$venv"
    "${PYTHON:-python3.11}" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check -q install "$(grep '^uv==' "$here/lock.txt")"
    echo "installing the GPU stack into $venv (10 GB)" >&2
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps -r "$here/lock.txt"
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps -e "$root" -e "$root/dev/verl_cpu"
    echo "$stamp" >"$venv/.done"
fi
cd "$root"
"$venv/bin/verl-ba" doctor
if [[ $# -eq 0 ]]; then set -- tests/hooks/test_hooks.py tests/hooks/test_policy_losses.py tests/hooks/test_config.py; fi
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest "$@"
