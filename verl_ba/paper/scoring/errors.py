"""What can go wrong with the sandbox itself. None of it says anything about a program, so none of it becomes a score."""


class SandboxError(RuntimeError):
    """The sandbox is missing or does not work on this machine. No program can be scored here, so a run should end."""

    ends_run = True


class MachineFault(SandboxError):
    """The machine could not run this one program to its end, not even when it was tried again. Others may be scored."""

    ends_run = False
