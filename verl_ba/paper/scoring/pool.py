"""The child processes that compare mathematics: started when needed, numbered questions, limits that the kernel keeps.

A pool of our own and not pebble's: the limit must be CPU time (wall time would change scores on a busy machine), a
process whose limit strikes is the answer's fault while any other death is the machine's, and a forked process must not
share its parent's pipes. pebble knows none of the three; what it would take over is the loop in `Child.ask`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading

from verl_ba.paper.scoring import grader
from verl_ba.paper.scoring.errors import GraderError

CHILDREN = min(4, os.cpu_count() or 1)
"""Processes with math-verify that one process (a reward worker) starts at most, each when it is first needed."""

_LIMITS = {-signal.SIGPROF, -signal.SIGALRM, -signal.SIGSEGV, -signal.SIGABRT}
"""Exit statuses for which the answer is to blame: its CPU time, its wall time, and too deep a recursion or no memory in C."""


class Child:
    """One process of `verl_ba.paper.scoring.grader`; started when first asked, and again after it was ended.

    Whoever asks holds `lock`. Whatever interrupts a question, the process is killed with its answer unread, so that no
    later question gets it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def ask(self, *question: object) -> bool:
        """The child's answer; False if it was ended by its limits of time and memory.

        A process that ends otherwise is started again once. GraderError: it ended again.
        """
        status = None
        for _ in range(2):
            self._number += 1
            try:
                line = self._exchange(json.dumps([self._number, *question]).encode() + b"\n")
                if line.endswith(b"\n"):
                    number, result = json.loads(line)
                    if number == self._number:
                        return result
                    raise RuntimeError(f"math-verify's process answered question {number} instead of {self._number}")
            except BaseException:
                self.stop()
                raise
            status = self._close()
            if status in _LIMITS:
                self._start()  # it imports while the caller goes on
                return False
        raise GraderError(
            f"math-verify's process ended twice with exit status {status} before it answered (a negative one is a signal; "
            "-9: the machine may be out of memory); its own words are on stderr. Try: python -c 'import math_verify, pint'"
        )

    def stop(self) -> None:
        """End the process, if one runs; the next question starts another."""
        if self.process is not None:
            self.process.kill()
            self._close()

    def forget(self) -> None:
        """Let go of a process that belongs to the process we were forked from."""
        process, self.process = self.process, None
        if process is not None:
            process.returncode = 0  # not ours to wait for
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _exchange(self, question: bytes) -> bytes:
        process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while question:
                question = question[process.stdin.write(question) :]
            return process.stdout.readline()
        except BrokenPipeError:
            return b""

    def _close(self) -> int:
        """Close the pipes to a process that ends, and return its exit status."""
        process, self.process = self.process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        return process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from verl_ba.paper.scoring.grader import main; main({grader.CPU_SECONDS})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # nothing is left in a buffer that a forked process would write a second time
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return self.process


children = [Child() for _ in range(CHILDREN)]


def ask(*question: object) -> bool:
    """Ask a child that is not busy, the first in the list, so that no more are started than are busy at once."""
    child = next((child for child in children if not child.lock.locked()), None) or random.choice(children)
    with child.lock:
        return child.ask(*question)


def stop() -> None:
    """End all processes of the pool."""
    for child in children:
        with child.lock:
            child.stop()


def _after_fork() -> None:
    inherited, children[:] = children[:], [Child() for _ in children]
    for child in inherited:
        child.forget()


os.register_at_fork(after_in_child=_after_fork)
