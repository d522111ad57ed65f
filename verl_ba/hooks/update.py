"""The update: whole groups are visible here, and only here, so the pool lengths are taken here.

If this seam is lost, every update under our modes is an error, since `agg_loss` finds no column; and no `balance/…` metric
of whole groups is logged.

Where advantages change sign within a response (a critic, process rewards, discounting), the column has three numbers per
row, one per sign.
"""

import functools
from collections.abc import Callable

import torch

from verl_ba.hooks.attach import Seam
from verl_ba.hooks.state import describe, verify
from verl_ba.loss_agg import LOSS_AGG_REGISTRY, columns, gather
from verl_ba.metrics import record
from verl_ba.say import say
from verl_ba.support import MODE_KEY


def announce(mode: str) -> None:
    """Once, before the first update under one of our modes: check what is attached, and say it.

    Raises:
        SeamError: something is not attached.
        ValueError: VERL_BA_STRICT=1, or an untested verl, without the metrics that the check needs.
    """
    verify()
    if record.strict() and not record.enabled():
        raise ValueError(
            "VERL_BA_STRICT=1 needs the metrics of each update, which VERL_BA_METRICS=0 switches off. In an untested verl "
            "it is the default; VERL_BA_STRICT=0 would go without the check"
        )
    say(f"rank {torch.distributed.get_rank()}: {MODE_KEY}={mode}; {describe()}")


ROW_COLUMN = "verl carries per-response lengths or loss weights from the trainer to the loss (verl PR 7580 is near it)"


def wrap_update_actor(original: Callable) -> Callable:
    """Put the pool mean length of each row into the batch before verl's update, and add the metrics after it."""
    from verl.single_controller.base.decorator import MAGIC_ATTR, register

    @functools.wraps(original)
    def update_actor(self, data):
        mode = self.config.actor.loss_agg_mode
        ours, update = mode in LOSS_AGG_REGISTRY, None
        dp_group = self.actor.engine.get_data_parallel_group() if ours or record.enabled() else None
        if ours:
            if not getattr(self, "_verl_ba_announced", False):
                announce(mode)
                self._verl_ba_announced = True
            update = gather(data, dp_group)
            data.update(columns(mode, update))
        run = record.begin(data, mode, dp_group, update)
        with record.training(run):
            output = original(self, data)
        if output is not None:  # verl's output is None where a rank has no metrics
            metrics = output.get_non_tensor("metrics")
            run.add_metrics(metrics) if run else record.take_sums(metrics)
        return output

    # verl's bridge, which fetches a remote call's batch, is inside of `original`. In front of the wrapper stands another
    # one, so that the batch is here already; the inner one then finds nothing to fetch.
    return register(**getattr(original, MAGIC_ATTR))(update_actor)


SEAMS = (
    Seam(
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker.update_actor",
        ("self", "data"),
        wrap_update_actor,
        "the last place where a rank sees its whole share of an update: pool lengths are taken here",
        ROW_COLUMN,
    ),
)
