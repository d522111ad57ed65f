"""Python in a process of its own, without the variables of verl that the tests' process has."""

import os
import subprocess
import sys
from pathlib import Path

from recipes.cpu_site import prefork

ROOT = Path(__file__).resolve().parents[2]
SITE = str(Path(prefork.__file__).parent)


def run_python(*arguments: str, path: tuple[str, ...] = (), fork: bool = True, **variables: str):
    """What came of `python ARGUMENTS…`, as a subprocess.CompletedProcess.

    Args:
        path: what comes first on PYTHONPATH.
        fork: begin with torch, transformers and vLLM imported, verl not, where the tests have a server for that
            (recipes/cpu_site/prefork.py): seconds less. False for code that looks at what is imported.
        variables: of the environment.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    given = [environment["PYTHONPATH"]] if "PYTHONPATH" in environment else []
    if fork and (server := os.environ.get(prefork.VARIABLE)):
        environment |= {prefork.VARIABLE: server, prefork.ALSO: "verl,tests.support."}
        given = [SITE, *given]
    environment |= {"PYTHONPATH": os.pathsep.join([*path, *given]), **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=600
    )
