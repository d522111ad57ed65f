"""Reading the configuration that is audited."""

import importlib
import json
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class AuditError(ValueError):
    """The configuration cannot be read or would not start. The message is complete."""


def compose(overrides: Sequence[str], config_path: Path | None = None, config_name: str | None = None) -> DictConfig:
    """The configuration of a verl command with these overrides; verl's own `ppo_trainer` unless told otherwise.

    Raises AuditError if Hydra cannot compose it.
    """
    name = config_name or "ppo_trainer"
    if config_path is not None and not config_path.is_dir():
        raise AuditError(f"--config-path {config_path}: expected a folder with {name}.yaml, found none")
    here = (
        hydra.initialize_config_dir(str(config_path.resolve()), version_base=None)
        if config_path
        else hydra.initialize_config_module("verl.trainer.config", version_base=None)
    )
    search = ["hydra.searchpath=[pkg://verl.trainer.config]"] if config_path else []
    try:
        with here:
            return hydra.compose(name, overrides=[*search, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise AuditError(
            f"{name} with these overrides cannot be composed: {error}. Check them in `--cfg job`"
        ) from error


def load(path: Path) -> DictConfig:
    """A composed configuration: YAML, JSON, or a run's manifest.json, whose last start is taken.

    Raises AuditError if the file cannot be read or is not a configuration.
    """
    try:
        text = path.read_text()
        config: Any = OmegaConf.create(json.loads(text) if path.suffix == ".json" else text)
    except Exception as error:  # the file system, JSON and two YAML libraries have errors of their own
        raise AuditError(f"--config {path}: expected a composed configuration, YAML or JSON; got: {error}") from error
    if "starts" in config:
        config = config.starts[-1].config
    if not isinstance(config, DictConfig):
        raise AuditError(f"--config {path}: expected a composed configuration, a mapping; got a list")
    return config


def import_losses(where: str) -> None:
    """Import a module or a file that registers policy losses.

    Raises AuditError with what the import raised.
    """
    try:
        if where.endswith(".py"):
            spec = spec_from_loader(Path(where).stem, loader := SourceFileLoader(Path(where).stem, where))
            assert spec is not None  # it is only for a loader that is none
            loader.exec_module(module_from_spec(spec))
        else:
            importlib.import_module(where)
    except Exception as error:  # whatever a user's module raises
        raise AuditError(
            f"{where} cannot be imported: {type(error).__name__}: {error}. Expected a module on the path, or a file "
            "ending in .py, that calls verl's register_policy_loss"
        ) from error


def scalars(node: DictConfig, *keep: str) -> DictConfig:
    """The node without its sections except `keep`: a loss reads neither optimiser nor engine nor model."""
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return OmegaConf.create({k: v for k, v in plain.items() if not isinstance(v, dict) or k in keep})


def changed(node: DictConfig, **values: Any) -> DictConfig:
    """A copy with these values; a double underscore is a dot."""
    node = node.copy()
    for key, value in values.items():
        OmegaConf.update(node, key.replace("__", "."), value, force_add=True)
    return node
