"""The configuration: verl's actor accepts the modes, and what would ignore them is refused before it trains.

If this seam is lost, `loss_agg_mode=balanced` is an "Invalid loss_agg_mode" of verl's own; without `validate_config`, what
is refused is refused late, by a training rank instead of the driver.

A critic inherits the actor's mode by interpolation, but values have no sign: it uses token-mean, and says so.
"""

import functools
from collections.abc import Callable
from typing import Any

from verl_ba import releases
from verl_ba.hooks import legacy_0_7_1
from verl_ba.hooks.attach import Seam
from verl_ba.loss_agg import LOSS_AGG_REGISTRY, VERL_MODES
from verl_ba.say import say
from verl_ba.support import BYPASS_REJECTION, MODE_KEY, POLICY_LOSSES

_LOCAL_MEAN = "each micro-batch, as every critic of this verl release does"


def wrap_actor_config(original: Callable) -> Callable:
    """Let verl check everything but the name of a mode that it does not know."""

    @functools.wraps(original)
    def __post_init__(self) -> None:
        mode = self.loss_agg_mode
        if mode not in LOSS_AGG_REGISTRY:
            try:
                return original(self)
            except ValueError as error:
                if "loss_agg_mode" not in str(error):
                    raise
                raise ValueError(
                    f"{MODE_KEY}={mode!r} is not a loss aggregation mode. Expected one of verl's own "
                    f"({', '.join(VERL_MODES)}) or of verl_ba's ({', '.join(LOSS_AGG_REGISTRY)})"
                ) from error
        refuse_policy_loss(mode, self.policy_loss)
        # verl's list of modes is closed, inside the function: let it check the rest under a name that it knows.
        object.__setattr__(self, "loss_agg_mode", "token-mean")
        try:
            return original(self)
        finally:
            object.__setattr__(self, "loss_agg_mode", mode)

    return __post_init__


def refuse_policy_loss(mode: str, policy_loss: Any) -> None:
    """Raise ValueError if this policy loss cannot do what the mode says."""
    name = policy_loss.get("loss_mode", "vanilla")
    support = POLICY_LOSSES.get(name)
    if support is not None and support.verdict == "refused":
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} cannot follow {MODE_KEY}={mode}: {support.why}. "
            "Choose another policy loss (vanilla, gspo, sapo, clip_cov, kl_cov, gpg, cispo, …), or one of verl's own modes"
        )
    if name == "bypass_mode":
        refuse_bypass_rejection(mode, policy_loss.get("rollout_correction"), "actor_rollout_ref.actor.policy_loss.")


def refuse_bypass_rejection(mode: str, correction: Any, where: str) -> None:
    """Raise ValueError if tokens would be rejected inside the loss, after the lengths were taken."""
    rejection = correction.get("rollout_rs") if correction else None
    if rejection:
        raise ValueError(
            f"{where}rollout_correction.rollout_rs={rejection} cannot follow {MODE_KEY}={mode}: {BYPASS_REJECTION.why}"
        )


def wrap_critic_config(original: Callable) -> Callable:
    """Give a critic that inherits one of our modes token-mean, and say so."""

    @functools.wraps(original)
    def __post_init__(self) -> None:
        if self.loss_agg_mode in LOSS_AGG_REGISTRY:
            say(
                f"critic.loss_agg_mode={self.loss_agg_mode} (inherited from the actor): values have no sign, so the "
                f"critic uses token-mean over {'the global batch' if releases.current().global_critic else _LOCAL_MEAN}"
            )
            object.__setattr__(self, "loss_agg_mode", "token-mean")
        return original(self)

    return __post_init__


def wrap_validate_config(original: Callable) -> Callable:
    """Refuse on the driver, before any process starts, what would fail at the first update."""

    @functools.wraps(original)
    def validate_config(config, use_reference_policy, use_critic) -> None:
        mode = config.actor_rollout_ref.actor.loss_agg_mode
        if mode in LOSS_AGG_REGISTRY:
            check_release(config, mode)
            correction = config.algorithm.get("rollout_correction")
            if correction and correction.get("bypass_mode"):
                refuse_bypass_rejection(mode, correction, "algorithm.")
        return original(config, use_reference_policy=use_reference_policy, use_critic=use_critic)

    return validate_config


def check_release(config: Any, mode: str) -> None:
    """Refuse workers that drop `uid`; say once if this release's support is experimental."""
    release = releases.current()
    if release.legacy_workers:
        legacy_0_7_1.refuse_legacy_workers(config, mode, release.version)
    if release.experimental:
        say(f"support of verl {release.version} is experimental: {release.experimental}")
    if why := releases.untested():
        check_untested(config, mode, why)


FORMULAS = {"balanced": "Σ m·ℓ / (B·ℓ̄_group,sign)", "group-mean-token-mean": "Σ m·ℓ / (B·ℓ̄_group)"}
"""What the auditor must read from the losses under our modes."""


def check_untested(config: Any, mode: str, why: str) -> None:
    """Let a verl that is none of the tested releases show on the driver that it fits, before any process starts.

    Every seam must attach, and the losses of this configuration, with verl's default policy loss, must weigh the tokens of a
    synthetic batch as the mode says (verl_ba/tools/audit). What an engine does is seen by each rank: there weights that
    do not add up end the run (metrics/record.py, `strict`).

    Raises:
        SeamError: a place in verl is not what the hooks were written for.
        ValueError: the losses do something else.
    """
    from omegaconf import OmegaConf

    from verl_ba import hooks
    from verl_ba.tools.audit import audit

    hooks.load_seam_modules()
    hooks.verify()
    tried: Any = OmegaConf.merge(config, {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanilla"}}}})
    report = audit(tried)
    faults = [finding.message for finding in report.faults if finding.term.startswith("policy loss")]
    got, expected = report.terms[0].formula, FORMULAS.get(mode, report.terms[0].formula)
    if not faults and got != expected:
        faults.append(f"the policy loss is {got}, expected {expected}")
    version = releases.verl_version()
    if faults:
        raise ValueError(
            f"verl {version} is untested ({why}), and its losses do not do what {MODE_KEY}={mode} says:\n  - "
            + "\n  - ".join(faults)
            + f"\nInstall a tested release, for example pip install verl=={releases.RELEASES[-1].version}"
        )
    say(
        f"verl {version} is UNTESTED with verl_ba ({why}). Every seam fits, and its losses passed the self-test. Each rank "
        "checks the weights that it applies (balance/active/applied_residual) and ends the run if they do not add up; "
        "VERL_BA_STRICT=0 would let it go on"
    )


REGISTRY = "verl has a registry of loss aggregations, as it has of policy losses"

SEAMS = (
    Seam(
        "verl.workers.config.actor",
        "ActorConfig.__post_init__",
        ("self",),
        wrap_actor_config,
        "verl's list of loss_agg_mode is closed; policy losses that ignore the mode are refused",
        REGISTRY,
    ),
    Seam(
        "verl.workers.config.critic",
        "CriticConfig.__post_init__",
        ("self",),
        wrap_critic_config,
        "the critic inherits the actor's mode, but values have no sign: token-mean",
        "critic.yaml no longer interpolates the actor's mode",
    ),
    Seam(
        "verl.utils.config",
        "validate_config",
        ("config", "use_reference_policy", "use_critic"),
        wrap_validate_config,
        "what would fail at the first update is refused before any process starts",
        "verl rejects tokens before the update in bypass mode, too",
        trains=False,
    ),
)
