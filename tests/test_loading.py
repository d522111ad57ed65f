"""The ways to load verl_ba into every process of a run (docs/loading.md): real processes, a real Ray, the real trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ba import releases

ROOT = Path(__file__).parents[1]
RELEASE = releases.current()
IS_LOADED = "import verl\nfrom verl_ba import hooks\nprint(hooks.is_installed())"


def run_python(code: str, **environment) -> subprocess.CompletedProcess:
    keep = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    environment = {**keep, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "verl_ba_cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.skipif(not RELEASE.entry_points, reason="the release has no entry points")
def test_the_entry_point_loads_it():
    assert run_python(IS_LOADED, VERL_USE_EXTERNAL_PLUGINS="auto").stdout.split()[-1] == "True"


def test_the_environment_variable_loads_it():
    assert run_python(IS_LOADED, VERL_USE_EXTERNAL_MODULES="verl_ba.plugin").stdout.split()[-1] == "True"


COMPOSE = """
import verl
from hydra import compose, initialize_config_module
from verl.trainer import main_ppo
from verl.workers import engine_workers
from verl.trainer.ppo import ray_trainer
from verl.utils.config import validate_config
from verl_ba import hooks
assert not hooks.is_installed()  # the control: nothing else has loaded it
overrides = [
    "actor_rollout_ref.actor.loss_agg_mode=balanced",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.model.external_lib=verl_ba.plugin",
    "critic.ppo_micro_batch_size_per_gpu=8",
    "algorithm.adv_estimator=grpo",
]
"""
# Everything that is hooked was imported before: the worst order.
VALIDATE = """
def validate(*more):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*overrides, *more])
    validate_config(config, use_reference_policy=False, use_critic=False)
try:
    validate()
except Exception as error:
    print("without:", "Invalid loss_agg_mode: balanced" in str(error))
validate("actor_rollout_ref.actor._target_=verl_ba.actor.FSDPActorConfig")
hooks.load_seam_modules()
hooks.verify()
print("verified")
"""
# A v1 trainer's own process builds no actor config: it loads the model's external_lib, and logs the entropy.
TRAINER = """
import torch
from verl.utils.import_utils import import_external_libs
ones = torch.ones(2, 3)
try:
    ray_trainer.agg_loss(ones, ones, "balanced")
except ValueError as error:
    print("without:", "Invalid loss_agg_mode: balanced" in str(error))
import_external_libs("verl_ba.plugin")
hooks.verify()
print("entropy", ray_trainer.agg_loss(ones, ones, "balanced").item())
"""


def test_the_actors_target_loads_it_where_its_config_is_built():
    result = run_python(COMPOSE + VALIDATE)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("without", "verified"))]
    assert lines == ["without: True", "verified"], result.stdout + result.stderr[-3000:]


def test_the_models_external_lib_loads_it_where_the_tokenizer_is():
    result = run_python(COMPOSE + TRAINER)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("without", "entropy"))]
    assert lines == ["without: True", "entropy 1.0"], result.stdout + result.stderr[-3000:]


# ---- a Ray that is running already


def run_doctor(address: str, folder: Path) -> subprocess.CompletedProcess:
    """`verl-ba doctor --ray`, away from the checkout: Ray lets workers import from the driver's folder."""
    return subprocess.run(
        [sys.executable, "-m", "verl_ba.cli", "doctor", "--ray", address],
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


@pytest.mark.trainer
def test_doctor_examines_every_node_of_a_running_ray(cluster, tmp_path):
    cluster.add_node(num_cpus=1)
    result = run_doctor(cluster.address, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(RELEASE.version) == result.stdout.count(" yes ") == 2

    (tmp_path / "other" / "verl" / "version").mkdir(parents=True)
    (tmp_path / "other" / "verl" / "version" / "version").write_text("9.9.9\n")
    (tmp_path / "other" / "verl" / "__init__.py").touch()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "verl_ba.py").write_text("raise ImportError('not on this node')")
    path = os.environ["PYTHONPATH"]
    cluster.add_node(num_cpus=1, env_vars={"VERL_USE_EXTERNAL_PLUGINS": "none"})
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": os.pathsep.join([str(tmp_path / "other"), path])})
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": os.pathsep.join([str(tmp_path / "none"), path])})
    result = run_doctor(cluster.address, tmp_path)
    assert result.returncode == 1
    for message in (
        "importing verl did not load verl_ba",
        "verl 9.9.9 is not supported",
        "verl_ba is not there, or another version (not on this node)",
        "verl differs:",
    ):
        assert message in result.stdout, result.stdout + result.stderr
    assert result.stdout.count(" yes ") == 2


def test_doctor_names_an_address_without_a_ray(tmp_path):
    result = run_doctor("127.0.0.1:1", tmp_path)
    assert result.returncode == 1
    assert "--ray 127.0.0.1:1:" in result.stdout
    assert "Give the address of a running cluster" in result.stdout
