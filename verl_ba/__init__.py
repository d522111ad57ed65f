"""Balanced Aggregation for verl. Importing this package has no side effect and loads neither torch, verl nor Ray.

In verl, `actor_rollout_ref.actor.loss_agg_mode=balanced` is all there is to say: verl's entry point loads `verl_ba.plugin`.
The names below are for Python code of your own; each is loaded when it is first used.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("verl-ba")
except PackageNotFoundError:  # a checkout on PYTHONPATH, without an installation
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from verl_ba.aggregation import ALL_MODES, MODES, aggregate, pool_mean_length, pool_mean_length_by_sign
    from verl_ba.hooks import install, verify
    from verl_ba.loss_agg import register_loss_agg
    from verl_ba.metrics import balance_metrics

__all__ = [
    "ALL_MODES",
    "MODES",
    "__version__",
    "aggregate",
    "balance_metrics",
    "install",
    "pool_mean_length",
    "pool_mean_length_by_sign",
    "register_loss_agg",
    "verify",
]

_HOME = {
    **dict.fromkeys(("ALL_MODES", "MODES", "aggregate", "pool_mean_length", "pool_mean_length_by_sign"), "aggregation"),
    **dict.fromkeys(("install", "verify"), "hooks"),
    "register_loss_agg": "loss_agg",
    "balance_metrics": "metrics",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
