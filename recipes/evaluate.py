"""Evaluate a checkpoint on the six benchmarks through verl's own validation; called by evaluate.sh.

Responses and scores are verl's; this prepares the questions (how often each is asked), merges a sharded checkpoint, and
turns the dumped responses into a table with standard errors.
"""

import json
import math
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from recipes.plan import compose
from recipes.runs import Run, RunFailed, launch

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


class BadCheckpoint(ValueError):
    """Not a checkpoint that can be evaluated."""


class Incomplete(RuntimeError):
    """Responses are missing: the table would be about other questions than it says."""


@dataclass(frozen=True)
class Result:
    """One benchmark's result.

    `mean` is avg@k: the mean over questions of the mean score of k responses. `standard_error` is that of the mean over
    questions drawn from the same source; `sampling_error` is that of sampling again on the very same questions.
    """

    questions: int
    responses: int
    mean: float
    standard_error: float
    sampling_error: float
    best: float


def result(scores_QK: np.ndarray) -> Result:
    """Statistics of k scores for each of Q questions (Q ≥ 1, k ≥ 1); errors are nan where one value gives none."""
    questions, k = scores_QK.shape
    means_Q = scores_QK.mean(1)
    between = means_Q.std(ddof=1) / math.sqrt(questions) if questions > 1 else math.nan
    within = math.sqrt(scores_QK.var(1, ddof=1).sum() / k) / questions if k > 1 else math.nan
    return Result(questions, k, float(means_Q.mean()), float(between), within, float(scores_QK.max(1).mean()))


def read_scores(dump: Path, questions: dict[str, int], responses: dict[str, int]) -> dict[str, np.ndarray]:
    """Scores by benchmark [questions, responses] from verl's validation dump, whose `uid` is QUESTION_SESSION_ROW.

    Raises Incomplete where a benchmark lacks questions or responses.
    """
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with dump.open() as file:
        for line in file:
            row = json.loads(line)
            scores[row["benchmark"]][row["uid"].rsplit("_", 2)[0]].append(row["acc"])
    wrong = []
    for name, count in questions.items():
        asked = scores.get(name, {})
        short = sum(len(values) != responses[name] for values in asked.values())
        if len(asked) != count or short:
            wrong.append(
                f"{name}: {len(asked)} of {count} questions, {short} of them without {responses[name]} responses"
            )
    if wrong:
        raise Incomplete(f"{dump}: {'; '.join(wrong)}. A response that failed is in the run's log; evaluate again")
    return {name: np.array(list(scores[name].values()), dtype=float) for name in questions}


def ask(source: Path, out: Path, times: int) -> int:
    """Write a benchmark's questions with how often each is asked, verl's column `__rollout_n__`; their number."""
    import pyarrow
    import pyarrow.parquet

    if not source.is_file():
        raise FileNotFoundError(f"{source}: no such file. Make it: verl-ba data {source.stem}, or set DATA_DIR")
    table = pyarrow.parquet.read_table(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    column = pyarrow.array([times] * len(table), pyarrow.int64())
    pyarrow.parquet.write_table(table.append_column("__rollout_n__", column), out)
    return len(table)


def merged(checkpoint: Path) -> Path:
    """A folder with a Hugging Face model: the checkpoint itself, or its FSDP shards merged by verl (once)."""
    if (checkpoint / "config.json").is_file():
        return checkpoint
    shards = checkpoint / "actor"
    if not list(shards.glob("model_world_size_*_rank_0.pt")):
        raise BadCheckpoint(
            f"{checkpoint}: expected a run's checkpoints/global_step_N (with actor/model_world_size_*.pt) or a folder with "
            f"a Hugging Face model (config.json); "
            f"{'neither is there' if checkpoint.is_dir() else 'no such folder'}"
        )
    out = shards / "merged"
    if not out.exists():
        new = shards / "merged.new"
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        subprocess.run([*command, "--local_dir", shards, "--target_dir", new], check=True)
        new.rename(out)
    return out


def recipe_of(checkpoint: Path) -> tuple[str, list[str]]:
    """Recipe and overrides of the run that wrote this checkpoint, from its manifest."""
    run = Run(checkpoint.parent.parent)
    try:
        start = run.manifest["starts"][-1]
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{run.folder}/manifest.json: not there, so the recipe is not known. Name it: --recipe qwen3_1.7b_dapo17k"
        ) from None
    return start["recipe"], start["overrides"]


def evaluate(checkpoint: Path, recipe: str | None, overrides: list[str], out: Path | None) -> dict:
    """Ask, score and count; what evaluation.json holds."""
    checkpoint = checkpoint.resolve()
    before = ["arm=balanced"]  # has no part in generation; verl wants one
    if recipe is None:
        recipe, before = recipe_of(checkpoint)
    model = merged(checkpoint)
    out = (out or checkpoint.parent.parent / "evaluation" / checkpoint.name).resolve()
    added = ["+evaluation=table", f"actor_rollout_ref.model.path={model}", f"run_dir={out}", *overrides]
    config = compose(recipe, [*before, *added])
    responses = dict(config.evaluation.responses)
    questions = {
        Path(path).stem: ask(Path(config.data_dir) / Path(path).name, Path(path), responses[Path(path).stem])
        for path in config.data.val_files
    }
    arm = next(value for key, _, value in (o.partition("=") for o in before) if key == "arm")
    launch(recipe, arm, [*(o for o in before if not o.startswith("arm=")), *added])
    scores = read_scores(newest(out / "responses"), questions, responses)
    results = {name: result(values) for name, values in scores.items()}
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    return {
        "checkpoint": str(checkpoint),
        "recipe": recipe,
        "decoding": {key: sampling[key] for key in ("temperature", "top_p", "top_k")}
        | {"max_response_length": config.data.max_response_length, "seed": config.seed},
        "benchmarks": {name: asdict(value) for name, value in results.items()},
        "mean": float(np.mean([r.mean for r in results.values()])),
        "standard_error": math.sqrt(sum(r.standard_error**2 for r in results.values())) / len(results),
    }


def newest(folder: Path) -> Path:
    """The dump that was written last."""
    return max(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)


def show(report: dict) -> None:
    table = Table(
        "benchmark", "questions", "avg@k", "standard error", "sampling alone", "best@k", title=report["checkpoint"]
    )
    for name, r in report["benchmarks"].items():
        columns = f"{r['mean']:.4f} @{r['responses']}", f"{r['standard_error']:.4f}", f"{r['sampling_error']:.4f}"
        table.add_row(name, str(r["questions"]), *columns, f"{r['best']:.4f}")
    table.add_section()
    table.add_row("mean", "", f"{report['mean']:.4f}", f"{report['standard_error']:.4f}", "", "", style="bold")
    console.print(table)


def main(
    checkpoint: Path,
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides")] = None,
    recipe: Annotated[str | None, typer.Option(help="whose lengths and template, if no manifest says it")] = None,
    cluster: Annotated[str | None, typer.Option(help="a file of recipes/config/cluster")] = None,
    out: Annotated[
        Path | None, typer.Option(help="where results go (default: evaluation/ in the run's folder)")
    ] = None,
) -> None:
    """Evaluate a checkpoint on the six benchmarks; prints the table and writes evaluation.json."""
    try:
        if recipe and out is None:
            raise BadCheckpoint("--recipe needs --out DIR: a model that is not a run's has no folder for its results")
        report = evaluate(checkpoint, recipe, [*([f"cluster={cluster}"] if cluster else []), *(overrides or [])], out)
    except (BadCheckpoint, FileNotFoundError, Incomplete) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except RunFailed as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except subprocess.CalledProcessError as error:
        console.print(f"error: exit status {error.returncode} of {error.cmd[0]} (see above)", style="red", markup=False)
        raise typer.Exit(1) from None
    target = (out or checkpoint.parent.parent / "evaluation" / checkpoint.name) / "evaluation.json"
    target.write_text(json.dumps(report, indent=1))
    show(report)
    console.print(str(target))


if __name__ == "__main__":
    typer.run(main)
