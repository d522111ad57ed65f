"""What verl's entry point `verl.plugins` imports: the CPU platform, if `VERL_PLATFORM=cpu`."""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from verl_ba.cpu import platform

    platform.install()
