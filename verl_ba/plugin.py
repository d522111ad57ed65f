"""What verl's entry point `verl.plugins` imports in every process that imports verl."""

from verl_ba import hooks

hooks.install()
