"""The rules of the gradient study: the coefficient c_i of each response in the gradient of one update on policy,

    g = (1/B) · Σ_i c_i · S_i,    S_i = Σ_t ∇ log π(token t of response i), the *score gradient*.

An aggregation rule (`studies.rules`) has c = A/ℓ̄ with GRPO's advantage A. The others change the baseline, or measure a
response by its *effective length* u = Σ_t (1 - p_t)² in place of its length T: p_t is the probability of the token that was
sampled, so that tokens about which the policy was certain, whose score is nearly 0, do not count.

Every rule of this file that divides is scaled over the update as the package's modes are: Σ T_i/ℓ̄_i is the number of
responses. Shape suffix B: responses of one update, in whole groups; none is empty.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from studies.rules import RULES, Batch, State, fit
from verl_ba.tools.analysis.weighing import advantages

LEAST = 0.01
"""An effective length counts as at least this share of the update's mean: a response without any surprise has none."""


@dataclass
class Responses:
    """One update. Every tensor [B]; float64, but `group`, which numbers the groups from 0.

    Attributes:
        reward, length [tokens]: of each response.
        effective: u.
        square: |S|², which a training does not know without a gradient of every response; None if not known here either.
    """

    reward: Tensor
    length: Tensor
    group: Tensor
    effective: Tensor
    square: Tensor | None = None
    advantage: Tensor = field(init=False)
    spread: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.reward, self.length = self.reward.double(), self.length.double()
        self.effective = self.effective.double()
        self.effective = self.effective.clamp(min=LEAST * float(self.effective.mean()) + 1e-30)
        self.advantage = torch.from_numpy(advantages(self.reward.numpy(), self.group.numpy(), "grpo"))
        n = torch.bincount(self.group)
        squares = torch.bincount(self.group, weights=(self.reward - self.mean_in_group(self.reward)) ** 2)
        self.spread = ((squares / (n - 1).clamp(min=1)).sqrt() + 1e-6)[self.group]  # verl's, of GRPO

    def mean_in_group(self, value: Tensor) -> Tensor:
        return (torch.bincount(self.group, weights=value) / torch.bincount(self.group))[self.group]

    @functools.cached_property
    def batch(self) -> Batch:
        return Batch(self.length, self.group, self.advantage.sign().long())


Coefficient = Callable[[Responses, State], Tensor]


@dataclass(frozen=True)
class Rule:
    """Attributes: coefficient: c [B]; what: one line for the report; kind: 'length', 'baseline' or 'effective length'."""

    name: str
    kind: str
    what: str
    coefficient: Coefficient = field(repr=False)


def baseline(r: Responses, weight: Tensor, leave_one_out: bool = False) -> Tensor:
    """The mean reward of the group, weighted: [B]. `leave_one_out`: of the group's other responses."""

    def total(value: Tensor) -> Tensor:
        return torch.bincount(r.group, weights=value)[r.group]

    rewards, weights = total(weight * r.reward), total(weight)
    if leave_one_out:
        rewards, weights = rewards - weight * r.reward, weights - weight
    return rewards / weights


def scaled(mean: Tensor, length: Tensor) -> Tensor:
    """ℓ̄ proportional to `mean`, such that Σ T/ℓ̄ is the number of responses."""
    return mean * (length / mean).sum() / len(length)


def _aggregation(name: str) -> Coefficient:
    return lambda r, state: r.advantage / fit(name, r.batch, state)


def _constant(r: Responses, state: State) -> Tensor:
    return fit("constant", r.batch, state)


def _less(weight: Callable[[Responses], Tensor], leave_one_out: bool = False) -> Coefficient:
    """The reward less a weighted baseline, over the group's standard deviation, with a constant divisor."""
    return lambda r, state: (r.reward - baseline(r, weight(r), leave_one_out)) / r.spread / _constant(r, state)


def _square(r: Responses) -> Tensor:
    if r.square is None:
        raise ValueError("a rule that weighs by |S|² needs `square`, which a training does not have")
    return r.square


def _shrunk(r: Responses, state: State) -> Tensor:
    advantage = (r.reward - baseline(r, r.effective, leave_one_out=True)) / r.spread
    return advantage / scaled(r.effective + r.effective.mean(), r.length)


def _root(r: Responses, state: State) -> Tensor:
    return r.advantage / scaled(r.effective.sqrt(), r.length)


def _balanced_on_effective(r: Responses, state: State) -> Tensor:
    at_least_one = r.effective / r.effective.min()  # the package's lengths are whole tokens
    return r.advantage / scaled(fit("balanced", replace(r.batch, length=at_least_one), state), r.length)


ALL = {
    rule.name: rule
    for rule in (
        *(Rule(rule.name, "length", rule.what, _aggregation(rule.name)) for rule in RULES.values()),
        Rule("opo", "baseline", "OPO's baseline: weighted by length (arXiv 2505.23585)", _less(lambda r: r.length)),
        Rule("opo-others", "baseline", "the same, leave one out", _less(lambda r: r.length, True)),
        Rule("score-others", "baseline", "baseline weighted by |S|², leave one out", _less(_square, True)),
        Rule("score", "baseline", "the same, with the response itself", _less(_square)),
        Rule("effective-opo", "effective length", "OPO's baseline, weighted by u", _less(lambda r: r.effective)),
        Rule("effective-root", "effective length", "A·u^(-1/2)", _root),
        Rule("effective-shrunk", "effective length", "baseline of the others by u; divided by u + mean u", _shrunk),
        Rule("effective-balanced", "effective length", "balanced, u in place of T", _balanced_on_effective),
    )
}
"""Every rule of the study by name. Those of a `kind` other than 'length' divide by a constant unless it says otherwise."""

REFERENCE = "token-mean"
"""verl's default: what every rule is compared with."""


def coefficients(r: Responses, state: dict[str, State], names: list[str]) -> Tensor:
    """c of every rule: float64 [rules, B], exactly 0 in groups of equal rewards. `state` has what each rule remembers, and is
    updated in place."""
    found = torch.stack([ALL[name].coefficient(r, state.setdefault(name, {})) for name in names])
    return torch.where(r.advantage == 0, 0.0, found)  # a baseline leaves rounding there
