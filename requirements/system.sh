#!/usr/bin/env bash
# What pip cannot install: bubblewrap, the sandbox of scored programs, and chromium, in which tests open the pages of
# `verl-ba analyze` and `compare`. Root gets them from Debian; others are told how.
set -euo pipefail

missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v chromium >/dev/null || missing+=(chromium)
[[ ${#missing[@]} -gt 0 ]] || exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "system.sh: installing ${missing[*]} with apt-get" >&2
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    exit 0
fi
echo "system.sh: not installed: ${missing[*]}. Without bubblewrap LiveCodeBench is not scored, without chromium some tests" \
    "are left out. Run: sudo apt-get install ${missing[*]}" >&2
