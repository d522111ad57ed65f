"""The lengths and weights of every mode as functions of plain columns, with checked arguments: no verl, no batch.

`loss_agg` is the mathematics. Here are its functions for whoever has lengths, groups and signs, as the metrics, `verl-ba
analyze` and the studies have, and the two modes of verl's own that the same formula expresses:

    seq-mean-token-mean     pool: the response alone     "sequence aggregation"
    token-mean              pool: the whole batch        verl's default

Shape suffixes: B responses (rows), S the signs of the advantage.
"""

from collections.abc import Sequence

import torch

from verl_ba.loss_agg import (
    LOSS_AGG_REGISTRY,
    SIGNS,
    Labels,
    MeanLength,
    aggregate,
    mean_length_of_pools,
    mean_length_of_rows,
    number,
)

__all__ = ["ALL_MODES", "MODES", "SIGNS", "Labels", "aggregate", "pool_mean_length", "pool_mean_length_by_sign"]

MODES = ("balanced", "group-mean-token-mean")
"""The modes that this package adds to verl's own."""

VERLS_MODES: dict[str, MeanLength] = {
    "seq-mean-token-mean": lambda count_is, group: mean_length_of_pools(
        count_is, torch.arange(len(group))[:, None].expand_as(count_is)
    ),
    "token-mean": lambda count_is, group: mean_length_of_pools(
        count_is, torch.zeros(1, 1, dtype=torch.int64).expand_as(count_is)
    ),
}
"""Two modes of verl's own as functions of the kind that `register_loss_agg` takes; verl itself computes them otherwise."""

ALL_MODES = (*MODES, *VERLS_MODES)
"""The four modes that are compared everywhere; the last two exist in verl already."""


def pool_mean_length(
    mode: str,
    length_B: Sequence[int] | torch.Tensor,
    group_B: Labels,
    sign_B: Sequence[int] | torch.Tensor,
    session_B: Labels | None = None,
) -> torch.Tensor:
    """Mean response length of each response's pool: the ℓ̄ of `loss_agg`'s formula.

    In plain Python, without sessions:

        pool = [j for j in range(B) if same_pool(mode, i, j) and length[j] > 0]
        mean_length[i] = sum(length[j] for j in pool) / len(pool) if length[i] > 0 else 0

    It must see whole groups: call it once per update, before the batch is split over ranks, mini- or
    micro-batches. The result follows each row through any split.

    Args:
        mode: one of `ALL_MODES`, or a mode of your own (`register_loss_agg`).
        length_B: valid tokens of each response [tokens], from the final response mask.
        group_B: the prompt each response was sampled from (verl: `uid`); any hashables, or an integer tensor.
        sign_B: sign of the response's advantage, -1, 0 or 1. Zero is a sign of its own.
        session_B: rows with the same group and the same session are one response that became several rows (a
            multi-turn rollout), see `pool_mean_length_by_sign`. None: every row is a response.

    Returns:
        float64 [B] on the CPU [tokens]; 0 for an empty response. Σ_i length_i / result_i over the non-empty rows is
        the number of non-empty rows, for each of `ALL_MODES`.

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
    in the pool of each sign by the share of its tokens that have it (`loss_agg.mean_length_of_pools`), so under
    `balanced` a token of sign s has ℓ̄ = T_s/n_s: the group's tokens of sign s, over the group's responses counted by
    their shares. Where each response has one sign this is `pool_mean_length`, to the bit.

    With sessions, a response is a session: its rows are folded, and the results scaled by (non-empty sessions)/(non-empty
    rows) of the batch, so that the sum rule holds over rows.

    Args:
        mode: one of `ALL_MODES`, or a mode of your own. Of the four, only `balanced` depends on signs.
        count_BS: `loss_agg.count_by_sign`, valid tokens of each response by the sign of their advantage [tokens].
        group_B, session_B: as in `pool_mean_length`. A session's rows may differ in sign.

    Returns:
        float64 [B, S] on the CPU [tokens], in the order of `SIGNS`; 0 where the response has no such token.
        Σ_is count_is / result_is is the number of non-empty rows, for each of `ALL_MODES`.

    Raises:
        ValueError: unknown mode, arguments of different lengths, or a negative count.
    """
    mean_length = LOSS_AGG_REGISTRY.get(mode) or VERLS_MODES.get(mode)
    if mean_length is None:
        raise ValueError(
            f"mode: expected one of {', '.join(dict.fromkeys((*ALL_MODES, *LOSS_AGG_REGISTRY)))}; got {mode!r}"
        )
    if count_BS.ndim != 2 or count_BS.shape[1] != len(SIGNS):
        raise ValueError(f"count_BS: expected [B, {len(SIGNS)}], one column per sign; got {list(count_BS.shape)}")
    _one_entry_each(count_BS=count_BS, group_B=group_B, session_B=session_B)
    if len(count_BS) and not bool((count_BS >= 0).all()):
        raise ValueError(f"lengths are counts of tokens, expected >= 0; got {count_BS.min().item():g}")
    session = None if session_B is None else number("session_B", session_B)
    return mean_length_of_rows(mean_length, count_BS, number("group_B", group_B), session)


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
