"""What the demo shows of its runs: one row per arm, and a picture of the curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from verl_ba.tools.analysis import charts
from verl_ba.tools.analysis.modes import in_full
from verl_ba.tools.table import Table

WINDOW = 5
"""Steps at either end over which the table averages."""

SCORE, LOSS, SECONDS = "critic/score/mean", "actor/pg_loss", "timing_s/step"
POSITIVE, NEGATIVE = "balance/length/positive", "balance/length/negative"

Steps = Sequence[Mapping[str, float]]

HEADER = ("arm", "loss_agg_mode", "score, first", "score, last", "abs pg_loss", "length +", "length −", "s/step")
CAPTION = (
    f"first, last: mean of {WINDOW} steps; abs pg_loss: mean of all steps; length in tokens of the responses "
    f"with positive and negative advantage: last {WINDOW} steps"
)


def series(steps: Steps, key: str) -> list[float]:
    """A metric at each step; nan where it was not logged, as the length of a sign that no response has."""
    return [step.get(key, math.nan) for step in steps]


def mean_of(values: Iterable[float]) -> float:
    """The mean of the values that are not nan."""
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan


def row(arm: str, steps: Steps) -> tuple[str, ...]:
    score, seconds = series(steps, SCORE), series(steps, SECONDS)
    return (
        arm,
        in_full(arm),
        f"{mean_of(score[:WINDOW]):.3f}",
        f"{mean_of(score[-WINDOW:]):.3f}",
        f"{mean_of(map(abs, series(steps, LOSS))):.1e}",
        f"{mean_of(series(steps, POSITIVE)[-WINDOW:]):.1f}",
        f"{mean_of(series(steps, NEGATIVE)[-WINDOW:]):.1f}",
        f"{mean_of(seconds[1:] or seconds):.2f}",  # the first step also starts the agent loop
    )


def table(runs: Mapping[str, Steps]) -> Table:
    """A row for each arm."""
    return Table(HEADER, [row(arm, steps) for arm, steps in runs.items()], CAPTION)


def draw(runs: Mapping[str, Steps], path: Path) -> None:
    """Score, |pg_loss| and lengths by sign against the step; one colour and one line style per arm."""
    styles = charts.looks(runs, {arm: in_full(arm) for arm in runs})
    with charts.axes(columns=3, size=(12, 3.6)) as (drawing, axes):
        for arm, steps in runs.items():
            colour, line, _ = styles[arm]
            x, style = range(1, len(steps) + 1), {"color": colour, "linestyle": line}
            axes[0].plot(x, smooth(series(steps, SCORE)), label=arm, linewidth=2, **style)
            axes[1].plot(x, [max(abs(loss), 1e-10) for loss in series(steps, LOSS)], linewidth=2, **style)
            axes[2].plot(x, smooth(series(steps, NEGATIVE)), linewidth=2, **style)
            axes[2].plot(x, smooth(series(steps, POSITIVE)), linewidth=1, **style)
        axes[0].set(title=f"Score (mean of {WINDOW} steps)", xlabel="step", ylabel="mean score", ylim=(0, 1))
        axes[1].set(title="|actor/pg_loss| on policy", xlabel="step", ylabel="|loss|", yscale="log")
        axes[2].set(title="Length: negatives thick, positives thin", xlabel="step", ylabel="tokens", ylim=(0, None))
        axes[0].legend()
        for axis in axes:
            axis.xaxis.get_major_locator().set_params(integer=True)
        drawing.savefig(path, dpi=120)


def smooth(values: list[float]) -> list[float]:
    """Mean of the last WINDOW values, fewer at the start."""
    return [mean_of(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]
