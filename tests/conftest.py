"""Fast tests see one thread and no accelerator; the real trainer's settings come from recipes/launch.sh."""

import os
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@pytest.fixture(scope="session")
def prepared():
    """The demo's model and data, made once, in a minute; and the server that runs fork from (recipes/cpu_site/prefork.py)."""
    from recipes.cpu_site import prefork
    from recipes.demo.prepare import prepare

    paths = prepare(RECIPES.parent / ".cache")
    with prefork.serve() as server:
        yield paths | {"prefork": server}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A process group of one, as verl's worker needs it."""
    import torch

    store = f"file://{tmp_path_factory.mktemp('gloo') / 'store'}"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=store)
    yield
    torch.distributed.destroy_process_group()


os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl resolves its platform
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Processes that tests start import verl, too: less garbage collection while they do (see the file there).
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(RECIPES / "cpu_site"), os.environ.get("PYTHONPATH")]))
