"""Numbers into words and tables, once for the terminal, Markdown, HTML and JSON."""

import dataclasses
import json
import math
from typing import Any

import numpy as np

from verl_ba.aggregation import ALL_MODES
from verl_ba.tools.analysis import charts, paper
from verl_ba.tools.analysis.comparison import MEASURES, Comparison
from verl_ba.tools.analysis.page import Section
from verl_ba.tools.analysis.rollouts import Problems, Rollouts
from verl_ba.tools.analysis.weighing import Weighing
from verl_ba.tools.table import Table

_LABEL = 24  # characters of a uid or prompt in a table


def to_json(value: Any) -> str:
    """Any of the results as JSON; a number that does not exist is null."""
    return json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def modes_table(weighing: Weighing) -> Table:
    """One row per mode: tilt, long responses, distance from `balanced`."""
    rows = []
    for mode in ALL_MODES:
        share, tilt, long, moved = (
            weighing.overall[f"{mode}/{name}"] for name in ("gradient_share_negative", "tilt", "long_to_short", "moved")
        )
        cells = (
            share.text(".1%"),
            tilt.text("+.1%"),
            long.text(".2f"),
            "–" if mode == "balanced" else moved.text(".1%"),
        )
        rows.append((mode, *cells))
    return Table(
        ("mode", "negatives' gradient share", "tilt", "token, long to short", "moved from balanced"),
        rows,
        "Gradient share: Σ|A|·w of the negatives over that of all. Tilt: that minus the negatives' share of Σ|A|. Token, "
        "long to short: weight of a token in the longest quarter of the responses over one in the shortest. In brackets 95% "
        "bootstrap intervals over groups.",
    )


def lengths_table(weighing: Weighing, rollouts: Rollouts) -> Table:
    """What the data are like, whatever the mode."""
    o = weighing.overall
    rows = [
        (
            "steps, groups, responses",
            f"{len(weighing.steps):,}, {len(rollouts.group_label):,}, {len(rollouts.length):,}",
        ),
        ("groups with both signs", o["groups_mixed"].text(".1%")),
        ("groups without variance", o["groups_without_variance"].text(".1%")),
        ("responses alone with their sign, of those in mixed groups", o["lone_responses"].text(".1%")),
        ("empty responses", format(int(o["empty_responses"].value), ",")),
        ("mean length of positives [tokens]", o["length/positive"].text(",.1f")),
        ("mean length of negatives [tokens]", o["length/negative"].text(",.1f")),
        ("length gap in mixed groups, negatives − positives [tokens]", o["length_gap/tokens"].text("+,.1f")),
        ("length gap in mixed groups, negatives / positives", o["length_gap/ratio"].text(".2f")),
        ("length variation within a sign (coefficient)", o["length_variation"].text(".2f")),
    ]
    return Table(("what", f"advantage: {weighing.advantage}"), rows)


def tilted_table(weighing: Weighing) -> Table:
    header = (
        "group",
        "first line",
        "+",
        "−",
        "length + [tokens]",
        "length − [tokens]",
        "fair share of −",
        "share of −",
        "tilt",
    )
    rows = [
        (
            group.label[:_LABEL] + ("…" if len(group.label) > _LABEL else ""),
            group.place,
            str(group.positives),
            str(group.negatives),
            f"{group.positive_length:,.0f}",
            f"{group.negative_length:,.0f}",
            f"{group.fair:.1%}",
            f"{group.negative_share:.1%}",
            f"{group.tilt:+.1%}",
        )
        for group in weighing.tilted
    ]
    return Table(
        header,
        rows,
        "The groups that a token mean over the group tilts most. + and −: responses of that sign. Fair: by Σ|A| alone.",
    )


def problems_table(problems: Problems) -> Table:
    rows = [(name, f"{count:,}", ", ".join(problems.places[name])) for name, count in problems.counts.items()]
    return Table(
        ("what is wrong with the input", "times", "first places"), rows, "Lines are left out unless it says otherwise."
    )


def weighing_sections(weighing: Weighing, rollouts: Rollouts) -> list[Section]:
    sections = [Section("What this means", weighing.advice)]
    figures = [charts.weighing_overview(weighing.overall)] if weighing.tilted else []
    sections.append(Section("How each mode would weigh the responses", figures=figures, tables=[modes_table(weighing)]))
    lengths = charts.weighing_lengths(
        weighing.length_edges, weighing.length_counts, weighing.decile_length, weighing.decile_weight
    )
    sections.append(Section("Lengths", figures=[lengths], tables=[lengths_table(weighing, rollouts)]))
    if len(weighing.steps) > 1:
        sections.append(Section("Step by step", figures=[charts.weighing_steps(weighing.steps)]))
    if weighing.tilted:
        sections.append(Section("Most tilted groups", tables=[tilted_table(weighing)]))
    if rollouts.problems.counts:
        sections.append(Section("Problems in the input", tables=[problems_table(rollouts.problems)]))
    return sections


def weighing_json(weighing: Weighing, rollouts: Rollouts) -> str:
    inputs = {"lines": rollouts.lines, "groups": len(rollouts.group_label), "problems": rollouts.problems}
    return to_json({"input": inputs, "weighing": weighing})


def scores_table(comparison: Comparison) -> Table:
    """Last step, peak and drop of every arm, for each benchmark and their mean."""
    rows = []
    for i, name in enumerate(_benchmark_names(comparison)):
        for arm in comparison.arms:
            cells = (arm.estimates[measure][i].text() for measure in MEASURES)
            rows.append((name, arm.name, str(len(arm.seeds)), *cells))
    modes = ", ".join(f"{arm.name} {arm.mode or 'unknown'}" for arm in comparison.arms)
    return Table(
        ("benchmark", "arm", "seeds", "last step", "peak", "drop after the peak"),
        rows,
        f"Means over seeds; in brackets 95% stratified bootstrap intervals over seeds. Peak: the best step of each run. "
        f"loss_agg_mode: {modes}.",
    )


def pairs_table(comparison: Comparison) -> Table:
    """Differences at the last step, for each benchmark and their mean."""
    rows = []
    for pair in comparison.pairs:
        for i, name in enumerate(_benchmark_names(comparison)):
            better = pair.probability.text(".2f") if i == 0 else ""
            rows.append((f"{pair.a} − {pair.b}", name, str(len(pair.seeds)), pair.difference[i].text("+.3f"), better))
    return Table(
        ("difference", "benchmark", "seeds", "at the last step", "probability of improvement"),
        rows,
        "Paired by seed. Probability of improvement: of the first arm being better, same seed and benchmark.",
    )


def paper_table() -> Table:
    arms = ("sequence", "token", "balanced")
    rows = [
        (f"{model} / {data}", *(f"{scores[arm]:.4f}" for arm in arms))
        for (model, data), scores in paper.ACCURACY.items()
    ]
    return Table(("the paper: model / data", *arms), rows, paper.CAVEAT)


def comparison_sections(comparison: Comparison) -> list[Section]:
    sections = [
        Section("Scores", comparison.notes, [charts.comparison_curves(comparison)], [scores_table(comparison)]),
    ]
    if comparison.pairs:
        tables = [pairs_table(comparison)]
        sections.append(Section("Differences", figures=[charts.comparison_differences(comparison)], tables=tables))
    sections.append(Section("The paper's results", tables=[paper_table()]))
    return sections


def markdown(title: str, sections: list[Section]) -> str:
    """The same sections as Markdown; figures are named as the PNG files that lie beside it."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += section.paragraphs
        parts += [f"![{figure.alt}]({figure.name}.png)\n\n{figure.caption}" for figure in section.figures]
        parts += [table.markdown().rstrip() for table in section.tables]
    return "\n\n".join(parts) + "\n"


def _benchmark_names(comparison: Comparison) -> list[str]:
    """The columns of the estimates: the mean of the benchmarks, if there are several, then each."""
    names = [charts.short_name(key) for key in comparison.benchmarks]
    return names if len(names) == 1 else ["mean", *names]
