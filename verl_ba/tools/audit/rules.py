"""What a token's weight may be, and which rule it is."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from verl_ba.aggregation import pool_mean_length_by_sign
from verl_ba.loss_agg import count_by_sign, token_mean_length
from verl_ba.tools.audit.batch import ROWS, SPLITS, WIDTH, Batch, Split
from verl_ba.tools.audit.terms import Term

FITS = 1e-6
"""Relative tolerance of a rule: verl adds 1e-8 to a response's length."""


@dataclass(frozen=True)
class Rule:
    """A denominator: in words, as a formula, and the weight it gives each token under each of `SPLITS`, [splits, B, T].

    `of_tokens`: it is a count of the mini-batch's tokens; 'before rejection' if it counts those that are masked since.
    """

    words: str
    formula: str
    weight: torch.Tensor
    of_tokens: Literal["", "all", "before rejection"] = ""


SCOPES = {"global mini-batch": "", "rank": "_rank", "micro-batch": "_micro"}


def rules(batch: Batch, scale: float | None) -> list[Rule]:
    """Every rule that a weight is compared with; where two are equal, the first gives it its name."""
    counts: dict[tuple[str, str], list[torch.Tensor]] = {}
    lengths: dict[tuple[str, str], list[torch.Tensor]] = {}
    for split in SPLITS:
        for (words, symbol), column in _counts(batch, split).items():
            counts.setdefault((words, symbol), []).append(column)
        for (words, symbol), column in _lengths(batch, split, scale).items():
            lengths.setdefault((words, symbol), []).append(column)
    ranks = torch.tensor([split.ranks for split in SPLITS], dtype=torch.float64)[:, None, None]
    found = []
    for (words, symbol), columns in counts.items():
        count = torch.stack(columns)
        of_tokens: Any = {"N": "all", "N_before": "before rejection"}.get(symbol, "")
        found.append(Rule(words, f"Σ m·ℓ / {symbol}", 1 / count, of_tokens))
        if symbol.startswith("B") or symbol == "1":
            for (per, length_symbol), column in lengths.items():
                both = f"{length_symbol}" if symbol == "1" else f"({symbol}·{length_symbol})"
                found.append(Rule(f"{words} × {per}", f"Σ m·ℓ / {both}", 1 / (count * torch.stack(column))))
    found += [Rule(f"{rule.words}, averaged over ranks", f"{rule.formula} / R", rule.weight / ranks) for rule in found]
    return found


def _scopes(split: Split) -> dict[str, list[list[int]]]:
    parts = list(split.parts())
    return {
        "global mini-batch": [list(range(ROWS))],
        "rank": [[i for r, rows in parts if r == rank for i in rows] for rank in range(split.ranks)],
        "micro-batch": [rows for _, rows in parts],
    }


def _counts(batch: Batch, split: Split) -> dict[tuple[str, str], torch.Tensor]:
    """What a sum may be divided by, as seen by each row: [B, T]."""
    found = {}
    for scope, places in _scopes(split).items():
        tail = SCOPES[scope]
        spans = torch.tensor(batch.spans(list(range(ROWS))))
        kinds = {("tokens", "N"): batch.mask.sum(1), ("tokens, masked ones included,", "N_span"): spans}
        if not torch.equal(batch.mask, batch.counted):
            kinds["tokens before rejection", "N_before"] = batch.counted.sum(1)
        kinds["responses", "B"] = torch.ones(ROWS)
        kinds["non-empty responses", "B_filled"] = (batch.mask.sum(1) > 0).float()
        for (words, symbol), per_row in kinds.items():
            column = torch.ones(ROWS, WIDTH, dtype=torch.float64)
            for rows in places:
                column[rows] = per_row[rows].sum().double()
            found[f"{words} of the {scope}", symbol + tail] = column
    found["nothing (a sum)", "1"] = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    return found


def _lengths(batch: Batch, split: Split, scale: float | None) -> dict[tuple[str, str], torch.Tensor]:
    """What a response's sum may be divided by, as seen by each token: [B, T]."""
    own = batch.mask.sum(1, keepdim=True).double().expand(ROWS, WIDTH)
    spans = torch.tensor(batch.spans(list(range(ROWS))))
    exists = torch.arange(WIDTH)[None] < spans[:, None]
    found = {("own tokens", "T_i"): own, ("own tokens, masked ones included", "T_span"): spans[:, None] + 0 * own}
    if scale is not None:
        found["loss_scale_factor", "S"] = torch.full_like(own, scale)
    by_sign = {"": count_by_sign(batch.mask, batch.advantage), "_span": count_by_sign(exists, batch.advantage)}
    for scope, places in _scopes(split).items():
        tail, at = SCOPES[scope], "" if scope == "global mini-batch" else f", seen in the {scope}"
        pools = {("its group", "ℓ̄_group"): "group-mean-token-mean", ("its group and sign", "ℓ̄_group,sign"): "balanced"}
        for ((pool, symbol), mode), (span, signs) in itertools.product(pools.items(), by_sign.items()):
            column = torch.zeros_like(own)
            for rows in places:
                mean_BS = pool_mean_length_by_sign(mode, signs[rows], [batch.uid[i] for i in rows])
                column[rows] = token_mean_length(mean_BS, batch.advantage[rows], torch.zeros(len(rows)))
            masked = ", masked tokens included" if span else ""
            found[f"mean length of {pool}{masked}{at}", f"{symbol}{tail}{span}"] = column
        longest = torch.zeros_like(own)
        for rows in places:
            longest[rows] = float(max(batch.spans(rows)) if batch.nested else WIDTH)
        found[f"longest response of the {scope}", f"T_max{tail}"] = longest
    return found


@dataclass(frozen=True)
class Match:
    """What a term's weights are: `factor` times a rule, and perhaps `more` times another."""

    rule: Rule
    factor: float = 1.0
    more: tuple[float, Rule] | None = None

    @property
    def words(self) -> str:
        times = "" if abs(self.factor - 1) < FITS else f", and a constant 1 / {self.factor:.4g}"
        return f"{self.rule.words}{times}" + (
            f"; plus {self.more[0]:.4g} × a mean by {self.more[1].words}" if self.more else ""
        )

    @property
    def formula(self) -> str:
        times = "" if abs(self.factor - 1) < FITS else f"{self.factor:.4g} · "
        return f"{times}{self.rule.formula}" + (f" + {self.more[0]:.4g} · {self.more[1].formula}" if self.more else "")


def find(weight: torch.Tensor, readable: torch.Tensor, candidates: list[Rule], any_factor: bool) -> Match | None:
    """The first rule that gives these weights under every split, up to one constant factor if that is allowed."""
    if not bool(readable.any()):
        return None
    seen = weight[readable]
    for rule in candidates:
        expected = rule.weight[readable]
        factor = float((seen * expected).sum() / (expected * expected).sum()) if any_factor else 1.0
        if factor and bool(((seen - factor * expected).abs() <= FITS * (factor * expected).abs()).all()):
            return Match(rule, factor)
    return None


def match(
    weight: torch.Tensor, term: Term, batch: Batch, candidates: list[Rule], asked: Rule | None = None
) -> Match | None:
    """The rule, the rule times a constant, or what was asked for plus something else."""
    readable = batch.mask.bool() & ~batch.suspect[:, None] & (weight != 0)  # a loss may leave tokens out
    found = find(weight, readable, candidates, False) or find(weight, readable, candidates, True)
    if found is None and asked is not None:
        rest = weight - asked.weight
        for residue in (rest, rest * term.per_token):  # in proportion to the token's loss, or the same for each token
            if more := find(residue, readable, candidates, True):
                return Match(asked, more=(more.factor, more.rule))
    return found
