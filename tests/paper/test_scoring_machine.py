"""A busy machine: programs that wait for a processor are right or wrong as on an idle one, and a fault is never a score."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from verl_ba.paper import scoring
from verl_ba.paper.scoring import clock, code, sandbox, slots
from verl_ba.paper.scoring.errors import MachineFault, SandboxError

WORK = "import time\nwhile time.process_time() < {seconds}: pass\nprint({result})"


@pytest.fixture(autouse=True)
def no_faults_before():
    sandbox.take_faults()


@pytest.fixture
def own_slots(tmp_path, monkeypatch):
    """Two slots in a folder that no other test uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(slots, "SLOTS", 2)


# --------------------------------------------------------------------------------------------------------------------
# Whose time it is
# --------------------------------------------------------------------------------------------------------------------

ONE_OF_EIGHT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from verl_ba.paper.scoring import sandbox
def answer(n):
    program = "import time\\nwhile time.process_time() < 0.35: pass\\nprint(" + str(n) + ")"
    outcome = sandbox.run(program, "", 1)
    return outcome.ok and outcome.stdout == "1\\n"
with ThreadPoolExecutor(2) as pool:
    print(*map(int, pool.map(answer, [1, 2])), sandbox.take_faults())
"""


def outputs_of_eight(script: str) -> list[str]:
    """What eight processes print that run it at the same time."""
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    return [process.communicate()[0] for process in processes]


@pytest.mark.slow
def test_eight_processes_score_as_one():
    """verl's reward workers: each tries a right and a wrong program, and all of them need three times what a core has."""
    assert outputs_of_eight(ONE_OF_EIGHT) == ["1 0 0\n"] * 8


ONE_OF_EIGHT_SCORES = """
from concurrent.futures import ThreadPoolExecutor
from verl_ba.paper.scoring import code, compute_score
tests = code.encode_tests(["1\\n"], ["2\\n"])
def score(n):
    program = "import time\\nwhile time.process_time() < 2: pass\\nprint(int(input()) + " + str(n) + ")"
    return compute_score("livecodebench", "```python\\n" + program + "\\n```", tests)
with ThreadPoolExecutor(2) as pool:
    print(*pool.map(score, [1, 2] * 8))
"""


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_eight_processes_score_128_slow_programs():
    """Each program computes 2 s of its 6; two cores need over two minutes for all of them."""
    scores = " ".join(outputs_of_eight(ONE_OF_EIGHT_SCORES)).split()
    assert (scores[::2], scores[1::2]) == (["1.0"] * 64, ["0.0"] * 64)


@pytest.fixture
def busy_core():
    """This thread, and what it starts, shares one core with twelve others, each in a session of its own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    burn = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(burn, start_new_session=True) for _ in range(12)]
    yield
    for other in others:
        other.kill()
        other.wait()
    os.sched_setaffinity(0, before)


@pytest.mark.slow
def test_a_program_that_waits_for_a_processor_still_scores(busy_core):
    started = time.monotonic()
    outcome = sandbox.run(WORK.format(seconds=0.3, result=7), "", 1)
    assert (outcome.ok, outcome.stdout) == (True, "7\n")
    assert time.monotonic() - started > sandbox.OWN_FACTOR  # it would have been too late by the wall clock
    assert sandbox.take_faults() == 0


@pytest.mark.slow
@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_that_takes_its_own_time_is_wrong_and_no_fault(program):
    assert not sandbox.run(program, "", 1).ok
    assert sandbox.take_faults() == 0


class Process:
    """A made-up process for the clock: `waited` seconds of waiting in all, `now` on the wall clock."""

    def __init__(self, monkeypatch):
        self.now = self.waited = 0.0
        monkeypatch.setattr(clock.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(clock.Clock, "_look", lambda watch, _: watch._waited.update(thread=self.waited))


@pytest.mark.parametrize(
    ("steps", "waiting_share", "step_seconds", "expected"),
    [
        (4, 0.0, 0.5, None),
        (7, 0.0, 0.5, clock.OwnTimeOutError),  # 3.5 of 3 seconds, all its own
        (7, 0.9, 0.5, None),
        (70, 0.95, 0.5, None),  # 35 seconds, of which 33 waiting
        (70, 0.5, 0.5, clock.OwnTimeOutError),
        (210, 1.0, 0.5, clock.MachineTimeOutError),  # 105 of 100 seconds
        (2, 0.0, 1000.0, None),  # this process was stopped for 2000 seconds: 2 count
    ],
)
def test_the_clock(steps, waiting_share, step_seconds, expected, monkeypatch):
    process = Process(monkeypatch)
    watch = clock.Clock(0, own_limit=3.0, machine_limit=100.0)

    def go_on():
        for _ in range(steps):
            process.now += step_seconds
            process.waited += step_seconds * waiting_share
            watch.check()

    if expected is None:
        go_on()
    else:
        with pytest.raises(expected):
            go_on()


def test_a_kernel_that_does_not_count_waiting_never_takes_a_busy_machine_for_a_slow_program(monkeypatch):
    monkeypatch.setattr(clock, "_WAITING_IS_COUNTED", False)
    process = Process(monkeypatch)
    watch = clock.Clock(0, own_limit=3.0, machine_limit=100.0)
    for _ in range(190):
        process.now += 0.5
        watch.check()


# --------------------------------------------------------------------------------------------------------------------
# Faults of the machine
# --------------------------------------------------------------------------------------------------------------------

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TESTS = code.encode_tests(["3 4"], ["7"])


def scored() -> dict:
    return scoring.compute_named_score("livecodebench", ADD, TESTS)


def fail(monkeypatch, times: int) -> None:
    """Let the machine fail the next programs."""
    left, really = [times], sandbox._run_in_bwrap

    def run(*arguments):
        if left[0]:
            left[0] -= 1
            raise MachineFault("too busy")
        return really(*arguments)

    monkeypatch.setattr(sandbox, "_run_in_bwrap", run)


def test_a_fault_is_tried_again_logged_and_counted_once(monkeypatch, caplog):
    fail(monkeypatch, 1)
    assert scored() == {"score": 1.0, "acc": 1.0, "benchmark": "livecodebench", "machine_faults": 1.0}
    assert "a program could not be run to its end: too busy (attempts left: 1)" in caplog.text
    assert scored()["machine_faults"] == 0.0


def test_a_fault_that_stays_is_an_error_and_counted_with_the_next_score(monkeypatch):
    fail(monkeypatch, 2)
    with pytest.raises(MachineFault, match="too busy"):
        scored()
    assert scored()["machine_faults"] == 2.0


def test_answers_carry_the_same_fields():
    """verl's older trainers take the fields of the first response for those of all."""
    named = scoring.compute_named_score("math500", "\\boxed{7}", "7")
    assert named.keys() == scored().keys()


def test_a_missing_sandbox_ends_a_run_and_a_fault_does_not():
    assert SandboxError("").ends_run
    assert not MachineFault("").ends_run


@pytest.mark.slow
def test_a_machine_that_gives_a_program_no_time_is_at_fault(monkeypatch):
    monkeypatch.setattr(sandbox, "MACHINE_FACTOR", 1)
    monkeypatch.setattr(clock, "_WAITING_IS_COUNTED", False)
    with pytest.raises(MachineFault, match=r"after 1 s it had not had 1 s of CPU time\. The machine is too busy"):
        sandbox.run("import time; time.sleep(1000)", "", 1)
    assert sandbox.take_faults() == 2


def test_a_program_that_is_killed_for_lack_of_memory_is_no_wrong_program(monkeypatch):
    counts = iter(["oom_kill 0", "oom_kill 1", "oom_kill 1", "oom_kill 1"])
    monkeypatch.setattr(sandbox, "_oom_kills", lambda: next(counts))
    killed = "import os; os.kill(os.getpid(), 9)"
    assert not sandbox.run(killed, "", 2).ok  # the second time nothing was killed but by itself
    assert sandbox.take_faults() == 1


def test_the_kernel_counts_its_kills():
    assert sandbox._oom_kills().startswith("oom_kill ")


def test_a_sandbox_whose_bwrap_is_killed_is_tried_again(monkeypatch):
    popen, killed = subprocess.Popen, []

    def start(*arguments, **options):
        process = popen(*arguments, **options)
        if not killed:
            killed.append(process)
            process.kill()
        return process

    monkeypatch.setattr(sandbox.subprocess, "Popen", start)
    assert scored()["score"] == 1.0
    assert len(killed) == 1


def _alive_in_group(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_a_bwrap_that_is_killed_while_it_sets_up_leaves_no_wrong_answer_and_no_process(monkeypatch):
    """Its child waits for ever for a word of its parent, with the program's output open."""
    popen, started = subprocess.Popen, []

    def start(command, **options):
        if not started:
            command, options["env"] = ["bash", "-c", "sleep 1000 & kill -9 $$"], {"PATH": os.environ["PATH"]}
        started.append(popen(command, **options))
        return started[-1]

    monkeypatch.setattr(sandbox.subprocess, "Popen", start)
    monkeypatch.setattr(sandbox, "OWN_FACTOR", 1)
    assert scored()["score"] == 1.0
    assert len(started) == 2
    end = time.monotonic() + 10
    while left := _alive_in_group(started[0].pid):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_an_interrupted_caller_leaves_nothing_behind():
    """As Ctrl-C, or an alarm of the caller."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            sandbox.run("import time; time.sleep(1000)", "", 6)
        assert time.monotonic() - started < 5
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not slots._open_files
    assert scored()["score"] == 1.0


# --------------------------------------------------------------------------------------------------------------------
# Slots
# --------------------------------------------------------------------------------------------------------------------

HOLD = """
import time
from verl_ba.paper.scoring import slots
slots.SLOTS = 2
with slots.one():
    print(1, flush=True)
    time.sleep(60)
"""


def test_slots_are_shared_by_processes_and_those_of_the_dead_are_free(own_slots):
    holders = [subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [holder.stdout and holder.stdout.readline() for holder in holders] == ["1\n", "1\n"]

    def take_one():
        with slots.one():
            pass

    third = threading.Thread(target=take_one, daemon=True)
    third.start()
    third.join(0.5)
    assert third.is_alive()  # it waits
    holders[0].kill()  # no chance to give it back
    third.join(5)
    assert not third.is_alive()
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_threads_hold_no_more_than_there_are(own_slots):
    now, most, guard = [0], [0], threading.Lock()

    def use(_):
        with slots.one():
            with guard:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.02)
            with guard:
                now[0] -= 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(use, range(32)))
    assert most[0] == 2
    assert not slots._open_files


def test_a_forked_child_does_not_keep_its_parents_slot(own_slots, tmp_path):
    reader, writer = os.pipe()
    with slots.one():
        child = os.fork()
        if child == 0:
            os.write(writer, b"!")
            time.sleep(60)
            os._exit(0)
    try:
        assert os.read(reader, 1) == b"!"  # the child runs: what follows a fork in it is done
        for n in range(2):
            with open(tmp_path / f"verl_ba-sandbox-{os.geteuid()}" / f"slot-{n}", "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if the child holds it
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_folder_of_someone_else_is_refused(own_slots, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"verl_ba-sandbox-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match=r"belongs to another user or is a link; remove it.*set TMPDIR"), slots.one():
        pass
