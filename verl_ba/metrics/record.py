"""What verl logs under `balance/` at each update, whatever the mode: the numbers of `definitions.METRICS`.

    once per update, from whole groups       `update_metrics`: weights, shares and lengths, from the rows of all ranks
    in each micro-batch, token by token      `record`: policy loss, clip fraction and entropy of each sign of the
                                             advantage, and the weights that were applied, as sums that verl adds up over
                                             micro-batches and averages over ranks; `Training.add_metrics` divides them,
                                             so no split matters

Nothing here takes part in a loss or a gradient, and no rank waits for another one: what ranks need of each other travels
with the metrics that verl itself gathers, as plain numbers. Where a rank sends nothing, because metrics are switched off
there (VERL_BA_METRICS=0) or the package is missing, they are left out, and that is said once. So is whatever goes wrong.
VERL_BA_STRICT=1, or an untested verl, makes one number matter: a run under our modes ends if its
`active/applied_residual` is too large or is not known.

Shape suffixes: B rows of the update on all ranks, S signs, T response tokens.
"""

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_ba.aggregation import ALL_MODES, MODES
from verl_ba.loss_agg import (
    FLOOR,
    LOSS_AGG_REGISTRY,
    ROUNDING,
    SIGNS,
    Update,
    response_of_row,
    rows_of,
    signs,
    update_of,
)
from verl_ba.metrics.definitions import PREFIX, SIGN_NAMES
from verl_ba.metrics.weights import balance_metrics
from verl_ba.releases import untested
from verl_ba.say import say, say_once

_SUM = PREFIX + "sum/"
"""The prefix of sums on their way from the loss to `Training.add_metrics`: they are never logged."""

_WEIGHT, _SHARE = "weight", "share"
"""Names, after `_SUM`, of the weights that a micro-batch applied and of what a rank tells the others; lists of numbers."""

_POLICY_LOSS_ARGUMENTS = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config")


def enabled() -> bool:
    """Whether metrics are wanted: they are, unless VERL_BA_METRICS=0."""
    return os.environ.get("VERL_BA_METRICS", "1") != "0"


def strict() -> bool:
    """Whether weights that do not add up end the run: VERL_BA_STRICT=1, and by default in a verl that is untested."""
    asked = os.environ.get("VERL_BA_STRICT", "")
    return asked != "0" if asked else bool(untested())


# --------------------------------------------------------------------------------------------------------------------
# Once per update
# --------------------------------------------------------------------------------------------------------------------


def update_metrics(update: Update, mode: str) -> dict[str, float]:
    """`balance_metrics` of an update under the mode that runs.

    Modes with a constant divisor (token-sum, seq-mean-token-sum, seq-mean-token-sum-norm) weigh every token alike, as
    token-mean does: `active` has token-mean's numbers there.

    Raises:
        ValueError: a response, or a session of several rows, has advantages of several signs: it would belong to
            several pools by parts, which the numbers of whole responses do not describe.
    """
    length_B = update.count_BS.sum(1)
    sign_B = torch.where(length_B > 0, update.count_BS.argmax(1) - 1, 0)
    group_B, session_B = update.group_B, update.session_B
    if bool(((update.count_BS > 0).sum(1) > 1).any()) or _several_signs(length_B, sign_B, group_B, session_B):
        raise ValueError("advantages change sign within a response")
    active = mode if mode in (*ALL_MODES, *LOSS_AGG_REGISTRY) else "token-mean"
    return balance_metrics(length_B, group_B, sign_B, update.size_B, session_B, active_mode=active)


def _several_signs(length_B, sign_B, group_B, session_B) -> bool:
    """Whether the rows of some session, empty ones left out, differ in sign."""
    if session_B is None or len(length_B) == 0:
        return False
    row_of = response_of_row(group_B, session_B)
    filled = torch.stack([(length_B > 0) & (sign_B == sign) for sign in SIGNS], dim=1).to(torch.int64)
    signs = torch.zeros(int(row_of.max()) + 1, len(SIGNS), dtype=torch.int64).index_add_(0, row_of, filled) > 0
    return bool((signs.sum(1) > 1).any())


# --------------------------------------------------------------------------------------------------------------------
# In each micro-batch
# --------------------------------------------------------------------------------------------------------------------


SUMS = ("pg_loss", "tokens", "clipped", "entropy", "entropy_tokens")


@dataclass
class Record:
    """Sums over one micro-batch by the sign of each token's advantage: `SUMS`, those that there are, each [S].

    `floor_B` is the |advantage| up to which a token's sign is zero. `weight` becomes the sum of the weights that the
    aggregation applied, times what it is divided by and scaled with.
    """

    training: "Training"
    entropy_expected: bool
    floor_B: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    policy_loss: tuple[str, Mapping[str, Any]] | None = None  # that is running: its name and arguments
    advantage_BT: torch.Tensor | None = None
    sums: dict[str, Sequence[torch.Tensor]] = field(default_factory=dict)

    def see(self, loss_BT: torch.Tensor, mask_BT: torch.Tensor, aggregate: Callable[[torch.Tensor], Any]) -> None:
        """Called for every matrix that agg_loss reduces inside `ppo_loss`.

        The one inside the policy loss is the policy-gradient loss; the first one after it is the entropy.
        """
        if self.policy_loss is not None:
            name, arguments = self.policy_loss
            if self.advantage_BT is not None:
                self.sums.pop("pg_loss", None)
                raise ValueError(f"policy loss {name!r} aggregates several matrices, so its parts are unknown")
            self.advantage_BT = arguments["advantages"]
            if arguments["loss_agg_mode"] in LOSS_AGG_REGISTRY:
                self.weight = aggregate(torch.ones_like(loss_BT))
                self.training.precision = max(self.training.precision, torch.finfo(loss_BT.dtype).eps)
            by_sign = self._by_sign(mask_BT)
            # Masked by value: by the mask, the aggregation would count other tokens.
            self.sums["pg_loss"] = [aggregate(torch.where(sign, loss_BT, 0.0)) for sign in by_sign]
            self.sums["tokens"] = [sign.sum() for sign in by_sign]
            if _clips_the_ratio(name, arguments["config"]):
                clipped = clipped_tokens(arguments)
                self.sums["clipped"] = [(sign & clipped).sum() for sign in by_sign]
        elif self.entropy_expected and self.advantage_BT is not None:
            self.entropy_expected = False
            by_sign = self._by_sign(mask_BT)
            self.sums["entropy"] = [torch.where(sign, loss_BT, 0.0).sum() for sign in by_sign]
            self.sums["entropy_tokens"] = [sign.sum() for sign in by_sign]

    def _by_sign(self, mask_BT: torch.Tensor) -> list[torch.Tensor]:
        """Where the valid tokens of each sign are, as `loss_agg` counts them."""
        assert self.advantage_BT is not None
        floor_B = self.advantage_BT.new_zeros(len(mask_BT)) if self.floor_B is None else self.floor_B
        sign_BT = signs(self.advantage_BT, floor_B)
        return [mask_BT.bool() & (sign_BT == sign) for sign in SIGNS]

    def metrics(self, like: Any) -> dict[str, Any]:
        """verl's metrics of this micro-batch. All names are in it always, as nan if need be: verl takes the mean over
        ranks and expects the same names, as often, from each.

        `like` is verl's own `actor/pg_loss`: of its class, and reduced as it is.
        """
        numbers = {name: [math.nan] * len(SIGN_NAMES) for name in SUMS}
        if self.sums:
            values = [value for sums in self.sums.values() for value in sums]
            dtype = torch.promote_types(values[0].dtype, torch.float32)
            rows = torch.stack([value.to(values[0].device, dtype) for value in values]).tolist()  # one transfer
            starts = range(0, len(rows), len(SIGN_NAMES))
            numbers |= {name: rows[i : i + len(SIGN_NAMES)] for name, i in zip(self.sums, starts, strict=True)}
        metrics = {
            f"{_SUM}{name}/{sign}": type(like)(value=value, aggregation=like.aggregation)
            for name, by_sign in numbers.items()
            for sign, value in zip(SIGN_NAMES, by_sign, strict=True)
        }
        return metrics | self.training.messages(self.weight)


def _clips_the_ratio(name: str, config: Any) -> bool:
    """Whether this policy loss clips each token's ratio as PPO does; others clip something else, or nothing."""
    if name == "bypass_mode":
        return (config.policy_loss.get("rollout_correction") or {}).get("loss_type", "ppo_clip") == "ppo_clip"
    return name == "vanilla"


def clipped_tokens(arguments: Mapping[str, Any]) -> torch.Tensor:
    """Where verl's default policy loss takes the clipped ratio: what its `actor/pg_clipfrac` counts, bool [B, T]."""
    config, advantage_BT = arguments["config"], arguments["advantages"]
    low, high = (
        config.clip_ratio if bound is None else bound for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    ratio_BT = (arguments["log_prob"] - arguments["old_log_prob"]).clamp(-20.0, 20.0).exp()
    return -advantage_BT * ratio_BT.clamp(1 - low, 1 + high) > -advantage_BT * ratio_BT


_training: ContextVar["Training | None"] = ContextVar("verl_ba_training", default=None)
_record: ContextVar[Record | None] = ContextVar("verl_ba_record", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def training(run: "Training | None") -> contextlib.AbstractContextManager:
    """Around an update, whose end calls `Training.add_metrics`. Outside of one, losses are not recorded."""
    return _set(_training, run)


def record(entropy: bool, floor_B: torch.Tensor | None = None) -> contextlib.AbstractContextManager:
    """Around `ppo_loss`: a `Record`, or None outside of an update.

    Args:
        entropy: the model gave it, so it is aggregated.
        floor_B: the |advantage| up to which a token's sign is zero; None: 0.
    """
    run = _training.get()
    return _set(_record, None if run is None else Record(run, entropy, floor_B))


@contextlib.contextmanager
def policy_loss(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Around a policy loss of verl's registry."""
    current = _record.get()
    if current is None or current.policy_loss is not None:
        yield
        return
    current.policy_loss = name, dict(zip(_POLICY_LOSS_ARGUMENTS, args, strict=False)) | dict(kwargs)
    try:
        yield
    finally:
        current.policy_loss = None


def see(loss_BT: torch.Tensor, mask_BT: torch.Tensor, aggregate: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Record a loss matrix; `aggregate` is the reduction that `agg_loss` is about to apply to it."""
    current = _record.get()
    if current is None:
        return
    with torch.no_grad(), guard("by the sign of the advantage"):
        current.see(loss_BT.detach(), mask_BT, aggregate)


# --------------------------------------------------------------------------------------------------------------------
# The end of the update
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """One update on this rank, under one mode.

    What ranks tell each other goes with the metrics of their first micro-batch. verl gathers those of all ranks in a call
    of its own; lists of numbers arrive one after the other. A rank without this package logs their mean under a name that
    means nothing, and goes on.

    Attributes:
        ranks: how many data-parallel ranks verl gathers metrics from; None where it does not gather.
        update: the rows of all ranks, where the mode gathered them; else None.
        share: this rank's rows, where the mode did not gather them.
        epochs: how often each row is trained.
        batch_size: B, by which each mini-batch's loss is divided; None if the trainer did not say.
        precision: the coarsest resolution of a loss that was aggregated by a registered mode.
    """

    mode: str
    ranks: int | None
    update: Update | None = None
    share: Mapping[str, Any] | None = None
    epochs: int = 1
    batch_size: int | None = None
    precision: float = 0.0
    _told: bool = False

    def messages(self, weight: torch.Tensor | None) -> dict[str, list]:
        """Lists of numbers that go with the metrics of a micro-batch."""
        lists: dict[str, list] = {}
        if weight is not None:
            lists[_SUM + _WEIGHT] = [float(weight)]
        if not self._told:
            self._told = True
            lists[_SUM + _SHARE] = encode(self.share, ours=self.mode in LOSS_AGG_REGISTRY)
        # verl takes one level of lists away, and adds it only where it gathers.
        return lists if self.ranks is not None else {name: [numbers] for name, numbers in lists.items()}

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Put what `update_metrics` finds into the metrics of the update, and divide what the records summed up.

        Raises:
            RuntimeError: the run is strict, and the weights do not add up or are not known.
        """
        sums = take_sums(metrics)
        shares: list | None = None
        with guard("at all"):
            shares = decode(sums.get(_SHARE, ()))
            expected = 1 if self.ranks is None else self.ranks
            if len(shares) != expected:
                shares, heard = None, len(shares)
                raise ValueError(
                    f"of {expected} data-parallel ranks {heard} sent theirs. Set VERL_BA_METRICS alike in every process, and "
                    "install verl_ba on every node (`verl-ba doctor --ray auto`)"
                )
        if shares is None:
            return self._judge(None)
        with guard("by the sign of the advantage"):
            metrics.update(_divided(sums))
        with guard("of whole groups"):
            update = self.update
            if update is None and self.share is not None:  # else it was said why
                if None in shares:
                    raise ValueError("another rank cannot read its rows, and says why")
                update = update_of(shares, 0)
            if update is not None:
                metrics.update(update_metrics(update, self.mode))
        residual = None
        with guard("of the weights that were applied"):
            residual = self.applied_residual(sums.get(_WEIGHT, ()))
        if residual is not None:
            metrics[f"{PREFIX}active/applied_residual"] = residual
        self._judge(residual)

    def applied_residual(self, weights: Sequence[float]) -> float | None:
        """How far the weights of all tokens, as they were applied, are from one for each response that is not empty.

        Over the micro-batches and ranks of a mini-batch the losses add up to Σ w·ℓ / B, as each rank's is multiplied by
        their number and then averaged; so do the weights themselves. Over the mini-batches of an update B·Σ w / B is the
        number of its responses, once for each epoch.
        """
        if self.update is None or self.batch_size is None or not weights:
            return None
        expected = self.epochs * int(self.update.count_BS.any(1).sum())
        applied = self.batch_size * math.fsum(weights) / (self.ranks or 1)
        return abs(applied - expected) / max(expected, 1)

    def _judge(self, residual: float | None) -> None:
        """Say once, loudly, that weights do not add up; raise if the run is strict. Only our modes promise that they do."""
        bound = max(1e-6, 8 * self.precision)
        if self.mode not in MODES or (residual is not None and residual <= bound):
            return
        if residual is None:
            if strict():
                raise RuntimeError(
                    f"{PREFIX}active/applied_residual is not known (the log says why, or the trainer did not say "
                    f"global_batch_size), so nothing shows that the weights add up. {_ENDS}"
                )
            return
        what = (
            f"{PREFIX}active/applied_residual is {residual:.1e}, above {bound:.0e}: the weights that agg_loss applied under "
            f"{self.mode} do not add up to the number of responses, so the loss of this run is not the mode's. Rows were "
            "lost or repeated on their way to the loss, or dp_size or global_batch_size there are not those of the update"
        )
        if strict():
            raise RuntimeError(f"{what}. {_ENDS}")
        if what[:40] not in _judged:
            _judged.add(what[:40])
            say(f"WARNING: {what}. VERL_BA_STRICT=1 would end the run")


_ENDS = "The run ends because of VERL_BA_STRICT=1, the default in an untested verl; VERL_BA_STRICT=0 would let it go on"
_judged: set[str] = set()


def take_sums(metrics: dict[str, Any]) -> dict[str, Any]:
    """Take the sums of all ranks out of the metrics of an update: the ranks that do not want any have them, too."""
    return {key.removeprefix(_SUM): metrics.pop(key) for key in list(metrics) if key.startswith(_SUM)}


def _divided(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Loss, clip fraction and entropy by sign."""
    metrics = {}
    for sign in SIGN_NAMES:
        loss = sums.get(f"pg_loss/{sign}")
        if math.isfinite(_total(loss)):
            metrics[f"{PREFIX}pg_loss/{sign}"] = loss  # over mini-batches as verl reduces its own
        for name, part, whole in (("clip_fraction", "clipped", "tokens"), ("entropy", "entropy", "entropy_tokens")):
            value, tokens = (_total(sums.get(f"{key}/{sign}")) for key in (part, whole))
            if tokens > 0 and math.isfinite(value):
                metrics[f"{PREFIX}{name}/{sign}"] = value / tokens
    return metrics


_ROW = ("uid", "session_id", "negative", "zero", "positive", "size", "largest")
"""What is told of a row, each a number; `session_id` is -1 where there is none."""


def encode(share: Mapping[str, Any] | None, ours: bool = False) -> list[float]:
    """A rank's rows, as `rows_of` returns them, as numbers: how many, whether sessions are the trainer's, and `_ROW` of each.

    Without rows to tell, 0 rows where the mode gathered them already, else -1.
    """
    if share is None:
        return [0.0 if ours else -1.0, 0.0]
    session = map(_code, share["session_id"]) if share["session_id"] else itertools.repeat(-1.0)
    columns = (map(_code, share["uid"]), session, *share["count"], share["size"], share["largest"])
    rows = itertools.chain.from_iterable(zip(*columns, strict=False))
    return [float(len(share["uid"])), float(share["session_set"]), *map(float, rows)]


def decode(numbers: Any) -> list[dict[str, Any] | None]:
    """The shares that `encode` made these numbers of, one after the other; None for a rank that could not read its rows."""
    numbers, shares, at = list(numbers), [], 0
    while at < len(numbers):
        rows, session_set = int(numbers[at]), bool(numbers[at + 1])
        end = at + 2 + max(rows, 0) * len(_ROW)
        column = {name: numbers[at + 2 + i : end : len(_ROW)] for i, name in enumerate(_ROW)}
        at = end
        share: dict[str, Any] = {name: column[name] for name in ("uid", "size", "largest")}
        share["session_id"] = [] if -1.0 in column["session_id"] else column["session_id"]
        share["count"] = [list(map(int, column[name])) for name in ("negative", "zero", "positive")]
        shares.append(None if rows < 0 else share | {"session_set": session_set})
    return shares


def _code(label: Any) -> float:
    """A whole number for a label, the same on every rank; a million labels collide once in 500 updates."""
    return float(int.from_bytes(hashlib.blake2b(repr(label).encode(), digest_size=6).digest()))


def floor_on_this_rank(share: Mapping[str, Any]) -> torch.Tensor:
    """The |advantage| up to which a token's sign is zero, float64 [rows], for the metrics under verl's own modes.

    The largest advantage of a row's group is known when the update is over. Until then, that of this rank stands for it.
    """
    largest_B = torch.tensor(share["largest"], dtype=torch.float64)
    rounded_B = largest_B <= ROUNDING * max(share["largest"], default=0.0)
    return torch.where(rounded_B, largest_B, ROUNDING * largest_B)


def begin(data: Any, mode: str, dp_group: Any, update: Update | None) -> Training | None:
    """The update that is about to begin on this rank; None if no metrics are wanted.

    Args:
        data: the batch of `update_actor`; under verl's own modes it gets the column `FLOOR`.
        dp_group: the group over which verl gathers metrics, or None.
        update: the rows of all ranks, where the mode has gathered them.
    """
    if not enabled():
        return None
    distributed = torch.distributed
    ranks = None if dp_group is None else distributed.get_world_size(dp_group) if distributed.is_initialized() else 1
    run = Training(mode, ranks, update)
    with guard("of whole groups"):
        if update is None:
            run.share = rows_of(data)
            data[FLOOR] = floor_on_this_rank(run.share)
    with guard("of the weights that were applied"):
        epochs, size = (_setting(data, name) for name in ("epochs", "global_batch_size"))
        run.epochs, run.batch_size = epochs or 1, size
    return run


def _setting(data: Any, name: str) -> int | None:
    """A number that the trainer put beside the rows; None if it is not there."""
    value = data.get(name, None)
    value = getattr(value, "data", value)
    return None if value is None else int(value)


def _total(values: Any) -> float:
    """Over the mini-batches of an update; nan where there is nothing."""
    return math.nan if values is None else math.fsum(getattr(values, "values", values))


@contextlib.contextmanager
def guard(which: str) -> Iterator[None]:
    """Metrics never stop a run: what goes wrong is said once, and they are left out."""
    try:
        yield
    except Exception as error:
        say_once(f"no {PREFIX}… metrics {which}: {error or type(error).__name__}")
