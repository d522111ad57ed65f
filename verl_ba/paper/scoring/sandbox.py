"""Run one untrusted Python program on one input, always in a sandbox.

    SANDBOX_FUSION_URL set    a Sandbox Fusion server (the URL of its /run_code, as in verl's reward.sandbox_fusion.url)
    else                      bubblewrap (`bwrap` 0.7 or later, Linux) on this machine

There is no third way: without either, `SandboxError` says what to install. In bubblewrap the program has its own mount,
process, network, IPC and host-name namespaces, an empty environment, no /proc, a read-only root with the standard
library and numpy alone, a small /tmp, and a filter of system calls (seccomp.py) under which it stays one process. What it
must print to score is never inside. docs/sandbox.md says what a program may do, and why.

The limit on threads (RLIMIT_NPROC) does not bind root, not even root in a user namespace: the kernel exempts the host's
uid 0. So real root makes no user namespace and gives each running sandbox a uid of its own, without any capability, which
the limit does bind; anyone else gets a user namespace, and the limit counts inside it.
"""

import contextlib
import functools
import importlib.util
import json
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verl_ba.paper.scoring import seccomp, slots
from verl_ba.paper.scoring.clock import TICK, Clock, MachineTimeOutError, OwnTimeOutError
from verl_ba.paper.scoring.errors import MachineFault, SandboxError

__all__ = ["MachineFault", "Outcome", "SandboxError", "run", "take_faults"]

logger = logging.getLogger(__name__)

URL_VARIABLE = "SANDBOX_FUSION_URL"

ATTEMPTS = 2  # how often a program is tried before MachineFault
OWN_FACTOR = 3  # own time, running and sleeping, over CPU limit: a disk may be slow
MACHINE_FACTOR = 100  # elapsed time over CPU limit: a machine that gives a program less than that is at fault
SERVER_FACTOR = 10  # wall-clock limit of a Sandbox Fusion server over CPU limit
MEMORY = 1 << 30  # [bytes] of address space; verl's reward.sandbox_fusion.memory_limit_mb is the same
THREADS = 8  # per sandbox, the first included
DISK = 64 << 20  # [bytes] of /tmp, and of one file
OUTPUT = 16 << 20  # [bytes] of standard output that are read; a program that prints more is killed

_FIRST_UID = 1 << 27  # far from accounts and from the ranges that containers use; there are 2**30 from here on

_faults = 0
_counting = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What a program did: `ok` if it ended by itself with status 0 inside all limits."""

    ok: bool
    stdout: str


def run(program: str, stdin: str, cpu_seconds: int) -> Outcome:
    """Run a Python program on this standard input in a sandbox; whatever the program does, this returns.

    cpu_seconds: CPU time of the program, its threads together [s]. It may also sleep, up to OWN_FACTOR times that; time in
    which it waits for a processor is not its own and does not count. Safe to call from any thread.
    SandboxError if the sandbox is missing or fails. MachineFault, a SandboxError, if the machine could not run the program
    to its end in ATTEMPTS attempts: see `take_faults`.
    """
    url = os.environ.get(URL_VARIABLE)
    if url:
        return _retried(lambda: _run_on_server(url, program, stdin, cpu_seconds))
    _check_bwrap()

    def attempt() -> Outcome:
        with slots.one():
            return _run_in_bwrap(program, stdin, cpu_seconds)

    return _retried(attempt)


def _retried(attempt: Callable[[], Outcome]) -> Outcome:
    global _faults
    for left in reversed(range(ATTEMPTS)):
        try:
            return attempt()
        except MachineFault as fault:
            with _counting:
                _faults += 1
            logger.warning("a program could not be run to its end: %s (attempts left: %d)", fault, left)
            if not left:
                raise
    raise AssertionError("unreachable")


def take_faults() -> int:
    """How often the machine failed a program in this process since the last call; mended by a second try or not."""
    global _faults
    with _counting:
        taken, _faults = _faults, 0
    return taken


# --------------------------------------------------------------------------------------------------------------------
# bubblewrap
# --------------------------------------------------------------------------------------------------------------------

_PACKAGES = "/python/packages"

# The first thing that runs inside; it is trusted, what it executes last is not.
_PRELUDE = f"""
import json, os, resource, sys
limits, uid = json.loads(sys.argv[1])
for name, (soft, hard) in limits.items():
    resource.setrlimit(getattr(resource, name), (soft, hard))
if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
sys.argv = ["program.py"]
sys.path.append("{_PACKAGES}")
with open("/program.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program.py", "exec"))
"""


def _run_in_bwrap(program: str, stdin: str, cpu_seconds: int) -> Outcome:
    limits = {
        "RLIMIT_CPU": (cpu_seconds, cpu_seconds + 1),
        "RLIMIT_AS": (MEMORY, MEMORY),
        "RLIMIT_NPROC": (THREADS, THREADS),
        "RLIMIT_FSIZE": (DISK, DISK),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_CORE": (0, 0),
    }
    uid = _FIRST_UID + secrets.randbelow(1 << 30) if _is_real_root() else None
    oom_kills = _oom_kills()
    status_read, status_write = os.pipe()
    with (
        os.fdopen(status_read, "rb") as status,
        _read_only_file(program.encode("utf-8", "replace")) as program_file,
        _read_only_file(stdin.encode("utf-8", "replace")) as stdin_file,
        _read_only_file(stdin.encode("utf-8", "replace")) as stdin_again,
        _read_only_file(seccomp.program()) as filter_file,
    ):
        command = [
            *_bwrap_command(),
            *("--perms", "0444", "--ro-bind-data", str(program_file.fileno()), "/program.py"),
            *("--perms", "0444", "--ro-bind-data", str(stdin_again.fileno()), "/dev/stdin"),
            *("--seccomp", str(filter_file.fileno())),
            *("--remount-ro", "/", "--json-status-fd", str(status_write), "--"),
            *("/python/bin/python", "-I", "-X", "utf8", "-c", _PRELUDE, json.dumps([limits, uid])),
        ]
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[program_file.fileno(), stdin_again.fileno(), filter_file.fileno(), status_write],
                env={},
                process_group=0,  # so that what is left of a bwrap that was killed can be found
            )
        except OSError as error:
            raise MachineFault(f"bwrap could not be started: {error}") from error
        finally:
            os.close(status_write)
        with process:
            clock = Clock(process.pid, OWN_FACTOR * cpu_seconds, MACHINE_FACTOR * cpu_seconds)
            try:
                stdout = _read_all(process, clock)
                _wait(process, clock)
            except (OwnTimeOutError, _OutputLimitError):
                if (process.poll() or 0) < 0:  # a program cannot reach it, and what it left behind waits for ever
                    raise MachineFault(f"bwrap was killed by signal {-process.returncode}") from None
                return Outcome(False, "")
            except MachineTimeOutError:
                raise MachineFault(
                    f"after {MACHINE_FACTOR * cpu_seconds} s it had not had {cpu_seconds} s of CPU time. The machine is too "
                    "busy: give the reward workers more cores, or run fewer things beside them"
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):  # bwrap's end ends all that is inside (--die-with-parent)
                    os.killpg(process.pid, signal.SIGKILL)
        # bwrap reports an exit code only for a program that it could start.
        if b'"exit-code"' not in status.read():
            _probe_bwrap()
            raise MachineFault(f"bwrap could not set up a sandbox (status {process.returncode}), then could")
    if process.returncode == 128 + 9 and _oom_kills() != oom_kills:
        raise MachineFault(
            "it may have been killed because the machine ran out of memory. Give the reward workers more"
        )
    return Outcome(process.returncode == 0, stdout.decode("utf-8", "replace"))


class _OutputLimitError(Exception):
    pass


def _read_all(process: subprocess.Popen, clock: Clock) -> bytes:
    """Standard output to its end; the clock's errors, _OutputLimitError beyond OUTPUT bytes."""
    assert process.stdout is not None
    chunks, size, descriptor = [], 0, process.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        if poll.poll(TICK * 1000):
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            size += len(chunk)
            if size > OUTPUT:
                raise _OutputLimitError
        clock.check()


def _wait(process: subprocess.Popen, clock: Clock) -> None:
    """Wait for the end of a process whose standard output has ended; the clock's errors."""
    while True:
        try:
            process.wait(TICK)
            return
        except subprocess.TimeoutExpired:
            clock.check()


def _oom_kills() -> str:
    """The kernel's count of processes that it has killed for lack of memory, as a line of /proc/vmstat."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next((line for line in lines if line.startswith("oom_kill ")), "")


def _read_only_file(content: bytes):
    """A file in memory, opened for reading only: nobody has to feed a pipe, and a program cannot write into it."""
    descriptor = os.memfd_create("verl_ba")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        return open(f"/proc/self/fd/{descriptor}", "rb")


@functools.cache
def _bwrap_command() -> list[str]:
    """Everything that is the same for each program."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(
            "programs are run only in a sandbox, and there is none: `bwrap` is not on the PATH and "
            f"{URL_VARIABLE} is not set. Install bubblewrap (apt-get install bubblewrap), or start a Sandbox Fusion "
            f"server and set {URL_VARIABLE}=http://HOST:8080/run_code"
        )
    stdlib = Path(os.__file__).parent
    libraries = stdlib.parent  # PREFIX/lib; the interpreter finds its own files from PREFIX/bin
    inside = Path("/python", libraries.name)
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    command = [bwrap, "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if _is_real_root():
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # for the prelude, which then has none
    else:
        command += ["--unshare-all"]
    for folder in ("/dev", "/python", "/python/bin", _PACKAGES, "/usr"):
        command += ["--perms", "0755", "--dir", folder]
    command += ["--ro-bind", interpreter, "/python/bin/python", "--ro-bind", str(libraries), str(inside)]
    # What is installed there is none of the program's business; the last is Debian's.
    for packages in (stdlib / "site-packages", stdlib / "dist-packages", libraries / "python3" / "dist-packages"):
        if packages.is_dir():
            empty = str(inside / packages.relative_to(libraries))
            command += ["--perms", "0755", "--tmpfs", empty, "--remount-ro", empty]
    command += _numpy()
    for folder in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        command += ["--ro-bind-try", folder, folder]
    command += ["--setenv", "LD_LIBRARY_PATH", str(inside), "--setenv", "OPENBLAS_NUM_THREADS", "1"]
    command += ["--setenv", "OMP_NUM_THREADS", "1", "--setenv", "MKL_NUM_THREADS", "1"]
    # Not bwrap's --dev: its /dev/stdin leads into /proc, which is not there, and a shared mapping of /dev/zero is memory
    # that no limit counts.
    for name in ("null", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--perms", "1777", "--size", str(DISK), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return command


def _numpy() -> list[str]:
    """bwrap's arguments that put this environment's numpy, and the libraries of its wheel, into _PACKAGES."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        raise SandboxError("LiveCodeBench offers numpy to programs, and it is not installed: pip install numpy")
    package = Path(spec.origin).parent
    libraries = package.with_name("numpy.libs")
    folders = [package, libraries] if libraries.is_dir() else [package]
    return [word for folder in folders for word in ("--ro-bind", str(folder), f"{_PACKAGES}/{folder.name}")]


@functools.cache
def _check_bwrap() -> None:
    _probe_bwrap()


_PROBE = f"import json, resource, sys; sys.path.append('{_PACKAGES}'); import numpy"


def _probe_bwrap() -> None:
    """Raise SandboxError with bwrap's own words if an empty program cannot be run."""
    probe = [*_bwrap_command(), "--remount-ro", "/", "--", "/python/bin/python", "-I", "-c", _PROBE]
    done = subprocess.run(probe, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return
    reason = done.stderr.strip() or f"exit status {done.returncode}, no message"
    if "namespace" in reason or "uid map" in reason or "Operation not permitted" in reason:
        advice = (
            "This kernel or container refuses the namespaces. Allow them (sysctl kernel.unprivileged_userns_clone=1; on "
            "Ubuntu 24.04 kernel.apparmor_restrict_unprivileged_userns=0; in Docker --cap-add SYS_ADMIN --security-opt "
            f"seccomp=unconfined --security-opt apparmor=unconfined), or set {URL_VARIABLE} to a Sandbox Fusion server"
        )
    else:
        advice = (
            f"bubblewrap 0.7 or later is needed (bwrap --version); or set {URL_VARIABLE} to a Sandbox Fusion server"
        )
    raise SandboxError(f"bwrap is installed but cannot run a program: {reason}. {advice}")


@functools.cache
def _is_real_root() -> bool:
    """uid 0 of the machine, not of a container's user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


# --------------------------------------------------------------------------------------------------------------------
# Sandbox Fusion
# --------------------------------------------------------------------------------------------------------------------


# A server's own limit is on the wall clock, so the limit on CPU time travels with the program.
_ON_SERVER = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({cpu_seconds}, {cpu_seconds} + 1))
exec(compile({program!r}, "program.py", "exec", dont_inherit=True))
"""


def _run_on_server(url: str, program: str, stdin: str, cpu_seconds: int) -> Outcome:
    """One POST of Sandbox Fusion's run_code; the fields are those that verl sends (utils/reward_score/sandbox_fusion)."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util.retry import Retry

    wall_seconds = SERVER_FACTOR * cpu_seconds
    payload = {
        "language": "python",
        "code": _ON_SERVER.format(program=program, cpu_seconds=cpu_seconds),
        "stdin": stdin,
        "compile_timeout": wall_seconds,
        "run_timeout": wall_seconds,
        "memory_limit_MB": MEMORY >> 20,
        "files": {},
        "fetch_files": [],
    }
    retry = Retry(3, backoff_factor=0.5, status_forcelist=[429, 502, 503, 504], allowed_methods=None)
    try:
        with requests.Session() as session:
            session.mount(url, HTTPAdapter(max_retries=retry))
            response = session.post(url, json=payload, timeout=(10, 30 + 2 * wall_seconds))
            response.raise_for_status()
            answer = response.json()
    except requests.RequestException as error:
        raise SandboxError(
            f"{URL_VARIABLE}={url}: {error}. Expected a Sandbox Fusion server's /run_code; start it, or unset the "
            "variable to use bubblewrap"
        ) from error
    if answer.get("status") not in ("Success", "Failed"):
        raise SandboxError(f"{URL_VARIABLE}={url}: status {answer.get('status')!r}, message {answer.get('message')!r}")
    result = answer.get("run_result") or {}
    if result.get("status") == "TimeLimitExceeded":
        raise MachineFault(
            f"{URL_VARIABLE}={url}: after {wall_seconds} s of wall-clock time it had not had {cpu_seconds} s of CPU time"
        )
    ok = answer["status"] == "Success" and result.get("status") == "Finished" and result.get("return_code") == 0
    return Outcome(ok, result.get("stdout") or "")
