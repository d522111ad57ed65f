"""A fixed policy, many of its responses, and the score gradient of each: what a measurement is made of.

The policy is a checkpoint of `studies.miniature`: a warm start after some updates under token-mean. Its gradients are whole:
some 46,000 numbers for each response.

The *true gradient* g* = ∇E[reward] comes from responses to other prompts, each with the mean reward of the others to its
prompt as baseline, so that it is unbiased. It is computed in independent parts, from which its own error follows. The *length
direction* is ∇E[log T], computed alike.

Shape suffixes: B responses, T positions, D parameters, K parts of the true gradient.
"""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from studies.gradient_quality.rules import REFERENCE
from studies.miniature import train
from studies.miniature.model import Model
from studies.miniature.tasks import LIMIT, Cell
from studies.rules import State


@dataclass(frozen=True)
class Shape:
    """Updates that are drawn from a bank: `prompts` groups of `group` responses. `every`: under every rule, or the main."""

    prompts: int
    group: int
    every: bool = True


@dataclass(frozen=True)
class Sizes(train.Settings):
    """Settings of a checkpoint's training, and how much is measured there.

    Attributes:
        true_prompts, parts: of the true gradient; a part has true_prompts/parts prompts.
        responses: sampled for each prompt, of the true gradient and of the bank.
        blocks, block_prompts: of the bank. Updates are drawn within a block; blocks are independent.
        draws: pairs of updates from each block and shape.
        adam_draws: updates from each block for the moments of an Adam step.
        clipped: updates from each block that are trained on in several mini-batches.
    """

    true_prompts: int = 1600
    parts: int = 4
    responses: int = 16
    blocks: int = 12
    block_prompts: int = 64
    draws: int = 100
    adam_draws: int = 16
    clipped: int = 0
    shapes: tuple[Shape, ...] = (Shape(8, 8),)


@dataclass(frozen=True)
class Block:
    """Responses to `block_prompts` prompts, `responses` to each, one prompt's after the other.

    Attributes:
        update: the responses; the advantages in it are those of whole blocks, and are not used.
        score_BD: S.
        gram_BB: S·S'.
        true_BK, length_B: inner products with the parts of g* and with the length direction.
        effective_B: u.
    """

    update: train.Update
    score_BD: Tensor
    gram_BB: Tensor
    true_BK: Tensor
    length_B: Tensor
    effective_B: Tensor


def checkpoint(cell: Cell, seed: int, lr: float, sizes: Sizes, cache: Path) -> Model:
    """The warm start after `sizes.steps` updates under token-mean."""
    prompts, _ = train.load_entries(cell, sizes, cache)
    model = copy.deepcopy(train.warm_start(cell, seed, sizes, cache))
    trainer = train.Trainer(model, cell, seed, lr, sizes)
    state = State()
    for _ in range(sizes.steps):
        update = trainer.draw(prompts)
        trainer.step(update, train.fit(REFERENCE, update.batch(), state))
    return model


def effective_length(log_prob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """u = Σ_t (1 - p_t)² over the valid positions: [B]."""
    return torch.where(mask_BT, (1 - log_prob_BT.exp()) ** 2, 0.0).sum(1)


def score_gradients(model: Model, prompt_BP: Tensor, response_BT: Tensor, mask_BT: Tensor, chunk: int = 64) -> Tensor:
    """S of every response, all parameters one after the other: float32 [B, D]."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    class LogProb(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, prompt: Tensor, response: Tensor, valid: Tensor) -> Tensor:
            return (self.model.log_probs(prompt[None], response[None])[0] * valid).sum()

    log_prob = LogProb()

    def value(parameters: dict[str, Tensor], prompt: Tensor, response: Tensor, valid: Tensor) -> Tensor:
        return functional_call(log_prob, {f"model.{n}": v for n, v in parameters.items()}, (prompt, response, valid))

    gradient = vmap(grad(value), in_dims=(None, 0, 0, 0))
    length, scores = mask_BT.sum(1), torch.empty(len(prompt_BP), sum(v.numel() for v in parameters.values()))
    for rows in length.argsort(stable=True).split(chunk):  # short ones together: less padding
        width = int(length[rows].max())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # attention, response by response
            found = gradient(parameters, prompt_BP[rows], response_BT[rows, :width], mask_BT[rows, :width].float())
        scores[rows] = torch.cat([found[name].flatten(1) for name in parameters], 1)
    return scores


def others(value: Tensor, group: int) -> Tensor:
    """Each value less the mean of the other values of its group of `group`: [B]."""
    value = value.view(-1, group)
    return ((value - value.mean(1, keepdim=True)) * group / (group - 1)).flatten()


def directions(model: Model, update: train.Update, group: int) -> Tensor:
    """Unbiased ∇E[reward] and ∇E[log T], means over the update's responses: float32 [2, D]."""
    length = update.length_B
    weights = torch.stack([others(value.double(), group) for value in (update.reward_B, length.double().log())])
    parameters, total = list(model.parameters()), 0.0
    for rows in length.argsort(stable=True).split(1024):
        width = int(length[rows].max())
        log_prob = model.log_probs(update.prompt_BP[rows], update.rollout.response_BT[rows, :width])
        log_prob = (log_prob * update.rollout.mask_BT[rows, :width]).sum(1)
        found = []
        for i, weight in enumerate(weights[:, rows].float()):
            gradient = torch.autograd.grad((weight * log_prob).sum(), parameters, retain_graph=i == 0)
            found.append(torch.cat([g.flatten() for g in gradient]))
        total = total + torch.stack(found)
    return total / len(length)  # type: ignore[operator]


@dataclass(frozen=True)
class Bank:
    """Attributes: true_KD, length_KD: the parts of g* and of the length direction; accuracy: of their responses."""

    model: Model
    cell: Cell
    sizes: Sizes
    prompts: train.Prompts
    true_KD: Tensor
    length_KD: Tensor
    accuracy: float
    order: Tensor
    noise: torch.Generator

    def blocks(self) -> Iterator[Block]:
        sizes = self.sizes
        for rows in self.order[sizes.true_prompts :].split(sizes.block_prompts)[: sizes.blocks]:
            update = sampled(self.model, self.cell, self.prompts, rows, self.noise, sizes.responses)
            rollout = update.rollout
            score = score_gradients(self.model, update.prompt_BP, rollout.response_BT, rollout.mask_BT)
            yield Block(
                update,
                score,
                score @ score.T,
                (score @ self.true_KD.T).double(),
                (score @ self.length_KD.mean(0)).double(),
                effective_length(rollout.log_prob_BT, rollout.mask_BT),
            )


def sampled(
    model: Model, cell: Cell, prompts: train.Prompts, rows: Tensor, noise: torch.Generator, group: int
) -> train.Update:
    return train.make_update(model, cell, prompts, rows, torch.rand(len(rows) * group, LIMIT, generator=noise), group)


def make_bank(cell: Cell, seed: int, lr: float, sizes: Sizes, cache: Path) -> Bank:
    """Train the checkpoint and measure the true gradient; the blocks follow when they are asked for.

    Raises ValueError if the cell's pool has fewer prompts than are to be drawn: none is drawn twice.
    """
    needed = sizes.true_prompts + sizes.blocks * sizes.block_prompts
    if needed > sizes.pool:
        raise ValueError(f"the bank needs {needed} prompts, the pool has {sizes.pool}: raise `pool`, or measure less")
    model = checkpoint(cell, seed, lr, sizes, cache)
    prompts, _ = train.load_entries(cell, sizes, cache)
    noise = torch.Generator().manual_seed(train.seed_of(cell.name, seed, sizes.steps, "bank"))
    order = torch.randperm(len(prompts.entries), generator=noise)
    parts, rewards = [], []
    for rows in order[: sizes.true_prompts].chunk(sizes.parts):
        update = sampled(model, cell, prompts, rows, noise, sizes.responses)
        parts.append(directions(model, update, sizes.responses))
        rewards.append(update.reward_B)
    both = torch.stack(parts)
    accuracy = float(torch.cat(rewards).mean())
    return Bank(model, cell, sizes, prompts, both[:, 0], both[:, 1], accuracy, order, noise)


def part_of(block: Block, rows: Tensor) -> train.Update:
    """Some of a block's responses as an update of their own; advantages are the caller's business."""
    u, rollout = block.update, block.update.rollout
    chosen = replace(
        rollout,
        response_BT=rollout.response_BT[rows],
        mask_BT=rollout.mask_BT[rows],
        log_prob_BT=rollout.log_prob_BT[rows],
    )
    return train.Update(u.prompt_BP[rows], chosen, u.reward_B[rows], u.group_B[rows], u.advantage_BT[rows])
