"""Rounding decides no sign: advantages of verl's own estimators in float32, against the signs of exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import verl  # noqa: F401  loads the plugin, as in any verl process
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo import core_algos

from tests.support import reference
from tests.support import verl_harness as harness
from verl_ba import loss_agg
from verl_ba.tools.analysis import weighing

ESTIMATORS = {
    "grpo": core_algos.compute_grpo_outcome_advantage,
    "grpo without std": lambda *a: core_algos.compute_grpo_outcome_advantage(*a, norm_adv_by_std_in_grpo=False),
    "rloo": core_algos.compute_rloo_outcome_advantage,
}


def batch(rewards, lengths, estimator="grpo", layout="padded") -> TensorDict:
    """One prompt with these rewards, their advantages by verl's own estimator."""
    rows, width = len(rewards), max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    scores = torch.zeros(rows, width)
    scores[torch.arange(rows), torch.tensor(lengths) - 1] = torch.tensor(rewards, dtype=torch.float32)
    advantages, _ = ESTIMATORS[estimator](scores, mask.float(), np.array(["p"] * rows, dtype=object))
    columns = {"advantages": advantages, "response_mask": mask.long()}
    if layout == "nested":
        columns = {
            name: torch.nested.as_nested_tensor([r[:n] for r, n in zip(c, lengths, strict=True)], layout=torch.jagged)
            for name, c in columns.items()
        }
    data = TensorDict(columns, batch_size=rows)
    data["uid"] = NonTensorStack.from_list([NonTensorData("p")] * rows)
    return data


@pytest.mark.parametrize("layout", ["padded", "nested"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_responses_at_the_mean_do_not_join_the_negatives(estimator, layout):
    rewards, lengths = [0.1, 0.3] + [0.2] * 6, [100, 100] + [4000] * 6
    data = batch(rewards, lengths, estimator, layout)
    column = harness.pool_lengths("balanced", data)
    weight = torch.tensor(lengths) / column
    assert weight.tolist() == pytest.approx([1.0] * 8)  # the only negative weighed .029 before
    assert loss_agg.gather(data).count_BS.tolist() == [[100, 0, 0], [0, 0, 100]] + [[0, 4000, 0]] * 6


def test_zero_and_one_leave_no_rounding_whatever_the_group():
    for right in (1, 511, 1023):
        data = batch([1.0] * right + [0.0] * (1024 - right), [2] * 1024)
        count = loss_agg.gather(data).count_BS
        assert count.sum(0).tolist() == [2 * (1024 - right), 0, 2 * right]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(ESTIMATORS)),
    st.lists(st.integers(0, 20), min_size=2, max_size=32),
    st.sampled_from([3, 5, 7, 10, 100]),
    st.sampled_from([1e-3, 0.1, 1.0, 7.0, 1e4]),
)
def test_signs_are_those_of_exact_fractions_at_every_scale_of_rewards(estimator, steps, denominator, scale):
    """Rewards k/denominator times a scale, k from 0 to 20: the mean in fractions says which advantages are zero."""
    mean = Fraction(sum(steps), len(steps))
    exact = [(k > mean) - (k < mean) for k in steps]
    if scale / denominator < 1e-4 or len(set(steps)) == 1:  # below verl's 1e-6 beside the deviation; no variance
        return
    data = batch([k / denominator * scale for k in steps], [3] * len(steps), estimator)
    count = loss_agg.gather(data).count_BS
    assert (count.argmax(1) - 1).tolist() == exact
    mask = [[True] * 3] * len(steps)
    assert reference.rounded_signs(data["advantages"].tolist(), mask, ["p"] * len(steps)) == [[s] * 3 for s in exact]


def test_a_token_that_is_zero_up_to_rounding_in_its_row_reads_the_pool_of_zero():
    advantages = torch.tensor([[1.0, -2e-8, -1.0], [-3e-9, -3e-9, -3e-9], [-0.5, 0.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    data = TensorDict({"advantages": advantages, "response_mask": mask}, batch_size=3)
    data["uid"] = NonTensorStack.from_list([NonTensorData("p")] * 3)
    data.update(loss_agg.compute_pool_mean_length("balanced", data))
    got = 1 / loss_agg.loss_agg_info("balanced", data)[loss_agg.COLUMN]
    expected = reference.token_weights("balanced", advantages.tolist(), mask.bool().tolist(), ["p"] * 3)
    assert got[mask.bool()].tolist() == pytest.approx(
        torch.tensor(expected, dtype=torch.float64)[mask.bool()].tolist(), rel=1e-12
    )
    assert loss_agg.gather(data).count_BS.tolist() == [[1, 1, 1], [0, 3, 0], [1, 1, 0]]


def test_the_group_is_seen_over_all_ranks(monkeypatch):
    """The rank that holds only the responses at the mean cannot know that they are rounding."""
    data = batch([0.1, 0.3] + [0.2] * 6, [1, 1] + [4] * 6)
    shares = [loss_agg.rows_of(data[:2]), loss_agg.rows_of(data[2:])]
    monkeypatch.setattr(loss_agg, "all_gather", lambda mine, group: (shares, 1))
    update = loss_agg.gather(data[2:])
    assert update.count_BS[update.local].tolist() == [[0, 4, 0]] * 6


@pytest.mark.parametrize("estimator", weighing.ADVANTAGES)
def test_the_analysis_of_a_dump_has_the_same_signs(estimator):
    score, group = np.array([0.1, 0.3] + [0.2] * 6), np.zeros(8, dtype=np.int64)
    value = torch.from_numpy(np.abs(weighing.advantages(score, group, estimator)))
    rounded = loss_agg.zero_up_to_rounding(value, torch.from_numpy(group))
    assert rounded.tolist() == [False] * 2 + [True] * 6


# ---- a session_id that the trainer did not set


def with_sessions(session, layout="padded", rewards=(1.0, 1.0, 0.0, 0.0)) -> TensorDict:
    data = batch(list(rewards), [10, 1000, 1000, 1000], layout=layout)
    data["session_id"] = NonTensorStack.from_list([NonTensorData(s) for s in session])
    return data


def test_a_session_that_is_constant_within_the_prompts_is_refused():
    with pytest.raises(
        ValueError, match=r"session_id: the same within every prompt.*rename the column of the data set"
    ):
        harness.pool_lengths("balanced", with_sessions([7] * 4))


@pytest.mark.parametrize(
    "data",
    [
        with_sessions([0, 1, 2, 3]),
        with_sessions([0, 0, 1, 1]),
        with_sessions([7] * 4, rewards=(0.0,) * 4),  # the same under any session
        with_sessions([7] * 4, layout="nested"),  # the v1 trainer's rows: one rollout of several rows
    ],
)
def test_other_sessions_are_believed(data):
    assert (harness.pool_lengths("balanced", data) > 0).all()
