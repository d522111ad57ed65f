"""Where verl is touched, why, and for which releases. No file of verl is edited.

    driver                                        each training rank
    ------                                        ------------------
    1 ActorConfig.__post_init__   accepts the     2 TrainingWorker.train_mini_batch   once per update, whole share:
      modes, refuses what would ignore them         gather (uid, tokens by sign) over the data-parallel group, compute
                                                    each row's pool mean length, put it into the batch as a column
    + the entropy metric, which the driver        3 ppo_loss   keeps a fixed list of fields, so move the column
      logs before advantages exist                  into config.global_batch_info, which every policy loss passes on
                                                  4 agg_loss   the new modes
                                                  5 get_policy_loss_fn   a policy loss that goes past agg_loss raises

In a verl that has the modes in its own tree (patches/) nothing is touched: `seams` is empty there.

(1b) A critic inherits the actor's mode by interpolation but has no sign: it uses token-mean, and says so.
(2b) Where advantages change sign within a response (a critic, process rewards, discounting), the column has three
numbers per row, one per sign, and seam 3 looks up each token's own. Nothing about groups or signs is decided there.
(3b) `distillation_ppo_loss` aggregates before it calls `ppo_loss`: the column is set and cleared around each.
(5b) What each policy loss of verl does, and which are refused: support.py.
(6) For every mode, verl's own included, seams 2 to 5 pass what they see on to diagnostics.py, which logs `balance/…`; the
driver keeps these names, and verl's dumps of rollouts get the length that training used.

`install` registers a post-import hook per module, so nothing of verl is imported early: verl is loaded in many processes
that never train, and importing its engines there costs seconds and fixes its choice of platform too soon. Modules that
are loaded already are patched at once, and every by-name copy of a patched function (`from … import agg_loss`) is
rebound. A seam that is missing or has another signature is left alone and reported; `verify` turns such reports into one
error before the first update under one of our modes. Each seam names the releases that have it; releases.py has the rest
of what differs between them.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from verl_ba import __version__, diagnostics, releases
from verl_ba.aggregation import MODES, pool_mean_length_by_sign
from verl_ba.loss_agg import aggregate, count_by_sign, row_sum, token_mean_length, unpadded
from verl_ba.support import BYPASS_REJECTION, POLICY_LOSSES

COLUMN = "pool_mean_length"
"""Name of the per-row column in the batch, of its entry in `global_batch_info`, and of `agg_loss`'s new argument."""

_MODE_KEY = "actor_rollout_ref.actor.loss_agg_mode"


class SeamError(RuntimeError):
    """verl's code is not what the hooks were written for, or a hook was lost."""


# --------------------------------------------------------------------------------------------------------------------
# 1. Configuration
# --------------------------------------------------------------------------------------------------------------------


def _wrap_actor_config(original: Callable) -> Callable:
    @functools.wraps(original)
    def __post_init__(self) -> None:
        mode = self.loss_agg_mode
        if mode not in MODES:
            try:
                return original(self)
            except ValueError as error:
                if "loss_agg_mode" not in str(error):
                    raise
                raise ValueError(
                    f"{_MODE_KEY}={mode!r} is not a loss aggregation mode. Expected one of verl's own "
                    f"(token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm) or of "
                    f"verl_ba's ({', '.join(MODES)})"
                ) from error
        _refuse_policy_loss(mode, self.policy_loss)
        # verl's list of modes is closed, inside the function: let it check the rest under a name that it knows.
        object.__setattr__(self, "loss_agg_mode", "token-mean")
        try:
            return original(self)
        finally:
            object.__setattr__(self, "loss_agg_mode", mode)

    return __post_init__


def _refuse_policy_loss(mode: str, policy_loss: Any) -> None:
    """Raise if this policy loss cannot do what the mode says."""
    name = policy_loss.get("loss_mode", "vanilla")
    support = POLICY_LOSSES.get(name)
    if support is not None and support.verdict == "refused":
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} cannot follow {_MODE_KEY}={mode}: {support.why}. "
            "Choose another policy loss (vanilla, gspo, sapo, clip_cov, kl_cov, gpg, cispo, …), or one of verl's own modes"
        )
    if name == "bypass_mode":
        _refuse_bypass_rejection(mode, policy_loss.get("rollout_correction"), "actor_rollout_ref.actor.policy_loss.")


def _refuse_bypass_rejection(mode: str, correction: Any, where: str) -> None:
    rejection = correction.get("rollout_rs") if correction else None
    if rejection:
        raise ValueError(
            f"{where}rollout_correction.rollout_rs={rejection} cannot follow {_MODE_KEY}={mode}: {BYPASS_REJECTION.why}"
        )


_LOCAL_MEAN = "each micro-batch, as every critic of this verl release does"


def _wrap_critic_config(original: Callable) -> Callable:
    @functools.wraps(original)
    def __post_init__(self) -> None:
        if self.loss_agg_mode in MODES:
            _say(
                f"critic.loss_agg_mode={self.loss_agg_mode} (inherited from the actor): values have no sign, so the "
                f"critic uses token-mean over {'the global batch' if releases.current().global_critic else _LOCAL_MEAN}"
            )
            object.__setattr__(self, "loss_agg_mode", "token-mean")
        return original(self)

    return __post_init__


def _wrap_validate_config(original: Callable) -> Callable:
    """Refuse on the driver, before any process starts, what would fail at the first update."""

    @functools.wraps(original)
    def validate_config(config, use_reference_policy, use_critic) -> None:
        mode = config.actor_rollout_ref.actor.loss_agg_mode
        if mode in MODES:
            _check_release(config, mode)
            correction = config.algorithm.get("rollout_correction")
            if correction and correction.get("bypass_mode"):
                _refuse_bypass_rejection(mode, correction, "algorithm.")
        return original(config, use_reference_policy=use_reference_policy, use_critic=use_critic)

    return validate_config


# --------------------------------------------------------------------------------------------------------------------
# 2. The update: whole groups are visible here, and only here
# --------------------------------------------------------------------------------------------------------------------


def _wrap_train_mini_batch(original: Callable) -> Callable:
    # `functools.wraps` keeps the function's __dict__: verl's `@register` stores there how Ray dispatches the method.
    @functools.wraps(original)
    def train_mini_batch(self, data):
        config = _actor_config(self.loss_fn)
        if config is None or not (config.loss_agg_mode in MODES or diagnostics.enabled()):
            return original(self, data)
        mode = config.loss_agg_mode
        if mode in MODES and not getattr(self, "_verl_ba_announced", False):
            verify()
            _say(f"rank {torch.distributed.get_rank()}: {_MODE_KEY}={mode}; {describe()}")
            self._verl_ba_announced = True
        update = None
        # Under verl's own modes only metrics need the update's rows.
        with contextlib.nullcontext() if mode in MODES else diagnostics.guard("of whole groups"):
            update = gather_update(mode, data, self.engine.get_data_parallel_group())
        if mode in MODES:
            data[COLUMN] = batch_mean_length(mode, data, None, update)
        with diagnostics.training():
            output = original(self, data)
        if output is not None and diagnostics.enabled():  # verl's output is None where a rank has no metrics
            with diagnostics.guard("at all"):
                diagnostics.add_metrics(output.get_non_tensor("metrics"), update, mode)
        return output

    return train_mini_batch


def _actor_config(loss_fn: Any) -> Any:
    """The ActorConfig that verl bound to the loss, or None for a critic or a supervised loss.

    The wrapper also sees remote calls of a critic, whose data is not a batch yet; only the loss tells them apart.
    """
    config = getattr(loss_fn, "keywords", {}).get("config")
    actor = sys.modules.get("verl.workers.config.actor")
    return config if actor is not None and isinstance(config, actor.ActorConfig) else None


def gather_update(mode: str, data: Any, group: Any) -> diagnostics.Update:
    """The rows of one update on all ranks: a collective over the data-parallel ranks.

    Args:
        mode: the run's `loss_agg_mode`, for messages.
        data: this rank's share of one update, a TensorDict with `uid`, `advantages` and `response_mask`, padded or
            nested; optionally `session_id`.
        group: the data-parallel process group; None for the whole world.

    Raises, on every rank, what is wrong on any:
        KeyError: a field is missing.
        ValueError: a field has the wrong number of rows, or an advantage is not finite.
    """
    try:
        mine = _local_rows(mode, data)
    except (KeyError, ValueError) as error:  # raised on every rank below: none may be left waiting in the collective
        mine = error
    except Exception as error:  # an exception of an unknown class may not survive the way to the other ranks
        mine = RuntimeError(f"{type(error).__name__}: {error}")
    shares, rank = _all_gather(mine, group)
    for share in shares:
        if isinstance(share, Exception):
            raise share
    uid, session = ([value for share in shares for value in share[name]] for name in ("uid", "session_id"))
    start = sum(len(share["uid"]) for share in shares[:rank])
    return diagnostics.Update(
        uid,
        session or None,
        torch.cat([torch.tensor(share["count"]) for share in shares], dim=1).T,
        torch.cat([torch.tensor(share["size"], dtype=torch.float64) for share in shares]),
        slice(start, start + len(shares[rank]["uid"])),
    )


def batch_mean_length(mode: str, data: Any, group: Any, update: diagnostics.Update | None = None) -> torch.Tensor:
    """Each local row's pool mean length, from whole groups.

    Args:
        mode: one of `MODES`.
        data, group: as in `gather_update`, which is called where `update` does not hold its result already.

    Returns:
        float64 on the CPU [tokens], 0 for an empty response: [rows], or [rows, signs] on every rank if anywhere in the
        update a row has tokens of two pools (`aggregation.pool_mean_length_by_sign`).

    Raises: as `gather_update`.
    """
    update = update or gather_update(mode, data, group)
    mean_length_BS = pool_mean_length_by_sign(mode, update.count_BS, update.uid, update.session)
    mean_length_B = mean_length_BS.amax(dim=1)
    one_number_per_row = bool(((mean_length_BS == mean_length_B[:, None]) | (update.count_BS == 0)).all())
    return (mean_length_B if one_number_per_row else mean_length_BS)[update.local]


def _local_rows(mode: str, data: Any) -> dict[str, list]:
    """What the other ranks need to know of this rank's rows, as plain Python lists: `uid`, `session_id` (empty if there is
    none), `count`, three lists of valid tokens per row, by the sign of their advantage, and `size`, its mean |value|."""
    absent = [name for name in ("uid", "advantages", "response_mask") if name not in data]
    if absent:
        raise KeyError(
            f"{_MODE_KEY}={mode} needs {', '.join(absent)} in the batch of train_mini_batch, got only "
            f"{sorted(map(str, data.keys()))}. verl's trainers put it there; a custom trainer or worker must not drop it"
        )
    mask_BT, advantage_BT = _same_rows(data["response_mask"], data["advantages"])
    rows = {name: _column_as_list(data, name) if name in data else [] for name in ("uid", "session_id")}
    for name, column in rows.items():
        if name in data and len(column) != mask_BT.shape[0]:
            raise ValueError(f"{name}: expected one entry per row, {mask_BT.shape[0]}; got {len(column)}")
    count_BS = count_by_sign(mask_BT, advantage_BT)
    size = torch.where(unpadded(mask_BT).bool(), unpadded(advantage_BT), 0.0).abs()
    total_B = row_sum(size, mask_BT, torch.float64)
    size_B = total_B / count_BS.sum(1).clamp(min=1)
    return rows | {"count": count_BS.T.tolist(), "size": size_B.tolist()}


def _same_rows(mask: Any, advantage: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both nested without gaps and with the same rows, as verl's v1 trainer has them; or both padded."""
    jagged = all(t.is_nested and t.layout == torch.jagged and t.lengths() is None for t in (mask, advantage))
    if jagged and torch.equal(mask.offsets(), advantage.offsets()):
        return mask, advantage
    mask, advantage = _padded(mask), _padded(advantage)
    if mask.shape != advantage.shape:
        raise ValueError(f"advantages {list(advantage.shape)} and response_mask {list(mask.shape)} differ in shape")
    return mask, advantage


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, T], zeros after the end of a nested row.

    Not `to_padded_tensor`: where nobody has cached the longest row, it pads every row to the total of all.
    """
    return pad_sequence(list(tensor.unbind()), batch_first=True) if tensor.is_nested else tensor


def _column_as_list(data: Any, name: str) -> list:
    """A per-row column as a plain list, whichever container tensordict chose for it."""
    column = data.get(name)
    column = column.tolist() if hasattr(column, "tolist") else getattr(column, "data", column)
    # A NonTensorData holds one value for all rows.
    return list(column) if isinstance(column, list | tuple) else [column] * data.shape[0]


def _all_gather(mine: Any, group: Any) -> tuple[list, int]:
    """Every rank's share in rank order, and this rank's place. Plain Python objects: any backend carries them.

    A group of None is the whole world, as in torch: verl's torchtitan engine may say so where tensor-parallel peers hold
    the same rows. Counted more than once, rows leave every mean as it is.
    """
    distributed = torch.distributed
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return [mine], 0
    shares: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(shares, mine, group=group)
    return shares, distributed.get_rank(group)


# --------------------------------------------------------------------------------------------------------------------
# 3. The loss: carry the column past verl's list of fields
# --------------------------------------------------------------------------------------------------------------------


def _wrap_loss(original: Callable) -> Callable:
    """For `ppo_loss` and `distillation_ppo_loss`: the column is in `global_batch_info` while the loss runs, no longer."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def loss(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        if "distillation_config" in bound:  # it calls ppo_loss, where the policy loss is recorded
            with _column_in_global_batch_info(bound):
                return original(*args, **kwargs)
        entropy = bound["model_output"].get("entropy") is not None
        with _column_in_global_batch_info(bound), diagnostics.record(entropy) as record:
            value, metrics = original(*args, **kwargs)
        if record is not None:
            with diagnostics.guard("by the sign of the advantage"):
                metrics.update(record.metrics(like=metrics["actor/pg_loss"]))
        return value, metrics

    return loss


@contextlib.contextmanager
def _column_in_global_batch_info(bound: dict[str, Any]) -> Iterator[None]:
    config, data = bound["config"], bound.get("data")
    if config.loss_agg_mode not in MODES:
        yield
        return
    infos = [config.global_batch_info]
    distillation = getattr(bound.get("distillation_config"), "distillation_loss", None)
    if distillation is not None:
        infos.append(distillation.global_batch_info)  # verl copies our entry there
    before = [info.get(COLUMN) for info in infos]
    try:
        if data is not None and COLUMN in data:
            column = data[COLUMN]
            if column.ndim == 2:  # one number per sign: each token reads its own
                column = token_mean_length(column, _padded(data["advantages"]))
            config.global_batch_info[COLUMN] = column
        yield
    finally:
        # A stale column of the right size would weigh the next micro-batch by this one's lengths, silently.
        for info, column in zip(infos, before, strict=True):
            info.pop(COLUMN, None)
            if column is not None:
                info[COLUMN] = column


# --------------------------------------------------------------------------------------------------------------------
# 4. The aggregation
# --------------------------------------------------------------------------------------------------------------------


def _wrap_agg_loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def agg_loss(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        dp_size=1,
        batch_num_tokens=None,
        global_batch_size=None,
        loss_scale_factor=None,
        pool_mean_length=None,
    ):
        call = _policy_loss_call.get()
        if call is not None:
            loss_agg_mode = call.enter(loss_agg_mode)
        if loss_agg_mode not in MODES:
            rest = loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
            diagnostics.see(loss_mat, loss_mask, lambda matrix: original(matrix, *rest))
            return original(loss_mat, *rest)
        if pool_mean_length is None or global_batch_size is None:
            given = {COLUMN: pool_mean_length, "global_batch_size": global_batch_size}
            raise ValueError(
                f"agg_loss with loss_agg_mode={loss_agg_mode} was called without "
                f"{' and '.join(name for name, value in given.items() if value is None)}. They are in "
                "config.global_batch_info: a policy loss must pass **config.global_batch_info on to agg_loss, and the "
                "update must go through TrainingWorker.train_mini_batch. Counts of the micro-batch alone would train "
                "something else, so there is no fallback"
            )
        rest = loss_mask, pool_mean_length, global_batch_size, dp_size
        diagnostics.see(loss_mat, loss_mask, lambda matrix: aggregate(matrix, *rest))
        return aggregate(loss_mat, *rest)

    return agg_loss


def _wrap_driver_agg_loss(original: Callable) -> Callable:
    """For the trainers' `actor/entropy`, logged before advantages (so signs) exist: token-mean, there and only there."""

    @functools.wraps(original)
    def agg_loss(loss_mat, loss_mask, loss_agg_mode, *args, **kwargs):
        mode = "token-mean" if loss_agg_mode in MODES else loss_agg_mode
        return original(loss_mat, loss_mask, mode, *args, **kwargs)

    return agg_loss


# --------------------------------------------------------------------------------------------------------------------
# 5. Policy losses: nothing goes past the aggregation
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class _PolicyLossCall:
    """A policy loss that is running under one of our modes."""

    mode: str
    hard_coded: bool  # the loss names another mode itself, and `mode` takes its place
    modes: list[str] = field(default_factory=list)  # by which its per-token losses were aggregated

    def enter(self, asked: str) -> str:
        self.modes.append(self.mode if self.hard_coded else asked)
        return self.modes[-1]


_policy_loss_call: ContextVar[_PolicyLossCall | None] = ContextVar("verl_ba_policy_loss_call", default=None)


def _wrap_get_policy_loss_fn(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_policy_loss_fn(name):
        function = original(name)
        hard_coded = name in POLICY_LOSSES and POLICY_LOSSES[name].verdict == "made exact"

        @functools.wraps(function)
        def policy_loss(*args, **kwargs):
            mode = kwargs.get("loss_agg_mode", args[4] if len(args) > 4 else None)  # the place verl's registry gives it
            if mode not in MODES:
                with diagnostics.policy_loss(name, args, kwargs):
                    return function(*args, **kwargs)
            call = _PolicyLossCall(mode, hard_coded)
            token = _policy_loss_call.set(call)
            try:
                with diagnostics.policy_loss(name, args, kwargs):
                    result = function(*args, **kwargs)
            finally:
                _policy_loss_call.reset(token)
            if mode not in call.modes:
                _raise_past_the_mode(name, function, call)
            return result

        return policy_loss

    return get_policy_loss_fn


def _raise_past_the_mode(name: str, function: Callable, call: _PolicyLossCall) -> None:
    did = f"it called agg_loss with loss_agg_mode={', '.join(call.modes)}" if call.modes else "it never called agg_loss"
    raise ValueError(
        f"policy loss {name!r} ({function.__module__}.{function.__qualname__}) ignores {_MODE_KEY}={call.mode}: {did}, so "
        "its per-token losses were averaged by a rule of its own, which may also depend on the micro-batch. In the loss, "
        "return verl.trainer.ppo.core_algos.agg_loss(loss_mat=…, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, "
        "**config.global_batch_info) of the per-token losses; or use one of verl's own modes"
    )


# --------------------------------------------------------------------------------------------------------------------
# 6. What is logged: names, and dumps of rollouts
# --------------------------------------------------------------------------------------------------------------------


def _wrap_rename_dict(original: Callable) -> Callable:
    """The trainers put 'actor/' before every name that comes from an update; ours have a prefix of their own."""

    @functools.wraps(original)
    def rename_dict(data, prefix=""):
        ours = {key: value for key, value in data.items() if key.startswith(diagnostics.PREFIX)}
        return original({key: value for key, value in data.items() if key not in ours}, prefix) | ours

    return rename_dict


def _wrap_log_rollout_data(original: Callable) -> Callable:
    """The trainers whose batch is in TransferQueue: verl's dump names rows by their key there."""

    @functools.wraps(original)
    def _log_rollout_data(self, batch, timing_raw, rollout_data_dir):
        length = {}
        with diagnostics.guard("in the dump of rollouts"):
            length = dict(zip(batch.keys, diagnostics.lengths_in_queue(batch), strict=True))

        def dump(*args, reward_extra_infos_dict, **kwargs):
            keys = reward_extra_infos_dict.get("uid", ())
            if length and all(key in length for key in keys):
                reward_extra_infos_dict |= {diagnostics.LENGTH_FIELD: [length[key] for key in keys]}
            return type(self)._dump_generations(self, *args, reward_extra_infos_dict=reward_extra_infos_dict, **kwargs)

        self._dump_generations = dump
        try:
            return original(self, batch, timing_raw, rollout_data_dir)
        finally:
            del self._dump_generations

    return _log_rollout_data


def _wrap_log_rollout_data_legacy(original: Callable) -> Callable:
    """The trainers whose batch is a DataProto: verl's dump has no uid there. Ours has the v1 trainer's form."""

    @functools.wraps(original)
    def _log_rollout_data(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir):
        with diagnostics.guard("in the dump of rollouts"):
            length = batch.batch["response_mask"].sum(-1).tolist()
            place: dict[str, Iterator[int]] = {}
            uid = [
                f"{name}_{next(place.setdefault(name, itertools.count()))}_0" for name in batch.non_tensor_batch["uid"]
            ]
            reward_extra_infos_dict = {**reward_extra_infos_dict, diagnostics.LENGTH_FIELD: length, "uid": uid}
        return original(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir)

    return _log_rollout_data


# --------------------------------------------------------------------------------------------------------------------
# Releases
# --------------------------------------------------------------------------------------------------------------------

_USE_ENGINE = "Set trainer.use_legacy_worker_impl=disable (experimental), or install a newer verl"


def _check_release(config: Any, mode: str) -> None:
    """On the driver: refuse workers that drop `uid`; say once if this release's support is experimental."""
    release = releases.current()
    if release.legacy_workers and config.trainer.get("use_legacy_worker_impl", "auto") != "disable":
        raise ValueError(
            f"trainer.use_legacy_worker_impl={config.trainer.get('use_legacy_worker_impl', 'auto')} selects the legacy "
            f"workers of verl {release.version}, which drop uid: groups cannot be seen under {_MODE_KEY}={mode}. "
            f"{_USE_ENGINE}"
        )
    if release.experimental:
        _say(f"support of verl {release.version} is experimental: {release.experimental}")


def _wrap_legacy_update(original: Callable) -> Callable:
    @functools.wraps(original)
    def update_policy(self, *args, **kwargs):
        if self.config.loss_agg_mode in MODES:
            raise RuntimeError(
                f"{type(self).__name__} is a legacy worker of verl {releases.verl_version()}, which drops uid: groups "
                f"cannot be seen under {_MODE_KEY}={self.config.loss_agg_mode}. {_USE_ENGINE}"
            )
        return original(self, *args, **kwargs)

    return update_policy


# --------------------------------------------------------------------------------------------------------------------
# Seams
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seam:
    """One place in verl that is replaced.

    Attributes:
        module, attribute: the dotted module and the name in it.
        parameters: the signature the wrapper was written for.
        wrap: original -> replacement.
        why: what the seam is for.
        until: what in verl would make it unnecessary.
        releases: the verl releases that have it.
        everywhere: rebind by-name copies in other modules. False for a name that is replaced in its module only.
        trains: a training process must have it.
        logs: only what is logged depends on it: its loss is said, and refuses nothing.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable], Callable]
    why: str
    until: str
    releases: tuple[str, ...] = tuple(releases.BY_VERSION)
    everywhere: bool = True
    trains: bool = True
    logs: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


_AGG_LOSS = (
    "loss_mat",
    "loss_mask",
    "loss_agg_mode",
    "dp_size",
    "batch_num_tokens",
    "global_batch_size",
    "loss_scale_factor",
)
_REGISTRY = "verl has a registry of loss aggregations, as it has of policy losses"
_ROW_COLUMN = "verl carries per-response lengths or loss weights from the trainer to the loss (verl PR 7580 is near it)"


def _driver_metric(module: str, *only: str) -> Seam:
    return Seam(
        module,
        "agg_loss",
        _AGG_LOSS,
        _wrap_driver_agg_loss,
        "the driver's entropy metric is logged before advantages exist: token-mean there",
        _REGISTRY,
        releases=only or tuple(releases.BY_VERSION),
        everywhere=False,
        trains=False,
    )


def _rollout_dump(module: str, attribute: str, *only: str, legacy: bool = False) -> Seam:
    extra = ("reward_extra_infos_dict",) if legacy else ()
    return Seam(
        module,
        f"{attribute}._log_rollout_data",
        ("self", "batch", *extra, "timing_raw", "rollout_data_dir"),
        _wrap_log_rollout_data_legacy if legacy else _wrap_log_rollout_data,
        "verl dumps text: the length that training used goes with it, so that `verl-ba analyze` need not guess it",
        "verl dumps the number of valid response tokens",
        releases=only or tuple(releases.BY_VERSION),
        everywhere=False,
        trains=False,
        logs=True,
    )


def _legacy_update(module: str, attribute: str) -> Seam:
    return Seam(
        module,
        attribute,
        ("args", "kwargs"),  # a logging decorator hides the method's own
        _wrap_legacy_update,
        "the legacy workers drop uid before the update and would train token-mean under another name: refused",
        "verl 0.7.1 is no longer supported",
        releases=("0.7.1",),
        everywhere=False,
        trains=False,
    )


SEAMS = (
    Seam(
        "verl.workers.config.actor",
        "ActorConfig.__post_init__",
        ("self",),
        _wrap_actor_config,
        "verl's list of loss_agg_mode is closed; policy losses that ignore the mode are refused",
        _REGISTRY,
    ),
    Seam(
        "verl.workers.config.critic",
        "CriticConfig.__post_init__",
        ("self",),
        _wrap_critic_config,
        "the critic inherits the actor's mode, but values have no sign: token-mean",
        "critic.yaml no longer interpolates the actor's mode",
    ),
    Seam(
        "verl.utils.config",
        "validate_config",
        ("config", "use_reference_policy", "use_critic"),
        _wrap_validate_config,
        "what would fail at the first update is refused before any process starts",
        "verl rejects tokens before the update in bypass mode, too",
        trains=False,
    ),
    Seam(
        "verl.workers.engine_workers",
        "TrainingWorker.train_mini_batch",
        ("self", "data"),
        _wrap_train_mini_batch,
        "the last place where a rank sees its whole share of an update: pool lengths are taken here",
        _ROW_COLUMN,
    ),
    Seam(
        "verl.workers.utils.losses",
        "ppo_loss",
        ("config", "model_output", "data", "dp_group"),
        _wrap_loss,
        "ppo_loss selects a fixed list of fields: the pool lengths travel in config.global_batch_info",
        _ROW_COLUMN,
    ),
    Seam(
        "verl.trainer.distillation.losses",
        "distillation_ppo_loss",
        ("config", "distillation_config", "model_output", "data", "dp_group", "student_logits", "data_format"),
        _wrap_loss,
        "distillation aggregates before it calls ppo_loss",
        _ROW_COLUMN,
        releases=("0.8.0", "0.9.0", "0.9.1"),
    ),
    Seam(
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        _AGG_LOSS,
        _wrap_agg_loss,
        "the modes themselves",
        _REGISTRY,
    ),
    Seam(
        "verl.trainer.ppo.core_algos",
        "get_policy_loss_fn",
        ("name",),
        _wrap_get_policy_loss_fn,
        "a policy loss that goes past agg_loss raises; one that names another mode itself is given ours",
        "every policy loss of verl passes loss_agg_mode on",
    ),
    _driver_metric("verl.trainer.ppo.v1.trainer_base", "0.9.0", "0.9.1"),
    _driver_metric("verl.trainer.main_ppo_sync", "0.8.0"),
    _driver_metric("verl.trainer.ppo.ray_trainer"),
    _driver_metric("verl.experimental.separation.ray_trainer"),
    Seam(
        "verl.utils.py_functional",
        "rename_dict",
        ("data", "prefix"),
        _wrap_rename_dict,
        "the trainers would log actor/balance/…",
        "verl leaves names alone that have a prefix",
        trains=False,
        logs=True,
    ),
    _rollout_dump("verl.trainer.ppo.v1.trainer_base", "PPOTrainer", "0.9.0", "0.9.1"),
    _rollout_dump("verl.trainer.main_ppo_sync", "PPOTrainer", "0.8.0"),
    _rollout_dump("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", legacy=True),
    _legacy_update("verl.workers.actor.dp_actor", "DataParallelPPOActor.update_policy"),
    _legacy_update("verl.workers.actor.megatron_actor", "MegatronPPOActor.update_policy"),
)
"""Every place in verl that is replaced, in any release. The signatures are the same in every release that has one."""


def seams() -> list[Seam]:
    """The seams of the release in this process; UnsupportedVerlError if it is not supported.

    None in a verl that has the modes in its own tree (patches/): what is refused there is refused by verl.
    """
    version = releases.current().version
    return [] if releases.is_patched() else [seam for seam in SEAMS if version in seam.releases]


_MARK = "__verl_ba_seam__"
_originals: dict[str, Callable] = {}  # seam name -> what verl had there
_problems: dict[str, str] = {}  # seam name -> why it could not be attached
_installed = False


def install() -> None:
    """Attach to this process's verl, now or as its modules are loaded. Calling it again does nothing.

    Raises:
        releases.UnsupportedVerlError: verl is missing or of an unsupported release. The reason is printed to stderr first,
            because verl logs a failing plugin at DEBUG only.
    """
    global _installed
    if _installed:
        return
    try:
        present = seams()
    except releases.UnsupportedVerlError as error:
        _say(str(error))
        raise
    import wrapt

    _installed = True
    for seam in present:
        wrapt.register_post_import_hook(functools.partial(_attach, seam), seam.module)


def is_installed() -> bool:
    """Whether `install` has run in this process."""
    return _installed


def verify() -> None:
    """Check that every seam a training process needs is attached and that no module holds an unpatched copy.

    Raises:
        SeamError: one error that lists everything missing, changed or stale, with verl's version.
    """
    faults = [
        f"{seam.name}: {fault}"
        for seam in seams()
        if not seam.logs and (seam.trains or seam.module in sys.modules) and (fault := seam_fault(seam))
    ]
    logs = {seam.name for seam in SEAMS if seam.logs}
    faults += [f"{where}: still verl's own {name}" for where, name in stale_bindings() if name not in logs]
    if faults:
        raise SeamError(
            f"verl_ba {__version__} is not completely attached to verl {releases.verl_version()}, so {', '.join(MODES)} "
            "would not be exact:\n  - " + "\n  - ".join(faults) + "\nRun `verl-ba doctor` on this node"
        )


def seam_fault(seam: Seam) -> str | None:
    """Why this seam is not in force in this process; None if it is."""
    if not _installed:
        return "verl_ba.hooks.install() was not called in this process (is the package installed on this node?)"
    if seam.name in _problems:
        return _problems[seam.name]
    module = sys.modules.get(seam.module)
    if module is None:
        return "its module is not loaded"
    try:
        current = _resolve(module, seam.attribute)
    except AttributeError as error:
        return f"not found: {error}"
    while current is not None:  # another plugin may have wrapped ours
        if getattr(current, "__dict__", {}).get(_MARK) == seam.name:
            return None
        current = getattr(current, "__dict__", {}).get("__wrapped__")
    return "replaced by something else after verl_ba attached"


def stale_bindings() -> list[tuple[str, str]]:
    """Every (module attribute, seam) that still names a function of verl that was replaced everywhere."""
    replaced = {id(_originals[seam.name]): seam.name for seam in SEAMS if seam.everywhere and seam.name in _originals}
    return [(f"{module.__name__}.{key}", replaced[i]) for module, key, i in _bindings(set(replaced))]


def describe() -> str:
    """One line on what is attached: versions and seams."""
    attached = [seam.attribute for seam in seams() if seam.module in sys.modules and not seam_fault(seam)]
    return f"verl_ba {__version__} in verl {releases.verl_version()}, attached: {', '.join(attached)}"


def _attach(seam: Seam, module: ModuleType) -> None:
    try:
        original = _resolve(module, seam.attribute)
    except AttributeError as error:
        return _report(seam, f"missing: {error}")
    parameters = tuple(inspect.signature(original).parameters)  # a wrapper's are those of what it wraps
    if parameters != seam.parameters:
        return _report(seam, f"signature changed: expected {seam.parameters}, got {parameters}")
    replacement = seam.wrap(original)
    setattr(replacement, _MARK, seam.name)
    owner, _, attribute = seam.attribute.rpartition(".")
    setattr(_resolve(module, owner) if owner else module, attribute, replacement)
    _originals[seam.name] = original
    if seam.everywhere:
        for other, key, _ in _bindings({id(original)}):
            setattr(other, key, replacement)


def _report(seam: Seam, problem: str) -> None:
    _problems[seam.name] = problem
    effect = f"What it is for is left out: {seam.why}" if seam.logs else f"{', '.join(MODES)} will be refused"
    _say(f"verl {releases.verl_version()}: {seam.name} {problem}. {effect}")


def _resolve(owner: Any, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), owner)


def _bindings(ids: set[int]) -> list[tuple[ModuleType, str, int]]:
    """Every name in any loaded module that is bound to one of these objects; lazy attributes are not triggered."""
    found = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or ids.isdisjoint(map(id, vars(module).values())):  # loops in C
            continue
        found += [(module, key, id(value)) for key, value in list(vars(module).items()) if id(value) in ids]
    return found


def _say(message: str) -> None:
    """To stderr: seen on screen from any process, whatever verl's log level is."""
    print(f"[verl_ba] {message}", file=sys.stderr, flush=True)


def load_seam_modules() -> dict[str, Exception]:
    """Import every module with a seam in this release (`verl-ba doctor`); the errors by module name."""
    errors = {}
    for name in dict.fromkeys(seam.module for seam in seams()):
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = error
    return errors


def plugin_policy() -> str:
    """verl's own switch for plugins: 'auto', 'none', or names."""
    return os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
