"""A verl that has the patches: what `make patches-check` runs in each release's patched tree, beside verl's own tests.

VERL_BA_PATCHED and VERL_BA_PRISTINE name the two trees. In an unmodified verl nothing of this runs.
"""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.python import run_python
from verl_ba import releases, support
from verl_ba.aggregation import MODES
from verl_ba.loss_agg import COLUMN

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("VERL_BA_PATCHED" not in os.environ, reason="make patches-check runs these in patched trees"),
]


def run(tree: str, *arguments: str, plugin: bool = False, **variables):
    """Python in a process of its own that imports verl from this tree, with or without the plugin."""
    variables = {"OMP_NUM_THREADS": "1", "VERL_USE_EXTERNAL_PLUGINS": "verl_cpu", **variables}
    if plugin:
        variables["VERL_USE_EXTERNAL_MODULES"] = "verl_ba.plugin"
    path = (tree, str(ROOT))
    result = run_python("-Wignore", *arguments, path=path, VERL_PLATFORM="cpu", **variables)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    return result


def different(folder, other) -> list[str]:
    """What differs between the updates in two folders, to the bit."""
    found = []
    for path in sorted(folder.glob("*.pt")):
        ours, theirs = torch.load(path), torch.load(other / path.name)
        for i, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
            assert mine.keys() == their.keys()
            assert mine["gradient"].any() or len(mine) > 1
            found += [f"{path.name} {i} {key}" for key in mine if not torch.equal(mine[key], their[key])]
    return found


def updates(folder: Path, tree: str, plugin: bool, count: str) -> Path:
    said = run(tree, "-m", "tests.support.update_worker", str(folder), count, plugin=plugin)
    assert said.stdout.splitlines()[-1] == str(Path(tree) / "verl")  # the tree that was meant
    assert len(list(folder.glob("*.pt"))) == 3
    return folder


@pytest.mark.timeout(7200)
def test_patched_and_hooked_verl_are_equal_to_the_bit(tmp_path):
    patched, pristine = os.environ["VERL_BA_PATCHED"], os.environ["VERL_BA_PRISTINE"]
    count = os.environ["VERL_BA_BATCHES"]
    by_patch = updates(tmp_path / "patched", patched, False, count)
    by_hook = updates(tmp_path / "hooked", pristine, True, count)
    assert different(by_patch, by_hook) == []
    few = str(max(10, int(count) // 20))
    both = updates(tmp_path / "both", patched, True, few)
    alone = updates(tmp_path / "alone", patched, False, few)
    assert different(both, alone) == []  # the plugin in a patched verl changes nothing


def loss_through_verl(rollouts, config):
    """verl's ppo_loss on these rows as one micro-batch, with the column taken by the patched function."""
    from verl.workers.utils import losses

    from tests.support import verl_harness as harness

    rows = len(rollouts)
    data = harness.to_tensordict(rollouts, list(range(rows)), "padded")
    harness.tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(rollouts.mask.sum()), global_batch_size=rows)
    loss_agg = importlib.import_module("verl.trainer.ppo.loss_agg")  # only a patched verl has it
    data.update(loss_agg.compute_pool_mean_length(config.loss_agg_mode, data))
    return losses.ppo_loss(config, harness.model_output(rollouts.theta.flatten(), data), data)[0]


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    yield
    torch.distributed.destroy_process_group()


def test_gradients_equal_the_literal_reference():
    """The ranks of test_ranks.py: verl's worker, 2 processes, against reference.py."""
    from tests.hooks import test_ranks

    records = [record for record in test_ranks.run_ranks(2) if "gradient_error" in record]  # those of our modes
    assert len(records) == 12 * len(releases.current().layouts)
    for record in records:
        assert record["gradient_error"] < 1e-12, record
        assert record["logged"] == pytest.approx(record["expected"], rel=1e-4, abs=1e-7), record


def test_the_plugin_stands_aside():
    code = (
        "import verl, json\n"
        "from verl_ba import hooks, releases\n"
        "from verl_ba.tools import doctor\n"
        "hooks.load_seam_modules()\n"
        "import verl.workers.engine_workers\n"
        "from verl.trainer.ppo import core_algos\n"
        "hooks.verify()\n"
        "report = doctor.examine()\n"
        "print(json.dumps([hooks.is_installed(), releases.is_patched(), hooks.seams(), report.faults, report.seams,\n"
        "                  hasattr(core_algos.agg_loss, '__wrapped__')]))"
    )
    said = run(os.environ["VERL_BA_PATCHED"], "-c", code, plugin=True).stdout.splitlines()[-1]
    installed, patched, seams, faults, rows, wrapped = json.loads(said)
    assert (installed, patched, seams, faults, wrapped) == (True, True, [], [], False)
    assert "stands aside" in rows[0][2]
    code = "import verl\nfrom verl_ba import releases\nprint(releases.is_patched())"
    assert run(os.environ["VERL_BA_PRISTINE"], "-c", code, plugin=False).stdout.split()[-1] == "False"


def test_every_policy_loss_has_the_verdict_of_support_py():
    from verl.trainer.ppo import core_algos
    from verl.workers.config import PolicyLossConfig

    from tests.support import verl_harness as harness

    with torch.random.fork_rng():
        from tests.hooks import test_versions

        for name, function in core_algos.POLICY_LOSS_REGISTRY.items():
            if support.POLICY_LOSSES[name].verdict == "refused":
                with pytest.raises(ValueError, match=r"no token losses to weigh by loss_agg_mode=balanced"):
                    harness.make_actor_config("balanced", policy_loss=PolicyLossConfig(loss_mode=name))
            elif name != "bypass_mode" and "rollout_log_prob" not in function.__code__.co_varnames:
                balanced = test_versions.policy_loss_under("balanced", name)
                for mode in ("seq-mean-token-mean", "token-mean"):
                    assert abs(balanced - test_versions.policy_loss_under(mode, name)) > 1e-6, (name, mode)


def test_a_policy_loss_that_ignores_the_mode_is_refused_at_its_first_call(monkeypatch, one_process):
    from verl.trainer.ppo import core_algos
    from verl.workers.config import PolicyLossConfig

    from tests.support import verl_harness as harness

    monkeypatch.setitem(
        core_algos.POLICY_LOSS_REGISTRY, "own-mean", lambda old_log_prob, log_prob, **_: (log_prob.mean(), {})
    )
    config = harness.make_actor_config("balanced", policy_loss=PolicyLossConfig(loss_mode="own-mean"))
    with pytest.raises(
        ValueError, match=r"policy loss 'own-mean' .* ignores .*loss_agg_mode=balanced: it never called"
    ):
        loss_through_verl(harness.make_rollouts(0, 2, 4), config)


def test_a_distillations_policy_loss_follows_the_mode_and_is_refused_if_it_does_not(monkeypatch):
    losses = pytest.importorskip("verl.trainer.distillation.losses", reason="the release has no distillation")
    from verl.trainer.ppo import core_algos
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    from tests.support import verl_harness as harness

    mask = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    settings = DistillationLossConfig(loss_mode="k1", use_policy_gradient=True, policy_loss_mode="vanilla")
    distillation = DistillationConfig(distillation_loss=settings)
    per_token = torch.tensor([[2.0], [3.0]], dtype=torch.float64).expand(2, 3)
    monkeypatch.setattr(losses, "get_distillation_loss_fn", lambda name: lambda **_: (per_token, {}))
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda log_probs, data: log_probs)
    log_prob = torch.zeros(2, 3, dtype=torch.float64)
    data = {
        "response_mask": mask,
        "old_log_probs": log_prob,
        "pool_mean_length": torch.tensor([2.0, 3.0], dtype=torch.float64),
        "dp_size": 1,
        "batch_num_tokens": 4,
        "global_batch_size": 2,
    }

    def loss():
        config = harness.make_actor_config("balanced")
        return losses.distillation_loss(config, distillation, {"log_probs": log_prob}, data)[0].item()

    assert loss() == pytest.approx((2 / 2 + 3 * 3 / 3) / 2)
    monkeypatch.setitem(
        core_algos.POLICY_LOSS_REGISTRY, "vanilla", lambda old_log_prob, log_prob, **_: (log_prob.mean(), {})
    )
    with pytest.raises(ValueError, match=r"policy loss 'vanilla' .* ignores .*loss_agg_mode=balanced"):
        loss()


def test_a_bad_batch_on_one_rank_is_an_error_on_every_rank():
    code = "from tests.patches import test_patched_verl; test_patched_verl.bad_batch_on_the_last_rank()"
    patched = os.environ["VERL_BA_PATCHED"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable)
    said = run(patched, *launcher, "-c", code).stdout
    for error in ("an aggregation over whole groups needs uid", "advantages: nan or inf at a valid token"):
        assert re.findall(rf"rank (\d): \W?{error}", said) in (["0", "1"], ["1", "0"]), said


def bad_batch_on_the_last_rank() -> None:
    """In each of two processes: what verl's update says where the other rank's batch, or this one's, is bad."""
    from tests.support import verl_harness as harness

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    rollouts, config = harness.make_rollouts(0, 2, 4), harness.make_actor_config("balanced")
    for bad in ("uid", "advantages"):
        data = harness.to_tensordict(rollouts, list(range(8))[rank::2], "padded")
        if rank == 1 and bad == "uid":
            data.pop("uid")
        elif rank == 1:
            data["advantages"] = torch.where(data["response_mask"].bool(), float("nan"), 0.0)
        try:
            harness.update(harness.make_worker(rollouts, config, 2, max_tokens=24), data, 8)
        except (KeyError, ValueError) as error:
            print(f"rank {rank}: {error}", flush=True)
    torch.distributed.destroy_process_group()


legacy = pytest.mark.skipif(not releases.current().legacy_workers, reason="the release has no legacy workers")


@legacy
def test_the_legacy_fsdp_actors_gradients_equal_the_literal_reference():
    said = run(os.environ["VERL_BA_PATCHED"], "-m", "tests.support.legacy_worker", plugin=False).stdout
    records = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(records) == 48
    for record in records:
        assert record["gradient_error"] < 1e-12, record
        assert record["logged"] == pytest.approx(record["expected"], rel=1e-9), record


@legacy
def test_the_legacy_megatron_actor_refuses(monkeypatch):
    from types import SimpleNamespace

    from tests.hooks import test_versions

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, test_versions.StandIn("megatron")])
    actor_class = importlib.import_module("verl.workers.actor.megatron_actor").MegatronPPOActor
    actor = actor_class.__new__(actor_class)
    actor.config = SimpleNamespace(loss_agg_mode="balanced")
    with pytest.raises(NotImplementedError, match=r"drops uid.*use_legacy_worker_impl=disable"):
        actor.update_policy([])
    actor.config.loss_agg_mode = "token-mean"
    with pytest.raises(AttributeError, match="actor_optimizer"):  # verl's own code runs, on an actor without a model
        actor.update_policy([])
    for stand_in in [key for key in sys.modules if key.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, stand_in)


def test_the_drivers_config_validates_and_what_cannot_work_is_named():
    import verl
    from verl.utils.config import validate_config

    from tests.support import verl_harness as harness

    def validate(mode, *settings):
        config = harness.compose_trainer_config(f"actor_rollout_ref.actor.loss_agg_mode={mode}", *settings)
        validate_config(config, use_reference_policy=False, use_critic=False)

    assert Path(verl.__file__).is_relative_to(os.environ["VERL_BA_PATCHED"])
    correction = "algorithm.rollout_correction."
    rejection = (f"{correction}bypass_mode=true", f"{correction}rollout_rs=token_k1")
    for mode in MODES:
        validate(mode)
        validate(mode, rejection[1])  # before the update: lengths come from the mask that is left
        with pytest.raises(ValueError, match=f"{mode} takes lengths before rollout_rs in bypass_mode rejects tokens"):
            validate(mode, *rejection)
    validate("token-mean", *rejection)
    with pytest.raises(Exception, match=r"Invalid loss_agg_mode: balance\. Must be one of .*balanced"):
        validate("balance")


def test_the_drivers_entropy_metric_is_token_mean_at_every_site():
    tree = Path(os.environ["VERL_BA_PATCHED"]) / "verl"
    sites = {}
    for path in tree.rglob("*trainer*.py"):
        calls = re.findall(r"entropy_agg = agg_loss\(.*?\n\s*\)\n", path.read_text(), flags=re.DOTALL)
        sites |= {f"{path.relative_to(tree)} {i}": call for i, call in enumerate(calls)}
    sync = tree / "trainer" / "main_ppo_sync.py"
    if sync.exists():
        sites[sync.name] = sync.read_text()
    assert len(sites) >= 2
    for name, call in sites.items():
        assert "metric_loss_agg_mode(actor_config.loss_agg_mode)" in call, name


def test_a_loss_without_the_column_names_it(one_process):
    from verl.workers.utils import losses

    from tests.support import verl_harness as harness

    rollouts, config = harness.make_rollouts(0, 2, 4), harness.make_actor_config("balanced")
    data = harness.to_tensordict(rollouts, list(range(8)), "padded")
    harness.tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=9, global_batch_size=8)
    with pytest.raises(KeyError, match=COLUMN):
        losses.ppo_loss(config, harness.model_output(rollouts.theta.flatten(), data), data)
    expected = harness.expected_loss(rollouts, "balanced", rollouts.theta, config, 8)
    assert loss_through_verl(rollouts, config).item() == pytest.approx(expected.item(), rel=1e-12)
