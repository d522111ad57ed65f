"""verl's real trainer on the CPU: Ray, two FSDP ranks, vLLM. A run takes a minute or two, so each checks several things.

On policy (one mini-batch a step), with GRPO advantages and binary rewards, the balanced policy loss is 0 in every group, so
`actor/pg_loss` is 0 to float precision whatever the split; token-mean's is not.
"""

import pytest

from tests.support.trainer_run import check_parts_by_sign, deviation_from_the_dump, launch, pg_losses
from verl_ba import releases

pytestmark = pytest.mark.trainer


def test_v1_trainer_balanced_is_zero_on_policy(prepared, tmp_path):
    """FSDP1, dynamic micro-batches small enough to split every rank's share."""
    split = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256"
    result, steps = launch(prepared, tmp_path, "balanced", split, "actor_rollout_ref.actor.entropy_coeff=0.001")
    assert max(pg_losses(result, steps)) <= 1e-6
    for rank in range(2):  # each worker says once what is attached
        line = f"[verl_ba] rank {rank}: actor_rollout_ref.actor.loss_agg_mode=balanced; verl_ba"
        assert result.stdout.count(line) == 1
    assert result.stdout.count("is UNTESTED with verl_ba") == (1 if releases.untested() else 0)
    assert all(step["balance/active/applied_residual"] <= 1e-6 for step in steps)
    assert deviation_from_the_dump(tmp_path, "balanced", steps) <= 1e-6
    check_parts_by_sign(steps)
    assert all(step[f"balance/entropy/{sign}"] > 0 for step in steps for sign in ("negative", "positive"))


@pytest.mark.deep
def test_v1_trainer_token_mean_is_not_zero_on_policy(prepared, tmp_path):
    """The control: the same check can fail. And verl's own modes log the same numbers."""
    result, steps = launch(prepared, tmp_path, "verl-token")
    assert min(pg_losses(result, steps)) > 1e-3
    assert deviation_from_the_dump(tmp_path, "verl-token", steps) <= 1e-6
    check_parts_by_sign(steps)
    for step in steps:
        assert step["balance/active/moved"] == 0 < step["balance/balanced/moved"]
        share = step["balance/pg_loss/negative"] / (step["balance/pg_loss/negative"] - step["balance/pg_loss/positive"])
        assert step["balance/active/gradient_share_negative"] == pytest.approx(share, abs=1e-4)  # on policy
    assert "no balance/… metrics" not in result.stdout


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            (
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.use_dynamic_bsz=False",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
            ),
            id="v1-fsdp2-fixed-micro-batches",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            ("trainer.use_v1=False", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256"),
            id="legacy-padded-dynamic-micro-batches",
        ),
    ],
)
def test_balanced_is_zero_on_policy_beside_a_kl_term(prepared, tmp_path, overrides):
    """With a reference policy; the policy term alone is logged as pg_loss."""
    result, steps = launch(prepared, tmp_path, "balanced", "actor_rollout_ref.actor.use_kl_loss=True", *overrides)
    assert max(pg_losses(result, steps)) <= 1e-6
    assert steps[-1]["actor/kl_loss"] > 0
    assert deviation_from_the_dump(tmp_path, "balanced", steps) <= 1e-6
    check_parts_by_sign(steps)


@pytest.mark.deep
def test_v1_trainer_takes_advantages_that_change_sign_within_a_response(prepared, tmp_path):
    """Discounting: early tokens of a right answer fall below the mean. sapo, whose aggregation is ours, on top."""
    result, steps = launch(
        prepared,
        tmp_path,
        "balanced",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.gamma=0.9",
        "actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    )
    assert min(pg_losses(result, steps)) > 1e-3  # no cancellation: signs are a token's, not a response's
    for step in steps:
        parts = [step[f"balance/pg_loss/{sign}"] for sign in ("negative", "zero", "positive")]
        assert sum(parts) == pytest.approx(step["actor/pg_loss"], abs=1e-6)
        assert "balance/responses" not in step
    assert result.stdout.count("no balance/… metrics of whole groups: advantages change sign within a response") > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "policy_loss.loss_mode=geo_mean cannot follow"),
        pytest.param(
            "actor_rollout_ref.actor.loss_agg_mode=balenced",
            "loss_agg_mode='balenced' is not a loss aggregation mode",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_refused_run_ends_before_ray_starts(prepared, tmp_path, override, message):
    result, steps = launch(prepared, tmp_path, "balanced", override)
    assert result.returncode != 0
    assert message in result.stdout
    assert "Started a local Ray instance" not in result.stdout
    assert not steps
