"""The mathematics of loss aggregation: torch only, no verl.

Every mode is one formula, with a different *pool* of responses:

    L = (1/B) · Σ_i (1 / ℓ̄_pool(i)) · Σ_t m_it · ℓ_it

where i runs over the B responses of the mini-batch, m is the response mask, ℓ the per-token loss and
ℓ̄_pool(i) the mean length [tokens] of the non-empty responses in i's pool. The pools:

    seq-mean-token-mean     the response alone                      "sequence aggregation"
    balanced                same group, same sign of the advantage  Balanced Aggregation, arXiv 2605.04077
    group-mean-token-mean   same group                              "token aggregation" of the same paper
    token-mean              the whole batch                         verl's default

The paper writes `balanced` for one group of G responses, n₊ with positive and n₋ with negative advantage, as
(n₊/G)·tokenmean₊ + (n₋/G)·tokenmean₋. That is the same sum: tokenmean₊ = Σ₊ ℓ / (n₊·ℓ̄₊).

Shape suffixes: B responses (rows), T response tokens, N tokens of a flattened batch.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch

MODES = ("balanced", "group-mean-token-mean")
"""The modes that this package adds to verl's own."""

ALL_MODES = (*MODES, "seq-mean-token-mean", "token-mean")
"""Every mode that `pool_mean_length` can express; the last two exist in verl already."""

Labels = Sequence[Hashable] | torch.Tensor


def pool_mean_length(
    mode: str,
    length_B: Sequence[int] | torch.Tensor,
    group_B: Labels,
    sign_B: Sequence[int] | torch.Tensor,
    session_B: Labels | None = None,
) -> torch.Tensor:
    """Mean response length of each response's pool: the ℓ̄ of the formula above.

    In plain Python, without sessions:

        pool = [j for j in range(B) if same_pool(mode, i, j) and length[j] > 0]
        mean_length[i] = sum(length[j] for j in pool) / len(pool) if length[i] > 0 else 0

    It must see whole groups: call it once per update, before the batch is split over ranks, mini- or
    micro-batches. The result follows each row through any split.

    Args:
        mode: one of `ALL_MODES`.
        length_B: valid tokens of each response [tokens], from the final response mask.
        group_B: the prompt each response was sampled from (verl: `uid`); any hashables, or an integer tensor.
        sign_B: sign of the response's advantage, -1, 0 or 1. Zero is a sign of its own.
        session_B: rows with the same group and the same session are one response that became several rows (a
            multi-turn rollout): its length is the sum over its rows. None: every row is a response.

    Returns:
        float64 [B] on the CPU [tokens]; 0 for an empty response. Σ_i length_i / result_i over the non-empty rows is
        the number of non-empty rows, for every mode (with sessions: lengths are averaged over sessions and then
        scaled by sessions/rows of the batch, so that the rule holds over rows).

    Raises:
        ValueError: unknown mode, arguments of different lengths, a negative length, a sign outside {-1, 0, 1}, or
            non-empty rows of one session with different signs.

    Source: arXiv 2605.04077; sum rule and sessions are this package's.
    """
    if mode not in ALL_MODES:
        raise ValueError(f"mode: expected one of {', '.join(ALL_MODES)}; got {mode!r}")
    length = _vector("length_B", length_B, torch.float64)
    sign = _vector("sign_B", sign_B, torch.int64)
    group = _codes("group_B", group_B)
    session = torch.arange(len(length)) if session_B is None else _codes("session_B", session_B)
    sizes = {"length_B": len(length), "group_B": len(group), "sign_B": len(sign), "session_B": len(session)}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"one entry per response expected in each argument; got {sizes}")
    if len(length) == 0:
        return length
    if not bool((length >= 0).all()):
        raise ValueError(f"length_B: lengths are counts of tokens, expected >= 0; got {length.min().item():g}")
    if int(sign.abs().max()) > 1:
        raise ValueError(f"sign_B: expected -1, 0 or 1; got {sorted(set(sign.tolist()))}")

    filled = length > 0
    if session_B is None:
        session_length, session_group, session_sign = length, group, sign
    else:
        # Fold the rows of a session into one response, compute there, and unfold at the end.
        session = _renumber(group * (int(session.max()) + 1) + session)
        session_length = _sum_by(session, length)
        session_group = _spread(session, group)
        session_sign = _session_sign(session, sign, filled)

    pool = {
        "balanced": session_group * 3 + session_sign + 1,
        "group-mean-token-mean": session_group,
        "seq-mean-token-mean": torch.arange(len(session_length)),
        "token-mean": torch.zeros_like(session_group),
    }[mode]
    session_filled = session_length > 0
    # Lengths are whole numbers far below 2^53, so these float64 sums are exact and independent of the order of rows.
    count = _sum_by(pool, session_filled.double())
    mean = _sum_by(pool, session_length) / count.clamp(min=1)
    if session_B is None:
        return torch.where(filled, mean[pool], 0.0)
    sessions_per_row = session_filled.sum().double() / filled.sum().clamp(min=1)
    return torch.where(filled, mean[pool][session] * sessions_per_row, 0.0)


def aggregate(
    token_loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mean_length_B: torch.Tensor,
    num_responses: int,
    dp_size: int = 1,
) -> torch.Tensor:
    """This micro-batch's part of the mini-batch loss, as one differentiable scalar.

        sum(token_loss[i, t] / mean_length[i] for i, t where mask[i, t]) / num_responses * dp_size

    A partial sum: over all micro-batches and ranks of a mini-batch the parts add up to L, each rank's times
    1/dp_size, because data-parallel training averages the ranks' gradients.

    Args:
        token_loss_BT: loss of each token, already negated. Masked positions may hold inf or nan: they matter neither
            in the value nor in the gradient.
        mask_BT: response mask, bool or 0/1.
        mean_length_B: `pool_mean_length` of these rows [tokens]; 0 gives an empty response the weight 0.
        num_responses: B of the whole mini-batch over all ranks (verl: `global_batch_size`), empty responses included.
        dp_size: number of data-parallel ranks whose gradients are averaged.

    Raises:
        ValueError: shapes that do not belong together, or num_responses < 1.
    """
    if token_loss_BT.ndim != 2 or mask_BT.shape != token_loss_BT.shape or mean_length_B.shape != mask_BT.shape[:1]:
        raise ValueError(
            "aggregate expects token_loss [B, T], mask [B, T] and mean_length [B]; "
            f"got {list(token_loss_BT.shape)}, {list(mask_BT.shape)}, {list(mean_length_B.shape)}"
        )
    if num_responses < 1:
        raise ValueError(f"num_responses: expected the size of the mini-batch, at least 1; got {num_responses}")
    # `where`, not a product: inf · 0 is nan, and a product's gradient would carry it too.
    row_sum_B = torch.where(mask_BT.bool(), token_loss_BT, 0.0).sum(dim=-1)
    mean_length_B = mean_length_B.to(device=row_sum_B.device, dtype=row_sum_B.dtype)
    weight_B = torch.where(mean_length_B > 0, mean_length_B.reciprocal(), 0.0)
    return (row_sum_B * weight_B).sum() / num_responses * dp_size


def _vector(name: str, values: Sequence[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A 1-d CPU tensor of the argument's values."""
    vector = torch.as_tensor(values).detach().to(device="cpu", dtype=dtype)
    if vector.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, one entry per response; got shape {list(vector.shape)}")
    return vector


def _codes(name: str, labels: Labels) -> torch.Tensor:
    """Number the labels 0, 1, … int64 [B]; equal labels get equal numbers.

    A dictionary, not a sort: a million string ids take a tenth of a second, and the loop runs in C.
    """
    if isinstance(labels, torch.Tensor):
        if labels.is_floating_point() or labels.ndim != 1:
            raise ValueError(f"{name}: expected a 1-d integer tensor or hashables; got {labels.dtype} {labels.ndim}-d")
        return _renumber(labels.detach().cpu())
    tolist = getattr(labels, "tolist", None)
    labels = tolist() if tolist else labels  # the items of a numpy array hash slowly
    number: defaultdict[Hashable, int] = defaultdict()
    number.default_factory = number.__len__  # an unseen label gets the next number
    return torch.tensor(list(map(number.__getitem__, labels)), dtype=torch.int64)


def _renumber(code_B: torch.Tensor) -> torch.Tensor:
    return torch.unique(code_B, return_inverse=True)[1]


def _sum_by(code_B: torch.Tensor, value_B: torch.Tensor) -> torch.Tensor:
    return torch.bincount(code_B, weights=value_B)


def _spread(session_B: torch.Tensor, value_B: torch.Tensor) -> torch.Tensor:
    """A value that all rows of a session share, per session."""
    out = torch.zeros(int(session_B.max()) + 1, dtype=value_B.dtype)
    return out.scatter_(0, session_B, value_B)


def _session_sign(session_B: torch.Tensor, sign_B: torch.Tensor, filled_B: torch.Tensor) -> torch.Tensor:
    """The sign of each session's non-empty rows, which must agree (an empty row's advantage means nothing)."""
    session_f, sign_f = session_B[filled_B], sign_B[filled_B]
    sign = torch.zeros(int(session_B.max()) + 1, dtype=torch.int64).scatter_(0, session_f, sign_f)
    wrong = sign[session_f] != sign_f
    if bool(wrong.any()):
        raise ValueError(
            f"session_B: {int(torch.unique(session_f[wrong]).numel())} session(s) hold rows whose advantages differ in "
            "sign; a session is one response and needs one advantage. Use an advantage estimator that gives every row "
            "of a rollout the same advantage (algorithm.adv_estimator=grpo)"
        )
    return sign
