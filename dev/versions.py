"""`make test-versions`: the contract tests against every supported release of verl, as one table.

Each release's wheel is downloaded once (its checksum is in verl_ba/releases.py), unpacked into .cache, and put first on
PYTHONPATH of its own pytest process. `python -m dev.versions FOLDER` does the same with a checkout of verl, such as its
main branch, and `--trainer` adds a run of the real trainer. The environment is otherwise this one: where it breaks a
release's own pins, the report says so. Exit status 1 if any cell fails or is missing.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from verl_ba import releases
from verl_ba.releases import RELEASES, Release

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
TESTS = (
    "tests/hooks/test_versions.py",
    "tests/hooks/test_ranks.py::test_gradients_equal_the_reference_under_every_split[2]",
    "tests/hooks/test_loading.py",
)
TRAINER_OPTION, TRAINER = "--trainer", "tests/trainer/test_trainer.py::test_v1_trainer_balanced_is_zero_on_policy"
console = Console(width=None if sys.stdout.isatty() else 160)


def unpacked(release: Release) -> Path:
    """The folder with this release's `verl`, downloaded and checked if it is not there yet."""
    folder = CACHE / f"verl-{release.version}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        pins = Path(temporary, "pin.txt")
        pins.write_text(f"verl=={release.version} --hash=sha256:{release.wheel}\n")
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "-q", "-r", str(pins), "-d", temporary]
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options], check=True)
        (wheel,) = Path(temporary).glob("verl-*.whl")
        half = folder.with_suffix(".part")
        shutil.rmtree(half, ignore_errors=True)
        zipfile.ZipFile(wheel).extractall(half)
        half.rename(folder)
    return folder


def broken_pins(folder: Path) -> list[str]:
    """Which of the release's own requirements this environment does not meet."""
    metadata, broken = next(folder.glob("verl-*.dist-info"), None), []
    if metadata is None:  # a checkout
        return []
    for line in importlib.metadata.PathDistribution(metadata).requires or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            broken.append(f"{requirement} (not installed)")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            broken.append(f"{requirement} (here {version})")
    return broken


def run(release: Release, folder: Path, tests: Sequence[str] = TESTS) -> tuple[dict[str, list[str]], int]:
    """Run the contract; each test function's outcomes ('' passed, '-…' skipped, else the failure), and pytest's status."""
    results = CACHE / f"verl-{release.version}.xml"
    results.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    environment["VERL_BA_TEST_RELEASE"] = release.version
    if not release.entry_points:
        environment["VERL_USE_EXTERNAL_MODULES"] = "verl_ba.plugin"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *tests]
    process = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    (CACHE / f"verl-{release.version}.log").write_text(process.stdout + process.stderr)
    outcomes: dict[str, list[str]] = {}
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        outcome = ""
        for problem in case:
            message = (problem.get("message") or problem.tag).splitlines()[0]
            if problem.tag in ("failure", "error"):
                outcome = message
            elif problem.tag == "skipped":
                outcome = f"-{message}"
        outcomes.setdefault(case.get("name", "").partition("[")[0], []).append(outcome)
    return outcomes, process.returncode


def cell(outcomes: list[str] | None) -> tuple[str, bool]:
    """What the table says of one check in one release, and whether it is a failure."""
    if not outcomes:
        return "[red]✗ did not run[/red]", True
    failed = [outcome for outcome in outcomes if outcome and not outcome.startswith("-")]
    skipped = [outcome[1:] for outcome in outcomes if outcome.startswith("-")]
    if failed:
        return f"[red]✗ {len(failed)} of {len(outcomes)}[/red]", True
    if skipped:
        return f"– {skipped[0]}", False
    return f"[green]✓ {len(outcomes)}[/green]", False


def checkout(folder: Path) -> tuple[Release, Path]:
    """A checkout of verl, and what its version is taken for. Prints the commit, if it has one."""
    version = folder / "verl" / "version" / "version"
    if not version.exists():
        raise SystemExit(f"{folder}: expected the root of a checkout of verl, found no verl/version/version")
    said = subprocess.run(
        ["git", "-C", str(folder), "log", "-1", "--format=commit %h of %cs"], text=True, capture_output=True
    )
    console.print(
        f"{folder}: verl {version.read_text().strip()}, {said.stdout.strip() or 'no commit'}", highlight=False
    )
    return releases.of(version.read_text().strip()), folder.resolve()


def main() -> int:
    started = time.monotonic()
    found: dict[str, dict[str, list[str]]] = {}
    failures = []
    tests = (*TESTS, TRAINER) if TRAINER_OPTION in sys.argv else TESTS
    trees: list[tuple[Release, Path | None]] = [checkout(Path(path)) for path in sys.argv[1:] if path != TRAINER_OPTION]
    for release, tree in trees or [(release, None) for release in RELEASES]:
        begin = time.monotonic()
        with console.status(f"verl {release.version}"):
            folder = tree or unpacked(release)
            found[release.version], status = run(release, folder, tests)
        if status != 0:
            failures.append(
                f"verl {release.version}: pytest's exit status {status}; see .cache/verl-{release.version}.log"
            )
        console.print(f"verl {release.version}: {time.monotonic() - begin:.0f} s", highlight=False)
        for pin in broken_pins(folder):
            console.print(f"  its own pin is not met here: {pin}", highlight=False, markup=False)
    table = Table("check", *found, title="verl_ba against every supported release of verl (checks passed)")
    for check in dict.fromkeys(name for outcomes in found.values() for name in outcomes):
        cells = [cell(outcomes.get(check)) for outcomes in found.values()]
        table.add_row(check.removeprefix("test_").replace("_", " "), *(text for text, _ in cells))
        failures += [f"verl {version}: {check}" for version, (_, bad) in zip(found, cells, strict=True) if bad]
    console.print(table)
    for failure in failures:
        console.print(f"✗ {failure}", style="red", highlight=False, markup=False)
    console.print(f"{time.monotonic() - started:.0f} s", highlight=False)
    return 1 if failures or not all(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
