"""Run one untrusted Python program on one input, always in a sandbox.

    SANDBOX_FUSION_URL set    a Sandbox Fusion server (the URL of its /run_code, as in verl's reward.sandbox_fusion.url)
    else                      bubblewrap (`bwrap` 0.7 or later, Linux) on this machine

There is no third way: without either, `SandboxError` says what to install. In bubblewrap the program has its own mount,
process, network, IPC and host-name namespaces, an empty environment, no /proc, a read-only root with the standard
library alone, and a small /tmp. What it must print to score is never inside.

The limit on processes (RLIMIT_NPROC) does not bind root, not even root in a user namespace: the kernel exempts the
host's uid 0. So real root makes no user namespace and gives each running sandbox a uid of its own, without any
capability, which the limit does bind; anyone else gets a user namespace, and the limit counts inside it.
"""

import functools
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

URL_VARIABLE = "SANDBOX_FUSION_URL"
SLOTS = min(4, os.cpu_count() or 1)
"""Sandboxes that may run at once in one process (a reward worker); further callers wait. Bubblewrap only."""

WALL_FACTOR = 3  # wall-clock limit over CPU limit: a busy machine must not turn a right program into a wrong one
MEMORY = 1 << 30  # [bytes] of address space per process; verl's reward.sandbox_fusion.memory_limit_mb is the same
PROCESSES = 8  # processes and threads per sandbox
DISK = 64 << 20  # [bytes] of /tmp, and of one file
OUTPUT = 16 << 20  # [bytes] of standard output that are read; a program that prints more is killed

_FIRST_UID = 1 << 27  # far from accounts and from the ranges that containers use
_free_slots: queue.SimpleQueue[int] = queue.SimpleQueue()
for _slot in range(SLOTS):
    _free_slots.put(_slot)


class SandboxError(RuntimeError):
    """The sandbox itself is missing or failed: says nothing about the program, so it must not become a score."""

    ends_run = True  # verl_ba/hooks/reward.py: a training run does not go on without it


@dataclass(frozen=True)
class Outcome:
    """What a program did: `ok` if it ended by itself with status 0 inside all limits; seconds of wall-clock time."""

    ok: bool
    stdout: str
    seconds: float


def run(program: str, stdin: str, cpu_seconds: int) -> Outcome:
    """Run a Python program on this standard input in a sandbox; whatever the program does, this returns.

    cpu_seconds: CPU time per process [s]; the wall-clock limit is WALL_FACTOR times that. Safe to call from any thread.
    SandboxError if the sandbox is missing or fails.
    """
    url = os.environ.get(URL_VARIABLE)
    if url:
        return _run_on_server(url, program, stdin, cpu_seconds)
    _check_bwrap()
    slot = _free_slots.get()
    try:
        return _run_in_bwrap(program, stdin, cpu_seconds, slot)
    finally:
        _free_slots.put(slot)


# --------------------------------------------------------------------------------------------------------------------
# bubblewrap
# --------------------------------------------------------------------------------------------------------------------

# The first thing that runs inside; it is trusted, what it executes last is not.
_PRELUDE = """
import json, os, resource, sys
limits, uid = json.loads(sys.argv[1])
for name, (soft, hard) in limits.items():
    resource.setrlimit(getattr(resource, name), (soft, hard))
if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
sys.argv = ["program.py"]
with open("/program.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program.py", "exec"))
"""


def _run_in_bwrap(program: str, stdin: str, cpu_seconds: int, slot: int) -> Outcome:
    limits = {
        "RLIMIT_CPU": (cpu_seconds, cpu_seconds + 1),
        "RLIMIT_AS": (MEMORY, MEMORY),
        "RLIMIT_NPROC": (PROCESSES, PROCESSES),
        "RLIMIT_FSIZE": (DISK, DISK),
        "RLIMIT_NOFILE": (64, 64),
        "RLIMIT_CORE": (0, 0),
    }
    uid = _FIRST_UID + os.getpid() * SLOTS + slot if _is_real_root() else None
    status_read, status_write = os.pipe()
    with (
        os.fdopen(status_read, "rb") as status,
        _read_only_file(program) as program_file,
        _read_only_file(stdin) as stdin_file,
    ):
        started = time.monotonic()
        command = [
            *_bwrap_command(),
            *("--perms", "0444", "--ro-bind-data", str(program_file.fileno()), "/program.py"),
            *("--remount-ro", "/", "--json-status-fd", str(status_write), "--"),
            *("/python/bin/python", "-I", "-X", "utf8", "-c", _PRELUDE, json.dumps([limits, uid])),
        ]
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[program_file.fileno(), status_write],
                env={},
            )
        finally:
            os.close(status_write)
        deadline = started + WALL_FACTOR * cpu_seconds
        with process:
            try:
                stdout = _read_all(process, deadline)
                process.wait(max(0.0, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, _OutputLimitError):
                process.kill()  # bwrap's end is the end of everything inside (--die-with-parent)
                return Outcome(False, "", time.monotonic() - started)
        # bwrap reports an exit code only for a program that it could start.
        if process.returncode > 0 and b'"exit-code"' not in status.read():
            _probe_bwrap()
            raise SandboxError(f"bwrap could not set up a sandbox (status {process.returncode}), then could. Run again")
    return Outcome(process.returncode == 0, stdout.decode("utf-8", "replace"), time.monotonic() - started)


class _OutputLimitError(Exception):
    pass


def _read_all(process: subprocess.Popen, deadline: float) -> bytes:
    """Standard output to its end; TimeoutExpired at the deadline, _OutputLimitError beyond OUTPUT bytes."""
    assert process.stdout is not None
    chunks, size, descriptor = [], 0, process.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            size += len(chunk)
            if size > OUTPUT:
                raise _OutputLimitError
    raise subprocess.TimeoutExpired(process.args, 0)


def _read_only_file(text: str):
    """A file in memory, opened for reading only: nobody has to feed a pipe, and a program cannot write into it."""
    descriptor = os.memfd_create("verl_ba")
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode("utf-8", "replace"))
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
    for folder in ("/python", "/python/bin", "/usr"):
        command += ["--perms", "0755", "--dir", folder]
    command += ["--ro-bind", interpreter, "/python/bin/python", "--ro-bind", str(libraries), str(inside)]
    for packages in ("site-packages", "dist-packages"):  # what is installed there is none of the program's business
        if (stdlib / packages).is_dir():
            command += ["--tmpfs", str(inside / stdlib.name / packages)]
    for folder in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        command += ["--ro-bind-try", folder, folder]
    command += ["--setenv", "LD_LIBRARY_PATH", str(inside)]
    command += ["--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--perms", "1777", "--size", str(DISK), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return command


@functools.cache
def _check_bwrap() -> None:
    _probe_bwrap()


def _probe_bwrap() -> None:
    """Raise SandboxError with bwrap's own words if an empty program cannot be run."""
    probe = [*_bwrap_command(), "--remount-ro", "/", "--", "/python/bin/python", "-I", "-c", "import json, resource"]
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


def _run_on_server(url: str, program: str, stdin: str, cpu_seconds: int) -> Outcome:
    """One POST of Sandbox Fusion's run_code; the fields are those that verl sends (utils/reward_score/sandbox_fusion)."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util.retry import Retry

    payload = {
        "language": "python",
        "code": program,
        "stdin": stdin,
        "compile_timeout": cpu_seconds,
        "run_timeout": cpu_seconds,
        "memory_limit_MB": MEMORY >> 20,
        "files": {},
        "fetch_files": [],
    }
    retry = Retry(3, backoff_factor=0.5, status_forcelist=[429, 502, 503, 504], allowed_methods=None)
    started = time.monotonic()
    try:
        with requests.Session() as session:
            session.mount(url, HTTPAdapter(max_retries=retry))
            response = session.post(url, json=payload, timeout=(10, 30 + WALL_FACTOR * cpu_seconds))
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
    ok = answer["status"] == "Success" and result.get("status") == "Finished" and result.get("return_code") == 0
    return Outcome(ok, result.get("stdout") or "", time.monotonic() - started)
