#!/usr/bin/env bash
# launch.sh … --via slurm: one job, slurm.sbatch, that starts a Ray on its nodes and runs launch.sh against it.
#   submit_slurm.sh "DEVICE NODES GPUS_PER_NODE …" [--dry-run] RECIPE arm=ARM [Hydra overrides…]
# Account, partition, time and so on are sbatch's own variables: SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT, SBATCH_QOS,
# SBATCH_EXCLUSIVE, SBATCH_MEM_PER_NODE, SBATCH_CPUS_PER_GPU, …
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
read -r device nodes gpus _ <<<"$1" && shift
dry_run='' && if [[ $1 == --dry-run ]]; then dry_run=yes && shift; fi
recipe=$1 arm=${2#arm=} name=$1-${2#arm=} && shift 2
for override in "$@"; do
    if [[ $override == seed=* ]]; then name+=-${override/=/}; fi
done
if [[ -n ${MODEL_DIR:-} ]]; then MODEL_DIR=$(realpath -m "$MODEL_DIR") && export MODEL_DIR; fi

command=(sbatch --parsable --nodes="$nodes")
if [[ $device != cpu ]]; then command+=(--gpus-per-node="$gpus"); fi
command+=(--job-name="$name" --output="$RESULTS_DIR/slurm/%x-%j.log"
    "$here/slurm.sbatch" "$gpus" bash "$here/launch.sh" "$recipe" "$arm" "$@")
if [[ -n $dry_run ]]; then
    printf '\nwould submit:\n  '
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
if ! command -v sbatch >/dev/null; then
    echo "submit_slurm.sh: no sbatch here: --via slurm is for a node of a SLURM cluster" >&2
    exit 2
fi
mkdir -p "$RESULTS_DIR/slurm"
id=$("${command[@]}")
id=${id%%;*}
echo "job $id; log: tail -F $RESULTS_DIR/slurm/$name-$id.log; stop: scancel $id"
