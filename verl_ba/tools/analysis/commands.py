"""`verl-ba analyze` and `verl-ba compare`: arguments, progress, files; what they compute is in the other modules.

Light to import: numpy, matplotlib and the rest are loaded when a command runs.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

_Out = Annotated[Path | None, typer.Option(help="write the page, the figures and the numbers into this folder")]


def analyze(
    path: Annotated[Path, typer.Argument(help="verl's rollout or validation dump: a JSONL file, or a folder of them")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="folder of the run's tokenizer, to count tokens of the text")
    ] = None,
    max_response_length: Annotated[
        int | None, typer.Option(help="the run's data.max_response_length: responses as long were cut [tokens]", min=1)
    ] = None,
    length_field: Annotated[
        str | None, typer.Option(help="field with the length [tokens], instead of a tokenizer")
    ] = None,
    advantage: Annotated[str, typer.Option(help="grpo, grpo-no-std or rloo")] = "grpo",
    resamples: Annotated[int, typer.Option(help="bootstrap resamples of each interval", min=1)] = 1000,
    out: _Out = None,
) -> None:
    """How would each aggregation weigh these responses? Reads verl's dumps, or JSONL of prompt, response and score."""
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = _console()
    _need_extra()
    from verl_ba.tools.analysis import reports, rollouts, tokens, weighing

    try:
        if advantage not in weighing.ADVANTAGES:
            raise ValueError(f"--advantage {advantage}: expected one of {', '.join(weighing.ADVANTAGES)}")
        if tokenizer and length_field:
            raise ValueError("--tokenizer and --length-field: lengths come from one of them; give one")
        counter = tokens.token_counter(tokenizer, max_response_length) if tokenizer else None
        files = rollouts.find_files(path)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=_console(stderr=True), transient=True) as progress:
            bar = progress.add_task(f"reading {path}", total=sum(file.stat().st_size for file in files))
            read = rollouts.read_rollouts(files, counter, length_field, lambda n: progress.advance(bar, n))
    except ValueError as error:
        message = str(error)
        if not tokenizer and not length_field and "no length" in message:
            message += ". Give the run's tokenizer with --tokenizer, or the field with --length-field"
        _fail(message)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as progress:
        bar = progress.add_task("weighing steps", total=None)
        result = weighing.weigh(
            read, advantage, resamples, on_step=lambda done, total: progress.update(bar, completed=done, total=total)
        )
    title = f"How each aggregation weighs {path}"
    _print_tables(console, title, reports.modes_table(result), reports.lengths_table(result, read))
    for sentence in result.advice:
        console.print(f"• {sentence}", highlight=False, markup=False)
    if read.problems.counts:
        _print_tables(console, "", reports.problems_table(read.problems))
    if out:
        sections = reports.weighing_sections(result, read)
        subtitle = f"{read.lines:,} lines; advantages: {advantage}; written by verl-ba analyze"
        _write(console, out, "analyze", title, subtitle, sections, reports.weighing_json(result, read))


def compare(
    runs: Annotated[list[Path] | None, typer.Argument(help="runs, or folders of runs, named <arm>-seed<n>")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="NAME=PATH: a run whose name does not say its arm")] = None,
    until: Annotated[int | None, typer.Option(help="compare up to this step")] = None,
    resamples: Annotated[int, typer.Option(help="bootstrap resamples of each interval", min=1)] = 2000,
    out: _Out = None,
) -> None:
    """Compare training runs: verl's file logger (JSONL), tensorboard folders, offline wandb folders."""
    console = _console()
    _need_extra()
    from verl_ba.tools.analysis import comparison, reports
    from verl_ba.tools.analysis.runs import RunError, read_runs

    named = [text.partition("=") for text in arm or []]
    if wrong := [text for text, (name, _, path) in zip(arm or [], named, strict=True) if not name or not path]:
        _fail(f"--arm {wrong[0]}: expected NAME=PATH")
    if not runs and not named:
        _fail("no run given. Example: verl-ba compare results/demo")
    try:
        with console.status("reading runs"):
            found = read_runs(runs or [], [(name, Path(path)) for name, _, path in named])
        with console.status("resampling seeds"):
            result = comparison.compare(found, until, resamples)
    except RunError as error:
        _fail(str(error))
    title = f"{', '.join(a.name for a in result.arms)}: {len(found)} runs, {result.last_step} steps"
    tables = [
        reports.scores_table(result),
        *([reports.pairs_table(result)] if result.pairs else []),
        reports.paper_table(),
    ]
    _print_tables(console, title, *tables)
    for note in result.notes:
        console.print(f"• {note}", highlight=False, markup=False)
    if out:
        subtitle = "Written by verl-ba compare from " + ", ".join(str(run.path) for run in found)
        _write(console, out, "compare", title, subtitle, reports.comparison_sections(result), reports.to_json(result))


def _console(stderr: bool = False) -> Any:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(width=None if stream.isatty() else 120, stderr=stderr)


def _fail(message: str) -> NoReturn:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"✗ {message}", style="red", highlight=False, markup=False)
    raise typer.Exit(1)


def _need_extra() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import msgspec  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        _fail(f"{error.name} is not installed. In a checkout of verl_ba, run: pip install '.[tools]'")


def _print_tables(console: Any, title: str, *tables: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    for i, table in enumerate(tables):
        printed = Table(
            *table.header, title=Text(title) if i == 0 else None, caption=table.caption, caption_justify="left"
        )
        for row in table.rows:
            printed.add_row(*map(Text, row))  # a prompt or a path may hold what looks like rich's markup
        console.print(printed)


def _write(console: Any, out: Path, name: str, title: str, subtitle: str, sections: list, numbers: str) -> None:
    """The page, Markdown, the numbers, and each figure as PNG."""
    from verl_ba.tools.analysis import page, reports

    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.html").write_text(page.html(title, subtitle, sections))
    (out / f"{name}.md").write_text(reports.markdown(title, sections))
    (out / f"{name}.json").write_text(numbers)
    figures = [figure for section in sections for figure in section.figures]
    for figure in figures:
        figure.png(out / f"{figure.name}.png")
    names = ", ".join((f"{name}.html", f"{name}.md", f"{name}.json", *(f"{figure.name}.png" for figure in figures)))
    console.print(f"{out}: {names}", highlight=False, markup=False)
