"""A number with its interval, and the stratified bootstrap over seeds that gives it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_BOUNDS = (0.025, 0.975)


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% bootstrap interval; bounds are nan where there is none, the value where it is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def text(self, form: str = ".3f") -> str:
        """'0.512 [0.490, 0.530]', without brackets where there is no interval; '–' for nan."""
        if math.isnan(self.value):
            return "–"
        value = format(self.value, form)
        return value if math.isnan(self.low) else f"{value} [{self.low:{form}}, {self.high:{form}}]"


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
        drawn = np.random.default_rng(self.seed).integers(len(scores), size=(self.resamples, *scores.shape[:2]))
        further = drawn.reshape(*drawn.shape, *[1] * (scores.ndim - 2))
        spread = function(np.take_along_axis(scores[None], further, axis=1))
        low, high = np.quantile(spread, _BOUNDS, axis=0)
        return [Estimate(*map(float, numbers)) for numbers in zip(function(scores), low, high, strict=True)]

    def bands(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the mean over seeds of values [seeds, steps], step by step; nan for one seed."""
        seeds, steps = values.shape
        if seeds == 1:
            return np.full(steps, np.nan), np.full(steps, np.nan)
        share = (
            np.random.default_rng(self.seed).multinomial(seeds, np.full(seeds, 1 / seeds), size=self.resamples) / seeds
        )
        low, high = np.quantile(share @ values, _BOUNDS, axis=0)
        return low, high
