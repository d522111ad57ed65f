"""Where verl is touched. No file of verl is edited; each module here is one seam, with why it exists and until when.

    driver                                        each training rank
    ------                                        ------------------
    config   ActorConfig.__post_init__            update   ActorRolloutRefWorker.update_actor
      accepts the modes, refuses what               once per update, where a rank has its whole share: gather (uid,
      would ignore them; validate_config            tokens by sign) over the data-parallel group, and put each row's
      refuses before any process starts             pool mean length into the batch as a column

    agg_loss   the trainers' entropy metric,      ppo_loss   keeps a fixed list of fields: the column travels in
      which is logged before advantages exist       config.global_batch_info, which every policy loss passes on
                                                  agg_loss   the new modes
    log   names in verl's log, lengths in its     policy_loss   get_policy_loss_fn: a policy loss that goes past
      dumps of rollouts                             agg_loss raises
    reward   a reward that cannot work on a node
      ends the run instead of losing responses

A *seam* is one such place; `attach` is the machinery. Nothing about groups or signs is decided in these files: they carry
what `loss_agg` computes. For every mode, verl's own included, the seams of the loss also hand what they see to
`metrics.record`, which logs `balance/…`.

In a verl that has the modes in its own tree (patches/) nothing is touched: `seams` is empty there.
"""

import os

from verl_ba import releases
from verl_ba.hooks import agg_loss, attach, config, legacy_0_7_1, log, policy_loss, ppo_loss, reward, update
from verl_ba.hooks.attach import Seam
from verl_ba.hooks.state import SeamError, attachment, describe, verify
from verl_ba.say import say

__all__ = [
    "SEAMS",
    "Seam",
    "SeamError",
    "attachment",
    "describe",
    "install",
    "is_installed",
    "load_seam_modules",
    "plugin_policy",
    "seam_fault",
    "seams",
    "stale_bindings",
    "verify",
]

SEAMS: tuple[Seam, ...] = (
    *config.SEAMS,
    *update.SEAMS,
    *ppo_loss.SEAMS,
    *agg_loss.SEAMS,
    *policy_loss.SEAMS,
    *log.SEAMS,
    *reward.SEAMS,
    *legacy_0_7_1.SEAMS,
)
"""Every place in verl that is replaced, in any release. The signatures are the same in every release that has one."""


def seams() -> list[Seam]:
    """The seams of the release in this process; UnsupportedVerlError if it is not supported.

    None in a verl that has the modes in its own tree (patches/): what is refused there is refused by verl.
    """
    version = releases.current().version
    return [] if releases.is_patched() else [seam for seam in SEAMS if seam.is_in(version)]


def install() -> None:
    """Attach to this process's verl, now or as its modules are loaded. Calling it again does nothing.

    Raises:
        releases.UnsupportedVerlError: verl is missing or of an unsupported release. The reason is said on stderr first,
            because verl logs a failing plugin at DEBUG only.
    """
    if attachment.installed:
        return
    try:
        present = seams()
    except releases.UnsupportedVerlError as error:
        say(str(error))
        raise
    attachment.install(present)


def is_installed() -> bool:
    """Whether `install` has run in this process."""
    return attachment.installed


def seam_fault(seam: Seam) -> str | None:
    """Why this seam is not in force in this process; None if it is."""
    return attachment.fault(seam)


def stale_bindings() -> list[tuple[str, str]]:
    """Every (module attribute, seam name) that still names a function of verl that was replaced everywhere."""
    return attachment.stale_bindings()


def load_seam_modules() -> dict[str, Exception]:
    """Import every module with a seam in this release (`verl-ba doctor`); the errors by module name."""
    return attach.import_modules(seams())


def plugin_policy() -> str:
    """verl's own switch for plugins: 'auto', 'none', or names."""
    return os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
