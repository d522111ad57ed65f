"""Read the metrics of training runs from what verl's loggers write: `file`, `tensorboard` or `wandb` (offline).

A run that is missing, cut or unreadable is an error that names it: a comparison that leaves runs out is another comparison.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
        lines = (line for file in files for line in _file_lines(file))
        name, config, series = folder.name, hydra_config(folder), _collect(lines, path)
    elif kind == "tensorboard":
        name, config, series = path.name, hydra_config(path), _collect(_tensorboard_scalars(path), path)
    else:
        name, config, series = _read_wandb(path)
    match = _NAME.fullmatch(name)
    arm = match["arm"] if match else name
    seed = int(match["seed"]) if match else config.get("seed")
    mode = _dig(config, "actor_rollout_ref", "actor", "loss_agg_mode") or _mode_of(arm)
    return Run(name, path, arm, seed, mode, series)


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


def _collect(scalars: Iterable[tuple[int, str, Any]], path: Path) -> dict[str, dict[int, float]]:
    """Metric -> step -> value; of two values for one step the later counts, as after a resumption."""
    series: dict[str, dict[int, float]] = {}
    for step, name, value in _numbers(scalars):
        series.setdefault(name, {})[step] = value
    if not series:
        raise RunError(f"{path}: no metrics in it; the run ended before its first step")
    return {name: dict(sorted(values.items())) for name, values in series.items()}


def read_steps(folder: Path, running: bool = False) -> dict[int, dict[str, float]]:
    """Step -> the metrics that verl's file logger wrote for it, with all starts of the run merged; {} before the first.

    Args:
        running: the run may be writing now, so that a last line without its end is left out and not an error.

    Raises:
        RunError: a damaged line, or one that was cut.
    """
    steps: dict[int, dict[str, float]] = {}
    for file in start_files(folder):
        for step, name, value in _numbers(_file_lines(file, running)):
            steps.setdefault(step, {})[name] = value
    return dict(sorted(steps.items()))


def _numbers(scalars: Iterable[tuple[int, str, Any]]) -> Iterator[tuple[int, str, float]]:
    """Those that are numbers: verl's file logger writes nan as null."""
    for step, name, value in scalars:
        if isinstance(value, int | float) and math.isfinite(value):
            yield step, name, float(value)


def _file_lines(path: Path, running: bool = False) -> Iterator[tuple[int, str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if running and not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                step, data = record["step"], record["data"]
                yield from ((step, name, value) for name, value in data.items())
            except (ValueError, TypeError, KeyError, AttributeError):
                raise RunError(
                    f'{path}:{number}: expected a line {{"step": …, "data": {{…}}}} of verl\'s file logger; got '
                    f"{line[:60]!r}{'…' if len(line) > 60 else ''}. The run was cut there, or this is not its metrics file"
                ) from None


def _tensorboard_scalars(path: Path) -> Iterator[tuple[int, str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        yield from ((event.step, name, event.value) for event in events.Scalars(name))


# --------------------------------------------------------------------------------------------------------------------
# wandb: its package no longer has a reader in Python. A .wandb file is a header and LevelDB's log format: blocks of 32 KiB,
# in them pieces of records with checksum (4 bytes), length (2), and type (1: whole, first, middle or last).
# --------------------------------------------------------------------------------------------------------------------

_BLOCK, _HEADER, _PIECE = 32768, 7, struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _read_wandb(path: Path) -> tuple[str, dict, dict[str, dict[int, float]]]:
    """Name, configuration and metrics of an offline run."""
    files = [path] if path.is_file() else sorted(path.glob("*.wandb"))
    if len(files) > 1:
        raise RunError(f"{path}: {len(files)} .wandb files; expected one run to a folder. Name the file")
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise RunError(
            f"{path}: reading an offline wandb run needs the package wandb (pip install wandb): {error}"
        ) from None
    name, config, scalars = path.stem, {}, []
    for data in _wandb_records(files[0]):
        record: Any = getattr(wandb_internal_pb2, "Record").FromString(data)  # noqa: B009, the module is generated
        if record.HasField("run"):
            name = record.run.display_name or record.run.run_id
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update if item.key}
        elif record.HasField("history"):
            for item in record.history.item:
                key = item.key or ".".join(item.nested_key)
                scalars.append((record.history.step.num, key, json.loads(item.value_json)))
    return name, config, _collect((s for s in scalars if not s[1].startswith("_")), path)


def _wandb_records(path: Path) -> Iterator[bytes]:
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
        if start > len(data):
            raise RunError(
                f"{path}: cut in the middle of a record at byte {position}; the run was killed while writing"
            )
        _, length, kind = _PIECE.unpack_from(data, position)
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or start + length > len(data):
            raise RunError(
                f"{path}: cut or damaged at byte {position} of {len(data)}; the run was killed while writing"
            )
        parts = (b"" if kind in (_WHOLE, _FIRST) else parts) + data[start : start + length]
        position = start + length
        if kind in (_WHOLE, _LAST):
            yield parts
