"""Runs of a study: planned, run in processes or threads, and kept as rows of JSONL. Every study goes on where it stopped.

A row names its run and the digest of its setting; a run that failed is a row with `error`. Rows that are there are not run
again, failed ones are.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from studies.miniature.tasks import Cell
from studies.miniature.train import Settings, locked, setup_digest
from verl_ba.tools.analysis.modes import in_full

Row = dict[str, Any]
LOOP, VERL = "loop", "verl"


class StudyError(RuntimeError):
    """A study cannot be run as it is; the message says what to do."""


@contextmanager
def told_by_exit(stage: str) -> Iterator[None]:
    """Around a stage that a command runs: a StudyError, or an interruption, is one line and an exit status."""
    try:
        yield
    except StudyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"{stage}: stopped; the same command goes on where it was", err=True)
        raise typer.Exit(130) from None


@dataclass(frozen=True)
class Job:
    """One run. `where` it trains: LOOP, in this package's loop, or VERL, in verl's trainer."""

    study: str
    cell: Cell
    rule: str
    lr: float
    seed: int
    settings: Settings
    where: str = LOOP

    @property
    def key(self) -> tuple:
        return self.where, self.cell.name, self.rule, self.seed, self.lr, setup_digest(self.cell, self.settings)

    def row(self, **more: Any) -> Row:
        where, cell, rule, seed, lr, setup = self.key
        names = {
            "stage": self.study,
            "where": where,
            "cell": cell,
            "rule": rule,
            "lr": lr,
            "seed": seed,
            "setup": setup,
        }
        return names | more

    def __str__(self) -> str:
        return f"{self.where} {self.cell.name} {self.rule} lr {self.lr:g} seed {self.seed}"


def key_of(row: Row) -> tuple:
    """That of the row's job."""
    return row.get("where", LOOP), row["cell"], row["rule"], row["seed"], row["lr"], row["setup"]


def finished(rows: Iterable[Row], jobs: Iterable[Job] | None = None) -> dict[tuple, Row]:
    """The rows without an error, by key; of two the later counts. With `jobs`, those of these runs alone."""
    found = {key_of(row): row for row in rows if "error" not in row}
    return found if jobs is None else {job.key: found[job.key] for job in jobs if job.key in found}


def read_rows(path: Path) -> list[Row]:
    """Every row, failed ones included, with the rules by their modes; [] without a file.

    Raises StudyError at a damaged line.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            raise StudyError(
                f"{path}:{number}: not a row, {line[:60]!r}; remove the line, its run is done again"
            ) from None
        rows.append(row | {"rule": in_full(row["rule"])} if "rule" in row else row)
    return rows


def append_row(path: Path, row: Row, cache: Path) -> None:
    """One write of one line, alone among processes."""
    line = (json.dumps(row) + "\n").encode()
    with locked(cache / path.name), path.open("ab", buffering=0) as file:
        file.write(line)


def processes(workers: int) -> Executor:
    """A pool for runs in the loop."""
    return ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)


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


def _attempt(work: Callable[[Job, Path], Row], cache: Path, job: Job) -> Row:
    try:
        return work(job, cache)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"}


def run_jobs(
    jobs: Sequence[Job],
    work: Callable[[Job, Path], Row],
    path: Path,
    pools: Mapping[str, Callable[[], Executor]],
    cache: Path,
    console: Console | None = None,
    **more: Any,
) -> list[Row]:
    """Run the jobs that `path` has no row of; the rows of all.

    Args:
        work: the numbers of one run.
        pools: where -> the pool in which such runs go.
        more: what every row says besides, such as the commit.

    Raises:
        StudyError: after the last run, if any failed; it names each.
    """
    console = console or Console(stderr=True)
    done = finished(read_rows(path), jobs)
    todo = [job for job in jobs if job.key not in done]
    said = "".join(f", {name} {value}" for name, value in more.items() if value)
    console.print(f"{path.stem}: {len(jobs)} runs, {len(todo)} to do{said}", highlight=False)
    failed: list[str] = []
    started = time.monotonic()
    columns = TextColumn(path.stem), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        Progress(*columns, TextColumn("{task.description}"), console=console, refresh_per_second=1) as progress,
        ExitStack() as stack,
    ):
        bar = progress.add_task("", total=len(jobs), completed=len(jobs) - len(todo))
        opened = {where: stack.enter_context(pool()) for where, pool in pools.items()}
        try:
            futures = {opened[job.where].submit(partial(_attempt, work, cache), job): job for job in todo}
            for future in as_completed(futures):
                job = futures.pop(future)
                row = job.row(**more) | future.result()
                if "error" in row:
                    failed.append(f"{job}: {row['error']}")
                    row["error"] = row["error"][:600]
                    console.print(f"failed: {failed[-1]}", style="red", highlight=False, markup=False)
                append_row(path, row, cache)
                progress.update(bar, advance=1, description=str(job))
                if not console.is_terminal and not len(futures) % 20:
                    console.print(f"{len(futures)} left after {time.monotonic() - started:.0f} s", highlight=False)
        except BaseException:
            _end_children()
            for pool in opened.values():
                pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        raise StudyError(f"{len(failed)} of {len(jobs)} runs failed; run again to retry them:\n" + "\n".join(failed))
    return list(finished(read_rows(path), jobs).values())


def _end_children() -> None:
    """Processes of the pools, and trainers that threads wait for."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
