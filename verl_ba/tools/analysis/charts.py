"""The figures of both reports. They draw numbers that were computed elsewhere; units are on every axis."""

import textwrap
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Drawing

from verl_ba.tools.analysis.comparison import POLICY_LOSS, TRAINING_SCORE, WINDOW, Comparison
from verl_ba.tools.analysis.page import FAINT, INK, SERIES, Figure

MODE_LOOKS = {
    "balanced": (SERIES[0], "-", "o"),
    "group-mean-token-mean": (SERIES[1], "--", "s"),
    "seq-mean-token-mean": (SERIES[2], ":", "^"),
    "token-mean": (SERIES[3], "-.", "D"),
}
"""Colour, line style and marker of each mode: the same in every figure."""

_NO_LOSS = 1e-10  # where a loss of exactly 0 is drawn on a log scale
_TITLE = 26  # characters of a title that fit above one of three columns
_OTHER_LOOKS = ((SERIES[4], (0, (5, 1)), "v"), (SERIES[5], (0, (1, 1)), "P"))

_TEXT = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.color": FAINT,
    "legend.frameon": False,
    "svg.hashsalt": "verl_ba",  # the same figure gives the same file
    **dict.fromkeys(_TEXT, INK),
}


@contextmanager
def axes(columns: int = 1, rows: int = 1, size: tuple[float, float] = (9, 3.6)):
    """A drawing and its axes, flat. No window and no global state: `Drawing` is not pyplot's."""
    with matplotlib.rc_context(_STYLE):
        drawing = Drawing(figsize=size, layout="constrained")
        yield drawing, drawing.subplots(rows, columns, squeeze=False).ravel()


def looks(names: Iterable[str], mode_of: Mapping[str, str | None] | None = None) -> dict[str, tuple]:
    """A look for every name: that of its mode, or one that no other name has taken."""
    found, spare = {}, [*MODE_LOOKS.values(), *_OTHER_LOOKS]
    names = list(names)
    for name in names:
        look = MODE_LOOKS.get((mode_of or {}).get(name) or name)
        if look in spare:
            found[name] = look
            spare.remove(look)
    for i, name in enumerate(name for name in names if name not in found):
        found[name] = spare[i % len(spare)] if spare else _OTHER_LOOKS[i % len(_OTHER_LOOKS)]
    return found


def _legend(axis, columns: int) -> None:
    """Below the axis, where it covers no data."""
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=columns, fontsize=9, handlelength=2.4)


def common_legend(drawing, axis, columns: int) -> None:
    """One legend for all axes, below them."""
    drawing.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)


def weighing_overview(overall: Mapping[str, Any]) -> Figure:
    """The negatives' gradient share, and the weight of long responses' tokens, under each mode."""
    quantities = (
        ("gradient_share_negative", "Gradient weight of the negatives", "share of Σ|A|·w"),
        ("long_to_short", "A token of a long response", "weight, relative to a short one"),
    )
    with axes(columns=2, size=(9, 2.6)) as (drawing, panels):
        for axis, (name, title, label) in zip(panels, quantities, strict=True):
            for row, (mode, (colour, _, marker)) in enumerate(MODE_LOOKS.items()):
                estimate = overall[f"{mode}/{name}"]
                axis.plot([estimate.low, estimate.high], [row, row], color=colour, linewidth=2.5)
                axis.plot(estimate.value, row, marker, color=colour, markersize=8)
            axis.set(title=title, xlabel=label, ylim=(len(MODE_LOOKS) - 0.5, -0.5))
            axis.set_yticks(range(len(MODE_LOOKS)), list(MODE_LOOKS))
        panels[1].set_yticklabels([])
        fair = overall["seq-mean-token-mean/gradient_share_negative"].value  # every response weighs 1 there
        if np.isfinite(fair):
            panels[0].axvline(fair, color=INK, linewidth=1)
        panels[1].axvline(1, color=INK, linewidth=1)
    return Figure(
        "overview",
        drawing,
        "Share of the gradient weight of negative responses, and weight of a token in a long response, under four modes",
        "Dots: all groups; bars: 95% bootstrap intervals over groups. Thin lines: where lengths would not matter (left: the "
        "negatives' share of Σ|A|; right: every token alike). Long and short: the longest and the shortest quarter.",
    )


def weighing_steps(steps: Mapping[int, Mapping[str, Any]]) -> Figure:
    """The same two numbers, and the length gap, at each step."""
    x = list(steps)
    with axes(columns=3, size=(9, 3.4)) as (drawing, panels):
        for mode, (colour, line, _) in MODE_LOOKS.items():
            for axis, name in zip(panels, ("gradient_share_negative", "long_to_short"), strict=False):
                values = [steps[step][f"{mode}/{name}"] for step in x]
                axis.plot(x, [v.value for v in values], line, color=colour, linewidth=2, label=mode)
                low, high = [v.low for v in values], [v.high for v in values]
                if name == "gradient_share_negative" and mode in ("balanced", "token-mean"):
                    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        ratio = [steps[step]["length_gap/ratio"] for step in x]
        panels[2].plot(x, [v.value for v in ratio], color=INK, linewidth=2)
        panels[2].fill_between(x, [v.low for v in ratio], [v.high for v in ratio], color=FAINT, alpha=0.3, linewidth=0)
        panels[2].axhline(1, color=INK, linewidth=1)
        panels[0].set(title="Gradient weight, negatives", ylabel="share of Σ|A|·w")
        panels[1].set(title="A token of a long response", ylabel="weight, relative to a short one")
        panels[2].set(title="Length, negatives / positives", ylabel="ratio, mixed groups")
        for axis in panels:
            axis.set_xlabel("training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
        common_legend(drawing, panels[0], 4)
    return Figure(
        "steps",
        drawing,
        "Gradient share of negatives, weight of long responses' tokens and length gap at every step",
        "Bands: 95% bootstrap intervals over the groups of a step (left: of balanced and token-mean only).",
    )


def weighing_lengths(
    edges: np.ndarray,
    counts: Mapping[int, np.ndarray],
    decile_length: np.ndarray,
    decile_weight: Mapping[str, np.ndarray],
) -> Figure:
    """How long the responses of each sign are, and what a token weighs by the length of its response."""
    with axes(columns=2, size=(9, 3.8)) as (drawing, panels):
        for sign, name, colour, line in (
            (1, "positive", SERIES[0], "-"),
            (-1, "negative", SERIES[1], "--"),
            (0, "zero", FAINT, ":"),
        ):
            if counts[sign].sum():
                panels[0].stairs(
                    counts[sign] / counts[sign].sum(), edges, color=colour, linestyle=line, linewidth=2, label=name
                )
        panels[0].set(
            title="Lengths, by sign of the advantage",
            xlabel="response length [tokens]",
            ylabel="share of its sign's responses",
        )
        _legend(panels[0], 3)
        for mode, (colour, line, marker) in MODE_LOOKS.items():
            panels[1].plot(
                decile_length,
                decile_weight[mode],
                color=colour,
                linestyle=line,
                marker=marker,
                markersize=4,
                label=mode,
            )
        panels[1].set(
            title="What a token weighs",
            xlabel="response length [tokens], mean of each tenth",
            ylabel="weight over the batch's mean",
            ylim=(0, None),
        )
        _legend(panels[1], 2)
    return Figure(
        "lengths",
        drawing,
        "Histogram of response lengths by sign, and weight of a token against the length of its response under four modes",
        "Left: all steps. Right: the responses sorted by length and cut into tenths; token-mean is flat by definition, "
        "sequence-mean falls as 1 over the length.",
    )


_CURVE_TITLES = {
    TRAINING_SCORE: ("Training score", "mean score"),
    POLICY_LOSS: ("|actor/pg_loss|", "absolute loss"),
    "response_length/mean": ("Response length", "mean length [tokens]"),
    "actor/entropy": ("Entropy", "mean over tokens [nats]"),
}


def comparison_curves(comparison: Comparison) -> Figure:
    """Every benchmark and the usual training metrics against the step; one look per arm, bands over seeds."""
    keys = list(comparison.curves)
    columns = 2 if len(keys) == 4 else min(3, len(keys))
    rows = -(-len(keys) // columns)
    look_of = looks([arm.name for arm in comparison.arms], {arm.name: arm.mode for arm in comparison.arms})
    with axes(columns, rows, size=(9, 2.9 * rows + 0.3)) as (drawing, panels):
        for axis, key in zip(panels, keys, strict=False):
            floor = _NO_LOSS if key == POLICY_LOSS else -np.inf
            for arm, curve in comparison.curves[key].items():
                colour, line, _ = look_of[arm]
                mean, low, high = (np.maximum(v, floor) for v in (curve.mean, curve.low, curve.high))
                axis.plot(curve.steps, mean, color=colour, linestyle=line, linewidth=2, label=arm)
                axis.fill_between(curve.steps, low, high, color=colour, alpha=0.15, linewidth=0)
            title, label = _CURVE_TITLES.get(key, (short_name(key), "accuracy"))
            axis.set(title=textwrap.fill(title, _TITLE), ylabel=label, xlabel="training step")
            if key == POLICY_LOSS:
                axis.set_yscale("log")
            axis.xaxis.get_major_locator().set_params(integer=True)
        for axis in panels[len(keys) :]:
            axis.set_visible(False)
        common_legend(drawing, panels[0], 6)
    seeds = max(len(arm.seeds) for arm in comparison.arms)
    bands = "Bands: 95% bootstrap intervals over seeds, step by step." if seeds > 1 else "One seed an arm: no bands."
    loss = f" A loss of 0 is drawn at {_NO_LOSS:.0e}." if POLICY_LOSS in keys else ""
    score = f" The training score is averaged over {WINDOW} steps." if TRAINING_SCORE in keys else ""
    return Figure("curves", drawing, "Curves of the arms: " + ", ".join(map(short_name, keys)), bands + score + loss)


def comparison_differences(comparison: Comparison) -> Figure:
    """The paired differences at the last step, with intervals."""
    with axes(size=(9, 1.3 + 0.42 * len(comparison.pairs))) as (drawing, panels):
        axis = panels[0]
        for row, pair in enumerate(comparison.pairs):
            mean = pair.difference[0]
            axis.plot([mean.low, mean.high], [row, row], color=SERIES[0], linewidth=2.5)
            axis.plot(mean.value, row, "o", color=SERIES[0], markersize=8)
        axis.axvline(0, color=INK, linewidth=1)
        axis.set(
            title="Difference at the last step, paired by seed",
            xlabel="accuracy, mean of the benchmarks" if not comparison.smoothed else "mean training score",
            ylim=(len(comparison.pairs) - 0.5, -0.5),
        )
        axis.set_yticks(range(len(comparison.pairs)), [f"{pair.a} − {pair.b}" for pair in comparison.pairs])
    intervals = any(np.isfinite(pair.difference[0].low) for pair in comparison.pairs)
    caption = "Bars: 95% stratified bootstrap intervals over seeds." if intervals else "One seed: no intervals."
    return Figure("differences", drawing, "Paired differences between arms at the last step", caption)


def short_name(key: str) -> str:
    """'val-core/<source>/<variable>/mean@k' -> '<source> mean@k'."""
    parts = key.split("/")
    return f"{'/'.join(parts[1:-2])} {parts[-1]}" if parts[0] == "val-core" and len(parts) > 3 else key
