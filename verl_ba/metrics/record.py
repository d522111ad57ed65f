"""What verl logs under `balance/` at each update, whatever the mode: the numbers of `definitions.METRICS`.

    once per update, from whole groups       `update_metrics`: weights, shares and lengths, from the rows of all ranks
    in each micro-batch, token by token      `record`: policy loss, clip fraction and entropy of each sign of the
                                             advantage, as sums that verl adds up over micro-batches and averages over
                                             ranks; `add_metrics` divides them, so no split matters

Nothing here takes part in a loss or a gradient, and nothing here stops a run: what goes wrong is said once, and those
numbers are left out. VERL_BA_METRICS=0 switches all of it off.

Shape suffixes: B rows of the update on all ranks, S signs, T response tokens.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_ba.aggregation import ALL_MODES
from verl_ba.loss_agg import LOSS_AGG_REGISTRY, SIGNS, Update, number, response_of_row
from verl_ba.metrics.definitions import PREFIX, SIGN_NAMES
from verl_ba.metrics.weights import balance_metrics
from verl_ba.say import say_once

_SUM = PREFIX + "sum/"
"""The prefix of sums on their way from the loss to `add_metrics`: they are never logged."""

_POLICY_LOSS_ARGUMENTS = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config")


def enabled() -> bool:
    """Whether metrics are wanted: they are, unless VERL_BA_METRICS=0."""
    return os.environ.get("VERL_BA_METRICS", "1") != "0"


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
    group_B = number("uid", update.uid)
    session_B = None if update.session is None else number("session_id", update.session)
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
    """Sums over one micro-batch by the sign of each token's advantage: `SUMS`, those that there are, each [S]."""

    entropy_expected: bool
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
            self.advantage_BT = advantage_BT = arguments["advantages"]
            signs = _by_sign(mask_BT, advantage_BT)
            # Masked by value: by the mask, the aggregation would count other tokens.
            self.sums["pg_loss"] = [aggregate(torch.where(sign, loss_BT, 0.0)) for sign in signs]
            self.sums["tokens"] = [sign.sum() for sign in signs]
            if _clips_the_ratio(name, arguments["config"]):
                clipped = clipped_tokens(arguments)
                self.sums["clipped"] = [(sign & clipped).sum() for sign in signs]
        elif self.entropy_expected and self.advantage_BT is not None:
            self.entropy_expected = False
            signs = _by_sign(mask_BT, self.advantage_BT)
            self.sums["entropy"] = [torch.where(sign, loss_BT, 0.0).sum() for sign in signs]
            self.sums["entropy_tokens"] = [sign.sum() for sign in signs]

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
        return {
            f"{_SUM}{name}/{sign}": type(like)(value=value, aggregation=like.aggregation)
            for name, by_sign in numbers.items()
            for sign, value in zip(SIGN_NAMES, by_sign, strict=True)
        }


def _by_sign(mask_BT: torch.Tensor, advantage_BT: torch.Tensor) -> list[torch.Tensor]:
    mask_BT = mask_BT.bool()
    return [mask_BT & side for side in (advantage_BT < 0, advantage_BT == 0, advantage_BT > 0)]


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


_training: ContextVar[bool] = ContextVar("verl_ba_training", default=False)
_record: ContextVar[Record | None] = ContextVar("verl_ba_record", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def training() -> contextlib.AbstractContextManager:
    """Around an update, whose end calls `add_metrics`. Outside of one, losses are not recorded."""
    return _set(_training, enabled())


def record(entropy: bool) -> contextlib.AbstractContextManager:
    """Around `ppo_loss`: a `Record`, or None outside of an update. `entropy`: the model gave it, so it is aggregated."""
    return _set(_record, Record(entropy) if _training.get() else None)


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


def add_metrics(metrics: dict[str, Any], update: Update | None, mode: str) -> None:
    """Put what `update_metrics` finds into the metrics of an update, and divide what the records summed up."""
    sums = {key.removeprefix(_SUM): metrics.pop(key) for key in list(metrics) if key.startswith(_SUM)}
    with guard("by the sign of the advantage"):
        for sign in SIGN_NAMES:
            loss = sums.get(f"pg_loss/{sign}")
            if math.isfinite(_total(loss)):
                metrics[f"{PREFIX}pg_loss/{sign}"] = loss  # over mini-batches as verl reduces its own
            for name, part, whole in (("clip_fraction", "clipped", "tokens"), ("entropy", "entropy", "entropy_tokens")):
                value, tokens = (_total(sums.get(f"{key}/{sign}")) for key in (part, whole))
                if tokens > 0 and math.isfinite(value):
                    metrics[f"{PREFIX}{name}/{sign}"] = value / tokens
    if update is not None:
        with guard("of whole groups"):
            metrics.update(update_metrics(update, mode))


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
