#!/usr/bin/env bash
# Qwen3-1.7B on Polaris. Without arguments: how to use it.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" qwen3_1.7b_polaris "$@"
