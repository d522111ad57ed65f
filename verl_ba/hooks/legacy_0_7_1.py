"""verl 0.7.1's legacy workers drop `uid` before the update: refused. Delete this file with the release.

If this seam is lost, a legacy worker of 0.7.1 trains token-mean under another name.
"""

import functools
from collections.abc import Callable
from typing import Any

from verl_ba import releases
from verl_ba.hooks.attach import Seam
from verl_ba.loss_agg import LOSS_AGG_REGISTRY
from verl_ba.support import MODE_KEY

_USE_ENGINE = "Set trainer.use_legacy_worker_impl=disable (experimental), or install a newer verl"


def refuse_legacy_workers(config: Any, mode: str, version: str) -> None:
    """On the driver: raise ValueError where the configuration selects the legacy workers."""
    setting = config.trainer.get("use_legacy_worker_impl", "auto")
    if setting != "disable":
        raise ValueError(
            f"trainer.use_legacy_worker_impl={setting} selects the legacy workers of verl {version}, which drop uid: "
            f"groups cannot be seen under {MODE_KEY}={mode}. {_USE_ENGINE}"
        )


def wrap_legacy_update(original: Callable) -> Callable:
    """Raise at a legacy worker's update, wherever its configuration came from."""

    @functools.wraps(original)
    def update_policy(self, *args, **kwargs):
        if self.config.loss_agg_mode in LOSS_AGG_REGISTRY:
            raise RuntimeError(
                f"{type(self).__name__} is a legacy worker of verl {releases.verl_version()}, which drops uid: groups "
                f"cannot be seen under {MODE_KEY}={self.config.loss_agg_mode}. {_USE_ENGINE}"
            )
        return original(self, *args, **kwargs)

    return update_policy


def _legacy_update(module: str, attribute: str) -> Seam:
    return Seam(
        module,
        attribute,
        ("args", "kwargs"),  # a logging decorator hides the method's own
        wrap_legacy_update,
        "the legacy workers drop uid before the update and would train token-mean under another name: refused",
        "verl 0.7.1 is no longer supported",
        before="0.8.0",
        everywhere=False,
        trains=False,
    )


SEAMS = (
    _legacy_update("verl.workers.actor.dp_actor", "DataParallelPPOActor.update_policy"),
    _legacy_update("verl.workers.actor.megatron_actor", "MegatronPPOActor.update_policy"),
)
