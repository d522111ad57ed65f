"""Loss aggregations that divide by lengths taken from whole groups. Imports torch and the standard library only.

Every mode is one formula, with a different *pool* of responses:

    L = (1/B) · Σ_i (1 / ℓ̄_pool(i)) · Σ_t m_it · ℓ_it

where i runs over the B responses of the mini-batch, m is the response mask, ℓ the per-token loss and ℓ̄_pool(i) the mean
length [tokens] of the responses in i's pool that are not empty. Two modes are registered here:

    balanced                pool: same prompt, same sign of the advantage   Balanced Aggregation, arXiv 2605.04077
    group-mean-token-mean   pool: same prompt                               "token aggregation" of the same paper

The paper writes `balanced` for one prompt with G responses, n₊ with positive and n₋ with negative advantage, as
(n₊/G)·tokenmean₊ + (n₋/G)·tokenmean₋. That is the same sum: tokenmean₊ = Σ₊ ℓ / (n₊·ℓ̄₊).

The responses of a prompt are scattered over ranks, mini-batches and micro-batches, so the lengths are taken once:

    in `update_actor`, where each rank has its whole share   `gather` the rows of all ranks; `column`: one ℓ̄ per row,
                                                             which goes into the batch and follows the row
    in the loss of each micro-batch                          `loss_agg_info`: the column, for `agg_loss`, which divides
                                                             by it in `agg_registered_loss`

The same file, byte for byte, is `verl_ba/loss_agg.py` in the plugin and `verl/trainer/ppo/loss_agg.py` in a patched verl.

Shape suffixes: B responses (rows of the batch), T response tokens, S the signs of the advantage; i in place of B where rows
of one rollout have become one response.
"""

import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

SIGNS = (-1, 0, 1)
"""The signs of an advantage, in the order in which tensors of shape [B, S] have columns."""

COLUMN = "pool_mean_length"
"""Name of the column in the batch, of its entry in `global_batch_info`, and of the argument of `agg_loss`."""

FLOOR = "zero_advantage"
"""Name of the column with the largest |advantage| that counts as zero in each row."""

ROUNDING = 1e-5
"""The part of a group's largest |advantage| up to which an advantage is zero.

An advantage is a difference of rewards, (r - mean) / std, in float32. Where the reward is the mean, rounding leaves about
1e-7 of the rewards' size: rewards .1, .3 and six times .2 give advantages -1.87, 1.87 and six times -2.8e-7. One part in
100,000 covers rewards that are up to some fifty times as large as their spread in the group. A response that is really this
near to the mean adds nothing to the gradient; with rewards 0 and 1 there is none in groups of fewer than 100,000.
"""

Labels = Sequence[Hashable] | torch.Tensor
MeanLength = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# --------------------------------------------------------------------------------------------------------------------
# The registry
# --------------------------------------------------------------------------------------------------------------------

LOSS_AGG_REGISTRY: dict[str, MeanLength] = {}
"""Every registered `loss_agg_mode`; verl's own modes are not in it."""

VERL_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""The modes that `agg_loss` has without this file."""


def register_loss_agg(name: str) -> Callable[[MeanLength], MeanLength]:
    """Register a loss aggregation: the lengths by which `agg_loss` divides the token losses of each response.

    The decorated function `(count_is, group) -> mean_length_is` is called once per update on the CPU, with the responses
    of all ranks, so that no split into mini- or micro-batches matters. `count_is` [n, 3] holds the valid tokens of each
    response with negative, zero and positive advantage, `group` [n] numbers the prompts from 0, and `mean_length_is`
    [n, 3] is what divides the losses of these tokens [tokens].

    Args:
        name: the `loss_agg_mode`. Register it in every process: where verl imports your module, see docs/loading.md.

    Raises:
        ValueError: the name is one of verl's own modes, or is registered for another function.
    """

    def decorator(function: MeanLength) -> MeanLength:
        known = LOSS_AGG_REGISTRY.get(name)
        if name in VERL_MODES or (known and _qualified(known) != _qualified(function)):
            owner = "verl" if name in VERL_MODES else _qualified(known)
            raise ValueError(f"register_loss_agg({name!r}): this mode is {owner}'s already. Choose another name")
        LOSS_AGG_REGISTRY[name] = function
        return function

    return decorator


def _qualified(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def mean_length_of_pools(count_is: torch.Tensor, pool_is: torch.Tensor) -> torch.Tensor:
    """ℓ̄ of each pool, at the places of its tokens: float64 [n, S] [tokens].

    A response takes part in a pool by the share of its tokens that are in it; with T_i = Σ_s count_is,

        ℓ̄_pool = Σ_{(i, s) in pool} count_is / Σ_{(i, s) in pool} (count_is / T_i)

    which is the mean length where each response is in one pool. Empty responses take no part.
    """
    share_is = count_is / count_is.sum(1, keepdim=True).clamp(min=1)  # exactly 1 where a response has one sign
    tokens, responses = (torch.bincount(pool_is.flatten(), weights=v.flatten()) for v in (count_is, share_is))
    return (tokens / responses)[pool_is]  # nan in an empty pool, which no token reads


@register_loss_agg("balanced")
def balanced_mean_length(count_is: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Balanced Aggregation, arXiv 2605.04077: the responses with the same prompt and sign of the advantage."""
    return mean_length_of_pools(count_is, group[:, None] * len(SIGNS) + torch.arange(len(SIGNS)))


@register_loss_agg("group-mean-token-mean")
def group_mean_length(count_is: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The token aggregation of the same paper, and DAPO's formula as printed: the responses with the same prompt."""
    return mean_length_of_pools(count_is, group[:, None].expand_as(count_is))


def metric_loss_agg_mode(loss_agg_mode: str) -> str:
    """The mode for what has no advantages, so no signs: values, and the entropy that the driver logs before the update."""
    return "token-mean" if loss_agg_mode in LOSS_AGG_REGISTRY else loss_agg_mode


# --------------------------------------------------------------------------------------------------------------------
# Once per update: whole groups
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """The rows of one update on all data-parallel ranks, in rank order, and which of them are this rank's.

    Attributes:
        group_B: the number of each row's prompt, from 0.
        session_B: the number of each row's rollout within its prompt; None where verl has no `session_id`.
        count_BS: valid tokens of each row by the sign of their advantage [tokens].
        size_B: mean of |advantage| over the row's valid tokens.
        floor_B: the |advantage| up to which the sign of a token is zero.
        local: this rank's rows.
    """

    group_B: torch.Tensor
    session_B: torch.Tensor | None
    count_BS: torch.Tensor
    size_B: torch.Tensor
    floor_B: torch.Tensor
    local: slice


def gather(data: Any, dp_group: Any = None) -> Update:
    """The rows of one update on all ranks: a collective over the data-parallel ranks.

    Args:
        data: this rank's share of one update, a TensorDict with `uid`, `advantages` and `response_mask`, padded or
            nested; optionally `session_id`.
        dp_group: the data-parallel process group; None for the whole world.

    Raises, on every rank, what is wrong on any:
        KeyError: a field is missing.
        ValueError: a field has the wrong number of rows, or an advantage is not finite.
    """
    try:
        mine: Any = rows_of(data)
    except (KeyError, ValueError) as error:  # raised on every rank below: none may be left waiting in the collective
        mine = error
    except Exception as error:  # an exception of an unknown class may not survive the way to the other ranks
        mine = RuntimeError(f"{type(error).__name__}: {error}")
    shares, rank = all_gather(mine, dp_group)
    return update_of(shares, rank)


def update_of(shares: list, rank: int) -> Update:
    """The rows of all ranks together, from what `rows_of` returned or raised on each of them.

    A row whose largest |advantage| is zero up to rounding, relative to its group's largest, has sign zero.

    Raises:
        Exception: the first of `shares` that is one.
        ValueError: a `session_id` that the trainer did not set.
    """
    for share in shares:
        if isinstance(share, Exception):
            raise share
    uid, session, size, largest = (
        [value for share in shares for value in share[name]] for name in ("uid", "session_id", "size", "largest")
    )
    count_BS = torch.cat([torch.tensor(share["count"]) for share in shares], dim=1).T
    size_B, largest_B = (torch.tensor(column, dtype=torch.float64) for column in (size, largest))
    group_B = number("uid", uid)
    session_B = number("session_id", session) if session else None
    rounded_B = zero_up_to_rounding(largest_B, group_B)
    count_BS[rounded_B] = count_BS[rounded_B].sum(1, keepdim=True) * torch.tensor([0, 1, 0])
    if session_B is not None and not all(share["session_set"] for share in shares):
        _refuse_sessions_of_the_data(group_B, session_B, count_BS, size_B)
    start = sum(len(share["uid"]) for share in shares[:rank])
    return Update(
        group_B,
        session_B,
        count_BS,
        size_B,
        torch.where(rounded_B, largest_B, ROUNDING * largest_B),
        slice(start, start + len(shares[rank]["uid"])),
    )


def zero_up_to_rounding(size_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Which advantages are zero up to rounding, relative to the largest of their group: bool [B].

    Args:
        size_B: |advantage| of each response, the largest of its tokens; 0 for an empty response.
        group_B: int64, numbered from 0.
    """
    if len(group_B) == 0:
        return torch.zeros(0, dtype=torch.bool)
    scale = torch.zeros(int(group_B.max()) + 1, dtype=size_B.dtype).scatter_reduce_(0, group_B, size_B, "amax")
    return size_B <= ROUNDING * scale[group_B]


def _refuse_sessions_of_the_data(
    group_B: torch.Tensor, session_B: torch.Tensor, count_BS: torch.Tensor, size_B: torch.Tensor
) -> None:
    """Raise ValueError if `session_id` makes one response of every group, though responses differ in their advantage.

    verl's v1 trainer sets `session_id`, and hands over nested rows. The others do not: there it is a column of the data
    set, and if that is constant within a prompt, every pool would silently be a whole group.
    """
    filled = count_BS.any(1)
    group, session = group_B[filled], session_B[filled]
    value = (size_B * (count_BS.argmax(1) - 1))[filled]  # of the sign of most of its tokens
    several = torch.bincount(group) > 1
    low, high = (torch.zeros(len(several), dtype=torch.float64) for _ in range(2))
    low.scatter_reduce_(0, group, value, "amin", include_self=False)
    high.scatter_reduce_(0, group, value, "amax", include_self=False)
    differ = high - low > ROUNDING * torch.maximum(high.abs(), low.abs())
    sessions = torch.bincount(torch.unique(torch.stack([group, session]), dim=1)[0], minlength=len(several))
    if bool((several & differ).any()) and bool((sessions[several] == 1).all()):
        raise ValueError(
            "session_id: the same within every prompt, so that all responses to a prompt would count as one rollout, "
            "though they differ in their advantage. Expected the number of the rollout within its prompt, as verl's v1 "
            "trainer sets it, or no such column; rename the column of the data set, or of extra_fields, that has this name"
        )


def column(loss_agg_mode: str, update: Update) -> torch.Tensor:
    """ℓ̄ of each of this rank's rows, from whole groups: what a registered mode divides by.

    Returns:
        float64 on the CPU [tokens], 0 for an empty response: [rows], or [rows, S] on every rank if anywhere in the
        update a row has tokens of two pools.

    Raises:
        ValueError: the mode's function returned another shape, or a length that is not positive and finite.
    """
    mean_length_BS = mean_length_of_rows(
        LOSS_AGG_REGISTRY[loss_agg_mode], update.count_BS, update.group_B, update.session_B
    )
    mean_length_B = mean_length_BS.amax(dim=1)
    one_number_per_row = bool(((mean_length_BS == mean_length_B[:, None]) | (update.count_BS == 0)).all())
    return (mean_length_B if one_number_per_row else mean_length_BS)[update.local]


def columns(loss_agg_mode: str, update: Update) -> dict[str, torch.Tensor]:
    """What a registered mode adds to this rank's rows: `column` and `FLOOR`."""
    return {COLUMN: column(loss_agg_mode, update), FLOOR: update.floor_B[update.local]}


def compute_pool_mean_length(loss_agg_mode: str, data: Any, dp_group: Any = None) -> dict[str, torch.Tensor]:
    """The `columns` that `update_actor` adds to the batch for a registered mode. Nothing for others."""
    if loss_agg_mode not in LOSS_AGG_REGISTRY:
        return {}
    return columns(loss_agg_mode, gather(data, dp_group))


def mean_length_of_rows(
    mean_length: MeanLength, count_BS: torch.Tensor, group_B: torch.Tensor, session_B: torch.Tensor | None = None
) -> torch.Tensor:
    """A registered function's lengths for each row, where several rows may be one response.

    Rows of one session are folded into one response first. Results are then scaled by (responses)/(rows), empty ones left
    out, so that Σ_is count_is / result_is stays the number of rows that are not empty.

    Args:
        mean_length: a function as `register_loss_agg` takes it.
        count_BS: valid tokens by the sign of their advantage [tokens].
        group_B, session_B: int64, numbered from 0.

    Returns:
        float64 [B, S] on the CPU [tokens]; 0 where a row has no such token.
    """
    count_BS = count_BS.detach().to(device="cpu", dtype=torch.float64)
    if len(count_BS) == 0:
        return count_BS
    group, count_is, row_of, scale = group_B, count_BS, slice(None), 1.0
    if session_B is not None:
        row_of = response_of_row(group_B, session_B)
        responses = int(row_of.max()) + 1
        count_is = torch.zeros(responses, len(SIGNS), dtype=torch.float64).index_add_(0, row_of, count_BS)
        group = torch.zeros(responses, dtype=torch.int64).scatter_(0, row_of, group_B)
        scale = int(count_is.any(1).sum()) / max(1, int(count_BS.any(1).sum()))
    mean_is = mean_length(count_is, group)
    fits = mean_is.shape == count_is.shape
    read = mean_is[count_is > 0] if fits else mean_is  # an empty pool's is nan, which no token reads
    if not fits or not bool(((read > 0) & read.isfinite()).all()):
        raise ValueError(
            f"{_qualified(mean_length)}: expected a positive, finite length [tokens] for each response and sign that has "
            f"tokens, shape {list(count_is.shape)}; got shape {list(mean_is.shape)}, or a length that is not positive"
        )
    return torch.where(count_BS > 0, mean_is[row_of] * scale, 0.0)


def response_of_row(group_B: torch.Tensor, session_B: torch.Tensor | None = None) -> torch.Tensor:
    """Number the responses of a batch, int64 [B]: rows of one group and session are one response.

    Args:
        group_B, session_B: int64, numbered from 0. Without sessions every row is a response.
    """
    if session_B is None:
        return torch.arange(len(group_B))
    sessions = int(session_B.max()) + 1 if len(session_B) else 1
    return _renumber(group_B * sessions + session_B)


def number(name: str, labels: Labels) -> torch.Tensor:
    """Number the labels 0, 1, …: int64 [B]; equal labels get equal numbers.

    A dictionary, not a sort: a million string ids take a tenth of a second, and the loop runs in C.

    Args:
        name: of the labels, for the error.
        labels: hashables, or an integer tensor of one dimension.

    Raises:
        ValueError: a tensor of another kind.
    """
    if isinstance(labels, torch.Tensor):
        if labels.is_floating_point() or labels.ndim != 1:
            raise ValueError(f"{name}: expected a 1-d integer tensor or hashables; got {labels.dtype} {labels.ndim}-d")
        return _renumber(labels.detach().cpu())
    tolist = getattr(labels, "tolist", None)
    labels = tolist() if tolist else labels  # the items of a numpy array hash slowly
    numbers: defaultdict[Hashable, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # an unseen label gets the next number
    # An array is filled several times as fast as a tensor. The 0 at its end: torch refuses an empty buffer.
    return torch.frombuffer(array("q", [*map(numbers.__getitem__, labels), 0]), dtype=torch.int64)[:-1]


def _renumber(code_B: torch.Tensor) -> torch.Tensor:
    return torch.unique(code_B, return_inverse=True)[1]


def rows_of(data: Any) -> dict[str, list]:
    """What the other ranks need to know of this rank's rows, as plain Python lists.

    `uid`; `session_id`, empty if there is none; `session_set`, whether rows have the form of a trainer that sets it;
    `count`, three lists of valid tokens per row, by the sign of their advantage; `size` and `largest`, the mean and the
    largest |advantage| of the row's valid tokens.

    Raises: as `gather`.
    """
    absent = [name for name in ("uid", "advantages", "response_mask") if name not in data]
    if absent:
        raise KeyError(
            f"an aggregation over whole groups needs {', '.join(absent)} in the batch of update_actor, got only "
            f"{sorted(map(str, data.keys()))}. verl's trainers put it there; a custom trainer or worker must not drop it"
        )
    mask_BT, advantage_BT = _same_rows(data["response_mask"], data["advantages"])
    rows = {name: _column_as_list(data, name) if name in data else [] for name in ("uid", "session_id")}
    for name, values in rows.items():
        if name in data and len(values) != mask_BT.shape[0]:
            raise ValueError(f"{name}: expected one entry per row, {mask_BT.shape[0]}; got {len(values)}")
    largest_B = largest_advantage(mask_BT, advantage_BT)
    count_BS = count_by_sign(mask_BT, advantage_BT, largest_B)
    size = torch.where(unpadded(mask_BT).bool(), unpadded(advantage_BT), 0.0).abs()
    size_B = row_sum(size, mask_BT, torch.float64) / count_BS.sum(1).clamp(min=1)
    return rows | {
        "session_set": bool(data["response_mask"].is_nested),
        "count": count_BS.T.tolist(),
        "size": size_B.tolist(),
        "largest": largest_B.tolist(),
    }


def largest_advantage(mask_BT: torch.Tensor, advantage_BT: torch.Tensor) -> torch.Tensor:
    """The largest |advantage| of each row's valid tokens, 0 where there are none: float64 [B].

    Both padded, or both nested (jagged) with the same offsets.

    Raises ValueError where an advantage at a valid token is nan or inf; at masked positions anything may stand.
    """
    mask, advantage = unpadded(mask_BT).bool(), unpadded(advantage_BT)
    if not bool((advantage.isfinite() | ~mask).all()):
        raise ValueError("advantages: nan or inf at a valid token; check the rewards of this step")
    size = torch.where(mask, advantage, 0.0).abs()
    if mask_BT.is_nested:
        return torch.segment_reduce(size, "max", lengths=row_lengths(mask_BT), unsafe=True, initial=0).double()
    return size.amax(-1).double()


def count_by_sign(
    mask_BT: torch.Tensor, advantage_BT: torch.Tensor, largest_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Valid tokens of each response with negative, zero and positive advantage: int64 [B, S], in the order of `SIGNS`.

    An advantage that is zero up to rounding, relative to the largest of its row, counts as zero.

    Args:
        mask_BT, advantage_BT: as in `largest_advantage`, which raises what is wrong with them.
        largest_B: what it returned, if it was called already.
    """
    floor_B = ROUNDING * (largest_advantage(mask_BT, advantage_BT) if largest_B is None else largest_B)
    mask, advantage = unpadded(mask_BT).bool(), unpadded(advantage_BT)
    floor = (floor_B.repeat_interleave(row_lengths(mask_BT)) if mask_BT.is_nested else floor_B[:, None]).to(advantage)
    sides = (mask, mask & (advantage < -floor), mask & (advantage > floor))
    tokens, negative, positive = (row_sum(side, mask_BT) for side in sides)
    return torch.stack([negative, tokens - negative - positive, positive], dim=1).long()


def unpadded(rows: torch.Tensor) -> torch.Tensor:
    """The values of a nested tensor, row after row; a padded one as it is."""
    return rows.values() if rows.is_nested else rows


def padded(rows: torch.Tensor) -> torch.Tensor:
    """[B, T], zeros after the end of a nested row.

    Not `to_padded_tensor`: where nobody has cached the longest row, it pads every row to the total of all.
    """
    return pad_sequence(list(rows.unbind()), batch_first=True) if rows.is_nested else rows


def row_lengths(nested: Any) -> torch.Tensor:
    """Entries of each row of a nested tensor, int64 [B]."""
    return nested.offsets().diff()


def row_sum(value: torch.Tensor, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sum over each row: [B]. `value` is `unpadded`, with the rows of `like`.

    Padding nested rows would take three times as long. float32 counts exactly up to 2^24, and sums booleans ten times as
    fast as int64.
    """
    if like.is_nested:
        return torch.segment_reduce(value.to(dtype), "sum", lengths=row_lengths(like), unsafe=True)
    return value.sum(-1, dtype=dtype)


def _same_rows(mask: Any, advantage: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both nested without gaps and with the same rows, as verl's v1 trainer has them; or both padded."""
    jagged = all(t.is_nested and t.layout == torch.jagged and t.lengths() is None for t in (mask, advantage))
    if jagged and torch.equal(mask.offsets(), advantage.offsets()):
        return mask, advantage
    mask, advantage = padded(mask), padded(advantage)
    if mask.shape != advantage.shape:
        raise ValueError(f"advantages {list(advantage.shape)} and response_mask {list(mask.shape)} differ in shape")
    return mask, advantage


def _column_as_list(data: Any, name: str) -> list:
    """A per-row column as a plain list, whichever container tensordict chose for it."""
    values = data.get(name)
    values = values.tolist() if hasattr(values, "tolist") else getattr(values, "data", values)
    # A NonTensorData holds one value for all rows.
    return list(values) if isinstance(values, list | tuple) else [values] * data.shape[0]


def all_gather(mine: Any, dp_group: Any) -> tuple[list, int]:
    """Every rank's share in rank order, and this rank's place. Plain Python objects: any backend carries them.

    A group of None is the whole world, as in torch: verl's torchtitan engine may say so where tensor-parallel peers hold
    the same rows. Counted more than once, rows leave every mean as it is.
    """
    distributed = torch.distributed
    if not distributed.is_initialized() or distributed.get_world_size(dp_group) == 1:
        return [mine], 0
    shares: list[Any] = [None] * distributed.get_world_size(dp_group)
    distributed.all_gather_object(shares, mine, group=dp_group)
    return shares, distributed.get_rank(dp_group)


# --------------------------------------------------------------------------------------------------------------------
# In the loss of each micro-batch
# --------------------------------------------------------------------------------------------------------------------


def loss_agg_info(loss_agg_mode: str, data: Any) -> dict[str, torch.Tensor]:
    """The column of a micro-batch, for `global_batch_info`: [B], or [B, T] by the sign of each token's advantage.

    Nothing for verl's own modes. A KeyError where the column is missing: the update went past `update_actor`.
    """
    if loss_agg_mode not in LOSS_AGG_REGISTRY:
        return {}
    mean_length = data[COLUMN]
    if mean_length.ndim == 2:
        mean_length = token_mean_length(mean_length, padded(data["advantages"]), data[FLOOR])
    return {COLUMN: mean_length}


def token_mean_length(mean_length_BS: torch.Tensor, advantage_BT: torch.Tensor, floor_B: torch.Tensor) -> torch.Tensor:
    """Each token's entry of [B, S] lengths, looked up by the sign of its own advantage: [B, T] [tokens].

    Args:
        floor_B: the |advantage| up to which the sign is zero.
    """
    return mean_length_BS.gather(1, 1 + signs(advantage_BT, floor_B))


def signs(advantage_BT: torch.Tensor, floor_B: torch.Tensor) -> torch.Tensor:
    """The sign of each token's advantage: int64 [B, T]; a nan, at a masked position, has zero's."""
    floor = floor_B[:, None].to(advantage_BT)  # in the advantages' precision, as `count_by_sign` compares them
    return (advantage_BT > floor).long() - (advantage_BT < -floor).long()


def agg_registered_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    pool_mean_length: torch.Tensor | None,
    global_batch_size: int | None,
    dp_size: int = 1,
) -> torch.Tensor:
    """`agg_loss` for a registered mode: `aggregate`, or a ValueError that says what its caller did not pass on."""
    if pool_mean_length is None or global_batch_size is None:
        given = {COLUMN: pool_mean_length, "global_batch_size": global_batch_size}
        raise ValueError(
            f"agg_loss with loss_agg_mode={loss_agg_mode} was called without "
            f"{' and '.join(name for name, value in given.items() if value is None)}. They are in "
            "config.global_batch_info: a policy loss must pass **config.global_batch_info on to agg_loss, and the "
            "update must go through ActorRolloutRefWorker.update_actor. Counts of the micro-batch alone would train "
            "something else, so there is no fallback"
        )
    value = aggregate(loss_mat, loss_mask, pool_mean_length, global_batch_size, dp_size)
    call = _running.get()
    if call is not None and loss_agg_mode == call.mode and value.requires_grad:  # not what is only logged
        call.aggregated.append((value, value.grad_fn))
    return value


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
        mean_length_B: `column` of these rows [tokens], or `token_mean_length` of their tokens, [B, T]; 0 gives an empty
            response the weight 0.
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


# --------------------------------------------------------------------------------------------------------------------
# Policy losses: nothing goes past the aggregation
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class _PolicyLossCall:
    """A policy loss that is running under a registered mode."""

    mode: str
    takes_over: bool  # the loss names another mode itself, and `mode` takes its place
    asked: list[str] = field(default_factory=list)  # the modes by which its per-token losses were aggregated
    # what `mode` made of them, and where it stands in the graph: a later change in place moves the tensor, not the node
    aggregated: list[tuple[torch.Tensor, Any]] = field(default_factory=list)


_running: ContextVar[_PolicyLossCall | None] = ContextVar("policy_loss_call", default=None)


def running_policy_loss() -> str | None:
    """The mode of the policy loss that is running under a registered mode; None if there is none."""
    call = _running.get()
    return None if call is None else call.mode


def enter_agg_loss(loss_agg_mode: str) -> str:
    """The first line of `agg_loss`: the mode to aggregate by, noted for the policy loss that is running."""
    call = _running.get()
    if call is None:
        return loss_agg_mode
    call.asked.append(call.mode if call.takes_over else loss_agg_mode)
    return call.asked[-1]


def checked_policy_loss(name: str, function: Callable, takes_over: bool = False) -> Callable:
    """A policy loss that must aggregate by the registered mode that it is given; an error at its first call if it does not.

    Args:
        name: the `policy_loss.loss_mode`.
        function: with the parameters that verl's registry gives every policy loss.
        takes_over: the function names a mode of verl's itself, and the registered one takes its place.
    """

    @functools.wraps(function)
    def policy_loss(*args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("loss_agg_mode", args[4] if len(args) > 4 else None)
        if mode not in LOSS_AGG_REGISTRY:
            return function(*args, **kwargs)
        outer, call = _running.get(), _PolicyLossCall(mode, takes_over)
        token = _running.set(call)
        try:
            result = function(*args, **kwargs)
        finally:
            _running.reset(token)
        did = _goes_past(call, result)
        if did:
            raise ValueError(
                f"policy loss {name!r} ({_qualified(function)}) ignores actor_rollout_ref.actor.loss_agg_mode={mode}: it "
                f"{did}, so its per-token losses are weighed by a rule of its own, which may also depend on the "
                "micro-batch. In the loss, return verl.trainer.ppo.core_algos.agg_loss(loss_mat=…, "
                "loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info) of the per-token "
                "losses; or use one of verl's own modes"
            )
        if outer is not None:  # a policy loss that calls another
            outer.asked += call.asked
            outer.aggregated += call.aggregated
        return result

    return policy_loss


def _goes_past(call: _PolicyLossCall, result: Any) -> str:
    """How the loss went past the aggregation, a clause that follows 'it'; '' if its gradient comes from there alone.

    Every path in the graph from what it returned to a parameter must go through a value that `agg_loss` made under the mode,
    and one such value must be in it as it is. So a call for a metric or a term of zero beside a mean of its own is noticed.
    What is done to the per-token losses before they are aggregated is the loss's own affair, and not looked at.
    """
    if call.mode not in call.asked:
        return f"called agg_loss with loss_agg_mode={', '.join(call.asked)}" if call.asked else "never called agg_loss"
    value = result[0] if isinstance(result, tuple) else result
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return ""  # nothing is trained
    through = {node for _, node in call.aggregated}
    if value.grad_fn in through:
        return ""
    nodes, seen = [value.grad_fn], set(through)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:  # a parameter
            return "returned a value whose gradient does not come from what agg_loss returned alone"
        nodes += [other for other, _ in node.next_functions]
    tensors = [tensor for tensor, _ in call.aggregated]
    slopes = torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True)
    if not any(slope is not None and bool(slope == 1) for slope in slopes):
        return "returned what agg_loss returned times a factor"
    return ""
