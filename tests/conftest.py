"""Fast tests see one thread and no accelerator; the real trainer's settings come from recipes/launch.sh."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from recipes.cpu_site import prefork
from tests.support import quick_compose

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
_session = contextlib.ExitStack()
quick_compose.install()


def pytest_configure(config):
    """One server for the session, from which the processes that tests start fork (recipes/cpu_site/prefork.py)."""
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers use that of the process that starts them
        os.environ[prefork.VARIABLE] = _session.enter_context(prefork.serve()).path
        os.environ[prefork.ALSO] = "tests.support."


def pytest_unconfigure():
    _session.close()


def pytest_collection_modifyitems(items):
    """Runs of the real trainer come first: they wait for one another's processes, and other tests fill the gaps."""
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("first", "trainer")])


@pytest.fixture(scope="session")
def prepared():
    """The demo's model and data, made once, in a minute."""
    from recipes.demo.prepare import prepare

    return prepare(RECIPES.parent / ".cache")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A process group of one, as verl's worker needs it."""
    import torch

    store = f"file://{tmp_path_factory.mktemp('gloo') / 'store'}"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=store)
    yield
    torch.distributed.destroy_process_group()


if "PYTEST_XDIST_WORKER" in os.environ:  # a worker's runs must not find another worker's Ray in /tmp/ray
    os.environ["RAY_TMPDIR"] = _session.enter_context(
        tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True)
    )
os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a worker for each core already
os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl resolves its platform
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Processes that tests start import verl, too: less garbage collection while they do (see the file there).
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(RECIPES / "cpu_site"), os.environ.get("PYTHONPATH")]))
