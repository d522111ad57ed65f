"""Read the metrics of training runs from what verl's loggers write: `file`, `tensorboard` or `wandb` (offline).

A run that is missing, cut or unreadable is an error that names it: a comparison that leaves runs out is another comparison.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_ba.tools.analysis.modes import MODES, in_full

_NAME = re.compile(r"(?P<arm>.+?)[-_]seed[-_=]?(?P<seed>\d+)")


class RunError(ValueError):
    """A run cannot be read or does not fit the others; the message names it."""


@dataclass(frozen=True)
class Run:
    """The metrics of one run: metric -> step -> value."""

    name: str
    path: Path
    arm: str
    seed: int | None
    mode: str | None
    series: dict[str, dict[int, float]] = field(repr=False)
    notes: tuple[str, ...] = ()  # what was cut or discarded

    @property
    def last_step(self) -> int:
        return max(max(values) for values in self.series.values())


def read_runs(paths: Sequence[Path], named: Sequence[tuple[str, Path]] = ()) -> list[Run]:
    """The runs at these paths; a folder that is no run itself stands for the runs directly in it.

    Args:
        paths: the arm and seed of each come from its name, '<arm>-seed<n>', and the mode from the run's configuration.
        named: (arm, path) for runs whose names do not say it.

    Raises:
        RunError: no run at a path, a damaged one, two of the same arm and seed, or an arm of two modes.
    """
    runs = [run for path in paths for run in _runs_at(path)]
    runs += [replace(run, arm=arm, mode=run.mode or _mode_of(arm)) for arm, path in named for run in _runs_at(path)]
    taken: dict[tuple[str, int | None], Run] = {}
    modes: dict[str, Run] = {}
    for run in runs:
        other = taken.setdefault((run.arm, run.seed), run)
        if other is not run:
            seed = "no seed in either name" if run.seed is None else f"the same seed, {run.seed}"
            raise RunError(
                f"{run.path} and {other.path} are both arm '{run.arm}' with {seed}. Name runs "
                "'<arm>-seed<n>', or leave one out"
            )
        first = modes.setdefault(run.arm, run)
        if first.mode != run.mode:
            raise RunError(
                f"arm '{run.arm}' has two modes: {first.path} ran {first.mode}, {run.path} ran {run.mode}. "
                "Give them different arms with --arm NAME=PATH"
            )
    return sorted(runs, key=lambda run: (_order(run), run.arm, run.seed or 0))


def _order(run: Run) -> int:
    return MODES.index(run.mode) if run.mode in MODES else len(MODES)


def _runs_at(path: Path) -> list[Run]:
    if not path.exists():
        raise RunError(
            f"{path}: no such run. Expected a metrics file (JSONL), a tensorboard folder or a wandb offline folder"
        )
    if (run := _read(path)) is not None:
        return [run]
    children = sorted(path.iterdir())
    runs = {
        child.stem if child.suffix == ".jsonl" else child.name: child for child in reversed(children) if _kind(child)
    }
    if not runs:
        found = ", ".join(child.name for child in children[:5]) or "nothing"
        raise RunError(
            f"{path}: no run in it. Expected a run's folder (metrics/1.jsonl), '<run>.jsonl' of verl's file logger, "
            f"'events.out.tfevents.*' of tensorboard, or 'run-*.wandb' of an offline wandb run; found {found}"
        )
    return [run for name in sorted(runs) if (run := _read(runs[name]))]


def _kind(path: Path) -> str | None:
    if path.is_file():
        return {".jsonl": "file", ".wandb": "wandb"}.get(path.suffix)
    if start_files(path):
        return "file"
    if any(path.glob("*.wandb")):
        return "wandb"
    return "tensorboard" if any(path.glob("events.out.tfevents.*")) else None


def start_files(folder: Path) -> list[Path]:
    """Metrics files of a run's folder as recipes/launch.sh makes it: one for each start, in order."""
    return sorted((folder / "metrics").glob("*.jsonl"), key=lambda path: (len(path.stem), path.stem))


def _read(path: Path) -> Run | None:
    kind = _kind(path)
    if kind is None and path.is_dir() and (path / ".hydra").is_dir():
        raise RunError(f"{path}: a run's folder without metrics/1.jsonl; the run has written no metrics")
    if kind is None:
        return None
    if kind == "file":
        folder, files = (path, start_files(path)) if path.is_dir() else (path.with_suffix(""), [path])
        name, config, notes = folder.name, hydra_config(folder), []
        starts = [list(_file_lines(file, notes)) for file in files]
        _refuse_overlapping_starts(folder, files, starts)
        steps = _merge(starts, notes)
    elif kind == "tensorboard":
        name, config, notes = path.name, hydra_config(path), []
        steps = _merge(map(_tensorboard_steps, sorted(path.glob("events.out.tfevents.*"))), notes)
    else:
        notes = []
        name, config, records = _read_wandb(path, notes)
        steps = _merge([records], notes)
    match = _NAME.fullmatch(name)
    arm = match["arm"] if match else name
    seed = int(match["seed"]) if match else config.get("seed")
    mode = _dig(config, "actor_rollout_ref", "actor", "loss_agg_mode") or _mode_of(arm)
    if not any(steps.values()):
        raise RunError(f"{path}: no metrics in it; the run ended before its first step")
    series: dict[str, dict[int, float]] = {}
    for step, metrics in steps.items():
        for metric, value in metrics.items():
            series.setdefault(metric, {})[step] = value
    return Run(name, path, arm, seed, mode, series, tuple(f"{path}: {note}" for note in notes))


def _mode_of(arm: str) -> str | None:
    return in_full(arm) if in_full(arm) in MODES else None


def _dig(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def hydra_config(folder: Path) -> dict:
    """What Hydra wrote into the run's folder; {} without one."""
    path = folder / ".hydra" / "config.yaml"
    if not path.exists():
        return {}
    import yaml

    return yaml.safe_load(path.read_text()) or {}


def _refuse_overlapping_starts(folder: Path, files: list[Path], starts: list[list[tuple[int, dict[str, Any]]]]) -> None:
    """Raise RunError if a start of the run was still training when the next one began: two wrote into one folder.

    The manifest says when each start began, and the steps that it logged say how long it trained at least.
    """
    began = _beginnings(folder)
    for (file, records), later in zip(zip(files, starts, strict=True), files[1:], strict=False):
        if file.stem not in began or later.stem not in began:
            continue
        took = sum(data.get("timing_s/step") or 0.0 for _, data in records)
        over = took - (began[later.stem] - began[file.stem]).total_seconds()
        if over > 1:  # the manifest has whole seconds
            raise RunError(
                f"{folder}: starts {file.stem} and {later.stem} overlap. {file.name} holds {took:.0f} s of steps, so start "
                f"{file.stem} was training until {over:.0f} s or more after start {later.stem} began "
                f"({began[later.stem]:%Y-%m-%d %H:%M:%S %Z}). Their steps, dumps and checkpoints are mixed: run this again"
            )


def _beginnings(folder: Path) -> dict[str, datetime]:
    """When each start of a run began, by the name of its metrics file; {} without a manifest that says so."""
    try:
        starts = json.loads((folder / "manifest.json").read_text())["starts"]
        return {str(number): datetime.fromisoformat(start["started"]) for number, start in enumerate(starts, start=1)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _merge(starts: Iterable[Iterable[tuple[int, dict[str, Any]]]], notes: list[str]) -> dict[int, dict[str, float]]:
    """Step -> metrics of a run, from the logs of its starts in order.

    A later start discards every step from its first one on: it went on from a checkpoint, and what came after that in an
    earlier start was abandoned. What a start logs first may be the validation of its checkpoint alone
    (`trainer.val_before_train`): then the training metrics of that step stay. A log that goes back holds several starts.
    """
    steps: dict[int, dict[str, float]] = {}
    for start in starts:
        last = None
        for step, data in start:
            if last is None or step < last:
                validation = all(name.startswith("val-") for name in data)
                discarded = [other for other in steps if other > step or (other == step and not validation)]
                if discarded:
                    notes.append(
                        f"a later start went on at step {step}; what earlier ones logged for steps {min(discarded)} to "
                        f"{max(discarded)} is left out"
                    )
                for other in discarded:
                    del steps[other]
            last = step
            # verl's file logger writes nan as null
            numbers = {k: float(v) for k, v in data.items() if isinstance(v, int | float) and math.isfinite(v)}
            steps.setdefault(step, {}).update(numbers)
    return dict(sorted(steps.items()))


def read_steps(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> the metrics that verl's file logger wrote for it, with all starts of the run merged; {} before the first.

    A last line that is cut is left out: the run was killed while it wrote, or is writing now.

    Raises:
        RunError: a damaged line.
    """
    notes: list[str] = []
    return _merge((_file_lines(file, notes) for file in start_files(folder)), notes)


_FIRST_LINE = b'{"step": '
"""How a file of verl's file logger begins; a file whose only line is cut is one only if it does."""


def _file_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and metrics of each line of verl's file logger. A last line that is cut is noted and left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                step, data = record["step"], record["data"]
                if type(step) is not int or not isinstance(data, dict):
                    raise TypeError
            except (ValueError, TypeError, KeyError) as error:
                begins = number > 1 or line.startswith(_FIRST_LINE) or _FIRST_LINE.startswith(line)
                if isinstance(error, ValueError) and begins and not line.endswith(b"\n"):
                    notes.append(f"{path.name}:{number} is cut, as by a run that was killed; read up to there")
                    return
                raise RunError(
                    f'{path}:{number}: expected a line {{"step": …, "data": {{…}}}} of verl\'s file logger; got '
                    f"{line[:60]!r}{'…' if len(line) > 60 else ''}. This line is damaged, or this is not its metrics file"
                ) from None
            yield step, data


def _tensorboard_steps(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Step and metrics of one file of events, in the order of steps: a start of the run writes one file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    steps: dict[int, dict[str, Any]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps.setdefault(event.step, {})[name] = event.value
    return sorted(steps.items())


# --------------------------------------------------------------------------------------------------------------------
# wandb: its package no longer has a reader in Python. A .wandb file is a header and LevelDB's log format: blocks of 32 KiB,
# in them pieces of records with checksum (4 bytes), length (2), and type (1: whole, first, middle or last).
# --------------------------------------------------------------------------------------------------------------------

_BLOCK, _HEADER, _PIECE = 32768, 7, struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _read_wandb(path: Path, notes: list[str]) -> tuple[str, dict, list[tuple[int, dict[str, Any]]]]:
    """Name, configuration, and step and metrics of each record of an offline run."""
    files = [path] if path.is_file() else sorted(path.glob("*.wandb"))
    if len(files) > 1:
        raise RunError(f"{path}: {len(files)} .wandb files; expected one run to a folder. Name the file")
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise RunError(
            f"{path}: reading an offline wandb run needs the package wandb (pip install wandb): {error}"
        ) from None
    name, config, steps = path.stem, {}, []
    for data in _wandb_records(files[0], notes):
        record: Any = getattr(wandb_internal_pb2, "Record").FromString(data)  # noqa: B009, the module is generated
        if record.HasField("run"):
            name = record.run.display_name or record.run.run_id
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update if item.key}
        elif record.HasField("history"):
            items = ((item.key or ".".join(item.nested_key), item.value_json) for item in record.history.item)
            metrics = {key: json.loads(value) for key, value in items if not key.startswith("_")}
            steps.append((record.history.step.num, metrics))
    return name, config, steps


def _wandb_records(path: Path, notes: list[str]) -> Iterator[bytes]:
    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise RunError(f"{path}: not a wandb file (it begins with {data[:4]!r}, expected b':W&B')")
    position, parts = _HEADER, b""
    while position < len(data):
        left = _BLOCK - position % _BLOCK
        if left < _PIECE.size:  # the end of a block is padded
            position += left
            continue
        start = position + _PIECE.size
        _, length, kind = _PIECE.unpack_from(data, position) if start <= len(data) else (0, 0, _WHOLE)
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            raise RunError(f"{path}: damaged at byte {position} of {len(data)}: expected the header of a record")
        if start + length > len(data):
            notes.append(f"{path.name} is cut at byte {position}, as by a run that was killed; read up to there")
            return
        parts = (b"" if kind in (_WHOLE, _FIRST) else parts) + data[start : start + length]
        position = start + length
        if kind in (_WHOLE, _LAST):
            yield parts
