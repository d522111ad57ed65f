#!/usr/bin/env bash
# Qwen2.5-Math-1.5B on MATH, on one GPU. Without arguments: how to use it.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" qwen2.5_math_1.5b_math "$@"
