"""Apply, check and refresh the patches of this folder: the same feature inside verl's own tree, one folder per release.

Each release's `series` names its patches in order. A patch is a header of `Field: text` lines, `---`, and a diff for
`git apply -p1`. Those named `*-tests*` hold new files only (tests and docs, which wheels lack).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/series"))
FIELDS = ("Description", "Why-Not-A-Plugin", "Forwarded", "Applies-To", "Drop-When")
CHANGED_LINES = {"0.7.1": 210}
"""At most this many added and removed lines of source, 160 for the other releases."""

# `git apply` must not take the user's settings or a repository further up for its own.
GIT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
for author in ("AUTHOR", "COMMITTER"):
    GIT |= {f"GIT_{author}_NAME": "patches.py", f"GIT_{author}_EMAIL": "patches@localhost"}

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console(highlight=False, soft_wrap=True)


class PatchError(Exception):
    """A patch does not apply, or is not what an export of it gives."""


def git(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess:
    environment = GIT | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    return subprocess.run(["git", *arguments], cwd=folder, env=environment, input=text, text=True, capture_output=True)


def series(release: str) -> list[Path]:
    lines = (HERE / release / "series").read_text().split()
    return [HERE / release / line for line in lines]


def is_source(patch: Path) -> bool:
    return "-tests" not in patch.name


def body(patch: Path) -> str:
    return patch.read_text().partition("\n---\n")[2]


def locate(path: Path) -> tuple[Path, str, bool]:
    """The folder with `verl/`, its release, and whether it is a checkout, from the path of either."""
    for root in (path, path.parent):
        version = root / "verl" / "version" / "version"
        if version.exists() and path in (root, root / "verl"):
            release = version.read_text().strip()
            if release not in RELEASES:
                raise PatchError(f"{path}: verl {release} has no patches; there are some for {', '.join(RELEASES)}")
            return root, release, (root / "tests").is_dir() and (root / "docs").is_dir()
    raise PatchError(
        f"{path}: expected verl's package directory or the root of a checkout, found no verl/version/version"
    )


def apply_series(root: Path, release: str, patches: list[Path]) -> list[Path]:
    """Apply what is not there yet, all or nothing; the patches that were applied."""
    there = already(root, patches)
    if there < len(patches):
        # As one patch: git is not all or nothing over several.
        result = git(root, "apply", text="".join(body(patch) for patch in patches[there:]))
        if result.returncode:
            raise PatchError(explain(result.stderr, release, patches[there:]))
    return patches[there:]


def already(root: Path, patches: list[Path]) -> int:
    """How many of the patches the tree has: those that can be taken back, last first."""
    for there in range(len(patches), 0, -1):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            copy_files(root, patches, folder)
            back = (git(folder, "apply", "--reverse", text=body(patch)) for patch in reversed(patches[:there]))
            if all(result.returncode == 0 for result in back):
                return there
    return 0


def explain(stderr: str, release: str, patches: Iterable[Path]) -> str:
    """What failed: the patch, the hunk, the release, and what to do."""
    said = re.search(r"patch failed: (\S+):(\d+)", stderr)
    remedy = (
        f"Expected verl {release} as its wheel has it. Start from that (pip install --force-reinstall --no-deps "
        f"verl=={release}); or, in a tree of your own, apply by hand (patch -p1 -F3 < PATCH), commit each patch and write "
        "them anew: make patches-refresh TREE=path. Nothing was changed"
    )
    if said is None:
        return f"verl {release}: {stderr.strip()}\n{remedy}"
    file, line = said.groups()
    for patch in patches:
        for part in re.split(r"(?m)^(?=diff --git )", body(patch)):
            hunk = re.search(rf"(?ms)^@@ -{line},.*?(?=^@@|\Z)", part) if f" b/{file}\n" in part else None
            if hunk:
                return f"verl {release}: {patch.name} does not apply to {file}, line {line}:\n{hunk[0]}{remedy}"
    return f"verl {release}: {file}, line {line}: {stderr.strip()}\n{remedy}"


def files_of(patches: Iterable[Path]) -> set[str]:
    return {name for patch in patches for name in re.findall(r"(?m)^\+\+\+ b/(.+)$", body(patch))}


def copy_files(tree: Path, patches: list[Path], folder: Path) -> None:
    """Only the files of the tree that the patches touch."""
    for name in files_of(patches):
        if (tree / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, folder / name)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "patches.py")


def export(folder: Path, steps_back: int = 0) -> str:
    """The diff of one commit, as these patches have it."""
    revisions = (f"HEAD~{steps_back + 1}", f"HEAD~{steps_back}")
    return git(folder, "diff", "--no-color", "--no-ext-diff", "--no-renames", "--abbrev=12", *revisions).stdout


def exported(tree: Path, release: str, fuzz: bool = False) -> list[str]:
    """The bodies of the patches after applying each to a pristine tree and exporting it."""
    patches, bodies = series(release), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        git(folder, "init", "-q")
        copy_files(tree, patches, folder)
        commit(folder)
        for patch in patches:
            if fuzz:
                options = ["-p1", "-F3", "--no-backup-if-mismatch", "-s", "-i", str(patch)]
                result = subprocess.run(["patch", *options], cwd=folder, text=True, capture_output=True)
                if result.returncode:
                    raise PatchError(f"verl {release}: {patch.name}, even with fuzz:\n{result.stdout}")
            else:
                apply_series(folder, release, [patch])
            commit(folder)
            bodies.append(export(folder))
    return bodies


def changed_lines(release: str) -> tuple[int, int]:
    """Added and removed lines of source and settings: what the limits are for."""
    lines = [line for patch in filter(is_source, series(release)) for line in body(patch).splitlines()]
    count = [sum(bool(re.match(sign, line)) for line in lines) for sign in (r"\+(?!\+\+ b/)", r"-(?!-- a/)")]
    return count[0], count[1]


def checksum(release: str) -> str:
    return re.findall(r"sha256:\w+", (ROOT / "requirements" / "versions" / f"{release}.txt").read_text())[0]


def faults_of(release: str, tree: Path) -> list[str]:
    """What is wrong with the patches themselves: fields, checksum, number of lines, re-export."""
    faults = []
    for patch, new in zip(series(release), exported(tree, release), strict=True):
        header = patch.read_text().partition("\n---\n")[0]
        absent = [field for field in FIELDS if not re.search(rf"(?m)^{field}: \S", header)]
        if absent:
            faults.append(f"{patch.name}: no {', '.join(absent)} in the header")
        if f"verl {release}" not in header or checksum(release) not in header:
            faults.append(f"{patch.name}: Applies-To must name verl {release} and its wheel's {checksum(release)}")
        if new != body(patch):
            faults.append(f"{patch.name}: an export of it differs. Run: make patches-refresh")
    limit = CHANGED_LINES.get(release, 160)
    if sum(changed_lines(release)) > limit:
        faults.append(f"{sum(changed_lines(release))} changed lines of source, at most {limit}")
    return faults


def pristine(release: str) -> Path:
    """The release as its wheel has it, unpacked; downloaded if it is not there yet."""
    from dev import versions
    from verl_ba.releases import BY_VERSION

    return versions.unpacked(BY_VERSION[release])


def patched_copy(tree: Path, release: str, folder: Path) -> Path:
    """A copy of the tree's package with every patch, tests and docs included."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(tree / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    apply_series(folder, release, series(release))
    return folder


@app.command()
def apply(path: Annotated[Path, typer.Argument(help="verl's package directory, or the root of a checkout")]) -> None:
    """Apply the patches to a verl. Nothing is changed if one does not fit."""
    root, release, checkout = locate(path.resolve())
    patches = [patch for patch in series(release) if checkout or is_source(patch)]
    applied = apply_series(root, release, patches)
    if applied:
        console.print(f"✓ verl {release}: applied {', '.join(patch.name for patch in applied)}")
    else:
        console.print(f"✓ verl {release}: has the patches already")


@app.command()
def check(
    releases: Annotated[list[str] | None, typer.Argument(help="all, by default")] = None,
    batches: Annotated[int, typer.Option(help="random updates that must be equal to the bit")] = 1000,
) -> None:
    """Download each release, apply, re-export, and run verl's own and our tests in the patched tree."""
    table, faults = Table("verl", "patches", "changed lines", "tests", "equal updates"), []
    for release in releases or RELEASES:
        with console.status(f"verl {release}"):
            tree = pristine(release)
            found = [f"verl {release}: {fault}" for fault in faults_of(release, tree)]
            folder = patched_copy(tree, release, tree.with_name(f"{tree.name}-patched"))
            if apply_series(folder, release, series(release)):
                found.append(f"verl {release}: patches were applied twice")
            log = tree.with_name(f"{tree.name}-patched.log")
            environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
            environment |= {
                "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
                "VERL_PLATFORM": "cpu",
                "VERL_BA_PATCHED": str(folder),
                "VERL_BA_PRISTINE": str(tree),
                "VERL_BA_BATCHES": str(batches),
                "OMP_NUM_THREADS": "1",
            }
            theirs = [str(folder / name) for name in files_of(series(release)) if name.endswith("_on_cpu.py")]
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-c",
                str(ROOT / "pyproject.toml"),
            ]
            command += [f"--rootdir={ROOT}", *theirs, str(ROOT / "tests" / "patches" / "test_patched_verl.py")]
            result = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
            log.write_text(result.stdout + result.stderr)
        said = (result.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
        if result.returncode:
            found.append(f"verl {release}: pytest's exit status {result.returncode}; see {log.relative_to(ROOT)}")
        added, removed = changed_lines(release)
        equal = "no" if result.returncode else str(batches)
        table.add_row(release, str(len(series(release))), f"+{added} −{removed}", said, equal)
        faults += found
    console.print(table)
    for fault in faults:
        console.print(f"✗ {fault}", style="red", markup=False)
    raise typer.Exit(1 if faults else 0)


@app.command()
def refresh(
    tree: Annotated[Path | None, typer.Option(help="a git checkout whose last commits are one patch each")] = None,
) -> None:
    """Write the patches anew: as they apply, with fuzz, to each release; or from the commits of one tree."""
    if tree:
        root, release, _ = locate(tree.resolve())
        count = len(series(release))
        new = {release: [export(root, back) for back in reversed(range(count))]}
    else:
        new = {release: exported(pristine(release), release, fuzz=True) for release in RELEASES}
    for release, bodies in new.items():
        for patch, text in zip(series(release), bodies, strict=True):
            header = re.sub(r"sha256:\w+", checksum(release), patch.read_text().partition("\n---\n")[0])
            patch.write_text(f"{header}\n---\n{text}")
        console.print(f"✓ verl {release}: {len(bodies)} patches")


def table_rows() -> list[str]:
    """README's table of changed lines."""
    lines = ["| verl | source and settings | tests and docs | limit |", "| --- | --- | --- | --- |"]
    for release in RELEASES:
        added, removed = changed_lines(release)
        rest = [patch for patch in series(release) if not is_source(patch)]
        new = sum(len(re.findall(r"(?m)^\+(?!\+\+ b/)", body(patch))) for patch in rest)
        limit = CHANGED_LINES.get(release, 160)
        lines.append(f"| {release} | +{added} −{removed} = {added + removed} | +{new} | {limit} |")
    return lines


@app.command()
def table() -> None:
    """Print the changed lines of each release, as patches/README.md has them."""
    print("\n".join(table_rows()))


def main() -> None:
    try:
        app()
    except PatchError as error:
        console.print(f"✗ {error}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
