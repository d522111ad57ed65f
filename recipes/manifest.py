"""The run's manifest, `manifest.json` in its folder: what ran, on what. A resumed run adds a start; none is overwritten."""

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ba.tools.installed import PACKAGES, package_version
from verl_ba.tools.preflight import paths_of

ROOT = Path(__file__).resolve().parents[1]


class BadManifest(RuntimeError):
    """manifest.json cannot be read or written; the message is complete."""


def manifest_path(config: DictConfig) -> Path:
    return Path(config.run_dir) / "manifest.json"


def starts(config: DictConfig) -> list[dict]:
    """The starts of this run so far; BadManifest if the file is not a manifest."""
    path = manifest_path(config)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadManifest(f"{path}: cannot be read ({error.strerror})") from error
    try:
        found = json.loads(text)["starts"]
        if not isinstance(found, list) or not all({"config", "versions", "data"} <= set(start) for start in found):
            raise TypeError("its starts are not a list of configurations")
    except (ValueError, KeyError, TypeError) as error:
        raise BadManifest(
            f'{path}: expected {{"starts": […]}} as this launcher writes it, got something else ({error}). Move the file '
            "away, or the whole folder if the run is not to be resumed"
        ) from error
    return found


def metrics_file(config: DictConfig) -> Path:
    """Where the next start of this run logs its metrics."""
    return Path(config.run_dir) / "metrics" / f"{len(starts(config)) + 1}.jsonl"


def write(config: DictConfig, recipe: str, overrides: list[str]) -> str:
    """Add this start to the manifest, and return its time; say on stderr where it differs from the previous start.

    Raises BadManifest, and leaves the manifest as it was, if it cannot be read or written.
    """
    path, earlier = manifest_path(config), starts(config)
    start = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": recipe,
        "overrides": overrides,
        "job": {key: os.environ[key] for key in ("SLURM_JOB_ID", "RAY_JOB_ID", "RAY_ADDRESS") if key in os.environ},
        "git": git(),
        "versions": {"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES},
        "hardware": hardware(),
        "data": {file: checksum(Path(file)) for file in data_files(config)},
        "config": OmegaConf.to_container(config, resolve=True),
    }
    for key, (was, now) in differences(earlier[-1], start).items() if earlier else ():
        print(f"[verl_ba] since the previous start of {path.parent}: {key} was {was}, is {now}", file=sys.stderr)
    new = path.with_suffix(".new")
    try:
        metrics_file(config).parent.mkdir(parents=True, exist_ok=True)  # verl's file logger makes no folder
        new.write_text(json.dumps({"starts": [*earlier, start]}, indent=1))
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise BadManifest(
            f"{path}: cannot be written ({error.strerror}). Make room there, or choose another RESULTS_DIR"
        ) from error
    return start["started"]


def differences(before: dict, after: dict) -> dict[str, tuple[Any, Any]]:
    """What changed between two starts of one run, among what decides its numbers."""
    changed = {}
    for part in ("config", "versions", "data"):
        old, new = flatten(before[part], part), flatten(after[part], part)
        changed |= {k: (old.get(k), new.get(k)) for k in old.keys() | new.keys() if old.get(k) != new.get(k)}
    return dict(sorted(changed.items()))


def flatten(tree: Any, prefix: str) -> dict[str, Any]:
    """Leaves of nested dictionaries by dotted name."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in flatten(value, f"{prefix}.{key}").items()}


def data_files(config: DictConfig) -> list[str]:
    return list(dict.fromkeys([*paths_of(config.data.train_files), *paths_of(config.data.val_files)]))


def checksum(path: Path) -> str | None:
    """sha256 of a file; None for what is not a local file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git() -> dict[str, Any]:
    """Revision of this repository, and whether files differ from it; of a Ray job, what submit_ray.sh found; or empty."""

    def run(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        return {"revision": run("rev-parse", "HEAD").strip(), "changed": run("status", "--porcelain").splitlines()}
    except (OSError, subprocess.CalledProcessError):
        return json.loads(os.environ.get("VERL_BA_GIT", "{}"))


def hardware() -> dict[str, Any]:
    """This node's; a cluster's other nodes are in Ray's log."""
    import torch

    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
