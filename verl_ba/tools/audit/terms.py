"""Running verl's losses, and the terms they have."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils import losses

from verl_ba import loss_agg
from verl_ba.tools.audit.batch import ROWS, Batch, Split, sequences
from verl_ba.tools.audit.config import changed

SAME = 1e-9
"""Relative tolerance of two splits."""

Loss = Callable[[torch.Tensor, list[int], TensorDict], torch.Tensor]
"""(leaf [B, T], rows, their micro-batch) -> what an engine would call backward on."""


@dataclass(frozen=True)
class Result:
    value: torch.Tensor
    gradient: torch.Tensor

    def __sub__(self, other: "Result") -> "Result":
        return Result(self.value - other.value, self.gradient - other.gradient)

    def differs(self, other: "Result") -> list[str]:
        """Which of value and gradient are not the same."""
        pairs = {"value": (self.value, other.value), "gradient": (self.gradient, other.gradient)}
        return [name for name, (a, b) in pairs.items() if bool((a - b).abs().max() > SAME * b.abs().max())]


def run(loss: Loss, batch: Batch, split: Split, point: torch.Tensor, mode: str) -> Result:
    """Value and gradient of a mini-batch under this split, as a data-parallel engine adds them up."""
    everything = list(range(ROWS))
    columns = loss_agg.compute_pool_mean_length(mode, batch.micro_batch(everything))
    leaf = point.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a loss may choose tokens at random
        for _, rows in split.parts():
            data = batch.micro_batch(rows)
            tu.assign_non_tensor(
                data,
                dp_size=split.ranks,
                batch_num_tokens=int(batch.counted.sum()),
                global_batch_size=ROWS,
            )
            data.update({name: column[rows] for name, column in columns.items()})
            total = total + loss(leaf, rows, data) / split.ranks
    if not total.requires_grad:  # this loss does not read this output of the model
        return Result(total, torch.zeros_like(leaf))
    (gradient,) = torch.autograd.grad(total, leaf)
    return Result(total.detach(), gradient)


@dataclass
class Actor:
    """The actor's losses under a configuration; `measure` runs them with some of its values changed."""

    node: DictConfig
    batch: Batch
    distillation: Any = None  # verl's DistillationConfig, if it is on
    built: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Result] = field(default_factory=dict)

    def config(self, **values: Any) -> Any:
        key = repr(values)
        if key not in self.built:  # instantiating takes as long as ten losses
            self.built[key] = omega_conf_to_dataclass(changed(self.node, **values))
        return self.built[key]

    def measure(
        self, split: Split, moved: bool, leaf: str = "log_probs", distil: bool = False, **values: Any
    ) -> Result:
        """`ppo_loss`, or `distillation_ppo_loss`, and its gradient with respect to one output of the model."""
        key = repr((split, moved, leaf, distil, values))
        if key not in self.measured:
            self.measured[key] = self._measure(split, moved, leaf, distil, **values)
        return self.measured[key]

    def _measure(self, split: Split, moved: bool, leaf: str, distil: bool, **values: Any) -> Result:
        config, batch = self.config(**values), self.batch
        outputs = {"log_probs": batch.moved if moved else batch.policy}
        if distil:
            outputs |= distillation_outputs(batch)
        if config.entropy_coeff:
            outputs["entropy"] = batch.reference.abs()

        def loss(x: torch.Tensor, rows: list[int], data: TensorDict) -> torch.Tensor:
            columns = outputs | {leaf: x}
            spans = batch.spans(rows)
            output = {name: sequences(column, rows, spans) for name, column in columns.items()}
            if distil:
                return distillation_losses().distillation_ppo_loss(config, self.distillation, output, data)[0]
            return losses.ppo_loss(config=config, model_output=output, data=data)[0]

        return run(loss, batch, split, outputs.get(leaf, batch.reference), config.loss_agg_mode)


def distillation_outputs(batch: Batch) -> dict[str, torch.Tensor]:
    """What a model's output has besides log-probabilities when it is distilled; any numbers serve."""
    masses = dict.fromkeys(("student_mass", "teacher_mass"), batch.reference.exp())
    return {"distillation_losses": batch.reference.abs(), **masses}


def distillation_losses() -> Any:
    """verl's module; releases before 0.8.0 have none, and no configuration of theirs asks for it."""
    return importlib.import_module("verl.trainer.distillation.losses")


def derivative(token_loss: Callable[[torch.Tensor], torch.Tensor], point: torch.Tensor) -> torch.Tensor:
    """Of each token's own loss."""
    leaf = point.clone().requires_grad_()
    return torch.autograd.grad(token_loss(leaf).sum(), leaf)[0]


@dataclass
class Term:
    """A term of the loss.

    Attributes:
        measure: (split, moved) -> its value and gradient.
        per_token: gradient over weight, [B, T].
        mode: where its mode is configured, and the mode.
    """

    name: str
    measure: Callable[[Split, bool], Result]
    per_token: torch.Tensor
    mode: str


def actor_terms(actor: Actor) -> Iterator[Term]:
    """The terms that this configuration has, the policy loss first."""
    bare = {"entropy_coeff": 0.0, "use_kl_loss": False}
    config, batch = actor.config(), actor.batch
    mode = config.loss_agg_mode
    distil = actor.distillation.distillation_loss if actor.distillation else None
    if distil is None or distil.use_task_rewards:
        yield Term("policy loss", lambda s, m: actor.measure(s, m, **bare), -batch.advantage, mode)
        if config.entropy_coeff:
            yield entropy_term(actor, config.entropy_coeff)
        if config.use_kl_loss and config.kl_loss_coef:
            penalty: Any = core_algos.kl_penalty
            kl = derivative(lambda x: penalty(x, batch.reference, config.kl_loss_type), batch.policy)
            with_kl = {**bare, "use_kl_loss": True}
            yield Term(
                "KL to the reference",
                lambda s, m: actor.measure(s, m, **with_kl) - actor.measure(s, m, **bare),
                config.kl_loss_coef * kl,
                mode,
            )
    if distil is not None:
        yield distillation_term(actor, distil)


def entropy_term(actor: Actor, coefficient: float) -> Term:
    with_it, without = ({"entropy_coeff": c, "use_kl_loss": False} for c in (coefficient, 0.0))

    def measure(split: Split, moved: bool) -> Result:
        total, rest = actor.measure(split, moved, "entropy", **with_it), actor.measure(split, moved, **without)
        return Result(total.value - rest.value, total.gradient)

    per_token = torch.full_like(actor.batch.policy, -coefficient)
    return Term("entropy", measure, per_token, actor.config().loss_agg_mode)


def distillation_term(actor: Actor, distil: Any) -> Term:
    config, batch = actor.config(), actor.batch
    leaf = "distillation_losses" if distil.loss_settings.use_topk and not distil.use_policy_gradient else "log_probs"

    def measure(split: Split, moved: bool) -> Result:
        total = actor.measure(split, moved, leaf, distil=True)
        return total - actor.measure(split, moved, leaf) if distil.use_task_rewards else total

    def token_loss(x: torch.Tensor) -> torch.Tensor:
        rows = list(range(ROWS))
        spans = batch.spans(rows)
        columns = {"log_probs": batch.policy, **distillation_outputs(batch), leaf: x}
        output = {name: sequences(column, rows, spans) for name, column in columns.items()}
        loss, _ = distillation_losses().get_distillation_loss_fn(distil.loss_mode)(
            config=config,
            distillation_config=actor.distillation,
            model_output=output,
            data=batch.micro_batch(rows),
        )
        limit = distil.loss_max_clamp
        return loss if limit is None else loss.clamp(-limit, limit)

    point = batch.reference.abs() if leaf == "distillation_losses" else batch.policy
    # as a policy gradient, its negative is the advantage
    per_token = token_loss(point).detach() if distil.use_policy_gradient else derivative(token_loss, point)
    coefficient = distil.distillation_loss_coef if distil.use_task_rewards else 1.0
    return Term("distillation", measure, coefficient * per_token, config.loss_agg_mode)


def value_term(node: DictConfig, batch: Batch) -> Term:
    config = omega_conf_to_dataclass(node)
    return Term(
        "value loss",
        lambda split, moved: measure_critic(config, batch, split, moved),
        batch.values - batch.returns,
        config.loss_agg_mode,
    )


def measure_critic(config: Any, batch: Batch, split: Split, moved: bool) -> Result:
    """verl's `value_loss`, with respect to the predicted values."""

    def loss(x: torch.Tensor, rows: list[int], data: TensorDict) -> torch.Tensor:
        output = {"values": sequences(x, rows, batch.spans(rows))}
        return losses.value_loss(config=config, model_output=output, data=data)[0]

    point = batch.values + (batch.moved - batch.policy) / 2 if moved else batch.values
    return run(loss, batch, split, point, config.loss_agg_mode)
