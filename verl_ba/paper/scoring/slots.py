"""At most so many sandboxes at once on a machine, over all processes of a user: a locked file for each.

verl starts eight reward workers on a node by default, and each scores in threads; what they may run at once is the
machine's business and not one worker's. The kernel unlocks a file when its process ends, however it ends. Whoever finds no
slot waits in one queue, in the order of coming.
"""

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_ba.paper.scoring.errors import SandboxError

SLOTS = min(32, len(os.sched_getaffinity(0)))
"""One per core, because programs compute; at most 32, because each may take 1 GiB of memory."""

_POLL_SECONDS = 0.005  # how often the first in the queue looks for a free slot

_open_files: set[int] = set()
_opening = threading.RLock()  # a finalizer may run, and close, while a file is opened


@contextmanager
def one() -> Iterator[None]:
    """Hold one of the machine's slots; wait for it first if there is none. For any thread of any process.

    SandboxError: the folder for the slots, in the temporary folder, belongs to someone else or cannot lock files.
    """
    try:
        held = _take(_folder())
    except OSError as error:
        raise SandboxError(
            f"slots of the sandbox: {error}. They are locked files in the temporary folder; set TMPDIR to a folder on a "
            "local disk that you may write to"
        ) from error
    try:
        yield
    finally:
        _close(held)


def _take(folder: Path) -> int:
    queue = _open(folder / "queue")
    try:
        fcntl.flock(queue, fcntl.LOCK_EX)
        while True:
            for n in range(SLOTS):
                slot = _open(folder / f"slot-{n}")
                try:
                    fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return slot
                except BlockingIOError:
                    _close(slot)
                except BaseException:
                    _close(slot)
                    raise
            time.sleep(_POLL_SECONDS)
    finally:
        _close(queue)


def _folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"verl_ba-sandbox-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user or is a link; remove it")
    return folder


def _open(path: Path) -> int:
    with _opening:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _open_files.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    with _opening:
        if descriptor in _open_files:  # it is not in a child that has let go of its parent's files
            _open_files.remove(descriptor)
            os.close(descriptor)


def _let_go() -> None:
    """In the child after a fork: a lock lasts until every copy of its descriptor is closed."""
    for descriptor in _open_files:
        os.close(descriptor)
    _open_files.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go)
