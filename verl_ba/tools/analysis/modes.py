"""The names of loss_agg_mode, and the short names that are accepted in their place."""

MODES = ("balanced", "group-mean-token-mean", "seq-mean-token-mean", "token-mean")
"""Every mode that is compared, in the order in which tables and figures show them."""

ALIASES = {
    "token": "group-mean-token-mean",
    "sequence": "seq-mean-token-mean",
    "verl-token": "token-mean",
    "batch-token": "token-mean",  # in the rows of studies/results
}
"""Short name -> mode. The arms of `recipes/config/arm` are files of these names; a test compares the two."""


def in_full(name: str) -> str:
    """The mode that a short name stands for; any other name is returned as it is."""
    return ALIASES.get(name, name)


def short(mode: str) -> str:
    """The shortest way to say a mode: the first of its short names, or the mode itself. Runs are named by it."""
    return next((alias for alias, other in ALIASES.items() if other == mode), mode)


ARM_MODES = {short(mode): mode for mode in MODES}
"""Arm -> mode, for every arm of the recipes."""
