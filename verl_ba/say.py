"""Lines for whoever watches a run: the logger `verl_ba`, which writes to stderr whatever verl's log level is."""

import functools
import logging
import sys


class _Stderr(logging.StreamHandler):
    """Writes to the stderr of the moment: Ray's workers and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


@functools.cache
def logger() -> logging.Logger:
    """The package's logger: each line begins with `[verl_ba]`, and none goes on to the root logger."""
    log = logging.getLogger("verl_ba")
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("[verl_ba] %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return log


def say(message: str) -> None:
    """A line that is meant to be seen."""
    logger().info(message)


_said: set[str] = set()


def say_once(message: str) -> None:
    """The same, once in this process."""
    if message not in _said:
        _said.add(message)
        say(message)


def forget() -> None:
    """Let `say_once` say everything again: for tests."""
    _said.clear()
