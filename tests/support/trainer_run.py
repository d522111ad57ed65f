"""Runs of verl's real trainer on the demo's model, and what trainer_probe.py wrote down in them."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support import reference

ROOT = Path(__file__).parents[2]
STEPS = 3


def command_and_environment(prepared, results, arm, overrides, variables) -> tuple[list[str], dict[str, str]]:
    command = [
        "bash",
        str(ROOT / "recipes" / "launch.sh"),
        "demo",
        arm,
        f"actor_rollout_ref.model.path={prepared['model'].resolve()}",
        f"data.train_files={prepared['train'].resolve()}",
        f"data.val_files={prepared['validation'].resolve()}",
        f"trainer.total_training_steps={STEPS}",
        *overrides,
    ]
    environment = {**os.environ, "RESULTS_DIR": str(results), "PYTHON": sys.executable}
    other_verl = [os.environ["PYTHONPATH"]] if os.environ.get("VERL_BA_TEST_RELEASE") else []  # dev/versions.py
    environment["PYTHONPATH"] = os.pathsep.join([*other_verl, str(ROOT)])
    environment.update(variables)
    return command, environment


def metrics_of(results, arm, start=1) -> list[dict]:
    """The metrics of each training step that this start of the run has logged."""
    log = results / "demo" / f"{arm}-seed1" / "metrics" / f"{start}.jsonl"
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()] if log.exists() else []
    return [step for step in steps if "actor/pg_loss" in step]


def launch(prepared, results, arm, *overrides, **variables) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run the demo's recipe for a few steps, with these environment variables; the process and each step's metrics."""
    command, environment = command_and_environment(prepared, results, arm, overrides, variables)
    result = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900
    )
    return result, metrics_of(results, arm)


def deviation_from_the_dump(results, arm, steps) -> float:
    """The largest difference between what `verl-ba analyze` says of the run's dump, step by step, and what was logged.

    Over every number that both have under the same definition: shares of responses and of gradient weight, lengths and
    gaps, tilts; under every mode.
    """
    run = results / "demo" / f"{arm}-seed1"
    command = [sys.executable, "-m", "verl_ba", "analyze", str(run / "rollouts"), "--out", str(run / "analysis")]
    subprocess.run([*command, "--resamples", "2"], cwd=ROOT, check=True, capture_output=True)
    analysed = json.loads((run / "analysis" / "analyze.json").read_text())["weighing"]["steps"]
    assert len(analysed) == len(steps)
    worst, shares = 0.0, 0
    for step in steps:
        for name, estimate in analysed[str(step["training/global_step"])].items():
            if name.endswith("/moved") or estimate["value"] is None:  # from another mode; not defined
                continue
            worst = max(worst, abs(step[f"balance/{name}"] - estimate["value"]) / max(1.0, abs(estimate["value"])))
            shares += "gradient_share" in name
    assert shares == 2 * 4 * len(steps)
    return worst


def check_parts_by_sign(steps) -> None:
    """The parts of the policy loss add up to verl's; whatever a line of the table names is logged."""
    for step in steps:
        parts = [step[f"balance/pg_loss/{sign}"] for sign in ("negative", "zero", "positive")]
        assert sum(parts) == pytest.approx(step["actor/pg_loss"], abs=1e-6)
        assert 0 < step["balance/length/positive"] != step["balance/length/negative"]
        assert not any(key.startswith("actor/balance/") or "balance/sum/" in key for key in step)


def pg_losses(result, steps) -> list[float]:
    assert result.returncode == 0, result.stdout[-4000:]
    assert len(steps) == STEPS
    assert all(math.isfinite(step["actor/grad_norm"]) and step["actor/grad_norm"] > 0 for step in steps)
    return [abs(step["actor/pg_loss"]) for step in steps]


# --------------------------------------------------------------------------------------------------------------------
# With the probe
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Update:
    """One update as the ranks saw it: the rows of all ranks, and the aggregations that followed."""

    mode: str
    uid: list[str] = field(default_factory=list)
    session: list[int] = field(default_factory=list)
    advantage: list[list[float]] = field(default_factory=list)
    mask: list[list[float]] = field(default_factory=list)
    column: list = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    losses: list[dict] = field(default_factory=list)

    @property
    def length(self) -> list[int]:
        return [int(sum(row)) for row in self.mask]

    def session_ids(self, uid: str) -> set[int]:
        return {self.session[i] for i in self.rows(uid)}

    def advantages(self, uid: str) -> set[float]:
        """The advantages of a group's tokens."""
        return {a for i in self.rows(uid) for a, valid in zip(self.advantage[i], self.mask[i], strict=True) if valid}

    def rows(self, uid: str) -> list[int]:
        return [i for i, other in enumerate(self.uid) if other == uid]

    @property
    def groups(self) -> list[str]:
        """The uids of the prompts; verl's padding rows share one that begins with 'pad'."""
        return [uid for uid in dict.fromkeys(self.uid) if not uid.startswith("pad")]


def probe_variables(folder) -> dict[str, str]:
    for name in ("probe", "weights"):
        (folder / name).mkdir(parents=True)
    return {
        "PYTHONPATH": str(ROOT),
        "VERL_USE_EXTERNAL_MODULES": "tests.support.trainer_probe",
        "PROBE_DIR": str(folder / "probe"),
        "WEIGHTS_DIR": str(folder / "weights"),
    }


def launch_with_probe(prepared, folder, arm, *overrides, results=None, **variables):
    """`launch`, and the updates that the workers saw."""
    variables = probe_variables(folder) | variables
    result, steps = launch(prepared, results or folder, arm, *overrides, **variables)
    return result, steps, read_probe(folder / "probe")


class Started:
    """A run in the background, to do harm to."""

    def __init__(self, process: subprocess.Popen, folder: Path, ray: str):
        self.process, self.folder, self.ray = process, folder, ray
        self.children: list[psutil.Process] = []

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for_update(self, number: int, ranks: int = 2) -> None:
        """Until every rank is in this update (the first is 1) since the start."""
        end = time.monotonic() + 600
        while True:
            seen = [path.read_text().count('"update"') for path in (self.folder / "probe").glob("*.jsonl")]
            if len(seen) == ranks and min(seen) >= number:
                break
            waiting = self.process.poll() is None and time.monotonic() < end
            assert waiting, f"updates seen by each rank: {seen}\n{self.output()[-4000:]}"
            time.sleep(0.02)
        # The processes that were asked for run below the tests' server: what is this run's is known by where it writes.
        self.children = [p for p in psutil.process_iter() if p.pid != self.process.pid and self._writes(p)]

    def named(self, title: str) -> psutil.Process:
        """The first of Ray's processes with this title."""
        return next(child for child in self.children if title in " ".join(_command_of(child)))

    def _writes(self, process: psutil.Process) -> bool:
        """Whether its output goes to this run's file or to the logs of its Ray."""
        for stream in (1, 2):
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if os.readlink(f"/proc/{process.pid}/fd/{stream}").startswith((self.ray, str(self.folder))):
                    return True
        return False


def _command_of(process: psutil.Process) -> list[str]:
    """Its command line; none if it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@contextlib.contextmanager
def start_with_probe(prepared, folder, results, arm, *overrides):
    """Start a run with a Ray of its own; whatever is left of it at the end is killed."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as ray:
        variables = probe_variables(folder) | {"RAY_TMPDIR": ray}
        command, environment = command_and_environment(prepared, results, arm, overrides, variables)
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        run = Started(process, folder, ray)
        try:
            yield run
        finally:
            for each in (process, *run.children):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


def read_probe(folder) -> list[Update]:
    updates: dict[int, Update] = {}
    for path in sorted(folder.glob("*.jsonl")):
        count = -1
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["event"] == "loss":
                updates[count].losses.append(record)
                continue
            count += 1
            update = updates.setdefault(count, Update(record["mode"]))
            for name in ("uid", "advantage", "mask", "column"):
                getattr(update, name).extend(record[name])
            update.session.extend(record["session"] or [])
            update.rank.extend([record["rank"]] * len(record["uid"]))
    return [updates[i] for i in sorted(updates)]


def check_updates(updates: list[Update], ranks: int = 2) -> None:
    """Every group is whole and in one update only, and each row's number is the literal reference's."""
    seen: Counter[str] = Counter()
    for update in updates:
        seen.update(update.groups)
        assert set(update.rank) == set(range(ranks))
        assert any(len({update.rank[i] for i in update.rows(uid)}) > 1 for uid in update.groups), "no group was split"
        weights = reference.token_weights(
            update.mode, update.advantage, update.mask, update.uid, update.session or None
        )
        for i, number in enumerate(update.column):
            for t, valid in enumerate(update.mask[i]):
                if valid:
                    by_sign = isinstance(number, list)
                    got = number[reference.sign_of(update.advantage[i][t]) + 1] if by_sign else number
                    assert 1 / got == pytest.approx(weights[i][t], rel=1e-12)
            if not any(update.mask[i]):
                assert number in (0, [0, 0, 0])
    assert set(seen.values()) == {1}, "a group came in two updates"


def logged_again(update: Update) -> float:
    """The policy loss of one update, from each row's summed token losses and the reference's mean lengths.

    The probe's second record knows rows by length and column only; each pair must be one of the update's.
    """
    known = Counter(zip(update.length, update.column, strict=True))
    total, rows = 0.0, Counter()
    sizes = defaultdict(int)
    for loss in update.losses:
        for row_loss, length, number in zip(loss["row_loss"], loss["length"], loss["column"], strict=True):
            rows[length, number] += 1
            if length:
                total += row_loss / number
        sizes[loss["num_responses"]] += len(loss["row_loss"])
    assert rows == known, "the loss weighed by other lengths than those that were computed"
    (mini_batch,) = sizes
    return total / mini_batch / (len(update.uid) / mini_batch)
