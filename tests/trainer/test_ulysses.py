"""verl's default layout, packed rows, under Ulysses in the real trainer: two ranks share the tokens of every micro-batch."""

import pytest

from tests.support.trainer_run import check_parts_by_sign, deviation_from_the_dump, launch, pg_losses

pytestmark = pytest.mark.trainer


@pytest.mark.deep
def test_ulysses_with_packed_rows_is_zero_on_policy(prepared, tmp_path):
    result, steps = launch(
        prepared,
        tmp_path,
        "balanced",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.model.override_config.attn_implementation=packed",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    )
    assert max(pg_losses(result, steps)) <= 1e-6
    assert deviation_from_the_dump(tmp_path, "balanced", steps) <= 1e-6
    check_parts_by_sign(steps)
