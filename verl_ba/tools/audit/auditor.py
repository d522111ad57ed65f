"""The audit: from a configuration to a report."""

from dataclasses import replace
from typing import Any

from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass

from verl_ba import hooks, releases
from verl_ba.tools.audit import findings
from verl_ba.tools.audit.batch import Batch, Split, make_batch
from verl_ba.tools.audit.config import AuditError, changed, import_losses, scalars
from verl_ba.tools.audit.findings import ACTOR
from verl_ba.tools.audit.readings import Report, Row, read, weights
from verl_ba.tools.audit.rules import match, rules
from verl_ba.tools.audit.terms import Actor, actor_terms, entropy_term, value_term

NEEDED = (f"{ACTOR}.loss_agg_mode", "actor_rollout_ref.rollout", "algorithm.adv_estimator", "trainer", "data")


def audit(config: DictConfig) -> Report:
    """Run every term of the loss of a composed configuration, under every split, and report.

    Raises:
        AuditError: the configuration is not one of verl's trainers, or verl would not start with it.
    """
    hooks.install()  # what is audited is what a run would use
    actor, report = _actor(config)
    findings.engine(report, config)
    try:
        batch = actor.batch = _usable_batch(actor, config, report)
        candidates = rules(batch, actor.config().loss_scale_factor)
        # verl aggregates entropy by the mode whatever the policy loss is: so it shows what the mode asks for
        entropy = entropy_term(actor, 1.0)
        asked = match(weights(entropy), entropy, batch, candidates)
        others = replace(actor, batch=batch.with_others_behind_the_mask(), measured={})
        readings = [
            read(term, behind, batch, candidates, asked.rule if asked else None)
            for term, behind in zip(actor_terms(actor), actor_terms(others), strict=True)
        ]
    except LossError as error:
        report.terms.append(Row("policy loss", "refused", "–", "–", "–"))
        report.add("fault", "policy loss", "refused", f"{error}")
        return report
    for reading in readings:
        report.terms.append(reading.row())
        findings.split(report, reading)
        findings.masked(report, reading)
        findings.rule(report, reading, actor, asked)
    findings.settings(report, actor)
    findings.empty(report, readings, actor)
    findings.correction(report, actor, config)
    if (node := _critic(config)) is not None:
        behind = value_term(node, others.batch)
        reading = read(value_term(node, batch), behind, batch, rules(batch, node.get("loss_scale_factor")), None)
        readings.append(reading)
        report.terms.append(reading.row())
        findings.split(report, reading)
        findings.masked(report, reading)
        findings.critic(report, reading, config)
    findings.stale(report, readings, actor)
    findings.mini_batches(report, readings, config)
    return report


class LossError(Exception):
    """A policy loss raised; the message says what."""


def _actor(config: DictConfig) -> tuple[Actor, Report]:
    external = OmegaConf.select(config, "actor_rollout_ref.model.external_lib") or []
    for module in [external] if isinstance(external, str) else external:  # as verl's workers do
        import_losses(module)
    absent = [key for key in NEEDED if OmegaConf.select(config, key) is None]
    if absent:
        raise AuditError(
            f"expected the composed configuration of a verl trainer; got one without {', '.join(absent)}, with "
            f"{', '.join(map(str, config)) or 'nothing'}"
        )
    try:
        node = scalars(config.actor_rollout_ref.actor, "policy_loss")
        # any size serves, for all are tried
        if node.get("ppo_micro_batch_size_per_gpu") is None and node.get("ppo_micro_batch_size") is None:
            node.ppo_micro_batch_size_per_gpu = 1
        actor_config = omega_conf_to_dataclass(node)
        batch = make_batch(config)
        distil = _distillation(config)
    except (OmegaConfBaseException, HydraException, ValueError, AssertionError) as error:
        raise AuditError(f"verl would not start with this configuration: {_innermost(error)}") from error
    report = Report(
        verl=str(releases.verl_version()),
        trainer="v1" if batch.nested else "legacy",
        mode=actor_config.loss_agg_mode,
        policy_loss=actor_config.policy_loss.get("loss_mode", "vanilla"),
    )
    if report.policy_loss not in core_algos.POLICY_LOSS_REGISTRY:
        raise AuditError(
            f"{ACTOR}.policy_loss.loss_mode={report.policy_loss} is not registered. Expected one of "
            f"{', '.join(core_algos.POLICY_LOSS_REGISTRY)}; if a module or file of yours registers it, name it with --import"
        )
    return Actor(node, batch, distil), report


def _innermost(error: BaseException) -> str:
    """Hydra wraps what a configuration class raises."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def _distillation(config: DictConfig) -> Any:
    node = config.get("distillation")
    if not node or not node.get("enabled"):
        return None
    from verl.workers.config import DistillationConfig

    # not enabled here: its teachers, which are models, would be looked up
    return DistillationConfig(enabled=False, distillation_loss=omega_conf_to_dataclass(node.distillation_loss))


def _critic(config: DictConfig) -> DictConfig | None:
    """The critic's settings, if the trainer has one: verl's own condition."""
    node = config.get("critic")
    if node is None or not (node.enable if node.get("enable") is not None else config.algorithm.adv_estimator == "gae"):
        return None
    return changed(scalars(node), ppo_micro_batch_size_per_gpu=1, ppo_micro_batch_size=None)


def _usable_batch(actor: Actor, config: DictConfig, report: Report) -> Batch:
    """The batch with an empty response, or without if the losses cannot do with one; LossError if they fail anyway."""

    if (failure := _failure(actor)) is None:
        return actor.batch
    actor.batch = make_batch(config, empty=False)
    actor.measured.clear()
    if (again := _failure(actor)) is not None:
        raise LossError(f"it fails on the synthetic batch, as it would at its first call: {again[1]}") from again[1]
    term, error = failure
    report.add(
        "fault",
        term,
        "refused",
        f"it fails on a micro-batch without a valid token ({type(error).__name__}: {error}), as padding rows or rejected "
        "responses may make one. Below, no response is empty",
    )
    return actor.batch


def _failure(actor: Actor) -> tuple[str, Exception] | None:
    """The first term that raises in micro-batches of one, and what."""
    name = "policy loss"
    try:
        for term in actor_terms(actor):
            name = term.name
            for moved in (False, True):
                term.measure(Split(1, 1), moved)
    except Exception as error:  # whatever a policy loss raises
        return name, error
    return None
