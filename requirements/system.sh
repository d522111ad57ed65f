#!/usr/bin/env bash
# What pip cannot install: bubblewrap, the sandbox of scored programs. Root gets it from Debian or Ubuntu; others are told how.
set -euo pipefail

if command -v bwrap >/dev/null; then
    exit 0
fi
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "system.sh: installing bubblewrap with apt-get" >&2
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null
    exit 0
fi
echo "system.sh: no bubblewrap (bwrap): LiveCodeBench is not scored without it. Run: sudo apt-get install bubblewrap" >&2
