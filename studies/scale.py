"""Where does a rule's bias matter, and in a run of your own?

Question: every rule but the exact ones has a bias of one of three kinds. How large is it beside the gradient's own noise, for
the group size, accuracy, length gap and length variation of a run?

    tilt       share of the gradient weight Σ|A|·w that lengths move to the negatives (0: none)
    push       on being long where the data say nothing about length (`studies.simulated`), mean of the update's groups
    starving   weight of a token in the longest quarter of the responses over one in the shortest quarter (1: none)

Setting: log-normal lengths, updates of 64 prompts whose accuracies are Beta distributed (mean given, a + b = 2) and whose
lengths differ (coefficient .5), verl's GRPO advantages. Two maps: accuracy and group size without a length gap; length gap
and variation at G = 8 and accuracy .5. Spread: the standard deviation of the quantity from update to update. After n updates
a bias has added up to n times its size and noise to √n times the spread: they are equal at n = (spread/bias)². For rules that
look at one group, n falls as 1 over the number of prompts of an update.

What the numbers show: from when on a bias stands out of the noise of its own quantity, at first order and at a fixed policy.
What they do not show: harm. A push is a number of the gradient; what it does to length depends on the optimiser and on what
the reward itself says.

    python -m studies.scale                       # the maps
    python -m studies.scale --from analyze.json   # place a run in them: the numbers that `verl-ba analyze --out` wrote
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from studies._results import HERE, committed, from_json, to_json, write
from studies.rules import RULES
from studies.simulated import Mean, Setting, Update, draw, mean_with_control, simulate
from verl_ba.metrics.weights import fold, statistics_of
from verl_ba.tools.analysis import charts
from verl_ba.tools.analysis.estimate import Estimate
from verl_ba.tools.analysis.page import INK, Figure
from verl_ba.tools.analysis.weighing import STARVED
from verl_ba.tools.table import Table

NAME = "scale"
MAP_RULES = ("seq-mean-token-mean", "group-mean-token-mean", "token-mean", "balanced", "pooled-4", "doubly-balanced")
BASE = Setting(variation=0.5, prompt_variation=0.5)
ACCURACIES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
SIZES = (8, 16, 32, 64)
GAPS = (0.67, 1.0, 1.25, 1.5, 2.0, 3.0)
VARIATIONS = (0.1, 0.25, 0.5, 1.0)
STAGES = (0.1, 0.5, 0.9)
"""Accuracies at which every rule is looked at, with a gap of 1.5: early, in the middle, late."""
CELLS = len(ACCURACIES) * len(SIZES) + len(GAPS) * len(VARIATIONS) + len(VARIATIONS) + len(STAGES)
UPDATES = 150
HORIZON = 100
"""Updates after which a run's push is told, in standard deviations."""
MATTERS = 1.0
"""Standard deviations at `HORIZON` from which a bias is said to matter. A convention of ours."""
NOTABLE = 0.01
"""Share of the gradient below which a tilt is not told in words. Ours."""

Effects = dict[str, dict[str, Mean]]
"""rule -> 'tilt', 'push', 'starving' -> its mean over updates, standard error, and spread per update."""


def weighing(update: Update, mean_lengths: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """'tilt' and 'starving' of each rule in one update, as `verl_ba.metrics` counts them; nan where it defines none."""
    length = update.batch.length.numpy()
    weights = {rule: length / mean_length_B for rule, mean_length_B in mean_lengths.items()}
    responses = fold(length, update.batch.group, update.batch.sign, update.advantage)
    # A token's weight is counted against token-mean's, the same for each; none of the two compares with a reference.
    values = statistics_of(responses, {**weights, "token-mean": length / length.mean()}, "token-mean")
    return {
        rule: {"tilt": float(values[f"{rule}/tilt"]), "starving": float(values[f"{rule}/long_to_short"])}
        for rule in mean_lengths
    }


def effects(
    setting: Setting,
    updates: int,
    rng: np.random.Generator,
    step: Callable[[], object] = lambda: None,
    rules: Sequence[str] = MAP_RULES,
) -> Effects:
    """The three biases of each rule in this setting."""
    seen: dict[str, dict[str, list[float]]] = {rule: {"tilt": [], "starving": []} for rule in rules}

    def watch(update: Update, mean_lengths: dict[str, np.ndarray]) -> None:
        for rule, values in weighing(update, mean_lengths).items():
            for name, value in values.items():
                seen[rule][name].append(value)

    draws = simulate(setting, rules, updates, rng, step, watch)
    control = draws.control.mean(axis=2, keepdims=True)
    out: Effects = {}
    for rule in rules:
        columns = {name: np.array(values)[:, None] for name, values in seen[rule].items()}
        columns["push"] = draws.push[rule].mean(axis=1, keepdims=True)
        out[rule] = {
            name: mean_with_control(value, control if name == "push" else control[:0], np.isfinite(value))
            for name, value in columns.items()
        }
    return out


def updates_until(bias: Mean) -> float:
    """n = (spread/bias)²; infinite where the bias is not told from 0 (three standard errors: the maps have many cells)."""
    if abs(bias.value) <= max(3 * bias.error, 1e-9):
        return inf
    return (bias.spread / bias.value) ** 2


def deviations(bias: Mean, updates: int = HORIZON) -> float:
    """What the bias adds up to over so many updates, in standard deviations of what the noise adds up to."""
    return sqrt(updates / n) if (n := updates_until(bias)) > 0 else inf


def compute(seed: int = 0, updates: int = UPDATES, step: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Every map; every cell has a random state of its own."""
    states = iter(np.random.SeedSequence(seed).spawn(CELLS))

    def cell(setting: Setting, rules: Sequence[str] = MAP_RULES) -> Effects:
        return effects(setting, updates, np.random.default_rng(next(states)), step, rules)

    return {
        "seed": seed,
        "updates": updates,
        "accuracy_size": {str(a): {g: cell(replace(BASE, accuracy=a, size=g)) for g in SIZES} for a in ACCURACIES},
        "gap_variation": {str(r): {str(v): cell(replace(BASE, gap=r, variation=v)) for v in VARIATIONS} for r in GAPS},
        "like_prompts": {str(v): cell(replace(BASE, variation=v, prompt_variation=0.0)) for v in VARIATIONS},
        "every_rule": {str(a): cell(replace(BASE, accuracy=a, gap=1.5), tuple(RULES)) for a in STAGES},
    }


@dataclass(frozen=True)
class Run:
    """What a report of `verl-ba analyze` says about a run, in the terms of the model.

    Attributes:
        setting: to simulate it.
        right: mean share of positives in mixed groups.
        mixed: share of groups with both signs.
        steps: in the report.
        measured: mode -> 'tilt', 'starving' -> as the report has it.
    """

    setting: Setting
    right: float
    mixed: float
    steps: int
    measured: dict[str, dict[str, Estimate]]


class NotAReport(ValueError):
    """The file cannot be placed in the map; the message says why."""


def read_report(path: Path) -> Run:
    """A run from the JSON that `verl-ba analyze --out FOLDER` writes (FOLDER/analyze.json).

    Right stands for a positive advantage. The accuracies of the prompts are the Beta distribution that gives the report's
    share of mixed groups and share of positives in these. How prompts differ in length follows from the histogram: what the
    variation within a sign and the gap leave unexplained.

    Raises:
        NotAReport: not such a file, or a run without mixed groups.
    """
    try:
        weighing = json.loads(path.read_text())["weighing"]
        overall, steps = weighing["overall"], len(weighing["steps"])
        value = {name: estimate["value"] for name, estimate in overall.items()}
        advantage, counts, edges = weighing["advantage"], weighing["length_counts"], np.array(weighing["length_edges"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotAReport(f"{path}: expected the JSON of `verl-ba analyze --out FOLDER`; got {error!r}") from error
    if value["length_gap/ratio"] is None or value["length_variation"] is None:
        raise NotAReport(
            f"{path}: no group has responses of both signs, or no two responses of one sign in a group: there is no gap or "
            "variation to place the run by"
        )
    size = round((value["responses"] + value["empty_responses"]) / value["groups"])
    positives, negatives = value["response_share/positive"], value["response_share/negative"]
    right, mixed = positives / (positives + negatives), value["groups_mixed"]
    accuracy, concentration = fit_accuracy(mixed, right, size)
    gap = value["length_gap/ratio"]
    accuracies = Setting(size=size, accuracy=accuracy, concentration=concentration)
    variation = fit_variation(value["length_variation"], accuracies)
    sign_factor = (1 - accuracy) * gap**2 + accuracy, ((1 - accuracy) * gap + accuracy) ** 2
    explained = (1 + variation**2) * sign_factor[0] / sign_factor[1]
    count = np.sum([counts[sign] for sign in ("-1", "0", "1")], axis=0, dtype=np.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    mean = (count @ middle) / count.sum()
    total = 1 + (count @ (middle - mean) ** 2 / count.sum() - (edges[1] - edges[0]) ** 2 / 12) / mean**2
    setting = Setting(
        size=size,
        prompts=max(1, round(value["groups"] / steps)),
        variation=variation,
        gap=gap,
        accuracy=accuracy,
        concentration=concentration,
        prompt_variation=sqrt(max(total / explained - 1, 0)),
        advantage=advantage,
    )
    measured = {
        rule.mode: {
            name: _estimate(overall[f"{rule.mode}/{key}"])
            for name, key in (("tilt", "tilt"), ("starving", "long_to_short"))
        }
        for rule in RULES.values()
        if rule.mode and f"{rule.mode}/tilt" in overall
    }
    return Run(setting, right, mixed, steps, measured)


def _estimate(record: dict[str, float | None]) -> Estimate:
    return Estimate(*(np.nan if (number := record[name]) is None else number for name in ("value", "low", "high")))


def fit_accuracy(mixed: float, right: float, size: int) -> tuple[float, float]:
    """Mean and a + b of the Beta distribution of accuracies with this share of mixed groups of `size` responses, and this
    mean share of right responses in them; the nearest on a grid that is refined four times."""
    logit, scale = (-7.0, 7.0), (-3.0, 9.0)
    found = (math.nan, math.nan)
    for _ in range(5):
        x, y = (torch.linspace(*bounds, 61, dtype=torch.float64) for bounds in (logit, scale))
        mean, total = torch.sigmoid(x)[:, None], torch.exp(y)[None]
        a, b = mean * total, (1 - mean) * total

        def chance(hits: int, misses: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """Of a group with `hits` right and `misses` wrong responses, one of the two 0."""
            after, before = ((p + q).lgamma() for p, q in ((a, b), (a + hits, b + misses)))
            return torch.exp((a + hits).lgamma() + (b + misses).lgamma() - before + after - a.lgamma() - b.lgamma())

        all_right, all_wrong = chance(size, 0, a, b), chance(0, size, a, b)
        share_mixed = 1 - all_right - all_wrong
        distance = (share_mixed - mixed) ** 2 + ((mean - all_right) / share_mixed.clamp(min=1e-9) - right) ** 2
        i, j = divmod(int(distance.argmin()), 61)
        logit, scale = ((float(axis[max(at - 2, 0)]), float(axis[min(at + 2, 60)])) for axis, at in ((x, i), (y, j)))
        found = float(torch.sigmoid(x[i])), float(torch.exp(y[j]))
    return found


def place(run: Run, updates: int = 400, seed: int = 0, step: Callable[[], object] = lambda: None) -> Effects:
    """Every bias at the run's own numbers."""
    return effects(run.setting, updates, np.random.default_rng(seed), step, tuple(RULES))


def fit_variation(measured: float, setting: Setting, prompts: int = 20_000) -> float:
    """The variation within a sign at which the analyser would measure this one: with few responses of a sign their own mean
    takes part of it away."""

    def analysed(variation: float) -> float:
        batch = draw(replace(setting, variation=variation, prompts=prompts), np.random.default_rng(0)).batch
        squares = ((batch.length / batch.mean_over(batch.cell) - 1) ** 2).sum()
        return sqrt(squares / (len(batch.length) - len(torch.unique(batch.cell))))

    variation = measured
    for _ in range(6 if measured else 0):
        variation *= measured / analysed(variation)
    return variation


def run_sentences(run: Run, found: Effects) -> list[str]:
    """What the numbers say about the run, rule by rule, and whether the model describes it."""
    s = run.setting
    sentences = [
        f"{s.prompts} prompts of {s.size} responses an update, {run.mixed:.0%} of the groups mixed and {run.right:.0%} of "
        f"their responses positive (accuracies of mean {s.accuracy:.2f}, a + b = {s.concentration:.2g}); negatives "
        f"{s.gap:.2f} times as long; length variation {s.variation:.2f} within a sign, "
        f"{s.prompt_variation:.2f} between prompts."
    ]
    for rule, by_kind in found.items():
        push, sideways = by_kind["push"], by_kind["tilt"]
        parts = []
        if deviations(sideways) >= MATTERS and abs(sideways.value) >= NOTABLE:
            signs = "negatives" if sideways.value > 0 else "positives"
            parts.append(f"moves {abs(sideways.value):.1%} of the gradient to the {signs} ({_times(sideways)})")
        if deviations(push) >= MATTERS:
            parts.append(f"pushes {'longer' if push.value > 0 else 'shorter'} ({_times(push)})")
        if by_kind["starving"].value <= STARVED:
            parts.append(
                f"weighs a token of a long response {by_kind['starving'].value:.2f} of one in a short response"
            )
        sentences.append(f"{rule}: {'; '.join(parts) if parts else 'none of the three stands out'}.")
    if off := [
        f"{RULES[rule].name} {name}"
        for rule in found
        for name, estimate in run.measured.get(RULES[rule].mode or "", {}).items()
        if not _agrees(found[rule][name], estimate)
    ]:
        sentences.append(
            f"The model does not give what was measured in: {', '.join(off)}. There believe the measured number: this run's "
            "lengths are not log-normal with one gap and one variation, or prompts' length and accuracy go together."
        )
    return sentences


def _times(bias: Mean) -> str:
    return f"{deviations(bias):.1f} standard deviations after {HORIZON} updates"


def _agrees(model: Mean, measured: Estimate) -> bool:
    """Whether the model's mean lies in the measured interval, widened by the simulation's error and by two hundredths."""
    margin = 2 * model.error + 0.02
    low, high = (measured.value if np.isnan(bound) else bound for bound in (measured.low, measured.high))
    return low - margin <= model.value <= high + margin


def run_table(run: Run, found: Effects) -> Table:
    rows = []
    for rule, by_kind in found.items():
        measured = run.measured.get(RULES[rule].mode or "", {})
        push = by_kind["push"]
        rows.append(
            (
                rule,
                f"{by_kind['tilt'].value:+.1%} ({by_kind['tilt'].spread:.1%})",
                measured["tilt"].text("+.1%") if measured else "–",
                _count(by_kind["tilt"]),
                f"{by_kind['starving'].value:.2f}",
                measured["starving"].text(".2f") if measured else "–",
                f"{push.text()} ({push.spread * 1000:.0f})",
                _count(push),
            )
        )
    return Table(
        (
            "rule",
            "tilt (spread)",
            "tilt, measured",
            "updates until it stands out",
            "token, long to short",
            "measured",
            "push ×10³ (spread)",
            "updates until it stands out",
        ),
        rows,
        "Simulated at the run's numbers, beside what its report measured [95% interval over groups]. Spread: standard "
        "deviation from update to update. Updates: (spread/bias)²; > where the bias is not told from 0.",
    )


def _count(bias: Mean) -> str:
    n = updates_until(bias)
    if n < inf:
        return "< 0.1" if n < 0.095 else f"{n:.1f}" if n < 9.95 else f"{n:,.0f}"
    largest = abs(bias.value) + 3 * bias.error
    return "–" if largest <= 1e-9 else f"> {(bias.spread / largest) ** 2:,.0f}"


def tables(maps: dict[str, Any]) -> list[Table]:
    by_accuracy, by_gap, alike = maps["accuracy_size"], maps["gap_variation"], maps["like_prompts"]
    cells = [
        (rule, accuracy, *(_cell(by_size[size][rule]["push"]) for size in SIZES))
        for rule in ("balanced", "pooled-4", "doubly-balanced", "group-mean-token-mean", "seq-mean-token-mean")
        for accuracy, by_size in by_accuracy.items()
    ]
    note = (
        "In brackets: updates until it stands out of the spread from update to update; > where it is not told from 0."
    )
    out = [
        Table(
            ("rule", "accuracy", *(f"G = {size}" for size in SIZES)),
            cells,
            f"Push ×10³ on one standard deviation of the log length, no length gap, variation .5, 64 prompts an update. "
            f"{note} With P prompts the updates are 64/P times as many, for rules that look at one group.",
        )
    ]
    for name, show in (("push", "Push ×10³"), ("tilt", "Tilt in percent of the gradient")):
        rules = [rule for rule in MAP_RULES if name == "push" or rule not in ("seq-mean-token-mean", "balanced")]
        scale = 1000 if name == "push" else 100
        out.append(
            Table(
                ("rule", "variation", *(f"gap {gap}" for gap in by_gap)),
                [
                    (rule, variation, *(_cell(by_gap[gap][variation][rule][name], scale) for gap in by_gap))
                    for rule in rules
                    for variation in by_gap["1.0"]
                ],
                f"{show}, by length gap (negatives over positives) and variation within a sign; G = 8, accuracies uniform. "
                f"{note}" + (" seq-mean-token-mean and balanced: 0 in every update." if name == "tilt" else ""),
            )
        )
    out.append(
        Table(
            ("rule", *(f"prompts {name}, {v}" for name in ("alike", "differ") for v in alike)),
            [
                (rule, *(f"{by_v[v][rule]['starving'].value:.2f}" for by_v in (alike, by_gap["1.0"]) for v in alike))
                for rule in MAP_RULES
            ],
            "Weight of a token in the longest over one in the shortest quarter of the responses; no gap, G = 8, by the "
            "variation within a sign. Where prompts differ in length, rules divide by the prompt's length as well.",
        )
    )
    stages = maps["every_rule"]
    out.append(
        Table(
            ("rule", *(f"{name}, accuracy {a}" for name in ("push", "tilt", "token, long to short") for a in stages)),
            [
                (
                    rule,
                    *(_cell(by_rule[rule]["push"]) for by_rule in stages.values()),
                    *(_cell(by_rule[rule]["tilt"], 100) for by_rule in stages.values()),
                    *(f"{by_rule[rule]['starving'].value:.2f}" for by_rule in stages.values()),
                )
                for rule in RULES
            ],
            "Every rule at three accuracies, with wrong responses 1.5 times as long; G = 8, variation .5. Push ×10³, tilt "
            f"in percent. {note}",
        )
    )
    return out


def _cell(bias: Mean, scale: float = 1000) -> str:
    digits = 0 if scale == 1000 else 1
    value = round(bias.value * scale, digits)
    return f"{value:+.{digits}f} ({_count(bias)})" if value else f"0 ({_count(bias)})"


def figure(maps: dict[str, Any], run: Run | None = None, found: Effects | None = None) -> Figure:
    """The maps; with a run, its place in them as hollow stars."""
    by_accuracy, by_gap = maps["accuracy_size"], maps["gap_variation"]
    looks = charts.looks(MAP_RULES, {rule: RULES[rule].mode for rule in MAP_RULES})
    with charts.axes(columns=3, size=(11, 4.2)) as (drawing, axes):
        for size, line in zip(SIZES, ("-", "--", "-.", ":"), strict=True):
            pushes = [by_size[size]["balanced"]["push"] for by_size in by_accuracy.values()]
            standing = [p.value / p.spread for p in pushes]
            axes[0].plot(ACCURACIES, standing, line, color=looks["balanced"][0], label=f"balanced, G = {size}")
        axes[0].legend(loc="lower right", fontsize=8)
        for rule in MAP_RULES:
            colour, line, marker = looks[rule]
            look = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4, "label": rule}
            if rule != "balanced":
                pushes = [by_size[8][rule]["push"] for by_size in by_accuracy.values()]
                axes[0].plot(ACCURACIES, [p.value / p.spread for p in pushes], **{**look, "alpha": 0.8})
            tilts = [by_gap[gap]["0.5"][rule]["tilt"] for gap in by_gap]
            value, spread = (100 * np.array([getattr(t, name) for t in tilts]) for name in ("value", "spread"))
            axes[1].plot(GAPS, value, **look)
            if rule == "group-mean-token-mean":
                axes[1].fill_between(GAPS, value - spread, value + spread, color=colour, alpha=0.15, linewidth=0)
            axes[2].plot(VARIATIONS, [maps["like_prompts"][str(v)][rule]["starving"].value for v in VARIATIONS], **look)
            if run and found:
                star = {
                    "marker": "*",
                    "markersize": 13,
                    "color": colour,
                    "markerfacecolor": "white",
                    "linestyle": "none",
                }
                push = found[rule]["push"]
                axes[0].plot(run.setting.accuracy, push.value / push.spread if push.spread else 0, **star)
                axes[1].plot(run.setting.gap, 100 * found[rule]["tilt"].value, **star)
                axes[2].plot(run.setting.variation, found[rule]["starving"].value, **star)
        for n in (1, 10, 100):
            for sign in (-1, 1):
                axes[0].axhline(sign / sqrt(n), color=INK, linewidth=0.5)
            axes[0].annotate(f"n = {n}", (0.05, 1 / sqrt(n)), (0, 2), textcoords="offset points", fontsize=8)
        axes[0].set(
            title="Push on length", xlabel="mean accuracy of the prompts", ylabel="push / its spread, per update"
        )
        axes[1].set(title="Tilt", xlabel="length, negatives / positives", ylabel="gradient moved to negatives [%]")
        axes[2].set(
            title="Long responses' tokens",
            xlabel="length variation (coefficient)",
            ylabel="weight, relative to a short one",
        )
        axes[1].axhline(0, color=INK, linewidth=1)
        axes[2].axhline(1, color=INK, linewidth=1)
        charts.common_legend(drawing, axes[1], 6)
    place = " Stars: the run, with its own prompts." if run else ""
    return Figure(
        NAME if run is None else f"{NAME}_run",
        drawing,
        "Push over spread by accuracy and group size, tilt by length gap, weight of long responses' tokens by variation",
        "64 prompts an update. Left: no gap; G = 8 but for balanced; thin lines: the push stands out after n updates. "
        f"Middle: variation .5; band: spread of group-mean-token-mean. Right: no gap, prompts alike.{place}",
    )


def table_markdown(maps: dict[str, Any] | None = None) -> str:
    """The tables for the report; from the committed numbers if none are given."""
    return "\n".join(table.markdown() for table in tables(maps or committed(NAME)))


def main(
    report: Annotated[
        Path | None, typer.Option("--from", help="analyze.json of `verl-ba analyze --out`: place a run")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write results/ and figures/ in this folder")] = None,
    seed: Annotated[int, typer.Option(help="of every draw")] = 0,
    updates: Annotated[int, typer.Option(help="drawn for each cell of the maps, or for the run", min=20)] = UPDATES,
) -> None:
    """Map the size of each rule's bias, or place a run in the map."""
    from rich.progress import Progress

    try:
        run = read_report(report) if report else None
    except NotAReport as error:
        typer.echo(f"✗ {error}", err=True)
        raise typer.Exit(1) from error
    found: Effects = {}
    maps: dict[str, Any] = {}
    with Progress() as progress:
        task = progress.add_task("updates", total=(1 if report else CELLS) * updates)

        def step() -> None:
            progress.advance(task)

        if run:
            found = place(run, updates, seed, step)
        else:
            maps = compute(seed, updates, step)
    if run:
        lines = "\n".join(f"- {sentence}" for sentence in run_sentences(run, found))
        text = f"{run_table(run, found).markdown()}\n{lines}\n"
        if out:
            numbers = to_json({"setting": vars(run.setting), "effects": found})
            write(out, f"{NAME}_run", numbers, text, [figure(committed(NAME), run, found)])
    else:
        numbers = to_json(maps)
        text = table_markdown(from_json(numbers))  # the digits that are kept
        write(out or HERE, NAME, numbers, text, [figure(maps)])
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
