"""The child processes: interruptions, forks, numbers, deaths. A score must never be another question's."""

import os
import signal
import sys
import time

import pytest

from verl_ba.paper.scoring import grader, math, pool
from verl_ba.paper.scoring.errors import GraderError

SUM = ("x+x", "2x", 0.0, [], False)
ENDLESS = ("7", r"\sum_{i=1}^{10^{9}} i^{i}", 0.0, [], False)


@pytest.fixture(autouse=True)
def _no_child_stays():
    math._ask_child.cache_clear()
    yield
    pool.stop()


@pytest.fixture
def child():
    child = pool.Child()
    yield child
    child.stop()


def ask(n: int, right: bool) -> bool:
    """A question that no text settles, different for each n."""
    return math.equal(f"{n}x+{n}", f"{n}(x+{1 if right else 2})")


def wrong_scores(start: int, count: int) -> int:
    return sum(ask(n, n % 2 == 0) is not (n % 2 == 0) for n in range(start, start + count))


class CallersAlarm(BaseException):
    pass


def _raise(*_):
    raise CallersAlarm


def test_an_alarm_of_the_caller_shifts_no_answers():
    before = signal.signal(signal.SIGALRM, _raise)
    interrupted = 0
    try:
        assert ask(1, True)
        for n in range(2):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003)
                math.equal(f"{n}x+5y+{n}", f"{n}(x+1) + 4y + y")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except CallersAlarm:
                interrupted += 1
            assert wrong_scores(100 * n + 2, 10) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 2
    assert not any(child.lock.locked() for child in pool.children)


def test_a_forked_process_starts_its_own_child_and_both_score_right():
    assert ask(1, True)
    first = pool.children[0].process
    assert first is not None
    fork = os.fork()
    if fork == 0:
        wrong = 99
        try:
            wrong = wrong_scores(10, 20)
            own = pool.children[0].process
            if own is None or own.pid == first.pid:
                wrong = 98
            pool.stop()
        finally:
            os._exit(wrong)
    wrong = wrong_scores(40, 20)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert wrong == 0
    assert pool.children[0].process is first
    assert first.poll() is None


def test_a_fork_while_another_thread_asks_finds_its_locks_free():
    with pool.children[0].lock:
        fork = os.fork()
        if fork == 0:
            os._exit(any(child.lock.locked() for child in pool.children))
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0


def test_an_answer_with_another_number_is_an_error_and_not_a_score(child):
    assert child.ask(*SUM)
    child.process.stdin.write(b'[77, "x", "y", 0.0, [], false]\n')  # as if somebody else had used the pipe
    with pytest.raises(RuntimeError, match="answered question 77 instead of 2"):
        child.ask(*SUM)
    assert child.process is None
    assert child.ask(*SUM)


@pytest.mark.parametrize("blocked", [False, True])
def test_the_kernel_ends_a_child_that_is_stuck_and_another_takes_its_place(child, blocked, monkeypatch):
    """Even if the caller ignores and blocks the signal, which its children inherit."""
    monkeypatch.setattr(grader, "CPU_SECONDS", 0.5)
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN if blocked else signal.SIG_DFL)
    if blocked:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    started = time.monotonic()
    try:
        assert not child.ask(*ENDLESS)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.signal(signal.SIGPROF, before)
    assert time.monotonic() - started < 30  # two seconds on a machine that is not busy
    assert child.process is not None  # the next one imports already
    assert child.ask(*SUM)


def test_a_child_that_the_machine_kills_is_started_again(child):
    assert child.ask(*SUM)
    child.process.kill()
    assert child.ask(*SUM)


def test_a_child_that_cannot_start_is_an_error_and_not_a_score(child, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(GraderError, match="ended twice with exit status 1") as raised:
        child.ask(*SUM)
    assert raised.value.ends_run  # no answer can be scored here
