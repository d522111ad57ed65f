"""Rewards that raise: verl's v1 trainer logs the exception, pads the missing response with a masked row, and trains on.

That is right where a reward fails on one odd answer. It is wrong where a package, a sandbox or a server is missing on a
node: all answers that need it are lost, and the run still ends with status 0. So the exception is told to the driver,
which ends the run if something is missing, and else counts it (`balance/reward_errors`).

    reward worker         agent loop, one of many            driver
    -------------         -----------------------            ------
    raises           ->   `_compute_score`: puts a note      ReplayBuffer: reads all notes whenever it looks for
                          into verl's TransferQueue, and     responses; MissingForReward ends the run
                          raises the same exception          PPOTrainer._compute_advantage: the count of the step

If these seams are lost, a node without math-verify or a sandbox trains on fewer responses, as verl alone does. verl's
other trainers let such an exception end the run by themselves.
"""

import functools
import uuid
from collections.abc import Callable
from typing import Any

from verl_ba.hooks.attach import Seam
from verl_ba.metrics.definitions import PREFIX, REWARD_ERRORS

PARTITION = "verl_ba_reward_errors"
"""The partition of the TransferQueue that holds the notes: verl's own are 'train' and 'val'."""

_UNTIL = "verl ends a run whose reward function cannot work on a node"


class MissingForReward(RuntimeError):
    """A reward cannot be computed, because something is not there that it needs."""


def something_is_missing(error: BaseException) -> bool:
    """Whether an exception of a reward says that no answer can be scored here, rather than that this one could not be.

    It does if it is an ImportError, a ConnectionError, or a dead Ray actor (a reward worker); or if it, or its class, has a
    true attribute `ends_run`, as `verl_ba.paper.scoring.errors.SandboxError` has.
    """
    from ray.exceptions import RayActorError

    return isinstance(error, ImportError | ConnectionError | RayActorError) or bool(getattr(error, "ends_run", False))


def wrap_compute_score(original: Callable) -> Callable:
    """Leave a note for the driver about a reward that raised."""

    @functools.wraps(original)
    async def _compute_score(self, outputs, kwargs):
        try:
            return await original(self, outputs, kwargs)
        except Exception as error:
            if not any(base.__name__ == "AgentLoopWorkerTQ" for base in type(self).__mro__):
                raise  # another trainer, which has no TransferQueue, and is ended by the exception
            import transfer_queue as tq

            # The last line of a RayTaskError is the exception itself; before it stands the worker's traceback.
            said = (str(error).strip().splitlines() or [""])[-1]
            name = type(error).__name__
            note = {"error": said if name in said else f"{name}: {said}", "ends_run": something_is_missing(error)}
            await tq.async_kv_put(key=uuid.uuid4().hex, partition_id=PARTITION, tag=note)
            raise

    return _compute_score


def wrap_sync_metadata(original: Callable) -> Callable:
    """End the run if a note says that something is missing. verl has just read the notes with everything else."""

    @functools.wraps(original)
    def _sync_metadata_from_transfer_queue(self) -> None:
        original(self)
        for note in notes(self):
            if note["ends_run"]:
                raise MissingForReward(
                    f"a reward could not be computed, because something that it needs is missing: {note['error']}. "
                    "verl would go on with fewer responses. Install it on every node, or start what does not answer; "
                    "`verl-ba doctor --ray ADDRESS` names the nodes. The same command resumes from the last checkpoint"
                )

    return _sync_metadata_from_transfer_queue


def wrap_compute_advantage(original: Callable) -> Callable:
    """Log how many rewards have raised since the last step: so many responses are missing."""

    @functools.wraps(original)
    def _compute_advantage(self, batch, metrics):
        seen = len(notes(getattr(self, "replay_buffer", None)))
        metrics[PREFIX + REWARD_ERRORS.name] = seen - getattr(self, "_verl_ba_reward_errors", 0)
        self._verl_ba_reward_errors = seen
        return original(self, batch, metrics)

    return _compute_advantage


def notes(replay_buffer: Any) -> list[dict]:
    """The notes of all rewards that have raised in this run, as the replay buffer last read them."""
    # A key may be seen a moment before its tag.
    partitions = getattr(replay_buffer, "partitions", {})  # a trainer that samples in another way has none
    return [note for note in partitions.get(PARTITION, {}).values() if "error" in note]


SEAMS = (
    Seam(
        # Not its subclass AgentLoopWorkerTQ, which is no class: `ray.remote` decorates it where it is defined.
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._compute_score",
        ("self", "outputs", "kwargs"),
        wrap_compute_score,
        "a reward that raises is told to the driver",
        _UNTIL,
        since="0.9.0",
        everywhere=False,
        trains=False,
    ),
    Seam(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._sync_metadata_from_transfer_queue",
        ("self",),
        wrap_sync_metadata,
        "a reward that lacks a package, a sandbox or a server ends the run",
        _UNTIL,
        since="0.9.0",
        everywhere=False,
        trains=False,
    ),
    Seam(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._compute_advantage",
        ("self", "batch", "metrics"),
        wrap_compute_advantage,
        "rewards that raised are counted in the log",
        _UNTIL,
        since="0.9.0",
        everywhere=False,
        trains=False,
        logs=True,
    ),
)
