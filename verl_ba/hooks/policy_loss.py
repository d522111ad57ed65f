"""Policy losses: none goes past the aggregation.

If this seam is lost, a policy loss that averages its per-token losses by a rule of its own trains under our modes without a
word; and the losses that name a mode of verl's themselves (sapo; gspo before 0.9.1) use that one.

What each policy loss of verl does, and which are refused, is in support.py.
"""

import functools
from collections.abc import Callable

from verl_ba.hooks.attach import Seam
from verl_ba.loss_agg import checked_policy_loss
from verl_ba.metrics import record
from verl_ba.support import POLICY_LOSSES


def wrap_get_policy_loss_fn(original: Callable) -> Callable:
    """Hand out every policy loss with a check that it returns what `agg_loss` made of its losses under our mode."""

    @functools.wraps(original)
    def get_policy_loss_fn(name):
        function = original(name)
        takes_over = name in POLICY_LOSSES and POLICY_LOSSES[name].verdict == "made exact"
        checked = checked_policy_loss(name, function, takes_over)

        @functools.wraps(function)
        def policy_loss(*args, **kwargs):
            with record.policy_loss(name, args, kwargs):
                return checked(*args, **kwargs)

        return policy_loss

    return get_policy_loss_fn


SEAMS = (
    Seam(
        "verl.trainer.ppo.core_algos",
        "get_policy_loss_fn",
        ("name",),
        wrap_get_policy_loss_fn,
        "a policy loss that goes past agg_loss raises; one that names another mode itself is given ours",
        "every policy loss of verl passes loss_agg_mode on",
    ),
)
