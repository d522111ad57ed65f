"""Which releases of verl are known, how far, and what differs between them. Nothing here imports verl, or torch.

A release is one entry of `RELEASES`; patches, downloads for the tests and the table of docs/releases.md read it here.
Another verl (its main branch, a fork, a later release) is *untested*: it is taken for the nearest older release, and must
show by its seams and by its numbers that it fits (hooks/config.py, `check_untested`).

`python -m verl_ba.releases` prints the table; `python -m verl_ba.releases FOLDER` the checksum of the sources of a verl.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_ba import __version__


class UnsupportedVerlError(RuntimeError):
    """verl is missing, or is older than every known release."""


@dataclass(frozen=True)
class Release:
    """One release of verl and what sets it apart. What is hooked in it is in `hooks.SEAMS`.

    The defaults are what the newest release has, so that a later one in which nothing changed is one line.

    Attributes:
        version: as verl's own file `version/version` has it.
        wheel: sha256 of its wheel on the package index.
        sources: `checksum_of_sources` of that wheel.
        trainers: verl's trainers whose update the hooks see.
        layouts: how a worker gets its batch: 'padded', 'nested' or both.
        entry_points: `import verl` loads the entry points of the group `verl.plugins`.
        global_critic: its value loss is normalised by the global mini-batch; else by each micro-batch.
        legacy_workers: it has workers that drop `uid`, so our modes are refused on them.
        experimental: why support is only experimental; empty if it is not.
        ran: what was run.
        changed_lines: at most this many added and removed lines of verl's own files are in its patch.
    """

    version: str
    wheel: str = ""
    sources: str = ""
    trainers: str = "`main_ppo` (v1 and `trainer.use_v1=False`)"
    layouts: tuple[str, ...] = ("padded", "nested")
    entry_points: bool = True
    global_critic: bool = True
    ran: str = "`make test-versions`"
    legacy_workers: bool = False
    experimental: str = ""
    changed_lines: int = 45


RELEASES = (
    Release(
        "0.7.1",
        wheel="0f7fb1dd6a37d20f7d8795c65ed0d1b9797ffb9947f283bbefd758dced08e216",
        sources="f5cd571f2102f0f1",
        trainers="`main_ppo` with `trainer.use_legacy_worker_impl=disable`",
        layouts=("padded",),
        entry_points=False,
        global_critic=False,
        legacy_workers=True,
        experimental="its engine workers are opt-in and only their update was run, never a whole training",
        changed_lines=62,
    ),
    Release(
        "0.8.0",
        wheel="4e32830aae80771ee3b5f0d26a2b794d793f3bcece67aff07c2a7c62e948714f",
        sources="e0ce243db2c30abb",
        trainers="`main_ppo`, `main_ppo_sync`",
        entry_points=False,
        global_critic=False,
        changed_lines=48,
    ),
    Release(
        "0.9.0",
        wheel="6e9374db1e2ab346a0aafe9a202bee1b239a042def2f2ccd6db2a4cd04c6308b",
        sources="7b52d0d5c466b2ca",
    ),
    Release(
        "0.9.1",
        wheel="db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14",
        sources="62aab150d98d0f8a",
        trainers="`main_ppo` (v1 and `trainer.use_v1=False`), `one_step_off_policy`, `fully_async_policy`",
        ran="`make test-versions`; verl's real trainers on the CPU (`make test-all`)",
    ),
)
"""Every known release, oldest first."""

BY_VERSION = {release.version: release for release in RELEASES}

SOURCES = ("protocol.py", "single_controller/**/*.py", "trainer/**/*.py", "utils/*.py", "workers/**/*.py")
"""The files of verl that an update goes through."""


def numbers(version: str) -> tuple[int, ...]:
    """'0.10.0.dev0' as (0, 10, 0), which can be compared; what follows the numbers is left out."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")[:3]) if found else ()


def _verl_folder() -> Path | None:
    """Of the verl that would be imported; None if it cannot be found."""
    spec = importlib.util.find_spec("verl")
    return Path(spec.origin).parent if spec and spec.origin else None


def verl_version() -> str | None:
    """The version that verl gives itself, read without importing it; None if verl cannot be found."""
    folder = _verl_folder()
    return folder and (folder / "version" / "version").read_text().strip()


def is_patched() -> bool:
    """Whether the verl that would be imported has the modes in its own tree (patches/): then nothing is hooked."""
    folder = _verl_folder()
    return folder is not None and (folder / "trainer" / "ppo" / "loss_agg.py").exists()


def current() -> Release:
    """The release that this process imports, or what its version is taken for.

    Raises:
        UnsupportedVerlError: verl is missing, or older than every known release.
    """
    version = verl_version()
    if version is None:
        raise UnsupportedVerlError(f"verl is not installed; {_known()}. Try: pip install verl=={RELEASES[-1].version}")
    return of(version)


def not_newer(version: str) -> list[Release]:
    """The known releases up to this version, oldest first."""
    return [release for release in RELEASES if numbers(release.version) <= numbers(version)]


def of(version: str) -> Release:
    """A release by its version; an unknown one is taken for the nearest older release.

    Raises:
        UnsupportedVerlError: it is older than every known release.
    """
    if version in BY_VERSION:
        return BY_VERSION[version]
    older = not_newer(version)
    if not older:
        raise UnsupportedVerlError(
            f"verl {version} is not supported by verl_ba {__version__}; {_known()}. Our modes are not available in this "
            f"process. Install a newer verl, for example pip install verl=={RELEASES[-1].version}"
        )
    return dataclasses.replace(older[-1], version=version, wheel="", sources="", ran="")


def _known() -> str:
    names = [release.version + (" (experimental)" if release.experimental else "") for release in RELEASES]
    return f"tested releases: {', '.join(names)}"


@functools.cache
def untested() -> str:
    """Why the verl that this process imports is none of the tested releases, in words; '' if it is one.

    A fork that keeps the name of a release is known by its sources, which are read once in a process.
    """
    release, folder = current(), _verl_folder()
    if release.version not in BY_VERSION:
        return _known()
    if folder is None or checksum_of_sources(folder) != release.sources:
        return f"the code in {folder} differs from verl {release.version} as it was released"
    return ""


def checksum_of_sources(folder: Path) -> str:
    """The first 16 hexadecimal digits of the sha256 of a verl's `SOURCES`.

    folder: the package's folder, `verl`.
    """
    digest = hashlib.sha256()
    paths = sorted({path for pattern in SOURCES for path in folder.glob(pattern)})
    if not paths:
        raise FileNotFoundError(f"{folder}: expected the folder of the package verl, with {', '.join(SOURCES)}")
    for path in paths:
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def support_table() -> list[str]:
    """The releases as the lines of a Markdown table (docs/releases.md)."""
    head = (
        "verl",
        "support",
        "trainers",
        "batch in the worker",
        "loaded by",
        "critic's token-mean over",
        "refused",
        "run",
    )
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for release in RELEASES:
        cells = (
            release.version,
            f"experimental: {release.experimental}" if release.experimental else "yes",
            release.trainers,
            ", ".join(release.layouts),
            "entry point, environment, config" if release.entry_points else "environment, config",
            "the mini-batch" if release.global_critic else "each micro-batch, as verl does",
            "legacy workers (the default)" if release.legacy_workers else "nothing more",
            release.ran,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(
        "| another version, or another code under these versions | untested: it runs if every seam fits, a self-test passes "
        "and each rank's weights add up | as the nearest older release | … | … | … | what does not fit | – |"
    )
    return lines


if __name__ == "__main__":
    print("\n".join([checksum_of_sources(Path(path)) for path in sys.argv[1:]] or support_table()))
