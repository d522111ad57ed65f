#!/usr/bin/env bash
# The table of six benchmarks: bash recipes/evaluate.sh CHECKPOINT [--recipe NAME] [--cluster NAME] [Hydra overrides…]
#   CHECKPOINT  …/checkpoints/global_step_N of a run (its manifest names the recipe), or a folder with a Hugging Face model
#               (then --recipe says whose lengths and template to use)
# Writes evaluation.json: AIME avg@32, the others avg@4, with standard errors.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m recipes.evaluate "$@"
