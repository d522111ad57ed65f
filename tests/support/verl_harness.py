"""verl's own update path without a model: its worker, mini- and micro-batching, `ppo_loss` and policy losses, in float64.

The 'model' is one parameter per response token, θ, whose value is the token's log-probability, so a gradient with respect
to θ is the gradient of each token. Only the forward pass and the optimiser of verl's FSDP engine are replaced.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from tensordict.tensorclass import NonTensorData
from verl.utils import tensordict_utils as tu

ENTROPY_SLOPE = 0.5  # entropy = slope · θ: any function of θ serves to test the entropy term
PROMPT_LENGTH = 2

# Before its platform layer (0.9.0), verl asks torch.cpu itself for what only accelerators count.
torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: 0


@dataclass
class Rollouts:
    """One update: rows in verl's order. Masks may have holes; `theta` and `old` are [rows, T] and float64."""

    uid: list[str]
    advantage: torch.Tensor  # [rows], or [rows, T] where tokens of one response differ
    mask: torch.Tensor  # [rows, T] bool
    theta: torch.Tensor
    old: torch.Tensor
    session: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.uid)

    @property
    def sign(self) -> list[int]:
        return [int(a.sign()) for a in self.advantage]

    @property
    def advantage_BT(self) -> torch.Tensor:
        return self.advantage if self.advantage.ndim == 2 else self.advantage[:, None].expand_as(self.mask)


def make_rollouts(
    seed: int, groups: int, size: int, width: int = 9, empties: bool = True, form: str = "response"
) -> Rollouts:
    """Random groups, in an order that scatters each over the whole batch; `form` 'token': advantages of tokens."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(0 if empties else 1, width + 1, (rows,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]
    mask &= torch.rand(rows, width, generator=g) < 0.9  # holes: tool output, rejected tokens
    reward = (torch.rand(rows, generator=g) < 0.4).double().view(groups, size)
    reward[0] = 1.0  # a group without variance
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).flatten()
    if form == "token":
        advantage = torch.randn(rows, width, dtype=torch.float64, generator=g)
        advantage[torch.rand(rows, width, generator=g) < 0.1] = 0.0
    theta = -torch.rand(rows, width, dtype=torch.float64, generator=g)
    old = theta + 0.3 * torch.randn(rows, width, dtype=torch.float64, generator=g)
    order = torch.randperm(rows, generator=g)
    uid = [f"prompt-{i // size}" for i in range(rows)]
    return Rollouts([uid[i] for i in order], advantage[order], mask[order], theta[order], old[order])


def to_tensordict(rollouts: Rollouts, rows: list[int], layout: str) -> TensorDict:
    """These rows as verl's trainers hand them to the worker: 'nested' (v1) or 'padded' (legacy)."""
    width = rollouts.mask.shape[1]
    # A masked hole inside a response is still a token of it; the response ends after its last valid token.
    spans = [max(1, int(m.nonzero().max()) + 1 if m.any() else 1) for m in rollouts.mask[rows]]
    columns = {
        "response_mask": rollouts.mask[rows].long(),
        "advantages": rollouts.advantage_BT[rows] * rollouts.mask[rows],
        "old_log_probs": rollouts.old[rows],
        "ref_log_prob": rollouts.old[rows] - 0.1,
        "responses": torch.ones(len(rows), width, dtype=torch.long),
    }
    # The id of a token is its place in θ.
    ids = [
        torch.cat([torch.zeros(PROMPT_LENGTH, dtype=torch.long), row * width + torch.arange(span)])
        for row, span in zip(rows, spans, strict=True)
    ]
    nested = lambda tensors: torch.nested.as_nested_tensor(tensors, layout=torch.jagged)  # noqa: E731
    data = {"input_ids": nested(ids)}
    if layout == "nested":
        data |= {key: nested([c[:s] for c, s in zip(column, spans, strict=True)]) for key, column in columns.items()}
        data["prompts"] = nested([torch.zeros(PROMPT_LENGTH, dtype=torch.long) for _ in rows])
    else:
        data |= columns
        data["prompts"] = torch.zeros(len(rows), PROMPT_LENGTH, dtype=torch.long)
        attention = torch.arange(width)[None] < torch.tensor(spans)[:, None]
        data["attention_mask"] = torch.cat([torch.ones(len(rows), PROMPT_LENGTH), attention], 1).long()
    data["loss_mask"] = data["response_mask"]
    batch = TensorDict(data, batch_size=len(rows))
    batch["uid"] = NonTensorStack.from_list([NonTensorData(rollouts.uid[i]) for i in rows])
    if rollouts.session:
        batch["session_id"] = NonTensorStack.from_list([NonTensorData(rollouts.session[i]) for i in rows])
    if layout == "padded":
        tu.assign_non_tensor(batch, max_response_len=width)
    return batch


def model_output(theta: torch.Tensor, data: TensorDict) -> dict[str, torch.Tensor]:
    """What a model's forward pass on these rows would give: log-probability and entropy of each next token."""
    ids = data["input_ids"]
    log_prob = torch.roll(theta[ids.values()], -1)  # position p predicts token p + 1
    return {
        "log_probs": torch.nested.nested_tensor_from_jagged(log_prob, ids.offsets()),
        "entropy": torch.nested.nested_tensor_from_jagged(ENTROPY_SLOPE * log_prob, ids.offsets()),
    }


def make_actor_config(mode: str, **settings):
    from verl.workers.config import FSDPActorConfig

    defaults = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 2, "clip_ratio_high": 0.28}
    return FSDPActorConfig(loss_agg_mode=mode, **{**defaults, **settings})


def make_worker(rollouts: Rollouts, config, micro_batch: int | None, max_tokens: int):
    """verl's TrainingWorker around a parameter; `micro_batch=None` means dynamic micro-batches of `max_tokens`."""
    from functools import partial

    from verl.utils.profiler import DistProfiler
    from verl.workers import engine_workers
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    class ParameterEngine(FSDPEngine):
        def __init__(self):
            self.engine_config = SimpleNamespace(
                forward_only=False,
                use_dynamic_bsz=micro_batch is None,
                max_token_len_per_gpu=max_tokens,
                micro_batch_size_per_gpu=micro_batch,
                use_fused_kernels=False,
                use_no_sync_for_gradient_accumulation=False,
            )
            self.ulysses_sequence_parallel_size = 1
            self.ulysses_device_mesh = None
            self.module = None
            self.theta = rollouts.theta.flatten().clone().requires_grad_()
            self.gradients: list[torch.Tensor] = []

        def train_mode(self, **kwargs):
            from contextlib import nullcontext

            return nullcontext()

        def optimizer_zero_grad(self):
            self.theta.grad = None

        def optimizer_step(self):
            gradient = self.theta.grad.clone()
            torch.distributed.all_reduce(gradient)  # as FSDP: averaged over the ranks
            self.gradients.append(gradient / torch.distributed.get_world_size())
            return gradient.norm()

        def lr_scheduler_step(self):
            return 0.0

        def forward_step(self, micro_batch, loss_function, forward_only):
            output = model_output(self.theta, micro_batch)
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=None)
            return loss, {"loss": loss.detach().item(), "metrics": metrics, "model_output": {}}

    worker = engine_workers.TrainingWorker.__new__(engine_workers.TrainingWorker)
    worker.engine = ParameterEngine()
    worker.engine_config = worker.engine.engine_config
    worker.model_config = OmegaConf.create({"use_remove_padding": True})  # verl 0.7.1 reads it
    worker.flops_counter = SimpleNamespace(estimate_flops=lambda *_, **__: (0.0, 1.0))
    worker.device_name = "cpu"
    worker.profiler = DistProfiler(rank=torch.distributed.get_rank())
    worker.loss_fn = partial(engine_workers.ppo_loss, config=config)
    return worker


def update(worker, data: TensorDict, mini_batch: int, epochs: int = 1, shuffle: bool = False) -> dict:
    """One update as verl's trainers ask for it; returns the metrics that would be logged."""
    tu.assign_non_tensor(
        data,
        global_batch_size=mini_batch,
        mini_batch_size=mini_batch,
        epochs=epochs,
        seed=7,
        dataloader_kwargs={"shuffle": shuffle},
        calculate_entropy=True,
    )

    return tu.get(actor_of(worker).update_actor(data), "metrics")


def pool_lengths(mode: str, data: TensorDict, dp_group=None) -> torch.Tensor:
    """The column that the hook puts into the batch; for verl's own modes the one that it would put there."""
    from verl_ba import aggregation, loss_agg

    with mock.patch.dict(loss_agg.LOSS_AGG_REGISTRY, aggregation.VERLS_MODES):
        return loss_agg.compute_pool_mean_length(mode, data, dp_group)[loss_agg.COLUMN]


def add_pool_lengths(mode: str, data: TensorDict) -> None:
    """Put the columns into the batch that the hook puts there."""
    from verl_ba import aggregation, loss_agg

    with mock.patch.dict(loss_agg.LOSS_AGG_REGISTRY, aggregation.VERLS_MODES):
        data.update(loss_agg.compute_pool_mean_length(mode, data))


def actor_of(worker):
    """The worker that holds it in a run: its `update_actor` is the seam of a patched verl (patches/)."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    actor = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    actor.actor, actor.profiler, actor.enable_routing_replay = worker, worker.profiler, False
    actor.config = OmegaConf.create({"actor": {"loss_agg_mode": worker.loss_fn.keywords["config"].loss_agg_mode}})
    return actor


def expected_loss(rollouts: Rollouts, mode: str, theta, config, num_responses: int):
    """The whole loss of one epoch, from the literal reference: policy term, minus entropy, plus KL to the reference."""
    from tests.support import reference

    pg = reference.ppo_token_loss(
        theta, rollouts.old, rollouts.advantage, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    )
    weights = token_weights(rollouts, mode)
    total = (weights * pg).sum()
    if config.entropy_coeff:
        total = total - config.entropy_coeff * (weights * ENTROPY_SLOPE * theta).sum()
    if config.use_kl_loss:
        kl = reference.low_variance_kl(theta, rollouts.old - 0.1)
        total = total + config.kl_loss_coef * (weights * kl).sum()
    return total / num_responses


def token_weights(rollouts: Rollouts, mode: str) -> torch.Tensor:
    """1/ℓ̄ of every token, from the literal reference."""
    from tests.support import reference

    advantage, mask = rollouts.advantage_BT.tolist(), rollouts.mask.tolist()
    weights = reference.token_weights(mode, advantage, mask, rollouts.uid, rollouts.session or None)
    return torch.tensor(weights, dtype=torch.float64)


def compose_trainer_config(*overrides):
    """verl's own ppo_trainer, composed as main_ppo does, with what it needs to validate."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                "actor_rollout_ref.actor.loss_agg_mode=balanced",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.rollout.name=vllm",
                "critic.ppo_micro_batch_size_per_gpu=8",
                "algorithm.adv_estimator=grpo",
                *overrides,
            ],
        )
