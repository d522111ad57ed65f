"""verl 0.7.1's legacy FSDP actor, patched: its own `update_policy` on one and two ranks; prints a JSON line per setting.

The 'model' is the harness's, one parameter per token: only the forward pass and the optimiser are replaced.
"""

import itertools
import json
import multiprocessing
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.workers.actor.dp_actor import DataParallelPPOActor  # pyright: ignore[reportMissingImports]  # verl 0.7.1

from tests.support import verl_harness as harness

SETTINGS = list(
    itertools.product(
        ("balanced", "group-mean-token-mean"),
        ("response", "token"),
        ((1, 1), (1, 4), (2, 2), (2, 4), (1, None), (2, None)),  # mini-batches, micro-batch size (None: dynamic)
    )
)


class ParameterActor(DataParallelPPOActor):
    def __init__(self, rollouts, config):
        self.config, self.theta, self.gradients = config, rollouts.theta.clone().requires_grad_(), []
        self.actor_module = SimpleNamespace(train=lambda: None)
        self.actor_optimizer = SimpleNamespace(zero_grad=self.zero_grad)
        self.use_prefix_grouper, self.scaler, self.ulysses_sequence_parallel_size = False, None, 1

    def zero_grad(self):
        self.theta.grad = None

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):
        log_probs = self.theta[micro_batch["input_ids"][:, 0]]
        return {"log_probs": log_probs, "entropys": harness.ENTROPY_SLOPE * log_probs}

    def _optimizer_step(self):
        gradient = self.theta.grad.clone()
        torch.distributed.all_reduce(gradient)  # as FSDP: averaged over the ranks
        self.gradients.append(gradient / torch.distributed.get_world_size())
        return gradient.norm()


def to_dataproto(rollouts: harness.Rollouts, rows: list[int]) -> DataProto:
    width = rollouts.mask.shape[1]
    ids = torch.tensor(rows)[:, None].expand(-1, width + 1)  # the id of every token is its row
    batch = {
        "responses": ids[:, 1:],
        "response_mask": rollouts.mask[rows].long(),
        "input_ids": ids,
        "attention_mask": torch.cat([torch.ones(len(rows), 1), rollouts.mask[rows]], 1).long(),
        "position_ids": torch.arange(width + 1).expand(len(rows), -1),
        "old_log_probs": rollouts.old[rows],
        "ref_log_prob": rollouts.old[rows] - 0.1,
        "advantages": rollouts.advantage_BT[rows] * rollouts.mask[rows],
    }
    uid = np.array([rollouts.uid[i] for i in rows], dtype=object)
    return DataProto(TensorDict(batch, len(rows)), {"uid": uid}, {"temperature": 1.0})


def run(mode, form, split, rank, world) -> dict:
    mini_batches, micro = split
    rollouts = harness.make_rollouts(seed=5, groups=8, size=4, form=form)
    rows = len(rollouts)
    config = harness.make_actor_config(
        mode,
        ppo_mini_batch_size=rows // mini_batches // world,
        ppo_micro_batch_size_per_gpu=micro,
        use_dynamic_bsz=micro is None,
        ppo_max_token_len_per_gpu=24,
        use_rollout_log_probs=True,  # else the old log-probabilities of a single mini-batch are those of the loss
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    actor = ParameterActor(rollouts, config)
    metrics = actor.update_policy(to_dataproto(rollouts, list(range(rows))[rank::world]))
    theta = rollouts.theta.clone().requires_grad_()
    expected = harness.expected_loss(rollouts, mode, theta, config, rows // mini_batches)
    (gradient,) = torch.autograd.grad(expected, theta)
    error = ((sum(actor.gradients) - gradient).abs().max() / gradient.abs().max()).item()
    # What verl logs there is the policy loss from which it has subtracted the entropy in place.
    policy = harness.make_actor_config(mode, entropy_coeff=0.01)
    pg_loss = torch.tensor(metrics["actor/pg_loss"], dtype=torch.float64)
    torch.distributed.all_reduce(pg_loss)
    return {
        "setting": [mode, form, *split, world],
        "gradient_error": error,
        "logged": pg_loss.item() / world,
        "expected": harness.expected_loss(rollouts, mode, theta, policy, rows // mini_batches).item(),
    }


def run_rank(rank: int, world: int, folder: str) -> None:
    store = f"file://{folder}/store-{world}"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=store)
    for setting in SETTINGS:
        record = run(*setting, rank, world)
        if rank == 0:
            print(json.dumps(record), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            ranks = [fork.Process(target=run_rank, args=(rank, world, folder)) for rank in range(world)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(300)
            if any(process.exitcode != 0 for process in ranks):
                sys.exit("a rank failed")
