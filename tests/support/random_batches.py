"""Random updates of a few tiny responses, through the hooks in float64, against the literal reference.

One seed fixes everything: mode, response- or token-level advantages, groups of different sizes, groups without variance,
sessions, empty responses, padding rows, holes in masks, nested or padded layout, garbage at masked positions, how the rows
fall on ranks and micro-batches. Ranks are played one after the other: only the collective is replaced.
"""

import math
import random
from types import SimpleNamespace

import torch
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from tests.support import reference
from tests.support import verl_harness as harness
from verl_ba import aggregation, loss_agg
from verl_ba.hooks import ppo_loss

FORMS = ("response", "token")
GARBAGE = (math.nan, math.inf, -math.inf, 1e300)


def draw(seed: int) -> SimpleNamespace:
    """One update: columns as plain lists, and how it is split."""
    rng = random.Random(seed)
    batch = SimpleNamespace(
        mode=rng.choice((*aggregation.MODES, *aggregation.ALL_MODES)),
        form=rng.choice(FORMS),
        layout="nested" if rng.random() < 0.2 else "padded",  # nested tensors are slow to make
        sessions=rng.random() < 0.4,
        width=rng.randint(1, 5),
        group=[],
    )
    for g in range(rng.randint(1, 3)):
        batch.group += [f"prompt-{g}"] * rng.randint(1, 4)
    pads = rng.choice((0, 0, 1, 2))
    rng.shuffle(batch.group)
    if batch.sessions:  # padded rows in which each prompt has one session are refused
        batch.group += ["two-sessions"] * 2
    batch.group += ["pad"] * pads
    rows = len(batch.group)
    dense = rng.choice((0.4, 0.8, 1.0))
    batch.mask = [[g != "pad" and rng.random() < dense for _ in range(batch.width)] for g in batch.group]
    # in the last, what rounding leaves of zero
    values = rng.choice(((-1.5, -0.3, 0.0, 0.2, 2.0), (-1.0, 1.0), (-1.0, -2.8e-7, 0.0, 2e-8, 1.0)))
    batch.advantage = [
        [rng.choice(values) for _ in range(batch.width)]
        if batch.form == "token"
        else [rng.choice(values)] * batch.width
        for _ in batch.group
    ]
    batch.session = [rng.randint(0, 2) for _ in batch.group] if batch.sessions else None
    if batch.session:
        first = batch.group.index("two-sessions")
        batch.session[first : first + 2] = 0, 1
        for mask in batch.mask[first : first + 2]:
            mask[0] = True
    batch.loss = [[rng.gauss(0, 1) for _ in range(batch.width)] for _ in batch.group]
    for mask, advantage, loss in zip(batch.mask, batch.advantage, batch.loss, strict=True):
        for t, valid in enumerate(mask):
            if not valid:
                advantage[t], loss[t] = rng.choice((math.nan, -math.inf, 1.0, -1.0)), rng.choice(GARBAGE)
    batch.ranks = rng.randint(1, min(3, rows))
    order = rng.sample(range(rows), rows)
    batch.shares = [order[rank :: batch.ranks] for rank in range(batch.ranks)]
    batch.micro = rng.randint(1, 4)
    return batch


def tensordict(batch: SimpleNamespace, rows: list[int]) -> TensorDict:
    """These rows as a rank holds them."""
    columns = {
        "response_mask": torch.tensor(batch.mask, dtype=torch.long)[rows],
        "advantages": torch.tensor(batch.advantage, dtype=torch.float64)[rows],
    }
    if batch.layout == "nested":
        spans = [max([t + 1 for t, valid in enumerate(batch.mask[i]) if valid], default=1) for i in rows]
        for key, column in columns.items():
            ragged = [row[:span] for row, span in zip(column, spans, strict=True)]
            columns[key] = torch.nested.as_nested_tensor(ragged, layout=torch.jagged)
    data = TensorDict(columns, batch_size=len(rows))
    data["uid"] = NonTensorStack(*[batch.group[i] for i in rows])
    if batch.session:
        data["session_id"] = NonTensorStack(*[batch.session[i] for i in rows])
    return data


def loss_and_gradient(batch: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """The update through the hooks, summed over ranks and micro-batches as data-parallel training does."""
    data = [tensordict(batch, rows) for rows in batch.shares]
    gathered = [loss_agg.rows_of(share) for share in data]
    leaf = torch.tensor(batch.loss, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    info = {"dp_size": batch.ranks, "global_batch_size": len(batch.group)}
    policy_term = ppo_loss.wrap_loss(_policy_term)
    original = loss_agg.all_gather
    for rank, (rows, share) in enumerate(zip(batch.shares, data, strict=True)):
        loss_agg.all_gather = lambda mine, group, rank=rank: (gathered, rank)
        try:
            harness.add_pool_lengths(batch.mode, share)
        finally:
            loss_agg.all_gather = original
        for start in range(0, len(rows), batch.micro):
            places = torch.arange(start, min(start + batch.micro, len(rows)))
            part = tu.index_select_tensor_dict(share, places)
            mask = loss_agg.padded(part["response_mask"])
            token_loss = leaf[[rows[i] for i in places], : mask.shape[1]]
            config = SimpleNamespace(loss_agg_mode=batch.mode, global_batch_info=dict(info))
            value, _ = policy_term(config, {"loss": token_loss, "mask": mask}, part)
            total = total + value / batch.ranks  # ranks average their gradients
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


def _policy_term(config, model_output, data, dp_group=None):
    """Stands for verl's ppo_loss: (loss, metrics)."""
    token_loss, mask = model_output["loss"], model_output["mask"]
    if config.loss_agg_mode in aggregation.MODES:
        from verl.trainer.ppo.core_algos import agg_loss

        return agg_loss(token_loss, mask, config.loss_agg_mode, **config.global_batch_info), {}
    # verl's own modes, as aggregation.py expresses them
    info = config.global_batch_info
    return loss_agg.aggregate(token_loss, mask, data[loss_agg.COLUMN], info["global_batch_size"], info["dp_size"]), {}


def mismatch(batch: SimpleNamespace) -> float:
    """Largest error of value and gradient; inf if something is not finite."""
    value, gradient = loss_and_gradient(batch)
    weight = reference.token_weights(batch.mode, batch.advantage, batch.mask, batch.group, batch.session)
    rows = len(batch.group)
    expected = sum(
        w * loss
        for weights, mask, losses in zip(weight, batch.mask, batch.loss, strict=True)
        for w, valid, loss in zip(weights, mask, losses, strict=True)
        if valid
    )
    errors = [abs(value.item() - expected / rows)]
    errors += [
        abs(g - w / rows)
        for row, weights in zip(gradient.tolist(), weight, strict=True)
        for g, w in zip(row, weights, strict=True)
    ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
