"""python -m studies.miniature screen | confirm | quick"""

import typer

from studies.jobs import told_by_exit
from studies.miniature.runner import results_path, run_stage

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _run(stage: str) -> None:
    with told_by_exit(stage):
        rows = run_stage(stage)
    from studies.report import means_table

    cells, rules = (list(dict.fromkeys(row[key] for row in rows)) for key in ("cell", "rule"))
    for lr in sorted({row["lr"] for row in rows}):
        typer.echo(f"Learning rate {lr:g}\n\n{means_table(rows, cells, rules, lr, 'auc', '.3f')}")
    typer.echo(f"{len(rows)} rows in {results_path(stage)}; python -m studies.report writes the report")


@app.command()
def screen() -> None:
    """Every rule on every cell of screening.toml, and the learning rates of the main ones."""
    _run("screening")


@app.command()
def confirm() -> None:
    """The confirmation; refused unless its protocol is committed and unchanged."""
    _run("confirmation")


@app.command()
def quick() -> None:
    """A few short runs, to see that all works. They are in no report."""
    _run("quick")


if __name__ == "__main__":
    app()
