"""Every aggregation rule that the studies compare, as a mean length ℓ̄ for each response of one update.

A response of T_i tokens weighs w_i = T_i / ℓ̄_i, so a rule is a function from (lengths, groups, signs) to ℓ̄ (see
`verl_ba.aggregation`). The package's modes come from there; the rest is here until a study favours it.

Symbols: a *cell* is one sign in one group; n its number of responses that are not empty, c their mean length; a the
effect of the group, b that of the sign, so that a·b is what the whole update says about the cell.

Shape suffixes: B responses, C cells.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_ba.aggregation import pool_mean_length
from verl_ba.tools.analysis.modes import in_full

SWEEPS = 30
"""Of iterative proportional fitting. The error shrinks geometrically; `test_rules` asserts the margins to 1e-9."""


@dataclass
class Batch:
    """One update: whole groups. Every tensor [B]; groups numbered from 0.

    Attributes:
        length: float64, valid tokens, 0 for an empty response [tokens].
        group: int64.
        sign: int64, of the advantage: -1, 0 or 1.
    """

    length: Tensor
    group: Tensor
    sign: Tensor

    def __post_init__(self) -> None:
        self.length = self.length.double()
        self.filled = (self.length > 0).double()
        self.cell = self.group * 3 + self.sign + 1
        self.fitted: dict[int, tuple[Tensor, Tensor]] = {}  # `effects`, by the number of sweeps: several rules ask

    def mean_over(self, label: Tensor, value: Tensor | None = None) -> Tensor:
        """For each response the mean of `value` (lengths) over the responses of its label that are not empty: [B]."""
        value = self.length if value is None else value
        total, count = (torch.bincount(label, weights=v) for v in (value * self.filled, self.filled))
        return (total / count.clamp(min=1))[label]

    def count_in(self, label: Tensor) -> Tensor:
        """For each response the number of responses of its label that are not empty: float64 [B]."""
        return torch.bincount(label, weights=self.filled)[label]


State = dict[str, float]
"""What a rule remembers from step to step; empty at the start of a run."""

MeanLength = Callable[[Batch, State], Tensor]


@dataclass(frozen=True)
class Rule:
    """One aggregation rule.

    Attributes:
        name: the mode, where the rule is one.
        mean_length: ℓ̄ [B] [tokens] of one update; anything for an empty response.
        what: one line for the report.
        mode: the package's or verl's name, if it has one.
    """

    name: str
    mean_length: MeanLength = field(repr=False)
    what: str
    mode: str | None = None


def _package(mode: str, what: str) -> Rule:
    """A rule that is a mode."""
    return Rule(mode, lambda batch, state: pool_mean_length(mode, batch.length, batch.group, batch.sign), what, mode)


def effects(batch: Batch, sweeps: int = SWEEPS) -> tuple[Tensor, Tensor]:
    """a and b of each response, [B] each, by raking: the weights T/(a·b) of every group sum to its number of responses,
    and those of every sign to the sign's. One sweep: a is the group's mean, b the sign's mean of T/a.

    b is scaled to a geometric mean of 1 over the positive and negative sign, where both occur.
    """
    if sweeps in batch.fitted:
        return batch.fitted[sweeps]
    a, b = torch.ones_like(batch.length), torch.ones_like(batch.length)
    sign = batch.sign + 1
    for _ in range(sweeps):
        a = batch.mean_over(batch.group, batch.length / b)
        b = batch.mean_over(sign, batch.length / _filled(a))
        b = torch.where(b > 0, b, 1.0)
    signed = {s: b[(batch.sign == s) & (batch.filled > 0)][:1] for s in (-1, 1)}
    if all(len(value) for value in signed.values()):
        scale = (signed[-1] * signed[1]).sqrt()
        a, b = a * scale, b / scale
    batch.fitted[sweeps] = _filled(a), b
    return batch.fitted[sweeps]


def _filled(mean: Tensor) -> Tensor:
    return torch.where(mean > 0, mean, 1.0)  # of a pool without tokens: no response reads it


def doubly_balanced(batch: Batch, state: State) -> Tensor:
    a, b = effects(batch)
    return a * b


def pooled_sign_effect(batch: Batch, state: State) -> Tensor:
    a, b = effects(batch, sweeps=1)
    return a * b


def averaged_sign_effect(decay: float) -> MeanLength:
    """Doubly balanced with log(b₋/b₊) averaged over steps: few responses of one sign no longer decide their own b."""

    def mean_length(batch: Batch, state: State) -> Tensor:
        _, b = effects(batch)
        signed = [b[(batch.sign == s) & (batch.filled > 0)][:1] for s in (-1, 1)]
        if all(len(value) for value in signed):
            now = float((signed[0] / signed[1]).log())
            state["log_ratio"] = decay * state["log_ratio"] + (1 - decay) * now if "log_ratio" in state else now
        half = state.get("log_ratio", 0.0) / 2
        b = torch.where(batch.sign == 0, b, torch.exp(-batch.sign * half))
        return batch.mean_over(batch.group, batch.length / b) * b

    return mean_length


def partial_pooling(strength: float | None) -> MeanLength:
    """ℓ̄ = (n·c + m·a·b)/(n + m), then scaled over the update so that the weights sum to the number of responses.

    m = 0 is `balanced`, m = ∞ doubly balanced. `strength` None: m from the variances of this update's lengths.
    """

    def mean_length(batch: Batch, state: State) -> Tensor:
        a, b = effects(batch)
        n, c, expected = batch.count_in(batch.cell), batch.mean_over(batch.cell), a * b
        m = pooling_strength(batch, expected) if strength is None else strength
        if m == float("inf"):
            return expected
        mean = (n * c + m * expected) / (n + m).clamp(min=1)
        weight = (batch.length / _filled(mean)).sum()
        return mean * weight / batch.filled.sum().clamp(min=1)

    return mean_length


def pooling_strength(batch: Batch, expected: Tensor) -> float:
    """m = σ²/τ²: the variance of lengths within a cell over that of the cells' true means around a·b, both relative to
    a·b, by the method of moments. Infinite where the cells differ no more than their sizes explain.

    With both normal, (n·c + m·a·b)/(n + m) is the posterior mean of the cell's length.
    """
    cells = torch.unique(batch.cell[(batch.filled > 0) & (batch.sign != 0)])
    if not len(cells):
        return float("inf")
    used = batch.filled * (batch.sign != 0)
    relative = batch.length / _filled(expected)
    size = int(batch.cell.max()) + 1
    n, total, squares = (
        torch.bincount(batch.cell, weights=v * used, minlength=size)[cells]
        for v in (torch.ones_like(relative), relative, relative**2)
    )
    within = (squares - total**2 / n).sum()
    free_within = n.sum() - len(cells)
    groups = len(torch.unique(batch.group[used > 0]))
    free_between = len(cells) - groups - 1  # a per group and one ratio of signs were fitted
    if free_within <= 0 or free_between <= 0 or within <= 0:
        return float("inf")
    variance = within / free_within
    between = (n * (total / n - 1) ** 2).sum()
    # E[between] = free_between·variance + τ²·(Σn − what the fit absorbs); the share absorbed is that of the freedoms.
    spread = (n.sum() - (n**2).sum() / n.sum()) * free_between / max(len(cells) - 1, 1)
    tau = (between - free_between * variance) / spread
    return float(variance / tau) if tau > 0 else float("inf")


def batch_signs(batch: Batch, state: State) -> Tensor:
    return batch.mean_over(batch.sign + 1)


def leave_one_out(batch: Batch, state: State) -> Tensor:
    """Mean length of the *other* responses of the cell; alone in it, of the other responses of the group; alone there,
    its own."""

    def others(label: Tensor) -> Tensor:
        n, mean = batch.count_in(label), batch.mean_over(label)
        return torch.where(n > 1, (n * mean - batch.length) / (n - 1).clamp(min=1), 0.0)

    cell, group = others(batch.cell), others(batch.group)
    return torch.where(cell > 0, cell, torch.where(group > 0, group, batch.length))


def constant_divisor(batch: Batch, state: State) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): one constant for the whole run. Here the mean length of the first update, so that the
    loss starts on the scale of the other rules."""
    mean = batch.length.sum() / batch.filled.sum().clamp(min=1)
    return torch.full_like(batch.length, state.setdefault("divisor", float(mean)))


def delta_l(alpha: float) -> MeanLength:
    """ΔL normalisation (arXiv 2509.07558): a response's summed loss is multiplied by T^-α / Σ_group T^-α, so ℓ̄ is T^α
    times the group's mean of T^-α, times a constant as in `constant_divisor`."""

    def mean_length(batch: Batch, state: State) -> Tensor:
        inverse = torch.where(batch.length > 0, batch.length.clamp(min=1) ** -alpha, 0.0)
        return constant_divisor(batch, state) * batch.mean_over(batch.group, inverse) * batch.length**alpha

    return mean_length


RULES = {
    rule.name: rule
    for rule in (
        _package("seq-mean-token-mean", "GRPO: the response's own length"),
        _package("group-mean-token-mean", "the group's mean length"),
        _package("token-mean", "the update's mean length (verl: the mini-batch's)"),
        _package("balanced", "the mean length of the group and sign"),
        Rule("doubly-balanced", doubly_balanced, "a(group)·b(sign), both margins exact"),
        Rule("doubly-averaged", averaged_sign_effect(0.9), "the same, b averaged over steps (decay .9)"),
        Rule("pooled-1", partial_pooling(1), "partial pooling, m = 1"),
        Rule("pooled-4", partial_pooling(4), "partial pooling, m = 4"),
        Rule("pooled-16", partial_pooling(16), "partial pooling, m = 16"),
        Rule("pooled-auto", partial_pooling(None), "partial pooling, m from the variances of the update's lengths"),
        Rule("sign-effect", pooled_sign_effect, "doubly balanced after one sweep"),
        Rule("batch-signs", batch_signs, "the mean length of the sign in the update, groups ignored"),
        Rule("leave-one-out", leave_one_out, "balanced without the response itself"),
        Rule("constant", constant_divisor, "a constant divisor (Dr. GRPO)", "seq-mean-token-sum-norm"),
        Rule("delta-l-1", delta_l(1.0), "ΔL, α = 1"),
        Rule("delta-l-.75", delta_l(0.75), "ΔL, α = .75"),
    )
}
"""Every rule, by name; `fit` and the files of numbers take the modes' short names as well."""


def fit(rule: str, batch: Batch, state: State) -> Tensor:
    """ℓ̄ of every response under the rule: float64 [B] [tokens], 0 for an empty one. `state` is updated in place."""
    return torch.where(batch.length > 0, RULES[in_full(rule)].mean_length(batch, state), 0.0)
