"""What verl's entry point `verl.plugins` imports: the CPU platform, if `VERL_PLATFORM=cpu`."""

import verl_cpu

if verl_cpu.requested():
    from verl_cpu import platform

    platform.install()
