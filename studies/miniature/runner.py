"""Which runs a stage has, and running them: two processes, one row of JSONL each, resumable.

A stage is data: `screening.toml` (screening and the quick check) and `protocol.toml` (the confirmation). A row names its
stage, cell, rule, learning rate and seed, the digest of its setting, the protocol's digest and the commit; a run that failed
is a row with `error`. Rows that are there are not run again, failed ones are.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from studies.miniature.tasks import Cell
from studies.miniature.train import Settings, locked, run, setup_digest
from studies.rules import RULES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results"
CACHE = ROOT / ".cache" / "miniature"
SCREENING, PROTOCOL = HERE / "screening.toml", HERE / "protocol.toml"
GUARDED = (PROTOCOL, PROTOCOL.with_suffix(".md"))
"""What the confirmation is held to: committed, and unchanged."""
CODE = ("studies/miniature", "studies/rules.py", "verl_ba")
"""What else must not differ from the commit that the confirmation's rows name."""
WORKERS = 2


class StudyError(RuntimeError):
    """A stage cannot be run as it is; the message says what to do."""


@dataclass(frozen=True)
class Job:
    stage: str
    cell: Cell
    rule: str
    lr: float
    seed: int
    settings: Settings

    @property
    def key(self) -> tuple:
        return self.cell.name, self.rule, self.lr, self.seed, setup_digest(self.cell, self.settings)

    def row(self, **more: Any) -> dict[str, Any]:
        cell, rule, lr, seed, setup = self.key
        return {"stage": self.stage, "cell": cell, "rule": rule, "lr": lr, "seed": seed, "setup": setup} | more


def read_toml(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return tomllib.load(file)


def cells(table: dict[str, dict]) -> dict[str, Cell]:
    """The [cells.<name>] tables of a file."""
    tuples = ("steps", "fillers")
    return {
        name: Cell(name=name, **{k: tuple(v) if k in tuples else v for k, v in fields.items()})
        for name, fields in table.items()
    }


def plan(stage: str) -> list[Job]:
    """All runs of 'screening', 'quick' or 'confirmation', in the order in which they are run: seed by seed, so that a stage
    that is stopped has all cells and rules at fewer seeds.

    In its table `rules` is a list or 'all'; `lr` is that of the main runs; `sweep` has more rates for a few rules, and seeds.
    """
    document = read_toml(PROTOCOL if stage == "confirmation" else SCREENING)
    table, known = document[stage], cells(document["cells"])
    rules = list(RULES) if table["rules"] == "all" else table["rules"]
    for kind, names, among in (("rule", rules, RULES), ("cell", table["cells"], known)):
        if unknown := sorted(set(names) - set(among)):
            raise StudyError(f"{stage}: no {kind} {', '.join(unknown)}; expected some of {', '.join(among)}")
    settings = replace(Settings(), **(document.get("settings", {}) | table.get("settings", {})))
    blocks = [(rules, table["lr"], table["seeds"])]
    if sweep := table.get("sweep"):
        blocks += [(sweep["rules"], lr, sweep["seeds"]) for lr in sweep["lr"]]
    return [
        Job(stage, known[cell], rule, lr, seed, settings)
        for names, lr, seeds in blocks
        for seed in seeds
        for cell in table["cells"]
        for rule in names
    ]


# --------------------------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------------------------


def results_path(stage: str) -> Path:
    return RESULTS / f"miniature-{stage}.jsonl"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every row, failed ones included; [] without a file. Raises StudyError at a damaged line."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise StudyError(
                f"{path}:{number}: not a row, {line[:60]!r}; remove the line, its run is done again"
            ) from None
    return rows


def key_of(row: dict[str, Any]) -> tuple:
    return row["cell"], row["rule"], row["lr"], row["seed"], row["setup"]


def finished(rows: Iterable[dict[str, Any]]) -> dict[tuple, dict[str, Any]]:
    """The rows without an error, by key; of two the later counts."""
    return {key_of(row): row for row in rows if "error" not in row}


def append_row(path: Path, row: dict[str, Any]) -> None:
    """One write of one line, alone among processes."""
    line = (json.dumps(row) + "\n").encode()
    with locked(CACHE / path.name), path.open("ab", buffering=0) as file:
        file.write(line)


# --------------------------------------------------------------------------------------------------------------------
# The protocol's guard
# --------------------------------------------------------------------------------------------------------------------


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise StudyError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit() -> str:
    """HEAD, with '+' where the code of the study differs from it."""
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "--", *CODE) else "")


def protocol_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in GUARDED)).hexdigest()[:16]


def guard(rows: Iterable[dict[str, Any]]) -> str:
    """The protocol's digest, if the confirmation may run.

    Raises StudyError if the protocol, or the code, is not committed as it is, or if rows of another protocol are there.
    """
    for path in GUARDED:
        if not path.exists():
            raise StudyError(f"{path}: the confirmation's protocol is missing")
        _git("ls-files", "--error-unmatch", "--", str(path))
    changed = _git("status", "--porcelain", "--", *CODE)
    if changed:
        raise StudyError(f"commit before the confirmation: it is held to a commit, and these differ from it\n{changed}")
    digest = protocol_digest()
    others = sorted({row["protocol"] for row in rows} - {digest})
    if others:
        raise StudyError(
            f"{results_path('confirmation')} has rows of another protocol, {', '.join(others)}; this one is {digest}. "
            "A protocol is fixed before its runs: restore it, or report the old rows and start another file"
        )
    return digest


# --------------------------------------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------------------------------------


def _start_worker() -> None:
    """One thread; end with the parent, however it ends."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(job: Job, cache: Path) -> dict[str, Any]:
    try:
        return run(job.cell, job.rule, job.lr, job.seed, job.settings, cache)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:600]}


def run_stage(stage: str, workers: int = WORKERS, console: Console | None = None) -> list[dict[str, Any]]:
    """Run what is missing of a stage; all its finished rows.

    Raises StudyError after the last run if any failed, naming each.
    """
    console = console or Console(stderr=True)
    path, jobs = results_path(stage), plan(stage)
    rows = read_rows(path)
    digest = guard(rows) if stage == "confirmation" else None
    done = finished(rows)
    todo = [job for job in jobs if job.key not in done]
    at = commit()
    console.print(f"{stage}: {len(jobs)} runs, {len(todo)} to do, commit {at}", highlight=False)
    failed: list[str] = []
    started = time.monotonic()
    columns = TextColumn(stage), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Progress(*columns, TextColumn("{task.description}"), console=console, refresh_per_second=1) as progress:
        bar = progress.add_task("", total=len(jobs), completed=len(jobs) - len(todo))
        with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker) as pool:
            try:
                futures = {pool.submit(_work, job, CACHE): job for job in todo}
                for future in as_completed(futures):
                    job = futures.pop(future)
                    row = job.row(protocol=digest, commit=at) | future.result()
                    append_row(path, row)
                    name = f"{job.cell.name} {job.rule} lr {job.lr:g} seed {job.seed}"
                    if "error" in row:
                        failed.append(f"{name}: {row['error']}")
                        console.print(f"failed: {failed[-1]}", style="red", highlight=False)
                    progress.update(bar, advance=1, description=name)
                    if not console.is_terminal and not len(futures) % 20:
                        console.print(f"{len(futures)} left after {time.monotonic() - started:.0f} s", highlight=False)
            except BaseException:
                for child in active_children():
                    child.kill()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    if failed:
        raise StudyError(f"{len(failed)} of {len(jobs)} runs failed; run again to retry them:\n" + "\n".join(failed))
    return [row for key, row in finished(read_rows(path)).items() if key in {job.key for job in jobs}]
