"""How each aggregation would weigh the responses of a dump: the numbers of `verl_ba.metrics`, with intervals.

The intervals are percentile bootstraps over groups (prompts): the responses to one prompt are not independent.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from verl_ba.aggregation import ALL_MODES
from verl_ba.loss_agg import zero_up_to_rounding
from verl_ba.metrics.weights import EQUAL_ADVANTAGES, fold, group_sums, response_weights, statistics
from verl_ba.tools.analysis.estimate import Estimate
from verl_ba.tools.analysis.rollouts import Rollouts

ADVANTAGES = ("grpo", "grpo-no-std", "rloo")
REFERENCE = "balanced"
"""What the other modes are compared with."""

TILT = 0.05
"""Share of the gradient moved to one sign from which a tilt is called large. Ours: the paper's own measure is not public."""

STARVED = 0.7
"""Weight of a token in a long against one in a short response below which long responses are called starved. Ours."""

_BINS = 40
_DECILES = 10


@dataclass(frozen=True)
class TiltedGroup:
    """A prompt in which a token mean over the group weighs one sign much more than its advantages do."""

    step: int
    label: str
    place: str
    positives: int
    negatives: int
    positive_length: float  # mean [tokens]
    negative_length: float
    fair: float  # the negatives' share of Σ|A|
    negative_share: float  # under group-mean-token-mean
    tilt: float


@dataclass(frozen=True)
class Weighing:
    """What `verl-ba analyze` reports."""

    advantage: str
    overall: dict[str, Estimate]  # by the names of `balance.METRICS`
    steps: dict[int, dict[str, Estimate]]
    tilted: list[TiltedGroup]
    length_edges: np.ndarray  # of the histogram [tokens]
    length_counts: dict[int, np.ndarray]  # sign -> responses per bin
    decile_length: np.ndarray  # mean length of each tenth of the responses, by length [tokens]
    decile_weight: dict[str, np.ndarray]  # mode -> weight of a token there, over that of an average token
    advice: list[str]


def advantages(score: np.ndarray, group: np.ndarray, estimator: str) -> np.ndarray:
    """Advantage of each response, as verl computes it (core_algos.py), in float64 [R].

        grpo         (score - mean) / (std + 1e-6), std with one degree of freedom lost
        grpo-no-std  score - mean
        rloo         (score - mean) · n / (n - 1)

    over the n responses of the group. A group of one keeps its score. A group of equal scores gets exactly 0: verl's
    float32 leaves rounding there.
    """
    n = np.bincount(group)
    mean = np.bincount(group, weights=score) / n
    centred = score - np.where(n > 1, mean, 0.0)[group]
    spread = np.sqrt(np.bincount(group, weights=centred**2) / np.maximum(n - 1, 1))
    centred[((n > 1) & (spread <= EQUAL_ADVANTAGES))[group]] = 0.0
    if estimator == "grpo":
        return centred / np.where(n > 1, spread + 1e-6, 1.0)[group]
    if estimator == "rloo":
        return centred * (n / np.maximum(n - 1, 1))[group]
    if estimator == "grpo-no-std":
        return centred
    raise ValueError(f"--advantage {estimator}: expected one of {', '.join(ADVANTAGES)}")


def weigh(
    rollouts: Rollouts,
    advantage: str = "grpo",
    resamples: int = 1000,
    seed: int = 0,
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> Weighing:
    """Weigh the responses of each step as one update, under every mode.

    Args:
        resamples: bootstrap resamples for each interval.
        on_step: called with the numbers of steps done and in all.
    """
    rng = np.random.default_rng(seed)
    value = advantages(rollouts.score, rollouts.group, advantage)
    rounded = zero_up_to_rounding(torch.from_numpy(np.abs(value)), torch.from_numpy(rollouts.group.astype(np.int64)))
    sign = np.where(rounded.numpy(), 0, np.sign(value)).astype(np.int64)
    response_step = rollouts.group_step[rollouts.group]
    token_weight = {mode: np.zeros(len(value)) for mode in ALL_MODES}  # per token, 1 for the batch's average token
    steps, sums_of_steps, groups_of_steps = {}, [], []
    every_step = np.unique(rollouts.group_step)
    by_step = np.split(
        np.argsort(response_step, kind="stable"),
        np.cumsum(np.bincount(np.searchsorted(every_step, response_step)))[:-1],
    )
    for done, (step, rows) in enumerate(zip(every_step.tolist(), by_step, strict=True), start=1):
        groups, local = np.unique(rollouts.group[rows], return_inverse=True)
        responses = fold(rollouts.length[rows], torch.from_numpy(local), sign[rows], value[rows])
        weights = response_weights(responses)
        sums = group_sums(responses, weights, REFERENCE)
        steps[step] = estimates(sums, resamples, rng)
        sums_of_steps.append(sums)
        groups_of_steps.append(groups)
        filled = responses.length > 0
        for mode, weight in weights.items():
            mean = responses.length.sum() / max(np.count_nonzero(filled), 1)
            token_weight[mode][rows[filled]] = weight[filled] / responses.length[filled] * mean
        on_step(done, len(every_step))
    sums = {name: np.concatenate([s[name] for s in sums_of_steps]) for name in sums_of_steps[0]}
    overall = estimates(sums, resamples, rng) if len(steps) > 1 else steps[int(every_step[0])]
    edges, counts = _histogram(rollouts.length, sign)
    decile_length, decile_weight = _deciles(rollouts.length, token_weight)
    return Weighing(
        advantage,
        overall,
        steps,
        most_tilted(rollouts, sums, np.concatenate(groups_of_steps)),
        edges,
        counts,
        decile_length,
        decile_weight,
        advise(overall),
    )


def estimates(sums: dict[str, np.ndarray], resamples: int, rng: np.random.Generator) -> dict[str, Estimate]:
    """Every statistic of these groups, with its interval; the same resamples serve all of them."""
    names, columns = list(sums), np.stack(list(sums.values()), axis=1)
    point = statistics(dict(zip(names, columns.sum(axis=0), strict=True)))
    resampled = np.concatenate([counts @ columns for counts in _resample(len(columns), resamples, rng)])
    spread = statistics(dict(zip(names, resampled.T, strict=True)))
    out = {}
    for name, value in point.items():
        known = spread[name][np.isfinite(spread[name])]
        low, high = np.quantile(known, [0.025, 0.975]) if len(known) and len(columns) > 1 else (np.nan, np.nan)
        out[name] = Estimate(float(value), float(low), float(high))
    return out


def _resample(groups: int, resamples: int, rng: np.random.Generator) -> Iterable[np.ndarray]:
    """How often each group is drawn in each resample: blocks [resamples of the block, groups] of bounded size."""
    block = max(1, (1 << 18) // groups)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = rng.integers(groups, size=(rows, groups)) + groups * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups).astype(np.float64)


def most_tilted(
    rollouts: Rollouts, sums: dict[str, np.ndarray], groups: np.ndarray, top: int = 10
) -> list[TiltedGroup]:
    """The groups in which a group's token mean moves most of the gradient to one sign, largest first."""
    each = statistics(sums)
    tilt = each["group-mean-token-mean/tilt"]
    order = np.argsort(-np.abs(np.nan_to_num(tilt)), kind="stable")[:top]
    return [
        TiltedGroup(
            int(rollouts.group_step[groups[i]]),
            rollouts.group_label[groups[i]],
            rollouts.group_place[groups[i]],
            int(sums["positive"][i]),
            int(sums["negative"][i]),
            float(each["length/positive"][i]),
            float(each["length/negative"][i]),
            float(each["seq-mean-token-mean/gradient_share_negative"][i]),
            float(each["group-mean-token-mean/gradient_share_negative"][i]),
            float(tilt[i]),
        )
        for i in order
        if abs(np.nan_to_num(tilt[i])) > 0
    ]


def advise(overall: dict[str, Estimate]) -> list[str]:
    """Plain sentences in the paper's terms: what length variation and the length gap do here."""
    tilt, starved = overall["token-mean/tilt"], overall["seq-mean-token-mean/long_to_short"]
    if not np.isfinite(tilt.value):
        return [
            "No group has responses of both signs: every advantage is 0 (or every group has one response). No aggregation "
            "has anything to balance; look at the rewards first."
        ]
    variation, ratio = overall["length_variation"], overall["length_gap/ratio"]
    gap_is_large = abs(tilt.value) >= TILT
    variation_is_large = starved.value <= STARVED
    signs = ("negative", "positive") if tilt.value > 0 else ("positive", "negative")
    share = overall[f"token-mean/gradient_share_{signs[0]}"].value
    fair = share - abs(tilt.value)
    sentences = []
    if gap_is_large:
        sentences.append(
            f"The length gap is large: negatives are {ratio.value:.2f} times as long as positives in mixed groups, and "
            f"token-mean gives the {signs[0]} responses {share:.0%} of the gradient weight where their advantages give them "
            f"{fair:.0%}. Here the paper finds token aggregation behind sequence aggregation."
        )
    if variation_is_large:
        sentences.append(
            f"Length variation is large (coefficient {_number(variation.value)} within a sign): under sequence-mean a token "
            f"of a long response weighs {starved.value:.2f} of one in a short response. Where the gap is small as well, the "
            "paper finds sequence aggregation behind token aggregation."
        )
    if gap_is_large or variation_is_large:
        sentences.append(
            f"balanced has a tilt of {overall['balanced/tilt'].value:+.1%}, and a token of a long response weighs "
            f"{overall['balanced/long_to_short'].value:.2f} of one in a short response. It moves "
            f"{overall['token-mean/moved'].value:.0%} of the gradient weight against token-mean and "
            f"{overall['seq-mean-token-mean/moved'].value:.0%} against sequence-mean."
        )
    else:
        sentences.append(
            f"Length gap and length variation are both small (tilt of token-mean {tilt.value:+.1%}, a token of a long "
            f"response weighs {starved.value:.2f} under sequence-mean): the aggregations nearly agree here."
        )
    if np.isfinite(tilt.low) and tilt.low <= 0 <= tilt.high:
        sentences.append(
            "The interval of token-mean's tilt contains 0: there are too few groups to tell its direction."
        )
    if (lone := overall["lone_responses"].value) >= 0.1:
        sentences.append(
            f"{lone:.0%} of the responses of mixed groups are alone with their sign. There balanced weighs them as "
            "sequence-mean does; larger groups make it matter less."
        )
    return sentences


def _number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "unknown"


def _histogram(length: np.ndarray, sign: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    edges = np.linspace(0, max(length.max(), 1), _BINS + 1)
    filled = length > 0
    return edges, {s: np.histogram(length[filled & (sign == s)], bins=edges)[0] for s in (-1, 0, 1)}


def _deciles(length: np.ndarray, token_weight: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Mean length, and the weight of an average token, in each tenth of the non-empty responses by length."""
    order = np.argsort(length, kind="stable")
    parts = [part for part in np.array_split(order[np.count_nonzero(length == 0) :], _DECILES) if len(part)]
    tokens = np.array([length[part].sum() for part in parts])
    return (
        np.array([length[part].mean() for part in parts]),
        {
            mode: np.array([(w[part] * length[part]).sum() for part in parts]) / tokens
            for mode, w in token_weight.items()
        },
    )
