#!/usr/bin/env bash
# Qwen2.5-0.5B-Instruct on GSM8K, on one GPU. Without arguments: how to use it.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" qwen2.5_0.5b_gsm8k "$@"
