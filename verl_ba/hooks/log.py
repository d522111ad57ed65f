"""What verl logs: names under `balance/`, and the length that training used in its dumps of rollouts.

If this seam is lost, the trainers log `actor/balance/…`, and `verl-ba analyze` must count the tokens of a dump's text.
Nothing that trains depends on it.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from verl_ba.hooks.attach import Seam
from verl_ba.metrics import record
from verl_ba.metrics.definitions import PREFIX


def wrap_rename_dict(original: Callable) -> Callable:
    """The trainers put 'actor/' before every name that comes from an update; ours have a prefix of their own."""

    @functools.wraps(original)
    def rename_dict(data, prefix=""):
        ours = {key: value for key, value in data.items() if key.startswith(PREFIX)}
        return original({key: value for key, value in data.items() if key not in ours}, prefix) | ours

    return rename_dict


def wrap_log_rollout_data(original: Callable) -> Callable:
    """The trainers whose batch is in TransferQueue: verl's dump names rows by their key there."""

    @functools.wraps(original)
    def _log_rollout_data(self, batch, timing_raw, rollout_data_dir):
        length = {}
        with record.guard("in the dump of rollouts"):
            length = dict(zip(batch.keys, lengths_in_queue(batch), strict=True))

        def dump(*args, reward_extra_infos_dict, **kwargs):
            keys = reward_extra_infos_dict.get("uid", ())
            if length and all(key in length for key in keys):
                reward_extra_infos_dict |= {LENGTH_FIELD: [length[key] for key in keys]}
            return type(self)._dump_generations(self, *args, reward_extra_infos_dict=reward_extra_infos_dict, **kwargs)

        self._dump_generations = dump
        try:
            return original(self, batch, timing_raw, rollout_data_dir)
        finally:
            del self._dump_generations

    return _log_rollout_data


def wrap_log_rollout_data_legacy(original: Callable) -> Callable:
    """The trainers whose batch is a DataProto: verl's dump has no uid there. Ours has the v1 trainer's form."""

    @functools.wraps(original)
    def _log_rollout_data(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir):
        with record.guard("in the dump of rollouts"):
            length = batch.batch["response_mask"].sum(-1).tolist()
            place: dict[str, Iterator[int]] = {}
            uid = [
                f"{name}_{next(place.setdefault(name, itertools.count()))}_0" for name in batch.non_tensor_batch["uid"]
            ]
            reward_extra_infos_dict = {**reward_extra_infos_dict, LENGTH_FIELD: length, "uid": uid}
        return original(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir)

    return _log_rollout_data


LENGTH_FIELD = "response_length"
"""The field that a line of verl's rollout dump gets: valid response tokens in the mask that training used [tokens]."""


def lengths_in_queue(batch: Any) -> list[int]:
    """Valid response tokens of each row of a batch in TransferQueue, in the order of its keys [tokens]."""
    import transfer_queue as tq

    fields: Any = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    return [int(row.sum()) for row in fields["response_mask"].unbind()]


def _rollout_dump(
    module: str, attribute: str, since: str | None = None, before: str | None = None, legacy: bool = False
) -> Seam:
    extra = ("reward_extra_infos_dict",) if legacy else ()
    return Seam(
        module,
        f"{attribute}._log_rollout_data",
        ("self", "batch", *extra, "timing_raw", "rollout_data_dir"),
        wrap_log_rollout_data_legacy if legacy else wrap_log_rollout_data,
        "verl dumps text: the length that training used goes with it, so that `verl-ba analyze` need not guess it",
        "verl dumps the number of valid response tokens",
        since=since,
        before=before,
        everywhere=False,
        trains=False,
        logs=True,
    )


SEAMS = (
    Seam(
        "verl.utils.py_functional",
        "rename_dict",
        ("data", "prefix"),
        wrap_rename_dict,
        "the trainers would log actor/balance/…",
        "verl leaves names alone that have a prefix",
        trains=False,
        logs=True,
    ),
    _rollout_dump("verl.trainer.ppo.v1.trainer_base", "PPOTrainer", since="0.9.0"),
    _rollout_dump("verl.trainer.main_ppo_sync", "PPOTrainer", since="0.8.0", before="0.9.0"),
    _rollout_dump("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", legacy=True),
)
