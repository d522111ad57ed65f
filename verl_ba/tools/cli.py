"""`verl-ba`: is it attached; what is a loss divided by; what would it weigh; what did it change; data."""

import dataclasses
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from verl_ba import __version__, releases
from verl_ba.aggregation import MODES
from verl_ba.paper.data.command import data
from verl_ba.tools.analysis import commands
from verl_ba.tools.doctor import Report, examine, examine_cluster
from verl_ba.tools.gradients.command import gradients
from verl_ba.tools.installed import PACKAGES, package_version
from verl_ba.tools.preflight import Check, Needs

if TYPE_CHECKING:
    from verl_ba.tools.audit import Report as AuditReport
    from verl_ba.tools.check import Report as CheckReport

app = typer.Typer(help="Balanced Aggregation for verl.", no_args_is_help=True, add_completion=False)

app.command()(commands.analyze)
app.command()(commands.compare)
app.command()(gradients)
app.command()(data)


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[OVERRIDES]…", help="as a verl command has them", show_default=False)
]
ConfigPath = Annotated[Path | None, typer.Option(help="folder of the configuration", metavar="DIR")]
ConfigName = Annotated[str | None, typer.Option(help="its name; verl's own ppo_trainer by default")]
ConfigFile = Annotated[
    Path | None, typer.Option(help="a composed configuration instead, or a run's manifest.json", metavar="FILE")
]
"""The four ways in which `audit` and `check` are told a configuration."""


def refuse_two_configurations(errors: Console, config: Path | None, *others: object) -> None:
    """Leave with status 2 if a composed configuration was given together with what composes one."""
    if config is not None and any(others):
        errors.print("✗ --config is complete: give no overrides, --config-path or --config-name with it", style="red")
        raise typer.Exit(2)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"verl_ba {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="print it")] = False,
) -> None:
    """Balanced Aggregation for verl."""


@app.command()
def doctor(
    quiet: Annotated[bool, typer.Option(help="print only what is wrong")] = False,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="examine every node of this Ray cluster ('auto', host:port)")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="try what this run needs, too: a composed configuration or its manifest.json", metavar="FILE"
        ),
    ] = None,
    needs_json: Annotated[
        str | None, typer.Option("--needs", hidden=True, help="the same, as recipes/plan.py says it")
    ] = None,
) -> None:
    """Say what is installed, which seams attach in this verl, and why not. Exit status 1 if a mode would not work.

    With --config also: are answers and programs scored here, is flash-attn there if it is asked for, are data and model
    readable, is there room for a checkpoint. With --ray all of this on every node.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    needs = Needs(**json.loads(needs_json)) if needs_json else None if config is None else needs_of(config)
    if ray is not None:
        finish(console, cluster_faults(console, ray, quiet, needs))
    if not quiet:
        table = Table(title=f"verl_ba {__version__}, Python {platform.python_version()}")
        table.add_column("package")
        table.add_column("version")
        for name in PACKAGES:
            table.add_row(name, package_version(name))
        console.print(table)
    report = examine(needs)
    if not quiet and report.seams:
        notice = " (support is experimental)" if releases.current().experimental else ""
        table = Table(Column("seam", overflow="fold"), "attached", "why", title=f"verl {report.verl}{notice}")
        for seam, attached, why in report.seams:
            table.add_row(seam.removeprefix("verl."), attached, why)
        console.print(table)
    if not quiet:
        print_checks(console, report.checks)
        for warning in report.warnings:
            console.print(f"· {warning}", highlight=False, markup=False)
    finish(console, report.faults)


def needs_of(config: Path) -> Needs:
    """What the run of this configuration needs; leaves with status 2 if the file is not a configuration."""
    from omegaconf.errors import OmegaConfBaseException

    from verl_ba.tools.audit.config import AuditError, load

    try:
        return Needs.of(load(config))
    except (AuditError, KeyError, AttributeError, OmegaConfBaseException) as error:
        Console(stderr=True, soft_wrap=True).print(f"✗ --config {config}: {error}", style="red", markup=False)
        raise typer.Exit(2) from error


def print_checks(console: Console, checks: list[Check]) -> None:
    """What a run needs, as it was tried."""
    for tried in checks:
        sign, style = ("✗", "red") if tried.fault else ("✓", "")
        console.print(f"{sign} {tried.what}", style=style, highlight=False, markup=False)


@app.command()
def audit(
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    modules: Annotated[
        list[str] | None, typer.Option("--import", help="what registers a policy loss", metavar="MODULE|FILE.py")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Run the losses of a configuration on a synthetic batch: what is each divided by, does that depend on the split?

    Exit status 1 if something depends on the split over micro-batches or ranks, or is ignored; 2 if the input is wrong.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    refuse_two_configurations(errors, config, overrides, config_path, config_name)
    with errors.status("running the losses (importing verl takes a while)"):
        from verl_ba.tools import audit as auditor

        try:
            for module in modules or []:
                auditor.import_losses(module)
            composed = auditor.load(config) if config else auditor.compose(overrides or [], config_path, config_name)
            report = auditor.audit(composed)
        except auditor.AuditError as error:
            errors.print(f"✗ {error}", style="red", markup=False)
            raise typer.Exit(2) from error
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False))
    else:
        print_audit(console, report)
    raise typer.Exit(1 if report.faults else 0)


@app.command()
def check(
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(min=1, help="processes; on GPUs, one for each")] = 2,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    float32: Annotated[bool, typer.Option("--float32", help="compute in float32, for a sharper comparison")] = False,
    model: Annotated[
        Path | None, typer.Option(help="a small model to use as it is, instead of a random one", metavar="DIR")
    ] = None,
) -> None:
    """One real update of every mode, through verl's worker with your engine and sizes, against a float64 reference.

    Exit status 1 if a mode's loss, gradient or logged gradient norm is off; 2 if the input is wrong or a process failed.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    refuse_two_configurations(errors, config, overrides, config_path, config_name)
    with errors.status("running the updates (importing verl takes a while)"):
        from verl_ba.tools import check as checker
        from verl_ba.tools.audit.config import AuditError, compose, load

        try:
            checker.device_of_this_machine()  # before verl is imported
            composed = load(config) if config else compose(overrides or [], config_path, config_name)
            report = checker.check(composed, nproc, float32, model)
        except (AuditError, checker.CheckError) as error:
            errors.print(f"✗ {error}", style="red", markup=False)
            raise typer.Exit(2) from error
    print_check(console, report)
    raise typer.Exit(1 if report.faults else 0)


def print_check(console: Console, report: "CheckReport") -> None:
    """Relative errors by mode, and what a report to the project should hold."""
    caption = f"relative errors; allowed: {report.tolerance:g}; last column: the nearest other mode"
    table = Table("mode", "gradient", "loss", "logged norm", "", "another mode", title=report.title, caption=caption)
    for result in report.results:
        numbers = [f"{value:.1e}" for value in (result.gradient_error, result.loss_error, result.norm_error)]
        sign, style = ("✗", "red") if result in report.faults else ("✓", "")
        table.add_row(result.case.mode, *numbers, sign, f"{result.nearest:.1e}", style=style)
    console.print(table)
    for line in report.changed:
        console.print(f"· {line}", highlight=False, markup=False)
    versions = ", ".join(f"{name} {package_version(name)}" for name in PACKAGES)
    console.print(
        f"verl_ba {__version__}, Python {platform.python_version()}, {versions}", highlight=False, soft_wrap=True
    )
    if report.faults:
        modes = ", ".join(result.case.mode for result in report.faults)
        console.print(f"✗ wrong: {modes}. Please report this page with your overrides", style="red", highlight=False)
    else:
        console.print("✓ every mode trains what it says on these ranks", highlight=False)


def print_audit(console: Console, report: "AuditReport") -> None:
    """The terms as a table, the findings below it."""
    table = Table(
        "term",
        "divided by",
        Column("the term is", overflow="fold"),
        "micro-batch split",
        "rank split",
        title=f"verl {report.verl}, {report.trainer} trainer: loss_agg_mode={report.mode}, loss_mode={report.policy_loss}",
        caption="split: which of value and gradient change with it",
    )
    for row in report.terms:
        table.add_row(*dataclasses.astuple(row))
    console.print(table)
    for finding in report.findings:
        sign, style = ("✗", "red") if finding.level == "fault" else ("·", "")
        console.print(f"{sign} {finding.term}: {finding.message}", style=style, highlight=False, markup=False)
    if not report.faults:
        console.print("✓ nothing depends on the split, nothing is ignored", highlight=False)


def cluster_faults(console: Console, address: str, quiet: bool, needs: Needs | None) -> list[str]:
    """Examine the cluster's nodes and print a row for each; what is wrong, by node."""
    try:
        with console.status("asking every node (importing verl takes a while)"):
            reports = examine_cluster(address, needs)
    except ConnectionError as error:
        return [f"--ray {address}: {error}. Give the address of a running cluster, as `ray status` shows it"]
    if not quiet:
        table = Table(
            "node", "verl_ba", "verl", "python", "ready" if needs else "attached", title=f"Ray cluster {address}"
        )
        for node, report in reports.items():
            table.add_row(node, *report.versions, "no" if report.faults else "yes")
        console.print(table)
    faults = [f"{node}: {fault}" for node, report in reports.items() for fault in report.faults]
    return faults + version_differences(reports)


def version_differences(reports: dict[str, Report]) -> list[str]:
    """One line for each of verl_ba, verl and Python that is not the same on all nodes."""
    differences = []
    for name in ("verl_ba", "verl", "python"):
        nodes: dict[str, list[str]] = {}
        for node, report in reports.items():
            nodes.setdefault(getattr(report, name), []).append(node)
        if len(nodes) > 1:
            found = "; ".join(f"{version} on {', '.join(where)}" for version, where in nodes.items())
            differences.append(f"{name} differs: {found}. Install one version on every node")
    return differences


def finish(console: Console, faults: list[str]) -> None:
    """Print the verdict and leave with its exit status."""
    for fault in faults:
        console.print(f"✗ {fault}", style="red", highlight=False, markup=False, soft_wrap=True)
    if not faults:
        console.print(f"✓ actor_rollout_ref.actor.loss_agg_mode may be {' or '.join(MODES)}", highlight=False)
    raise typer.Exit(1 if faults else 0)


if __name__ == "__main__":
    app()
