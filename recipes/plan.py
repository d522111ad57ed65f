"""What a run would do, before it starts: composes the config, checks it and the nodes, and estimates memory.

launch.sh calls this for every run. If nothing is wrong, the run's folder is locked, its manifest written, and verl takes
this process's place (start.py); or a submit_….sh does, for a cluster.
"""

import contextlib
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from recipes import manifest, start
from verl_ba.paper.data.sources import SOURCES
from verl_ba.support import engine_fault
from verl_ba.tools.analysis.modes import MODES, in_full, short
from verl_ba.tools.preflight import Needs, paths_of

GB = 1e9
console = Console(stderr=True, width=None if sys.stderr.isatty() else 120, highlight=False)


class BadRun(ValueError):
    """A config that would fail, or train something else than it says."""


def compose(recipe: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The config that `verl.trainer.main_ppo` would get, from verl's own `ppo_trainer` and the files in `config`.

    An override `arm=` may name the mode, as launch.sh's ARM may.
    """
    from hydra import compose, initialize_config_dir

    verl = importlib.util.find_spec("verl")  # found, not imported: that takes ten seconds
    if verl is None or not verl.submodule_search_locations:
        raise BadRun(f"no verl in {sys.executable}")
    configs = Path(verl.submodule_search_locations[0]) / "trainer" / "config"
    overrides = [f"arm={short(text[4:])}" if text.startswith("arm=") else text for text in overrides]
    with initialize_config_dir(str(start.CONFIG), version_base=None):
        return compose(recipe, overrides=[f"hydra.searchpath=[{start.quoted(f'file://{configs}')}]", *overrides])


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
    found, batch = wrong_names(config), Batch.of(config)
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
    found += filter(None, [engine_fault(config)])
    if files:
        found += [f"{where}={path}: {what}" for where, path, what in missing_files(config)]
    return found


def wrong_names(config: DictConfig) -> list[str]:
    """Where the names of a run's results would say another mode than the one that trains; and unknown modes."""
    mode, arm = config.actor_rollout_ref.actor.loss_agg_mode, config.arm_name
    known = MODES
    if mode not in known:
        from verl_ba.loss_agg import LOSS_AGG_REGISTRY, VERL_MODES  # imports torch

        known = tuple(dict.fromkeys([*MODES, *LOSS_AGG_REGISTRY, *VERL_MODES]))
    if mode not in known:
        return [f"actor_rollout_ref.actor.loss_agg_mode={mode}: expected one of {', '.join(known)}"]
    if in_full(arm) in known and in_full(arm) != mode:
        return [
            f"actor_rollout_ref.actor.loss_agg_mode={mode}, but the run is named after the arm {arm}, which is "
            f"{in_full(arm)}: its results would be compared under a wrong name. Give {short(mode)} as the arm instead, "
            f"or name the run too: arm_name={mode}"
        ]
    return []


def nodes_faults(config: DictConfig, address: str | None) -> list[str]:
    """What the run would miss on this machine, or on any node of the Ray cluster at this address, by trying it there.

    What `missing_files` reports already is left out.
    """
    needs = Needs.of(config, checkpoint_bytes(config))
    here = tuple(file for file in needs.files if Path(file).exists())
    model = needs.model if needs.model and Path(needs.model).exists() else None
    needs = replace(needs, files=here, model=model)
    if address is None:
        from verl_ba.tools.doctor import examine  # imports torch

        with contextlib.redirect_stdout(sys.stderr):  # verl's imports print
            return examine(needs).faults
    # In a process of its own: Ray gives workers the driver's path, and this one's has the checkout, which a node may lack.
    asked = [sys.executable, "-P", "-m", "verl_ba", "doctor", "--ray", address, "--needs", json.dumps(asdict(needs))]
    variables = {**os.environ, **start.environment(config.trainer.device)}
    status = subprocess.run(asked, env=variables, stdout=sys.stderr).returncode
    return [f"the nodes of the Ray cluster at {address}: see what is marked with ✗ above"] if status else []


def checkpoint_bytes(config: DictConfig) -> float:
    """A checkpoint's size: float32 weights and Adam's two moments; 0 where the model's shape is not known.

    On a CPU the model is a small one in the place of that of the shape.
    """
    return 12 * parameters(config.model_shape) if "model_shape" in config and config.trainer.device != "cpu" else 0.0


def missing_files(config: DictConfig) -> list[tuple[str, str, str]]:
    """Paths that are not there: verl would look for them on a hub, or fail once Ray is up."""
    found = []
    for key in ("train_files", "val_files"):
        for path in paths_of(config.data[key]):
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


def expected_length(config: DictConfig) -> float:
    """Mean length of a response over the run [tokens], a guess: the model's own key, else half of the longest."""
    return min(config.get("expected_response_length") or math.inf, config.data.max_response_length / 2)


def generation_hours(config: DictConfig, responses: float) -> Line:
    """Time to generate so many responses [hours]: what the data sheet's bandwidth allows at half of it."""
    shape, gpu, batch, length = config.model_shape, config.gpu, Batch.of(config), expected_length(config)
    tokens = responses * length / batch.gpus
    cache = 4 * shape.layers * shape.kv_heads * shape.head_dim  # bytes a token, keys and values in bf16
    together = min(responses / batch.gpus, rollout_memory(config)[-1].size / (cache * length))
    read = 2 * parameters(shape) + together * cache * length / 2
    return Line(
        "generation",
        f"{tokens / 1e6:.1f}e6 tokens a GPU, {together:.0f} responses at once, {read / GB:.0f} GB read for each of "
        f"their tokens at half of {gpu.tb_per_s} TB/s",
        tokens / together * read / (0.5 * gpu.tb_per_s * 1e12) / 3600,
    )


def step_hours(config: DictConfig) -> list[Line]:
    """Time of a training step [hours], roughly: what the hardware's data sheet allows at the efficiency that is stated.

    The synchronisation of weights is left out.
    """
    gpu, batch, length = config.gpu, Batch.of(config), expected_length(config)
    responses = batch.prompts * batch.n
    work = 10 * parameters(config.model_shape) * responses * length / batch.gpus
    return [
        generation_hours(config, responses),
        Line(
            "log-probabilities, update",
            f"(2 + 8) FLOP × P × the same tokens at 0.4 × {gpu.tflop_per_s} TFLOP/s",
            work / (0.4 * gpu.tflop_per_s * 1e12) / 3600,
        ),
    ]


def validation(config: DictConfig) -> tuple[int, int]:
    """How many responses a validation generates, and how often the run validates; 0 questions where no number is known."""
    questions = sum(_questions(Path(file)) for file in paths_of(config.data.val_files))
    trainer = config.trainer
    times = trainer.total_training_steps // trainer.test_freq if trainer.test_freq > 0 else 0
    return questions * config.actor_rollout_ref.rollout.val_kwargs.n, times + bool(trainer.val_before_train)


def _questions(file: Path) -> int:
    """Rows of a data file: of the file if it is there, else of the catalogue."""
    if file.suffix == ".parquet" and file.exists():
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(file).num_rows
    source = SOURCES.get(file.stem)
    return (source.rows_written or source.rows_read) if source else 0


@dataclass(frozen=True)
class Cost:
    """Hours of a run: a step, the steps, the validations, and all of it on all GPUs."""

    step: float
    training: float
    validation: float
    gpus: int

    @property
    def run(self) -> float:
        return self.training + self.validation

    @property
    def gpu_hours(self) -> float:
        return self.run * self.gpus


def cost(config: DictConfig) -> Cost:
    """What a run takes by the arithmetic of `step_hours`."""
    step = sum(line.size for line in step_hours(config))
    responses, times = validation(config)
    asked = times * generation_hours(config, responses).size if responses else 0.0
    return Cost(step, step * config.trainer.total_training_steps, asked, Batch.of(config).gpus)


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
    table = Table("minutes", "", "arithmetic", title="time of a step, a rough estimate", title_justify="left")
    for line in step_hours(config):
        table.add_row(f"{60 * line.size:.1f}", line.what, line.arithmetic)
    spent, (responses, times) = cost(config), validation(config)
    table.add_row(
        f"{60 * spent.step:.1f}",
        "a step",
        f"of {expected_length(config):,.0f} tokens a response; {config.trainer.total_training_steps} steps: "
        f"{spent.training:.1f} hours",
        style="bold",
        end_section=True,
    )
    each = 60 * spent.validation / times if times else 0.0
    asked = f"{responses:,} responses" if responses else "a number of responses that is not known"
    table.add_row(f"{each:.1f}", "a validation", f"{asked}, generated {times} times: {spent.validation:.1f} hours")
    table.add_row(
        "", "the run", f"{spent.run:.1f} hours on {spent.gpus} GPUs: {spent.gpu_hours:,.0f} GPU hours", style="bold"
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
        f"training state; disk: 12 B × P = {checkpoint_bytes(config) / GB:.0f} GB a checkpoint, {keep} kept"
    )


def main(
    recipe: str,
    overrides: list[str],
    dry_run: Annotated[bool, typer.Option(help="show what would run, and run nothing")] = False,
    via: Annotated[
        str,
        typer.Option(help="slurm, ray: the job checks its nodes and writes the manifest; ray: files are the cluster's"),
    ] = "here",
) -> None:
    """Check a run; show it (--dry-run), submit it (--via slurm, ray), or become it."""
    try:
        start.refuse_paths({name: os.environ.get(name, "") for name in ("RESULTS_DIR", "DATA_DIR", "MODEL_DIR")})
        config = compose(recipe, overrides)
        OmegaConf.resolve(config)
        wrong = problems(config, files=via != "ray")
        memory = memory_problems(config) if can_estimate(config) else []
        if via == "here" and (dry_run or not wrong):
            with console.status("trying what the run needs (importing verl takes a while)"):
                wrong += nodes_faults(config, os.environ.get("RAY_ADDRESS"))
    except Exception as error:  # Hydra's and OmegaConf's errors name the key
        console.print(f"error: {recipe}: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if dry_run:
        show(config, recipe)
    for problem in wrong:
        console.print(f"{'would stop' if dry_run else 'error'}: {problem}", style="red", markup=False, soft_wrap=True)
    for problem in memory:
        console.print(f"may not fit: {problem}", style="yellow", markup=False, soft_wrap=True)
    if wrong and not dry_run:
        raise typer.Exit(2)
    device, cluster = config.trainer.device, config.trainer
    if via != "here":
        plan = f"{device} {cluster.nnodes} {cluster.n_gpus_per_node}"
        submit = [
            "bash",
            str(start.HERE / f"submit_{via}.sh"),
            plan,
            *(["--dry-run"] if dry_run else []),
            recipe,
            *overrides,
        ]
        become(submit, start.environment(device))
    try:
        # Under the lock, so that no other start counts the same starts.
        descriptor = None if dry_run else start.lock(Path(config.run_dir))
        command = start.command(config, recipe, overrides, manifest.metrics_file(config), os.environ)
        if descriptor is None:
            print(f"\nwould run:\n  {shlex.join(command)}")
            return
        begun = manifest.write(config, recipe, overrides)
        start.sign(descriptor, begun)
    except (start.CannotStart, manifest.BadManifest) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    os.set_inheritable(descriptor, True)  # the lock lasts as long as the run
    become(command, start.environment(device))


def become(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Let a command take this process's place, with these variables besides its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], list(command), {**os.environ, **variables})


if __name__ == "__main__":
    typer.run(main)
