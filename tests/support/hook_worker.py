"""One rank of a multi-process check of the real hook; `test_ranks.py` starts several. Prints one JSON line per setting."""

import itertools
import json
import sys

import torch
import verl  # noqa: F401  loads the plugin, as in any verl process
from verl.utils.metric import reduce_metrics

from tests.support import verl_harness as harness
from verl_ba import releases
from verl_ba.aggregation import MODES
from verl_ba.metrics import APPLIED_RESIDUAL, SIGN_METRICS, balance_metrics


def settings():
    """(form, mode, layout, mini-batches, micro-batch size or None for dynamic, epochs, shuffle)"""
    for mode, layout in itertools.product(("balanced", "group-mean-token-mean"), releases.current().layouts):
        yield "response", mode, layout, 1, None, 1, False
        yield "response", mode, layout, 1, 1, 1, False
        yield "response", mode, layout, 2, 2, 1, True
        yield "response", mode, layout, 2, None, 2, True
    for form, layout in itertools.product(("token", "sessions"), releases.current().layouts):
        yield form, "balanced", layout, 1, 1, 1, False
        yield form, "balanced", layout, 2, None, 2, True
    for mode, layout in itertools.product(("token-mean", "seq-mean-token-sum"), releases.current().layouts):
        yield "response", mode, layout, 2, None, 2, True  # only what is logged is ours


def metrics_error(rollouts: harness.Rollouts, mode: str, metrics: dict, form: str) -> float:
    """How far `balance/…` of this rank is from the numbers of the whole batch, and its parts from verl's policy loss."""
    logged = reduce_metrics({k: v for k, v in metrics.items() if k.startswith("balance/") or k == "actor/pg_loss"})
    if releases.is_patched():  # the patches log nothing
        return 0.0
    expected = {}
    if form == "response":
        sign = torch.where(rollouts.mask.any(1), rollouts.advantage.sign(), 0)
        active = mode if mode in MODES else "token-mean"
        expected = balance_metrics(
            rollouts.mask.sum(1), rollouts.uid, sign, rollouts.advantage, rollouts.session or None, active_mode=active
        )
    live = (APPLIED_RESIDUAL, *SIGN_METRICS) if mode in MODES else SIGN_METRICS
    assert set(logged) == {*expected, *(f"balance/{m.name}" for m in live), "actor/pg_loss"}, sorted(logged)
    residual = logged.get("balance/active/applied_residual", 0.0)
    assert residual < 1e-12, residual
    parts = sum(logged[f"balance/pg_loss/{sign}"] for sign in ("negative", "zero", "positive"))
    return max(abs(parts - logged["actor/pg_loss"]), *(abs(logged[k] - v) for k, v in expected.items()), 0.0)


def make_rollouts(form: str, world: int) -> harness.Rollouts:
    rollouts = harness.make_rollouts(seed=5, groups=8, size=4, form="response" if form == "response" else "token")
    if form == "sessions":  # rows of one rollout, on different ranks, each with advantages of its own
        rollouts.session = [i % 3 for i in range(len(rollouts))]
        rollouts.advantage = rollouts.advantage[:, 0]
    if form == "token":  # only the last rank's responses have two signs
        rows = torch.arange(len(rollouts)) % world != world - 1
        rollouts.advantage[rows] = rollouts.advantage[rows][:, :1].expand(-1, rollouts.mask.shape[1])
    return rollouts


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for form, mode, layout, mini_batches, micro, epochs, shuffle in settings():
        rollouts = make_rollouts(form, world)
        rows = len(rollouts)
        mine = list(range(rows))[rank::world]  # every group on every rank
        config = harness.make_actor_config(mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
        worker = harness.make_worker(rollouts, config, micro, max_tokens=24)
        mini = rows // mini_batches
        metrics = harness.update(worker, harness.to_tensordict(rollouts, mine, layout), mini, epochs, shuffle)
        error = metrics_error(rollouts, mode, metrics, form)
        errors = [0.0] * world
        torch.distributed.all_gather_object(errors, error)
        record = {"setting": [form, mode, layout, mini_batches, micro, epochs, shuffle], "metrics_error": max(errors)}
        if mode not in MODES:
            print(json.dumps(record) if rank == 0 else "", flush=True)
            continue
        theta = rollouts.theta.clone().requires_grad_()
        expected = harness.expected_loss(rollouts, mode, theta, config, mini)
        (gradient,) = torch.autograd.grad(expected, theta)
        got = torch.stack(worker.engine.gradients).view(epochs, mini_batches, -1).sum(1)
        error = ((got - gradient.flatten()).abs().max() / gradient.abs().max()).item()
        logged = sum(metrics["loss"]) / epochs
        if rank == 0:
            record |= {
                "gradient_error": error,
                "logged": logged,
                "expected": expected.item(),
                "updates": len(worker.engine.gradients),
            }
            print(json.dumps(record), flush=True)
    # Under verl's own modes a rank without uid costs metrics of whole groups, on every rank, and nobody waits for it.
    data = harness.to_tensordict(rollouts, mine, "padded")
    if rank == world - 1:
        data.pop("uid")
    worker = harness.make_worker(rollouts, harness.make_actor_config("token-mean"), micro, max_tokens=24)
    metrics = harness.update(worker, data, mini)
    print(f"rank {rank}: {sorted(key for key in metrics if key.startswith('balance/'))}", flush=True)
    # One rank's bad batch is every rank's error: nobody waits in the collective for a rank that has left.
    data = harness.to_tensordict(rollouts, mine, "padded")
    if rank == world - 1:
        data.pop("uid")
    worker = harness.make_worker(rollouts, harness.make_actor_config("balanced"), micro, max_tokens=24)
    try:
        harness.update(worker, data, mini)
    except KeyError as error:
        print(f"rank {rank}: {error}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
