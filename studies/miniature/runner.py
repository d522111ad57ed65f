"""Which runs a stage of the miniature study has, and running them by `studies.jobs`.

A stage is data: `screening.toml` (screening and the quick check) and `protocol.toml` (the confirmation). Its rows also have
the protocol's digest and the commit.
"""

import hashlib
import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from studies.jobs import LOOP, Job, StudyError, processes, read_rows, run_jobs
from studies.miniature.tasks import Cell
from studies.miniature.train import Settings, run
from studies.rules import RULES
from verl_ba.tools.analysis.modes import in_full

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results"
CACHE = ROOT / ".cache" / "miniature"
SCREENING, PROTOCOL = HERE / "screening.toml", HERE / "protocol.toml"
GUARDED = (PROTOCOL, PROTOCOL.with_suffix(".md"))
"""What the confirmation is held to: committed, and unchanged."""
CODE = ("studies/miniature", "studies/rules.py", "studies/jobs.py", "verl_ba")
"""What else must not differ from the commit that the confirmation's rows name."""
WORKERS = 2


def read_toml(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return tomllib.load(file)


def cells(table: dict[str, dict]) -> dict[str, Cell]:
    """The [cells.<name>] tables of a file."""
    tuples = ("steps", "fillers")

    def cell(name: str, fields: dict[str, Any]) -> Cell:
        typed: dict[str, Any] = {k: tuple(v) if k in tuples else v for k, v in fields.items()}
        return Cell(name=name, **typed)

    return {name: cell(name, fields) for name, fields in table.items()}


def plan(stage: str) -> list[Job]:
    """All runs of 'screening', 'quick' or 'confirmation', in the order in which they are run: seed by seed, so that a stage
    that is stopped has all cells and rules at fewer seeds.

    In its table `rules` is a list or 'all'; `lr` is that of the main runs; `sweep` has more rates for a few rules, and seeds.
    """
    document = read_toml(PROTOCOL if stage == "confirmation" else SCREENING)
    table, known = document[stage], cells(document["cells"])
    rules = list(RULES) if table["rules"] == "all" else [in_full(rule) for rule in table["rules"]]
    for kind, names, among in (("rule", rules, RULES), ("cell", table["cells"], known)):
        if unknown := sorted(set(names) - set(among)):
            raise StudyError(f"{stage}: no {kind} {', '.join(unknown)}; expected some of {', '.join(among)}")
    settings = replace(Settings(), **(document.get("settings", {}) | table.get("settings", {})))
    blocks = [(rules, table["lr"], table["seeds"])]
    if sweep := table.get("sweep"):
        blocks += [([in_full(rule) for rule in sweep["rules"]], lr, sweep["seeds"]) for lr in sweep["lr"]]
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


# --------------------------------------------------------------------------------------------------------------------
# The protocol's guard
# --------------------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise StudyError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit(code: Sequence[str] = CODE) -> str:
    """HEAD, with '+' where the code of the study differs from it."""
    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", *code) else "")


def protocol_digest(guarded: Sequence[Path] = ()) -> str:
    """Of the files that fix a confirmation; without an argument, of this study's."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in guarded or GUARDED)).hexdigest()[:16]


def guard(
    rows: Iterable[dict[str, Any]],
    guarded: Sequence[Path] = (),
    code: Sequence[str] = (),
    results: Path = RESULTS / "miniature-confirmation.jsonl",
) -> str:
    """The protocol's digest, if the confirmation may run.

    Args:
        rows: of the file of results.
        guarded, code: the protocol's files, and the paths that must be as committed; this study's where none are given.

    Raises StudyError if the protocol, or the code, is not committed as it is, or if rows of another protocol are there.
    """
    guarded, code = guarded or GUARDED, code or CODE
    for path in guarded:
        if not path.exists():
            raise StudyError(f"{path}: the confirmation's protocol is missing")
        git("ls-files", "--error-unmatch", "--", str(path))
    changed = git("status", "--porcelain", "--", *code)
    if changed:
        raise StudyError(f"commit before the confirmation: it is held to a commit, and these differ from it\n{changed}")
    digest = protocol_digest(guarded)
    others = sorted({row["protocol"] for row in rows} - {digest})
    if others:
        raise StudyError(
            f"{results} has rows of another protocol, {', '.join(others)}; this one is {digest}. "
            "A protocol is fixed before its runs: restore it, or report the old rows and start another file"
        )
    return digest


# --------------------------------------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------------------------------------


def work(job: Job, cache: Path) -> dict[str, Any]:
    """The numbers of one run."""
    return run(job.cell, job.rule, job.lr, job.seed, job.settings, cache)


def run_stage(stage: str, workers: int = WORKERS, console: Console | None = None) -> list[dict[str, Any]]:
    """Run what is missing of a stage; all its finished rows.

    Raises StudyError if the confirmation is not to be run, and after the last run if any failed, naming each.
    """
    path = results_path(stage)
    digest = guard(read_rows(path)) if stage == "confirmation" else None
    pools = {LOOP: lambda: processes(workers)}
    return run_jobs(plan(stage), work, path, pools, CACHE, console, protocol=digest, commit=commit())
