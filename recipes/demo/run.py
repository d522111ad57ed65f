"""The demo: verl's real trainer on the CPU, the same recipe under several aggregations, compared in a table and a picture.

Each arm is one call of recipes/launch.sh; nothing here touches training.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recipes import runs, start
from recipes.cpu_site import prefork
from recipes.demo import summary
from recipes.demo.prepare import console, prepare
from verl_ba.tools.analysis.modes import ARM_MODES as ARMS

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ARMS = ("balanced", "token", "sequence")


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
    folder = run_folder(results, config, arm, seed)
    shutil.rmtree(folder, ignore_errors=True)
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
    chosen = [
        f"seed={seed}",
        f"actor_rollout_ref.model.path={start.quoted(str(paths['model'].resolve()))}",
        f"data.train_files={start.quoted(str(paths['train'].resolve()))}",
        f"data.val_files={start.quoted(str(paths['validation'].resolve()))}",
        f"reward.custom_reward_function.path={start.quoted(str(ROOT / 'recipes' / 'demo' / 'chain_sum.py'))}",
        *([f"trainer.total_training_steps={steps}"] if steps else []),
    ]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting Ray, FSDP and vLLM (a minute or two)", total=total)
        runs.launch(
            config,
            arm,
            [*chosen, *overrides],
            results=results,
            log=folder / "train.log",
            steps=total,
            environment={prefork.VARIABLE: server},
            watch=lambda run: show(progress, bar, run.steps()),
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


def run_folder(results: Path, config: str, arm: str, seed: int) -> Path:
    return results.resolve() / run_name(config) / f"{arm}-seed{seed}"


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
    begin = time.monotonic()
    try:
        # The arms' processes fork from one that imports the libraries while the model is prepared.
        with prefork.serve() as server:
            paths = prepare(cache, model)
            for arm in chosen:
                finished = len(runs.Run(run_folder(results, config, arm, seed)).steps())
                if resume and finished == (steps or config_steps(config)):
                    console.print(f"{arm:>10}: kept, {finished} steps")
                else:
                    train(config, arm, paths, results, seed, steps, overrides or [], server.listening())
    except (FileNotFoundError, runs.RunFailed) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        console.print("Finished arms are kept: run again with RESUME=1")
        raise typer.Exit(1) from None
    arms_steps = {arm: runs.Run(run_folder(results, config, arm, seed)).steps() for arm in chosen}
    folder = results / run_name(config)
    rows = summary.table(arms_steps)
    (folder / "summary.md").write_text(rows.markdown())
    summary.draw(arms_steps, folder / "curves.png")
    table = Table(*rows.header, title="the same recipe under several aggregations", caption=rows.caption)
    for row in rows.rows:
        table.add_row(*row)
    screen = Console(width=None if sys.stdout.isatty() else 110)
    screen.print(table)
    screen.print(
        "On policy with binary rewards the balanced and the sequence loss are 0 to float precision, whatever the split over "
        "ranks and micro-batches; token aggregation's is not.\n"
        f"{folder / 'curves.png'}, {folder / 'summary.md'}, metrics in {folder}/*/metrics; "
        f"{time.monotonic() - begin:.0f} s",
        highlight=False,
    )
    if len(chosen) > 1:
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
