"""The hooks inside verl's own code: values and gradients, configuration, errors, bindings. One process; see test_ranks."""

import functools
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import verl
from omegaconf import OmegaConf
from tensordict import NonTensorStack

from tests.support import reference
from tests.support import verl_harness as harness
from tests.support.python import run_python
from verl_ba import hooks, loss_agg
from verl_ba.aggregation import ALL_MODES, MODES
from verl_ba.loss_agg import token_mean_length

hooks.load_seam_modules()
from verl.trainer.distillation import losses as distillation_losses  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.utils.config import validate_config  # noqa: E402
from verl.workers.utils import losses  # noqa: E402

CASES = json.loads((Path(__file__).parents[1] / "support" / "cases.json").read_text())
LAYOUTS = ("nested", "padded")


def rollouts_of_case(case) -> harness.Rollouts:
    rows = case["responses"]
    width = max(row["length"] for row in rows)
    mask = torch.arange(width)[None] < torch.tensor([row["length"] for row in rows])[:, None]
    loss = torch.tensor([row["loss"] for row in rows], dtype=torch.float64)[:, None].expand(-1, width)
    return harness.Rollouts(
        uid=[str(row["group"]) for row in rows],
        advantage=torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        mask=mask,
        theta=loss / harness.ENTROPY_SLOPE,  # the 'entropy' of a token is its loss in the case
        old=loss / harness.ENTROPY_SLOPE,  # ratio 1
    )


def loss_through_verl(rollouts, mode, layout, config=None, rows=None, mean_length=None, loss=None, size=None):
    """(loss, metrics) of verl's ppo_loss on these rows, the column taken by the hook's own function."""
    rows = list(range(len(rollouts))) if rows is None else rows
    config = config or harness.make_actor_config(mode)
    data = harness.to_tensordict(rollouts, rows, layout)
    theta = rollouts.theta.flatten().clone().requires_grad_()
    output = harness.model_output(theta, data)
    tokens = int(rollouts.mask.sum())
    harness.tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=size or len(rollouts))
    if mode in MODES:
        harness.add_pool_lengths(mode, data)
        if mean_length is not None:
            data[loss_agg.COLUMN] = mean_length[rows]
    value, metrics = (loss or losses.ppo_loss)(config=config, model_output=output, data=data)
    return value, metrics, theta


# ---- the worked cases, through verl's ppo_loss, its policy loss and agg_loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case_through_ppo_loss(case, mode, layout):
    rollouts = rollouts_of_case(case)
    _, metrics, _ = loss_through_verl(rollouts, mode, layout)
    expected = float(Fraction(case["loss"][mode]))
    # verl's seq-mean-token-mean adds 1e-8 to each length
    tolerance = 1e-7 if mode == "seq-mean-token-mean" else 1e-12
    assert metrics["actor/entropy_loss"].values[0] == pytest.approx(expected, rel=tolerance, abs=tolerance)
    on_policy = reference.loss(
        mode,
        -rollouts.advantage[:, None].expand_as(rollouts.theta),
        rollouts.mask.tolist(),
        rollouts.uid,
        rollouts.sign,
    )
    assert metrics["actor/pg_loss"].values[0] == pytest.approx(on_policy.item(), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case", [c for c in CASES if "weights" in c], ids=lambda case: case["name"])
def test_case_weights_through_agg_loss(case):
    rollouts = rollouts_of_case(case)
    data = harness.to_tensordict(rollouts, list(range(len(rollouts))), "padded")
    for mode in MODES:
        loss = torch.zeros_like(rollouts.theta, requires_grad=True)
        core_algos.agg_loss(
            loss,
            rollouts.mask,
            mode,
            global_batch_size=len(rollouts),
            pool_mean_length=harness.pool_lengths(mode, data),
        ).backward()
        weight = loss.grad * len(rollouts)
        for row, mask, expected in zip(weight, rollouts.mask, case["weights"][mode], strict=True):
            assert row[mask].tolist() == pytest.approx([float(Fraction(expected))] * int(mask.sum()), rel=1e-12)
            assert not row[~mask].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["response", "token"])
@pytest.mark.parametrize("seed", range(2))
def test_random_update_equals_the_literal_reference(seed, form, mode, layout):
    rollouts = harness.make_rollouts(seed, groups=5, size=4, form=form)
    config = harness.make_actor_config(mode, entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.3)
    value, _, theta = loss_through_verl(rollouts, mode, layout, config)
    value.backward()
    leaf = rollouts.theta.clone().requires_grad_()
    expected = harness.expected_loss(rollouts, mode, leaf, config, len(rollouts))
    (gradient,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(theta.grad.view_as(leaf), gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_micro_batches_add_up(dtype):
    rollouts = harness.make_rollouts(3, groups=4, size=4)
    rollouts.theta, rollouts.old = rollouts.theta.to(dtype), rollouts.old.to(dtype)
    whole, _, theta = loss_through_verl(rollouts, "balanced", "nested")
    whole.backward()
    data = harness.to_tensordict(rollouts, list(range(16)), "nested")
    column = harness.pool_lengths("balanced", data)
    gradient = torch.zeros_like(theta)
    for size in (1, 3, 16):
        gradient.zero_()
        for start in range(0, 16, size):
            rows = list(range(start, min(16, start + size)))
            part, _, leaf = loss_through_verl(rollouts, "balanced", "nested", rows=rows, mean_length=column, size=16)
            part.backward()
            gradient += leaf.grad
        error = (gradient - theta.grad).abs().max() / theta.grad.abs().max()
        assert error < (1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_column_is_per_row_unless_a_row_has_tokens_of_two_pools(layout):
    rows = list(range(8))
    response, token = (harness.make_rollouts(0, 2, 4, form=form) for form in ("response", "token"))
    for mode, rollouts, dimensions in [
        ("balanced", response, 1),
        ("group-mean-token-mean", token, 1),
        ("balanced", token, 2),
    ]:
        column = harness.pool_lengths(mode, harness.to_tensordict(rollouts, rows, layout))
        assert column.ndim == dimensions, mode
        assert column.dtype == torch.float64
        # no token reads a zero: each valid token has a pool
        if dimensions == 2:
            advantage = harness.to_tensordict(rollouts, rows, "padded")["advantages"]
            assert (token_mean_length(column, advantage, torch.zeros(8)) > 0)[rollouts.mask].all()


def test_one_rank_with_two_signs_in_a_response_makes_every_ranks_column_per_token(monkeypatch):
    here, there = (harness.make_rollouts(seed, 2, 4, form=form) for seed, form in ((0, "response"), (1, "token")))
    local = [loss_agg.rows_of(harness.to_tensordict(r, list(range(8)), "padded")) for r in (here, there)]
    monkeypatch.setattr(loss_agg, "all_gather", lambda mine, group: (local, 0))
    column = harness.pool_lengths("balanced", harness.to_tensordict(here, list(range(8)), "padded"))
    assert column.shape == (8, 3)


def test_a_nested_batch_that_does_not_know_its_longest_row_is_padded_to_it():
    offsets = torch.arange(0, 3001, 3)
    row = torch.nested.nested_tensor_from_jagged(torch.ones(3000), offsets)
    assert row.to_padded_tensor(0).shape == (1000, 3000)  # torch's own
    assert torch.equal(loss_agg.padded(row), torch.ones(1000, 3))


def test_sessions_reach_the_hook():
    rollouts = harness.make_rollouts(2, groups=2, size=4, empties=False)
    rollouts.uid, rollouts.advantage = ["a"] * 8, torch.ones(8, dtype=torch.float64)
    rollouts.session = [0, 0, 1, 2, 3, 4, 5, 6]
    column = harness.pool_lengths("balanced", harness.to_tensordict(rollouts, list(range(8)), "nested"))
    total, sessions, rows = int(rollouts.mask.sum()), 7, 8
    assert column.tolist() == pytest.approx([total / sessions * sessions / rows] * 8, rel=1e-12)


# ---- negative controls: a wrong hook must be seen by the same comparison


def wrong_by_micro_batch(rollouts, column):
    starts = range(0, len(rollouts), 4)
    batches = [harness.to_tensordict(rollouts, list(range(i, i + 4)), "padded") for i in starts]
    return torch.cat([harness.pool_lengths("balanced", batch) for batch in batches])


def wrong_by_position(rollouts, column):
    other = harness.Rollouts(**{**rollouts.__dict__, "uid": [str(i // 4) for i in range(len(rollouts))]})
    return harness.pool_lengths("balanced", harness.to_tensordict(other, list(range(len(other))), "padded"))


def wrong_stale_mask(rollouts, column):
    before = rollouts.mask.clone()
    before[:, :-1] |= before[:, 1:]  # some tokens were rejected after these lengths were taken
    other = harness.Rollouts(**{**rollouts.__dict__, "mask": before})
    return harness.pool_lengths("balanced", harness.to_tensordict(other, list(range(len(other))), "padded"))


def wrong_extra_factor(rollouts, column):
    return column / 2  # as with a data-parallel size applied twice


@pytest.mark.parametrize("wrong", [wrong_by_micro_batch, wrong_by_position, wrong_stale_mask, wrong_extra_factor])
def test_a_wrong_column_is_seen(wrong):
    rollouts = harness.make_rollouts(1, groups=4, size=4)
    column = harness.pool_lengths("balanced", harness.to_tensordict(rollouts, list(range(16)), "padded"))
    leaf = rollouts.theta.clone()
    config = harness.make_actor_config("balanced")
    expected = harness.expected_loss(rollouts, "balanced", leaf, config, 16)
    right, _, _ = loss_through_verl(rollouts, "balanced", "padded", mean_length=column)
    assert right.item() == pytest.approx(expected.item(), rel=1e-12)
    value, _, _ = loss_through_verl(rollouts, "balanced", "padded", mean_length=wrong(rollouts, column))
    assert abs(value.item() - expected.item()) > 1e-4 * abs(expected.item())


# ---- what goes from rank to rank


def test_an_exception_of_any_class_reaches_the_other_ranks_as_one_that_they_can_raise(monkeypatch):
    """A rank that raised before the exchange would leave the others waiting in it."""

    class Foreign(Exception):
        pass

    class Batch(dict):
        def __contains__(self, name):
            raise Foreign("a column that cannot be read")

    sent = []
    monkeypatch.setattr(loss_agg, "all_gather", lambda mine, group: (sent.append(mine), ([mine], 0))[1])
    with pytest.raises(RuntimeError, match="Foreign: a column that cannot be read"):
        loss_agg.gather(Batch())
    assert [type(share) for share in sent] == [RuntimeError]


def test_tokens_between_the_rows_of_a_nested_tensor_do_not_count():
    """Rows with gaps: torch's nested tensors may hold values that belong to no row."""
    offsets, lengths = torch.tensor([0, 4, 8]), torch.tensor([2, 3])
    mask = torch.nested.nested_tensor_from_jagged(torch.ones(8, dtype=torch.long), offsets, lengths)
    advantages = torch.nested.nested_tensor_from_jagged(torch.tensor([1.0] * 4 + [-1.0] * 4), offsets, lengths)
    data = {"response_mask": mask, "advantages": advantages, "uid": ["a", "a"]}
    assert loss_agg.rows_of(data)["count"] == [[0, 3], [0, 0], [2, 0]]


def test_a_short_session_id_is_refused():
    data = bad_batch(lambda d: d._tensordict.__setitem__("session_id", NonTensorStack(0, 1)))
    with pytest.raises(ValueError, match="session_id: expected one entry per row, 8; got 2"):
        harness.pool_lengths("balanced", data)


# ---- the column is set while the loss runs, and cleared


def test_a_column_that_was_there_before_the_loss_is_there_again_after_it():
    """A distillation sets it, and its own call of ppo_loss must not take it away."""
    config = harness.make_actor_config("balanced")
    before = torch.full((8,), 7.0)
    config.global_batch_info[loss_agg.COLUMN] = before
    loss_through_verl(harness.make_rollouts(0, 2, 4), "balanced", "nested", config)
    assert config.global_batch_info[loss_agg.COLUMN] is before


def test_the_column_does_not_outlive_the_loss_even_if_it_raises():
    config = harness.make_actor_config("balanced", policy_loss={"loss_mode": "no-such-loss"})
    with pytest.raises(ValueError, match="no-such-loss"):
        loss_through_verl(harness.make_rollouts(0, 2, 4), "balanced", "nested", config)
    assert loss_agg.COLUMN not in config.global_batch_info


def test_distillation_aggregates_with_the_column_and_clears_it():
    from verl.workers.config import DistillationConfig

    rollouts = harness.make_rollouts(4, groups=3, size=4)
    config = harness.make_actor_config("balanced")
    distillation = DistillationConfig(enabled=False)
    settings = distillation.distillation_loss
    seen = []

    @distillation_losses.register_distillation_loss(
        distillation_losses.DistillationLossSettings(names=["test_theta"], use_estimator=True)
    )
    def theta_as_loss(config, distillation_config, model_output, data):
        seen.append(config.global_batch_info.get(loss_agg.COLUMN))
        return distillation_losses.no_padding_2_padding(model_output["log_probs"], data), {}

    for name, value in {"loss_mode": "test_theta", "use_task_rewards": True, "use_policy_gradient": False}.items():
        object.__setattr__(settings, name, value)
    object.__setattr__(settings, "loss_max_clamp", None)
    call = functools.partial(distillation_losses.distillation_ppo_loss, distillation_config=distillation)
    value, _, _ = loss_through_verl(rollouts, "balanced", "padded", config, loss=call)
    leaf = rollouts.theta.clone()
    arguments = (rollouts.mask.tolist(), rollouts.uid, rollouts.sign)
    expected = harness.expected_loss(rollouts, "balanced", leaf, config, 12)
    expected = expected + settings.distillation_loss_coef * reference.loss("balanced", leaf, *arguments)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    assert seen[0] is not None
    assert loss_agg.COLUMN not in config.global_batch_info
    assert loss_agg.COLUMN not in settings.global_batch_info


def test_aggregation_without_the_column_or_the_batch_size_is_an_error():
    loss, mask = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"without pool_mean_length and global_batch_size.*no fallback"):
        core_algos.agg_loss(loss, mask, "balanced")
    with pytest.raises(ValueError, match="without global_batch_size"):
        core_algos.agg_loss(loss, mask, "balanced", pool_mean_length=torch.ones(2))
    config = harness.make_actor_config("balanced")
    rollouts = harness.make_rollouts(0, 2, 4)
    data = harness.to_tensordict(rollouts, list(range(8)), "nested")
    harness.tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=9, global_batch_size=8)
    with pytest.raises(ValueError, match="update_actor"):
        losses.ppo_loss(config, harness.model_output(rollouts.theta.flatten(), data), data)


def test_verls_own_modes_are_untouched():
    torch.manual_seed(0)
    loss, mask = torch.randn(4, 6), torch.rand(4, 6) < 0.7
    original = hooks.attachment.originals["verl.trainer.ppo.core_algos.agg_loss"]
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        arguments = {"dp_size": 2, "batch_num_tokens": 17, "global_batch_size": 8, "loss_scale_factor": 3}
        assert torch.equal(core_algos.agg_loss(loss, mask, mode, **arguments), original(loss, mask, mode, **arguments))


# ---- configuration


def test_bypass_mode_with_rejection_is_refused():
    policy_loss = OmegaConf.create({"loss_mode": "bypass_mode", "rollout_correction": {"rollout_rs": "token_k1"}})
    with pytest.raises(ValueError, match=r"rollout_rs=token_k1 cannot follow .*=balanced: in bypass mode"):
        harness.make_actor_config("balanced", policy_loss=policy_loss)


@pytest.fixture(scope="module")
def trainer_config():
    return harness.compose_trainer_config()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"adv_estimator": "grpo"},
        {"adv_estimator": "gae"},
        {"adv_estimator": "reinforce_plus_plus", "gamma": 0.99},
        {"adv_estimator": "remax", "use_kl_in_reward": True},
    ],
    ids=lambda algorithm: algorithm["adv_estimator"],
)
def test_a_run_under_any_estimator_validates(trainer_config, algorithm):
    config = OmegaConf.merge(trainer_config, {"algorithm": algorithm})
    validate_config(config, use_reference_policy=False, use_critic=False)


def test_rejection_in_bypass_mode_is_refused_on_the_driver_before_any_process_starts(trainer_config):
    change = {"rollout_correction": {"bypass_mode": True, "rollout_rs": "token_k1"}}
    config = OmegaConf.merge(trainer_config, {"algorithm": change})
    with pytest.raises(ValueError, match=r"algorithm.rollout_correction.rollout_rs=token_k1 cannot follow"):
        validate_config(config, use_reference_policy=False, use_critic=False)
    config.actor_rollout_ref.actor.loss_agg_mode = "token-mean"
    validate_config(config, use_reference_policy=False, use_critic=False)


# ---- bad batches


def bad_batch(change):
    rollouts = harness.make_rollouts(0, 2, 4, empties=False)
    data = harness.to_tensordict(rollouts, list(range(8)), "padded")
    change(data)
    return data


def _short_uid(data):
    data._tensordict["uid"] = NonTensorStack("a", "b")


def _narrow_advantages(data):
    data["advantages"] = data["advantages"][:, :-1]


def _not_finite(data):
    data["advantages"][1] = math.nan


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.pop("uid"), KeyError, "needs uid in the batch of update_actor, got only"),
        (lambda d: d.pop("advantages"), KeyError, "needs advantages"),
        (lambda d: d.pop("response_mask"), KeyError, "needs response_mask"),
        (_short_uid, ValueError, "uid: expected one entry per row, 8; got 2"),
        (_narrow_advantages, ValueError, r"advantages \[8, 8\] and response_mask \[8, 9\] differ in shape"),
        (_not_finite, ValueError, "advantages: nan or inf at a valid token"),
    ],
)
def test_bad_batches_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        harness.pool_lengths("balanced", bad_batch(change))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1.0, 1.0])
def test_advantages_at_masked_positions_do_not_matter(garbage):
    rollouts = harness.make_rollouts(0, 2, 4)
    data = harness.to_tensordict(rollouts, list(range(8)), "padded")
    clean = harness.pool_lengths("balanced", data)
    data["advantages"] = torch.where(rollouts.mask, data["advantages"], garbage)
    assert torch.equal(harness.pool_lengths("balanced", data), clean)


# ---- seams


def test_a_lost_or_stale_seam_is_one_error_that_lists_all(monkeypatch):
    monkeypatch.setattr(losses, "ppo_loss", hooks.attachment.originals["verl.workers.utils.losses.ppo_loss"])
    monkeypatch.setattr(core_algos, "agg_loss", lambda *a: None)
    with pytest.raises(hooks.SeamError) as error:
        hooks.verify()
    text = str(error.value)
    assert f"verl {verl.__version__}" in text
    assert "losses.ppo_loss: replaced by something else" in text
    assert "core_algos.agg_loss: replaced by something else" in text
    assert "verl.workers.utils.losses.ppo_loss: still verl's own" in text


def test_another_plugins_wrapper_around_ours_is_accepted(monkeypatch):
    ours = core_algos.agg_loss

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(core_algos, "agg_loss", theirs)
    hooks.verify()


def test_installing_twice_changes_nothing():
    before = core_algos.agg_loss
    hooks.install()
    assert core_algos.agg_loss is before


def test_importing_verl_ba_has_no_side_effect():
    result = run_python(
        "-c",
        "import sys, verl_ba, verl_ba.hooks, verl_ba.aggregation, verl_ba.metrics\n"
        "print([m for m in ('verl', 'ray', 'vllm', 'wrapt') if m in sys.modules])",
        fork=False,
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
    control = run_python(
        "-c", "import sys, ray; print([m for m in ('verl', 'ray', 'vllm', 'wrapt') if m in sys.modules])"
    )
    assert "ray" in control.stdout  # the test can fail


def test_importing_verl_loads_no_module_with_a_seam_early():
    """Most processes of verl never train; loading its engines in them costs seconds and fixes the platform too soon."""
    code = (
        "import sys, verl\n"
        "from verl_ba import hooks\n"
        "print(hooks.is_installed(), sorted({s.module for s in hooks.SEAMS} & set(sys.modules)))"
    )
    # verl/__init__ itself imports these
    assert run_python("-c", code).stdout.strip() == "True ['verl.utils.config', 'verl.utils.py_functional']"


def test_modules_that_were_loaded_before_are_rebound_whatever_the_order():
    """The plugin comes last (model.external_lib): by-name copies made earlier are replaced, the driver's keep token-mean."""
    result = run_python(
        "-c",
        "import verl.trainer.ppo.ray_trainer as rt, verl.workers.engine_workers as ew\n"
        "from verl.trainer.ppo.core_algos import agg_loss as copy\n"
        "from verl_ba import hooks\n"
        "assert not hooks.is_installed()\n"
        "hooks.install()\n"
        "import sys, torch\n"
        "hooks.load_seam_modules()\n"
        "stale = [s for s in hooks.stale_bindings() if not s[0].startswith('__main__')]\n"
        "print(stale, ew.ppo_loss.__module__, hasattr(ew.ppo_loss, hooks.attach.MARK))\n"
        "ones = torch.ones(2, 3)\n"
        "print(rt.agg_loss(ones, ones, 'balanced').item())\n",
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_PLUGINS="verl_cpu",
    )
    assert result.stdout.splitlines()[-2:] == ["[] verl.workers.utils.losses True", "1.0"], result.stderr[-2000:]


# ---- releases, and what the user sees


@pytest.fixture
def fake_verl(tmp_path):
    """A verl of another release on the path, whose __init__ loads plugins as the real one does."""
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text("0.6.9\n")
    (tmp_path / "verl" / "__init__.py").write_text(
        "from importlib.metadata import entry_points\n"
        "__version__ = '0.6.9'\n"
        "for ep in entry_points(group='verl.plugins'):\n"
        "    try:\n"
        "        ep.load()\n"
        "    except Exception:\n"
        "        pass  # as verl: DEBUG only\n"
    )
    return tmp_path


def test_an_unsupported_release_is_named_on_screen_though_verl_hides_it(fake_verl):
    result = run_python("-c", "import verl; print(verl.__version__)", path=(str(fake_verl),))
    assert result.stdout.strip() == "0.6.9"
    assert "verl 0.6.9 is not supported" in result.stderr
    assert "tested releases: 0.7.1 (experimental), 0.8.0, 0.9.0, 0.9.1" in result.stderr


def test_verl_missing_is_named():
    code = (
        "import importlib.util, verl_ba.hooks as h\n"
        "importlib.util.find_spec = lambda name: None\n"
        "try: h.install()\n"
        "except h.releases.UnsupportedVerlError as e: print(e)"
    )
    message = run_python("-c", code).stdout
    assert "verl is not installed; tested releases: 0.7.1 (experimental), " in message
    assert "Try: pip install verl==0.9.1" in message


def doctor(**environment):
    return run_python("-c", "from verl_ba.tools.cli import app; app(['doctor'])", **environment)


def test_doctor_approves_this_environment():
    result = doctor(VERL_PLATFORM="cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" yes ") == len(hooks.seams())
    assert "✓ actor_rollout_ref.actor.loss_agg_mode may be balanced or group-mean-token-mean" in result.stdout


def test_doctor_says_why_not(fake_verl):
    result = doctor(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_PLUGINS="none")
    assert result.returncode == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading verl_ba" in result.stdout
    result = doctor(path=(str(fake_verl),))
    assert result.returncode == 1
    assert "verl 0.6.9 is not supported" in result.stdout


def test_without_the_cpu_platform_there_is_no_trace_of_it():
    code = (
        "import verl, sys\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "print(PlatformRegistry.get('cpu'), 'verl_cpu.platform' in sys.modules)"
    )
    assert run_python("-c", code).stdout.strip() == "None False"
    assert run_python("-c", code, VERL_PLATFORM="cpu").stdout.strip().endswith("True")
