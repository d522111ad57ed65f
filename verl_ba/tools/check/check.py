"""From a configuration to relative errors: the small model, the ranks, the comparison."""

import importlib.util
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from verl_ba import releases, support
from verl_ba.aggregation import MODES as OUR_MODES
from verl_ba.tools.check import batch, model, reference
from verl_ba.tools.check.job import MODES, Case, Job, run_rank

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
STRATEGIES = ("fsdp", "fsdp2", "megatron")
LIMIT = 600
"""Ranks that are not done after this time are ended [s]."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
"""Relative error that is allowed, by the precision of the forward pass. A wrong mode is off by .1 and more."""


class CheckError(ValueError):
    """The configuration cannot be checked, or its ranks failed. The message is complete."""


@dataclass(frozen=True)
class Result:
    """What came of one case.

    Attributes:
        gradient_error: largest relative error of the whole gradient, over the optimiser steps.
        loss_error: of the loss, relative to the sum of its terms' magnitudes.
        norm_error: relative error of the gradient norm that verl logs.
        nearest: the least distance from this mode's gradient to another one's that is checked, on the same scale.
        metrics: what each rank would log; None for a rank to which verl gives nothing.
    """

    case: Case
    gradient_error: float
    loss_error: float
    norm_error: float
    nearest: float
    metrics: list[dict | None] = field(repr=False)

    @property
    def worst(self) -> float:
        return max(self.gradient_error, self.loss_error, self.norm_error)


@dataclass(frozen=True)
class Report:
    """What was checked.

    Attributes:
        title: engine, sizes and device, in words.
        precision: of the forward pass.
        changed: what is not as the configuration has it, in words.
        results: one for each mode.
    """

    title: str
    precision: str
    changed: list[str]
    results: list[Result]

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.precision]

    @property
    def faults(self) -> list[Result]:
        return [result for result in self.results if not result.worst <= self.tolerance]  # nan is a fault


def check(
    config: DictConfig, ranks: int, float32: bool = False, model_folder: Path | None = None, cases: Sequence[Case] = ()
) -> Report:
    """One update of every mode on this many ranks of this machine, with the configuration's engine.

    Args:
        config: verl's composed configuration, as `verl_ba.tools.audit.compose` returns it.
        ranks: processes; on GPUs, one for each.
        float32: compute in float32 whatever the configuration says, for a sharper comparison.
        model_folder: a small model to use as it is, instead of a random one of the configured architecture.
        cases: other updates than one of every mode.

    Raises:
        CheckError: see there.
    """
    device = device_of_this_machine()
    settings = OmegaConf.create(_container(config))
    layout = _layout(settings, ranks)
    with tempfile.TemporaryDirectory(prefix="verl-ba-check-") as temporary:
        folder = Path(temporary)
        changed = _change(settings, layout, float32, device)
        small = _model(settings, ranks, layout, folder, model_folder, changed)
        OmegaConf.update(settings, f"{MODEL}.path", str(small))
        results = measure(settings, cases or tuple(Case(mode) for mode in _modes()), ranks, folder)
    precision = _precision(settings, layout.strategy)
    if precision not in TOLERANCE:
        raise CheckError(
            f"the configuration computes in {precision}: expected {' or '.join(TOLERANCE)}. Give --float32"
        )
    return Report(f"{layout}, {device}, {precision}", precision, changed, results)


def _modes() -> tuple[str, ...]:
    """Of this verl; the last release that lacks one is 0.9.0."""
    import inspect

    from verl.trainer.ppo import core_algos

    source = inspect.getsource(inspect.unwrap(core_algos.agg_loss))
    return tuple(mode for mode in MODES if mode in OUR_MODES or f'"{mode}"' in source)


def device_of_this_machine() -> str:
    """'GPU', or 'CPU' if there is none; then this process and those that it starts run verl on the CPU.

    Raises:
        CheckError: there is no GPU, and no CPU platform for verl either.
    """
    wanted = os.environ.get("VERL_PLATFORM", "").lower()
    if wanted != "cpu" and torch.cuda.is_available():
        return "GPU"
    if importlib.util.find_spec("verl_cpu") is None:
        raise CheckError(
            "there is no GPU that torch can use, and verl needs the package verl_cpu to run without: it is in this project's "
            "repository, under dev/verl_cpu (`make setup` installs it)"
        )
    os.environ["VERL_PLATFORM"] = "cpu"
    return "CPU"


# --------------------------------------------------------------------------------------------------------------------
# The configuration
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How the ranks are arranged: `data` × `model` of them, `sequence` of which share the tokens of a micro-batch."""

    strategy: str
    sizes: dict[str, int]
    data: int
    sequence: int
    layers: int

    def __str__(self) -> str:
        sizes = "".join(f", {name} {size}" for name, size in self.sizes.items() if size > 1)
        return f"{self.strategy}{sizes}, {self.data} data-parallel rank{'s' if self.data > 1 else ''}"


def _container(config: DictConfig) -> dict:
    """The part that a worker reads, resolved; CheckError if verl's keys are not there."""
    absent = [key for key in (ACTOR, MODEL, ROLLOUT) if OmegaConf.select(config, key) is None]
    if absent:
        raise CheckError(f"expected the composed configuration of a verl trainer; got one without {', '.join(absent)}")
    plain = OmegaConf.to_container(config.actor_rollout_ref, resolve=True)
    return {"actor_rollout_ref": plain}


def _layout(settings: DictConfig, ranks: int) -> Layout:
    if "nested" not in releases.current().layouts:
        raise CheckError(f"verl {releases.verl_version()} has no worker that takes nested tensors. Use verl 0.9.1")
    actor = settings.actor_rollout_ref.actor
    strategy = actor.strategy
    if strategy not in STRATEGIES:
        raise CheckError(
            f"{ACTOR}.strategy={strategy}: expected {', '.join(STRATEGIES)}. docs/support.md says what is known of others"
        )
    layers = 2
    if strategy == "megatron":
        engine = actor.megatron
        tensor, pipeline, context = (
            engine[f"{name}_size"] for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
        )
        virtual = engine.virtual_pipeline_model_parallel_size or 1
        if engine.dynamic_context_parallel:
            raise CheckError(f"{ACTOR}.megatron.dynamic_context_parallel=True: it was never run. Set it to False")
        sizes = {"tensor": tensor, "pipeline": pipeline, "virtual pipeline": virtual, "context": context}
        peers, sequence, layers = tensor * pipeline * context, context, max(2, pipeline * virtual)
    else:
        if fault := support.engine_fault(settings):
            raise CheckError(fault)
        peers = sequence = support.ulysses_size(actor)
        sizes = {"Ulysses": sequence, "shards": max(actor.fsdp_config.fsdp_size, 1)}
    if ranks % peers:
        raise CheckError(
            f"--nproc {ranks}: expected a multiple of {peers}, the ranks that the configuration gives one replica of the "
            f"data ({', '.join(f'{name} {size}' for name, size in sizes.items())})"
        )
    return Layout(strategy, sizes, ranks // peers, sequence, layers)


def _change(settings: DictConfig, layout: Layout, float32: bool, device: str) -> list[str]:
    """Give the configuration the check's own loss, sizes and model; what of it a user should know, in words."""
    changed = []
    actor = settings.actor_rollout_ref.actor
    # Of about a hundred tokens that a rank has at least, so that each has several micro-batches; the longest row fits.
    tokens = -(-2 * (batch.LONGEST_PROMPT + batch.LONGEST_RESPONSE) // layout.sequence)
    values: dict[str, Any] = {
        # the loss
        f"{ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{ACTOR}.clip_ratio_low": reference.CLIP_LOW,
        f"{ACTOR}.clip_ratio_high": reference.CLIP_HIGH,
        f"{ACTOR}.clip_ratio_c": reference.DUAL_CLIP,
        f"{ACTOR}.entropy_coeff": reference.ENTROPY,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": reference.KL,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.loss_scale_factor": reference.SCALE,
        f"{ACTOR}.rollout_n": batch.SIZE,
        # the sizes
        f"{ACTOR}.ppo_micro_batch_size": None,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3,
        f"{ACTOR}.ppo_max_token_len_per_gpu": tokens,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": actor.use_dynamic_bsz,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 3,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": tokens,
        # a step that changes nothing
        f"{ACTOR}.optim.lr": 1e-12,
        f"{ACTOR}.optim.weight_decay": 0.0,
        f"{ACTOR}.optim.clip_grad": 1e9,
        f"{ACTOR}.optim.lr_warmup_steps": 0,
        f"{ACTOR}.optim.total_training_steps": 1000,
        # what belongs to the model that is replaced, or to a run
        f"{MODEL}.hf_config_path": None,
        f"{MODEL}.tokenizer_path": None,
        f"{MODEL}.custom_chat_template": None,
        f"{MODEL}.use_shm": False,
        f"{MODEL}.lora_rank": 0,
        f"{MODEL}.lora_adapter_path": None,
        f"{ROLLOUT}.checkpoint_engine.backend": "naive",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module": None,
        f"{ACTOR}.profiler.enable": False,
    }
    if settings.actor_rollout_ref.model.get("lora_rank"):
        changed.append("all parameters are trained, without LoRA")
    attention = settings.actor_rollout_ref.model.override_config.get("attn_implementation", "flash_attention_2")
    if layout.strategy == "megatron":
        values[f"{ACTOR}.optim.lr_decay_steps"] = 1000
        values[f"{ACTOR}.megatron.use_dist_checkpointing"] = False
        if float32:
            values[f"{ACTOR}.megatron.dtype"] = "float32"
    else:
        values[f"{ACTOR}.grad_clip"] = 1e9
        values[f"{ACTOR}.fsdp_config.use_orig_params"] = True  # FSDP1 shows gradients of these only
        if device == "CPU" and attention.startswith("flash_attention"):
            values[f"{MODEL}.override_config.attn_implementation"] = "packed"
            changed.append(f"attention of the CPU platform, for {attention}")
        if float32:
            values[f"{ACTOR}.fsdp_config.dtype"] = "float32"
            values[f"{ACTOR}.fsdp_config.mixed_precision"] = dict.fromkeys(
                ("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"
            )
    if float32:
        changed.append("computed in float32")
    for key, value in values.items():
        OmegaConf.update(settings, key, value, force_add=True)
    return changed


def _model(
    settings: DictConfig, ranks: int, layout: Layout, folder: Path, given: Path | None, changed: list[str]
) -> Path:
    """The folder of the small model."""
    if given is not None:
        if not (given / "config.json").exists():
            raise CheckError(
                f"--model {given}: expected a folder with a small model of transformers; no config.json there"
            )
        changed.append(f"the model in {given}")
        return given
    path = settings.actor_rollout_ref.model.path
    try:
        config = model.small_config(
            path, ranks, layout.layers, settings.actor_rollout_ref.model.get("trust_remote_code", False)
        )
        model.make(config, folder / "model")
    except model.ModelError as error:
        raise CheckError(str(error)) from error
    chosen = "verl's default path, so no model was chosen" if path == model.DEFAULT else path
    changed.append(f"a random {config.model_type} of {config.num_hidden_layers} layers ({chosen})")
    return folder / "model"


def _precision(settings: DictConfig, strategy: str) -> str:
    actor = settings.actor_rollout_ref.actor
    mixed = None if strategy == "megatron" else actor.fsdp_config.get("mixed_precision")
    name: str = actor.megatron.dtype if strategy == "megatron" else (mixed or {}).get("param_dtype", "bf16")
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name) or name


# --------------------------------------------------------------------------------------------------------------------
# Ranks, and what they computed
# --------------------------------------------------------------------------------------------------------------------


def measure(settings: DictConfig, cases: Sequence[Case], ranks: int, folder: Path) -> list[Result]:
    """Run the cases on this many ranks, with the settings as they are, and compare them with the reference.

    Args:
        settings: verl's configuration; `actor_rollout_ref.model.path` is a folder with a small model.
        folder: for what the processes tell each other.

    Raises:
        CheckError: a rank raised, or was not done in time.
    """
    plain = reference.load(settings.actor_rollout_ref.model.path)
    # A dozen rows for each of the data-parallel ranks, as many as there may be, and groups that no rank has whole.
    rows = {by_token: batch.make_rows(plain, 3 * max(2, ranks), by_token) for by_token in (False, True)}
    for by_token, made in rows.items():
        torch.save(made, folder / f"rows-{by_token}.pt")
    container = OmegaConf.to_container(settings, resolve=True)
    assert isinstance(container, dict)
    start(Job(container, tuple(cases), str(folder), ranks, _free_port(), _environment()))
    computed = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    references = {by_token: reference.Reference(plain, made) for by_token, made in rows.items()}
    modes, (data_parallel, _) = {case.mode for case in cases}, computed[0]
    return [
        compare(case, [results[i] for _, results in computed], data_parallel, references[case.by_token], modes)
        for i, case in enumerate(cases)
    ]


def start(job: Job) -> None:
    """Run the job's ranks to their end; CheckError with the log of the one that failed first, if one does."""
    cpu = os.environ.get("VERL_PLATFORM") == "cpu"
    if cpu:  # ranks are forks of a process that has imported verl; CUDA forbids that
        multiprocessing.set_forkserver_preload(["verl_ba.tools.check.worker"])
    started: Any = start_processes(
        run_rank, (job,), nprocs=job.world, join=False, start_method="forkserver" if cpu else "spawn"
    )
    end = time.monotonic() + LIMIT
    try:
        while not started.join(timeout=1.0):
            if time.monotonic() > end:
                raise CheckError(f"the ranks were not done after {LIMIT} s; the first one's log ends:\n{_tail(job, 0)}")
    except ProcessExitedException as error:
        raise CheckError(
            f"rank {error.error_index} ended ({error}); its log ends:\n{_tail(job, error.error_index)}"
        ) from error
    except ProcessRaisedException as error:
        raise CheckError(f"rank {error.error_index} raised:\n{str(error).strip()}") from error
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _tail(job: Job, rank: int) -> str:
    log = Path(job.folder, f"{rank}.log")
    return log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"


def _environment() -> dict[str, str]:
    """What the ranks get besides this process's environment when it started the first of them."""
    shared = {"TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "VERL_BA_METRICS": "1"}
    return shared | ({"TORCHDYNAMO_DISABLE": "1"} if os.environ.get("VERL_PLATFORM") == "cpu" else {})


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def compare(
    case: Case, computed: list[Any], data_parallel: int, expected: reference.Reference, modes: set[str]
) -> Result:
    """One case's errors, from what each rank computed of it: (metrics, gradients of each step)."""
    metrics = [of_rank[0] for of_rank in computed]
    logged = next(m for m in metrics if m is not None)
    errors, loss_errors, norm_errors, nearest = [], [], [], []
    for step, gradient in enumerate(computed[0][1]):
        rows = mini_batch(len(expected.rows), data_parallel, case.mini_batches, step)
        loss, size, whole = expected(case.mode, rows)
        norm = sum(float(g.square().sum()) for g in whole.values()) ** 0.5
        errors.append(reference.distance(gradient, whole))
        loss_errors.append(abs(logged["loss"][step] - loss) / size)
        norm_errors.append(abs(logged["grad_norm"][step] / norm - 1))
        nearest += [reference.distance(expected(mode, rows)[2], whole) for mode in modes - {case.mode}]
    least = min(nearest, default=float("nan"))
    return Result(case, max(errors), max(loss_errors), max(norm_errors), least, metrics)


def mini_batch(rows: int, data_parallel: int, mini_batches: int, step: int) -> list[int]:
    """The rows of an optimiser step: of each data-parallel rank's, dealt in turn, the next ones in order."""
    size = rows // data_parallel // mini_batches
    return [
        row for rank in range(data_parallel) for row in list(range(rank, rows, data_parallel))[step * size :][:size]
    ]
