"""The limits of sandbox and grader, each seen from inside: if one of them is taken out or loosened, a test here fails.

The attacks that these limits stop are in test_scoring_code.py and take longer. Programs share one start of the sandbox.
"""

import ctypes
import json
import os
import resource

import pytest

from verl_ba.paper.scoring import math, sandbox

LOOK_AROUND = """
import ctypes, json, os, resource, sys, threading, time
message_queue_key, file_size = json.loads(input())
found = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("NPROC", "FSIZE", "NOFILE", "CORE")}
found["groups"] = os.getgroups()
found["session"] = os.getsid(0)
found["message queue"] = ctypes.CDLL(None).msgget(message_queue_key, 0)
try:
    os.ftruncate(os.open("/tmp/large", os.O_CREAT | os.O_RDWR), file_size)
    found["large file"] = True
except OSError:
    found["large file"] = False
files = []
try:
    while len(files) < 1000:
        files.append(open("/program.py"))
except OSError:
    pass
found["open files"] = len(files)
files.clear()
threads = 1
try:
    while threads < 100:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        threads += 1
except RuntimeError:
    pass
found["threads"] = threads
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def inside():
    """What a program sees that looks around, started by a process with a group and a message queue of its own."""
    libc = ctypes.CDLL(None)
    key = 0x76657200 + os.getpid()
    queue = libc.msgget(key, 0o1666)  # IPC_CREAT, for everyone
    assert queue >= 0
    groups = os.getgroups()
    if sandbox._is_real_root():
        os.setgroups([54321])
    try:
        outcome = sandbox.run(LOOK_AROUND, json.dumps([key, sandbox.DISK + 1]), 6)
    finally:
        if sandbox._is_real_root():
            os.setgroups(groups)
        assert libc.msgctl(queue, 0, None) == 0  # IPC_RMID
    assert outcome.ok
    return json.loads(outcome.stdout)


def test_a_program_gets_at_most_eight_threads(inside):
    assert inside["NPROC"] == [8, 8]
    assert 1 < inside["threads"] <= 8


def test_a_program_gets_no_file_larger_than_64_mib(inside):
    assert inside["FSIZE"] == [64 << 20, 64 << 20]
    assert not inside["large file"]


def test_a_program_gets_at_most_64_open_files(inside):
    assert inside["NOFILE"] == [64, 64]
    assert 32 < inside["open files"] < 64


def test_a_program_leaves_no_core_dump(inside):
    assert inside["CORE"] == [0, 0]


def test_a_program_has_a_session_of_its_own(inside):
    """A session that is led by a process outside has the number 0; such a program could type into our terminal."""
    assert inside["session"] > 0


def test_a_program_cannot_reach_message_queues_outside(inside):
    assert inside["message queue"] == -1


def test_a_program_keeps_none_of_roots_groups(inside):
    assert 54321 not in inside["groups"]
    if sandbox._is_real_root():
        assert inside["groups"] == []


def test_a_program_that_waits_longer_than_its_cpu_time_still_scores():
    """Three times the CPU time may pass on the clock, as it does on a busy machine."""
    outcome = sandbox.run("import time; time.sleep(2.05); print('done')", "", 2)
    assert (outcome.ok, outcome.stdout) == (True, "done\n")


def test_the_grader_may_use_2_gib_of_memory_and_no_more():
    child = math._Child()
    try:
        assert child.ask(["x+x", "2x", 0.0, 0.0])
        assert child._process is not None
        assert resource.prlimit(child._process.pid, resource.RLIMIT_AS) == (2 << 30, 2 << 30)
    finally:
        child.stop()


def test_a_tolerance_is_widened_by_rounding_errors_alone():
    from sympy import Eq, Rational

    from verl_ba.paper.scoring.grader import contradicts_itself, near

    assert near(Rational(100), Rational(101), 0.01, 0.0)
    assert not near(Rational(100), Rational(1010005, 10000), 0.01, 0.0)
    assert not near(Rational(100), Rational(101000001, 1000000), 0.0, 1.0)
    assert not contradicts_itself(Eq(Rational(1, 3), Rational(3333333333333, 10000000000000), evaluate=False))
    assert contradicts_itself(Eq(Rational(1), Rational(100001, 100000), evaluate=False))


def test_an_answer_is_found_before_many_words_of_farewell():
    """RESPONSE_TAIL in numbers: 15,000 characters after the answer are allowed, 25,000 are not."""
    assert math.extract_answer("\\boxed{42}" + " So that is it." * 1000) == "42"
    assert math.extract_answer("\\boxed{42}" + " So that is it." * 1667) is None
