# Copyright 2026 The verl_ba authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Registered loss aggregations: the registry, the two modes, and every place of verl that calls `loss_agg`."""

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.trainer.ppo import core_algos, loss_agg
from verl.trainer.ppo.loss_agg import compute_pool_mean_length, loss_agg_info, register_loss_agg
from verl.utils import config as verl_config
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

MODE = "test-length-of-the-longest"
MODES = ["balanced", "group-mean-token-mean"]
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, 2.0])[:, None].expand(4, 3)
UID = ["a", "a", "b", "b"]


@pytest.fixture
def seen(monkeypatch):
    """A registered mode that divides by the longest response of the group; what it was called with."""
    calls = []

    def longest(count_is, group):
        calls.append((count_is, group))
        length = count_is.sum(dim=1)
        return torch.stack([length[group == g].max() for g in group])[:, None].expand_as(count_is)

    monkeypatch.setitem(loss_agg.LOSS_AGG_REGISTRY, MODE, longest)
    return calls


def stack(labels):
    return NonTensorStack.from_list([NonTensorData(label) for label in labels])


def batch(uid, advantages, mask, session_id=None):
    data = TensorDict({"advantages": advantages, "response_mask": mask}, batch_size=len(uid))
    data["uid"] = stack(uid)
    if session_id is not None:
        data["session_id"] = stack(session_id)
    return data


def batch_of_lengths(uid, advantages, lengths, session_id=None):
    width = max(lengths)
    advantages = torch.tensor(advantages, dtype=torch.float64)[:, None].expand(-1, width).clone()
    return batch(uid, advantages, (torch.arange(width) < torch.tensor(lengths)[:, None]).long(), session_id)


def weights(mode, data):
    """T_i / mean length of i's pool."""
    return data["response_mask"].sum(dim=1) / compute_pool_mean_length(mode, data)["pool_mean_length"]


def actor_config(mode, **settings):
    return FSDPActorConfig(
        loss_agg_mode=mode,
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        **settings,
    )


# The registry


def test_a_registered_mode_is_given_tokens_by_sign_and_group(seen):
    column = compute_pool_mean_length(MODE, batch(UID, ADVANTAGES, MASK))["pool_mean_length"]
    (count_is, group), *more = seen
    assert not more
    assert count_is.tolist() == [[0, 0, 3], [1, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert group.tolist() == [0, 0, 1, 1]
    assert column.tolist() == [3, 3, 2, 0]  # an empty response has no length


def test_a_response_with_two_signs_makes_the_column_one_by_sign(seen):
    advantages = ADVANTAGES.clone()
    advantages[0, 0] = -1.0
    loss_agg.LOSS_AGG_REGISTRY[MODE] = lambda count, group: torch.tensor([1.0, 2.0, 4.0]).double().expand_as(count)
    data = batch(UID, advantages, MASK)
    data.update(compute_pool_mean_length(MODE, data))
    assert data["pool_mean_length"].tolist() == [[1, 0, 4], [1, 0, 0], [0, 2, 0], [0, 0, 0]]
    token = loss_agg_info(MODE, data)["pool_mean_length"]
    assert token[0].tolist() == [1, 4, 4]


def test_rows_of_one_session_are_one_response(seen):
    data = batch(["a"] * 3, torch.ones(3, 3), MASK[:3], session_id=[7, 7, 8])
    column = compute_pool_mean_length(MODE, data)["pool_mean_length"]
    ((count_is, _),) = seen
    assert count_is.sum(dim=1).tolist() == [4, 2]
    assert column.tolist() == [4 * 2 / 3] * 3  # the longest has 4 tokens; two responses in three rows


def test_verls_own_modes_get_no_column():
    data = batch(UID, ADVANTAGES, MASK)
    assert compute_pool_mean_length("token-mean", data) == {}
    assert loss_agg_info("token-mean", data) == {}


def test_a_name_that_is_taken_is_refused(seen):
    for name in ("token-mean", "balanced"):
        with pytest.raises(ValueError, match=f"register_loss_agg.'{name}'.: this mode is .* already"):
            register_loss_agg(name)(lambda count_is, group: count_is)


# The two modes


def test_ten_tokens_against_a_thousand():
    data = batch_of_lengths(["a"] * 4, [1, 1, -1, -1], [10, 1000, 1000, 1000])
    assert weights("balanced", data).tolist() == pytest.approx([10 / 505, 1000 / 505, 1, 1])
    mean = 3010 / 4
    assert weights("group-mean-token-mean", data).tolist() == pytest.approx([10 / mean] + [1000 / mean] * 3)


@pytest.mark.parametrize("mode", MODES)
def test_weights_add_up_to_the_responses_that_are_not_empty(mode):
    data = batch_of_lengths(["a", "b", "a", "b", "pad"], [1, -1, 0, 2, 0], [3, 5, 2, 7, 0])
    assert weights(mode, data)[:4].sum().item() == pytest.approx(4)
    data = batch_of_lengths(["a", "b", "a", "b", "pad"], [1, -1, 1, 2, 0], [3, 5, 2, 7, 0], [0, 0, 0, 1, 0])
    assert weights(mode, data)[:4].sum().item() == pytest.approx(4)


def test_on_policy_the_balanced_policy_loss_is_zero():
    advantages = [1.5, -0.5, -0.5, -0.5]  # they add up to 0, as GRPO's do
    data = batch_of_lengths(["a"] * 4, advantages, [2, 9, 4, 6])
    data.update(compute_pool_mean_length("balanced", data))
    info = loss_agg_info("balanced", data)
    loss = core_algos.agg_loss(-data["advantages"], data["response_mask"], "balanced", global_batch_size=4, **info)
    assert abs(loss.item()) < 1e-15


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_loss_and_gradient_do_not_depend_on_micro_batches(mode, size):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (12,), generator=generator).tolist()
    advantages = torch.randn(12, generator=generator).tolist()
    data = batch_of_lengths([f"prompt-{i % 3}" for i in range(12)], advantages, lengths)
    data["advantages"][4, ::2] *= -1  # two signs in one response
    data.update(compute_pool_mean_length(mode, data))
    loss_mat = torch.randn(data["advantages"].shape, dtype=torch.float64, generator=generator).requires_grad_()

    def run(rows):
        part = data[rows]
        info = loss_agg_info(mode, part)
        return core_algos.agg_loss(loss_mat[rows], part["response_mask"], mode, global_batch_size=12, **info)

    whole = run(slice(0, 12))
    (expected,) = torch.autograd.grad(whole, loss_mat)
    order = torch.randperm(12, generator=generator)
    split = sum(run(order[i : i + size]) for i in range(0, 12, size))
    (gradient,) = torch.autograd.grad(split, loss_mat)
    assert split.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_rows_does_not_matter(mode):
    uid, advantages, lengths = ["a", "b", "a", "b", "a"], [1, -1, -1, 0, 1], [3, 5, 2, 7, 4]
    column = compute_pool_mean_length(mode, batch_of_lengths(uid, advantages, lengths))["pool_mean_length"]
    order = [4, 2, 0, 3, 1]
    other = batch_of_lengths(*([values[i] for i in order] for values in (uid, advantages, lengths)))
    assert torch.equal(compute_pool_mean_length(mode, other)["pool_mean_length"], column[order])


# Where verl calls it


def test_agg_loss_divides_by_the_lengths_and_masked_positions_do_not_matter(seen):
    loss = torch.tensor([[1.0, 2.0, 3.0], [4.0, float("inf"), 0.0], [5.0, 5.0, float("nan")], [1.0, 1.0, 1.0]])
    loss.requires_grad_()
    lengths = torch.tensor([3.0, 3.0, 2.0, 0.0], dtype=torch.float64)
    value = core_algos.agg_loss(loss, MASK, MODE, dp_size=2, global_batch_size=8, pool_mean_length=lengths)
    assert value.item() == pytest.approx((6 / 3 + 4 / 3 + 10 / 2) / 8 * 2)
    value.backward()
    assert torch.equal(loss.grad != 0, MASK.bool())
    parts = [
        core_algos.agg_loss(loss[i : i + 1], MASK[i : i + 1], MODE, 2, None, 8, None, lengths[i : i + 1])
        for i in range(4)
    ]
    assert sum(parts).item() == pytest.approx(value.item())


def test_what_is_missing_is_an_error(seen):
    with pytest.raises(ValueError, match=f"{MODE} was called without pool_mean_length and global_batch_size"):
        core_algos.agg_loss(torch.ones(2, 3), torch.ones(2, 3), MODE)
    data = batch(UID, ADVANTAGES, MASK)
    with pytest.raises(KeyError, match="pool_mean_length"):
        loss_agg_info(MODE, data)
    data.pop("uid")
    with pytest.raises(KeyError, match="needs uid in the batch of update_actor"):
        compute_pool_mean_length(MODE, data)


def test_an_advantage_that_is_not_finite_is_an_error_unless_masked():
    data = batch(UID, ADVANTAGES.clone(), MASK)
    data["advantages"][1, 2] = float("nan")  # masked
    compute_pool_mean_length("balanced", data)
    data["advantages"][1, 0] = float("nan")
    with pytest.raises(ValueError, match="nan or inf at a valid token"):
        compute_pool_mean_length("balanced", data)


def policy_loss(name, mode):
    """The policy loss of four tokens in two responses of 1 and 3 tokens, lengths 2 and 3."""
    config = actor_config(mode, policy_loss=PolicyLossConfig(loss_mode=name))
    config.global_batch_info.update(global_batch_size=2, pool_mean_length=torch.tensor([2.0, 3.0]))
    log_prob = torch.zeros(2, 3)
    return core_algos.get_policy_loss_fn(name)(
        old_log_prob=log_prob,
        log_prob=log_prob,
        advantages=torch.tensor([[-1.0], [-2.0]]).expand(2, 3),
        response_mask=torch.tensor([[1, 0, 0], [1, 1, 1]]),
        loss_agg_mode=mode,
        config=config,
    )[0].item()


@pytest.mark.parametrize("name", ["vanilla", "gspo", "sapo"])
def test_policy_losses_follow_the_mode_also_those_that_name_one_themselves(name):
    scale = policy_loss(name, "seq-mean-token-mean") / ((1 + 2) / 2)  # sapo's gate is not 1 where nothing has moved
    assert policy_loss(name, "balanced") == pytest.approx(scale * (1 / 2 + 3 * 2 / 3) / 2)


def test_a_policy_loss_that_ignores_the_mode_is_an_error(monkeypatch):
    def own_mean(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **_):
        return log_prob.mean(), {}

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "own-mean", own_mean)
    with pytest.raises(ValueError, match=r"policy loss 'own-mean' .* ignores .*loss_agg_mode=balanced"):
        policy_loss("own-mean", "balanced")
    policy_loss("own-mean", "token-mean")


def test_the_configuration_asks_the_registry(seen):
    assert actor_config(MODE).loss_agg_mode == MODE
    with pytest.raises(ValueError, match=f"Invalid loss_agg_mode: no-such-mode.*token-mean.*{MODE}"):
        actor_config("no-such-mode")
    geo_mean = PolicyLossConfig(loss_mode="geo_mean")
    with pytest.raises(ValueError, match=f"geo_mean has no token losses to weigh by loss_agg_mode={MODE}"):
        actor_config(MODE, policy_loss=geo_mean)
    actor_config("token-mean", policy_loss=geo_mean)


def test_rejection_in_bypass_mode_is_refused_in_the_configuration(seen, monkeypatch):
    said = f"{MODE} takes lengths before rollout_rs in bypass_mode rejects tokens"
    for loss_mode, rejection, refused in (
        ("bypass_mode", "token_k1", True),
        ("bypass_mode", None, False),
        ("vanilla", "token_k1", False),
    ):
        policy = {"loss_mode": loss_mode, "rollout_correction": {"rollout_rs": rejection}}
        if refused:
            with pytest.raises(ValueError, match=said):
                actor_config(MODE, policy_loss=policy)
        else:
            actor_config(MODE, policy_loss=policy)
        actor_config("token-mean", policy_loss=policy)

    # The driver's own setting, algorithm.rollout_correction.
    actor = actor_config(MODE)
    monkeypatch.setattr(verl_config, "omega_conf_to_dataclass", lambda config: actor)
    config = OmegaConf.create(
        {
            "trainer": {"n_gpus_per_node": 1, "nnodes": 1},
            "data": {"train_batch_size": actor.ppo_mini_batch_size},
            "actor_rollout_ref": {"actor": {"use_dynamic_bsz": True}, "model": {}},
            "algorithm": {"rollout_correction": {"bypass_mode": True, "rollout_rs": "token_k1"}},
        }
    )
    with pytest.raises(ValueError, match=said):
        verl_config.validate_config(config, use_reference_policy=False, use_critic=False)


def test_values_and_the_drivers_entropy_are_token_mean(seen):
    assert loss_agg.metric_loss_agg_mode(MODE) == "token-mean"
    assert loss_agg.metric_loss_agg_mode("seq-mean-token-sum") == "seq-mean-token-sum"
    values, returns = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 1.0], [3.0, 9.0, 9.0]])
    loss = {
        mode: core_algos.compute_value_loss(values, returns, values, MASK[:2], 10.0, loss_agg_mode=mode)[0]
        for mode in (MODE, "token-mean")
    }
    assert loss[MODE] == loss["token-mean"]
    assert loss[MODE].item() == pytest.approx(0.5 * (1 + 1 + 1 + 9) / 4)
