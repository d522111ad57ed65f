#!/usr/bin/env bash
# Write lock.txt from what an environment holds: bash requirements/lock.sh VENV
# To move a pin: pip install the new version into the environment, run this, then the tests.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
{
    echo "# Everything but torch (torch.txt) and the local packages; made by: make lock"
    "$1/bin/python" -m pip --disable-pip-version-check list --format=freeze |
        grep -vE '^(torch|pip|verl-ba|verl-cpu|verl_ba|verl_cpu|vllm)==' | LC_ALL=C sort -f
} >"$here/lock.txt.new"
mv "$here/lock.txt.new" "$here/lock.txt"
