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

if [[ $# -lt 2 ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
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

"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)' ||
    fail "no verl in $python: name the interpreter that has it, PYTHON=.venv/bin/python"

# Absolute: Ray's processes may have another working directory.
RESULTS_DIR=$(realpath -m "${RESULTS_DIR:-results}") DATA_DIR=$(realpath -m "${DATA_DIR:-data}")
export RESULTS_DIR DATA_DIR
export RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false HYDRA_FULL_ERROR=1
[[ $via == here || -f $here/submit_$via.sh ]] || fail "--via $via: expected here, slurm or ray"

# Checks the config before anything starts, writes the manifest, and says for which device the run is.
plan=$(PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} "$python" -m recipes.plan --via "$via" "${dry_run[@]}" "$recipe" "${overrides[@]}")
read -r device _ _ metrics <<<"$plan"
if [[ $device == cpu ]]; then
    # What a machine without a GPU needs before Python starts. Two ranks share the cores: one thread each.
    export VERL_PLATFORM=cpu RAY_AUTH_MODE=${RAY_AUTH_MODE:-disabled} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
    export VLLM_ENABLE_V1_MULTIPROCESSING=0  # lets rollout.engine_kwargs choose the executor "uni"
    export PYTHONPATH=$here/cpu_site${PYTHONPATH:+:$PYTHONPATH}
    export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} VLLM_NO_USAGE_STATS=1
    export TQ_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 WANDB_MODE=offline HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
fi
if [[ $via != here ]]; then exec bash "$here/submit_$via.sh" "$plan" "${dry_run[@]}" "$recipe" "${overrides[@]}"; fi
if [[ $device == cpu && -n ${RAY_ADDRESS:-} ]]; then
    # A Ray that runs already has its resources; ray.init takes none with an address.
    overrides+=(ray_kwargs.ray_init.num_gpus=null ray_kwargs.ray_init.num_cpus=null)
fi
# shellcheck disable=SC2016  # run_dir is Hydra's, not the shell's
command=("$python" -m "${VERL_TRAINER:-verl.trainer.main_ppo}" --config-path "$config" --config-name "$recipe"
    "hydra.searchpath=[pkg://verl.trainer.config]" 'hydra.run.dir=${run_dir}' "${overrides[@]}"
    # verl's file logger empties its file when it starts: one file a start. Ray hands the names to the process that logs.
    "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH='$metrics'"
    "++ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR='${metrics%.jsonl}-tensorboard'")
if [[ -n ${SANDBOX_FUSION_URL:-} ]]; then # where LiveCodeBench's programs run, instead of bubblewrap on every node
    command+=("++ray_kwargs.ray_init.runtime_env.env_vars.SANDBOX_FUSION_URL='$SANDBOX_FUSION_URL'")
fi
if [[ ${#dry_run[@]} -gt 0 ]]; then
    printf '\nwould run:\n  '
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
