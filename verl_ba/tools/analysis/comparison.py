"""Compare runs: values at the last step, peaks, drops; differences between arms, paired by seed.

Intervals are percentile intervals of a stratified bootstrap (Agarwal et al. 2021, arXiv 2108.13264): seeds are resampled,
separately for each benchmark.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from verl_ba.tools.analysis.estimate import Bootstrap, Estimate
from verl_ba.tools.analysis.runs import Run, RunError

TRAINING_SCORE = "critic/score/mean"
WINDOW = 5
"""Steps over which a training score is averaged before its last value and its peak are taken."""

POLICY_LOSS = "actor/pg_loss"
"""Drawn as its absolute value: on policy with binary rewards it is 0 under `balanced`, and its size is what matters."""

CURVES = (TRAINING_SCORE, POLICY_LOSS, "response_length/mean", "actor/entropy")
"""Metrics that are drawn besides the benchmarks, where every run has them."""

MEASURES = ("last", "peak", "drop")
FEW_SEEDS = 5


@dataclass(frozen=True)
class Arm:
    name: str
    mode: str | None
    seeds: list[int | None]
    scores: dict[str, np.ndarray]  # measure -> [seeds, benchmarks]
    estimates: dict[str, list[Estimate]]  # measure -> the mean of the benchmarks, then each


@dataclass(frozen=True)
class Pair:
    """Arm `a` against arm `b` at the last step, over the seeds that both have."""

    a: str
    b: str
    seeds: list[int | None]
    difference: list[Estimate]  # a - b: the mean of the benchmarks, then each
    probability: Estimate  # that a beats b with the same seed, mean over benchmarks


@dataclass(frozen=True)
class Curve:
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray  # nan where there is one seed
    high: np.ndarray


@dataclass(frozen=True)
class Comparison:
    benchmarks: list[str]
    smoothed: bool  # there was no validation: the benchmark is the training score, averaged over WINDOW steps
    last_step: int
    arms: list[Arm]
    pairs: list[Pair]
    curves: dict[str, dict[str, Curve]]  # metric -> arm
    notes: list[str]


def compare(runs: Sequence[Run], until: int | None = None, resamples: int = 2000, seed: int = 0) -> Comparison:
    """Compare the arms of these runs.

    Args:
        until: leave out what comes after this step.
        resamples: bootstrap resamples of each interval.

    Raises:
        RunError: a run ends earlier than the others or lacks a benchmark or one of its steps; or there is no benchmark.
    """
    if until is not None:
        runs = [_cut(run, until) for run in runs]
    _same_end(runs)
    benchmarks = sorted({key for run in runs for key in run.series if key.startswith("val-core/") and "/mean@" in key})
    smoothed = not benchmarks
    if smoothed:
        benchmarks = [TRAINING_SCORE]
    for key in benchmarks:
        _same_steps(runs, key)
    arms_runs: dict[str, list[Run]] = {}
    for run in runs:
        arms_runs.setdefault(run.arm, []).append(run)

    bootstrap = Bootstrap(resamples, seed)
    arms = [_arm(name, members, benchmarks, smoothed, bootstrap) for name, members in arms_runs.items()]
    curves = {
        key: {name: _curve(key, members, key == TRAINING_SCORE, bootstrap) for name, members in arms_runs.items()}
        for key in dict.fromkeys((*benchmarks, *CURVES))
        if all(key in run.series for run in runs) and len({tuple(run.series[key]) for run in runs}) == 1
    }
    pairs = [pair for a, b in combinations(arms, 2) if (pair := _pair(a, b, bootstrap))]
    notes = [note for run in runs for note in run.notes] + _notes(arms, pairs, smoothed)
    return Comparison(benchmarks, smoothed, runs[0].last_step, arms, pairs, curves, notes)


def _cut(run: Run, until: int) -> Run:
    series = {
        key: kept for key, values in run.series.items() if (kept := {s: v for s, v in values.items() if s <= until})
    }
    if not series:
        raise RunError(f"{run.path}: nothing up to step {until}")
    return replace(run, series=series)


def _same_end(runs: Sequence[Run]) -> None:
    longest = max(runs, key=lambda run: run.last_step)
    short = [f"{run.path} ends at step {run.last_step}" for run in runs if run.last_step < longest.last_step]
    if short:
        raise RunError(
            f"{'; '.join(short)}; {longest.path} goes on to step {longest.last_step}. Finish the run, leave it out, or "
            f"compare all up to a common step with --until {min(run.last_step for run in runs)}"
        )


def _same_steps(runs: Sequence[Run], key: str) -> None:
    everywhere = sorted({step for run in runs for step in run.series.get(key, {})})
    if not everywhere:
        raise RunError(f"no run has '{key}' or a validation metric 'val-core/…/mean@k': there is nothing to compare")
    for run in runs:
        missing = [step for step in everywhere if step not in run.series.get(key, {})]
        if missing:
            shown = ", ".join(map(str, missing[:5])) + ("…" if len(missing) > 5 else "")
            raise RunError(
                f"{run.path}: '{key}' is missing at {len(missing)} of {len(everywhere)} steps ({shown}) that other runs have"
            )


def _values(run: Run, key: str, smoothed: bool) -> np.ndarray:
    values = np.array(list(run.series[key].values()))
    if key == POLICY_LOSS:
        values = np.abs(values)
    if not smoothed:
        return values
    sums = np.cumsum(np.append(0.0, values))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - WINDOW, 0)
    return (sums[end] - sums[start]) / (end - start)


def _arm(name: str, runs: list[Run], benchmarks: list[str], smoothed: bool, bootstrap: Bootstrap) -> Arm:
    values = [[_values(run, key, smoothed) for key in benchmarks] for run in runs]
    last = np.array([[v[-1] for v in row] for row in values])
    peak = np.array([[v.max() for v in row] for row in values])
    scores = {"last": last, "peak": peak, "drop": peak - last}
    estimates = {measure: bootstrap.estimates(scores[measure], _mean_and_each) for measure in MEASURES}
    return Arm(name, runs[0].mode, [run.seed for run in runs], scores, estimates)


def _pair(a: Arm, b: Arm, bootstrap: Bootstrap) -> Pair | None:
    seeds = [seed for seed in a.seeds if seed in b.seeds]
    if not seeds:
        return None
    at = [a.seeds.index(seed) for seed in seeds], [b.seeds.index(seed) for seed in seeds]
    difference = a.scores["last"][at[0]] - b.scores["last"][at[1]]
    return Pair(
        a.name,
        b.name,
        seeds,
        bootstrap.estimates(difference, _mean_and_each),
        bootstrap.estimates(difference, _probability)[0] if len(seeds) > 1 else Estimate(np.nan),
    )


def _curve(key: str, runs: list[Run], smoothed: bool, bootstrap: Bootstrap) -> Curve:
    values = np.stack([_values(run, key, smoothed) for run in runs])
    low, high = bootstrap.bands(values)
    return Curve(np.array(list(runs[0].series[key])), values.mean(axis=0), low, high)


def _mean_and_each(scores: np.ndarray) -> np.ndarray:
    """[…, seeds, benchmarks] -> the mean over seeds of the benchmarks' mean, then of each; one number for one benchmark."""
    each = scores.mean(axis=-2)
    return each if each.shape[-1] == 1 else np.concatenate([each.mean(axis=-1, keepdims=True), each], axis=-1)


def _probability(difference: np.ndarray) -> np.ndarray:
    """[…, seeds, benchmarks] -> how often the difference is positive, a tie counting half; […, 1]."""
    return ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1))[..., None]


def _notes(arms: list[Arm], pairs: list[Pair], smoothed: bool) -> list[str]:
    """What a reader must know before believing a number."""
    notes = []
    if smoothed:
        notes.append(
            f"These runs have no validation metric (val-core/…/mean@k): the score is the training reward {TRAINING_SCORE}, "
            f"averaged over {WINDOW} steps."
        )
    single = [arm.name for arm in arms if len(arm.seeds) == 1]
    if single:
        notes.append(f"One seed gives no interval: {', '.join(single)}. Differences between single runs may be noise.")
    few = [f"{arm.name} ({len(arm.seeds)})" for arm in arms if 1 < len(arm.seeds) < FEW_SEEDS]
    if few:
        notes.append(f"Few seeds: {', '.join(few)}. Bootstrap intervals over so few are too narrow.")
    paired = {(pair.a, pair.b): pair for pair in pairs}
    for a, b in combinations(arms, 2):
        pair = paired.get((a.name, b.name))
        if pair is None:
            notes.append(f"{a.name} and {b.name} have no seed in common: not compared.")
        elif len(pair.seeds) < max(len(a.seeds), len(b.seeds)):
            notes.append(f"{a.name} and {b.name} are compared on the {len(pair.seeds)} seeds that both have.")
    return notes
