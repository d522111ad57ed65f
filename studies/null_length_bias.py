"""Does a rule push on length where the data say nothing about it?

Question: lengths are drawn without looking at correctness. What does the policy gradient then do to length, on average, for
each rule, by the number k of right responses in a group of G?

Setting: `studies.simulated` defines push, drift and advantages (verl's GRPO, divided by the standard deviation with one
degree of freedom lost; with the population's every push is larger by √(G/(G-1))). First 9 or 43 tokens, the longer with
probability .6: rules that look at one group are enumerated exactly, the others drawn in updates of 64 prompts whose accuracy
is uniform. Then log-normal lengths (σ = .5), drawn; the score is the standardised log length. Then log-normal lengths
again, where wrong responses are twice as long and prompts differ in length, hard ones longer. Last, the push in updates of 8
to 512 prompts: b is estimated from the same update.

What the numbers show: the first-order push of one update from a policy whose lengths have one parameter, beside the noise of
one group. `balanced` pushes shorter where few responses are right and longer where few are wrong: a sign's mean length
contains the response itself, and a long one shrinks its own weight the more, the fewer share the mean. Partial pooling keeps
a part that falls with m, and doubly balanced only what a small update's few responses of one sign leave in b.

Where wrong responses are longer, rules that divide by a length of the sign weigh right responses' tokens more. Then the part
that a response has in its own mean no longer cancels between right and wrong: seq-mean-token-mean pushes shorter most, doubly
balanced a little (the relative push shows that b is not the cause). Under group-mean-token-mean the wrong responses dominate
the group's mean, and it pushes a little longer.

What they do not show: whether a training run suffers from it. Clipping, several mini-batches, the optimiser, length limits
and the reward's own view of length all come on top.

    python -m studies.null_length_bias
"""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from studies._results import HERE, committed, from_json, to_json, write
from studies.rules import RULES
from studies.simulated import (
    LOCAL,
    Mean,
    Setting,
    Update,
    at_accuracy,
    controls,
    draw,
    enumerate_groups,
    exact,
    expected_length,
    mean_lengths,
    mean_with_control,
    new_states,
    simulate,
    variation,
)
from verl_ba.tools.analysis import charts
from verl_ba.tools.analysis.page import INK, Figure
from verl_ba.tools.table import Table

NAME = "null_length_bias"

BATCH_RULES = tuple(rule for rule in RULES if rule not in LOCAL)
PROMPTS = 64
KS = {
    8: (1, 2, 3, 4, 5, 6, 7),
    16: (1, 2, 4, 8, 12, 14, 15),
    32: (1, 2, 4, 8, 16, 24, 28, 30, 31),
    64: (1, 4, 8, 16, 32, 48, 56, 60, 63),
}
"""Numbers of right responses that are tabulated, by group size."""

LOG_NORMAL = Setting(variation=variation(0.5))
SECOND = replace(LOG_NORMAL, gap=2.0, prompt_variation=0.5, harder=1.0)
SECOND_RULES = (
    "seq-mean-token-mean",
    "group-mean-token-mean",
    "balanced",
    "pooled-1",
    "pooled-4",
    "pooled-16",
    "doubly-balanced",
    "sign-effect",
    "batch-signs",
)
UPDATE_SIZES = {8: 1600, 16: 1000, 64: 400, 512: 50}
"""Prompts of an update -> updates drawn."""
SIZE_RULES = ("balanced", "pooled-4", "pooled-auto", "doubly-averaged", "doubly-balanced", "batch-signs")
RARE = 0.05
"""Accuracy of all prompts where right responses are few; by symmetry .95 gives the same with the opposite sign."""

Pushes = dict[str, dict[int, Mean]]
"""rule -> k -> push."""


def two_point(size: int, updates: int, rng: np.random.Generator, step: Callable[[], object]) -> Pushes:
    """Every rule (updates = 0: those that look at one group) with two lengths."""
    groups, chance = enumerate_groups(size, KS[size])
    found = {rule: exact(groups, chance, rule, expected_length(Setting())) for rule in LOCAL}
    if updates:
        found |= drawn(Setting(size=size, prompts=PROMPTS), BATCH_RULES, updates, rng, step)
    return {rule: found[rule] for rule in RULES if rule in found}


def log_normal(updates: int, groups: int, rng: np.random.Generator, step: Callable[[], object]) -> Pushes:
    """Every rule, G = 8; rules that look at one group from so many groups of each k."""
    found = drawn(LOG_NORMAL, BATCH_RULES, updates, rng, step)
    correct = np.repeat(KS[8], groups)
    update = draw(LOG_NORMAL, rng, correct)
    states = new_states(LOG_NORMAL, LOCAL)
    control = controls(update)[:, None]
    for rule in LOCAL:
        push = update.push(mean_lengths(update, [rule], states)[rule])[None] * LOG_NORMAL.mean
        found[rule] = {k: _by_group(push, control, update, k) for k in KS[8]}
    return {rule: found[rule] for rule in RULES}


def _by_group(push: np.ndarray, control: np.ndarray, update: Update, k: int) -> Mean:
    of_k = update.correct == k
    every = np.ones((of_k.sum(), 1), dtype=bool)
    return mean_with_control(push[:, of_k].T, np.swapaxes(control[..., of_k], 1, 2), every, blocks=1000)


def drawn(setting: Setting, rules, updates: int, rng: np.random.Generator, step: Callable[[], object]) -> Pushes:
    draws = simulate(setting, rules, updates, rng, step)
    return {
        rule: {k: mean_with_control(draws.push[rule], draws.control, draws.correct == k) for k in KS[setting.size]}
        for rule in rules
    }


def second_setting(updates: int, rng: np.random.Generator, step: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """rule -> push, relative push and mean drift by k, and the root mean square drift of a mixed group."""
    draws = simulate(SECOND, SECOND_RULES, updates, rng, step)
    mixed = draws.mixed(SECOND)
    none = draws.control[:0]  # of no use to the drift

    def by_k(value: np.ndarray, control: np.ndarray) -> dict[int, Mean]:
        return {k: mean_with_control(value, control, draws.correct == k) for k in KS[8]}

    return {
        rule: {
            "push": by_k(draws.push[rule], draws.control),
            "relative_push": by_k(draws.relative_push[rule], draws.control),
            "drift": by_k(draws.drift[rule], none),
            "rms_drift": float(np.sqrt((draws.drift[rule][mixed] ** 2).mean())),
        }
        for rule in SECOND_RULES
    }


def update_sizes(scale: float, rng: np.random.Generator, step: Callable[[], object]) -> dict[str, dict[int, Pushes]]:
    """'uniform' or 'rare' -> prompts of an update -> rule -> push at k = 1, two lengths."""
    found: dict[str, dict[int, Pushes]] = {}
    for name, setting in (("uniform", Setting()), ("rare", at_accuracy(Setting(), RARE))):
        found[name] = {}
        for prompts, updates in UPDATE_SIZES.items():
            draws = simulate(replace(setting, prompts=prompts), SIZE_RULES, _scaled(updates, scale), rng, step)
            found[name][prompts] = {
                rule: {1: mean_with_control(draws.push[rule], draws.control, draws.correct == 1)} for rule in SIZE_RULES
            }
    return found


UPDATES = {"8": 1200, "16": 400, "log_normal": 1000, "second": 800}
"""Updates drawn of each part but the last."""


def _scaled(updates: int, scale: float) -> int:
    return max(20, round(updates * scale))


def total_updates(scale: float = 1.0) -> int:
    return sum(_scaled(n, scale) for n in (*UPDATES.values(), *UPDATE_SIZES.values(), *UPDATE_SIZES.values()))


def compute(seed: int = 0, scale: float = 1.0, step: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """All numbers. `scale` multiplies the number of updates drawn; each part has a random state of its own."""
    states = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(5)]
    n = {name: _scaled(updates, scale) for name, updates in UPDATES.items()}
    return {
        "seed": seed,
        "two_point": {
            8: two_point(8, n["8"], states[0], step),
            16: two_point(16, n["16"], states[1], step),
            **{size: two_point(size, 0, states[1], step) for size in (32, 64)},
        },
        "log_normal": log_normal(n["log_normal"], round(60_000 * scale), states[2], step),
        "second": second_setting(n["second"], states[3], step),
        "update_sizes": update_sizes(scale, states[4], step),
    }


def _pushes_table(what: str, pushes: Pushes, caption: str, spread_at: int) -> Table:
    ks = list(next(iter(pushes.values())))
    rows = [
        (rule, *(by_k[k].text() for k in ks), f"{by_k[spread_at].spread * 1000:.0f}") for rule, by_k in pushes.items()
    ]
    return Table((what, *map(str, ks), f"spread, k = {spread_at}"), rows, caption)


def tables(results: dict[str, Any]) -> list[Table]:
    two, second, sizes = results["two_point"], results["second"], results["update_sizes"]
    exact_rows = [
        (
            f"G = {size}, {label}",
            *(f"{1000 * factor(size) * mean.value:+.1f}" for mean in two[size]["balanced"].values()),
        )
        for label, factor in (("std of the population", lambda g: sqrt(g / (g - 1))), ("verl's std", lambda g: 1.0))
        for size in (8, 16)
    ]
    out = [
        Table(
            (
                "balanced",
                *(f"k = {k}" if k == k16 else f"k = {k} ({k16})" for k, k16 in zip(KS[8], KS[16], strict=True)),
            ),
            exact_rows,
            "Push ×10³ of `balanced`, 9 or 43 tokens, enumerated: no standard error. k of G = 16 in brackets.",
        )
    ]
    for size in (8, 16):
        out.append(
            _pushes_table(
                f"G = {size}, k",
                two[size],
                f"Push ×10³, 9 or 43 tokens. Without ±: enumerated. With ±: standard error over updates of {PROMPTS} prompts "
                "of uniform accuracy. Spread: standard deviation ×10³ of one group's push.",
                size // 2,
            )
        )
    out.append(
        Table(
            ("G", "rule", *(f"k = {k}" for k in ("1", "G/8", "G/4", "G/2", "3G/4", "G-1"))),
            [
                (
                    str(size),
                    rule,
                    *(two[size][rule][k].text() for k in (1, size // 8, size // 4, size // 2, 3 * size // 4, size - 1)),
                )
                for size in KS
                for rule in ("balanced", "leave-one-out")
            ],
            "Push ×10³ by group size, 9 or 43 tokens, enumerated.",
        )
    )
    out.append(
        _pushes_table(
            "log-normal, G = 8, k",
            results["log_normal"],
            "Push ×10³ for one standard deviation of the log length (σ = .5), G = 8.",
            4,
        )
    )
    ks, three = (1, 2, 4, 6, 7), (1, 4, 7)
    out.append(
        Table(
            ("rule", *(f"push, k = {k}" for k in ks), *(f"relative, k = {k}" for k in three)),
            [
                (rule, *(r["push"][k].text() for k in ks), *(r["relative_push"][k].text() for k in three))
                for rule, r in second.items()
            ],
            "Log-normal lengths, wrong responses twice as long, prompts differ (coefficient .5) and hard ones are longer (e "
            "times from accuracy 1 to 0); G = 8. Push ×10³ on the log length within prompt and sign. Relative: lengths in "
            "units of the prompt's and sign's true mean, which leaves out that tokens of short responses weigh more.",
        )
    )
    out.append(
        Table(
            ("rule", *(f"drift, k = {k}" for k in three), "of a single group, rms"),
            [
                (
                    rule,
                    *(f"{r['drift'][k].value:+.3f} ± {r['drift'][k].error:.3f}" for k in three),
                    f"{r['rms_drift']:.3f}",
                )
                for rule, r in second.items()
            ],
            "The same updates. Drift: minus the group's loss at ratio 1; rms over mixed groups.",
        )
    )
    out.append(
        Table(
            ("prompts of the update", *(f"{p}, {n}" for n in ("uniform", "rare") for p in UPDATE_SIZES)),
            [
                (rule, *(sizes[n][p][rule][1].text() for n in ("uniform", "rare") for p in UPDATE_SIZES))
                for rule in SIZE_RULES
            ],
            "Push ×10³ at k = 1 (at k = 7 the opposite), 9 or 43 tokens, G = 8, by the size of the update. Uniform: "
            f"accuracies of prompts from 0 to 1. Rare: {RARE:g} for every prompt.",
        )
    )
    return out


def figure(results: dict[str, Any]) -> Figure:
    two, sizes = results["two_point"], results["update_sizes"]
    rules = ("balanced", "group-mean-token-mean", "seq-mean-token-mean", "pooled-1", "pooled-4", "doubly-balanced")
    looks = charts.looks(rules, {rule: RULES[rule].mode for rule in rules})
    with charts.axes(columns=3, size=(11, 4.0)) as (drawing, axes):
        for rule in rules:
            colour, line, marker = looks[rule]
            look = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5, "label": rule}
            by_k = two[8][rule]
            axes[0].errorbar(
                list(by_k), [1000 * m.value for m in by_k.values()], [2000 * m.error for m in by_k.values()], **look
            )
        for rule in ("balanced", "pooled-4", "doubly-balanced"):
            colour, line, marker = looks[rule]
            for name, fill in (("rare", colour), ("uniform", "white")):
                means = [sizes[name][p][rule][1] for p in UPDATE_SIZES]
                axes[2].errorbar(
                    list(UPDATE_SIZES),
                    [1000 * m.value for m in means],
                    [2000 * m.error for m in means],
                    color=colour,
                    linestyle=line,
                    marker=marker,
                    markerfacecolor=fill,
                    markersize=5,
                )
        for (size, line), marker in zip(zip(KS, ("-", "--", "-.", ":"), strict=True), "osD^", strict=True):
            by_k = two[size]["balanced"]
            shares = [k / size for k in by_k]
            axes[1].plot(
                shares,
                [1000 * m.value for m in by_k.values()],
                line,
                marker=marker,
                markersize=4,
                color=looks["balanced"][0],
            )
            axes[1].annotate(
                f"{size}", (shares[0], 1000 * by_k[1].value), (5, -3), textcoords="offset points", fontsize=9
            )
        axes[0].set(
            title="Every rule, G = 8", xlabel="right responses of the group, k", ylabel="push on being long [10⁻³]"
        )
        axes[1].set(
            title="balanced, G = 8 to 64", xlabel="share of right responses, k/G", ylabel="push on being long [10⁻³]"
        )
        axes[2].set(
            title="By size of the update, k = 1", xlabel="prompts of the update", ylabel="push on being long [10⁻³]"
        )
        axes[2].set_xscale("log", base=2)
        axes[2].set_xticks(list(UPDATE_SIZES), list(map(str, UPDATE_SIZES)))
        for axis in axes:
            axis.axhline(0, color=INK, linewidth=1)
        charts.common_legend(drawing, axes[0], 6)
    return Figure(
        NAME,
        drawing,
        "Push on length where length and correctness are independent: by number of right responses, group size, update size",
        "9 or 43 tokens, independent of correctness. Left: enumerated, or drawn in updates of 64 prompts. Right: filled, "
        f"every prompt of accuracy {RARE:g}; open, accuracies uniform. Bars: two standard errors.",
    )


def table_markdown(results: dict[str, Any] | None = None) -> str:
    """The tables for the report; from the committed numbers if none are given."""
    if results is None:
        results = committed(NAME)
    return "\n".join(table.markdown() for table in tables(results))


def main(
    out: Annotated[Path, typer.Option(help="write results/ and figures/ in this folder")] = HERE,
    seed: Annotated[int, typer.Option(help="of every draw")] = 0,
    scale: Annotated[float, typer.Option(help="multiplies the number of updates drawn", min=0.001)] = 1.0,
) -> None:
    """Expected push on length of every rule, where length and correctness are independent."""
    from rich.progress import Progress

    with Progress() as progress:
        task = progress.add_task("updates", total=total_updates(scale))
        results = compute(seed, scale, lambda: progress.advance(task))
    numbers = to_json(results)
    text = table_markdown(from_json(numbers))  # the digits that are kept
    write(out, NAME, numbers, text, [figure(results)])
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
