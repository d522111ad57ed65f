#!/usr/bin/env bash
# launch.sh … --via ray: a job for the Ray at RAY_ADDRESS (default http://127.0.0.1:8265, where `ray start --head` listens).
#   submit_ray.sh "DEVICE NODES GPUS_PER_NODE …" [--dry-run] RECIPE arm=ARM [Hydra overrides…]
# This checkout goes along, so the nodes need verl and this package's dependencies, not the package. DATA_DIR, RESULTS_DIR,
# MODEL_DIR and PYTHON are paths on the cluster, seen by all its nodes.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3} address=${RAY_ADDRESS:-http://127.0.0.1:8265}
shift # the plan: the cluster is there already
dry_run='' && if [[ $1 == --dry-run ]]; then dry_run=yes && shift; fi
recipe=$1 arm=${2#arm=} && shift 2
for name in DATA_DIR RESULTS_DIR MODEL_DIR PYTHON; do
    [[ ${!name:-/} == /* ]] && continue
    echo "submit_ray.sh: $name=${!name}: expected an absolute path, one on the cluster's nodes" >&2
    exit 2
done

# Ray shows a job's environment to everyone who may see its dashboard: tokens and keys stay here.
runtime_env=$(PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} "$python" - "$here/.." <<'PY'
import json, os, re, sys

from recipes import manifest

passed = "DATA_DIR|RESULTS_DIR|MODEL_DIR|PYTHON|SANDBOX_FUSION_URL"
passed += r"|(VERL|VLLM|HF|HYDRA|NCCL|GLOO|OMP|TORCH|TOKENIZERS|TQ|WANDB)\w*"
kept = {k: v for k, v in os.environ.items() if re.fullmatch(passed, k) and not re.search(r"(TOKEN|KEY|SECRET)S?$", k)}
# Each process of verl imports this, from the uploaded folder, whether the package is installed on its node or not.
modules = filter(None, [os.environ.get("VERL_USE_EXTERNAL_MODULES"), "verl_ba.plugin"])
kept["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
# launch.sh and verl hand some of these to ray.init again, with the same values, which Ray refuses without this.
kept["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
kept["VERL_BA_GIT"] = json.dumps(manifest.git())  # .git does not go along
excludes = [".git", ".venv", "__pycache__", "/data", "/results", "/outputs", "/.cache"]
print(json.dumps({"working_dir": os.path.realpath(sys.argv[1]), "excludes": excludes, "env_vars": kept}))
PY
)
id=$recipe-$arm-$(date +%Y%m%d-%H%M%S)
jobs=("$python" -m ray.scripts.scripts job)
command=("${jobs[@]}" submit --address "$address" --submission-id "$id" --no-wait --runtime-env-json "$runtime_env"
    -- bash recipes/launch.sh "$recipe" "$arm" "$@")
if [[ -n $dry_run ]]; then
    printf '\nwould submit:\n  '
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
"${command[@]}" >&2
echo "job $id; log: ray job logs --address $address --follow $id; stop: ray job stop --address $address $id"
