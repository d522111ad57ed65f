"""`verl-ba`: is it attached; what is a loss divided by; what would it weigh; what did it change; data."""

import dataclasses
import importlib.metadata
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

if TYPE_CHECKING:
    from verl_ba.tools.audit import Report as AuditReport

app = typer.Typer(help="Balanced Aggregation for verl.", no_args_is_help=True, add_completion=False)

app.command()(commands.analyze)
app.command()(commands.compare)
app.command()(gradients)
app.command()(data)

PACKAGES = ("verl", "torch", "vllm", "ray", "tensordict", "transformers", "TransferQueue", "flash-attn", "omegaconf")


@app.callback()
def main() -> None:
    """Balanced Aggregation for verl."""


@app.command()
def doctor(
    quiet: Annotated[bool, typer.Option(help="print only what is wrong")] = False,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="examine every node of this Ray cluster ('auto', host:port)")
    ] = None,
) -> None:
    """Say what is installed, which seams attach in this verl, and why not. Exit status 1 if a mode would not work."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    if ray is not None:
        finish(console, cluster_faults(console, ray, quiet))
    if not quiet:
        table = Table(title=f"verl_ba {__version__}, Python {platform.python_version()}")
        table.add_column("package")
        table.add_column("version")
        for name in PACKAGES:
            table.add_row(name, package_version(name))
        console.print(table)
    report = examine()
    if not quiet and report.seams:
        notice = " (support is experimental)" if releases.BY_VERSION[report.verl].experimental else ""
        table = Table(Column("seam", overflow="fold"), "attached", "why", title=f"verl {report.verl}{notice}")
        for seam, attached, why in report.seams:
            table.add_row(seam.removeprefix("verl."), attached, why)
        console.print(table)
    finish(console, report.faults)


@app.command()
def audit(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[OVERRIDES]…", help="as a verl command has them", show_default=False)
    ] = None,
    config_path: Annotated[Path | None, typer.Option(help="folder of the configuration", metavar="DIR")] = None,
    config_name: Annotated[str | None, typer.Option(help="its name; verl's own ppo_trainer by default")] = None,
    config: Annotated[
        Path | None, typer.Option(help="a composed configuration instead, or a run's manifest.json", metavar="FILE")
    ] = None,
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
    if config is not None and (overrides or config_path or config_name):
        errors.print("✗ --config is complete: give no overrides, --config-path or --config-name with it", style="red")
        raise typer.Exit(2)
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


def cluster_faults(console: Console, address: str, quiet: bool) -> list[str]:
    """Examine the cluster's nodes and print a row for each; what is wrong, by node."""
    try:
        with console.status("asking every node (importing verl takes a while)"):
            reports = examine_cluster(address)
    except ConnectionError as error:
        return [f"--ray {address}: {error}. Give the address of a running cluster, as `ray status` shows it"]
    if not quiet:
        table = Table("node", "verl_ba", "verl", "python", "attached", title=f"Ray cluster {address}")
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
        console.print(f"✗ {fault}", style="red", highlight=False, markup=False)
    if not faults:
        console.print(f"✓ actor_rollout_ref.actor.loss_agg_mode may be {' or '.join(MODES)}", highlight=False)
    raise typer.Exit(1 if faults else 0)


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    app()
