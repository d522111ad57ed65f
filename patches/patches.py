"""Apply, check and refresh the patches of this folder: the same feature inside verl's own tree.

`new/` holds the files that verl does not have, the same for every release: they are copied. One of them is
`verl/trainer/ppo/loss_agg.py`, a link to `verl_ba/loss_agg.py`. `verl-<release>.patch` changes the places of that release
that call it: a header of `Field: text` lines, `---`, and a diff for `git apply -p1`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from verl_ba import releases

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NEW = HERE / "new"
RELEASES = [release.version for release in releases.RELEASES]
FIELDS = ("Description", "Why-Not-A-Plugin", "Forwarded", "Applies-To", "Drop-When")

# `git apply` must not take the user's settings or a repository further up for its own.
GIT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
for author in ("AUTHOR", "COMMITTER"):
    GIT |= {f"GIT_{author}_NAME": "patches.py", f"GIT_{author}_EMAIL": "patches@localhost"}

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console(highlight=False, soft_wrap=True)


class PatchError(Exception):
    """A patch does not apply, or a file is in its way."""


def git(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess:
    environment = GIT | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    return subprocess.run(["git", *arguments], cwd=folder, env=environment, input=text, text=True, capture_output=True)


def patch_of(version: str) -> Path:
    """The patch for a version of verl: its own, or that of the nearest older release."""
    paths = [HERE / f"verl-{release.version}.patch" for release in releases.not_newer(version)]
    here = [path for path in paths if path.exists()]
    if not here:
        raise PatchError(f"verl {version} has no patches; there are some for {', '.join(RELEASES)}")
    return here[-1]


def body(release: str) -> str:
    return patch_of(release).read_text().partition("\n---\n")[2]


def changed_files(release: str) -> list[str]:
    """The files of verl that the patch changes."""
    return re.findall(r"(?m)^\+\+\+ b/(.+)$", body(release))


def new_files(checkout: bool = True) -> list[str]:
    """The files that are copied; an installed package has no room for verl's tests and docs."""
    files = sorted(str(path.relative_to(NEW)) for path in NEW.rglob("*") if path.is_file())
    return [name for name in files if "__pycache__" not in name and (checkout or name.startswith("verl/"))]


def locate(path: Path) -> tuple[Path, str, bool]:
    """The folder with `verl/`, its release, and whether it is a checkout, from the path of either."""
    for root in (path, path.parent):
        version = root / "verl" / "version" / "version"
        if version.exists() and path in (root, root / "verl"):
            release = version.read_text().strip()
            patch_of(release)
            return root, release, (root / "tests").is_dir() and (root / "docs").is_dir()
    raise PatchError(
        f"{path}: expected verl's package directory or the root of a checkout, found no verl/version/version"
    )


def apply_to(root: Path, release: str, checkout: bool) -> list[str]:
    """Apply what is not there yet, all or nothing; the names of the patch and of the files that were put there."""
    absent = [name for name in new_files(checkout) if not (root / name).exists()]
    for name in set(new_files(checkout)) - set(absent):
        if (root / name).read_bytes() != (NEW / name).read_bytes():
            raise PatchError(
                f"verl {release}: {root / name} is there already, and differs from patches/new/{name}. Start from verl "
                f"{release} as its wheel has it, or remove this file if it is from another verl_ba. Nothing was changed"
            )
    applied = []
    if git(root, "apply", "--reverse", "--check", text=body(release)).returncode:
        result = git(root, "apply", text=body(release))
        if result.returncode:
            raise PatchError(explain(result.stderr, release))
        applied.append(patch_of(release).name)
    for name in absent:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(NEW / name, root / name)
    return applied + absent


def explain(stderr: str, release: str) -> str:
    """What failed: the patch, the hunk, the release, and what to do."""
    said = re.search(r"patch failed: (\S+):(\d+)", stderr)
    remedy = (
        f"Expected verl {release} as its wheel has it. Start from that (pip install --force-reinstall --no-deps "
        f"verl=={release}); or, in a tree of your own, apply by hand (patch -p1 -F3 < {patch_of(release).name}), commit, "
        "and write the patch anew: make patches-refresh TREE=path. Nothing was changed"
    )
    if said is None:
        return f"verl {release}: {stderr.strip()}\n{remedy}"
    file, line = said.groups()
    for part in re.split(r"(?m)^(?=diff --git )", body(release)):
        hunk = re.search(rf"(?ms)^@@ -{line},.*?(?=^@@|\Z)", part) if f" b/{file}\n" in part else None
        if hunk:
            return f"verl {release}: {patch_of(release).name} does not apply to {file}, line {line}:\n{hunk[0]}{remedy}"
    return f"verl {release}: {file}, line {line}: {stderr.strip()}\n{remedy}"


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "patches.py")


def export(folder: Path) -> str:
    """The diff of the last commit, as these patches have it; without the files that are copied."""
    options = ("--no-color", "--no-ext-diff", "--no-renames", "--abbrev=12")
    paths = (".", *(f":(exclude){name}" for name in new_files()))
    return git(folder, "diff", *options, "HEAD~1", "HEAD", "--", *paths).stdout


def exported(tree: Path, release: str, fuzz: bool = False) -> str:
    """The patch's body after applying it to a pristine tree and exporting it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        git(folder, "init", "-q")
        for name in changed_files(release):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, folder / name)
        commit(folder)
        if fuzz:
            options = ["-p1", "-F3", "--no-backup-if-mismatch", "-s", "-i", str(patch_of(release))]
            result = subprocess.run(["patch", *options], cwd=folder, text=True, capture_output=True)
            if result.returncode:
                raise PatchError(f"verl {release}: {patch_of(release).name}, even with fuzz:\n{result.stdout}")
        else:
            apply_to(folder, release, checkout=False)
        commit(folder)
        return export(folder)


def changed_lines(release: str) -> tuple[int, int]:
    """Added and removed lines in verl's own files: what the limits are for."""
    count = [len(re.findall(sign, body(release))) for sign in (r"(?m)^\+(?!\+\+ b/)", r"(?m)^-(?!-- a/)")]
    return count[0], count[1]


def checksum(release: str) -> str:
    return f"sha256:{releases.BY_VERSION[release].wheel}"


def faults_of(release: str, tree: Path) -> list[str]:
    """What is wrong with the patch itself: fields, checksum, number of lines, re-export."""
    faults, name = [], patch_of(release).name
    header = patch_of(release).read_text().partition("\n---\n")[0]
    absent = [field for field in FIELDS if not re.search(rf"(?m)^{field}: \S", header)]
    if absent:
        faults.append(f"{name}: no {', '.join(absent)} in the header")
    if f"verl {release}" not in header or checksum(release) not in header:
        faults.append(f"{name}: Applies-To must name verl {release} and its wheel's {checksum(release)}")
    if exported(tree, release) != body(release):
        faults.append(f"{name}: an export of it differs. Run: make patches-refresh")
    most = releases.BY_VERSION[release].changed_lines
    if sum(changed_lines(release)) > most:
        faults.append(f"{name}: {sum(changed_lines(release))} changed lines, at most {most}")
    return faults


def pristine(release: str) -> Path:
    """The release as its wheel has it, unpacked; downloaded if it is not there yet."""
    from dev import versions

    return versions.unpacked(releases.BY_VERSION[release])


def patched_copy(tree: Path, release: str, folder: Path) -> Path:
    """A copy of the tree's package with the patch and every new file, tests and docs included."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(tree / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    apply_to(folder, release, checkout=True)
    return folder


@app.command()
def apply(path: Annotated[Path, typer.Argument(help="verl's package directory, or the root of a checkout")]) -> None:
    """Apply the patch to a verl and copy the new files. Nothing is changed if something does not fit."""
    root, release, checkout = locate(path.resolve())
    applied = apply_to(root, release, checkout)
    said = f"applied {', '.join(applied)}" if applied else "has the patch already"
    console.print(f"✓ verl {release}: {said}")
    if release not in RELEASES:
        console.print(
            f"· verl {release} is none of the tested releases ({', '.join(RELEASES)}). Run its tests with the patch: "
            "pytest tests/trainer/ppo/test_loss_agg_on_cpu.py"
        )


@app.command()
def check(
    only: Annotated[list[str] | None, typer.Argument(help="releases; all, by default", metavar="[RELEASES]…")] = None,
    batches: Annotated[int, typer.Option(help="random updates that must be equal to the bit")] = 1000,
) -> None:
    """Download each release, apply, re-export, and run verl's own and our tests in the patched tree."""
    table, faults = Table("verl", "changed lines", "tests", "equal updates"), []
    for release in only or RELEASES:
        with console.status(f"verl {release}"):
            tree = pristine(release)
            found = [f"verl {release}: {fault}" for fault in faults_of(release, tree)]
            folder = patched_copy(tree, release, tree.with_name(f"{tree.name}-patched"))
            if apply_to(folder, release, checkout=True):
                found.append(f"verl {release}: the patch was applied twice")
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
            theirs = [str(folder / name) for name in new_files() if name.endswith("_on_cpu.py")]
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", *theirs]
            command += [str(ROOT / "tests" / "patches" / "test_patched_verl.py")]
            result = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
            log.write_text(result.stdout + result.stderr)
        said = (result.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
        if result.returncode:
            found.append(f"verl {release}: pytest's exit status {result.returncode}; see {log.relative_to(ROOT)}")
        added, removed = changed_lines(release)
        table.add_row(release, f"+{added} −{removed}", said, "no" if result.returncode else str(batches))
        faults += found
    console.print(table)
    for fault in faults:
        console.print(f"✗ {fault}", style="red", markup=False)
    raise typer.Exit(1 if faults else 0)


@app.command()
def refresh(
    tree: Annotated[Path | None, typer.Option(help="a git checkout whose last commit is the patch")] = None,
) -> None:
    """Write the patches anew: as they apply, with fuzz, to each release; or from the last commit of one tree."""
    if tree:
        root, release, _ = locate(tree.resolve())
        new = {release: export(root)}
    else:
        new = {release: exported(pristine(release), release, fuzz=True) for release in RELEASES}
    for release, text in new.items():
        header = re.sub(r"sha256:\w+", checksum(release), patch_of(release).read_text().partition("\n---\n")[0])
        older = patch_of(release).stem.removeprefix("verl-")
        header = re.sub(rf"(?<=verl[ -]){re.escape(older)}\b", release, header)
        patch = HERE / f"verl-{release}.patch"  # of a new release, until now the older one's
        patch.write_text(f"{header}\n---\n{text}")
        console.print(f"✓ verl {release}: {patch.name}")


def table_rows() -> list[str]:
    """README's table of changed lines."""
    lines = ["| verl | files | changed lines |", "| --- | --- | --- |"]
    for release in RELEASES:
        added, removed = changed_lines(release)
        lines.append(f"| {release} | {len(changed_files(release))} | +{added} −{removed} = {added + removed} |")
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
