"""From a bank's sums to estimates with intervals, by a jackknife over its blocks and over the parts of its true gradient.

Every measure is a function of means over blocks and parts, both independent. The variance is that of leaving out one block at
a time plus that of leaving out one part at a time; intervals are t intervals with one degree of freedom less than blocks.

    cosine      E cos(g, g*): of one update with the true gradient
    bias        cos(E g, g*): 1 if only noise stands between the rule and the true gradient
    signal      |E g|² over the variance of g: signal to noise of one update
    per_kl      (E g·g*)² / E g'Fg, F the Fisher matrix: the gain that a step along g has for its KL, squared
    adam        E of the first-order gain of an Adam step, its moments those of the rule
    push        E cos(g, ∇E[log T]): above 0, the update lengthens
    net         as cosine, with the part of g* that is orthogonal to the length direction
    half        E cos of two independent updates: needs no true gradient
    clipped-k   first-order gain of an update in k mini-batches, clipped
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies.gradient_quality.rules import REFERENCE
from studies.jobs import Row
from verl_ba.tools.analysis.estimate import Estimate, jackknife_variance, t_interval

RELATIVE = ("cosine", "signal", "per_kl", "adam", "net", "half", "clipped-2", "clipped-4")
"""Measures that are shown relative to the reference: the ratio less 1. The norm of g* cancels there."""

Of = Callable[[np.ndarray, np.ndarray], np.ndarray]


def jackknife(of: Of, blocks: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """of(all blocks, all parts), and its standard error. `of` takes the indices of blocks and of parts."""
    every = np.arange(blocks), np.arange(parts)
    variance = 0.0
    for axis, size in enumerate((blocks, parts)):
        if size > 1:
            left = [of(*(np.delete(e, i) if a == axis else e for a, e in enumerate(every))) for i in range(size)]
            variance = variance + jackknife_variance(np.stack(left))
    return of(*every), np.sqrt(variance)


@dataclass(frozen=True)
class Number:
    """A value, its standard error, and the degrees of freedom of its interval."""

    value: float
    error: float
    freedom: int

    def interval(self, level: float = 0.95) -> Estimate:
        return t_interval(self.value, self.error, self.freedom, level)


class Measured:
    """One bank."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.cell, self.steps = row["cell"], row["about"]["steps"]
        self.true, self.true_length, self.length = (
            np.array(row[name]) for name in ("true", "true_length", "length_length")
        )
        self.parts = len(self.true)
        self.shapes = list(row["shapes"])
        self.blocks = len(row["shapes"][self.shapes[0]]["square"])

    def rules(self, shape: str | None = None) -> list[str]:
        return self.row["shapes"][shape or self.shapes[0]]["rules"]

    def numbers(self, measure: str, shape: str | None = None, against: str | None = REFERENCE) -> dict[str, Number]:
        """The measure of every rule, for the `RELATIVE` ones less that of rule `against` over it; None: as it is.

        Raises KeyError where the bank lacks the measure.
        """
        of, rules = self.function(measure, shape)
        if measure in RELATIVE and against is not None:
            at = rules.index(against)
            absolute = of
            of = lambda b, p: absolute(b, p) / absolute(b, p)[at] - 1  # noqa: E731
        value, error = jackknife(of, self.blocks, self.parts)
        return {
            rule: Number(float(v), float(e), self.blocks - 1) for rule, v, e in zip(rules, value, error, strict=True)
        }

    def _norm(self, parts: np.ndarray) -> float:
        """|g*|, from products of different parts, which have no noise in common."""
        inner = self.true[np.ix_(parts, parts)]
        n = len(parts)
        return float(np.sqrt(max((inner.sum() - np.trace(inner)) / (n * (n - 1)), 1e-30)))

    def function(self, measure: str, shape: str | None = None) -> tuple[Of, list[str]]:
        """The measure of all rules as a function of blocks and parts, for `jackknife`; and the rules."""
        return self._of(measure, shape or self.shapes[0])

    def _of(self, measure: str, shape: str) -> tuple[Of, list[str]]:
        sums = {k: np.array(v) for k, v in self.row["shapes"][shape].items() if k != "rules"}
        rules = self.row["shapes"][shape]["rules"]

        def mean(name: str, b: np.ndarray, p: np.ndarray | None = None, within: Any = None) -> np.ndarray:
            values = (within or sums)[name][b].mean(0)
            return values if p is None else values[p].mean(0)

        def cosine(b: np.ndarray, p: np.ndarray) -> np.ndarray:
            return mean("cos", b, p) / self._norm(p)

        def net(b: np.ndarray, p: np.ndarray) -> np.ndarray:
            k = len(self.length)
            off = ~np.eye(k, dtype=bool)
            along = self.true_length[p].mean() / self.length[off].mean()
            norm = np.sqrt(max(self._norm(p) ** 2 - along**2 * self.length[off].mean(), 1e-30))
            return (mean("cos", b, p) - along * mean("push", b)) / norm

        def adam(b: np.ndarray, p: np.ndarray) -> np.ndarray:
            return mean("gain", b, p, {"gain": np.array(self.row["adam"]["gain"])})

        of: dict[str, Of] = {
            "cosine": cosine,
            "bias": lambda b, p: mean("dot", b, p) / np.sqrt(np.maximum(mean("cross", b), 1e-30)) / self._norm(p),
            "signal": lambda b, p: mean("cross", b) / (mean("square", b) - mean("cross", b)),
            "per_kl": lambda b, p: mean("dot", b, p) ** 2 / mean("fisher", b),
            "push": lambda b, p: mean("push", b) / np.sqrt(self.length[~np.eye(self.parts, dtype=bool)].mean()),
            "net": net,
            "half": lambda b, p: mean("half", b),
            "adam": adam,
        }
        if measure.startswith("clipped-"):
            found = self.row["clipped"][measure.removeprefix("clipped-")]
            dots = {"dot": np.array(found["dot"])}
            return lambda b, p: mean("dot", b, p, dots), found["rules"]
        return of[measure], self.row["adam"]["rules"] if measure == "adam" else rules
