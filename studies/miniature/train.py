"""One run: a supervised warm start, then GRPO under one aggregation rule, with verl's own advantage and policy loss.

Every rule goes through verl's `compute_policy_loss_vanilla` with loss_agg_mode=balanced; the rule is the column
`pool_mean_length` in `config.global_batch_info`, as `verl_ba.hooks` puts it there in a real update. It is fitted on the
whole update, before mini-batches. The old log-probabilities are the sampler's: they equal those of a forward pass.

Paired: one (cell, seed) gives every rule the same warm start, prompts, sampling noise and order of rows. A cell has a few
warm starts that its seeds take in turn.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from studies.miniature.model import END, PAD, Model, Rollout, Shape, encode, sample
from studies.miniature.tasks import FAMILIES, LIMIT, Cell, demonstration, score
from studies.rules import Batch, State, fit

TRAIN, EVALUATION, DEMONSTRATION = 1_000_000, 2_000_000, 3_000_000
"""Seeds of the three sets of prompts, far apart: prompt i of reasoning-gym's set of seed s is prompt 0 of seed s + i."""


@dataclass(frozen=True)
class Settings:
    """Of a run, the same for every cell and rule.

    Attributes:
        prompts, group: of an update; it has prompts · group responses.
        epochs, mini_batches: passes over an update, optimizer steps in each.
        clip_low, clip_high, grad_norm: PPO's clip, and the norm at which gradients are clipped.
        evaluations: how often, the first before training, the last after it.
        evaluation_prompts: one sampled response each, the same noise every time.
        probes: how often the gradients of the signs are compared.
        pool: training prompts of a cell, drawn from with replacement.
    """

    steps: int = 80
    prompts: int = 16
    group: int = 8
    epochs: int = 2
    mini_batches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    grad_norm: float = 1.0
    evaluations: int = 13
    evaluation_prompts: int = 192
    probes: int = 4
    pool: int = 4000
    warm_batch: int = 64
    warm_lr: float = 5e-3
    shape: Shape = field(default_factory=Shape)


def setup_digest(cell: Cell, settings: Settings) -> str:
    """Of everything that decides a run besides rule, learning rate and seed: 8 hexadecimal digits.

    `head_bias` is left out: the committed rows are older than it. A file of rows has one kind of output layer.
    """
    known = asdict(settings)
    del known["shape"]["head_bias"]
    return hashlib.sha256(json.dumps([asdict(cell), known]).encode()).hexdigest()[:8]


# --------------------------------------------------------------------------------------------------------------------
# What the runs of one cell share: prompts, warm starts
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompts:
    entries: list[dict]
    ids: Tensor  # [prompts, width]

    @classmethod
    def of(cls, cell: Cell, entries: list[dict]) -> "Prompts":
        family = FAMILIES[cell.family]
        width = family.width(cell.steps[1])
        return cls(entries, torch.tensor([encode(family.pad(family.prompt(entry), width)) for entry in entries]))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among processes, as long as the block runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached(path: Path, make: Any, write: Any, read: Any) -> Any:
    """read(path), after make() was written there if it was missing; one process makes it, whole or not at all."""
    with locked(path):
        if not path.exists():
            unfinished = path.with_name(path.name + ".part")
            write(make(), unfinished)
            os.replace(unfinished, path)
    return read(path)


@functools.lru_cache(maxsize=32)
def load_entries(cell: Cell, settings: Settings, cache: Path) -> tuple[Prompts, Prompts]:
    """Training and evaluation prompts of a cell, made once: reasoning-gym's generators are slow."""
    family = FAMILIES[cell.family]
    sizes = {TRAIN: settings.pool, EVALUATION: settings.evaluation_prompts}

    def make() -> dict[str, list[dict]]:
        return {str(seed): family.entries(seed, size, cell.steps) for seed, size in sizes.items()}

    key = _digest(cell.family, cell.steps, sizes, (Path(__file__).parent / "tasks.py").read_text())
    sets = cached(
        cache / f"prompts-{cell.family}-{key}.json",
        make,
        lambda data, path: path.write_text(json.dumps(data)),
        lambda path: json.loads(path.read_text()),
    )
    train, evaluation = (Prompts.of(cell, sets[str(seed)]) for seed in sizes)
    return train, evaluation


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def seed_of(*parts: Any) -> int:
    return zlib.crc32(" ".join(map(str, parts)).encode())


def warm_key(cell: Cell, settings: Settings) -> str:
    """Of everything that a warm start depends on besides its number."""
    here = Path(__file__).parent
    key = _digest({**asdict(cell), "warm_starts": None}, asdict(settings.shape), settings.warm_batch, settings.warm_lr)
    return key + _digest(*((here / name).read_text() for name in ("tasks.py", "model.py")))


def warm_start(cell: Cell, seed: int, settings: Settings, cache: Path) -> Model:
    """The model from which runs of this cell and seed start, after supervision on demonstrations; cached."""
    seed %= cell.warm_starts
    path = cache / f"warm-{cell.name}-{seed}-{warm_key(cell, settings)}.pt"
    model = new_model(cell, settings, seed)
    weights = cached(
        path,
        lambda: supervise(model, cell, seed, settings).state_dict(),
        torch.save,
        lambda path: torch.load(path, weights_only=True),
    )
    model.load_state_dict(weights)
    return model


def new_model(cell: Cell, settings: Settings, seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(cell.name, seed, "weights"))
        return Model(FAMILIES[cell.family].width(cell.steps[1]) + LIMIT, settings.shape)


def supervise(model: Model, cell: Cell, seed: int, settings: Settings) -> Model:
    family, rng = FAMILIES[cell.family], random.Random(seed_of(cell.name, seed, "demonstrations"))
    prompts = Prompts.of(cell, family.entries(DEMONSTRATION, settings.pool, cell.steps))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.warm_lr, betas=(0.9, 0.98), fused=True)
    for step in range(cell.warm_steps):
        rows = [rng.randrange(settings.pool) for _ in range(settings.warm_batch)]
        texts = [[*encode(demonstration(cell, prompts.entries[i], rng)[: LIMIT - 1]), END] for i in rows]
        order = sorted(range(len(rows)), key=lambda i: len(texts[i]))
        tokens = sum(map(len, texts))
        optimizer.zero_grad()
        for half in (order[: len(order) // 2], order[len(order) // 2 :]):  # less padding
            width = max(len(texts[i]) for i in half)
            target = torch.tensor([texts[i] + [PAD] * (width - len(texts[i])) for i in half])
            valid = torch.arange(width) < torch.tensor([[len(texts[i])] for i in half])
            log_prob = model.log_probs(prompts.ids[[rows[i] for i in half]], target)
            (-(log_prob * valid).sum() / tokens).backward()
        for group in optimizer.param_groups:  # linear warm-up, then linearly to 0
            group["lr"] = settings.warm_lr * min((step + 1) / 50, 1 - step / cell.warm_steps)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


# --------------------------------------------------------------------------------------------------------------------
# verl
# --------------------------------------------------------------------------------------------------------------------


@functools.cache
def verl_functions() -> tuple[Any, Any]:
    """verl's GRPO advantage and vanilla policy loss, with this package's modes attached.

    Raises SeamError if the aggregation is not attached.
    """
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    from verl_ba import hooks

    hooks.install()
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig  # noqa: F401  attaches its seam

    for seam in hooks.seams():
        needed = seam.module in ("verl.trainer.ppo.core_algos", "verl.workers.config.actor")
        if needed and (fault := hooks.seam_fault(seam)):
            raise hooks.SeamError(f"{seam.name}: {fault}")
    return core_algos.compute_grpo_outcome_advantage, core_algos.get_policy_loss_fn("vanilla")


def actor_config(settings: Settings, mode: str = "balanced") -> Any:
    verl_functions()
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(
        loss_agg_mode=mode,
        strategy="fsdp",
        rollout_n=settings.group,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=settings.clip_low,
        clip_ratio_low=settings.clip_low,
        clip_ratio_high=settings.clip_high,
    )


# --------------------------------------------------------------------------------------------------------------------
# One update
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """A sampled and scored batch of whole groups. B responses, T positions."""

    prompt_BP: Tensor
    rollout: Rollout
    reward_B: Tensor
    group_B: Tensor
    advantage_BT: Tensor

    @property
    def length_B(self) -> Tensor:
        return self.rollout.mask_BT.sum(1)

    @property
    def advantage_B(self) -> Tensor:
        return self.advantage_BT[:, 0]  # every response has a first character

    def batch(self) -> Batch:
        return Batch(self.length_B, self.group_B, self.advantage_B.sign().long())


def score_rollout(cell: Cell, entries: list[dict], rollout: Rollout) -> Tensor:
    """float32 [B]: 1 for a right answer, 0 for a wrong one or a response that was cut."""
    right = [
        not cut and score(cell, text, entry)
        for text, entry, cut in zip(rollout.texts(), entries, rollout.cut_B.tolist(), strict=True)
    ]
    return torch.tensor(right, dtype=torch.float32)


def make_update(model: Model, cell: Cell, prompts: Prompts, rows: Tensor, noise: Tensor, group: int) -> Update:
    advantage_of, _ = verl_functions()
    rows = rows.repeat_interleave(group)
    rollout = sample(model, prompts.ids[rows], noise)
    reward = score_rollout(cell, [prompts.entries[i] for i in rows.tolist()], rollout)
    mask = rollout.mask_BT.float()
    group_B = torch.arange(len(rows)) // group
    last = torch.nn.functional.one_hot(rollout.mask_BT.sum(1) - 1, mask.shape[1])
    advantage_BT, _ = advantage_of(last * reward[:, None], mask, np.array(group_B.tolist()))
    return Update(prompts.ids[rows], rollout, reward, group_B, advantage_BT.to(rollout.log_prob_BT.dtype))


def policy_loss(
    model: Model, update: Update, rows: Tensor, mean_length_B: Tensor, size: int, config: Any, advantage_BT=None
) -> Tensor:
    """verl's loss of these rows, as their part of a mini-batch of `size` responses; positions after the longest are cut."""
    _, vanilla = verl_functions()
    width = int(update.length_B[rows].max())
    part = (value[rows, :width] for value in (update.rollout.response_BT, update.rollout.mask_BT))
    response, mask = part
    advantage_BT = update.advantage_BT if advantage_BT is None else advantage_BT
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=None,
        global_batch_size=size,
        loss_scale_factor=None,
        pool_mean_length=mean_length_B[rows],
    )
    loss, _ = vanilla(
        old_log_prob=update.rollout.log_prob_BT[rows, :width],
        log_prob=model.log_probs(update.prompt_BP[rows], response),
        advantages=advantage_BT[rows, :width],
        response_mask=mask.to(advantage_BT.dtype),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    return loss


def backward(model: Model, update: Update, rows: Tensor, mean_length_B: Tensor, size: int, config: Any) -> None:
    """Gradient of a mini-batch in two micro-batches, the short responses and the long ones, to pad less.

    Rows of advantage 0 are left out: they count in `size` and add nothing else, as there is neither KL nor entropy term.
    """
    rows = rows[update.advantage_B[rows] != 0]
    rows = rows[update.length_B[rows].argsort(stable=True)]
    for part in rows.chunk(2):
        if len(part):
            policy_loss(model, update, part, mean_length_B, size, config).backward()


def sign_cosine(model: Model, update: Update, mean_length_B: Tensor, config: Any) -> float:
    """Cosine between the gradients of the positive and of the negative responses of an update; nan if one is missing."""
    gradients = []
    for advantage in (update.advantage_BT.clamp(min=0), update.advantage_BT.clamp(max=0)):
        rows = (advantage[:, 0] != 0).nonzero()[:, 0]
        if not len(rows):
            return float("nan")
        loss = policy_loss(model, update, rows, mean_length_B, len(update.reward_B), config, advantage)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return float(F.cosine_similarity(gradients[0], gradients[1], dim=0))


def weights_of_signs(update: Update, mean_length_B: Tensor) -> tuple[float, float]:
    """(loss at ratio 1, share of Σ|A|·w on the negatives) of a whole update. The loss is −ΣA·w/B, w = T/ℓ̄."""
    pull = update.advantage_B.double() * update.length_B / mean_length_B
    total = float(pull.abs().sum())
    return float(-pull.sum() / len(pull)), float(-pull.clamp(max=0).sum()) / total if total else float("nan")


# --------------------------------------------------------------------------------------------------------------------
# One run
# --------------------------------------------------------------------------------------------------------------------


class Trainer:
    """The optimizer of one run and its noise, which fixes prompts, responses and the order of rows."""

    def __init__(self, model: Model, cell: Cell, seed: int, lr: float, settings: Settings) -> None:
        self.model, self.cell, self.settings = model, cell, settings
        self.config = actor_config(settings)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.noise = torch.Generator().manual_seed(seed_of(cell.name, seed, "noise"))
        self.size = settings.prompts * settings.group

    def draw(self, prompts: Prompts) -> Update:
        """Sample and score the next update."""
        rows = torch.randint(len(prompts.entries), (self.settings.prompts,), generator=self.noise)
        noise = torch.rand(self.size, LIMIT, generator=self.noise)
        return make_update(self.model, self.cell, prompts, rows, noise, self.settings.group)

    def step(self, update: Update, mean_length_B: Tensor) -> None:
        """The optimizer's steps on one update."""
        for _ in range(self.settings.epochs):
            for part in torch.randperm(self.size, generator=self.noise).chunk(self.settings.mini_batches):
                self.optimizer.zero_grad(set_to_none=False)
                backward(self.model, update, part, mean_length_B, len(part), self.config)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_norm)
                self.optimizer.step()


def run(cell: Cell, rule: str, lr: float, seed: int, settings: Settings, cache: Path) -> dict[str, Any]:
    """Train once and return the row of numbers; the same arguments give the same row, apart from its two times.

    Curves have a value per evaluation, or per stretch between two evaluations
    (means over its steps). Lengths in tokens.
    """
    train, evaluation = load_entries(cell, settings, cache)
    model = warm_start(cell, seed, settings, cache)
    trainer, state = Trainer(model, cell, seed, lr, settings), State()
    fixed = torch.Generator().manual_seed(seed_of(cell.name, seed, "evaluation"))
    evaluation_noise = torch.rand(len(evaluation.entries), LIMIT, generator=fixed)
    at = {round(settings.steps * i / (settings.evaluations - 1)) for i in range(settings.evaluations)}
    probes = {settings.steps * i // settings.probes for i in range(settings.probes)}
    curves: dict[str, list[float]] = {}
    stretch: dict[str, list[float]] = {}
    started = time.monotonic(), time.process_time()

    def note(into: dict[str, list[float]], **values: float) -> None:
        for name, value in values.items():
            into.setdefault(name, []).append(value)

    for step in range(settings.steps + 1):
        if step in at:
            rollout = sample(model, evaluation.ids, evaluation_noise)
            note(
                curves,
                accuracy=float(score_rollout(cell, evaluation.entries, rollout).mean()),
                length=float(rollout.mask_BT.sum(1).double().mean()),
                cut=float(rollout.cut_B.double().mean()),
                entropy=rollout.entropy,
            )
            note(curves, **{name: _mean(values) for name, values in stretch.items() if name != "cosine"})
            stretch = {}
        if step == settings.steps:
            break
        update = trainer.draw(train)
        mean_length = fit(rule, update.batch(), state)
        drift, share = weights_of_signs(update, mean_length)
        lengths = {
            name: float(update.length_B[side].double().mean()) if side.any() else float("nan")
            for name, side in (("length_+", update.advantage_B > 0), ("length_-", update.advantage_B < 0))
        }
        note(stretch, reward=float(update.reward_B.mean()), drift=abs(drift), negative_share=share, **lengths)
        if step in probes:
            note(curves, cosine=sign_cosine(model, update, mean_length, trainer.config))
        trainer.step(update, mean_length)
    accuracy = curves["accuracy"]
    return {
        "auc": round(float(np.mean(accuracy)), 5),
        "last": round(accuracy[-1], 5),
        "drop": round(max(accuracy) - accuracy[-1], 5),
        "curves": {name: [_round(value) for value in values] for name, values in curves.items()},
        "wall_s": round(time.monotonic() - started[0], 2),
        "cpu_s": round(time.process_time() - started[1], 2),
    }


def _mean(values: list[float]) -> float:
    """Of the steps that have a value."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def _round(value: float) -> float | None:
    return None if np.isnan(value) else float(f"{value:.4g}")
