"""`verl-ba`: is it attached; what would it weigh; what did it change?"""

import importlib.metadata
import os
import platform
import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_ba import __version__, hooks
from verl_ba.analysis import commands

app = typer.Typer(help="Balanced Aggregation for verl.", no_args_is_help=True, add_completion=False)

app.command()(commands.analyze)
app.command()(commands.compare)

PACKAGES = ("verl", "torch", "vllm", "ray", "tensordict", "transformers", "TransferQueue", "flash-attn", "omegaconf")


@app.callback()
def main() -> None:
    """Balanced Aggregation for verl."""


@app.command()
def doctor(
    quiet: Annotated[bool, typer.Option(help="print only what is wrong")] = False,
) -> None:
    """Say what is installed, which seams attach in this verl, and why not. Exit status 1 if a mode would not work."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not quiet:
        table = Table(title=f"verl_ba {__version__}, Python {platform.python_version()}")
        table.add_column("package")
        table.add_column("version")
        for name in PACKAGES:
            table.add_row(name, package_version(name))
        console.print(table)

    try:
        hooks.check_verl_version()
    except hooks.UnsupportedVerlError as error:
        finish(console, [str(error)])

    faults = loading_faults()
    warnings.simplefilter("ignore")  # verl names every engine that is not installed
    import verl  # loads the plugins

    if not hooks.is_installed():
        faults.append("importing verl did not load verl_ba (see above); attached by hand for the rest of this report")
        hooks.install()
    errors = hooks.load_seam_modules()

    table = Table("seam", "attached", "why", title=f"verl {verl.__version__}: {os.path.dirname(verl.__file__)}")
    for seam in hooks.SEAMS:
        fault = errors.get(seam.module) or hooks.seam_fault(seam)
        table.add_row(seam.name.removeprefix("verl."), "no" if fault else "yes", seam.why)
        if fault:
            faults.append(f"{seam.name}: {fault}")
    faults += [f"{where}: still verl's own {name}" for where, name in hooks.stale_bindings()]
    if not quiet:
        console.print(table)
    finish(console, faults)


def finish(console: Console, faults: list[str]) -> None:
    """Print the verdict and leave with its exit status."""
    for fault in faults:
        console.print(f"✗ {fault}", style="red", highlight=False, markup=False)
    if not faults:
        console.print(f"✓ actor_rollout_ref.actor.loss_agg_mode may be {' or '.join(hooks.MODES)}", highlight=False)
    raise typer.Exit(1 if faults else 0)


def loading_faults() -> list[str]:
    """Why verl, on import, would not load this package."""
    faults = []
    policy, entries = hooks.plugin_policy(), importlib.metadata.entry_points(group="verl.plugins")
    if "verl_ba" not in {entry.name for entry in entries}:
        faults.append(
            "no entry point 'verl_ba' in the group verl.plugins: the package is on the path but not installed. "
            "Run: pip install verl-ba"
        )
    if policy != "auto" and "verl_ba" not in [name.strip() for name in policy.split(",")]:
        faults.append(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading verl_ba; unset it, or add verl_ba to the list"
        )
    return faults


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    app()
