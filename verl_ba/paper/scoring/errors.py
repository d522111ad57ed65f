"""What can go wrong with the scorers themselves. None of it says anything about a response, so none of it becomes a score."""


class SandboxError(RuntimeError):
    """The sandbox is missing or does not work on this machine. No program can be scored here, so a run should end."""

    ends_run = True  # verl_ba/hooks/reward.py: a training run does not go on without it


class MachineFault(SandboxError):
    """The machine could not run this one program to its end, not even when it was tried again. Others may be scored."""

    ends_run = False


class GraderError(RuntimeError):
    """The process that compares mathematics does not work on this machine, so a run should end. What an answer does to it
    is no error: its limits of time and memory, and too deep a recursion, make the answer wrong.
    """

    ends_run = True
