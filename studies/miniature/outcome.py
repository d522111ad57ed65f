"""From rows to estimates: paired differences, intervals, corrected p-values, verdicts.

Intervals are percentile intervals of a stratified bootstrap over seeds (`verl_ba.tools.analysis.estimate`): every cell draws
its own seeds, and the rules of a cell are drawn together, since they are paired by seed. p-values are those of the sign-flip
permutation test of the paired differences, two-sided, corrected after Holm over the family of comparisons. An interval is
pointwise; a verdict of a family asks for both.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import permutation_test

from verl_ba.tools.analysis.estimate import Bootstrap, Estimate

BOOTSTRAP = Bootstrap(10_000, 0)
PERMUTATIONS = 9999
LEVEL = 0.05
HELD, FAILED, UNDECIDED = "held", "failed", "undecided"


class Scores:
    """A measure of the rows at one learning rate: by cell and rule, the seeds that all the rules asked for share."""

    def __init__(self, rows: Sequence[dict[str, Any]], measure: str | Callable[[dict], float], lr: float) -> None:
        read = measure if callable(measure) else operator.itemgetter(measure)
        self.by_cell: dict[str, dict[str, dict[int, float]]] = {}
        for row in rows:
            if row["lr"] == lr and "error" not in row:
                self.by_cell.setdefault(row["cell"], {}).setdefault(row["rule"], {})[row["seed"]] = read(row)

    def array(self, cells: Sequence[str], rules: Sequence[str]) -> np.ndarray:
        """[seeds, cells, rules], of the seeds that every one of them has; no seed: shape [0, …]."""
        columns = [[self.by_cell.get(cell, {}).get(rule, {}) for rule in rules] for cell in cells]
        seeds = sorted(set.intersection(*(set(column) for row in columns for column in row)))
        return np.array([[[column[s] for column in row] for row in columns] for s in seeds]).reshape(
            len(seeds), len(cells), len(rules)
        )


def _each(scores: np.ndarray) -> np.ndarray:
    """[…, seeds, cells, rules] -> the mean over cells and seeds of each rule."""
    return scores.mean(axis=(-3, -2))


def means(scores: np.ndarray) -> list[Estimate]:
    """Mean of each rule over cells and seeds."""
    return BOOTSTRAP.estimates(scores, _each)


def difference(scores: np.ndarray) -> Estimate:
    """Of [seeds, cells, 2]: the first rule less the second, mean over cells."""
    return BOOTSTRAP.estimates(scores, lambda s: (_each(s)[..., 0] - _each(s)[..., 1])[..., None])[0]


def against_the_best(scores: np.ndarray) -> Estimate:
    """Of [seeds, 1 cell, rules]: the first rule less the best of the others' means; who is best is drawn anew, too."""
    return BOOTSTRAP.estimates(scores, lambda s: (_each(s)[..., 0] - _each(s)[..., 1:].max(axis=-1))[..., None])[0]


def p_value(scores: np.ndarray) -> float:
    """Two-sided, that the paired differences of [seeds, cells, 2] are symmetric around 0."""
    paired = (scores[..., 0] - scores[..., 1]).ravel()
    if not paired.any():
        return 1.0
    result = permutation_test(
        (paired,),
        np.mean,
        permutation_type="samples",
        n_resamples=PERMUTATIONS,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979)."""
    order = np.argsort(p_values)
    stepped = np.maximum.accumulate([(len(p_values) - i) * p_values[j] for i, j in enumerate(order)])
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()


@dataclass(frozen=True)
class Verdict:
    """A claim and what the numbers say to it: HELD, FAILED or UNDECIDED."""

    claim: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Rule `a` against rule `b`, in one cell or over several; positive is in favour of a."""

    a: str
    b: str
    where: str
    seeds: int
    difference: Estimate
    p: float
    adjusted: float

    @property
    def verdict(self) -> str:
        """Of 'a is better than b'."""
        if self.adjusted >= LEVEL or not (self.difference.low > 0 or self.difference.high < 0):
            return UNDECIDED
        return HELD if self.difference.value > 0 else FAILED

    def as_verdict(self, where: str) -> Verdict:
        return Verdict(f"{self.a} is better than {self.b} {where}: {self.difference.text('+.4f')}", self.verdict)


def family(scores: Scores, wanted: Sequence[tuple[str, str, str, Sequence[str]]]) -> list[Comparison]:
    """Comparisons (a, b, where, cells), corrected together; those without two common seeds are left out."""
    return corrected([(a, b, where, scores.array(cells, (a, b))) for a, b, where, cells in wanted])


def corrected(arrays: Sequence[tuple[str, str, str, np.ndarray]]) -> list[Comparison]:
    """Comparisons of (a, b, where, [seeds, cells, 2]), their p-values corrected together; under two seeds: left out."""
    arrays = [item for item in arrays if len(item[3]) > 1]
    p_values = [p_value(array) for *_, array in arrays]
    return [
        Comparison(a, b, where, len(array), difference(array), p, adjusted)
        for (a, b, where, array), p, adjusted in zip(arrays, p_values, holm(p_values), strict=True)
    ]


def within(estimate: Estimate, margin: float) -> str:
    """Verdict of 'not more than `margin` below', by the 95% interval."""
    if estimate.low > -margin:
        return HELD
    return FAILED if estimate.high < -margin else UNDECIDED
