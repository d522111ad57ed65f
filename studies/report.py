"""`python -m studies.report` writes studies/README.md (what was asked and found), studies/TABLES.md (every number) and
studies/figures, from the committed numbers alone.

A sentence that judges is chosen by the interval it stands beside (`studies.miniature.outcome`): held, failed or undecided.
A part without numbers says that it was not run. Nothing here draws or trains.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from studies import _results, in_verl, null_length_bias, scale
from studies.gradient_quality import verdicts as gradients
from studies.jobs import finished, read_rows
from studies.miniature import outcome, runner
from studies.miniature.outcome import FAILED, HELD, UNDECIDED, Comparison, Scores, Verdict
from studies.rules import RULES
from verl_ba.tools.analysis import charts
from verl_ba.tools.analysis.estimate import Estimate
from verl_ba.tools.analysis.modes import ALIASES, in_full
from verl_ba.tools.analysis.page import INK, SERIES, Figure
from verl_ba.tools.table import Table

HERE = Path(__file__).parent
Rows = list[dict[str, Any]]


def _curve(name: str, part: slice | int) -> Callable[[dict[str, Any]], float]:
    def value(row: dict[str, Any]) -> float:
        values = row["curves"].get(name, [])
        chosen = values[part] if isinstance(part, slice) else values[part : part + 1 or None]
        numbers = [v for v in chosen if v is not None]
        return float(np.mean(numbers)) if numbers else math.nan

    return value


EVERY, LAST = slice(None), -1
SEQUENCE, TOKEN = "seq-mean-token-mean", "group-mean-token-mean"
MEASURES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "auc": ("area", lambda row: row["auc"]),
    "last": ("last", lambda row: row["last"]),
    "drop": ("peak to last", lambda row: row["drop"]),
    "reward": ("training reward", _curve("reward", EVERY)),
    "length": ("last length", _curve("length", LAST)),
    "length_+": ("right, last stretch", _curve("length_+", LAST)),
    "length_-": ("wrong, last stretch", _curve("length_-", LAST)),
    "cut": ("cut, last", _curve("cut", LAST)),
    "entropy": ("entropy, last", _curve("entropy", LAST)),
    "drift": ("drift", _curve("drift", EVERY)),
    "negative_share": ("weight of negatives", _curve("negative_share", EVERY)),
    "cosine": ("cosine of the signs", _curve("cosine", EVERY)),
    "wall_s": ("run [s]", lambda row: row["wall_s"]),
    "cpu_s": ("CPU [s]", lambda row: row.get("cpu_s", math.nan)),
}
"""Name -> column title, value of a row. nan where a run has none, e.g. no wrong response in the last stretch."""

ABOUT = """
Area: sampled accuracy, mean over the evaluations, on prompts that were drawn apart from the training prompts (short ones may
occur in both). Last: at the last evaluation. Peak to last: how far the last evaluation is below the best one. Lengths are in
characters. Right and wrong: responses with a positive and with a negative advantage. Cut: the share of responses that reach
the limit. Drift: |loss at ratio 1| of a whole update, mean over updates, which is verl's policy loss before the first
optimizer step. Weight of negatives: their share of Σ|A|·T/ℓ̄. Cosine: between the gradients of the right and of the wrong
responses of an update, at a few steps. Entropy is in nats per character.
""".strip()


def table_of_cells(document: dict[str, Any], names: Sequence[str]) -> str:
    cells = runner.cells(document["cells"])
    rows = [
        (
            c.name,
            c.family,
            c.relation,
            f"{c.steps[0]} to {c.steps[1]}" if c.steps[0] != c.steps[1] else str(c.steps[0]),
            f"{c.weak:g}, {c.weak_slip:g}, {c.slip:g}",
            f"{c.wrong:g}",
            f"{c.fillers[0]:g}, {c.fillers[1]:g}" if c.relation != "prompts" else f"{c.fillers[0]:g}",
        )
        for c in (cells[name] for name in names)
    ]
    header = (
        "cell",
        "family",
        "relation",
        "steps",
        "weak facts, slips there, elsewhere",
        "wrong rambler",
        "fillers a step",
    )
    return Table(header, rows).markdown()


def means_table(rows: Rows, cells: Sequence[str], rules: Sequence[str], lr: float, measure: str, form: str) -> str:
    """Mean of a measure by rule and cell, over the seeds that a rule has."""
    lines = []
    for rule in rules:
        by_cell = [_values(rows, cell, rule, lr, measure) for cell in cells]
        if any(len(values) for values in by_cell):
            mean = [float(np.nanmean(v)) if np.isfinite(v).any() else math.nan for v in by_cell]
            seeds = sorted({len(values) for values in by_cell})
            numbers = [Estimate(m).text(form) for m in (*mean, float(np.mean(mean)))]
            lines.append((rule, *numbers, " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))))
    return Table((MEASURES[measure][0], *cells, "mean", "seeds"), lines).markdown()


def _values(rows: Rows, cell: str, rule: str, lr: float, measure: str) -> np.ndarray:
    read = MEASURES[measure][1]
    return np.array([read(row) for row in rows if (row["cell"], row["rule"], row["lr"]) == (cell, rule, lr)])


def measures_table(rows: Rows, cells: Sequence[str], rules: Sequence[str], lr: float) -> str:
    """Every other measure by rule, mean over cells and seeds."""
    names = [name for name in MEASURES if name != "auc"]
    lines = []
    for rule in rules:
        means = []
        for name in names:
            by_cell = [_values(rows, cell, rule, lr, name) for cell in cells]
            finite = [float(np.nanmean(v)) for v in by_cell if np.isfinite(v).any()]
            means.append(float(np.mean(finite)) if finite else math.nan)
        if not math.isnan(means[0]):
            lines.append((rule, *(Estimate(m).text(".1f" if abs(m) >= 10 else ".3f") for m in means)))
    return Table(("mean of the cells", *(MEASURES[name][0] for name in names)), lines).markdown()


def comparisons_table(comparisons: Sequence[Comparison]) -> str:
    rows = [
        (
            f"{c.a} − {c.b}",
            c.where,
            str(c.seeds),
            c.difference.text("+.4f"),
            f"{c.p:.4f}",
            f"{c.adjusted:.4f}",
            c.verdict,
        )
        for c in comparisons
    ]
    header = ("difference", "cells", "seeds", "area [95% interval]", "p", "p, Holm", "better?")
    return Table(header, rows).markdown()


# --------------------------------------------------------------------------------------------------------------------
# Sections
# --------------------------------------------------------------------------------------------------------------------


def other_part(title: str, module: Any) -> str:
    """The tables of another study; 'not run' where its numbers are missing."""
    try:
        text = module.table_markdown()
    except FileNotFoundError as missing:
        text = f"Not run: {Path(missing.filename).name}\n"
    return f"## {title}\n\n{text}"


def screening_section(document: dict[str, Any], rows: Rows) -> str:
    table = document["screening"]
    cells, lr, planned = table["cells"], table["lr"], runner.plan("screening")
    lines = [
        "## Training in miniature: the screening",
        "",
        f"Exploratory: every rule, {len(cells)} cells, {len(table['seeds'])} seeds, many comparisons and no correction. It "
        "serves to choose what the confirmation tests, and proves nothing itself.",
        "",
        table_of_cells(document, cells),
    ]
    if not rows:
        return "\n".join([*lines, "Not run.\n"])
    done = finished(rows, planned)
    lines += [f"{len(done)} of {len(planned)} runs done.", ""]
    lines += [means_table(rows, cells, list(RULES), lr, "auc", ".3f")]
    lines += [
        _against_table(rows, cells, lr),
        _sweep_table(rows, table),
        _choice_sentence(rows, table),
        measures_table(rows, cells, list(RULES), lr),
    ]
    return "\n".join(lines)


POOLED = ("pooled-1", "pooled-4", "pooled-16", "pooled-auto")
TIE = 0.002


def choice(rows: Rows, table: dict[str, Any]) -> tuple[float, str] | None:
    """What the screening hands to the confirmation: the learning rate at which the main rules are best on average, and the
    strength of partial pooling with the largest area at that of the screening, pooled-4 if it is within TIE of it. None
    while a cell has no seed that all of them have."""
    rules, cells = [in_full(rule) for rule in table["sweep"]["rules"]], table["cells"]
    by_lr = {lr: Scores(rows, "auc", lr).array(cells, rules) for lr in (*table["sweep"]["lr"], table["lr"])}
    pooled = Scores(rows, "auc", table["lr"]).array(cells, POOLED)
    if not len(pooled) or not all(len(array) for array in by_lr.values()):
        return None
    areas = dict(zip(POOLED, pooled.mean(axis=(0, 1)), strict=True))
    best = max(areas, key=lambda rule: areas[rule])
    return max(by_lr, key=lambda lr: by_lr[lr].mean()), "pooled-4" if areas["pooled-4"] >= areas[best] - TIE else best


def _choice_sentence(rows: Rows, table: dict[str, Any]) -> str:
    chosen = choice(rows, table)
    if chosen is None:
        return "Too few runs to choose a learning rate and a strength of pooling.\n"
    return f"By the rule of `studies.report.choice`: learning rate {chosen[0]:g}, candidate `{chosen[1]}`.\n"


def _against_table(rows: Rows, cells: Sequence[str], lr: float) -> str:
    scores, lines = Scores(rows, "auc", lr), []
    for rule in RULES:
        both = scores.array(cells, (rule, "balanced"))
        if rule != "balanced" and len(both) > 1:
            best = [scores.array([cell], (rule, TOKEN, SEQUENCE)) for cell in cells]
            worst = min((outcome.against_the_best(a) for a in best if len(a) > 1), key=lambda e: e.value, default=None)
            own = rule in (TOKEN, SEQUENCE)
            lines.append(
                (
                    rule,
                    str(len(both)),
                    outcome.difference(both).text("+.4f"),
                    "" if worst is None or own else worst.text("+.4f"),
                )
            )
    header = (
        "rule",
        "seeds",
        "less balanced, mean of the cells",
        f"less the better of {TOKEN} and {SEQUENCE}, its worst cell",
    )
    return Table(
        header, lines, "Area, paired by seed; 95% intervals, pointwise, over few seeds: too narrow."
    ).markdown()


def _sweep_table(rows: Rows, table: dict[str, Any]) -> str:
    rules, cells = [in_full(rule) for rule in table["sweep"]["rules"]], table["cells"]
    lines = []
    for lr in sorted({table["lr"], *table["sweep"]["lr"]}):
        means = []
        for rule in rules:
            array = Scores(rows, "auc", lr).array(cells, (rule,))
            means.append(float(array.mean()) if len(array) else math.nan)
        lines.append((f"{lr:g}", *(Estimate(m).text() for m in means), Estimate(float(np.mean(means))).text()))
    return Table(("learning rate", *rules, "mean"), lines, "Area, mean of the cells.").markdown()


def confirmation_section(document: dict[str, Any], rows: Rows) -> tuple[str, list[Verdict]]:
    """The text, and the verdicts for the summary."""
    table = document["confirmation"]
    cells, lr, candidate = table["cells"], table["lr"], table["candidate"]
    rules, against = [[in_full(rule) for rule in table[name]] for name in ("rules", "against")]
    planned = runner.plan("confirmation")
    lines = [
        "## Training in miniature: the confirmation",
        "",
        f"Protocol: [protocol.toml](miniature/protocol.toml), [protocol.md](miniature/protocol.md); digest "
        f"{runner.protocol_digest()}.",
        "",
        table_of_cells(document, cells),
    ]
    if not rows:
        return "\n".join([*lines, "Not run.\n"]), []
    digests = sorted({row["protocol"] for row in rows})
    commits = sorted({row["commit"] for row in rows})
    done = finished(rows, planned)
    lines += [
        f"{len(done)} of {len(planned)} runs, under protocol {', '.join(digests)}, at commit {', '.join(commits)}.",
        "",
    ]
    verdicts: list[Verdict] = []
    if digests != [runner.protocol_digest()]:
        lines += ["**The protocol was changed after these runs: what follows is not a confirmation.**", ""]
    if len(done) < len(planned):
        lines += ["**Incomplete: intervals and verdicts are of the runs that are there, and are not final.**", ""]
    scores = Scores(rows, "auc", lr)
    lines += [means_table(rows, cells, rules, lr, "auc", ".4f")]

    primary = outcome.family(scores, [(candidate, other, "all", cells) for other in against])
    lines += ["**Primary** (one family): area, mean of the cells.", "", comparisons_table(primary)]
    verdicts += [c.as_verdict("over all cells") for c in primary]

    secondary = outcome.family(scores, [(candidate, other, cell, [cell]) for other in against for cell in cells])
    lines += ["**Secondary** (one family): the same in every cell.", "", comparisons_table(secondary)]
    others = [rule for rule in rules if rule not in (candidate, *against)]
    if others:
        third = outcome.family(scores, [(rule, other, "all", cells) for rule in others for other in against])
        lines += ["**The other arms** (one family): mean of the cells.", "", comparisons_table(third)]

    text, claimed = claims_part(rows, lr, document["claims"])
    lines += ["**What the paper says, and what we say of its rule** (one family).", "", text]
    verdicts += claimed

    lines += ["**The goal**, rule by rule.", ""]
    tested = [rule for rule in rules if rule not in (TOKEN, SEQUENCE)]
    text, goals = goal(scores, cells, table["lengths_vary"], tested, table["margin"])
    lines += [text]
    verdicts += goals
    lines += [measures_table(rows, cells, rules, lr)]
    return "\n".join(lines), verdicts


def claims_part(rows: Rows, lr: float, claims: Sequence[dict[str, Any]]) -> tuple[str, list[Verdict]]:
    """Table and verdicts of claims 'rule a has more of a measure than rule b in these cells', corrected together."""
    arrays = []
    for claim in claims:
        scores, a, b = Scores(rows, MEASURES[claim["measure"]][1], lr), in_full(claim["a"]), in_full(claim["b"])
        arrays.append((a, b, _says(claim), scores.array(claim["cells"], (a, b))))
    compared = outcome.corrected(arrays)
    titles = {_says(claim): MEASURES[claim["measure"]][0] for claim in claims}
    lines = [
        (
            c.where,
            f"{titles[c.where]}, {c.a} − {c.b}",
            str(c.seeds),
            c.difference.text("+.4f"),
            f"{c.adjusted:.4f}",
            c.verdict,
        )
        for c in compared
    ]
    header = ("claim", "difference of", "seeds", "[95% interval]", "p, Holm", "true?")
    verdicts = [Verdict(f"{c.where}: {c.difference.text('+.4f')}", c.verdict) for c in compared]
    return Table(header, lines).markdown(), verdicts


def _says(claim: dict[str, Any]) -> str:
    """The protocol's words, with modes in place of their short names."""
    return re.sub(r"[\w-]+", lambda word: in_full(word[0]), claim["says"])


def goal(
    scores: Scores, cells: Sequence[str], vary: Sequence[str], rules: Sequence[str], margin: float
) -> tuple[str, list[Verdict]]:
    """Table and verdicts: within the margin of the better of TOKEN and SEQUENCE in every cell; better than balanced where
    lengths vary; null-model push at most a tenth of balanced's at every k."""
    lines, verdicts = [], []
    for rule in rules:
        arrays = {cell: scores.array([cell], (rule, TOKEN, SEQUENCE)) for cell in cells}
        best = {cell: outcome.against_the_best(array) for cell, array in arrays.items() if len(array) > 1}
        near = {cell: outcome.within(estimate, margin) for cell, estimate in best.items()}
        every = _all(list(near.values()), len(cells))
        same = rule == "balanced"  # is judged by the first part alone
        versus = {c.where: c for c in outcome.family(scores, [(rule, "balanced", c, [c]) for c in vary]) if not same}
        better = _all([c.verdict for c in versus.values()], len(vary))
        push, worst = ("", "") if same else push_verdict(rule)
        lines += [
            (
                rule,
                cell,
                best[cell].text("+.4f") if cell in best else "–",
                near.get(cell, "–"),
                versus[cell].difference.text("+.4f") if cell in versus else "",
                versus[cell].verdict if cell in versus else "",
                push if cell == cells[0] else "",
                worst if cell == cells[0] else "",
            )
            for cell in cells
        ]
        verdicts.append(
            Verdict(f"{rule} is within {margin:g} of the better of {TOKEN} and {SEQUENCE} in every cell", every)
        )
        if same:
            continue
        verdicts += [
            Verdict(f"{rule} is better than balanced in every cell where lengths vary ({', '.join(vary)})", better),
            Verdict(f"{rule}'s push in the null model is at most a tenth of balanced's at every k", push),
            Verdict(f"{rule} reaches the goal, all three", _all([every, better, push], 3)),
        ]
    header = (
        "rule",
        "cell",
        f"less the better of {TOKEN} and {SEQUENCE}",
        f"within {margin:g}?",
        "less balanced",
        "better?",
        "push at most a tenth?",
        "largest share of balanced's push",
    )
    return Table(header, lines).markdown(), verdicts


def _all(verdicts: Sequence[str], expected: int) -> str:
    if FAILED in verdicts:
        return FAILED
    return HELD if len(verdicts) == expected and set(verdicts) == {HELD} else UNDECIDED


def push_verdict(rule: str) -> tuple[str, str]:
    """`judge_pushes` of the committed null model, G = 8 and two lengths; undecided where it was not run."""
    try:
        pushes = _results.committed(null_length_bias.NAME)["two_point"][8]
    except FileNotFoundError:
        return UNDECIDED, "not run"
    return judge_pushes(pushes[rule], pushes["balanced"])


def judge_pushes(own: dict[int, Any], balanced: dict[int, Any], allowed: float = 0.1) -> tuple[str, str]:
    """Verdict of 'at most this share of balanced's push at every k', and the largest share with its k.

    Two standard errors decide. Nothing is asked where balanced does not push itself, at k = G/2.
    """
    verdicts, shares = [], {}
    for k in (k for k, push in balanced.items() if abs(push.value) > 1e-6):
        limit, size, error = allowed * abs(balanced[k].value), abs(own[k].value), 2 * own[k].error
        verdicts.append(HELD if size + error <= limit else FAILED if size - error > limit else UNDECIDED)
        shares[k] = size / abs(balanced[k].value)
    worst = max(shares, key=lambda k: shares[k])
    return _all(verdicts, len(verdicts)), f"{shares[worst]:.2f}, k = {worst}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """What held, what did not, what is undecided: in that order, and nothing left out."""
    titles = {HELD: "Held", FAILED: "Failed", UNDECIDED: "Undecided by these runs"}
    lines = ["## Trainings: what held, what failed, and what is undecided", ""]
    if not verdicts:
        return "\n".join([*lines, "The confirmation was not run: nothing is claimed.\n"])
    for kind, title in titles.items():
        chosen = [v.claim for v in verdicts if v.verdict == kind]
        lines += [f"{title}:", "", *(f"- {claim}" for claim in chosen or ["nothing"]), ""]
    return "\n".join(lines)


def trade_section(documents: dict[str, dict[str, Any]], rows: dict[str, Rows]) -> str:
    """Every rule's push, drift and area side by side; `documents` and `rows` by stage."""
    lines = []
    for rule in RULES:
        push = "1" if rule == "balanced" else push_verdict(rule)[1]
        cells = [rule, push]
        for stage, document in documents.items():
            table = document[stage]
            of_cell = [_values(rows[stage], cell, rule, table["lr"], "drift") for cell in table["cells"]]
            drift = float(np.mean([v.mean() for v in of_cell])) if all(len(v) for v in of_cell) else math.nan
            both = Scores(rows[stage], "auc", table["lr"]).array(table["cells"], (rule, "balanced"))
            area = "" if rule == "balanced" or len(both) < 2 else outcome.difference(both).text("+.4f")
            cells += ["" if math.isnan(drift) else f"{drift:.4f}", area]
        lines.append(tuple(cells))
    header = ["rule", "largest share of balanced's push"]
    for stage in documents:
        header += [f"drift, {stage}", f"area less that of balanced, {stage}"]
    return "## What trades against what\n\n" + Table(tuple(header), lines).markdown()


# --------------------------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------------------------


def curves_figure(rows: Rows, stage: str, cells: Sequence[str], rules: Sequence[str], lr: float) -> Figure:
    looks = charts.looks(rules, {rule: RULES[rule].mode for rule in rules})
    with charts.axes(len(cells), 2, size=(2.6 * len(cells), 5.2)) as (drawing, axes):
        for column, cell in enumerate(cells):
            for line, name in enumerate(("accuracy", "length")):
                axis = axes[line * len(cells) + column]
                for rule in rules:
                    runs = [r["curves"][name] for r in rows if (r["cell"], r["rule"], r["lr"]) == (cell, rule, lr)]
                    if runs:
                        colour, style, _ = looks[rule]
                        axis.plot(np.mean(runs, axis=0), color=colour, linestyle=style, linewidth=1.7, label=rule)
                axis.set(title=cell if not line else "", xlabel="evaluation" if line else "")
                if not column:
                    axis.set_ylabel("sampled accuracy" if not line else "mean length [characters]")
        charts.common_legend(drawing, axes[0], 6)
    return Figure(f"miniature-{stage}-curves", drawing, f"{stage}: accuracy and length by evaluation, cell and rule")


def differences_figure(rows: Rows, stage: str, cells: Sequence[str], rules: Sequence[str], lr: float) -> Figure:
    """Paired differences to balanced, cell by cell."""
    scores, others = Scores(rows, "auc", lr), [rule for rule in rules if rule != "balanced"]
    with charts.axes(len(cells), size=(2.6 * len(cells), 1.4 + 0.3 * len(others))) as (drawing, axes):
        for axis, cell in zip(axes, cells, strict=True):
            for at, rule in enumerate(others):
                array = scores.array([cell], (rule, "balanced"))
                if len(array) > 1:
                    d = outcome.difference(array)
                    axis.plot([d.low, d.high], [at, at], color=SERIES[0], linewidth=2.5)
                    axis.plot(d.value, at, "o", color=SERIES[0], markersize=6)
            axis.axvline(0, color=INK, linewidth=1)
            axis.set(title=cell, ylim=(len(others) - 0.5, -0.5))
            axis.locator_params(axis="x", nbins=4)
            axis.set_yticks(range(len(others)), others if axis is axes[0] else [""] * len(others))
        axes[len(cells) // 2].set_xlabel("area less that of balanced, paired by seed, 95% intervals")
    return Figure(f"miniature-{stage}-differences", drawing, f"{stage}: area of every rule less that of balanced")


# --------------------------------------------------------------------------------------------------------------------

QUESTION = """
# Studies of aggregation rules

Written by `python -m studies.report` from the numbers in [results](results): edit the code, not this file. Every table is in
[TABLES.md](TABLES.md).

## What was asked

A response of T tokens weighs T/ℓ̄ in the policy loss. A rule is a choice of ℓ̄. `seq-mean-token-mean` takes the response's own
length, `group-mean-token-mean` the mean length of its group, and `balanced` (arXiv 2605.04077) the mean length of the
responses of its group that have the same sign of advantage. In a small group this last mean contains the response itself, so
that `balanced` has a length bias of its own. Partial pooling (`pooled-4`, `pooled-auto`) shrinks the mean towards what the
whole update says. Does it train better? And how large are the biases of all these rules?

## How

- **Gradients of a fixed policy** ([gradient_quality](gradient_quality)): below.
- **A null model** ([null_length_bias.py](null_length_bias.py)): lengths are drawn without a look at correctness, and the
  expected push of each rule on length is computed. Any push is a bias.
- **A map** ([scale.py](scale.py)): the size of three biases beside the gradient's noise, by group size, accuracy, length gap
  and variation. They are the push; the tilt, which is gradient weight that lengths move to the negatives; and starving, which
  is less weight for the tokens of long responses. `python -m studies.scale --from analyze.json` places a run of yours in it.
- **Training in miniature** ([miniature](miniature)): a character model of some 45,000 parameters, verl's own GRPO advantage
  and clipped policy loss, three made-up tasks. A screening of all rules chose what a confirmation then tested on new cells
  and seeds, under a [protocol](miniature/protocol.md) that was committed before its first run.
- **The same in verl's trainer** ([in_verl.py](in_verl.py)): the model as a Hugging Face checkpoint, trained by
  `verl.trainer.main_ppo` on the CPU.
""".strip()

GRADIENTS = """
## Which gradient points where the reward is

400 trainings left every difference in accuracy undecided. [gradient_quality](gradient_quality) asks a sharper question. For a
fixed policy, an update's gradient under any rule is a linear combination of the responses' score gradients. So thousands of
updates under every rule cost almost nothing, on the same responses, against a true gradient from 25,600 others. Hypotheses,
cells, seeds and thresholds are in its [protocol](gradient_quality/PROTOCOL.md), committed before the first run. A claim is
judged by the expected cosine of one update with the true gradient, against `token-mean`. *Effective length* is u =
Σ_t (1 - p_t)², where p_t is the probability of the token that was sampled.
""".strip()

LENGTHS = """
## Length bias where lengths say nothing

`balanced` pushes towards shorter responses where few of a group are right, and towards longer ones where few are wrong.
`group-mean-token-mean` and `seq-mean-token-mean` push nowhere, and partial pooling keeps a part of the push, which falls with
its strength. Larger groups make the push smaller; more prompts in the update do not.
""".strip()

MAP = """
## Where it matters

In updates of 64 prompts the push of `balanced` stands out of its noise within five updates, unless the mean accuracy is near
one half. Where wrong responses are longer than right ones, the token modes tilt the gradient to them from the first update
on; `seq-mean-token-mean` pushes towards shorter responses most, and gives tokens of long responses the least weight.
""".strip()

TRADE = """
## What to conclude

`balanced` keeps the loss at ratio 1 at zero in every group, and pushes on length in small subsets. Rules that borrow from the
whole update push less and let the loss drift a little. The token modes do not push, and drift and tilt most.
`seq-mean-token-mean` does neither, and gives a token of a long response less weight. In the miniature runs these differences
are small beside the noise between seeds: no rule is clearly the best. If one sign has few responses in your groups, watch the
response length under `balanced`. If wrong responses are much longer than right ones, watch the tilt of the token modes.
""".strip()

LIMITS = """
## What this cannot say

- The model is tiny, responses have at most 48 characters, the three tasks are made up, and a run has 80 updates. Language
  models, long responses and long runs may differ in size and in sign.
- The demonstrations put the relation of length and correctness into the warm start. Whether a real model has one, and which,
  is another question.
- Seeds of one cell share a few warm starts. The intervals speak of these tasks and these starts.
- There is one optimizer, clip and group size. The learning rate was chosen once for all rules, by the screening.
- A row is repeated to the digit only on a machine with the same vector instructions: `group-mean-token-mean`, seed 100, of
  mod7-independent-new gives the committed area .86178 with AVX2, and .86538 with `ATEN_CPU_CAPABILITY=default`. Sums round
  otherwise already in the warm start, and sampling makes another response of it.
- Undecided does not mean equal: an interval that contains 0 may hide a difference of its own width.
""".strip()

REPEAT = """
## How to repeat it

`make study-null`, `make study-map`, `make study-screen`, `make study` (the confirmation) and `make study-verl` run the five
parts, and `make study-gradients` the gradients and their trainings. The last four go on where they were stopped. `make
study-quick` shows in a few short runs that everything works. `python -m studies.report` writes this page, the tables and the
figures again.
""".strip()


def shown_rows(stage: str) -> Rows:
    """The finished rows of the plan as it stands."""
    return list(finished(read_rows(runner.results_path(stage)), runner.plan(stage)).values())


def gradients_part() -> tuple[str, str, list[Figure]]:
    """What the gradient study says, its tables, and its figure."""
    measured = gradients.measured_banks()
    if not measured:
        return GRADIENTS + "\n\nThe confirmation was not run: nothing is claimed.", "", []
    document = gradients.plan.document()
    planned = len(gradients.plan.jobs_of(gradients.plan.BANKS))
    done = f"{len(measured)} of {planned} checkpoints were run; no claim about all of them can hold yet."
    figure = gradients.figure(measured)
    found = gradients.claims(measured, document)
    lines = [f"- **{c.verdict}** ({c.name}): {c.says}; {c.worst}; {c.done}" for c in found]
    lines += [f"- **{gradients.verdict_of_c(measured)}"]
    text = [
        GRADIENTS,
        "" if len(measured) == planned else done,
        "\n".join(lines),
        f"![{figure.alt}](figures/{figure.name}.png)",
    ]
    tables = "## Which gradient points where the reward is\n\n" + gradients.markdown(measured)
    return "\n\n".join(part for part in text if part), tables, [figure]


def build() -> tuple[str, str, list[Figure]]:
    """The page, the tables, and the figures of the miniature and the gradient study."""
    documents = {
        "screening": runner.read_toml(runner.SCREENING),
        "confirmation": runner.read_toml(runner.PROTOCOL),
    }
    rows = {stage: shown_rows(stage) for stage in documents}
    figures = []
    for stage, document in documents.items():
        table = document[stage]
        every = table["rules"] == "all"
        few = (SEQUENCE, TOKEN, "balanced", "pooled-4", "doubly-balanced", "doubly-averaged")
        shown = list(few) if every else [in_full(rule) for rule in table["rules"]]
        if rows[stage]:
            figures.append(curves_figure(rows[stage], stage, table["cells"], shown, table["lr"]))
            names = list(RULES) if every else shown
            figures.append(differences_figure(rows[stage], stage, table["cells"], names, table["lr"]))
    confirmation, verdicts = confirmation_section(documents["confirmation"], rows["confirmation"])
    rules = Table(("rule", "ℓ̄"), [(rule.name, rule.what) for rule in RULES.values()]).markdown()
    by_gradient, gradient_tables, gradient_figures = gradients_part()
    figures += gradient_figures
    page = [
        QUESTION,
        by_gradient,
        summary(verdicts),
        *_images(figures, "confirmation"),
        LENGTHS,
        _image("null_length_bias", "Push on length where length and correctness are independent"),
        MAP,
        _image("scale", "Where push, tilt and starving stand out of the noise"),
        "## In verl's own trainer\n\n" + _in_verl_sentence(),
        TRADE,
        LIMITS,
        REPEAT,
    ]
    short = "; ".join(f"{name}: {mode}" for name, mode in ALIASES.items())
    tables = [
        "# Tables of the studies\n\nWritten by `python -m studies.report`; what they mean is in [README.md](README.md).",
        "## The rules\n\nA response of T tokens weighs T/ℓ̄. Short names, in commands and in the files of results: "
        + f"{short}.\n\n{rules}",
        other_part("Length bias where lengths say nothing", null_length_bias),
        other_part("Where it matters", scale),
        gradient_tables,
        "## Training in miniature: the measures\n\n" + ABOUT,
        screening_section(documents["screening"], rows["screening"]),
        *_images(figures, "screening"),
        confirmation,
        other_part("The same in verl's own trainer", in_verl),
        trade_section(documents, rows),
    ]
    return _joined(page), _joined(tables), figures


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _in_verl_sentence() -> str:
    try:
        return in_verl.agreement_markdown()
    except FileNotFoundError:
        return "Not run."


def _image(name: str, alt: str) -> str:
    return f"![{alt}](figures/{name}.png)" if (HERE / "figures" / f"{name}.png").exists() else ""


def _images(figures: Sequence[Figure], stage: str) -> list[str]:
    return [f"![{f.alt}](figures/{f.name}.png)" for f in figures if f"-{stage}-" in f.name]


def main() -> None:
    """Write studies/README.md, studies/TABLES.md and studies/figures."""
    page, tables, figures = build()
    (HERE / "figures").mkdir(exist_ok=True)
    for figure in figures:
        figure.png(HERE / "figures" / f"{figure.name}.png")
    for name, text in (("README.md", page), ("TABLES.md", tables)):
        (HERE / name).write_text(text)
        typer.echo(f"{HERE / name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    typer.run(main)
