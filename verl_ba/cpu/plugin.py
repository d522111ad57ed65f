"""What verl's entry point `verl.plugins` imports: the CPU platform, if `VERL_PLATFORM=cpu`."""

from verl_ba import cpu

if cpu.requested():
    from verl_ba.cpu import platform

    platform.install()
