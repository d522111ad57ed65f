"""Thousands of updates from one bank, every rule on the same responses: sums by block, from which `estimates` are made.

On policy an update's gradient is g = S'c/B, so its inner product with g* is c'h/B and its square norm c'Kc/B², where h and K
are the bank's inner products: no gradient is computed again. Two steps need the coordinates: an Adam step, and updates in
several mini-batches, of which the second and later ones are off policy and clipped, as PPO does.

Shape suffixes: R rules, N responses of an update, K parts of the true gradient, D parameters.
"""

import copy
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.gradient_quality.bank import Bank, Block, Shape, Sizes, make_bank, part_of
from studies.gradient_quality.rules import ALL, Responses, coefficients
from studies.jobs import Job, Row, StudyError
from studies.miniature import train
from studies.rules import State

MAIN = [
    "token-mean",
    "constant",
    "group-mean-token-mean",
    "seq-mean-token-mean",
    "balanced",
    "pooled-4",
    "batch-signs",
    "effective-opo",
    "effective-root",
    "effective-shrunk",
]
"""The rules of the other shapes, of the clipped updates and of the trainings."""

EPSILON = 1e-8
"""Adam's."""


def responses_of(block: Block, rows: Tensor, group: int) -> Responses:
    """An update of whole groups of `group`, one after the other."""
    return Responses(
        block.update.reward_B[rows],
        block.update.length_B[rows],
        torch.arange(len(rows)) // group,
        block.effective_B[rows],
        block.gram_BB.diagonal()[rows].double(),
    )


def drawn(rng: np.random.Generator, sizes: Sizes, prompts: int, group: int) -> Tensor:
    """Rows of `prompts` prompts of a block, `group` responses to each, without replacement."""
    chosen = rng.choice(sizes.block_prompts, prompts, replace=False)
    rows = [p * sizes.responses + rng.choice(sizes.responses, group, replace=False) for p in chosen]
    return torch.from_numpy(np.concatenate(rows))


def update_numbers(coefficient_RN: Tensor, block: Block, rows: Tensor) -> dict[str, Tensor]:
    """Of one update under every rule. Lists of `square` and `fisher`: [R]; `dot`, `cos`: [K, R], not yet over |g*|."""
    c = coefficient_RN / len(rows)
    square = ((c @ block.gram_BB[rows][:, rows].double()) * c).sum(1)
    norm = square.sqrt()
    dot = (c @ block.true_BK[rows]).T
    rest = torch.ones(len(block.gram_BB), dtype=torch.bool)
    rest[rows] = False
    of_others = block.gram_BB[rest][:, rows] @ c.float().T  # S_j·g of the block's other responses
    return {
        "square": square,
        "dot": dot,
        "cos": dot / norm,
        "push": c @ block.length_B[rows] / norm,
        "fisher": (of_others**2).mean(0).double(),
    }


def of_block(block: Block, sizes: Sizes, shape: Shape, mean_length: float, rng: np.random.Generator) -> dict[str, Any]:
    """Means over pairs of updates, which have no prompt in common: [R] or [K, R] each.

    Pairs in which one update has no group with different rewards are left out, under every rule.
    """
    names = list(ALL) if shape.every else MAIN
    state: dict[str, State] = {name: {"divisor": mean_length} for name in names}
    total: dict[str, Any] = {}
    count, n = 0, shape.prompts * shape.group
    for _ in range(sizes.draws):
        both = drawn(rng, sizes, 2 * shape.prompts, shape.group).split(n)
        updates = [responses_of(block, rows, shape.group) for rows in both]
        if not all(bool(update.advantage.any()) for update in updates):
            continue
        found = [coefficients(update, state, names) for update in updates]
        a, b = (update_numbers(c, block, rows) for c, rows in zip(found, both, strict=True))
        numbers = {name: (a[name] + b[name]) / 2 for name in a}
        between = block.gram_BB[both[0]][:, both[1]].double()
        numbers["cross"] = ((found[0] @ between) * found[1]).sum(1) / n**2
        numbers["half"] = numbers["cross"] / (a["square"] * b["square"]).sqrt()
        total = {name: total.get(name, 0) + value for name, value in numbers.items()}
        count += 1
    if not count:
        raise StudyError(
            f"no update of {shape.prompts} groups of {shape.group} had different rewards: nothing to measure"
        )
    return {name: value / count for name, value in total.items()}


def moments(
    block: Block, sizes: Sizes, shape: Shape, mean_length: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mean gradient and mean square of it per coordinate, over updates of a block: [R, D] each."""
    names = list(ALL)
    state: dict[str, State] = {name: {"divisor": mean_length} for name in names}
    first, second = (torch.zeros(len(names), block.score_BD.shape[1]) for _ in range(2))
    for _ in range(sizes.adam_draws):
        rows = drawn(rng, sizes, shape.prompts, shape.group)
        c = coefficients(responses_of(block, rows, shape.group), state, names).float() / len(rows)
        gradient = c @ block.score_BD[rows]
        first += gradient
        second.addcmul_(gradient, gradient)
    return first / sizes.adam_draws, second / sizes.adam_draws


def clipped_step(
    bank: Bank,
    update: train.Update,
    coefficient_B: Tensor,
    scale_D: Tensor,
    mini_batches: int,
    config: Any,
    size: float,
) -> Tensor:
    """Where an update in several mini-batches ends, less where it began: float32 [D].

    The step of a mini-batch is -lr·gradient/`scale_D` of verl's clipped loss, as Adam's without momentum.

    Args:
        coefficient_B: c. The loss gets c times `size` as advantage and `size` as ℓ̄, any length.
    """
    model = copy.deepcopy(bank.model)
    parameters = list(model.parameters())
    start = torch.cat([p.detach().flatten() for p in parameters])
    advantage_BT = (coefficient_B * size)[:, None].expand(-1, update.rollout.mask_BT.shape[1]).float()
    mean_length = torch.full((len(coefficient_B),), size, dtype=torch.float64)
    for rows in torch.arange(len(coefficient_B)).view(-1, bank.sizes.group).T.flatten().chunk(mini_batches):
        loss = train.policy_loss(model, update, rows, mean_length, len(rows), config, advantage_BT)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        step = (-scale_D * gradient).split([p.numel() for p in parameters])
        with torch.no_grad():
            for parameter, change in zip(parameters, step, strict=True):
                parameter += change.view_as(parameter)
    return torch.cat([p.detach().flatten() for p in parameters]) - start


def measure(job: Job, cache: Path) -> Row:
    """The row of one checkpoint. Lists are [blocks][rules] or [blocks][parts][rules]."""
    sizes = job.settings
    assert isinstance(sizes, Sizes)
    started = time.monotonic(), time.process_time()
    bank = make_bank(job.cell, job.seed, job.lr, sizes, cache)
    names, config = list(ALL), train.actor_config(sizes)
    seed = train.seed_of(job.cell.name, job.seed, sizes.steps, "draws")
    by_shape: dict[str, list[dict[str, Tensor]]] = {f"{s.prompts}x{s.group}": [] for s in sizes.shapes}
    means, second = [], torch.zeros(len(names), bank.true_KD.shape[1])
    kept: list[list[tuple[train.Update, Responses]]] = []
    lengths, rewards, squares, effective = [], [], [], []
    mean_length = 0.0
    for number, block in enumerate(bank.blocks()):
        rng = np.random.default_rng([seed, number])
        mean_length = mean_length or float(block.update.length_B.double().mean())
        for shape, found in zip(sizes.shapes, by_shape.values(), strict=True):
            found.append(of_block(block, sizes, shape, mean_length, rng))
        mean, square = moments(block, sizes, sizes.shapes[0], mean_length, rng)
        means.append(mean)
        second += square / sizes.blocks
        rows_of = [drawn(rng, sizes, sizes.prompts, sizes.group) for _ in range(sizes.clipped)]
        kept.append([(part_of(block, rows), responses_of(block, rows, sizes.group)) for rows in rows_of])
        lengths.append(block.update.length_B.double())
        rewards.append(block.update.reward_B.double())
        squares.append(block.gram_BB.diagonal().double())
        effective.append(block.effective_B.double())
    preconditioner = 1 / (second.sqrt() + EPSILON)
    adam = {
        "rules": names,
        "gain": [((mean * preconditioner) @ bank.true_KD.T).T for mean in means],
        "push": [(mean * preconditioner) @ bank.length_KD.mean(0) for mean in means],
    }
    clipped: dict[str, dict[str, list[Tensor]]] = {}
    for mini_batches in (2, 4) if sizes.clipped else ():
        found = {"dot": [], "square": []}
        for updates in kept:
            dots, norms = [], []
            for update, responses in updates:
                coefficient_RN = coefficients(responses, {n: {"divisor": mean_length} for n in MAIN}, MAIN)
                moved = torch.stack(
                    [
                        clipped_step(
                            bank, update, c, job.lr * preconditioner[names.index(n)], mini_batches, config, mean_length
                        )
                        for n, c in zip(MAIN, coefficient_RN, strict=True)
                    ]
                )
                dots.append((moved @ bank.true_KD.T).T)
                norms.append((moved**2).sum(1))
            found["dot"].append(torch.stack(dots).mean(0))
            found["square"].append(torch.stack(norms).mean(0))
        clipped[str(mini_batches)] = found | {"rules": MAIN}  # type: ignore[assignment]
    length, reward, square, u = (torch.cat(values) for values in (lengths, rewards, squares, effective))
    return plain(
        {
            "shapes": {
                name: {"rules": names if shape.every else MAIN}
                | {key: [numbers[key] for numbers in found] for key in found[0]}
                for (name, found), shape in zip(by_shape.items(), sizes.shapes, strict=True)
            },
            "adam": adam,
            "clipped": clipped,
            "true": bank.true_KD @ bank.true_KD.T,
            "true_length": bank.true_KD @ bank.length_KD.T,
            "length_length": bank.length_KD @ bank.length_KD.T,
            "about": {
                "steps": sizes.steps,
                "accuracy": bank.accuracy,
                "length": length.mean(),
                "length_right": length[reward > 0].mean(),
                "length_wrong": length[reward == 0].mean(),
                "variation": length.std() / length.mean(),
                "square_and_length": torch.corrcoef(torch.stack([square, length]))[0, 1],
                "square_and_effective": torch.corrcoef(torch.stack([square, u]))[0, 1],
            },
            "wall_s": time.monotonic() - started[0],
            "cpu_s": time.process_time() - started[1],
        }
    )


def plain(value: Any) -> Any:
    """Tensors and numbers as JSON has them, to six digits; None for what is not finite."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
