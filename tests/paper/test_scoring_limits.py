"""The limits of sandbox and grader, each seen from inside: if one of them is taken out or loosened, a test here fails.

The attacks that these limits stop are in test_scoring_code.py and take longer. Programs share one start of the sandbox.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import threading
import time

import psutil
import pytest

from verl_ba.paper.scoring import math, sandbox, seccomp

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


@pytest.mark.parametrize("namespace", ["cgroup", "ipc", "mnt", "net", "pid", "uts"])
def test_a_program_has_namespaces_of_its_own(namespace, running):
    """Seen from outside, because the filter of system calls stands in front of some of them."""
    assert os.readlink(f"/proc/{running}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")


@pytest.fixture(scope="module")
def running():
    """The number of a process that is a program in the sandbox."""
    thread = threading.Thread(target=sandbox.run, args=("import time; time.sleep(4)", "", 6))
    thread.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        below = psutil.Process().children(recursive=True)
        found = [p.pid for p in below if p.name() == "python" and not p.children()]
        if found:
            yield found[0]
            break
        time.sleep(0.05)
    else:
        raise AssertionError("no program was started")
    thread.join()


# What a program could hold without these refusals, beside its address space and its /tmp. Each line is tried alone.
UNCOUNTED_MEMORY = {
    "files in memory": "os.memfd_create('x')",
    "System V segments": "call('shmget', 0, 1 << 20, 0o1600)",
    "shared mappings that are let go but for one page": "mmap.mmap(-1, 1 << 20)",
    "other processes": "os.fork()",
}
CALL = """
import ctypes, errno, json, mmap, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
numbers = json.loads(input())
def call(name, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(numbers[name], *arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
"""


@pytest.mark.parametrize("action", UNCOUNTED_MEMORY.values(), ids=UNCOUNTED_MEMORY)
def test_a_program_cannot_hold_memory_that_no_limit_counts(action):
    program = CALL + f"try:\n    {action}\nexcept OSError as error:\n    print(error.errno == errno.ENOSYS)"
    assert sandbox.run(program, json.dumps(numbers()), 2).stdout == "True\n"


def test_a_program_that_holds_all_it_can_stays_below_its_limits():
    """1 GiB of address space and 64 MiB of files, whatever it tries, seen on the machine; memfd_create alone had 2.4 GiB."""
    program = """
import mmap, os
held = []
def keep(n):
    descriptor = os.memfd_create(str(n))
    os.write(descriptor, bytes(32 << 20))
    return descriptor
def let_go_but_for_a_page(n):
    shared = mmap.mmap(-1, 32 << 20)
    shared.write(bytes(32 << 20))
    shared.resize(4096)
    return shared
for way in (keep, let_go_but_for_a_page, lambda n: os.fork() or keep(n)):
    try:
        for n in range(50):
            held.append(way(n))
    except OSError:
        pass
print(len(held))
"""
    assert sandbox.run(program, "", 6).stdout == "0\n"


def numbers() -> dict[str, int]:
    """The system calls of this machine by name, from the kernel's list and not from the filter's."""
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    return {name: both[column] for name, both in KERNEL.items() if both[column] is not None}


# name: (x86_64, aarch64); Linux's syscall_64.tbl and asm-generic/unistd.h
KERNEL = {
    **{"fork": (57, None), "vfork": (58, None), "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186)},
    **{"semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218)},
    **{"keyctl": (250, 219), "io_setup": (206, 0), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40)},
    **{"socket": (41, 198), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    # new ones have the same number everywhere
    **{"io_uring_setup": (425, 425), "fsopen": (430, 430), "pidfd_open": (434, 434), "clone3": (435, 435)},
    **{"memfd_secret": (447, 447), "a call of the future": (600, 600)},
}


def test_each_refused_call_is_refused_by_the_kernel():
    """With arguments that are all 0 the kernel itself answers otherwise, or does it: ENOSYS is the filter's answer."""
    program = (
        CALL
        + """
for name in numbers:
    try:
        call(name, 0, 0, 0, 0, 0)
        print(name, "DID IT", flush=True)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            print(name, errno.errorcode[error.errno], flush=True)
print("done")
"""
    )
    assert sandbox.run(program, json.dumps(numbers()), 2).stdout == "done\n"


def run_filter(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns for one system call: the six instructions of classic BPF that it uses."""
    architecture = architecture or {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    code = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x06:
            return value
        else:
            at += if_true if {0x15: accumulator == value, 0x35: accumulator >= value}[operation] else if_false


ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050026, 0x80000000
THREAD = 0x3D0F00  # the flags with which glibc makes a thread


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_of_each_machine(machine, column):
    for name, both in KERNEL.items():
        if both[column] is not None:
            assert run_filter(machine, both[column]) == REFUSE, name
    clone, mmap, read = [(56, 9, 0), (220, 222, 63)][column]
    assert run_filter(machine, read) == ALLOW
    assert run_filter(machine, clone, THREAD) == ALLOW
    for flags in (0x11, 0x1200011, THREAD | 0x10000000, THREAD | 0x20000):  # fork, glibc's fork, and new namespaces
        assert run_filter(machine, clone, flags) == REFUSE, hex(flags)
    for flags, answer in ((0x22, ALLOW), (0x21, REFUSE), (0x23, REFUSE), (0x01, ALLOW), (0x02, ALLOW)):
        assert run_filter(machine, mmap, 0, 4096, 3, flags) == answer, hex(flags)
    assert run_filter(machine, read, architecture=0x40000003) == KILL  # a 32-bit call


def test_calls_of_the_x32_abi_are_refused():
    assert run_filter("x86_64", 0x40000000 + 319) == REFUSE


def test_another_machine_has_no_filter_and_so_no_sandbox():
    with pytest.raises(sandbox.SandboxError, match="knows x86_64 and aarch64, and this machine is riscv64"):
        seccomp.program("riscv64")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/shm", "/dev/ptmx", "/dev/tty"])
def test_devices_that_hold_memory_or_lead_outside_are_not_there(path):
    assert sandbox.run(f"import os; print(os.path.exists({path!r}))", "", 2).stdout == "False\n"


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
