"""The checks of trainer_run.py can fail: on numbers a wrong hook would have computed, and on losses weighed by others."""

import pytest
import torch

from tests.support import trainer_run
from tests.support import verl_harness as harness
from verl_ba.aggregation import pool_mean_length


def make_update(seed: int, wrong: str = "") -> trainer_run.Update:
    """An update of two ranks, each with every second row; rows of one rollout are one session."""
    rollouts = harness.make_rollouts(seed, groups=4, size=6)
    rank = [i % 2 for i in range(len(rollouts))]
    session = [i % 4 for i in range(len(rollouts))]
    rows_of = [[i for i, r in enumerate(rank) if r == n] for n in (0, 1)] if wrong == "each rank alone" else [range(24)]
    column = [0.0] * len(rollouts)
    for rows in rows_of:
        numbers = pool_mean_length(
            "group-mean-token-mean" if wrong == "another mode" else "balanced",
            [int(rollouts.mask[i].sum()) for i in rows],
            [rollouts.uid[i] for i in rows],
            [rollouts.sign[i] for i in rows],
            None if wrong == "rows for responses" else [session[i] for i in rows],
        )
        for i, number in zip(rows, numbers.tolist(), strict=True):
            column[i] = number
    mask = rollouts.mask.int()
    uid = [f"{seed}-{name}" for name in rollouts.uid]
    loss = {"row_loss": [1.0] * 24, "length": mask.sum(1).tolist(), "column": list(column), "num_responses": 24}
    advantage = rollouts.advantage_BT.tolist()
    return trainer_run.Update("balanced", uid, session, advantage, mask.tolist(), column, rank, [loss])


def test_right_numbers_pass():
    updates = [make_update(seed) for seed in (1, 2)]
    trainer_run.check_updates(updates)
    column = torch.tensor(updates[0].column)
    assert trainer_run.logged_again(updates[0]) == pytest.approx((1 / column[column > 0]).sum().item() / 24)


@pytest.mark.parametrize("wrong", ["each rank alone", "another mode", "rows for responses"])
def test_wrong_numbers_are_seen(wrong):
    with pytest.raises(AssertionError):
        trainer_run.check_updates([make_update(1, wrong)])


def test_a_group_in_two_updates_is_seen():
    with pytest.raises(AssertionError, match="in two updates"):
        trainer_run.check_updates([make_update(1), make_update(1)])


def test_a_loss_weighed_by_other_lengths_is_seen():
    update = make_update(1)
    update.losses[0]["column"][3] += 1
    with pytest.raises(AssertionError, match="weighed by other lengths"):
        trainer_run.logged_again(update)
