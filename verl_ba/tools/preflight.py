"""What one run needs of every node, checked by doing it: score an answer, run a program, import a package, look at files.

`Needs.of(config)` reads a run's configuration and can be sent to any node; `check(needs)` tries everything there.
recipes/plan.py does so before a run starts, `verl-ba doctor --config FILE [--ray ADDRESS]` at any time.
"""

import importlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ba.support import engine_fault

GB = 1e9
LEAST_SHARED_MEMORY = 1e9
"""Of /dev/shm, where GPUs of one node talk through it [bytes]. Docker gives 64 MB unless told otherwise."""

OUR_SCORING = "verl_ba.paper.scoring"


@dataclass(frozen=True)
class Needs:
    """What a run needs of each of its nodes.

    Attributes:
        scoring: `data_source`s of the run's data whose reward is `verl_ba.paper.scoring`; () with another reward.
        flash_attention: the actor's attention is flash_attention_2, on a GPU.
        gpus: of a node.
        files: every data file that is a local path.
        columns: the columns that the run reads from a data file.
        model: the folder of the model; None for a name on a hub.
        folder: where checkpoints go.
        checkpoint: size of one [bytes]; 0 if none is written or the size is unknown.
        engine: why verl's engine itself would train wrong with this configuration (`support.engine_fault`); None.
    """

    scoring: tuple[str, ...] = ()
    flash_attention: bool = False
    gpus: int = 0
    files: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    model: str | None = None
    folder: str | None = None
    checkpoint: float = 0.0
    engine: str | None = None

    @classmethod
    def of(cls, config: Any, checkpoint: float = 0.0) -> "Needs":
        """From a composed configuration of verl's trainer (OmegaConf or plain dictionaries).

        checkpoint: its size [bytes], where the caller can say.
        """
        data, model, trainer = config["data"], config["actor_rollout_ref"]["model"], config["trainer"]
        files = tuple(
            str(Path(file).expanduser().absolute())
            for key in ("train_files", "val_files")
            for file in paths_of(data[key])
            if "://" not in file
        )
        reward = (_get(config, "reward.custom_reward_function.path") or "").removeprefix("pkg://")
        on_gpus = trainer["device"] != "cpu"
        attention = _get(model, "override_config.attn_implementation") or "flash_attention_2"
        path = str(model["path"])
        return cls(
            scoring=tuple(sorted({source for file in files for source in _sources(file)}))
            if reward == OUR_SCORING
            else (),
            flash_attention=on_gpus and attention == "flash_attention_2",
            gpus=trainer["n_gpus_per_node"] if on_gpus else 0,
            files=files,
            columns=(data["prompt_key"], data["reward_fn_key"], "reward_model"),
            model=str(Path(path).expanduser().absolute()) if path.startswith(("/", ".", "~")) else None,
            folder=str(trainer["default_local_dir"]) if trainer["save_freq"] > 0 else None,
            checkpoint=checkpoint if trainer["save_freq"] > 0 else 0.0,
            engine=engine_fault(config),
        )


@dataclass(frozen=True)
class Check:
    """One thing that was tried on a node: what, and what is wrong with how to mend it, or None."""

    what: str
    fault: str | None


class Fault(Exception):
    """Something that the run needs is not there, or does the wrong thing; the message says how to mend it."""


def check(needs: Needs) -> list[Check]:
    """Try on this machine everything that the run needs."""
    tried: list[Check] = []

    def attempt(what: str, trial: Callable[[], None]) -> None:
        try:
            trial()
        except Fault as fault:
            tried.append(Check(what, str(fault)))
        except Exception as error:  # whatever it is, the run would meet it, too
            tried.append(Check(what, f"{type(error).__name__}: {str(error).strip() or 'no message'}"))
        else:
            tried.append(Check(what, None))

    if needs.engine:
        tried.append(Check("the engine trains what it is given", needs.engine))
    if needs.scoring:
        from verl_ba.paper import scoring

        if set(needs.scoring) & set(scoring.MATH):
            attempt("a number and a formula are scored", _try_math)
        if set(needs.scoring) & set(scoring.CODE):
            attempt("a right and a wrong program are scored", _try_programs)
    if needs.flash_attention:
        attempt("flash_attn can be imported", _try_flash_attention)
    if needs.gpus > 1:
        attempt("/dev/shm is large enough", _try_shared_memory)
    if needs.folder and needs.checkpoint:
        attempt("the disk has room for a checkpoint", lambda: _try_disk(needs.folder or "", needs.checkpoint))
    for file in dict.fromkeys(needs.files):
        attempt(f"data: {file}", lambda file=file: _try_data(file, needs))
    if needs.model:
        attempt(f"model: {needs.model}", lambda: _try_model(Path(needs.model or "")))
    return tried


def _try_math() -> None:
    from verl_ba.paper.scoring import compute_score

    for response, truth, right in (
        (r"\boxed{7}", "7", 1.0),
        (r"\boxed{8}", "7", 0.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{x+2}", "1+x", 0.0),
    ):
        _expect(compute_score("math500", response, truth), right, f"the answer {response} to {truth}")


def _try_programs() -> None:
    from verl_ba.paper.scoring import code, compute_score

    tests = code.encode_tests(["2\n"], ["4\n"])
    for program, right in (("print(2 * int(input()))", 1.0), ("print(3 * int(input()))", 0.0)):
        _expect(compute_score("livecodebench", f"```python\n{program}\n```", tests), right, f"the program {program}")


def _expect(got: float, right: float, what: str) -> None:
    if got != right:
        raise Fault(
            f"{what}: expected the score {right}, got {got}. Install the versions of requirements/lock.txt that "
            "verl_ba/paper needs, and run this again"
        )


def _try_flash_attention() -> None:
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:
        raise Fault(
            f"{error}. verl's default attention needs it: install a wheel for this torch (docs/install.md says where), or "
            "set +actor_rollout_ref.model.override_config.attn_implementation=sdpa, which is slower"
        ) from error


def _try_shared_memory() -> None:
    if not os.path.isdir("/dev/shm"):
        raise Fault("there is no /dev/shm, through which the GPUs of a node talk. Mount a tmpfs there")
    size = shutil.disk_usage("/dev/shm").total
    if size < LEAST_SHARED_MEMORY:
        raise Fault(
            f"expected at least {LEAST_SHARED_MEMORY / GB:.0f} GB, got {size / GB:.2f}. Start the container with "
            "--shm-size=10g, or mount a larger tmpfs"
        )


def _try_disk(folder: str, checkpoint: float) -> None:
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < checkpoint:
        raise Fault(
            f"{there} has {free / GB:.0f} GB free; one checkpoint takes {checkpoint / GB:.0f} GB. Make room, choose another "
            "RESULTS_DIR, or set trainer.save_freq=-1"
        )
    if not os.access(there, os.W_OK):
        raise Fault(f"{there} cannot be written to. Choose another RESULTS_DIR")


def _try_data(file: str, needs: Needs) -> None:
    path = Path(file)
    if not path.exists():
        raise Fault(f"no such file from {Path.cwd()}. Use a folder that all nodes share")
    if path.suffix != ".parquet":
        return  # verl also reads JSON lines, which have no schema
    import pyarrow.parquet as parquet

    try:
        schema = parquet.read_schema(path)
    except Exception as error:
        raise Fault(f"cannot be read as Parquet ({str(error).splitlines()[0]}). Build it again") from error
    missing = [column for column in needs.columns if column not in schema.names]
    if missing:
        raise Fault(f"expected the columns {', '.join(needs.columns)}, got {', '.join(schema.names)}. Build it again")
    kind = schema.field("reward_model").type
    if not hasattr(kind, "get_field_index") or kind.get_field_index("ground_truth") < 0:
        raise Fault(f"expected reward_model to have a field ground_truth, got {kind}. Build it again")


def _try_model(folder: Path) -> None:
    if not folder.is_dir():
        raise Fault("no such folder. Use one that all nodes share, or a name on the hub")
    config = folder / "config.json"
    try:
        kind = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise Fault(f"expected a Hugging Face model with config.json ({error}). Download it again") from error
    if not isinstance(kind, dict) or "model_type" not in kind:
        raise Fault("config.json names no model_type. Download the model again")
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not weights:
        raise Fault("expected weights, *.safetensors or pytorch_model*.bin, found none. Download the model again")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        parts = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(part for part in parts if not (folder / part).exists())
        if missing:
            raise Fault(f"{len(missing)} of {len(parts)} files of weights are missing: {missing[0]}, … Download them")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise Fault("expected a tokenizer (tokenizer.json, tokenizer.model or vocab.json), found none")


def _sources(file: str) -> set[str]:
    """The `data_source`s in a data file; none where it cannot be read, which is a fault of its own."""
    try:
        import pyarrow.parquet as parquet

        return set(parquet.read_table(file, columns=["data_source"])["data_source"].unique().to_pylist())
    except Exception:
        return set()


def paths_of(value: Any) -> list[str]:
    """The paths in one of verl's keys for data files, which holds one, several or null."""
    return [value] if isinstance(value, str) else list(value or [])


def _get(config: Any, dotted: str) -> Any:
    """config.a.b, or None where a part is missing."""
    for name in dotted.split("."):
        config = config.get(name) if config is not None else None
    return config
