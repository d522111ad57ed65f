"""A number with its interval: by the stratified bootstrap over seeds (scipy's), or by a jackknife."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_BATCH = 500  # resamples that are held at once


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval; bounds are nan where there is none, the value where it is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def text(self, form: str = ".3f") -> str:
        """'0.512 [0.490, 0.530]', without brackets where there is no interval; '–' for nan."""
        if math.isnan(self.value):
            return "–"
        value = format(self.value, form)
        return value if math.isnan(self.low) else f"{value} [{self.low:{form}}, {self.high:{form}}]"


def jackknife_variance(left: np.ndarray) -> np.ndarray:
    """Of an estimate, from its values with one of n independent parts left out: `left` [n, …] gives […]."""
    return (len(left) - 1) / len(left) * ((left - left.mean(0)) ** 2).sum(0)


def t_interval(value: float, error: float, freedom: int, level: float = 0.95) -> Estimate:
    """From a standard error with so many degrees of freedom."""
    from scipy.stats import t as student  # takes a second to import

    reach = float(student.ppf((1 + level) / 2, freedom)) * error
    return Estimate(value, value - reach, value + reach)


@dataclass(frozen=True)
class Bootstrap:
    """Percentile intervals over seeds; every call draws from a fresh generator, so none depends on the others."""

    resamples: int
    seed: int

    def estimates(self, scores: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> list[Estimate]:
        """Each entry of function(scores [seeds, benchmarks, …]) with its interval; one seed gives none.

        Stratified: every benchmark draws its own seeds. What stands in further dimensions is drawn together.
        """
        if len(scores) == 1:
            return [Estimate(float(value)) for value in function(scores)]
        further = scores.ndim - 2

        def statistic(*benchmarks: np.ndarray, axis: int) -> np.ndarray:
            """Of benchmarks [further…, resamples, seeds] as scipy drew them: [entries, resamples]."""
            drawn = np.moveaxis(np.stack(benchmarks, axis=-1), range(further), range(-further, 0))
            return np.moveaxis(function(drawn), -1, 0)

        low, high = self._interval([scores[:, i] for i in range(scores.shape[1])], statistic)
        return [Estimate(*map(float, numbers)) for numbers in zip(function(scores), low, high, strict=True)]

    def bands(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the mean over seeds of values [seeds, steps], step by step; nan for one seed."""
        if len(values) == 1:
            return np.full(values.shape[1], np.nan), np.full(values.shape[1], np.nan)
        return self._interval([values], np.mean)

    def _interval(self, samples: list[np.ndarray], statistic: Any) -> tuple[np.ndarray, np.ndarray]:
        from scipy.stats import bootstrap  # takes a second to import

        found = bootstrap(
            samples,
            statistic,
            axis=0,
            paired=False,
            vectorized=True,
            method="percentile",
            n_resamples=self.resamples,
            batch=_BATCH,
            rng=np.random.default_rng(self.seed),
        )
        return found.confidence_interval
