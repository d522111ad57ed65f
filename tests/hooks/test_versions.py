"""The contract with the verl release that this process imports: each test is a row of the table of `make test-versions`.

`make test` runs it for the release that is installed, `make test-versions` for every supported one.
"""

import ast
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import verl  # loads the plugin, as in any verl process
from tensordict import NonTensorStack, TensorDict

from tests.support import verl_harness as harness
from verl_ba import hooks, loss_agg, releases, support
from verl_ba.aggregation import ALL_MODES, MODES
from verl_ba.hooks import attach, log
from verl_ba.metrics import APPLIED_RESIDUAL, METRICS, REWARD_ERRORS, SIGN_NAMES

ERRORS = hooks.load_seam_modules()
RELEASE = releases.current()
SEAMS = [seam for seam in hooks.seams() if seam.module not in ERRORS]
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.utils import py_functional  # noqa: E402
from verl.utils.config import validate_config  # noqa: E402
from verl.utils.metric import reduce_metrics  # noqa: E402
from verl.workers import engine_workers  # noqa: E402
from verl.workers.utils import losses  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_process")


def run(mode="balanced", layout="padded", mini_batches=1):
    """Build the actor's config and run one update, as a training worker does; its rollouts and metrics."""
    rollouts = harness.make_rollouts(seed=1, groups=4, size=4)
    worker = harness.make_worker(rollouts, harness.make_actor_config(mode), micro_batch=2, max_tokens=24)
    data = harness.to_tensordict(rollouts, list(range(16)), layout)
    return rollouts, harness.update(worker, data, 16 // mini_batches)


def test_every_seam_attaches(capfd):
    assert verl.__version__ == os.environ.get("VERL_BA_TEST_RELEASE", RELEASE.version)  # set by versions.py
    if RELEASE.version in releases.BY_VERSION and not releases.is_patched():
        assert releases.untested() == ""
    assert hooks.is_installed()
    for seam in SEAMS:
        assert hooks.seam_fault(seam) is None, seam.name
        current = attach.resolve(sys.modules[seam.module], seam.attribute)
        wrapped = [current]
        while (inner := getattr(wrapped[-1], "__wrapped__", None)) is not None:
            wrapped.append(inner)
        assert hooks.attachment.originals[seam.name] in wrapped, seam.name
        assert seam.why
        assert seam.until
    hooks.verify()
    # Only what needs a package that is not installed here may be out of reach, and nothing that trains under our modes.
    for module, error in ERRORS.items():
        assert isinstance(error, ModuleNotFoundError), module
        assert error.name == "megatron", module
    # verl's dispatch attribute survives, or Ray could not bind the method
    from verl.single_controller.base.decorator import MAGIC_ATTR

    assert hasattr(engine_workers.ActorRolloutRefWorker.update_actor, MAGIC_ATTR)


def test_no_stale_binding():
    assert hooks.stale_bindings() == []
    found = 0
    for name, module in list(sys.modules.items()):
        for attribute in ("agg_loss", "ppo_loss", "distillation_ppo_loss"):
            function = vars(module).get(attribute) if name.startswith("verl.") and module is not None else None
            if inspect.isfunction(function):
                found += 1
                assert hasattr(function, attach.MARK), f"{name}.{attribute}"
    assert found >= 6


def test_every_user_of_agg_loss_in_verls_sources_is_known():
    """A by-name copy that only exists while a module is loaded lazily, or in code that was not read, would show here."""
    root = Path(verl.__file__).parent
    users = set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "agg_loss" in text and any(
            isinstance(node, ast.ImportFrom) and any(alias.name == "agg_loss" for alias in node.names)
            for node in ast.walk(ast.parse(text))
        ):
            users.add(".".join(("verl", *path.relative_to(root).with_suffix("").parts)))
    known = {seam.module for seam in hooks.seams()} - {"verl.trainer.ppo.core_algos"}
    assert users <= known, users - known


def take_away(monkeypatch, seam) -> None:
    owner, _, attribute = seam.attribute.rpartition(".")
    module = sys.modules[seam.module]
    ours, original = attach.resolve(module, seam.attribute), hooks.attachment.originals[seam.name]
    monkeypatch.setattr(attach.resolve(module, owner) if owner else module, attribute, original)
    if seam.everywhere:
        for other, key, _ in attach.bindings({id(ours)}):
            monkeypatch.setattr(other, key, original)


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.logs], ids=lambda seam: seam.name.removeprefix("verl."))
def test_a_worker_without_a_seam_of_the_log_trains(monkeypatch, seam):
    take_away(monkeypatch, seam)
    assert hooks.seam_fault(seam)
    run()


@pytest.mark.parametrize("seam", [s for s in SEAMS if not s.logs], ids=lambda seam: seam.name.removeprefix("verl."))
def test_a_worker_without_a_seam_raises(monkeypatch, seam):
    run()  # with all of them it runs
    take_away(monkeypatch, seam)
    expected = {
        "ActorConfig.__post_init__": "Invalid loss_agg_mode: balanced",  # verl's own words
        "ActorRolloutRefWorker.update_actor": "the update must go through ActorRolloutRefWorker.update_actor",
    }.get(seam.attribute, f"not completely attached to verl {RELEASE.version}.*{seam.name}")
    with pytest.raises((ValueError, hooks.SeamError), match=f"(?s){expected}"):
        run()


def test_a_process_without_any_seam_refuses_the_mode(monkeypatch):
    monkeypatch.setattr(hooks.attachment, "installed", False)
    with pytest.raises(hooks.SeamError, match=r"install\(\) was not called in this process"):
        hooks.verify()


def test_config_accepts_our_modes_and_names_an_unknown_one():
    for mode in MODES:
        assert harness.make_actor_config(mode).loss_agg_mode == mode
    with pytest.raises(ValueError, match=r"actor_rollout_ref.actor.loss_agg_mode='balance'.*token-mean.*balanced"):
        harness.make_actor_config("balance")


@pytest.mark.parametrize("mode", ["balanced", "token-mean", "seq-mean-token-sum"])
def test_every_metric_is_logged_under_its_own_name(mode):
    for layout in RELEASE.layouts:
        rollouts, metrics = run(mode, layout, mini_batches=2)
        logged = reduce_metrics(py_functional.rename_dict(metrics, "actor/"))
        parts = [logged[f"balance/pg_loss/{sign}"] for sign in SIGN_NAMES]
        assert sum(parts) == pytest.approx(logged["actor/pg_loss"], rel=1e-6)
        assert logged["balance/responses"] == rollouts.mask.any(1).sum()
        modes = ("active", *ALL_MODES)
        assert {name for name in logged if "balance/" in name} == {
            f"balance/{m.name.replace('<mode>', other)}"
            for m in METRICS
            for other in modes
            if m is not REWARD_ERRORS and (m is not APPLIED_RESIDUAL or mode in MODES)
        }
    for name, module in list(sys.modules.items()):  # the trainers' own copies
        if name.startswith("verl.") and hasattr(module, "rename_dict"):
            assert module.rename_dict({"balance/groups": 1, "loss": 2}, "actor/") == {
                "balance/groups": 1,
                "actor/loss": 2,
            }


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.wrap is log.wrap_log_rollout_data], ids=lambda s: s.module)
def test_a_dump_from_transfer_queue_has_the_lengths_of_the_final_mask(monkeypatch, seam):
    import transfer_queue

    written = []

    class Trainer:
        tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, skip_special_tokens: "text")

        def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
            written.append((reward_extra_infos_dict, dump_path))

    def nested(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    ids = nested([1, 2, 3], [4, 5], [6])
    fields = {"prompts": ids, "responses": ids, "rm_scores": torch.ones(3, 3)}
    fields["response_mask"] = nested([1, 0, 1], [1, 1], [0])
    rows = TensorDict(fields, batch_size=3)
    rows["uid"] = NonTensorStack("b", "a", "pad")
    monkeypatch.setattr(
        transfer_queue,
        "kv_batch_get",
        lambda keys, partition_id, select_fields: rows.select(*select_fields, strict=False),
    )
    batch = SimpleNamespace(keys=["b_0_0", "a_0_0", "pad_0_0"], partition_id="train")
    dump = getattr(sys.modules[seam.module], seam.attribute.partition(".")[0])._log_rollout_data
    dump(Trainer(), batch, {}, "folder")
    assert written == [({"uid": ["a_0_0", "b_0_0", "pad_0_0"], "response_length": [2, 2, 0]}, "folder")]


def test_a_dump_of_the_legacy_trainer_has_uids_and_the_lengths_of_the_final_mask():
    import numpy as np
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    written = []

    class Trainer:
        tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: ["text"] * len(ids))

        def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
            written.append((reward_extra_infos_dict, dump_path))

    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0]])
    tensors = {"prompts": mask, "responses": mask, "response_mask": mask, "token_level_scores": mask.float()}
    uid = np.array(["a", "b", "a"], dtype=object)
    batch = DataProto.from_single_dict({**tensors, "uid": uid})
    RayPPOTrainer._log_rollout_data(Trainer(), batch, {"acc": [1, 0, 0]}, {}, "folder")
    expected = {"acc": [1, 0, 0], "response_length": [2, 3, 0], "uid": ["a_0_0", "b_0_0", "a_1_0"]}
    assert written == [(expected, "folder")]


def policy_loss_under(mode, name) -> float:
    """Value of a policy loss of verl's registry on one batch."""
    from verl.workers.config import PolicyLossConfig

    rollouts = harness.make_rollouts(6, groups=4, size=4, empties=False)
    data = harness.to_tensordict(rollouts, list(range(16)), "padded")
    torch.manual_seed(0)  # clip_cov picks tokens at random
    config = harness.make_actor_config("token-mean", policy_loss=PolicyLossConfig(loss_mode=name))
    if name == "dro":
        object.__setattr__(config.policy_loss, "dro_beta", 0.1)
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(rollouts.mask.sum()), global_batch_size=16, loss_scale_factor=None
    )
    if mode == "balanced":
        config.global_batch_info[loss_agg.COLUMN] = harness.pool_lengths("balanced", data)
    value, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=rollouts.old,
        log_prob=rollouts.theta,
        advantages=data["advantages"],
        response_mask=rollouts.mask,
        loss_agg_mode=mode,
        config=config,
    )
    return value.item()


def test_every_policy_loss_follows_the_mode_or_is_refused():
    for name, function in core_algos.POLICY_LOSS_REGISTRY.items():
        if function.__module__ != core_algos.__name__:
            continue  # another test's
        if support.POLICY_LOSSES[name].verdict == "refused":
            with pytest.raises(ValueError, match=rf"loss_mode={name} cannot follow .*loss_agg_mode=balanced"):
                harness.make_actor_config("balanced", policy_loss={"loss_mode": name})
            harness.make_actor_config("token-mean", policy_loss={"loss_mode": name})
        elif name != "bypass_mode" and "rollout_log_prob" not in inspect.signature(function).parameters:
            # those two need rollout corrections: tested elsewhere for the newest release
            balanced = policy_loss_under("balanced", name)
            for mode in ("seq-mean-token-mean", "token-mean"):
                assert abs(balanced - policy_loss_under(mode, name)) > 1e-6, (name, mode)


def test_the_trainers_config_validates(capfd):
    overrides = ["trainer.use_legacy_worker_impl=disable"] if RELEASE.legacy_workers else []
    validate_config(harness.compose_trainer_config(*overrides), use_reference_policy=False, use_critic=False)
    said = capfd.readouterr().err
    assert said.count(f"support of verl {RELEASE.version} is experimental") == (1 if RELEASE.experimental else 0)
    assert said.count(f"verl {RELEASE.version} is UNTESTED") == (1 if releases.untested() else 0)


@pytest.mark.skipif(not RELEASE.legacy_workers, reason="the release has no legacy workers")
def test_a_run_with_legacy_workers_is_refused():
    for setting in ("auto", "enable"):
        config = harness.compose_trainer_config(f"trainer.use_legacy_worker_impl={setting}")
        with pytest.raises(ValueError, match=rf"use_legacy_worker_impl={setting} .*drop uid.*disable"):
            validate_config(config, use_reference_policy=False, use_critic=False)
        config.actor_rollout_ref.actor.loss_agg_mode = "token-mean"
        validate_config(config, use_reference_policy=False, use_critic=False)


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module of a package that is not installed, as a mock: enough to import and hook a class that uses it."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        mine = name.partition(".")[0] == self.package
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec):
        return MagicMock(name=spec.name, __path__=[], __name__=spec.name, __spec__=spec)

    def exec_module(self, module):
        pass


@pytest.mark.skipif(not RELEASE.legacy_workers, reason="the release has no legacy workers")
@pytest.mark.parametrize(
    ("module", "name"), [("dp_actor", "DataParallelPPOActor"), ("megatron_actor", "MegatronPPOActor")]
)
def test_a_legacy_workers_update_is_refused(monkeypatch, module, name):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StandIn("megatron")])
    actor_class = getattr(importlib.import_module(f"verl.workers.actor.{module}"), name)
    actor = actor_class.__new__(actor_class)
    actor.config = SimpleNamespace(loss_agg_mode="balanced")
    with pytest.raises(RuntimeError, match=rf"{name} is a legacy worker.*drops uid.*disable"):
        actor.update_policy(None)
    actor.config.loss_agg_mode = "token-mean"
    with pytest.raises((AttributeError, TypeError)):  # verl's own code runs, on an actor without a model
        actor.update_policy(None)
    for stand_in in [key for key in sys.modules if key.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, stand_in)


@pytest.mark.parametrize("module", [s.module for s in SEAMS if s.attribute == "agg_loss" and not s.trains])
def test_the_drivers_entropy_metric_is_token_mean(module):
    loss, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    driver = sys.modules[module]
    assert driver.agg_loss(loss_mat=loss, loss_mask=mask, loss_agg_mode="balanced", loss_scale_factor=None) == 3
    assert driver.agg_loss(loss_mat=loss, loss_mask=mask, loss_agg_mode="seq-mean-token-mean") == pytest.approx(3.5)
    with pytest.raises(ValueError, match="no fallback"):
        losses.agg_loss(loss_mat=loss, loss_mask=mask, loss_agg_mode="balanced")


def test_a_critic_that_inherits_the_mode_uses_token_mean(capfd):
    from verl.workers.config import FSDPCriticConfig

    settings = {"strategy": "fsdp", "ppo_micro_batch_size_per_gpu": 1}
    if RELEASE.legacy_workers:
        settings["model_config"] = SimpleNamespace()  # None would load a model's configuration from the default path
    critic = FSDPCriticConfig(loss_agg_mode="balanced", **settings)
    mean = "the global batch" if RELEASE.global_critic else "each micro-batch"
    assert f"(inherited from the actor): values have no sign, so the critic uses token-mean over {mean}" in (
        capfd.readouterr().err
    )
    rollouts = harness.make_rollouts(2, groups=2, size=4, empties=False)
    rows = list(range(4))  # one micro-batch of two
    data = harness.to_tensordict(rollouts, rows, "padded")
    data["values"], data["returns"] = rollouts.theta[rows], rollouts.theta[rows] + 1 + rollouts.old[rows]
    tokens = int(rollouts.mask.sum())
    harness.tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=8)
    values = harness.model_output(rollouts.theta.flatten(), data)["log_probs"]
    value, _ = losses.value_loss(critic, {"values": values}, data)
    errors = (0.5 * (1 + rollouts.old[rows]) ** 2)[rollouts.mask[rows]]
    expected = errors.sum() / (tokens if RELEASE.global_critic else len(errors))
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
