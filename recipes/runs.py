"""A training run: start one through launch.sh, and read what it left in its folder.

The metrics are read by `verl_ba.tools.analysis.runs`, the reader of `verl-ba compare`, so both see the same steps.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_ba.tools.analysis import runs
from verl_ba.tools.analysis.modes import short

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
END_OF_LOG = 25
"""Lines of the log that the message about a failed run repeats."""


class RunFailed(RuntimeError):
    """A run ended with an error or without all of its steps; the message has the end of its log."""


@dataclass(frozen=True)
class Run:
    """One run's folder, RESULTS_DIR/<run name>/<arm>-seed<n>, and the file that its output went to, if there is one."""

    folder: Path
    log: Path | None = None

    def steps(self) -> list[dict[str, float]]:
        """The metrics of each training step, in order, with all starts merged; [] before the first.

        A last line that is cut is left out: the run may be writing now.

        Raises `verl_ba.tools.analysis.runs.RunError` at a damaged line.
        """
        return [step for step in self.logged().values() if any(name.startswith("actor/") for name in step)]

    def logged(self) -> dict[int, dict[str, float]]:
        """Step -> everything that was logged for it, validation before the first training step (step 0) included."""
        return runs.read_steps(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration that Hydra composed for the last start; {} before the run has begun."""
        return runs.hydra_config(self.folder)

    @property
    def manifest(self) -> dict[str, Any]:
        """What launch.sh wrote down before each start (recipes/manifest.py)."""
        return json.loads((self.folder / "manifest.json").read_text())

    @property
    def output(self) -> str:
        """What the run printed; '' where it went to the terminal."""
        return self.log.read_text(errors="replace") if self.log and self.log.exists() else ""


def run_folder(recipe: str, arm: str, overrides: Sequence[str], results: Path) -> Path:
    """Where the run's folder will be: what the recipe's config says, in `results`."""
    given = [value for key, _, value in (override.partition("=") for override in overrides) if key == "run_dir"]
    if given:
        return Path(given[-1])
    from recipes.plan import compose

    config = compose(recipe, [f"arm={short(arm)}", *overrides])
    return results / config.run_name / f"{config.trainer.experiment_name}"


def launch(
    recipe: str,
    arm: str,
    overrides: Sequence[str] = (),
    *,
    results: Path | None = None,
    log: Path | None = None,
    steps: int | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    watch: Callable[[Run], object] | None = None,
) -> Run:
    """Train to the end, through the recipe's own script if it has one, else through launch.sh.

    Args:
        arm: a mode, or one of its short names.
        overrides: Hydra overrides.
        results: the folder of all runs, RESULTS_DIR (default: that of the environment, else 'results').
        log: where the run's output goes; without it, to the terminal.
        steps: how many training steps the run must have at its end.
        environment: variables besides those of this process.
        timeout: seconds after which the run is stopped, and has failed.
        watch: called twice a second while the run goes on, and once at its end.

    Raises:
        RunFailed: the exit status is not 0, a step is missing or too much, or the time is over.
    """
    results = (results or Path(os.environ.get("RESULTS_DIR", "results"))).resolve()
    run = Run(run_folder(recipe, arm, overrides, results), log)
    own = HERE / f"{recipe}.sh"
    script = [str(own)] if own.exists() else [str(HERE / "launch.sh"), recipe]
    variables = {"RESULTS_DIR": str(results)} | dict(environment or {})
    status = call([*script, arm, *overrides], log, variables, timeout, lambda: watch and watch(run))
    if watch:
        watch(run)
    wrong = [] if status == 0 else ["stopped after its time" if status is None else f"exit status {status}"]
    done = len(run.steps()) if steps is not None else None
    if done != steps:
        wrong.insert(0, f"{done} of {steps} steps")
    if wrong:
        raise RunFailed(f"{run.folder}: {', '.join(wrong)}. {end_of(log)}")
    return run


def call(
    script: Sequence[str],
    log: Path | None,
    environment: Mapping[str, str],
    timeout: float | None = None,
    watch: Callable[[], object] = lambda: None,
) -> int | None:
    """Run a shell script of the recipes with this Python; its exit status, or None if its time was over.

    However this ends, nothing of the script is left: Ray's processes are in its process group.
    """
    added = {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    output = None
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    try:
        process = subprocess.Popen(
            ["bash", *script],
            cwd=ROOT,
            env={**os.environ, **added, **environment},
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )
        end = time.monotonic() + timeout if timeout else None
        try:
            while process.poll() is None:
                if end and time.monotonic() > end:
                    return None
                watch()
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        return process.returncode
    finally:
        if output:
            output.close()


def end_of(log: Path | None) -> str:
    if log is None:
        return "The error is above"
    lines = log.read_text(errors="replace").splitlines()[-END_OF_LOG:]
    return f"The end of the log, {log}:\n" + "\n".join(lines)
