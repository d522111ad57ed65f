#!/usr/bin/env bash
# Qwen2.5-Math-7B on DAPO-17k in verl's own DAPO setting. Without arguments: how to use it.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" qwen2.5_math_7b_dapo17k_verl "$@"
