#!/usr/bin/env bash
# The one launcher: bash recipes/launch.sh RECIPE ARM [Hydra overrides…]
#   RECIPE  a config in recipes/config (demo, …)
#   ARM     balanced | token | sequence | verl-token (recipes/config/arm); two arms differ in this key alone
# Runs verl's own `python -m verl.trainer.main_ppo`. RESULTS_DIR (default: results) is where runs go.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=$here/config
list() { find "$1" -maxdepth 1 -name '*.yaml' -printf '%f\n' | sed 's/\.yaml$//' | sort | tr '\n' ' '; }

if [[ $# -lt 2 ]]; then
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"
    exit 2
fi
recipe=$1 arm=$2
shift 2
for choice in "$config/$recipe.yaml" "$config/arm/$arm.yaml"; do
    if [[ ! -f $choice ]]; then
        echo "launch.sh: no $choice. Recipes: $(list "$config"). Arms: $(list "$config/arm")" >&2
        exit 2
    fi
done

# verl would look for a missing path on a hub, or fail once Ray is up.
for override in "$@"; do
    path=${override#*=}
    case $override in
        data.train_files=[!\[]* | data.val_files=[!\[]* | actor_rollout_ref.model.path=[/.]*)
            if [[ $path != *://* && ! -e $path ]]; then
                echo "launch.sh: ${override%%=*}=$path: no such file or folder (from $PWD). Give an existing path" >&2
                exit 2
            fi
            ;;
    esac
done

export RESULTS_DIR=${RESULTS_DIR:-results}
export RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false HYDRA_FULL_ERROR=1
# The cluster: an override on the command line, or else the recipe's own.
cluster=$(printf '%s\n' "$@" | sed -n 's/^cluster=//p' | tail -n 1)
cluster=${cluster:-$(sed -nE 's/^ *- (override )?cluster: *([^ #]*).*/\2/p' "$config/$recipe.yaml")}
if [[ $cluster == cpu ]]; then
    # What a machine without a GPU needs before Python starts. Two ranks share the cores: one thread each.
    export VERL_PLATFORM=cpu RAY_AUTH_MODE=disabled OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
    export VLLM_ENABLE_V1_MULTIPROCESSING=0  # lets rollout.engine_kwargs choose the executor "uni"
    export PYTHONPATH=$here/cpu_site${PYTHONPATH:+:$PYTHONPATH}
    export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} VLLM_NO_USAGE_STATS=1
    export TQ_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 WANDB_MODE=offline HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
fi
# shellcheck disable=SC2016  # run_dir is Hydra's, not the shell's
run_dir='hydra.run.dir=${run_dir}'
# verl's file logger has no option for its path.
VERL_FILE_LOGGER_ROOT=${VERL_FILE_LOGGER_ROOT:-$RESULTS_DIR} \
    exec "${PYTHON:-python3}" -m verl.trainer.main_ppo --config-path "$config" --config-name "$recipe" \
    "arm=$arm" "hydra.searchpath=[pkg://verl.trainer.config]" "$run_dir" "$@"
