"""One rank: verl's `ActorRolloutRefWorker`, built from the configuration, updates a small model once per case.

The learning rate is too small to move a float32 weight, so all cases see the same model. The gradient is taken as the
optimiser would get it, before it is clipped.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers import engine_workers

from verl_ba.tools.check.batch import Row, to_tensordict
from verl_ba.tools.check.job import Case, Job

Gradient = dict[str, torch.Tensor]


def run(rank: int, job: Job) -> None:
    """Every case of the job. Leaves the number of data-parallel ranks and what `update` returned in `RANK.pt`."""
    config = OmegaConf.create(job.config)
    worker = engine_workers.ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    assert worker.actor is not None
    rows = {
        by_token: torch.load(Path(job.folder, f"rows-{by_token}.pt"), weights_only=False) for by_token in (False, True)
    }
    results = [update(worker, case, rows[case.by_token]) for case in job.cases]
    if rank:  # the gradients are the same everywhere: those of the first rank do
        results = [(metrics, []) for metrics, _ in results]
    torch.save((worker.actor.engine.get_data_parallel_size(), results), Path(job.folder, f"{rank}.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def update(worker: Any, case: Case, rows: list[Row]) -> tuple[dict | None, list[Gradient]]:
    """One update; what this rank would log (None where verl gives it nothing), and the gradient of each step."""
    worker.config.actor.loss_agg_mode = case.mode
    actor_config: Any = omega_conf_to_dataclass(worker.config.actor)
    worker.actor.set_loss_fn(functools.partial(engine_workers.ppo_loss, config=actor_config))
    engine = worker.actor.engine
    data = to_tensordict(rows[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()])
    mini_batch = len(rows) // case.mini_batches
    tu.assign_non_tensor(
        data,
        global_batch_size=mini_batch,
        mini_batch_size=mini_batch,
        epochs=1,
        seed=7,
        dataloader_kwargs={"shuffle": False},
        calculate_entropy=True,
        temperature=1.0,
        compute_loss=True,
    )
    if case.micro is not None:
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=case.micro)
    if case.dynamic is not None:
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=case.dynamic)
    gradients: list[Gradient] = []
    step = engine.optimizer_step

    def optimizer_step() -> Any:
        gradients.append({name: g.detach().cpu().clone() for name, g in whole_gradient(engine).items()})
        return step()

    engine.optimizer_step = optimizer_step
    try:
        output = worker.update_actor(data)
    finally:
        del engine.optimizer_step
    return (None if output is None else tu.get(output, "metrics")), gradients


def whole_gradient(engine: Any) -> Gradient:
    """The reduced gradient of every parameter, under transformers' names and unsharded; all ranks call it together."""
    return WHOLE_GRADIENT[engine.engine_config.strategy](engine)


def fsdp(engine: Any) -> Gradient:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(engine.module, with_grads=True):
        return {
            name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""): p.grad.clone()
            for name, p in engine.module.named_parameters()
        }


def fsdp2(engine: Any) -> Gradient:
    return {name: p.grad.full_tensor() for name, p in engine.module.named_parameters()}


def megatron(engine: Any) -> Gradient:
    """Gradients take the place of weights while the bridge exports them under transformers' names."""
    parameters = [p for chunk in engine.module for p in chunk.parameters()]
    if engine.engine_config.use_distributed_optimizer:
        for chunk in engine.module:
            _gather_shards(chunk)
    weights = [p.data for p in parameters]
    try:
        for p in parameters:
            p.data = p.main_grad.clone().to(p.dtype)
        exported = (
            engine.bridge.export_weights(engine.module)
            if engine.vanilla_bridge
            else engine.bridge.export_hf_weights(engine.module)
        )
        return {name: tensor.clone() for name, tensor in exported}
    finally:
        for p, data in zip(parameters, weights, strict=True):
            p.data = data


def _gather_shards(chunk: Any) -> None:
    """The distributed optimiser reduces to each rank its shard of every bucket: put the others' beside it."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(group.size()))
            torch.distributed.all_gather(shards, shards[group.rank()].clone(), group=group)


WHOLE_GRADIENT: dict[str, Callable[[Any], Gradient]] = {"fsdp": fsdp, "fsdp2": fsdp2, "megatron": megatron}
