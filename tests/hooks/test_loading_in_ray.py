"""Whole runs that load verl_ba: the real trainer, a Ray that runs already, its jobs; and what doctor says of its nodes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from recipes import start
from recipes.small_data import write_small_sources
from tests.support.trainer_run import launch, pg_losses
from verl_ba import releases

ROOT = Path(__file__).parents[2]
RELEASE = releases.current()
RAY = str(Path(sys.executable).with_name("ray"))
OFF = "verl_cpu"  # VERL_USE_EXTERNAL_PLUGINS: the CPU platform stays, verl_ba's own entry point does not load


@pytest.mark.trainer
@pytest.mark.deep
def test_configuration_alone_loads_it_in_every_process(prepared, tmp_path):
    overrides = (
        "actor_rollout_ref.actor._target_=verl_ba.actor.FSDPActorConfig",
        "actor_rollout_ref.model.external_lib=verl_ba.plugin",
    )
    result, steps = launch(prepared, tmp_path, "balanced", *overrides, VERL_USE_EXTERNAL_PLUGINS=OFF)
    assert max(pg_losses(result, steps)) <= 1e-6


@pytest.fixture
def started_ray(tmp_path):
    """`ray start --head` in the environment that launch.sh makes; the addresses of Ray and of its job server."""
    environment = {**os.environ, **start.environment("cpu"), "VERL_USE_EXTERNAL_PLUGINS": OFF}

    ports = free_ports(2)
    folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets are in it
    options = f"--head --block --port={ports[0]} --num-cpus=10 --num-gpus=2 --temp-dir={folder}"
    options += f" --include-dashboard=true --dashboard-port={ports[1]} --disable-usage-stats"
    log = tmp_path / "head.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [RAY, "start", *options.split()], env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        end = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(40)  # it stops what it has started
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.trainer
@pytest.mark.deep
def test_a_ray_that_was_started_before(prepared, tmp_path, started_ray):
    """The trainer with the variable in Ray's runtime environment; then jobs with a working directory and with a wheel."""
    address, jobs = started_ray
    override = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=verl_ba.plugin"
    variables = {"VERL_USE_EXTERNAL_PLUGINS": OFF, "VERL_USE_EXTERNAL_MODULES": "verl_ba.plugin"}
    result, steps = launch(prepared, tmp_path, "balanced", override, RAY_ADDRESS=address, **variables)
    assert max(pg_losses(result, steps)) <= 1e-6
    assert "Connecting to existing Ray cluster" in result.stdout

    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "where.py").write_text(WHERE)
    source = tmp_path / "source"  # pip leaves a build folder
    source.mkdir()
    shutil.copytree(ROOT / "verl_ba", source / "verl_ba")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*wheel, str(source)], check=True)
    (built,) = tmp_path.glob("verl_ba-*.whl")
    auto = {"VERL_USE_EXTERNAL_PLUGINS": "auto"}  # verl finds the wheel's entry point
    places = submit(jobs, folder, {"env_vars": auto, "py_modules": [str(built)]})
    assert all("py_modules_files" in place for place in places), places

    shutil.copytree(ROOT / "verl_ba", folder / "verl_ba")
    places = submit(jobs, folder, {"env_vars": {"VERL_USE_EXTERNAL_MODULES": "verl_ba.plugin"}})
    assert all("working_dir_files" in place for place in places), places


WHERE = """
import ray
def where():
    import verl
    import verl_ba
    from verl_ba import hooks
    return f"WHERE {verl_ba.__file__ if hooks.is_installed() else 'not loaded'}"
print(where())
print(ray.get(ray.remote(where).remote()))
"""


def submit(jobs: str, folder: Path, runtime_env: dict) -> list[str]:
    """Submit where.py as a job; where the driver and a worker found verl_ba, if verl loaded it."""
    options = ["--address", jobs, "--working-dir", str(folder), "--runtime-env-json", json.dumps(runtime_env)]
    command = [RAY, "job", "submit", *options, "--", sys.executable, "where.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    places = [line for line in result.stdout.splitlines() if line.startswith("WHERE")]
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(places) == 2, result.stdout + result.stderr
    return places


# ---- the nodes of a cluster


def run_doctor(address: str, folder: Path, *options: str) -> subprocess.CompletedProcess:
    """`verl-ba doctor --ray`, away from the checkout: Ray lets workers import from the driver's folder."""
    return subprocess.run(
        [sys.executable, "-m", "verl_ba", "doctor", "--ray", address, *options],
        cwd=folder,
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture
def cluster(monkeypatch):
    """A head node in a process of its own, to which a test adds nodes; what it is started with reaches its workers."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def paper_run(tmp_path):
    """The environment of a run of a paper's recipe: its data, small, and a folder with a model's files."""
    write_small_sources(tmp_path / "sources")
    build = [sys.executable, "-m", "verl_ba", "data", "all", "--unverified", "--from", str(tmp_path / "sources")]
    subprocess.run([*build, "--out", str(tmp_path / "data")], check=True, capture_output=True)
    model = tmp_path / "models" / "Qwen3-1.7B"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    return {"DATA_DIR": f"{tmp_path}/data", "MODEL_DIR": f"{tmp_path}/models", "RESULTS_DIR": f"{tmp_path}/results"}


@pytest.mark.trainer
def test_every_node_of_a_running_ray_is_examined_before_a_run_starts(cluster, tmp_path, paper_run):
    """Two nodes are in order; each of six others lacks something. A run of a paper's recipe refuses to start on them."""
    modules = {name: tmp_path / name for name in ("flash", "other", "without_us", "without_math")}
    for folder in modules.values():
        folder.mkdir()
    (modules["flash"] / "flash_attn.py").touch()  # stands for the package, which has no build for a CPU
    (modules["other"] / "verl" / "version").mkdir(parents=True)
    (modules["other"] / "verl" / "version" / "version").write_text("0.6.9\n")
    (modules["other"] / "verl" / "__init__.py").touch()
    (modules["without_us"] / "verl_ba.py").write_text("raise ImportError('not on this node')")
    (modules["without_math"] / "math_verify.py").write_text("raise ImportError('no math-verify on this node')")

    def add(*names: str, **variables: str) -> None:
        path = os.pathsep.join([*(str(modules[name]) for name in names), os.environ["PYTHONPATH"]])
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path, **variables})

    add("flash")
    result = run_doctor(cluster.address, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(RELEASE.version) == result.stdout.count(" yes ") == 2

    add("flash", VERL_USE_EXTERNAL_PLUGINS="none")
    add("flash", "other")
    add("flash", "without_us")
    add("flash", "without_math")
    add("flash", PATH=str(Path(sys.executable).parent))  # no bubblewrap
    result = subprocess.run(
        ["bash", str(ROOT / "recipes" / "qwen3_1.7b_dapo17k.sh"), "balanced"],
        cwd=tmp_path,
        env={**os.environ, **paper_run, "PYTHON": sys.executable, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 2
    for message in (
        "importing verl did not load verl_ba",
        "verl 0.6.9 is not supported",
        "verl_ba is not there, or another version (not on this node)",
        "verl differs:",
        "a number and a formula are scored: no. ",
        "Install bubblewrap",
        "flash_attn can be imported: no. No module named 'flash_attn'",  # on the head node
    ):
        assert message in result.stderr, result.stdout + result.stderr
    assert result.stderr.count(" yes ") == 1
    assert not (tmp_path / "results").exists()


def test_doctor_names_an_address_without_a_ray(tmp_path):
    result = run_doctor("127.0.0.1:1", tmp_path)
    assert result.returncode == 1
    assert "--ray 127.0.0.1:1:" in result.stdout
    assert "Give the address of a running cluster" in result.stdout
