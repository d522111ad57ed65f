"""The tables of the gradient study, and what its claims are worth: held, failed or undecided, by PROTOCOL.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from studies.gradient_quality import plan
from studies.gradient_quality.estimates import Measured, Number, jackknife
from studies.gradient_quality.measure import MAIN
from studies.gradient_quality.rules import ALL, REFERENCE
from studies.jobs import Row
from studies.miniature.outcome import FAILED, HELD, UNDECIDED, difference
from verl_ba.tools.analysis import charts
from verl_ba.tools.analysis.estimate import Estimate
from verl_ba.tools.analysis.page import INK, SERIES, Figure
from verl_ba.tools.table import Table

SIGNS = "batch-signs"
DRAWS = 2000
NOT_RUN = "not run"


@dataclass(frozen=True)
class Statement:
    """Of one checkpoint: the number and the threshold that it must be above."""

    where: str
    number: Number
    above: float


def judge(statements: Sequence[Statement], planned: int) -> str:
    """Verdict of 'at every checkpoint', of which `planned` were to be run."""
    intervals = [s.number.interval() for s in statements]
    if len(statements) == planned > 0 and all(i.low > s.above for i, s in zip(intervals, statements, strict=True)):
        return HELD
    level = 1 - 0.05 / max(planned, 1)
    if any(s.number.interval(level).high < s.above for s in statements):
        return FAILED
    return UNDECIDED


def place(m: Measured) -> str:
    return m.cell.removesuffix("-gradient") + (f", {m.steps}" if m.steps else "")


def less(m: Measured, a: str, b: str, measure: str = "cosine") -> Number:
    """Rule a less rule b, both relative to the reference, with the error of the difference."""
    of, rules = m.function(measure)
    i, j, at = (rules.index(name) for name in (a, b, REFERENCE))
    value, error = jackknife(
        lambda blocks, parts: (lambda v: np.array([(v[i] - v[j]) / v[at]]))(of(blocks, parts)), m.blocks, m.parts
    )
    return Number(float(value[0]), float(error[0]), m.blocks - 1)


@dataclass(frozen=True)
class Claim:
    """Attributes: worst: the statement with the lowest value above its threshold, in words."""

    name: str
    says: str
    verdict: str
    worst: str
    done: str


def claim(name: str, says: str, statements: Sequence[Statement], planned: int) -> Claim:
    lowest = min(statements, key=lambda s: s.number.value - s.above, default=None)
    worst = f"least {lowest.number.interval().text('+.1%')} ({lowest.where})" if lowest else NOT_RUN
    return Claim(name, says, judge(statements, planned), worst, f"{len(statements)} of {planned} checkpoints")


def claims(measured: Sequence[Measured], document: dict[str, Any]) -> list[Claim]:
    """(a), (b) and the gradient part of (d)."""
    table, planned = document["claims"], plan.banks(document)

    def count(inside: Callable[[str], bool]) -> int:
        return sum(inside(job.cell.name) for job in planned)

    def of(inside: Callable[[str], bool], number: Callable[[Measured], Number], above: float) -> list[Statement]:
        return [Statement(place(m), number(m), above) for m in measured if inside(m.cell)]

    def every(cell: str) -> bool:
        return True

    def longer(cell: str) -> bool:
        return cell in table["negatives_longer"]

    def independent(cell: str) -> bool:
        return cell in table["independent"]

    def elsewhere(cell: str) -> bool:
        return not independent(cell) and cell not in table["rare"]

    def gain(rule: str) -> Callable[[Measured], Number]:
        return lambda m: m.numbers("cosine")[rule]

    def over_balanced(m: Measured) -> Number:
        return less(m, SIGNS, "balanced")

    found = [
        claim(
            "a1",
            f"{SIGNS} is at most {table['margin_a']:.0%} below {REFERENCE} everywhere",
            of(every, gain(SIGNS), -table["margin_a"]),
            count(every),
        ),
        claim(
            "a2",
            f"{SIGNS} is above {REFERENCE} where negatives are longer",
            of(longer, gain(SIGNS), 0),
            count(longer),
        ),
        claim(
            "b1",
            f"{SIGNS} is above balanced where lengths are independent",
            of(independent, over_balanced, 0),
            count(independent),
        ),
        claim(
            "b2",
            f"{SIGNS} is at most {table['margin_b']:.0%} below balanced elsewhere, rare right answers apart",
            of(elsewhere, over_balanced, -table["margin_b"]),
            count(elsewhere),
        ),
    ]
    found += [
        claim("d", f"{rule} is above {REFERENCE} everywhere, by gradient", of(every, gain(rule), 0), count(every))
        for rule in table["effective"]
    ]
    return found


# --------------------------------------------------------------------------------------------------------------------
# Trainings
# --------------------------------------------------------------------------------------------------------------------


def area(row: Row, updates: int, curve: str = "accuracy") -> float:
    """Mean of the curve over the first updates, by the trapezoidal rule."""
    at, values = np.array(row["at"], dtype=float), np.array(row["curves"][curve], dtype=float)
    kept = at <= updates
    return float(np.trapezoid(values[kept], at[kept]) / at[kept][-1])


def paired(rows: Sequence[Row], cell: str, rule: str, value: Callable[[Row], float]) -> np.ndarray:
    """[seeds]: of the rule less that of the reference, over the seeds that both have."""
    by = {(row["rule"], row["seed"]): value(row) for row in rows if row["cell"] == cell}
    seeds = sorted({s for r, s in by if r == rule} & {s for r, s in by if r == REFERENCE})
    return np.array([by[rule, s] - by[REFERENCE, s] for s in seeds])


def foretold(measured: Sequence[Measured], rows: Sequence[Row], cells: Sequence[str], updates: int) -> Estimate | None:
    """Claim (c): Spearman's correlation over the main rules of gradient and training, mean of the cells; None: not run."""
    rules = [rule for rule in MAIN if rule != REFERENCE]
    at_start = {m.cell: m.numbers("cosine") for m in measured if m.steps == 0}
    gains, seeds = [], []
    for cell in cells:
        found = [paired(rows, cell, rule, lambda row: area(row, updates)) for rule in rules]
        n = min(len(values) for values in found)
        if cell not in at_start or n < 2:
            return None
        gains.append([at_start[cell][rule] for rule in rules])
        seeds.append(np.stack([values[:n] for values in found], 1))
    rng = np.random.default_rng(0)

    def correlation(cosines: Sequence[np.ndarray], areas: Sequence[np.ndarray]) -> float:
        found: list[Any] = [spearmanr(c, a) for c, a in zip(cosines, areas, strict=True)]
        return float(np.mean([result.statistic for result in found]))

    value = correlation([np.array([n.value for n in g]) for g in gains], [s.mean(0) for s in seeds])
    draws = []
    for _ in range(DRAWS):
        cosines = [np.array([rng.normal(n.value, n.error) for n in g]) for g in gains]
        areas = [s[rng.integers(len(s), size=len(s))].mean(0) for s in seeds]
        draws.append(correlation(cosines, areas))
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def judge_foretold(found: Estimate | None) -> str:
    """Verdict of claim (c) from `foretold`."""
    return UNDECIDED if found is None else HELD if found.low > 0 else FAILED if found.high < 0 else UNDECIDED


def trainings_table(rows: Sequence[Row], cells: Sequence[str], updates: int) -> Table | None:
    """Area of every main rule less the reference's, paired, with 95% bootstrap intervals; None: not run."""
    lines = []
    for rule in (rule for rule in MAIN if rule != REFERENCE):
        found = [paired(rows, cell, rule, lambda row: area(row, updates)) for cell in cells]
        if min(map(len, found)) < 2:
            continue
        each = [difference(np.stack([v, np.zeros_like(v)], 1)[:, None]).text("+.4f") for v in found]
        lines.append((rule, *each, str(min(map(len, found)))))
    header = (f"area after {updates}, less {REFERENCE}", *(c.removesuffix("-gradient") for c in cells), "seeds")
    return Table(header, lines) if lines else None


# --------------------------------------------------------------------------------------------------------------------
# Tables, the figure
# --------------------------------------------------------------------------------------------------------------------


def cosines_table(measured: Sequence[Measured]) -> Table:
    """Expected cosine relative to the reference, percent ± standard error, by rule and checkpoint."""
    numbers = [m.numbers("cosine") for m in measured]
    lines = []
    for rule in ALL:
        values = [n[rule].value for n in numbers]
        cells = (f"{100 * n[rule].value:+.1f} ± {100 * n[rule].error:.1f}" for n in numbers)
        lines.append((rule, *cells, f"{100 * np.mean(values):+.1f}", f"{100 * min(values):+.1f}"))
    return Table((f"cosine against {REFERENCE}, %", *map(place, measured), "mean", "worst"), lines)


def measures_table(measured: Sequence[Measured], rules: Sequence[str] = MAIN) -> Table:
    """The other measures, means over the checkpoints that have them."""
    wanted = {
        "bias": ("bias", ".3f", 1),
        "signal": ("signal, %", "+.1f", 100),
        "per_kl": ("gain² per KL, %", "+.1f", 100),
        "adam": ("Adam step, %", "+.1f", 100),
        "net": ("net of length, %", "+.1f", 100),
        "push": ("push", "+.3f", 1),
        "half": ("split half, %", "+.1f", 100),
        "clipped-2": ("2 mini-batches, %", "+.1f", 100),
        "clipped-4": ("4 mini-batches, %", "+.1f", 100),
    }
    found = {
        name: [m.numbers(name) for m in measured if not name.startswith("clipped") or m.row["clipped"]]
        for name in wanted
    }
    lines = [
        (
            rule,
            *(
                format(scale * float(np.mean([n[rule].value for n in found[name]])), form) if found[name] else "–"
                for name, (_, form, scale) in wanted.items()
            ),
        )
        for rule in rules
    ]
    return Table(
        (f"mean of {len(measured)}; %: against {REFERENCE}", *(title for title, _, _ in wanted.values())), lines
    )


def about_table(measured: Sequence[Measured]) -> Table:
    lines = []
    for m in measured:
        about = m.row["about"]
        true, half = ([m.numbers(k, against=None)[r].value for r in m.rules()] for k in ("cosine", "half"))
        agree = spearmanr(true, half)[0]
        lines.append(
            (
                place(m),
                f"{about['accuracy']:.2f}",
                f"{about['length_right']:.1f}, {about['length_wrong']:.1f}",
                f"{about['variation']:.2f}",
                f"{about['square_and_length']:.2f}, {about['square_and_effective']:.2f}",
                f"{m.numbers('cosine', against=None)[REFERENCE].value:.3f}",
                f"{agree:+.2f}",
            )
        )
    header = (
        "checkpoint",
        "accuracy",
        "length right, wrong",
        "variation",
        "|S|² with T, u",
        f"cosine {REFERENCE}",
        "halves",
    )
    return Table(header, lines, "Halves: Spearman's correlation over rules of the split-half with the true cosine.")


def figure(measured: Sequence[Measured]) -> Figure:
    rules = [rule for rule in MAIN if rule != REFERENCE]
    columns = 5
    lines = -(-len(measured) // columns)
    with charts.axes(columns, lines, size=(2.6 * columns, 0.9 + 2.3 * lines)) as (drawing, axes):
        for i, axis in enumerate(axes):
            if i >= len(measured):
                axis.set_visible(False)
                continue
            numbers = measured[i].numbers("cosine")
            for at, rule in enumerate(rules):
                e, colour = numbers[rule].interval(), SERIES[1 if rule.startswith("effective") else 0]
                axis.plot([100 * e.low, 100 * e.high], [at, at], color=colour, linewidth=2.5)
                axis.plot(100 * e.value, at, "o", color=colour, markersize=5)
            axis.axvline(0, color=INK, linewidth=1)
            axis.set_title(place(measured[i]), fontsize=9)
            axis.set_ylim(len(rules) - 0.5, -0.5)
            axis.set_yticks(range(len(rules)), rules if i % columns == 0 else [""] * len(rules), fontsize=8)
        drawing.supxlabel(f"cosine with the true gradient against {REFERENCE} [%], 95% intervals", fontsize=10)
    return Figure("gradients", drawing, "Expected cosine with the true gradient by rule and regime, against token-mean")


def measured_banks() -> list[Measured]:
    return [Measured(row) for row in plan.rows_of(plan.BANKS)]


def verdict_of_c(measured: Sequence[Measured]) -> str:
    """Claim (c) in words."""
    rows, cells = plan.rows_of(plan.TRAININGS), plan.document()["trainings"]["cells"]
    found = foretold(measured, rows, cells, 12)
    if found is None:
        return f"{UNDECIDED}** (c): the ranking by gradient foretells that of short trainings; {NOT_RUN}"
    says = "the ranking by gradient foretells that of trainings of 12 updates"
    return f"{judge_foretold(found)}** (c): {says}; Spearman {found.text('+.2f')}"


def claims_table(found: Sequence[Claim]) -> Table:
    return Table(("", "claim", "verdict", "worst", "of"), [(c.name, c.says, c.verdict, c.worst, c.done) for c in found])


def markdown(measured: Sequence[Measured] | None = None) -> str:
    """Everything, from the rows that are there; a part without rows says that it was not run."""
    document = plan.document()
    measured = measured_banks() if measured is None else measured
    if not measured:
        return "The gradient study was not run.\n"
    rows, long = plan.rows_of(plan.TRAININGS), plan.rows_of(plan.LONG)
    cells = document["trainings"]["cells"]
    parts = [t.markdown() for t in (claims_table(claims(measured, document)), cosines_table(measured))]
    parts += [measures_table(measured).markdown(), about_table(measured).markdown()]
    for updates in (6, 12, 25):
        found = foretold(measured, rows, cells, updates)
        said = found.text("+.2f") if found else NOT_RUN
        parts.append(f"(c) gradient and training after {updates} updates, Spearman: {said} ({judge_foretold(found)})")
        if table := trainings_table(rows, cells, updates):
            parts.append(table.markdown())
    parts.append(
        f"(d) trainings of 80 updates: {len(long)} of {len(plan.jobs_of(plan.LONG))} runs"
        if long
        else f"(d) trainings of 80 updates: {NOT_RUN}"
    )
    return "\n\n".join(part.strip() for part in parts) + "\n"
