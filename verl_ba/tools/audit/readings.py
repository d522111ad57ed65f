"""What is measured of a term, and the report that comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from verl_ba.tools.audit.batch import MICRO_PAIRS, RANK_PAIRS, SPLITS, WHOLE, Batch, Split
from verl_ba.tools.audit.rules import Match, Rule, match
from verl_ba.tools.audit.terms import SAME, Result, Term


@dataclass(frozen=True)
class Finding:
    """Something to know about a term.

    Attributes:
        level: 'fault': the objective is not what the configuration says, or depends on the split. 'note': it is exact,
            but easily overlooked.
        kind: split, masked, factor, ignored, stale, refused, rule; follows, inherits, groups, empty.
    """

    level: Literal["fault", "note"]
    term: str
    kind: str
    message: str


@dataclass(frozen=True)
class Row:
    """One term of the loss: its denominator in words and as a formula, and what depends on each split."""

    term: str
    denominator: str
    formula: str
    micro_batch: str
    rank: str


@dataclass
class Report:
    verl: str
    trainer: str
    mode: str
    policy_loss: str
    terms: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "fault"]

    def add(self, level: Literal["fault", "note"], term: str, kind: str, message: str) -> None:
        self.findings.append(Finding(level, term, kind, message))


@dataclass(frozen=True)
class Dependence:
    """Which of value and gradient differ between splits, and by how much of its norm the gradient does at most."""

    what: tuple[str, ...]
    change: float

    def __bool__(self) -> bool:
        return bool(self.what)

    def __str__(self) -> str:
        return " and ".join(self.what) or "no"


@dataclass
class Reading:
    """What was measured of a term: its weights [splits, B, T], their rule, and what differs between splits."""

    term: Term
    weight: torch.Tensor
    match: Match | None
    micro_batch: Dependence
    rank: Dependence
    behind_mask: float = 0.0  # the largest change by what stands behind the mask, of the gradient's norm

    def row(self) -> Row:
        on = [name for name, found in (("micro-batch", self.micro_batch), ("rank", self.rank)) if found]
        unknown = f"unknown: depends on the {' and the '.join(on)} split" if on else "unknown: no rule fits"
        return Row(
            self.term.name,
            self.match.words if self.match else unknown,
            self.match.formula if self.match else "?",
            str(self.micro_batch),
            str(self.rank),
        )


def compare(results: dict[Split, Result], pairs: Sequence[tuple[Split, Split]]) -> Dependence:
    """Results under splits that must agree."""
    differing = {what for a, b in pairs for what in results[b].differs(results[a])}
    changes = [
        float((results[b].gradient - results[a].gradient).norm() / results[a].gradient.norm().clamp(min=1e-300))
        for a, b in pairs
    ]
    return Dependence(tuple(what for what in ("value", "gradient") if what in differing), max(changes))


def read(term: Term, behind: Term, batch: Batch, candidates: list[Rule], asked: Rule | None) -> Reading:
    """Measure a term under every split, before and after the policy has moved.

    `behind` is the same term with other numbers behind the mask.
    """
    weight = weights(term)
    later = {split: term.measure(split, True) for split in SPLITS}
    found = match(weight, term, batch, candidates, asked)
    masked = max(
        _behind_mask(term.measure(WHOLE, moved), behind.measure(WHOLE, moved), batch) for moved in (False, True)
    )
    return Reading(term, weight, found, compare(later, MICRO_PAIRS), compare(later, RANK_PAIRS), masked)


def _behind_mask(result: Result, other: Result, batch: Batch) -> float:
    """How much of a result comes from tokens that the mask leaves out: their own gradient, and what else they change."""
    norm = result.gradient.norm().clamp(min=1e-300)
    own = result.gradient[batch.mask == 0].norm() / norm
    change = (other.gradient - result.gradient)[batch.mask == 1].norm() / norm
    value = (other.value - result.value).abs() / result.value.abs().clamp(min=1e-300)
    return max((float(x) for x in (own, change, value) if x > SAME), default=0.0)


def weights(term: Term) -> torch.Tensor:
    """Of each token under each of `SPLITS`, [splits, B, T]."""
    return torch.stack([term.measure(split, False).gradient for split in SPLITS]) / term.per_token
