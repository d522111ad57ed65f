"""What is attached in this process, and the check that it is complete."""

import sys

from verl_ba import __version__, releases
from verl_ba.aggregation import MODES
from verl_ba.hooks.attach import Attachment, Seam
from verl_ba.say import say


class SeamError(RuntimeError):
    """verl's code is not what the hooks were written for, or a hook was lost."""


def _report(seam: Seam, problem: str) -> None:
    effect = f"What it is for is left out: {seam.why}" if seam.logs else f"{', '.join(MODES)} will be refused"
    say(f"verl {releases.verl_version()}: {seam.name} {problem}. {effect}")


attachment = Attachment(_report)
"""The seams of this process's verl."""


def verify() -> None:
    """Check that every seam a training process needs is attached and that no module holds an unpatched copy.

    Raises:
        SeamError: one error that lists everything missing, changed or stale, with verl's version.
    """
    faults = attachment.faults()
    if faults:
        raise SeamError(
            f"verl_ba {__version__} is not completely attached to verl {releases.verl_version()}, so {', '.join(MODES)} "
            "would not be exact:\n  - " + "\n  - ".join(faults) + "\nRun `verl-ba doctor` on this node"
        )


def describe() -> str:
    """One line on what is attached: versions and seams."""
    loaded = [seam for seam in attachment.seams if seam.module in sys.modules and not attachment.fault(seam)]
    attached = ", ".join(seam.attribute for seam in loaded)
    return f"verl_ba {__version__} in verl {releases.verl_version()}, attached: {attached}"
