"""LiveCodeBench: comparison of outputs, and programs that try to get out of the sandbox or to take it down.

Without bubblewrap these tests fail, they are not skipped: `bash requirements/system.sh` installs it.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import psutil
import pytest

from verl_ba.paper.scoring import code, compute_score, sandbox, slots

pytestmark = pytest.mark.slow

STDIN_TESTS = code.encode_tests(["3 4\n", "10 -2\n"], ["7\n", "8\n"])
CALL_TESTS = code.encode_tests(["[1, 2]\n3", "[]\n0"], ["[1, 2, 3]", "[0]"], "append")
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def response(program: str) -> str:
    return f"First I think.\n\n```python\n{program}\n```\nDone."


def score(program: str, tests: str = STDIN_TESTS) -> float:
    return compute_score("livecodebench", response(program), tests)


# --------------------------------------------------------------------------------------------------------------------
# The tests of a problem
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [1, 5000])
def test_encoded_tests_come_back_the_same(repeat):
    inputs, outputs = ["1 é\n", '"\\'] * repeat, ["x", "∞"] * repeat
    encoded = code.encode_tests(inputs, outputs, "f")
    assert code.decode_tests(encoded) == (inputs, outputs, "f")
    assert encoded == code.encode_tests(inputs, outputs, "f")
    assert len(encoded) < 5000  # long tests are compressed


@pytest.mark.parametrize("tests", [([], [], None), (["1"], [], None)])
def test_tests_without_outputs_are_refused(tests):
    with pytest.raises(ValueError, match="as many inputs as outputs and at least one"):
        code.encode_tests(*tests)


def test_tests_that_are_not_strings_are_refused():
    with pytest.raises(TypeError, match="output 1 is a int, expected a string"):
        code.encode_tests(["1", "2"], ["1", 2])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("text", ["7", "{}", "zlib:AAAA", "[1, 2]", '{"inputs": [], "outputs": [], "fn_name": null}'])
def test_a_ground_truth_that_holds_no_tests_is_a_fault_of_the_data(text):
    with pytest.raises(ValueError, match=r"ground truth of livecodebench: expected what .*encode_tests returns"):
        compute_score("livecodebench", response(ADD), text)


def test_an_expected_value_that_is_no_json_is_a_fault_of_the_data():
    with pytest.raises(ValueError, match="the output of a functional test must be JSON"):
        score("def f(a): return a", code.encode_tests(["1"], ["[1,"], "f"))


# --------------------------------------------------------------------------------------------------------------------
# The program of a response
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nfirst\n```\n```python\nlast\n```", "last\n"),
        ("```py\nlast\n```\nIt prints\n```\n7\n```", "last\n"),
        ("```\nplain\n```", "plain\n"),
        ("```cpp\nint main\n```", None),
        ("  ```python\n  if x:\n    y\n  ```", "if x:\n  y\n"),
        ("```python\r\nlast\r\n```\r\n", "last\n"),
        ("```python\nfirst\n```\n```python\ncut off", "first\n"),
        ("```python\ncut off", None),
        ("print(7)", None),
        ("", None),
    ],
)
def test_the_last_closed_python_block_is_the_program(text, expected):
    assert code.extract_program(text) == expected


def test_a_response_without_a_program_scores_0():
    assert compute_score("livecodebench", "print(7)", STDIN_TESTS) == 0.0


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (ADD, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", 1.0),
        ("print(sum(map(int, open(0).read().split())))", 1.0),
        ("from __future__ import annotations\nif __name__ == '__main__':\n    " + ADD.replace("\n", "\n    "), 1.0),
        ("print(sum(map(int, input().split())), end='.0\\n\\n')", 1.0),
        (ADD + "\nexit()", 1.0),
        (ADD + "\nraise SystemExit(3)", 1.0),
        (ADD + "\n1 / 0", 0.0),
        (ADD.replace("+", "-"), 0.0),
        ("print(7)", 0.0),
        ("", 0.0),
        ("this is no Python", 0.0),
        ("print('\x00')", 0.0),
    ],
)
def test_a_program_that_reads_standard_input(program, expected):
    assert score(program) == expected


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("class Solution:\n    def append(self, a: List[int], b: int):\n        return a + [b]", 1.0),
        ("def append(a, b):\n    return tuple(a) + (b,)", 1.0),
        ("def append(a, b):\n    print('debugging')\n    return a + [b]", 1.0),
        ("def append(a, b):\n    return a", 0.0),
        ("def append(a, b):\n    print([1, 2, 3])", 0.0),
        ("def prepend(a, b):\n    return a + [b]", 0.0),
        ("def append(a, b):\n    return {1, 2}", 0.0),
    ],
)
def test_a_program_that_is_called(program, expected):
    assert score(program, CALL_TESTS) == expected


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("7", "7\n", True),
        (" 1  2 \n3\n\n", "1  2\n3", True),
        ("1 2", "1  2", True),
        ("0.50", "0.5", True),
        ("1e3", "1000", True),
        ("50000000000000001", "50000000000000000", False),
        ("0.5000001", "0.5", False),
        ("1\n2", "1 2", False),
        ("1", "1\n2", False),
        ("1\n2", "1", False),
        ("yes", "YES", False),
        ("", "0", False),
        ("sNaN", "1", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_line_by_line_and_numbers_as_decimals(got, expected, same):
    assert code._same_output(got, expected) is same


def test_it_stops_at_the_first_failure(monkeypatch):
    started = []
    run = sandbox.run
    monkeypatch.setattr(sandbox, "run", lambda *arguments: started.append(arguments) or run(*arguments))
    assert score("print(7)", code.encode_tests(["", "", ""], ["7", "8", "7"])) == 0.0
    assert len(started) == 2


# --------------------------------------------------------------------------------------------------------------------
# Programs that mean harm. Each prints "SAFE" only where it was kept out; after each, a good program still scores.
# --------------------------------------------------------------------------------------------------------------------

REPOSITORY = Path(__file__).resolve().parents[2]


def attempt(program: str, cpu_seconds: int = 2) -> sandbox.Outcome:
    outcome = sandbox.run(program, "", cpu_seconds)
    assert score(ADD) == 1.0
    return outcome


def command_lines() -> str:
    """Of every process of the machine."""
    return "\n".join(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize(
    "action",
    [
        "os.fork()",
        "os.posix_spawn(sys.executable, ['python', '-c', ''], {})",
        "subprocess.run([sys.executable, '-c', ''])",
        "os.popen('true')",
        "multiprocessing.Process(target=print).start()",
    ],
)
def test_a_program_is_one_process(action):
    """LiveCodeBench's runner takes os.fork and subprocess.Popen away as well."""
    program = f"""
import multiprocessing, os, subprocess, sys
try:
    {action}
    print("DID IT")
except OSError:
    print("SAFE")
"""
    assert attempt(program).stdout == "SAFE\n"


THREAD_BOMB = """
import threading, time
started = 1
try:
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
print(started, flush=True)
import os; os._exit(0)
"""


def test_a_thread_bomb_is_held_to_a_few_threads():
    assert 1 < int(attempt(THREAD_BOMB).stdout) <= sandbox.THREADS


def test_two_programs_at_once_do_not_share_the_limit_on_threads():
    program = """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(1,)) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: sandbox.run(program, "", 4), range(2)))
    assert [outcome.ok for outcome in outcomes] == [True, True]


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/shadow", "/etc/passwd", "/root", "/home", "/var", "/run", "/sys", "/dev/mem", "/proc/self/environ"),
        *(str(REPOSITORY), __file__, str(Path.home()), sys.prefix, os.path.dirname(pytest.__file__)),
    ],
)
def test_files_outside_cannot_be_read(path):
    program = f"""
import os
try:
    os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read()
    print("READ")
except OSError:
    print("SAFE")
"""
    assert attempt(program).stdout == "SAFE\n"


def test_secrets_of_the_environment_are_not_inside(monkeypatch):
    monkeypatch.setenv("API_KEY", "do-not-tell")
    assert "do-not-tell" in subprocess.run(["env"], capture_output=True, text=True).stdout  # it would be inherited
    outcome = attempt("import os; print(os.environ)")
    assert outcome.ok
    assert "do-not-tell" not in outcome.stdout


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0verl-ba-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        port = server.getsockname()[1]
        program = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, {name!r})):
    try:
        socket.socket(family).connect(address)
        print("CONNECTED", address)
    except OSError:
        print("SAFE")
"""
        socket.create_connection(("127.0.0.1", port)).close()  # from outside it is reachable
        assert attempt(program).stdout.split() == ["SAFE"] * 2


def test_endless_output_is_cut_and_the_program_killed():
    started = time.monotonic()
    outcome = attempt("while True: print('7' * 100000)", 20)
    assert not outcome.ok
    assert time.monotonic() - started < 20
    assert not attempt("import sys\nwhile True: print('7' * 100000, file=sys.stderr)", 1).ok
    assert "bwrap" not in [child.name() for child in psutil.Process().children(recursive=True)]


def test_a_memory_hog_gets_a_memory_error():
    program = "try:\n    x = bytearray(2 << 30)\n    print('GOT IT')\nexcept MemoryError:\n    print('SAFE')"
    assert attempt(program).stdout == "SAFE\n"
    assert not attempt("x = []\nwhile True: x.append(bytearray(1 << 20))").ok


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)", "input(); 9 ** 9 ** 9"])
def test_an_endless_program_is_ended(program):
    started = time.monotonic()
    assert not sandbox.run(program, "\n", 1).ok
    assert time.monotonic() - started < sandbox.OWN_FACTOR + 5
    assert score(ADD) == 1.0


@pytest.mark.parametrize(
    "target", ["-1", "os.getppid()", "1", str(os.getpid()), "0"], ids=["all", "parent", "init", "test", "group"]
)
@pytest.mark.parametrize("signal", [9, 19])
def test_it_cannot_kill_or_stop_anything_outside(target, signal):
    bystander = subprocess.Popen(["sleep", "60"])
    attempt(f"import os\nos.kill({target}, {signal})", 1)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


@pytest.mark.parametrize(
    "folder", ["/", "/dev", "/dev/shm", "/usr/lib", "/python", "/python/lib", "/etc", str(REPOSITORY)]
)
def test_nothing_can_be_written_outside_its_tmp(folder):
    program = (
        f"try:\n    open({folder + '/verl-ba-was-here'!r}, 'w')\n    print('WROTE')\nexcept OSError:\n    print('SAFE')"
    )
    assert attempt(program).stdout == "SAFE\n"


def test_it_sees_no_process_outside():
    program = f"""
import os
try:
    os.kill({os.getpid()}, 0)
except ProcessLookupError:
    print("SAFE")
"""
    assert attempt(program).stdout == "SAFE\n"


def test_its_tmp_is_small_and_gone_afterwards():
    program = f"""
import os
written = 0
try:
    for n in range(10):
        with open(f"/tmp/{{n}}", "wb") as file:
            for _ in range({sandbox.DISK >> 21}):
                written += file.write(bytes(1 << 20))
except OSError:
    pass
print(written)
"""
    assert 0 < int(attempt(program).stdout) <= sandbox.DISK
    assert attempt("import os; print(os.listdir('/tmp'))").stdout == "[]\n"


def test_what_it_must_print_is_nowhere_inside():
    secret = "98765432123456789"
    program = """
import gc, os, sys
for folder in ("/tmp", "/dev/shm", "/program.py", "/python/bin", "/run", "/var"):
    for root, _, names in os.walk(folder):
        for name in names:
            if os.path.getsize(f"{root}/{name}") < 1 << 20:
                print(open(f"{root}/{name}", errors="replace").read())
print(open("/program.py").read(), sys.argv, sys.orig_argv, os.environ, globals())
for descriptor in range(3, 64):
    try:
        print(os.pread(descriptor, 1 << 20, 0))
    except OSError:
        pass
frame = sys._getframe()
while frame:
    print(frame.f_locals, frame.f_globals)
    frame = frame.f_back
print([x for x in gc.get_objects() if isinstance(x, (str, list, dict))])
"""
    seen = []
    run = sandbox.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "run", lambda *arguments: seen.append(run(*arguments)) or seen[-1])
        assert score(program, code.encode_tests(["input-that-is-there"], [secret])) == 0.0
    assert seen[0].ok
    assert "gc.get_objects" in seen[0].stdout  # it did look around
    assert secret not in seen[0].stdout


def test_a_thread_that_is_left_behind_dies():
    program = "import os, threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()\nos._exit(0)"
    assert attempt(program).ok
    assert "bwrap" not in [child.name() for child in psutil.Process().children(recursive=True)]


def test_closing_its_output_does_not_help_a_program_to_hang():
    started = time.monotonic()
    assert not attempt("import os, time\nprint(7, flush=True)\nos.close(1); os.close(2)\ntime.sleep(1000)", 1).ok
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("ending", ["os._exit(1)", "os.abort()", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_the_right_output_with_a_bad_end_scores_0(ending):
    assert score(f"import os, sys\n{ADD}\nsys.stdout.flush()\n{ending}") == 0.0
    assert score(ADD) == 1.0


def test_it_has_no_privileges_and_cannot_raise_its_limits():
    program = """
import os, resource
def kept_out(action):
    try:
        action()
        print("DID IT", action.__code__.co_consts)
    except (OSError, ValueError):
        print("SAFE")
kept_out(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (10000, 10000)))
kept_out(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
kept_out(lambda: os.setuid(0) if os.getuid() else os.listdir("/nowhere"))
kept_out(lambda: os.chroot("/tmp"))
kept_out(lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0)))
"""
    assert attempt(program).stdout.split() == ["SAFE"] * 5


# --------------------------------------------------------------------------------------------------------------------
# Many at once; no sandbox; Sandbox Fusion
# --------------------------------------------------------------------------------------------------------------------


def test_many_threads_wait_for_a_slot_and_get_their_own_scores():
    def one(n: int) -> float:
        return score(f"print(int(input().split()[0]) + {n})", code.encode_tests(["1 0"], [str(1 + n + n % 2)]))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [1.0, 0.0] * 8
    assert not slots._open_files


@pytest.fixture
def fake_bwrap(tmp_path, monkeypatch):
    """A `bwrap` that says this and fails; everything that was found out about the real one is forgotten."""

    def install(words: str | None) -> None:
        if words is not None:
            (tmp_path / "bwrap").write_text(f"#!/bin/sh\necho {words!r} >&2\nexit 1\n")
            (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        sandbox._bwrap_command.cache_clear()
        sandbox._check_bwrap.cache_clear()

    yield install
    sandbox._bwrap_command.cache_clear()
    sandbox._check_bwrap.cache_clear()


def test_without_a_sandbox_the_error_says_what_to_install(fake_bwrap):
    fake_bwrap(None)
    with pytest.raises(sandbox.SandboxError, match=r"apt-get install bubblewrap.*SANDBOX_FUSION_URL="):
        score(ADD)


def test_a_kernel_that_refuses_namespaces_is_named(fake_bwrap):
    fake_bwrap("bwrap: Creating new namespace failed: Operation not permitted")
    with pytest.raises(sandbox.SandboxError, match=r"Creating new namespace failed.*refuses the namespaces"):
        score(ADD)


def test_an_old_bwrap_is_named(fake_bwrap):
    fake_bwrap("bwrap: Unknown option --size")
    with pytest.raises(sandbox.SandboxError, match=r"Unknown option --size\. bubblewrap 0\.7 or later"):
        score(ADD)


def test_a_sandbox_that_fails_later_is_an_error_and_not_a_score(fake_bwrap):
    assert score(ADD) == 1.0
    sandbox._check_bwrap()
    checked = sandbox._check_bwrap
    fake_bwrap("bwrap: Can't mount tmpfs: No space left on device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_check_bwrap", lambda: checked)
        with pytest.raises(sandbox.SandboxError, match="No space left on device"):
            score(ADD)


def test_someone_who_is_not_root_gets_the_same_sandbox():
    """The user namespace of ordinary users; the rest of this file runs as whoever runs it."""
    if os.geteuid() != 0:
        assert "--unshare-all" in sandbox._bwrap_command()
        return
    script = f"""
import os
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
from verl_ba.paper.scoring import sandbox
assert "--unshare-all" in sandbox._bwrap_command()
threads = '''{THREAD_BOMB}'''
for folder in ("/python/lib/python3.11/site-packages", "/python/lib/python3.11/dist-packages", "/dev", "/"):
    assert not sandbox.run(f"open('{{folder}}/x', 'w')", "", 2).ok
print(sandbox.run("import numpy; print(7)", "", 2).stdout, sandbox.run(threads, "", 2).stdout)
"""
    python = "/usr/bin/python3"  # nobody may not execute an interpreter in root's home
    python = python if os.access(python, os.X_OK) else os.path.realpath(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(REPOSITORY / "verl_ba", Path(folder, "verl_ba"))
        for package in ("numpy", "numpy.libs"):
            source = Path(numpy.__file__).parents[1] / package
            if source.is_dir():
                shutil.copytree(source, Path(folder, package))
        os.chmod(folder, 0o755)
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": folder}
        done = subprocess.run([python, "-c", script], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seven, threads = map(int, done.stdout.split())
    assert seven == 7
    assert 1 < threads <= sandbox.THREADS


class FusionServer(BaseHTTPRequestHandler):
    """Sandbox Fusion's run_code as far as it is used; `answer` decides."""

    requests: list[dict]
    answer: staticmethod

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(request)
        status, body = type(self).answer(request)
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def fusion(monkeypatch):
    class Handler(FusionServer):
        pass

    Handler.requests, Handler.answer = [], staticmethod(_run_here)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("SANDBOX_FUSION_URL", f"http://127.0.0.1:{server.server_port}/run_code")
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


def _run_here(request: dict) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", request["code"]], input=request["stdin"], capture_output=True, text=True
    )
    status = "Success" if done.returncode == 0 else "Failed"
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return 200, {"status": status, "message": "", "run_result": result}


def test_a_sandbox_fusion_server_scores_the_same(fusion, fake_bwrap):
    fake_bwrap("bwrap must not be used")
    assert score(ADD) == 1.0
    assert score(ADD.replace("+", "-")) == 0.0
    assert score("1 / 0") == 0.0
    assert score("def append(a, b):\n    print('debugging')\n    return a + [b]", CALL_TESTS) == 1.0
    first = fusion.requests[0]
    assert first["language"] == "python"
    assert first["stdin"] == "3 4\n"
    assert first["run_timeout"] == sandbox.SERVER_FACTOR * code.TEST_SECONDS
    assert "7" not in first["code"].replace(ADD, "")  # what it must print is not sent


def test_a_time_limit_on_the_server_is_tried_again_and_then_no_score(fusion):
    late = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None, "stdout": "7"}}
    fusion.answer = staticmethod(lambda _: (200, late))
    sandbox.take_faults()
    with pytest.raises(sandbox.MachineFault, match="after 60 s of wall-clock time"):
        score(ADD)
    assert sandbox.take_faults() == 2 == len(fusion.requests)


def test_the_limit_on_cpu_time_travels_to_the_server(fusion):
    assert sandbox.run("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", "", 3).stdout == "(3, 4)\n"


def test_a_busy_server_is_asked_again(fusion):
    fusion.answer = staticmethod(lambda request: (503, {}) if len(fusion.requests) == 1 else _run_here(request))
    assert score(ADD) == 1.0
    assert len(fusion.requests) == 3


@pytest.mark.parametrize("answer", [(500, {}), (200, {"status": "SandboxError", "message": "no disk"})])
def test_a_server_that_fails_is_an_error_and_not_a_score(fusion, answer):
    fusion.answer = staticmethod(lambda _: answer)
    with pytest.raises(sandbox.SandboxError, match=r"SANDBOX_FUSION_URL=http://127.0.0.1:\d+/run_code: "):
        score(ADD)


def test_a_server_that_is_not_there_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("SANDBOX_FUSION_URL", "http://127.0.0.1:9/run_code")
    with pytest.raises(sandbox.SandboxError, match=r"127\.0\.0\.1:9/run_code.*start it, or unset the variable"):
        score(ADD)


def test_the_script_for_system_packages_installs_nothing_where_bwrap_is():
    done = subprocess.run(["bash", str(REPOSITORY / "requirements" / "system.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
