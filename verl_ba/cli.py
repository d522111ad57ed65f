"""`verl-ba`: is it attached; what would it weigh; what did it change; data."""

import importlib.metadata
import platform
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from verl_ba import __version__, hooks, releases
from verl_ba.analysis import commands
from verl_ba.data.command import data
from verl_ba.doctor import Report, examine, examine_cluster

app = typer.Typer(help="Balanced Aggregation for verl.", no_args_is_help=True, add_completion=False)

app.command()(commands.analyze)
app.command()(commands.compare)
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
        console.print(f"✓ actor_rollout_ref.actor.loss_agg_mode may be {' or '.join(hooks.MODES)}", highlight=False)
    raise typer.Exit(1 if faults else 0)


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    app()
