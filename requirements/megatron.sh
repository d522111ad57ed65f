#!/usr/bin/env bash
# Make a virtual environment with Megatron on top of that of `make setup`: bash requirements/megatron.sh VENV MEGATRON_VENV
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
base=$(realpath "$1") venv=$2
stamp=$(cat "$here/megatron/packages.txt" "$here/megatron.sh" "$base/.done" | sha256sum)
if [[ -f $venv/.done && $(<"$venv/.done") == "$stamp" ]]; then exit 0; fi
rm -rf "$venv"
"$base/bin/python" -m venv --without-pip "$venv"
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
shared=$("$base/bin/python" -c 'import site; print(site.getsitepackages()[0])')
# The packages of the other environment, with what its own .pth files add; what is installed here comes first.
echo "import site; site.addsitedir('$shared')" >"$site/shared.pth"
"$base/bin/python" -m pip --disable-pip-version-check --no-input -q --python "$venv/bin/python" install --no-deps \
    -r "$here/megatron/packages.txt"
"$venv/bin/python" -c 'import megatron.core, mbridge, verl, verl_ba, verl_cpu' # from $root, too: a checkout that moved
echo "$stamp" >"$venv/.done"
echo "megatron.sh: $(grep -c == "$here/megatron/packages.txt") packages in $venv, on top of $base ($root)" >&2
