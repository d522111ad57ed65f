"""Which banks and trainings the gradient study has, as `protocol.toml` says, and running them by `studies.jobs`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from studies.gradient_quality.bank import Shape, Sizes
from studies.gradient_quality.measure import MAIN, measure
from studies.gradient_quality.rules import ALL, REFERENCE
from studies.gradient_quality.trainings import Short, short_run
from studies.jobs import LOOP, Job, Row, StudyError, finished, processes, read_rows, run_jobs
from studies.miniature import runner

HERE = Path(__file__).resolve().parent
PROTOCOL = HERE / "protocol.toml"
GUARDED = (PROTOCOL, HERE / "PROTOCOL.md")
CODE = ("studies/gradient_quality", "studies/miniature", "studies/rules.py", "studies/jobs.py", "verl_ba/loss_agg.py")
"""What must not differ from the commit that the rows name."""
BANKS, TRAININGS, LONG = "gradients", "gradient-trainings", "gradient-trainings-long"
STAGES = (BANKS, TRAININGS, LONG)


def document() -> dict[str, Any]:
    return runner.read_toml(PROTOCOL)


def banks(table: dict[str, Any]) -> list[Job]:
    """One for each cell and checkpoint, the warm starts first: a study that is stopped has every cell once."""
    known = runner.cells(table["cells"])
    chosen = table["gradients"]
    jobs = []
    for steps in chosen["checkpoints"]:
        for name in chosen["cells"]:
            if steps in chosen.get("only", {}).get(name, chosen["checkpoints"]):
                more = chosen.get("more", {}).get(name, {}) if steps == 0 else {}
                shapes = tuple(Shape(*shape) for shape in chosen["shapes"] + more.get("shapes", []))
                sizes = replace(
                    Sizes(), **chosen["settings"], steps=steps, shapes=shapes, clipped=more.get("clipped", 0)
                )
                jobs.append(Job(BANKS, known[name], REFERENCE, chosen["lr"], chosen["seed"], sizes))
    return jobs


def trainings(table: dict[str, Any], stage: str = TRAININGS) -> list[Job]:
    """Seed by seed, so that a stage that is stopped has every cell and rule at fewer seeds."""
    known, chosen = runner.cells(table["cells"]), table["trainings" if stage == TRAININGS else "long"]
    settings = replace(Short(), **{k: tuple(v) if isinstance(v, list) else v for k, v in chosen["settings"].items()})
    rules = MAIN if chosen["rules"] == "main" else chosen["rules"]
    if unknown := sorted(set(rules) - set(ALL)):
        raise StudyError(f"{stage}: no rule {', '.join(unknown)}; expected some of {', '.join(ALL)}")
    return [
        Job(stage, known[cell], rule, lr, seed, settings)
        for lr in chosen["lr"]
        for seed in range(chosen["seeds"][0], chosen["seeds"][1] + 1)
        for cell in chosen["cells"]
        for rule in rules
    ]


def jobs_of(stage: str) -> list[Job]:
    return banks(document()) if stage == BANKS else trainings(document(), stage)


def results_path(stage: str) -> Path:
    return runner.RESULTS / f"{stage}.jsonl"


def rows_of(stage: str) -> list[Row]:
    """The finished rows of the plan as it stands."""
    return list(finished(read_rows(results_path(stage)), jobs_of(stage)).values())


def work(job: Job, cache: Path) -> Row:
    return measure(job, cache) if isinstance(job.settings, Sizes) else short_run(job, cache)


def run_stage(stage: str, seeds: int | None = None, console: Console | None = None) -> list[Row]:
    """Run what is missing of a stage, of its first `seeds` seeds; the rows of these runs.

    Raises StudyError if the protocol or the code is not as committed, and after the last run if any failed.
    """
    path, jobs = results_path(stage), jobs_of(stage)
    if seeds is not None:
        first = sorted({job.seed for job in jobs})[:seeds]
        jobs = [job for job in jobs if job.seed in first]
    digest = runner.guard(read_rows(path), GUARDED, CODE, path)
    pools = {LOOP: lambda: processes(1)}
    return run_jobs(jobs, work, path, pools, runner.CACHE, console, protocol=digest, commit=runner.commit(CODE))
