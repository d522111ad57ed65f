"""Whose time a program's time is: its own, or the machine's, which let it wait for a processor."""

import time
from pathlib import Path

TICK = 0.5
"""How often the sandbox looks at the clock [s]."""


_WAITING_IS_COUNTED = all(Path("/proc/thread-self", name).exists() for name in ("schedstat", "children"))


class OwnTimeOutError(Exception):
    """The program has run or slept too long by itself."""


class MachineTimeOutError(Exception):
    """The program is not done, and most of the time it could not run."""


class Clock:
    """The time of a process and of all below it.

    own = elapsed - waited. `waited` is what Linux counts as waiting for a processor (the second number of
    /proc/PID/task/TID/schedstat), the sum over all threads [s]. `elapsed` goes by the wall clock, in steps of at most two
    ticks: while this process itself is stopped or gets no processor, nobody's time runs. Where the kernel does not count
    waiting, all time is taken for waiting; a program that computes is ended by its limit of CPU time in any case.
    """

    def __init__(self, pid: int, own_limit: float, machine_limit: float):
        """own_limit, machine_limit: how much own time, and how much elapsed time, `check` lets pass [s]."""
        self._pid, self._own_limit, self._machine_limit = pid, own_limit, machine_limit
        self._waited: dict[str, float] = {}  # by thread; threads that have ended stay
        self._elapsed = 0.0
        self._last = self._looked = time.monotonic()

    def check(self) -> None:
        """Call at least every TICK. OwnTimeOutError or MachineTimeOutError after the limits."""
        now = time.monotonic()
        self._elapsed += min(now - self._last, 2 * TICK)
        self._last = now
        if now - self._looked < TICK:
            return
        self._looked = now
        self._look(self._pid)
        if _WAITING_IS_COUNTED and self._elapsed - sum(self._waited.values()) > self._own_limit:
            raise OwnTimeOutError
        if self._elapsed > self._machine_limit:
            raise MachineTimeOutError

    def _look(self, pid: int | str) -> None:
        """Take down how long each thread has waited."""
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                self._waited[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
                for child in (thread / "children").read_text().split():
                    self._look(child)
        except OSError:  # it has ended meanwhile
            pass
