"""The ways to load verl_ba into a process (docs/loading.md), in the release imported; whole runs: test_loading_in_ray."""

import pytest

from tests.support.python import run_python
from verl_ba import releases

pytestmark = pytest.mark.slow

RELEASE = releases.current()
IS_LOADED = "import verl\nfrom verl_ba import hooks\nprint(hooks.is_installed())"


def run_code(code: str, **environment):
    return run_python("-c", code, **{"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "verl_cpu", **environment})


@pytest.mark.skipif(not RELEASE.entry_points, reason="the release has no entry points")
def test_the_entry_point_loads_it():
    assert run_code(IS_LOADED, VERL_USE_EXTERNAL_PLUGINS="auto").stdout.split()[-1] == "True"


def test_the_environment_variable_loads_it():
    assert run_code(IS_LOADED, VERL_USE_EXTERNAL_MODULES="verl_ba.plugin").stdout.split()[-1] == "True"


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
    result = run_code(COMPOSE + VALIDATE)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("without", "verified"))]
    assert lines == ["without: True", "verified"], result.stdout + result.stderr[-3000:]


def test_the_models_external_lib_loads_it_where_the_tokenizer_is():
    result = run_code(COMPOSE + TRAINER)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("without", "entropy"))]
    assert lines == ["without: True", "entropy 1.0"], result.stdout + result.stderr[-3000:]
