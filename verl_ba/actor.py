"""verl's own actor configs, under a name that attaches verl_ba: what `actor_rollout_ref.actor._target_` may point to.

verl builds the actor's config from `_target_` where it validates a run and in every training worker, so a run can load this
package by its configuration alone (docs/loading.md). The classes are verl's, hooked like every ActorConfig.
"""

from verl_ba import plugin  # noqa: F401, I001  attaches, before anything is built

from verl.workers.config import FSDPActorConfig, McoreActorConfig

__all__ = ["FSDPActorConfig", "McoreActorConfig"]
