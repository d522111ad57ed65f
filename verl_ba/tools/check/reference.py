"""What loss and gradient of an update should be: plain Python loops over tokens, a plain transformers model, float64.

Nothing here is verl's or this package's. `token_weights` writes each mode's formula out literally.
"""

from collections import defaultdict
from typing import Any

import torch

from verl_ba.tools.check.batch import Row, log_probs

CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
ENTROPY, KL = 0.01, 0.1
SCALE = 20
"""`loss_scale_factor` of seq-mean-token-sum-norm [tokens]."""


def sign_of(advantage: float) -> int:
    return 1 if advantage > 0 else -1 if advantage < 0 else 0


def token_weights(mode: str, update: list[Row], batch: list[int]) -> list[list[float]]:
    """What each token's loss is multiplied by in a mini-batch, 0 where masked: the loss is the sum of the products.

    Args:
        update: the responses of the whole update, which `balanced` and `group-mean-token-mean` take lengths from.
        batch: which of them are in the mini-batch, by their place in `update`.
    """
    tokens = sum(bool(m) for i in batch for m in update[i].mask_T)
    count = defaultdict(int)  # valid tokens of each response by the sign of their advantage
    for i, row in enumerate(update):
        for advantage, valid in zip(row.advantage_T.tolist(), row.mask_T.tolist(), strict=True):
            if valid:
                count[i, sign_of(advantage)] += 1
    length = {i: sum(count[i, s] for s in (-1, 0, 1)) for i in range(len(update))}

    def mean_length(i: int, sign: int) -> float:
        """Of the pool that a response's tokens of this sign are in; a response takes part by its share of such tokens."""
        same_group = [j for j in length if update[j].uid == update[i].uid and length[j]]
        pool = [(j, s) for j in same_group for s in (-1, 0, 1) if mode != "balanced" or s == sign]
        return sum(count[m] for m in pool) / sum(count[m] / length[m[0]] for m in pool)

    def weight(i: int, sign: int) -> float:
        if mode in ("balanced", "group-mean-token-mean"):
            return 1 / len(batch) / mean_length(i, sign)
        return {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-mean": 1 / len(batch) / max(length[i], 1),
            "seq-mean-token-sum": 1 / len(batch),
            "seq-mean-token-sum-norm": 1 / len(batch) / SCALE,
        }[mode]

    return [
        [
            weight(i, sign_of(advantage)) if valid else 0.0
            for advantage, valid in zip(update[i].advantage_T.tolist(), update[i].mask_T.tolist(), strict=True)
        ]
        for i in batch
    ]


def token_losses(model: Any, row: Row) -> torch.Tensor:
    """Of one response, [T]: PPO's clipped loss with dual clip, minus entropy, plus the KL estimate k3."""
    log_prob, entropy = log_probs(model, row.ids, len(row.prompt))
    advantage = row.advantage_T
    ratio = torch.exp(log_prob - row.old_T)
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
    policy = torch.where(advantage < 0, torch.minimum(clipped, -advantage * DUAL_CLIP), clipped)
    difference = row.ref_T - log_prob
    return policy - ENTROPY * entropy + KL * (difference.exp() - difference - 1)


def load(folder: str) -> Any:
    """The model in a folder, in float64, with the attention that is written out in Python."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)


class Reference:
    """Losses and gradients of one update's responses under any mode."""

    def __init__(self, model: Any, rows: list[Row]):
        self.rows = rows
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.losses = [token_losses(model, row) for row in rows]
        self._known: dict[tuple, tuple[float, float, dict[str, torch.Tensor]]] = {}

    def __call__(self, mode: str, batch: list[int]) -> tuple[float, float, dict[str, torch.Tensor]]:
        """Loss, the sum of its terms' magnitudes, and gradient of a mini-batch."""
        key = (mode, *batch)
        if key not in self._known:
            self._known[key] = self._compute(mode, batch)
        return self._known[key]

    def _compute(self, mode: str, batch: list[int]) -> tuple[float, float, dict[str, torch.Tensor]]:
        weights = [torch.tensor(w, dtype=torch.float64) for w in token_weights(mode, self.rows, batch)]
        terms = torch.cat([w * self.losses[i] for i, w in zip(batch, weights, strict=True)])
        found = torch.autograd.grad(terms.sum(), self.parameters, retain_graph=True, allow_unused=True)
        gradient = {
            name: torch.zeros_like(p) if g is None else g
            for name, p, g in zip(self.names, self.parameters, found, strict=True)
        }
        return terms.sum().item(), terms.abs().sum().item(), gradient


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two whole gradients, over the norm of the expected one.

    Raises:
        KeyError: `got` lacks a parameter.
    """
    difference = sum(float((got[name].double() - e).square().sum()) for name, e in expected.items())
    return (difference / sum(float(e.square().sum()) for e in expected.values())) ** 0.5
