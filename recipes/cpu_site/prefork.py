"""One process imports the large libraries; a run's processes are forks of it, so none of them imports anything twice.

A run of verl starts a dozen Python processes, and each spends most of its start on the same imports: torch, transformers,
vLLM. `with serve() as server:` starts a server that imports them. Where VARIABLE is its path, sitecustomize.py hands
each process of a run (arguments, environment, folder and open files) to the server, which forks, and the fork runs the
very module or script that was asked for. The process that asked waits, passes signals on and ends with the fork's exit
status; if it is killed, so is the fork. verl, verl_ba and Ray are not imported here: each process imports them itself, as
its environment says. Without the server everything starts as usual.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import IO

VARIABLE = "VERL_CPU_PREFORK"  # the path of the server's socket
ALSO = "VERL_CPU_PREFORK_ALSO"  # further names of programs to fork, with commas; tests name theirs
LIBRARIES = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.generation",
    "peft",
    "datasets",
    "hydra",
    "tensordict",
    "torchdata.stateful_dataloader",
    "fastapi",
    "uvicorn",
    "tensorboard",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
)
STARTED_BY_A_RUN = ("verl.trainer.", "verl.experimental.", "recipes.plan", "default_worker.py", "multiprocessing.spawn")
DESCRIPTORS = 250  # a message takes 253 at most


# ---- in a process that was just started


def ask(path: str) -> None:
    """Let the server run this process's program; does not return, unless the program is none of a run's."""
    arguments = sys.orig_argv[1:]
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        arguments = arguments[1:]  # -u, -B, …
    program = arguments[:2] if arguments[:1] in (["-c"], ["-m"]) else arguments[:1]
    names = [*STARTED_BY_A_RUN, *filter(None, os.environ.get(ALSO, "").split(","))]
    if not any(name in part for name in names for part in program):
        return
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        return  # the server is gone: start as usual
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if file != connection.fileno() and _inherited(file)][:DESCRIPTORS]
    request = {
        "arguments": arguments,
        "environment": {**os.environ},
        "folder": os.getcwd(),
        "path": sys.path,
        "files": files,
    }
    text = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([len(text).to_bytes(8, "big")], rights)
    connection.sendall(text)
    answers = connection.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    for file in files[3:]:
        os.close(file)  # a pipe ends when the program closes it
    status = int(answers.readline() or 1 << 8)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:  # which has no handler; an error here would run the program a second time
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _inherited(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:  # the listing's own
        return False


# ---- the server


class Server:
    """A server that is starting: `path` of its socket, which VARIABLE names in a run's environment.

    A program that starts before the server listens starts as usual.
    """

    def __init__(self, path: str, process: subprocess.Popen, log: IO[str]):
        self.path, self._process, self._log = path, process, log

    def listening(self) -> str:
        """Wait until it listens; the path. RuntimeError, with its output, if it ended before."""
        while not os.path.exists(self.path):
            if self._process.poll() is not None:
                self._log.seek(0)
                raise RuntimeError(f"{__file__}: the server ended before it listened:\n{self._log.read()[-4000:]}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        return self.path


@contextlib.contextmanager
def serve():
    """Start the server, a `Server`, and end it at the end."""
    with tempfile.TemporaryDirectory(prefix="prefork-") as folder:
        path = os.path.join(folder, "socket")
        # What launch.sh sets for runs on the CPU and a library reads when it is imported.
        fixed = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        fixed |= {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
        fixed |= {"VERL_PLATFORM": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        fixed |= {"PYTHONPATH": str(Path(__file__).parent), "RAY_AUTH_MODE": "disabled", "VLLM_NO_USAGE_STATS": "1"}
        log = (Path(folder) / "log").open("w+")
        server = subprocess.Popen(
            [sys.executable, __file__, path],
            env={**os.environ, **fixed},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Server(path, server, log)
        finally:
            server.terminate()
            server.wait()
            log.close()


def main(path: str) -> None:
    # Ray is not imported here: its C++ part reads the environment, once, when it is loaded.
    sys.modules["ray"] = None  # pyright: ignore[reportArgumentType]
    for library in LIBRARIES:
        try:
            importlib.import_module(library)
        except ImportError as error:  # one that this environment lacks: whoever needs it will say so
            print(f"{library}: {error}", flush=True)
    del sys.modules["ray"]
    loaded = [name for name in sys.modules if name.split(".")[0] in ("verl", "verl_ba", "ray")]
    assert not loaded, f"each process must import these itself: {loaded}"
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    parent = os.getppid()
    listener.settimeout(1.0)
    while os.getppid() == parent:  # whoever started the server may be killed
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # no zombies
                pass
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            # Between server and program, one process for each: it knows when either end is gone.
            listener.close()
            os.setsid()
            _run(connection)


def _run(connection: socket.socket) -> None:
    start, rights, *_ = connection.recvmsg(8, socket.CMSG_SPACE(DESCRIPTORS * 4))
    text = connection.makefile("rb").read(int.from_bytes(start, "big"))
    request = json.loads(text)
    numbers = array.array("i")
    for _, _, data in rights:
        numbers.frombytes(data)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _become(request, list(numbers), connection)
    for number in numbers:
        os.close(number)
    connection.sendall(b"%d\n" % pid)

    def watch() -> None:
        if not connection.recv(1):  # whoever asked was killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % status)
    os._exit(0)


def _become(request: dict, received: list[int], connection: socket.socket) -> None:
    """Run what was asked for as if this process had been started for it."""
    import fcntl

    connection.close()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for file in received]
    os.closerange(3, 512)
    for file, wanted in zip(high, request["files"], strict=True):
        os.dup2(file, wanted)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", 1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    import numpy

    numpy.random.seed()
    kind, *arguments = request["arguments"]
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = program
    if kind == "-m":
        sys.argv[:] = ["-m", *arguments[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[0])  # what `python -m` calls  # pyright: ignore[reportAttributeAccessIssue]
    elif kind == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        exec(arguments[0], program.__dict__)
    else:
        sys.argv[:] = [kind, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")
    sys.exit(0)  # through the interpreter's end, with its exit handlers


if __name__ == "__main__":
    main(sys.argv[1])
