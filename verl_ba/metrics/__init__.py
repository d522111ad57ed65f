"""What is logged under `balance/`: its definitions, the weights that it follows from, and how a run records it."""

from verl_ba.metrics.definitions import (
    APPLIED_RESIDUAL,
    METRICS,
    PREFIX,
    REWARD_ERRORS,
    SIGN_METRICS,
    SIGN_NAMES,
    Metric,
    metrics_markdown,
)
from verl_ba.metrics.weights import balance_metrics, statistics_of

__all__ = [
    "APPLIED_RESIDUAL",
    "METRICS",
    "PREFIX",
    "REWARD_ERRORS",
    "SIGN_METRICS",
    "SIGN_NAMES",
    "Metric",
    "balance_metrics",
    "metrics_markdown",
    "statistics_of",
]
