"""The loss of a micro-batch: the column is carried past verl's list of fields, and taken away again.

If this seam is lost, every loss under our modes is an error, since `agg_loss` finds no lengths in `global_batch_info`.

`distillation_ppo_loss` aggregates before it calls `ppo_loss`: the column is set and cleared around each.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from verl_ba.hooks.attach import Seam
from verl_ba.hooks.update import ROW_COLUMN
from verl_ba.loss_agg import COLUMN, FLOOR, loss_agg_info
from verl_ba.metrics import record


def wrap_loss(original: Callable) -> Callable:
    """For `ppo_loss` and `distillation_ppo_loss`: the column is in `global_batch_info` while the loss runs, no longer."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def loss(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        if "distillation_config" in bound:  # it calls ppo_loss, where the policy loss is recorded
            with column_in_global_batch_info(bound):
                return original(*args, **kwargs)
        entropy = bound["model_output"].get("entropy") is not None
        floor_B = bound["data"].get(FLOOR, None)
        with column_in_global_batch_info(bound), record.record(entropy, floor_B) as recorded:
            value, metrics = original(*args, **kwargs)
        if recorded is not None:
            with record.guard("by the sign of the advantage"):
                metrics.update(recorded.metrics(like=metrics["actor/pg_loss"]))
        return value, metrics

    return loss


@contextlib.contextmanager
def column_in_global_batch_info(bound: dict[str, Any]) -> Iterator[None]:
    """While it is open, `global_batch_info` has the column of this micro-batch; then what it had before.

    Args:
        bound: the arguments of the loss, by name.
    """
    config, data = bound["config"], bound.get("data")
    infos = [config.global_batch_info]
    distillation = getattr(bound.get("distillation_config"), "distillation_loss", None)
    if distillation is not None:
        infos.append(distillation.global_batch_info)  # verl copies our entry there
    before = [info.get(COLUMN) for info in infos]
    try:
        if data is not None and COLUMN in data:
            config.global_batch_info.update(loss_agg_info(config.loss_agg_mode, data))
        yield
    finally:
        # A stale column of the right size would weigh the next micro-batch by this one's lengths, silently.
        for info, column in zip(infos, before, strict=True):
            info.pop(COLUMN, None)
            if column is not None:
                info[COLUMN] = column


SEAMS = (
    Seam(
        "verl.workers.utils.losses",
        "ppo_loss",
        ("config", "model_output", "data", "dp_group"),
        wrap_loss,
        "ppo_loss selects a fixed list of fields: the pool lengths travel in config.global_batch_info",
        ROW_COLUMN,
    ),
    Seam(
        "verl.trainer.distillation.losses",
        "distillation_ppo_loss",
        ("config", "distillation_config", "model_output", "data", "dp_group", "student_logits", "data_format"),
        wrap_loss,
        "distillation aggregates before it calls ppo_loss",
        ROW_COLUMN,
        since="0.8.0",
    ),
)
