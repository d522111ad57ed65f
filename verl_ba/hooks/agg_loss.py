"""The aggregation itself: verl's `agg_loss` gets the modes.

If this seam is lost, the modes are an "Invalid loss_agg_mode" of verl's own at the first loss; without the drivers' seams, a
run ends where its driver logs `actor/entropy`.

That metric is logged before advantages, so signs, exist: it is a token-mean, at those call sites and only there. Lengths that
are missing anywhere else are an error.
"""

import functools
from collections.abc import Callable

from verl_ba.hooks.attach import Seam
from verl_ba.hooks.config import REGISTRY
from verl_ba.loss_agg import LOSS_AGG_REGISTRY, agg_registered_loss, enter_agg_loss, metric_loss_agg_mode
from verl_ba.metrics import record

PARAMETERS = (
    "loss_mat",
    "loss_mask",
    "loss_agg_mode",
    "dp_size",
    "batch_num_tokens",
    "global_batch_size",
    "loss_scale_factor",
)


def wrap_agg_loss(original: Callable) -> Callable:
    """verl's modes as they are; a registered mode by the lengths in `pool_mean_length`."""

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
        mode = enter_agg_loss(loss_agg_mode)
        if mode in LOSS_AGG_REGISTRY:
            rest: tuple = loss_mask, mode, pool_mean_length, global_batch_size, dp_size
            function: Callable = agg_registered_loss
        else:
            rest = loss_mask, mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
            function = original
        value = function(loss_mat, *rest)
        record.see(loss_mat, loss_mask, lambda matrix: function(matrix, *rest))
        return value

    return agg_loss


def wrap_driver_agg_loss(original: Callable) -> Callable:
    """For the trainers' `actor/entropy`: token-mean, there and only there."""

    @functools.wraps(original)
    def agg_loss(loss_mat, loss_mask, loss_agg_mode, *args, **kwargs):
        return original(loss_mat, loss_mask, metric_loss_agg_mode(loss_agg_mode), *args, **kwargs)

    return agg_loss


def _driver_metric(module: str, since: str | None = None, before: str | None = None) -> Seam:
    return Seam(
        module,
        "agg_loss",
        PARAMETERS,
        wrap_driver_agg_loss,
        "the driver's entropy metric is logged before advantages exist: token-mean there",
        REGISTRY,
        since=since,
        before=before,
        everywhere=False,
        trains=False,
    )


SEAMS = (
    Seam("verl.trainer.ppo.core_algos", "agg_loss", PARAMETERS, wrap_agg_loss, "the modes themselves", REGISTRY),
    _driver_metric("verl.trainer.ppo.v1.trainer_base", since="0.9.0"),
    _driver_metric("verl.trainer.main_ppo_sync", since="0.8.0", before="0.9.0"),
    _driver_metric("verl.trainer.ppo.ray_trainer"),
    _driver_metric("verl.experimental.separation.ray_trainer"),
)
