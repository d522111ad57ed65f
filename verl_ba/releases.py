"""Which releases of verl are supported, how far, and what differs between them. Nothing here imports verl.

`python -m verl_ba.releases` prints the table of docs/releases.md.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from verl_ba import __version__
from verl_ba.aggregation import MODES


class UnsupportedVerlError(RuntimeError):
    """verl is missing, or is a release whose seams are unknown."""


@dataclass(frozen=True)
class Release:
    """One release of verl and what sets it apart. What is hooked in it is in `hooks.SEAMS`.

    Attributes:
        version: as verl's own file `version/version` has it.
        trainers: verl's trainers whose update the hooks see.
        layouts: how a worker gets its batch: 'padded', 'nested' or both.
        entry_points: `import verl` loads the entry points of the group `verl.plugins`.
        global_critic: its value loss is normalised by the global mini-batch; else by each micro-batch.
        legacy_workers: it has workers that drop `uid`, so our modes are refused on them.
        experimental: why support is only experimental; empty if it is not.
        ran: what was run.
    """

    version: str
    trainers: str
    layouts: tuple[str, ...]
    entry_points: bool
    global_critic: bool
    ran: str
    legacy_workers: bool = False
    experimental: str = ""


_CONTRACT = "`make test-versions`"

RELEASES = (
    Release(
        "0.7.1",
        trainers="`main_ppo` with `trainer.use_legacy_worker_impl=disable`",
        layouts=("padded",),
        entry_points=False,
        global_critic=False,
        ran=_CONTRACT,
        legacy_workers=True,
        experimental="its engine workers are opt-in and only their update was run, never a whole training",
    ),
    Release(
        "0.8.0",
        trainers="`main_ppo`, `main_ppo_sync`",
        layouts=("padded", "nested"),
        entry_points=False,
        global_critic=False,
        ran=_CONTRACT,
    ),
    Release(
        "0.9.0",
        trainers="`main_ppo` (v1 and `trainer.use_v1=False`)",
        layouts=("padded", "nested"),
        entry_points=True,
        global_critic=True,
        ran=_CONTRACT,
    ),
    Release(
        "0.9.1",
        trainers="`main_ppo` (v1 and `trainer.use_v1=False`), `one_step_off_policy`, `fully_async_policy`",
        layouts=("padded", "nested"),
        entry_points=True,
        global_critic=True,
        ran=f"{_CONTRACT}; verl's real trainers on the CPU (`make test-all`)",
    ),
)
"""Every supported release, oldest first. Another one is refused, not guessed at."""

BY_VERSION = {release.version: release for release in RELEASES}


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
    """The release that this process imports.

    Raises:
        UnsupportedVerlError: verl is missing or of another release; the error names the supported ones.
    """
    version = verl_version()
    names = [release.version + (" (experimental)" if release.experimental else "") for release in RELEASES]
    expected = f"supported: {', '.join(names)}"
    newest = RELEASES[-1].version
    if version is None:
        raise UnsupportedVerlError(f"verl is not installed; {expected}. Try: pip install verl=={newest}")
    if version not in BY_VERSION:
        raise UnsupportedVerlError(
            f"verl {version} is not supported by verl_ba {__version__}; {expected}. The modes {', '.join(MODES)} are not "
            f"available in this process. Install a supported verl, or a verl_ba that supports {version}"
        )
    return BY_VERSION[version]


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
    versions = "any other version"
    lines.append(f"| {versions} | no: refused by its version | – | – | – | – | everything | – |")
    return lines


if __name__ == "__main__":
    print("\n".join(support_table()))
