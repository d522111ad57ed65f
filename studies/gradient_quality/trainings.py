"""Short trainings under the rules of the gradient study, paired by seed: does the ranking by gradient foretell theirs?

As `studies.miniature.train.run`, but a rule is a coefficient c for each response. verl's loss gets c·ℓ as advantage and ℓ,
one length for the whole run, as ℓ̄, so that its gradient on policy is (1/B)·Σ c·S and its clip acts as always.

Sharper distributions score higher on these tasks when they are sampled from, whatever was learnt. So a run is also evaluated
greedily, and at the end at the temperature at which its entropy is `entropy`, the same for every rule.
"""

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from studies.gradient_quality.bank import effective_length
from studies.gradient_quality.measure import plain
from studies.gradient_quality.rules import Responses, coefficients
from studies.jobs import Job, Row
from studies.miniature import train
from studies.miniature.model import Model, Rollout, sample
from studies.miniature.tasks import LIMIT
from studies.rules import State

GREEDY = 1000.0
"""By which the logits are multiplied: the most probable character has all the probability."""


@dataclass(frozen=True)
class Short(train.Settings):
    """Attributes: evaluate_at: after how many updates; entropy: of the last evaluation at equal entropy [nats]."""

    evaluate_at: tuple[int, ...] = (0, 3, 6, 9, 12, 16, 20, 25)
    entropy: float = 0.1


def sharpened(model: Model, factor: float) -> Model:
    """The model with its logits times `factor`."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for value in model.head.parameters():
            value *= factor
    return model


def at_entropy(model: Model, prompts: Tensor, noise: Tensor, entropy: float, halvings: int = 7) -> Rollout:
    """Responses at the temperature, between 1/8 and 8, at which their entropy is closest to `entropy` [nats]."""
    low, high = -2.08, 2.08  # log factor of the logits; entropy falls with it
    for _ in range(halvings):
        middle = (low + high) / 2
        found = sample(sharpened(model, torch.tensor(middle).exp().item()), prompts, noise)
        low, high = (middle, high) if found.entropy > entropy else (low, middle)
    return found  # type: ignore[possibly-unbound]


def short_run(job: Job, cache: Path) -> Row:
    """The row of one training: `curves` with a value for each evaluation."""
    settings, cell = job.settings, job.cell
    assert isinstance(settings, Short)
    started = time.monotonic(), time.process_time()
    prompts, evaluation = train.load_entries(cell, settings, cache)
    model = train.warm_start(cell, job.seed, settings, cache)
    trainer = train.Trainer(model, cell, job.seed, job.lr, settings)
    fixed = torch.Generator().manual_seed(train.seed_of(cell.name, job.seed, "evaluation"))
    noise = torch.rand(len(evaluation.entries), LIMIT, generator=fixed)
    curves: dict[str, list[float]] = {name: [] for name in ("accuracy", "greedy", "length", "entropy")}
    state: dict[str, State] = {}
    size = 0.0

    def accuracy(rollout: Rollout) -> float:
        return float(train.score_rollout(cell, evaluation.entries, rollout).mean())

    for step in range(settings.steps + 1):
        if step in settings.evaluate_at:
            rollout = sample(model, evaluation.ids, noise)
            curves["accuracy"].append(accuracy(rollout))
            curves["greedy"].append(accuracy(sample(sharpened(model, GREEDY), evaluation.ids, noise)))
            curves["length"].append(float(rollout.mask_BT.sum(1).double().mean()))
            curves["entropy"].append(rollout.entropy)
        if step == settings.steps:
            break
        update = trainer.draw(prompts)
        size = size or float(update.length_B.double().mean())
        trainer.step(weighed(update, job.rule, size, state), torch.full((len(update.group_B),), size))
    matched = at_entropy(model, evaluation.ids, noise, settings.entropy)
    return plain(
        {
            "at": list(settings.evaluate_at),
            "curves": curves,
            "matched": {"accuracy": accuracy(matched), "entropy": matched.entropy},
            "wall_s": time.monotonic() - started[0],
            "cpu_s": time.process_time() - started[1],
        }
    )


def weighed(update: train.Update, rule: str, size: float, state: dict[str, State]) -> train.Update:
    """The update with c·`size` as advantages: the loss then has ℓ̄ = `size` for every response."""
    rollout = update.rollout
    responses = Responses(
        update.reward_B,
        update.length_B,
        update.group_B,
        effective_length(rollout.log_prob_BT, rollout.mask_BT),
    )
    advantage_B = coefficients(responses, state, [rule])[0] * size
    width = rollout.mask_BT.shape[1]
    return replace(update, advantage_BT=advantage_B[:, None].expand(-1, width).to(update.advantage_BT.dtype))
