#!/usr/bin/env bash
# The one launcher: bash recipes/launch.sh RECIPE ARM [options] [Hydra overrides…]
#   RECIPE          a config in recipes/config: demo, qwen3_1.7b_dapo17k, …
#   ARM             a loss_agg_mode or its short name (recipes/config/arm); two arms differ in this key alone: balanced |
#                   group-mean-token-mean or token | seq-mean-token-mean or sequence | token-mean or verl-token
#   --dry-run       show what would run, with a memory estimate; run nothing
#   --cluster NAME  a file of recipes/config/cluster: 1x8x80gb (default), 2x8x80gb, 4x8x80gb, 1x4x80gb, 1x1x141gb, cpu
#   --via HOW       here (default): this machine, or the Ray that RAY_ADDRESS names | slurm: sbatch | ray: ray job submit
#   seed=N sharding=fsdp2 actor_rollout_ref.actor.optim.lr=2e-6 …   any key of verl's config
# Runs verl's own `python -m verl.trainer.main_ppo`. From the environment: DATA_DIR (default: data) is where `verl-ba data`
# wrote, RESULTS_DIR (default: results) where runs go, MODEL_DIR a folder with downloaded models, PYTHON the interpreter,
# VERL_TRAINER another entry point of verl (verl.experimental.one_step_off_policy.main_ppo, …; its extra keys are overrides),
# SANDBOX_FUSION_URL a server that runs LiveCodeBench's programs (default: bubblewrap on each node).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=$here/config
python=${PYTHON:-python3}
list() { find "$1" -maxdepth 1 -name '*.yaml' -printf '%f\n' | sed 's/\.yaml$//' | sort | tr '\n' ' '; }
fail() { echo "launch.sh: $*" >&2 && exit 2; }

has_verl() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)' 2>/dev/null; }
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    echo "Recipes: $(list "$config")"
    echo "Arms: $(list "$config/arm")"
}

for argument in "$@"; do
    if [[ $argument == --help || $argument == -h ]]; then usage && exit 0; fi
done
if [[ $# -lt 2 ]]; then
    usage
    exit 2
fi
recipe=$1 arm=$2 via=here dry_run=()
if [[ ! -f $config/arm/$arm.yaml ]]; then # a mode: the arm that has it
    file=$(grep -lxF -- "    loss_agg_mode: $arm" "$config"/arm/*.yaml) || file=$arm
    arm=$(basename "$file" .yaml)
fi
overrides=("arm=$arm")
[[ -f $config/$recipe.yaml ]] || fail "no recipe $recipe. Recipes: $(list "$config")"
[[ -f $config/arm/$arm.yaml ]] || fail "no arm $arm. Arms: $(list "$config/arm"), or their loss_agg_mode"
shift 2
while [[ $# -gt 0 ]]; do
    case $1 in
        --dry-run) dry_run=(--dry-run) ;;
        --cluster | --via)
            [[ $# -ge 2 ]] || fail "$1 needs a value"
            if [[ $1 == --via ]]; then via=$2; else overrides+=("cluster=$2"); fi
            shift
            ;;
        -*) fail "unknown option $1. Options: --dry-run, --cluster NAME, --via here|slurm|ray" ;;
        *) overrides+=("$1") ;;
    esac
    shift
done
for override in "${overrides[@]}"; do
    name=${override#cluster=}
    [[ $name == "$override" || -f $config/cluster/$name.yaml ]] || fail "no cluster $name. Clusters: $(list "$config/cluster")"
done

if [[ -z ${PYTHON:-} ]] && ! has_verl python3 && [[ -x $here/../.venv/bin/python ]]; then
    python=$(realpath -s "$here/../.venv/bin/python") # what `make setup` made
    if [[ $via != ray ]]; then export PYTHON=$python; fi # a Ray job runs on the cluster's own
fi
has_verl "$python" || fail "no verl in $python: name the interpreter that has it, PYTHON=.venv/bin/python"
[[ $via == here || -f $here/submit_$via.sh ]] || fail "--via $via: expected here, slurm or ray"

# Absolute: Ray's processes may have another working directory.
RESULTS_DIR=$(realpath -m "${RESULTS_DIR:-results}") DATA_DIR=$(realpath -m "${DATA_DIR:-data}")
export RESULTS_DIR DATA_DIR
# Checks the config and the nodes before anything starts, locks the run's folder, and lets verl take its place.
# Where a server for runs on the CPU is named (cpu_site/prefork.py), recipes.plan forks from it like every process of the run.
PYTHONPATH=$here/..${VERL_CPU_PREFORK:+:$here/cpu_site}${PYTHONPATH:+:$PYTHONPATH} \
    exec "$python" -m recipes.plan --via "$via" "${dry_run[@]}" "$recipe" "${overrides[@]}"
