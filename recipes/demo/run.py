"""The demo: verl's real trainer on the CPU, the same recipe under several aggregations, compared in a table and a picture.

Each arm is one call of recipes/launch.sh; nothing here touches training.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recipes.cpu_site import prefork
from recipes.demo import summary
from recipes.demo.prepare import console, prepare
from verl_ba.tools.analysis.modes import ARM_MODES as ARMS

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ARMS = ("balanced", "token", "sequence")


class RunFailed(RuntimeError):
    """A training run ended without all of its steps."""


def train(
    config: str,
    arm: str,
    paths: dict[str, Path],
    results: Path,
    seed: int,
    steps: int | None,
    overrides: list[str],
    server: str,
) -> None:
    """Run one arm, showing its progress; its log, metrics and rollouts go below `results`."""
    log_file, folder = metrics_file(results, config, arm, seed), run_folder(results, config, arm, seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        "bash",
        str(ROOT / "recipes" / "launch.sh"),
        config,
        arm,
        f"seed={seed}",
        f"actor_rollout_ref.model.path={paths['model'].resolve()}",
        f"data.train_files={paths['train'].resolve()}",
        f"data.val_files={paths['validation'].resolve()}",
        f"reward.custom_reward_function.path={ROOT / 'recipes' / 'demo' / 'chain_sum.py'}",
        *([f"trainer.total_training_steps={steps}"] if steps else []),
        *overrides,
    ]
    environment = {**os.environ, "RESULTS_DIR": str(results.resolve()), "PYTHON": sys.executable}
    environment[prefork.VARIABLE] = server
    total = steps or config_steps(config)
    if not console.is_terminal:
        console.print(f"{arm:>10}: {total} steps, log in {folder / 'train.log'}", highlight=False)
    columns = (
        TextColumn(f"{arm:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, (folder / "train.log").open("wb") as log:
        bar = progress.add_task("starting Ray, FSDP and vLLM (a minute or two)", total=total)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                show(progress, bar, summary.read_steps(log_file))
                time.sleep(0.5)
        finally:
            if process.poll() is None:  # Ctrl-C: take Ray's processes down as well
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        done = summary.read_steps(log_file)
        show(progress, bar, done)
    if process.returncode != 0 or len(done) < total:
        tail = (folder / "train.log").read_text(errors="replace").splitlines()[-25:]
        console.print("\n".join(tail), markup=False, highlight=False)
        raise RunFailed(
            f"{arm}: {len(done)} of {total} steps, exit status {process.returncode}. Log: {folder / 'train.log'}. "
            f"Finished arms are kept: run again with RESUME=1"
        )


def show(progress: Progress, bar, steps: list[dict]) -> None:
    if steps:
        last = steps[-1]
        description = f"score {last['critic/score/mean']:.2f}, |pg_loss| {abs(last['actor/pg_loss']):.0e}"
        progress.update(bar, completed=len(steps), description=description)


def config_steps(config: str) -> int:
    """`trainer.total_training_steps` of a recipe's config."""
    import yaml

    return yaml.safe_load((ROOT / "recipes" / "config" / f"{config}.yaml").read_text())["trainer"][
        "total_training_steps"
    ]


def run_name(config: str) -> str:
    return config.replace("_", "-")


def metrics_file(results: Path, config: str, arm: str, seed: int) -> Path:
    """What verl's file logger writes in the run's first start; the demo has no other."""
    return run_folder(results, config, arm, seed) / "metrics" / "1.jsonl"


def run_folder(results: Path, config: str, arm: str, seed: int) -> Path:
    return results / run_name(config) / f"{arm}-seed{seed}"


def read_run(results: Path, config: str, arm: str, seed: int, model: Path) -> summary.Run:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = summary.read_lengths(
        run_folder(results, config, arm, seed) / "rollouts",
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)) + 1,  # the dump leaves the end token out
    )
    return summary.Run(arm, ARMS[arm], summary.read_steps(metrics_file(results, config, arm, seed)), lengths)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides for every arm")] = None,
    arms: Annotated[str, typer.Option(help=f"comma-separated, of {', '.join(ARMS)}; or 'all'")] = ",".join(
        DEFAULT_ARMS
    ),
    model: Annotated[Path | None, typer.Option(help="a local Hugging Face chat model instead of the tiny one")] = None,
    steps: Annotated[int | None, typer.Option(help="training steps an arm (default: the recipe's)")] = None,
    seed: Annotated[int, typer.Option()] = 1,
    results: Annotated[Path, typer.Option(help="where runs go")] = Path("results"),
    cache: Annotated[Path, typer.Option(help="where models and data are kept")] = Path(".cache"),
    resume: Annotated[bool, typer.Option(help="keep arms that have all their steps already")] = False,
) -> None:
    """Train the same recipe under several loss aggregations on the CPU, and compare."""
    chosen = list(ARMS) if arms == "all" else arms.split(",")
    if unknown := [arm for arm in chosen if arm not in ARMS]:
        raise typer.BadParameter(f"unknown arm {', '.join(unknown)}; expected some of {', '.join(ARMS)}, or 'all'")
    config = "demo_chat" if model else "demo"
    start = time.monotonic()
    try:
        paths = prepare(cache, model)
        with prefork.serve() as server:  # the arms' processes fork from one that has imported the libraries
            for arm in chosen:
                finished = len(summary.read_steps(metrics_file(results, config, arm, seed)))
                if resume and finished == (steps or config_steps(config)):
                    console.print(f"{arm:>10}: kept, {finished} steps")
                else:
                    train(config, arm, paths, results, seed, steps, overrides or [], server)
    except (FileNotFoundError, RunFailed) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    runs = [read_run(results, config, arm, seed, paths["model"]) for arm in chosen]
    folder = results / run_name(config)
    (folder / "summary.md").write_text(summary.markdown(runs))
    summary.draw(runs, folder / "curves.png")
    table = Table(*summary.HEADER, title="the same recipe under several aggregations", caption=summary.CAPTION)
    for run in runs:
        table.add_row(*summary.row(run))
    screen = Console(width=None if sys.stdout.isatty() else 110)
    screen.print(table)
    screen.print(
        "On policy with binary rewards the balanced and the sequence loss are 0 to float precision, whatever the split over "
        "ranks and micro-batches; token aggregation's is not.\n"
        f"{folder / 'curves.png'}, {folder / 'summary.md'}, metrics in {folder}/*/metrics; "
        f"{time.monotonic() - start:.0f} s",
        highlight=False,
    )
    if len(runs) > 1:
        folders = [run_folder(results, config, arm, seed) for arm in chosen]
        command = [sys.executable, "-m", "verl_ba", "compare", *folders, "--out", folder / "compare"]
        subprocess.run(command, check=True)
    screen.print(
        f"Which way each aggregation would tilt a run's responses: verl-ba analyze "
        f"{run_folder(results, config, chosen[0], seed) / 'rollouts'}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
