"""What each aggregation does with one batch of responses: numbers for the log, and for `verl-ba analyze`.

For every mode a response weighs w_i = T_i / ℓ̄_pool(i), so that an average response weighs 1 (`loss_agg` has the formula
and the pools). Its part in the policy gradient is |A_i|·w_i; a *gradient share* is a part of the sum of these. All of it
follows from four columns: length, group, sign and size of the advantage.

The batch is one whole update. verl's token-mean is taken over each mini-batch of it, so with several mini-batches an
update its row is what one mini-batch of the whole batch would do.

Shape suffixes: B rows of the batch, R responses (rows of one session folded), G groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl_ba.aggregation import ALL_MODES, pool_mean_length, pool_mean_length_by_sign
from verl_ba.loss_agg import SIGNS, Labels, number, response_of_row
from verl_ba.metrics.definitions import PREFIX

EQUAL_ADVANTAGES = 1e-6
"""Spread of the advantages of a group below which it counts as one without variance: float rounding of equal rewards."""


def balance_metrics(
    length_B: Sequence[int] | torch.Tensor,
    group_B: Labels,
    sign_B: Sequence[int] | torch.Tensor,
    advantage_B: Sequence[float] | torch.Tensor | None = None,
    session_B: Labels | None = None,
    *,
    active_mode: str,
) -> dict[str, float]:
    """Every metric of `METRICS` for one update, under the active mode and under each of the four.

    Args:
        length_B, group_B, sign_B, session_B: as in `aggregation.pool_mean_length`, from whole groups.
        advantage_B: advantage of each response; only its size is used. None: 1 for each response with a sign.
        active_mode: one of `ALL_MODES`, or a mode of your own; its numbers appear again under `balance/active/`.

    Returns:
        `balance/<name>` -> value. A number that the batch does not define (a gap without mixed groups) is absent.

    Raises:
        ValueError: as `pool_mean_length`; or an advantage_B of the wrong length.
    """
    group = number("group_B", group_B)
    session = None if session_B is None else number("session_B", session_B)
    row_mean_B = pool_mean_length(active_mode, length_B, group, sign_B, session).numpy()  # checks the arguments
    responses = fold(length_B, group, sign_B, advantage_B, session)
    weights = response_weights(responses, dict.fromkeys((*ALL_MODES, active_mode)))
    values = statistics_of(responses, weights, active_mode)
    filled = responses.length > 0
    for mode, weight_R in weights.items() if filled.any() else ():
        values[f"{mode}/weight_max"] = weight_R[filled].max()
        values[f"{mode}/weight_min"] = weight_R[filled].min()
    values |= {
        name.replace(active_mode, "active", 1): value
        for name, value in values.items()
        if name.startswith(f"{active_mode}/")
    }
    row_length_B = np.asarray(length_B, dtype=np.float64)
    rows = np.count_nonzero(row_length_B)
    weight_sum = (row_length_B[row_length_B > 0] / row_mean_B[row_length_B > 0]).sum()
    values["active/weight_residual"] = abs(weight_sum - rows) / max(rows, 1)
    return {PREFIX + name: float(value) for name, value in values.items() if np.isfinite(value)}


@dataclass(frozen=True)
class Responses:
    """Columns of a batch in which every row is one response; float64 and int64 [R]."""

    length: np.ndarray  # [tokens]
    group: np.ndarray  # 0 … G-1
    sign: np.ndarray  # of the advantage
    size: np.ndarray  # |advantage|


def fold(length_B, group_B: torch.Tensor, sign_B, advantage_B=None, session_B: torch.Tensor | None = None) -> Responses:
    """The responses of a batch: rows of one group and session become one, as long as all of them together."""
    length = np.asarray(length_B, dtype=np.float64)
    sign = np.asarray(sign_B, dtype=np.int64)
    size = np.abs(sign if advantage_B is None else np.asarray(advantage_B)).astype(np.float64)
    if size.shape != length.shape:
        raise ValueError(f"advantage_B: expected one entry per response, {len(length)}; got shape {list(size.shape)}")
    group = group_B.numpy()
    if session_B is not None:
        # An empty row's advantage means nothing: rows with tokens first, and `unique` takes the first of each response.
        order = np.argsort(length == 0, kind="stable")
        response = response_of_row(group_B, session_B).numpy()[order]
        _, first, inverse = np.unique(response, return_index=True, return_inverse=True)
        first = order[first]
        row_length = length[order]
        length = np.bincount(inverse, weights=row_length)
        group, sign = group[first], sign[first]
        size = np.bincount(inverse, weights=row_length * size[order]) / np.maximum(length, 1)
    return Responses(length, group, sign, np.where(sign == 0, 0.0, size))


def response_weights(responses: Responses, modes: Iterable[str] = ALL_MODES) -> dict[str, np.ndarray]:
    """w_i = T_i / ℓ̄_pool(i) [R] under each mode; 0 for an empty response, 1 on average over the others."""
    group, sign = torch.from_numpy(responses.group), torch.from_numpy(responses.sign)
    count_RS = torch.zeros(len(group), len(SIGNS), dtype=torch.float64)
    count_RS.scatter_(1, sign[:, None] + 1, torch.from_numpy(responses.length)[:, None])
    filled = responses.length > 0
    return {
        mode: np.divide(
            responses.length,
            pool_mean_length_by_sign(mode, count_RS, group).sum(1).numpy(),
            out=np.zeros_like(responses.length),
            where=filled,
        )
        for mode in modes
    }


def statistics_of(responses: Responses, weights: Mapping[str, np.ndarray], reference: str) -> dict[str, np.ndarray]:
    """The metrics of a batch under any weights: those of the modes, or of a rule that is not a mode.

    Args:
        responses: the batch, as `fold` returns it.
        weights: the name of each rule and its weights [R]; `token-mean` must be among them, since a token's weight is
            counted against it.
        reference: the rule with which `<rule>/moved` compares.

    Returns:
        name -> value, without the prefix; nan where the batch does not define it.
    """
    return statistics({name: column.sum() for name, column in group_sums(responses, weights, reference).items()})


def group_sums(responses: Responses, weights: Mapping[str, np.ndarray], reference: str) -> dict[str, np.ndarray]:
    """Columns over groups [G] whose sums over any set of groups determine `statistics` of that set.

    The weights stay those of the whole batch, so that groups can be resampled (a bootstrap over prompts).
    `reference` is the mode that `moved` compares with.
    """
    length, group, sign, size = responses.length, responses.group, responses.sign, responses.size
    groups = int(group.max(initial=-1)) + 1
    filled = length > 0

    def per_group(value_R) -> np.ndarray:
        return np.bincount(group, weights=value_R, minlength=groups)

    def per_cell(value_R) -> np.ndarray:  # [G, 3], columns: negative, zero, positive
        return np.bincount(group * 3 + sign + 1, weights=value_R, minlength=groups * 3).reshape(groups, 3)

    count, total = per_cell(filled), per_cell(length)
    mean = total / np.maximum(count, 1)
    deviation = np.where(filled, length / np.maximum(mean[group, sign + 1], 1) - 1, 0.0)
    known = count.any(axis=1)  # not only of empty responses, as verl's padding rows are
    mixed = (count[:, 0] > 0) & (count[:, 2] > 0)
    lone = (count[:, [0, 2]] == 1).sum(axis=1)
    short, long = (
        (length <= np.quantile(length[filled], 0.25), length >= np.quantile(length[filled], 0.75))
        if filled.any()
        else (filled, filled)
    )
    sums = {
        "groups": known,
        "responses": count.sum(axis=1),
        "empty": per_group(~filled),
        "mixed": mixed,
        "no_variance": known & _without_variance(group, np.where(filled, sign * size, np.nan), groups),
        "lone": lone * mixed,
        "in_mixed": (count[:, 0] + count[:, 2]) * mixed,
        "positive": count[:, 2],
        "negative": count[:, 0],
        "zero": count[:, 1],
        "positive_tokens": total[:, 2],
        "negative_tokens": total[:, 0],
        "positive_mean": mean[:, 2] * mixed,
        "negative_mean": mean[:, 0] * mixed,
        "squares": per_group(deviation**2),
        "degrees": np.maximum(count - 1, 0).sum(axis=1),
        "positive_size": per_group(size * (filled & (sign > 0))),
        "negative_size": per_group(size * (filled & (sign < 0))),
    }
    for mode, weight in weights.items():
        sums |= {
            f"{mode}/positive": per_group(size * weight * (sign > 0)),
            f"{mode}/negative": per_group(size * weight * (sign < 0)),
            f"{mode}/short": per_group(weight * short),
            f"{mode}/long": per_group(weight * long),
            f"{mode}/moved": per_group(size * np.abs(weight - weights[reference])) / 2,
        }
    sums["reference"] = sums[f"{reference}/positive"] + sums[f"{reference}/negative"]
    return {name: column.astype(np.float64) for name, column in sums.items()}


def statistics(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The metrics that are functions of `group_sums`; each sum a number or an array (of resamples), nan if undefined."""
    s = {name: np.asarray(value, dtype=np.float64) for name, value in sums.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        fair = s["negative_size"] / (s["negative_size"] + s["positive_size"])
        values = {
            "responses": s["responses"],
            "empty_responses": s["empty"],
            "groups": s["groups"],
            "groups_mixed": s["mixed"] / s["groups"],
            "groups_without_variance": s["no_variance"] / s["groups"],
            "lone_responses": s["lone"] / s["in_mixed"],
            "response_share/positive": s["positive"] / s["responses"],
            "response_share/negative": s["negative"] / s["responses"],
            "response_share/zero": s["zero"] / s["responses"],
            "length/positive": s["positive_tokens"] / s["positive"],
            "length/negative": s["negative_tokens"] / s["negative"],
            "length_gap/tokens": (s["negative_mean"] - s["positive_mean"]) / s["mixed"],
            "length_gap/ratio": s["negative_mean"] / s["positive_mean"],
            "length_variation": np.sqrt(s["squares"] / s["degrees"]),
        }
        for mode in (name.removesuffix("/moved") for name in s if name.endswith("/moved")):
            gradient = s[f"{mode}/positive"] + s[f"{mode}/negative"]
            negative = s[f"{mode}/negative"] / gradient
            long, short = (s[f"{mode}/{part}"] / s[f"token-mean/{part}"] for part in ("long", "short"))
            values |= {
                f"{mode}/gradient_share_positive": s[f"{mode}/positive"] / gradient,
                f"{mode}/gradient_share_negative": negative,
                f"{mode}/tilt": negative - fair,
                f"{mode}/long_to_short": long / short,
                f"{mode}/moved": s[f"{mode}/moved"] / s["reference"],
            }
    return values


def _without_variance(group: np.ndarray, advantage: np.ndarray, groups: int) -> np.ndarray:
    """Whether the advantages of each group are all equal, nan left out."""
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    known = ~np.isnan(advantage)
    np.minimum.at(low, group[known], advantage[known])
    np.maximum.at(high, group[known], advantage[known])
    return high - low <= EQUAL_ADVANTAGES
