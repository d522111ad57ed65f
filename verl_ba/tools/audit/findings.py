"""What follows from the readings: one function for each kind of finding, all written into the report."""

from dataclasses import fields, replace

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos

from verl_ba.support import engine_fault
from verl_ba.tools.audit.batch import WHOLE, make_batch
from verl_ba.tools.audit.readings import Reading, Report
from verl_ba.tools.audit.rules import FITS, Match
from verl_ba.tools.audit.terms import Actor

ACTOR = "actor_rollout_ref.actor"

VERL_MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")
"""Modes of verl that differ on any batch: what does not differ under them ignores the mode."""

LOSS_SETTINGS = (
    "loss_scale_factor",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
    "kl_loss_coef",
    "policy_loss.clip_cov_ratio",
    "policy_loss.clip_cov_lb",
    "policy_loss.clip_cov_ub",
    "policy_loss.kl_cov_ratio",
    "policy_loss.ppo_kl_coef",
    "policy_loss.dro_beta",
)
"""Numbers under `actor` that some loss reads. One that was set and changes nothing is ignored."""


def split(report: Report, reading: Reading) -> None:
    """Value or gradient is not the same under every split."""
    depends = [
        f"on the {name} split ({dependence}; the gradient changes by up to {dependence.change:.2g} of its norm)"
        for name, dependence in (("micro-batch", reading.micro_batch), ("rank", reading.rank))
        if dependence
    ]
    if not depends:
        return
    loss = core_algos.POLICY_LOSS_REGISTRY[report.policy_loss]
    if reading.match and "T_max" in reading.match.formula:
        advice = f"Set {ACTOR}.loss_scale_factor: without it the divisor is the longest response at hand"
    elif reading.term.name != "policy loss":
        advice = f"It is the aggregation, loss_agg_mode={reading.term.mode}, that does so"
    elif loss.__module__ != core_algos.__name__:
        advice = (
            f"In {loss.__module__}.{loss.__qualname__}, return agg_loss(…, **config.global_batch_info) of per-token losses, "
            "and take no mean, count or choice over the micro-batch besides"
        )
    else:
        advice = f"It is verl's own policy_loss.loss_mode={report.policy_loss} that does so"
    report.add("fault", reading.term.name, "split", f"it depends {' and '.join(depends)}. {advice}")


def masked(report: Report, reading: Reading) -> None:
    """Tokens that the response mask leaves out have weight."""
    if reading.behind_mask:
        report.add(
            "fault",
            reading.term.name,
            "masked",
            "tokens that response_mask leaves out, such as tool output, have weight: what stands behind it makes up to "
            f"{reading.behind_mask:.2g} of the loss or of its gradient's norm. Multiply by response_mask, or pass it to "
            "agg_loss, before anything is summed",
        )


def empty(report: Report, readings: list[Reading], actor: Actor) -> None:
    """A mode that counts empty responses in B differs in scale from token-mean, which cannot count them."""
    rows, found = len(actor.batch.mask), readings[0].match
    filled = int((actor.batch.mask.sum(1) > 0).sum())
    if filled == rows or found is None or not found.rule.formula.startswith("Σ m·ℓ / (B·ℓ̄_group"):
        return
    report.add(
        "note",
        readings[0].term.name,
        "empty",
        f"B counts empty responses, here {rows - filled} of {rows}, as verl's seq-mean modes do, and token-mean does not. "
        f"Where filters empty responses, weights add up to the share that is left, here {filled / rows:.3g}, and under "
        "token-mean to 1",
    )


def rule(report: Report, reading: Reading, actor: Actor, asked: Match | None) -> None:
    """The weights are not those of the mode, or they are, for a term whose users may expect a plain mean of tokens."""
    term, found = reading.term, reading.match
    policy = term.name == "policy loss"
    if asked is None:  # the mode itself has no rule, which the split findings say
        return
    if policy and (found is None or found.rule is not asked.rule) and _mode_changes_nothing(actor):
        actual = found.words if found else "a rule of its own"
        report.add(
            "fault",
            term.name,
            "ignored",
            f"{ACTOR}.loss_agg_mode={term.mode} is ignored: policy_loss.loss_mode={report.policy_loss} gives the same "
            f"gradient under {', '.join(VERL_MODES)}. It divides by {actual}",
        )
    elif found is None:
        if not reading.micro_batch and not reading.rank:
            report.add(
                "note",
                term.name,
                "rule",
                "its weights do not depend on the split, and follow no rule that is known here: it may reweigh advantages",
            )
    elif found.more:
        report.add(
            "fault",
            term.name,
            "rule",
            f"besides what {ACTOR}.loss_agg_mode={term.mode} asks for, it adds {found.more[0]:.4g} × a mean by "
            f"{found.more[1].words}",
        )
    elif found.rule is not asked.rule:
        report.add(
            "fault",
            term.name,
            "rule",
            f"{ACTOR}.loss_agg_mode={term.mode} divides by {asked.words}, but this by {found.words}",
        )
    elif abs(found.factor / asked.factor - 1) > FITS:
        report.add(
            "fault",
            term.name,
            "factor",
            f"it is {found.factor / asked.factor:.4g} times what {ACTOR}.loss_agg_mode={term.mode} asks for: a constant "
            "factor, which changes its share against the other terms",
        )
    elif not policy and not found.rule.of_tokens:
        tokens = actor.batch.mask.sum()
        times = (reading.weight[0] * tokens)[actor.batch.mask.bool()]
        longest = int(actor.batch.mask.sum(1).max())
        report.add(
            "note",
            term.name,
            "follows",
            f"it follows {ACTOR}.loss_agg_mode={term.mode}: on responses of 1 to {longest} tokens, a token weighs "
            f"{times.min():.2g} to {times.max():.2g} times what it does under token-mean. Its coefficient was perhaps "
            "chosen under another mode",
        )


def _mode_changes_nothing(actor: Actor) -> bool:
    bare = {"entropy_coeff": 0.0, "use_kl_loss": False}
    configured = actor.measure(WHOLE, True, **bare)
    return not any(actor.measure(WHOLE, True, **bare, loss_agg_mode=m).differs(configured) for m in VERL_MODES)


def settings(report: Report, actor: Actor) -> None:
    """A number that was set, and whose change changes neither value nor gradient."""
    config = actor.config()
    usual = {f.name: f.default for f in fields(config)}
    if config.policy_loss is not None:
        from verl.workers.config import PolicyLossConfig

        usual |= {f"policy_loss.{f.name}": f.default for f in fields(PolicyLossConfig)}
    base = actor.measure(WHOLE, True)
    for key in LOSS_SETTINGS:
        value = OmegaConf.select(actor.node, key)
        if value is None or value == usual.get(key):
            continue
        others = [value * times for times in (2, 1000, 0.1)] if value else [0.1, 10]
        if not any(actor.measure(WHOLE, True, **{key.replace(".", "__"): other}).differs(base) for other in others):
            report.add(
                "fault",
                "policy loss",
                "ignored",
                f"{ACTOR}.{key}={value} is ignored: with {', '.join(f'{other:g}' for other in others)} value and gradient "
                f"of the loss are the same, under loss_agg_mode={report.mode} and policy_loss.loss_mode={report.policy_loss}",
            )


def correction(report: Report, actor: Actor, config: DictConfig) -> None:
    """Rejection or importance weights that never reach the loss."""
    if not actor.batch.suspect.any() or report.policy_loss == "bypass_mode":
        return
    without = Actor(actor.node, make_batch(config, empty=bool((actor.batch.length == 0).any()), correct=False))
    if without.measure(WHOLE, True).differs(actor.measure(WHOLE, True)):
        return
    correction = config.algorithm.rollout_correction
    which = [f"{key}={correction.get(key)}" for key in ("rollout_rs", "rollout_is") if correction.get(key)]
    if correction.get("bypass_mode"):
        why = (
            "with bypass_mode the trainer leaves it to the policy loss. Set policy_loss.loss_mode=bypass_mode and "
            "policy_loss.rollout_correction in the actor, too"
        )
    elif not config.actor_rollout_ref.rollout.get("calculate_log_probs"):
        why = "the rollout keeps no log-probabilities. Set actor_rollout_ref.rollout.calculate_log_probs=True"
    else:
        why = "its threshold lets a factor of 20 between rollout and actor pass"
    report.add(
        "fault", "policy loss", "ignored", f"algorithm.rollout_correction: {', '.join(which)} changes nothing: {why}"
    )


def stale(report: Report, readings: list[Reading], actor: Actor) -> None:
    """A count of tokens that holds some that were rejected since."""
    batch = actor.batch
    before = [r.term.name for r in readings if r.match and r.match.rule.of_tokens == "before rejection"]
    if before:
        counted, left = int(batch.counted.sum()), int(batch.mask.sum())
        report.add(
            "fault",
            ", ".join(before),
            "stale",
            f"batch_num_tokens is stale: it counts loss_mask, which the v1 trainer sets when the rollout is stored, while "
            f"rejection changes response_mask only. On the synthetic batch {counted} tokens are counted and {left} are left: "
            f"the loss is {left / counted:.2f} times their mean, and shrinks as more is rejected. The legacy trainer "
            "(trainer.use_v1=False) and the modes that do not count tokens are exact",
        )
    policy = readings[0]
    if policy.match and policy.match.rule.of_tokens == "all" and _rejects_inside(actor):
        report.add(
            "fault",
            policy.term.name,
            "stale",
            "batch_num_tokens is stale: tokens are rejected inside the loss, after they were counted, so the loss shrinks as "
            "more is rejected",
        )


def _rejects_inside(actor: Actor) -> bool:
    """Whether a response that the rollout engine disagrees on is in the mask, and yet of no influence on the loss."""
    batch = actor.batch
    rows = [int(i) for i in batch.suspect.nonzero() if (batch.old[i] != batch.policy[i]).all() and batch.mask[i].any()]
    if not rows:
        return False
    doubled = batch.advantage.clone()
    doubled[rows] *= 2  # a clipped token has no gradient either, but a value
    other = Actor(actor.node, replace(batch, advantage=doubled))
    bare = {"entropy_coeff": 0.0, "use_kl_loss": False}
    return not other.measure(WHOLE, False, **bare).differs(actor.measure(WHOLE, False, **bare))


def critic(report: Report, reading: Reading, config: DictConfig) -> None:
    """The critic's mode is the actor's, by interpolation."""
    written = OmegaConf.to_container(config.critic, resolve=False)
    assert isinstance(written, dict)
    inherited = str(written["loss_agg_mode"]).startswith("${")
    if report.mode == "token-mean" or config.critic.loss_agg_mode != report.mode:
        return
    how = "inherits" if inherited else "has"
    report.add(
        "note",
        reading.term.name,
        "inherits",
        f"critic.loss_agg_mode {how} the actor's mode, {report.mode}. The critic divides by {reading.row().denominator}. Set "
        "critic.loss_agg_mode if it should do something else",
    )


def mini_batches(report: Report, readings: list[Reading], config: DictConfig) -> None:
    """Groups that straddle mini-batches, where groups matter."""
    grouped = [r.term.name for r in readings if r.match and "ℓ̄_group" in r.match.formula]
    update, mini = config.data.get("train_batch_size"), config.actor_rollout_ref.actor.get("ppo_mini_batch_size")
    if grouped and update and mini and update > mini:
        report.add(
            "note",
            ", ".join(grouped),
            "groups",
            f"an update of data.train_batch_size={update} prompts has mini-batches of {ACTOR}.ppo_mini_batch_size={mini}; "
            "rows may be reordered, so that a group straddles mini-batches. Its mean lengths come from the whole update, B "
            "is one mini-batch's",
        )


def engine(report: Report, config: DictConfig) -> None:
    """What no split of the loss can show: the engine's forward pass is wrong."""
    if fault := engine_fault(config):
        report.add("fault", "model", "refused", fault)
