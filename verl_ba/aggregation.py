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

The sign may change within a response; then a response belongs to several pools, by the share of its tokens
(`pool_mean_length_by_sign`), and the weight is the token's.

Shape suffixes: B responses (rows), T response tokens, S the signs of the advantage.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

MODES = ("balanced", "group-mean-token-mean")
"""The modes that this package adds to verl's own."""

ALL_MODES = (*MODES, "seq-mean-token-mean", "token-mean")
"""Every mode that `pool_mean_length` can express; the last two exist in verl already."""

SIGNS = (-1, 0, 1)
"""The signs of an advantage, in the order in which `count_by_sign` and `pool_mean_length_by_sign` have columns."""

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
            multi-turn rollout), see `pool_mean_length_by_sign`. None: every row is a response.

    Returns:
        float64 [B] on the CPU [tokens]; 0 for an empty response. Σ_i length_i / result_i over the non-empty rows is
        the number of non-empty rows, for every mode.

    Raises:
        ValueError: unknown mode, arguments of different lengths, a negative length, or a sign outside {-1, 0, 1}.

    Source: arXiv 2605.04077; sum rule and sessions are this package's.
    """
    length = _vector("length_B", length_B, torch.float64)
    sign = _vector("sign_B", sign_B, torch.int64)
    _one_entry_each(length_B=length, group_B=group_B, sign_B=sign, session_B=session_B)
    if not set(sign.unique().tolist()) <= set(SIGNS):
        raise ValueError(f"sign_B: expected -1, 0 or 1; got {sorted(set(sign.tolist()))}")
    count_BS = torch.zeros(len(length), len(SIGNS), dtype=torch.float64)
    count_BS.scatter_(1, sign[:, None] + 1, length[:, None])
    return pool_mean_length_by_sign(mode, count_BS, group_B, session_B).sum(1)


def pool_mean_length_by_sign(
    mode: str, count_BS: torch.Tensor, group_B: Labels, session_B: Labels | None = None
) -> torch.Tensor:
    """The token-level form: each response's ℓ̄ for its tokens of negative, zero and positive advantage.

    For advantages whose sign changes within a response (a critic, process rewards, discounting). A response takes part
    in the pool of each sign by the share of its tokens that have it; with T_i = Σ_s count_is, its whole length,

        ℓ̄_pool = Σ_{(i, s) in pool} count_is / Σ_{(i, s) in pool} (count_is / T_i)

    so under `balanced` a token of sign s has ℓ̄ = T_s/n_s: the group's tokens of sign s, over the group's responses
    counted by their shares. Where each response has one sign this is `pool_mean_length`, to the bit.

    With sessions, i runs over the sessions: count_is is the sum over the session's rows, T_i the session's length.
    Results are then scaled by (non-empty sessions)/(non-empty rows) of the batch, so that the sum rule holds over rows.

    Args:
        mode: one of `ALL_MODES`. Only `balanced` depends on signs.
        count_BS: `count_by_sign`, valid tokens of each response by the sign of their advantage [tokens].
        group_B, session_B: as in `pool_mean_length`. A session's rows may differ in sign.

    Returns:
        float64 [B, S] on the CPU [tokens], in the order of `SIGNS`; 0 where the response has no such token.
        Σ_is count_is / result_is is the number of non-empty rows, for every mode.

    Raises:
        ValueError: unknown mode, arguments of different lengths, or a negative count.
    """
    if mode not in ALL_MODES:
        raise ValueError(f"mode: expected one of {', '.join(ALL_MODES)}; got {mode!r}")
    if count_BS.ndim != 2 or count_BS.shape[1] != len(SIGNS):
        raise ValueError(f"count_BS: expected [B, {len(SIGNS)}], one column per sign; got {list(count_BS.shape)}")
    _one_entry_each(count_BS=count_BS, group_B=group_B, session_B=session_B)
    count_BS = count_BS.detach().to(device="cpu", dtype=torch.float64)
    if len(count_BS) == 0:
        return count_BS
    if not bool((count_BS >= 0).all()):
        raise ValueError(f"lengths are counts of tokens, expected >= 0; got {count_BS.min().item():g}")

    # From here on i is a response: a row, or a session into which its rows are folded.
    group, count_is, row_of, scale = _codes("group_B", group_B), count_BS, slice(None), 1.0
    if session_B is not None:
        session = _codes("session_B", session_B)
        row_of = _renumber(group * (int(session.max()) + 1) + session)
        sessions = int(row_of.max()) + 1
        count_is = torch.zeros(sessions, len(SIGNS), dtype=torch.float64).index_add_(0, row_of, count_BS)
        group = torch.zeros(sessions, dtype=torch.int64).scatter_(0, row_of, group)
        scale = int(count_is.any(1).sum()) / max(1, int(count_BS.any(1).sum()))
    share_is = count_is / count_is.sum(1, keepdim=True).clamp(min=1)  # exactly 1 where a response has one sign

    pool_is = {
        "balanced": group[:, None] * len(SIGNS) + torch.arange(len(SIGNS)),
        "group-mean-token-mean": group[:, None],
        "seq-mean-token-mean": torch.arange(len(group))[:, None],
        "token-mean": torch.zeros(1, 1, dtype=torch.int64),
    }[mode].expand_as(count_is)
    tokens, responses = (torch.bincount(pool_is.flatten(), weights=v.flatten()) for v in (count_is, share_is))
    mean_is = (tokens / responses)[pool_is]  # nan in an empty pool, which no token reads
    return torch.where(count_BS > 0, mean_is[row_of] * scale, 0.0)


def count_by_sign(mask_BT: torch.Tensor, advantage_BT: torch.Tensor) -> torch.Tensor:
    """Valid tokens of each response with negative, zero and positive advantage: int64 [B, S], in the order of `SIGNS`.

    Both padded, or both nested (jagged) with the same offsets.

    Raises ValueError where an advantage at a valid token is nan or inf; at masked positions anything may stand.
    """
    mask, advantage = unpadded(mask_BT).bool(), unpadded(advantage_BT)
    if not bool((advantage.isfinite() | ~mask).all()):
        raise ValueError("advantages: nan or inf at a valid token; check the rewards of this step")
    sides = (mask, mask & (advantage < 0), mask & (advantage > 0))
    tokens, negative, positive = (row_sum(side, mask_BT) for side in sides)
    return torch.stack([negative, tokens - negative - positive, positive], dim=1).long()


def unpadded(rows: torch.Tensor) -> torch.Tensor:
    """The values of a nested tensor, row after row; a padded one as it is."""
    return rows.values() if rows.is_nested else rows


def row_sum(value: torch.Tensor, like: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sum over each row: [B]. `value` is `unpadded`, with the rows of `like`.

    Padding nested rows would take three times as long. float32 counts exactly up to 2^24, and sums booleans ten times as
    fast as int64.
    """
    if like.is_nested:
        return torch.segment_reduce(value.to(dtype), "sum", lengths=like.offsets().diff(), unsafe=True)
    return value.sum(-1, dtype=dtype)


def token_mean_length(mean_length_BS: torch.Tensor, advantage_BT: torch.Tensor) -> torch.Tensor:
    """Each token's entry of `pool_mean_length_by_sign`, looked up by the sign of its own advantage: [B, T] [tokens]."""
    column_BT = 1 + (advantage_BT > 0).long() - (advantage_BT < 0).long()  # a nan, at a masked position, reads zero's
    return mean_length_BS.gather(1, column_BT)


def aggregate(
    token_loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mean_length_B: torch.Tensor,
    num_responses: int,
    dp_size: int = 1,
) -> torch.Tensor:
    """This micro-batch's part of the mini-batch loss, as one differentiable scalar.

        sum(token_loss[i, t] / mean_length[i] for i, t where mask[i, t]) / num_responses * dp_size

    In the token-level form, mean_length[i, t].

    A partial sum: over all micro-batches and ranks of a mini-batch the parts add up to L, each rank's times
    1/dp_size, because data-parallel training averages the ranks' gradients.

    Args:
        token_loss_BT: loss of each token, already negated. Masked positions may hold inf or nan: they matter neither
            in the value nor in the gradient.
        mask_BT: response mask, bool or 0/1.
        mean_length_B: `pool_mean_length` of these rows [tokens], or `token_mean_length` of their tokens, [B, T]; 0
            gives an empty response the weight 0.
        num_responses: B of the whole mini-batch over all ranks (verl: `global_batch_size`), empty responses included.
        dp_size: number of data-parallel ranks whose gradients are averaged.

    Raises:
        ValueError: shapes that do not belong together, or num_responses < 1.
    """
    shape = mask_BT.shape
    if token_loss_BT.ndim != 2 or token_loss_BT.shape != shape or mean_length_B.shape not in (shape, shape[:1]):
        raise ValueError(
            "aggregate expects token_loss [B, T], mask [B, T] and mean_length [B] or [B, T]; "
            f"got {list(token_loss_BT.shape)}, {list(shape)}, {list(mean_length_B.shape)}"
        )
    if num_responses < 1:
        raise ValueError(f"num_responses: expected the size of the mini-batch, at least 1; got {num_responses}")
    # `where`, not a product: inf · 0 is nan, and a product's gradient would carry it too.
    loss = torch.where(mask_BT.bool(), token_loss_BT, 0.0)
    if mean_length_B.ndim == 1:
        loss = loss.sum(dim=-1)
    mean_length_B = mean_length_B.to(device=loss.device, dtype=loss.dtype)
    weight = torch.where(mean_length_B > 0, mean_length_B.reciprocal(), 0.0)
    return (loss * weight).sum() / num_responses * dp_size


def _vector(name: str, values: Sequence[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A 1-d CPU tensor of the argument's values."""
    vector = torch.as_tensor(values).detach().to(device="cpu", dtype=dtype)
    if vector.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, one entry per response; got shape {list(vector.shape)}")
    return vector


def _one_entry_each(**columns: Labels | None) -> None:
    sizes = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"one entry per response expected in each argument; got {sizes}")


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
