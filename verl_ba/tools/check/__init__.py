"""One update of each mode through verl's own worker, on the ranks and in the layout of a configuration, against float64.

`verl-ba audit` runs the losses of a configuration; this runs its engine. A small random model of the configured architecture
is trained by verl's `ActorRolloutRefWorker`, in real processes that share a real process group, with the strategy, parallel
sizes and micro-batching that the configuration names. What is left of each update is its whole gradient and its loss. They
are compared with a reference that shares no code with verl or this package's aggregation: plain transformers, one response
at a time, weights written out literally (reference.py).

    batch.py       the responses of the update
    model.py       the small model
    reference.py   what loss and gradient should be
    worker.py      what each rank runs
    check.py       settings -> ranks -> errors

What is compared is everything between the batch and the gradient: how an engine splits rows over ranks and micro-batches,
scales losses, and reduces gradients. The policy loss is always PPO's, with an entropy and a KL term.
"""

from verl_ba.tools.check.check import CheckError, Report, Result, check, device_of_this_machine, measure
from verl_ba.tools.check.job import MODES, Case, Job

__all__ = ["MODES", "Case", "CheckError", "Job", "Report", "Result", "check", "device_of_this_machine", "measure"]
