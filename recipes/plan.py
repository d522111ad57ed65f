"""What a run would do, before it starts: composes the config, checks it, estimates memory, writes the run's manifest.

launch.sh calls this for every run. On stdout goes what the shell needs, one line `DEVICE NODES GPUS_PER_NODE METRICS_FILE`;
what people read goes to stderr.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from recipes import manifest
from verl_ba.support import ulysses_fault
from verl_ba.tools.analysis.modes import short

CONFIG = Path(__file__).resolve().parent / "config"
GB = 1e9
console = Console(stderr=True, width=None if sys.stderr.isatty() else 120, highlight=False)


class BadRun(ValueError):
    """A config that would fail, or train something else than it says."""


def compose(recipe: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The config that `verl.trainer.main_ppo` would get, from verl's own `ppo_trainer` and the files in `config`.

    An override `arm=` may name the mode, as launch.sh's ARM may.
    """
    from hydra import compose, initialize_config_dir

    overrides = [f"arm={short(text[4:])}" if text.startswith("arm=") else text for text in overrides]
    with initialize_config_dir(str(CONFIG), version_base=None):
        return compose(recipe, overrides=["hydra.searchpath=[pkg://verl.trainer.config]", *overrides])


@dataclass(frozen=True)
class Batch:
    """How many responses meet where."""

    prompts: int
    n: int
    mini: int
    gpus: int
    ranks: int

    @classmethod
    def of(cls, config: DictConfig) -> "Batch":
        actor = config.actor_rollout_ref.actor
        gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
        return cls(
            config.data.train_batch_size,
            config.actor_rollout_ref.rollout.n,
            actor.ppo_mini_batch_size,
            gpus,
            gpus // actor.ulysses_sequence_parallel_size,
        )

    @property
    def updates(self) -> int:
        return self.prompts // self.mini

    @property
    def share(self) -> str:
        """Parameters per GPU, in words."""
        return f"P / {self.gpus} GPU{'s' if self.gpus > 1 else ''}"

    def __str__(self) -> str:
        return (
            f"{self.prompts:,} prompts × {self.n} = {self.prompts * self.n:,} responses a step; {self.updates} update"
            f"{'s' if self.updates > 1 else ' (on policy)'} of {self.mini} × {self.n} = {self.mini * self.n:,}, "
            f"{self.mini * self.n // self.ranks} a rank"
        )


def problems(config: DictConfig, files: bool = True) -> list[str]:
    """What would stop the run after minutes of start-up, or make it another run; with `files`, missing files too."""
    found, batch = [], Batch.of(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    room = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    if actor.use_dynamic_bsz and room < longest:
        found.append(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu × ulysses_sequence_parallel_size = {room}: expected at "
            f"least data.max_prompt_length + max_response_length = {longest}, or a full-length response fits no micro-batch"
        )
    if batch.prompts % batch.mini:
        found.append(
            f"data.train_batch_size={batch.prompts}: expected a multiple of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={batch.mini}, or some updates of a step are smaller than others"
        )
    if batch.mini * batch.n % batch.ranks:
        found.append(
            f"an update's {batch.mini} × {batch.n} = {batch.mini * batch.n} responses do not divide over {batch.ranks} "
            f"data-parallel ranks: change ppo_mini_batch_size, rollout.n, or the cluster"
        )
    if config.trainer.n_gpus_per_node % rollout.tensor_model_parallel_size:
        found.append(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"
        )
    if "file" not in config.trainer.logger:
        found.append(
            f"trainer.logger={list(config.trainer.logger)}: expected 'file' among them, which comparisons read; for example "
            f"trainer.logger=[console,file,wandb]"
        )
    found += filter(None, [ulysses_fault(config)])
    if files:
        found += [f"{where}={path}: {what}" for where, path, what in missing_files(config)]
    return found


def missing_files(config: DictConfig) -> list[tuple[str, str, str]]:
    """Paths that are not there: verl would look for them on a hub, or fail once Ray is up."""
    found = []
    for key in ("train_files", "val_files"):
        value = config.data[key]
        for path in [value] if isinstance(value, str) else value:
            if "://" not in path and not Path(path).exists():
                how = (
                    f"make it: verl-ba data {Path(path).stem}" if "dataset_name" in config else "give an existing path"
                )
                found.append((f"data.{key}", path, f"no such file from {Path.cwd()}; {how}"))
    path = config.actor_rollout_ref.model.path
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().exists():
        found.append(
            ("actor_rollout_ref.model.path", path, "no such folder; give one with a model, or a name on the hub")
        )
    return found


# --------------------------------------------------------------------------------------------------------------------
# Memory and time
# --------------------------------------------------------------------------------------------------------------------


def layer_parameters(shape: DictConfig) -> int:
    """Parameters of one decoder layer of a Qwen2 or Qwen3 model."""
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    bias = (shape.heads + 2 * shape.kv_heads) * shape.head_dim if shape.attention_bias else 0
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    return attention + bias + 3 * shape.hidden * shape.intermediate + norms


def outer_parameters(shape: DictConfig) -> int:
    """Parameters outside the layers: embedding, output head unless tied, last norm."""
    return shape.vocabulary * shape.hidden * (1 if shape.tied else 2) + shape.hidden


def parameters(shape: DictConfig) -> int:
    return shape.layers * layer_parameters(shape) + outer_parameters(shape)


@dataclass(frozen=True)
class Line:
    """One term of an estimate: its bytes or hours, and how they came about."""

    what: str
    arithmetic: str
    size: float


def update_memory(config: DictConfig) -> list[Line]:
    """Per GPU while the actor is updated [bytes]: an upper estimate of what is there at once in the backward pass."""
    shape, batch = config.model_shape, Batch.of(config)
    p, tokens = parameters(shape), config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    layer = layer_parameters(shape)
    wide = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.intermediate + 4 * shape.hidden
    share = batch.share
    return [
        Line("weights and gradients", f"(4 + 4) B × {share}", 8 * p / batch.gpus),
        Line("Adam's two moments", f"8 B × {share}", 8 * p / batch.gpus),
        Line(
            "gathered weights",
            f"2 B × (2 layers × {layer / 1e6:.0f}e6 + outside {outer_parameters(shape) / 1e6:.0f}e6)",
            2 * (2 * layer + outer_parameters(shape)),
        ),
        Line(
            "layer inputs kept",
            f"2 B × {shape.layers} layers × {tokens:,} tokens × {shape.hidden}",
            2 * shape.layers * tokens * shape.hidden,
        ),
        Line("one layer computed again", f"2 B × {tokens:,} tokens × {wide:,} wide × 2", 4 * tokens * wide),
        Line(
            "logits",
            f"(2 + 2 + 4) B × {tokens:,} tokens × {shape.vocabulary:,}: bf16, gradient, one float32 copy",
            8 * tokens * shape.vocabulary,
        ),
    ]


def rollout_memory(config: DictConfig) -> list[Line]:
    """Per GPU while vLLM generates [bytes]; the last line is what remains for the key-value cache."""
    shape, batch = config.model_shape, Batch.of(config)
    rollout, fsdp = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.fsdp_config
    p, tp = parameters(shape), rollout.tensor_model_parallel_size
    share = config.gpu.memory_gb * GB * rollout.gpu_memory_utilization
    stays = (0 if fsdp.param_offload else 4) + (0 if fsdp.optimizer_offload else 8)
    weights = 2 * p / tp
    return [
        Line(
            "training state that stays",
            f"{stays} B × P / {batch.gpus} GPU{'s' if batch.gpus > 1 else ''}",
            stays * p / batch.gpus,
        ),
        Line("vLLM's weights", f"2 B × P / {tp}", weights),
        Line("activations, CUDA graphs", "4 GB taken off, a guess", 4 * GB),
        Line(
            "key-value cache",
            f"{rollout.gpu_memory_utilization} × {config.gpu.memory_gb} GB − the two above",
            share - weights - 4 * GB,
        ),
    ]


def cached_responses(config: DictConfig) -> float:
    """How many prompts with full-length responses the key-value cache of one GPU holds."""
    shape, tp = config.model_shape, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim / tp
    longest = config.data.max_prompt_length + config.data.max_response_length
    return rollout_memory(config)[-1].size / (token * longest)


def step_hours(config: DictConfig) -> list[Line]:
    """Time of a training step [hours], roughly: what the hardware's data sheet allows at the efficiency that is stated.

    Responses are taken as half the longest; validation and weight synchronisation are left out.
    """
    shape, gpu, batch = config.model_shape, config.gpu, Batch.of(config)
    p, length = parameters(shape), config.data.max_response_length / 2
    tokens = batch.prompts * batch.n * length / batch.gpus
    cache = 4 * shape.layers * shape.kv_heads * shape.head_dim  # bytes a token, keys and values in bf16
    together = min(batch.prompts * batch.n / batch.gpus, rollout_memory(config)[-1].size / (cache * length))
    read = 2 * p + together * cache * length / 2
    return [
        Line(
            "generation",
            f"{tokens / 1e6:.1f}e6 tokens a GPU, {together:.0f} responses at once, {read / GB:.0f} GB read for each of "
            f"their tokens at half of {gpu.tb_per_s} TB/s",
            tokens / together * read / (0.5 * gpu.tb_per_s * 1e12) / 3600,
        ),
        Line(
            "log-probabilities, update",
            f"(2 + 8) FLOP × P × the same tokens at 0.4 × {gpu.tflop_per_s} TFLOP/s",
            10 * p * tokens / (0.4 * gpu.tflop_per_s * 1e12) / 3600,
        ),
    ]


def memory_problems(config: DictConfig) -> list[str]:
    """What the estimate says will not fit."""
    found = []
    update = sum(line.size for line in update_memory(config))
    if update > 0.95 * config.gpu.memory_gb * GB:
        found.append(
            f"an update needs about {update / GB:.0f} GB on each GPU of {config.gpu.memory_gb} GB. More GPUs (cluster=…), a "
            f"smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or ulysses_sequence_parallel_size=2"
        )
    stays, *_, cache = rollout_memory(config)
    utilization = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if stays.size > (1 - utilization) * config.gpu.memory_gb * GB:
        found.append(
            f"beside vLLM's share of {utilization}, {stays.size / GB:.0f} GB of training state do not fit: offload it "
            f"(sharding=fsdp does), or lower actor_rollout_ref.rollout.gpu_memory_utilization"
        )
    if cache.size <= 0 or cached_responses(config) < 1:
        found.append("vLLM's share has no room for one full-length response: raise tensor_model_parallel_size")
    return found


# --------------------------------------------------------------------------------------------------------------------
# Showing it
# --------------------------------------------------------------------------------------------------------------------


def show(config: DictConfig, recipe: str) -> None:
    actor = config.actor_rollout_ref.actor
    trainer = config.trainer
    table = Table(show_header=False, box=None, title=f"{recipe}, arm {config.arm_name}", title_justify="left")
    rows = {
        "aggregation": f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}",
        "model": config.actor_rollout_ref.model.path,
        "data": f"{config.data.train_files}; validation every {trainer.test_freq} steps",
        "lengths": f"prompt ≤ {config.data.max_prompt_length}, response ≤ {config.data.max_response_length} tokens",
        "batch": str(Batch.of(config)),
        "steps": f"{trainer.total_training_steps}, a checkpoint every {trainer.save_freq}, resume {trainer.resume_mode}",
        "cluster": f"{trainer.nnodes} node(s) × {trainer.n_gpus_per_node}, device {trainer.device}, {actor.strategy}",
        "log": f"{', '.join(trainer.logger)}; {config.run_dir}/metrics",
        "results": config.run_dir,
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    if can_estimate(config):
        show_memory(config)
        show_hours(config)


def can_estimate(config: DictConfig) -> bool:
    """Whether the config says what the estimates need: a model's shape and a GPU."""
    return "model_shape" in config and "gpu" in config


def show_hours(config: DictConfig) -> None:
    lines, steps = step_hours(config), config.trainer.total_training_steps
    table = Table("minutes", "", "arithmetic", title="time of a step, a rough estimate", title_justify="left")
    for line in lines:
        table.add_row(f"{60 * line.size:.1f}", line.what, line.arithmetic)
    step = sum(line.size for line in lines)
    table.add_row(
        f"{60 * step:.1f}", "a step", f"{steps} steps: {steps * step:.0f} hours, validation apart", style="bold"
    )
    console.print(table)


def show_memory(config: DictConfig) -> None:
    update, rollout = update_memory(config), rollout_memory(config)
    table = Table(
        "GB",
        "",
        "arithmetic",
        title=f"memory per GPU, estimated; P = {parameters(config.model_shape) / 1e9:.2f}e9 parameters",
        title_justify="left",
    )
    for line in update:
        table.add_row(f"{line.size / GB:.1f}", line.what, line.arithmetic)
    total = sum(line.size for line in update)
    table.add_row(
        f"{total / GB:.1f}", f"of {config.gpu.memory_gb} in an update", "the sum", style="bold", end_section=True
    )
    for line in rollout:
        table.add_row(f"{line.size / GB:.1f}", line.what, line.arithmetic)
    longest = config.data.max_prompt_length + config.data.max_response_length
    fits = f"{math.floor(cached_responses(config))} responses of full length at once"
    table.add_row("", "", f"the cache holds {fits}, {longest:,} tokens each", style="bold")
    console.print(table)
    p, per_node = parameters(config.model_shape), config.trainer.n_gpus_per_node / Batch.of(config).gpus
    keep = config.trainer.max_actor_ckpt_to_keep
    console.print(
        f"host memory per node: 16 B × P × {per_node:.2g} of the GPUs = {16 * p * per_node / GB:.0f} GB of offloaded "
        f"training state; disk: 12 B × P = {12 * p / GB:.0f} GB a checkpoint, {keep} kept"
    )


def main(
    recipe: str,
    overrides: list[str],
    dry_run: Annotated[bool, typer.Option(help="show what would run, and run nothing")] = False,
    via: Annotated[
        str, typer.Option(help="slurm, ray: the job writes the manifest; ray: files are the cluster's")
    ] = "here",
) -> None:
    """Check a run; show it (--dry-run), or write its manifest."""
    try:
        config = compose(recipe, overrides)
        OmegaConf.resolve(config)
        wrong = problems(config, files=via != "ray")
        memory = memory_problems(config) if can_estimate(config) else []
    except Exception as error:  # Hydra's and OmegaConf's errors name the key
        console.print(f"[red]error:[/red] {recipe}: {error}", markup=True)
        raise typer.Exit(2) from None
    if dry_run:
        show(config, recipe)
    for problem in wrong:
        console.print(f"{'would stop' if dry_run else 'error'}: {problem}", style="red", markup=False, soft_wrap=True)
    for problem in memory:
        console.print(f"may not fit: {problem}", style="yellow", markup=False, soft_wrap=True)
    if wrong and not dry_run:
        raise typer.Exit(2)
    metrics = manifest.metrics_file(config)
    if not dry_run and via == "here":
        manifest.write(config, recipe, overrides)
    print(config.trainer.device, config.trainer.nnodes, config.trainer.n_gpus_per_node, metrics)


if __name__ == "__main__":
    typer.run(main)
