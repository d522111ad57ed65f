"""python -m studies.gradient_quality gradients | trainings | long | table"""

from typing import Annotated

import typer

from studies.gradient_quality import plan
from studies.jobs import told_by_exit

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Seeds = Annotated[int | None, typer.Option(help="only the first so many seeds", min=1)]


def _run(stage: str, seeds: int | None = None) -> None:
    with told_by_exit(stage):
        rows = plan.run_stage(stage, seeds)
    typer.echo(f"{len(rows)} rows in {plan.results_path(stage)}")


@app.command()
def gradients() -> None:
    """The banks of the confirmation: every cell and checkpoint; refused unless the protocol is committed and unchanged."""
    _run(plan.BANKS)


@app.command()
def trainings(seeds: Seeds = None) -> None:
    """Short trainings, paired by seed."""
    _run(plan.TRAININGS, seeds)


@app.command()
def long(seeds: Seeds = None) -> None:
    """Trainings of 80 updates at three learning rates."""
    _run(plan.LONG, seeds)


@app.command()
def table() -> None:
    """The tables and the verdicts, from the rows that are there."""
    from studies.gradient_quality import verdicts

    typer.echo(verdicts.markdown())


if __name__ == "__main__":
    app()
