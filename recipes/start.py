"""How a run starts: its folder is locked, its environment and command are put together, and verl takes this process's place.

lock(run_dir)           one process at a time trains into a folder; the lock ends with the process, however that ends
environment(device)     what a machine without a GPU needs before Python starts
command(config, …)      verl's own `python -m verl.trainer.main_ppo`, with this repository's configs
"""

import fcntl
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "config"
LOCK = "running.json"
"""In a run's folder: who trains into it. The file stays; the lock on it is what counts."""


class CannotStart(RuntimeError):
    """The run's folder cannot be used; the message is complete."""


def lock(run_dir: Path) -> int:
    """Take the run's folder for this process and for the program that takes its place; the file descriptor of the lock.

    The operating system gives the lock back when the last process that has the descriptor ends, so a dead run's folder is
    free. On a file system whose locks do not reach other hosts, only starts on one host are kept apart.

    Raises:
        CannotStart: another process has it, which is named, or the folder cannot be written to.
    """
    path = run_dir / LOCK
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}. Choose another RESULTS_DIR, or make room there") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(descriptor, 4096, 0).decode(errors="replace")
        os.close(descriptor)
        try:
            owner = json.loads(said)
            who = f"process {owner['process']} on {owner['host']}, since {owner['since']}"
        except (ValueError, KeyError, TypeError):
            who = "another process"
        raise CannotStart(
            f"{run_dir}: this run is going on: {who}. Two of them would write into one another's checkpoints. Wait for it, "
            "stop it, or start another seed"
        ) from None
    except OSError as error:
        print(f"[verl_ba] {path} cannot be locked ({error.strerror}): start this run only once", file=sys.stderr)
    return descriptor


def sign(descriptor: int, since: str) -> None:
    """Write into the lock's file who has it: process and host, for whoever comes second."""
    owner = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def environment(device: str) -> dict[str, str]:
    """Variables of a run besides those of this process, from `trainer.device`. What is `chosen` may be set otherwise."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false", "HYDRA_FULL_ERROR": "1"}
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if Path(path[0] or ".").resolve() == HERE.parent:  # launch.sh put it there for recipes/plan.py alone
        path = path[1:]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    if device != "cpu":
        return variables
    # What a machine without a GPU needs before Python starts. Two ranks share the cores: one thread each.
    chosen = {
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return variables | {
        **{name: os.environ.get(name) or value for name, value in chosen.items()},
        "VERL_PLATFORM": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE / "cpu_site"), *filter(None, path)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets rollout.engine_kwargs choose the executor "uni"
        "VLLM_NO_USAGE_STATS": "1",
        "TQ_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def command(
    config: DictConfig, recipe: str, overrides: Sequence[str], metrics: Path, given: Mapping[str, str]
) -> list[str]:
    """verl's own entry point with this recipe; `given` is the environment that the caller was started with."""
    overrides = list(overrides)
    if config.trainer.device == "cpu" and given.get("RAY_ADDRESS"):
        # A Ray that runs already has its resources; ray.init takes none with an address.
        overrides += ["ray_kwargs.ray_init.num_gpus=null", "ray_kwargs.ray_init.num_cpus=null"]
    # verl's file logger empties its file when it starts: one file a start. Ray hands the names to the process that logs.
    passed = {"VERL_FILE_LOGGER_PATH": str(metrics), "TENSORBOARD_DIR": str(metrics.with_suffix("")) + "-tensorboard"}
    if given.get("SANDBOX_FUSION_URL"):  # where LiveCodeBench's programs run, instead of bubblewrap on every node
        passed["SANDBOX_FUSION_URL"] = given["SANDBOX_FUSION_URL"]
    return [
        sys.executable,
        "-m",
        given.get("VERL_TRAINER") or "verl.trainer.main_ppo",
        "--config-path",
        str(CONFIG),
        "--config-name",
        recipe,
        "hydra.searchpath=[pkg://verl.trainer.config]",
        "hydra.run.dir=${run_dir}",
        *overrides,
        *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{name}={quoted(value)}" for name, value in passed.items()),
    ]


def quoted(value: str) -> str:
    """A string as the value of a Hydra override. In Hydra's quotes only a quote, and backslashes before one, are escaped."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), value) + "'"


def refuse_paths(folders: Mapping[str, str]) -> None:
    """Raise CannotStart for a folder whose name verl's configuration would read as something else."""
    for name, value in folders.items():
        if "${" in value or "\n" in value:
            raise CannotStart(f"{name}={value!r}: a path may not hold '${{' or a line break: Hydra reads them itself")
