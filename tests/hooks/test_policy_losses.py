"""Every row of the support table: verl's real policy losses through its real `ppo_loss`, split and not, in float64.

A loss's per-token matrix is known in two ways: written out in reference.py, or recorded from a run under verl's own
token-mean. Weighed by the literal reference, value and gradient must be what our mode gives.
"""

import functools
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import verl  # noqa: F401  loads the plugin, as in any verl process
from omegaconf import OmegaConf

from tests.support import reference
from tests.support import verl_harness as harness
from verl_ba import aggregation, hooks, loss_agg, support

hooks.load_seam_modules()
from verl.protocol import DataProto  # noqa: E402
from verl.trainer.distillation import losses as distillation_losses  # noqa: E402
from verl.trainer.ppo import core_algos, ray_trainer  # noqa: E402
from verl.workers.config import PolicyLossConfig  # noqa: E402
from verl.workers.utils import losses  # noqa: E402

FORMS = ("response", "token")
ROWS = 12
LOW, HIGH, DUAL, TAU_POSITIVE, TAU_NEGATIVE, BETA = 0.2, 0.28, 3.0, 1.0, 1.05, 0.1
BYPASS = {"loss_type": "ppo_clip", "rollout_is": "token", "rollout_rs": None}
SETTINGS = {
    "bypass_mode": {"rollout_correction": BYPASS},
    "dro": {"dro_beta": BETA},
    # a covariance is chosen in every micro-batch, or the losses would be vanilla's
    "clip_cov": {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.0, "clip_cov_ub": 1e9},
    "kl_cov": {"kl_cov_ratio": 0.3},
}
LITERAL = {
    "vanilla": lambda r, theta: reference.ppo_token_loss(theta, r.old, r.advantage_BT, LOW, HIGH, DUAL),
    "bypass_mode": lambda r, theta: reference.ppo_token_loss(theta, r.old, r.advantage_BT, LOW, HIGH, DUAL),
    "gspo": lambda r, theta: reference.gspo(theta, r.old, r.advantage_BT, r.mask, LOW, HIGH),
    "sapo": lambda r, theta: reference.sapo(theta, r.old, r.advantage_BT, TAU_POSITIVE, TAU_NEGATIVE),
    "cispo": lambda r, theta: reference.cispo(theta, r.old, r.advantage_BT, LOW, HIGH),
    "gpg": lambda r, theta: reference.reinforce(theta, r.advantage_BT),
    "dro": lambda r, theta: reference.dro(theta, r.old, r.advantage_BT, BETA),
}
# other tests register losses of their own, and releases differ
REGISTERED = {name for name, f in core_algos.POLICY_LOSS_REGISTRY.items() if f.__module__ == core_algos.__name__}
SUPPORTED = sorted(name for name in REGISTERED if support.POLICY_LOSSES[name].verdict != "refused")


def actor_config(mode, name, **settings):
    correction = OmegaConf.create(SETTINGS.get(name, {}))
    policy_loss = PolicyLossConfig(loss_mode=name, **correction)
    return harness.make_actor_config(
        mode, policy_loss=policy_loss, tau_pos=TAU_POSITIVE, tau_neg=TAU_NEGATIVE, **settings
    )


def run(rollouts, config, micro, layout="padded", add=None, loss=losses.ppo_loss):
    """(loss, gradient, matrices, θ): verl's ppo_loss over micro-batches of one mini-batch of all rows.

    `add` puts columns into the batch. The matrices are what the policy loss handed to `agg_loss`, in order.
    """
    rows = list(range(len(rollouts)))
    data = harness.to_tensordict(rollouts, rows, layout)
    for key, value in (add or {}).items():
        data[key] = value
    if config.loss_agg_mode in aggregation.MODES:
        harness.add_pool_lengths(config.loss_agg_mode, data)
    leaf = rollouts.theta.clone().requires_grad_()
    total, recorded = torch.zeros((), dtype=torch.float64), []
    original = core_algos.agg_loss

    def record(loss_mat, *args, **kwargs):
        recorded.append(loss_mat)
        return original(loss_mat, *args, **kwargs)

    core_algos.agg_loss = record
    try:
        for start in range(0, len(rows), micro):
            places = torch.arange(start, min(start + micro, len(rows)))
            part = harness.tu.index_select_tensor_dict(data, places)
            harness.tu.assign_non_tensor(
                part, dp_size=1, batch_num_tokens=int(rollouts.mask.sum()), global_batch_size=len(rows)
            )
            if layout == "padded":
                harness.tu.assign_non_tensor(part, max_response_len=rollouts.mask.shape[1])
            torch.manual_seed(start)  # clip_cov picks tokens at random
            value, _ = loss(config=config, model_output=harness.model_output(leaf.flatten(), part), data=part)
            total = total + value
    finally:
        core_algos.agg_loss = original
    gradient = torch.autograd.grad(total, leaf, retain_graph=True)[0]
    return total.detach(), gradient, recorded, leaf


def weighed(rollouts, mode, matrix, leaf):
    """(loss, gradient) of a per-token loss under the literal weights."""
    value = (harness.token_weights(rollouts, mode) * torch.where(rollouts.mask, matrix, 0.0)).sum() / len(rollouts)
    return value.detach(), torch.autograd.grad(value, leaf, retain_graph=True)[0]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def make_rollouts(form, seed=6, filled=False):
    rollouts = harness.make_rollouts(seed, groups=3, size=4, form=form)
    if filled:
        rollouts.mask[:, 0] = True
    return rollouts


def rollouts_for(name, form):
    """bypass_mode in verl raises on a micro-batch without a valid token."""
    return make_rollouts(form, filled=name == "bypass_mode")


# ---- the table


def test_the_table_has_every_policy_loss_and_every_estimator_of_verl_and_nothing_else():
    absent = {name for name, row in support.POLICY_LOSSES.items() if name not in REGISTERED and "since verl" in row.why}
    assert REGISTERED | absent == set(support.POLICY_LOSSES)
    estimators = {
        getattr(name, "value", name)
        for name, f in core_algos.ADV_ESTIMATOR_REGISTRY.items()
        if f.__module__ == core_algos.__name__
    }
    assert estimators == set(support.ESTIMATORS)


def test_the_docs_are_what_the_table_prints():
    written = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    assert written == support.markdown(), "run: python -m verl_ba.support > docs/support.md"


@pytest.mark.parametrize("mode", aggregation.MODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("micro", [1, 5, ROWS])
@pytest.mark.parametrize("name", SUPPORTED)
def test_policy_loss_equals_its_per_token_losses_under_the_literal_weights(name, micro, form, mode):
    rollouts = rollouts_for(name, form)
    value, gradient, _, leaf = run(rollouts, actor_config(mode, name), micro)
    _, _, recorded, other = run(rollouts, actor_config("token-mean", name), micro)
    expected = weighed(rollouts, mode, torch.cat(recorded), other)
    assert_same((value, gradient), expected)
    assert gradient.abs().max() > 1e-4
    if name in LITERAL:
        assert_same((value, gradient), weighed(rollouts, mode, LITERAL[name](rollouts, leaf), leaf))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SUPPORTED)
def test_policy_loss_is_the_same_under_every_split_unless_the_table_says_otherwise(name, form):
    rollouts = rollouts_for(name, form)
    config = actor_config("balanced", name)
    whole = run(rollouts, config, ROWS)[:2]
    parts = [run(rollouts, config, micro, layout)[:2] for micro, layout in ((1, "nested"), (5, "padded"))]
    if support.POLICY_LOSSES[name].per_micro_batch:
        assert not all(torch.allclose(part[1], whole[1], rtol=1e-3) for part in parts)
    else:
        for part in parts:
            assert_same(part, whole)


@pytest.mark.parametrize("name", [n for n, row in support.POLICY_LOSSES.items() if row.verdict == "refused"])
def test_a_refused_policy_loss_says_why_and_stays_available_under_verls_modes(name):
    with pytest.raises(ValueError, match=rf"policy_loss.loss_mode={name} cannot follow .*=balanced: .*Choose") as error:
        actor_config("balanced", name)
    assert support.POLICY_LOSSES[name].why in str(error.value)
    run(make_rollouts("response"), actor_config("token-mean", name), 4)


def test_a_loss_that_is_made_exact_is_verls_own_under_verls_modes():
    """sapo names seq-mean-token-mean itself: ours only under our modes."""
    rollouts = make_rollouts("response")
    under = {mode: run(rollouts, actor_config(mode, "sapo"), 4)[0] for mode in ("token-mean", "seq-mean-token-mean")}
    assert under["token-mean"] == under["seq-mean-token-mean"]
    assert abs(run(rollouts, actor_config("balanced", "sapo"), 4)[0] - under["token-mean"]) > 1e-4


def test_bypass_mode_with_reinforce():
    rollouts = make_rollouts("token")
    correction = {**BYPASS, "loss_type": "reinforce", "rollout_is_threshold": 1.1}
    policy_loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=OmegaConf.create(correction))
    value, gradient, _, leaf = run(rollouts, harness.make_actor_config("balanced", policy_loss=policy_loss), 5)
    weight = torch.exp(leaf - rollouts.old).detach().clamp(max=1.1)
    expected = weighed(rollouts, "balanced", weight * reference.reinforce(leaf, rollouts.advantage_BT), leaf)
    assert_same((value, gradient), expected)


# ---- what else meets the loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SUPPORTED)
def test_rollout_importance_weights_multiply_the_per_token_losses(name, form):
    rollouts = make_rollouts(form)
    generator = torch.Generator().manual_seed(1)
    weight = 0.5 + torch.rand(rollouts.mask.shape, dtype=torch.float64, generator=generator)
    add = {"rollout_is_weights": weight}
    value, gradient, _, _ = run(rollouts, actor_config("balanced", name), 5, add=add)
    _, _, plain, leaf = run(rollouts, actor_config("token-mean", name), 5)
    factor = 1.0 if name == "bypass_mode" else weight  # there the ratio is the weight
    assert_same((value, gradient), weighed(rollouts, "balanced", torch.cat(plain) * factor, leaf))


@pytest.mark.parametrize("name", SUPPORTED)
def test_rejected_tokens_are_out_of_the_lengths_and_out_of_the_loss(name):
    """verl's own rejection, before the update: single tokens, and a whole response."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    rollouts = make_rollouts("response")
    _, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=rollouts.old,
        rollout_log_prob=rollouts.old
        + 0.3 * torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)),
        response_mask=rollouts.mask.long(),
        rollout_rs="token_k1",
        rollout_rs_threshold="0.7_1.3",
    )
    before, rollouts.mask = rollouts.mask, mask.bool()
    rollouts.mask[3] = False
    assert 0 < int(rollouts.mask.sum()) < int(before.sum()) - int(before[3].sum())
    value, gradient, _, _ = run(rollouts, actor_config("balanced", name), 5)
    _, _, recorded, leaf = run(rollouts, actor_config("token-mean", name), 5)
    assert_same((value, gradient), weighed(rollouts, "balanced", torch.cat(recorded), leaf))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy_gradient", [True, False])
def test_distillation_is_weighed_by_the_pools_of_the_trainers_advantages(form, policy_gradient):
    from verl.workers.config import DistillationConfig

    distillation = DistillationConfig(enabled=False)
    settings = distillation.distillation_loss
    for key, value in {"loss_mode": "k3", "use_task_rewards": True, "use_policy_gradient": policy_gradient}.items():
        object.__setattr__(settings, key, value)
    rollouts = make_rollouts(form)
    data = harness.to_tensordict(rollouts, list(range(ROWS)), "padded")
    # the teacher's log-probability of each token, in the model's layout
    teacher = torch.nested.nested_tensor_from_jagged(
        torch.roll((rollouts.old - 0.2).flatten()[data["input_ids"].values()], -1), data["input_ids"].offsets()
    )
    call = functools.partial(distillation_losses.distillation_ppo_loss, distillation_config=distillation)
    config = actor_config("balanced", "vanilla")
    value, gradient, _, leaf = run(rollouts, config, 5, add={"teacher_logprobs": teacher}, loss=call)
    divergence = reference.low_variance_kl(leaf, rollouts.old - 0.2).clamp(-10, 10)
    if policy_gradient:
        clip = settings.clip_ratio_low, settings.clip_ratio_high
        divergence = reference.ppo_token_loss(leaf, rollouts.old, -divergence.detach(), *clip, DUAL)
    matrix = LITERAL["vanilla"](rollouts, leaf) + settings.distillation_loss_coef * divergence
    assert_same((value, gradient), weighed(rollouts, "balanced", matrix, leaf))


def test_lora_adapters_get_the_exact_gradient():
    """A real peft model: the gradient of its adapters, over micro-batches, is that of the literal loss."""
    import peft

    torch.manual_seed(0)
    rollouts = make_rollouts("token")
    width, vocabulary = rollouts.mask.shape[1], 7
    base = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, vocabulary)).double()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)).double()
    features = torch.randn(ROWS * width, 3, dtype=torch.float64)
    chosen = torch.randint(0, vocabulary, (ROWS * width, 1))
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert 0 < len(adapters) < len(list(model.parameters()))

    def log_probs():
        return model(features).log_softmax(-1).gather(1, chosen)[:, 0]

    def gradients(value):
        return torch.autograd.grad(value, adapters)

    config = harness.make_actor_config("balanced")
    data = harness.to_tensordict(rollouts, list(range(ROWS)), "nested")
    harness.add_pool_lengths("balanced", data)
    total = [torch.zeros_like(p) for p in adapters]
    for start in range(0, ROWS, 5):
        part = harness.tu.index_select_tensor_dict(data, torch.arange(start, min(start + 5, ROWS)))
        harness.tu.assign_non_tensor(part, dp_size=1, batch_num_tokens=1, global_batch_size=ROWS)
        value, _ = losses.ppo_loss(config=config, model_output=harness.model_output(log_probs(), part), data=part)
        total = [a + b for a, b in zip(total, gradients(value), strict=True)]
    matrix = LITERAL["vanilla"](rollouts, log_probs().view(ROWS, width))
    weights = harness.token_weights(rollouts, "balanced")
    assert_same(total, gradients((weights * torch.where(rollouts.mask, matrix, 0.0)).sum() / ROWS))


# ---- advantages from verl's own estimators


def estimated(name, reward, **algorithm):
    """Rollouts whose advantages verl's trainer computed with this estimator; token-level rewards [rows, T]."""
    rollouts = make_rollouts("response", seed=8, filled=True)  # estimators of verl divide by lengths
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(rollouts.mask.shape, dtype=torch.float64, generator=generator)
    last = rollouts.mask.long().cumsum(1).argmax(1)
    rewards = torch.zeros_like(noise)
    if reward == "token":  # process rewards, or a KL penalty in the reward
        rewards = (noise - 0.5) * rollouts.mask
    else:
        outcome = noise[:, 0] if reward == "continuous" else (noise[:, 0] < 0.5).double()
        rewards[torch.arange(ROWS), last] = outcome
    prompts = torch.ones(ROWS, 1)
    batch = {
        "token_level_rewards": rewards,
        "response_mask": rollouts.mask.long(),
        "values": noise.flip(0),
        **({"reward_baselines": noise[:, -1]} if name == "remax" else {}),
        "old_log_probs": rollouts.old,
        "sum_pi_squared": noise,
        "prompts": prompts,
        "attention_mask": torch.cat([prompts, torch.arange(rollouts.mask.shape[1])[None] <= last[:, None]], 1).long(),
    }
    scores = {key: np.array(noise[:, i].tolist()) for i, key in enumerate(("accuracy", "format"))}
    data = DataProto.from_dict(batch, non_tensors={"uid": np.array(rollouts.uid, dtype=object), **scores})
    config = OmegaConf.create(
        {
            "gdpo_reward_keys": ["accuracy", "format"],
            "gdpo_reward_weights": [1.0, 0.5],
            "norm_adv_by_std_in_grpo": True,
            "gamma": 1.0,
            "lam": 0.9,
            **algorithm,
        }
    )
    data = ray_trainer.compute_advantage(
        data, adv_estimator=name, gamma=config.gamma, lam=config.lam, num_repeat=4, config=config
    )
    rollouts.advantage = data.batch["advantages"].double()
    return rollouts


def check_estimated(rollouts):
    """Exact in value and gradient; returns whether the token-level form was taken."""
    config = actor_config("balanced", "vanilla")
    got = [run(rollouts, config, micro)[:2] for micro in (1, 5, ROWS)]
    leaf = rollouts.theta.clone().requires_grad_()
    expected = weighed(rollouts, "balanced", LITERAL["vanilla"](rollouts, leaf), leaf)
    for part in got:
        assert_same(part, expected)
    data = harness.to_tensordict(rollouts, list(range(ROWS)), "padded")
    return harness.pool_lengths("balanced", data).ndim == 2


@pytest.mark.parametrize("reward", ["binary", "continuous"])
@pytest.mark.parametrize("name", sorted(support.ESTIMATORS))
def test_every_estimator_of_verl_is_exact(name, reward):
    token_level = check_estimated(estimated(name, reward))
    assert support.ESTIMATORS[name] == "token" or not token_level


@pytest.mark.parametrize(
    ("name", "reward", "algorithm"),
    [
        ("gae", "binary", {}),
        ("optimal_token_baseline", "token", {}),
        ("tir_optimal_token_baseline", "token", {}),
        ("reinforce_plus_plus", "token", {"gamma": 0.9}),
        ("remax", "token", {}),
    ],
)
def test_the_estimators_called_token_really_change_sign_within_a_response(name, reward, algorithm):
    assert support.ESTIMATORS[name] == "token"
    assert check_estimated(estimated(name, reward, **algorithm))


# ---- losses of third parties


@core_algos.register_policy_loss("test_gaussian_kernel")
def gaussian_kernel(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """Advantages reweighted by a Gaussian kernel of the token's covariance with its response's log-probabilities."""
    mean = (log_prob * response_mask).sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)
    covariance = (advantages * (log_prob - mean)).detach()
    kernel = torch.exp(-covariance.square() / (2 * 0.5**2))
    per_token = -kernel * advantages * torch.exp(log_prob - old_log_prob)
    loss = core_algos.agg_loss(per_token, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {}


@pytest.mark.parametrize("form", FORMS)
def test_a_registered_loss_that_calls_agg_loss_is_exact(form):
    rollouts = make_rollouts(form)
    config = actor_config("balanced", "test_gaussian_kernel")
    leaf = rollouts.theta.clone().requires_grad_()
    rows = []
    for lp, old, a, mask in zip(leaf, rollouts.old, rollouts.advantage_BT, rollouts.mask, strict=True):
        covariance = (a * (lp - lp[mask].mean())).detach() if mask.any() else torch.zeros_like(lp)
        rows.append(-torch.exp(-(covariance**2) / 0.5) * a * torch.exp(lp - old))
    expected = weighed(rollouts, "balanced", torch.stack(rows), leaf)
    for micro in (1, 5, ROWS):
        assert_same(run(rollouts, config, micro)[:2], expected)


@core_algos.register_policy_loss("test_local_mean")
def local_mean(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    per_token = -advantages * torch.exp(log_prob - old_log_prob)
    return (per_token * response_mask).sum() / response_mask.sum(), {}


@core_algos.register_policy_loss("test_other_mode")
def other_mode(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    per_token = -advantages * torch.exp(log_prob - old_log_prob)
    loss = core_algos.agg_loss(per_token, response_mask, "seq-mean-token-sum", **config.global_batch_info)
    return loss, {}


@core_algos.register_policy_loss("test_no_batch_info")
def no_batch_info(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    per_token = -advantages * torch.exp(log_prob - old_log_prob)
    return core_algos.agg_loss(per_token, response_mask, loss_agg_mode), {}


def _beside(term):
    """A registered loss that calls agg_loss as it should, and returns `term` of that, its own mean and the mask."""

    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        per_token = -advantages * torch.exp(log_prob - old_log_prob)
        own = (per_token * response_mask).sum() / response_mask.sum()

        def aggregated(matrix):
            return core_algos.agg_loss(matrix, response_mask, loss_agg_mode, **config.global_batch_info)

        return term(aggregated, per_token, own), {}

    return loss


BESIDE = {
    "test_metric_only": lambda agg, per_token, own: own if agg(per_token) is not None else None,
    "test_metric_without_gradient": lambda agg, per_token, own: own if agg(per_token.detach()) is not None else None,
    "test_zero_term": lambda agg, per_token, own: own + agg(0 * per_token),
    "test_value_of_one_and_gradient_of_the_other": lambda agg, per_token, own: (
        agg(per_token).detach() + own - own.detach()
    ),
    "test_a_factor": lambda agg, per_token, own: agg(per_token) * 0.5,
    "test_a_term_more": lambda agg, per_token, own: agg(per_token) + 0.01 * agg(per_token**2),
    "test_in_place": lambda agg, per_token, own: agg(per_token).sub_(0.01 * agg(per_token**2)),
    "test_a_constant": lambda agg, per_token, own: agg(per_token) + own.detach(),
}
for _name, _term in BESIDE.items():
    core_algos.register_policy_loss(_name)(_beside(_term))


@pytest.mark.parametrize("name", ["test_a_term_more", "test_in_place", "test_a_constant"])
def test_a_loss_of_several_aggregated_terms_runs(name):
    rollouts = make_rollouts("response", filled=True)
    _, gradient, _, leaf = run(rollouts, actor_config("balanced", name), 4)
    per_token = -rollouts.advantage_BT * torch.exp(leaf - rollouts.old)
    more = {"test_a_term_more": 0.01, "test_in_place": -0.01, "test_a_constant": 0.0}[name]
    assert_same([gradient], [weighed(rollouts, "balanced", per_token + more * per_token**2, leaf)[1]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (
                name,
                "ignores .*=balanced: it returned a value whose gradient does not come from what agg_loss returned alone",
            )
            for name in list(BESIDE)[:4]
        ),
        ("test_a_factor", "ignores .*=balanced: it returned what agg_loss returned times a factor"),
        (
            "test_local_mean",
            r"'test_local_mean' \(tests.hooks.test_policy_losses.local_mean\) ignores .*=balanced: it never called",
        ),
        ("test_other_mode", r"ignores .*=balanced: it called agg_loss with loss_agg_mode=seq-mean-token-sum"),
        ("test_no_batch_info", r"agg_loss with loss_agg_mode=balanced was called without pool_mean_length"),
    ],
)
def test_a_registered_loss_that_goes_past_the_mode_is_told_what_to_do(name, message):
    rollouts = make_rollouts("response")
    with pytest.raises(ValueError, match=message) as error:
        run(rollouts, actor_config("balanced", name), 4)
    assert "**config.global_batch_info" in str(error.value)
    assert loss_agg.running_policy_loss() is None  # the next loss starts afresh
    run(rollouts, actor_config("balanced", "vanilla"), 4)
    assert math.isfinite(run(rollouts, actor_config("token-mean", name), 4)[0])


def test_a_policy_loss_may_be_called_by_position():
    with pytest.raises(ValueError, match="ignores"):
        core_algos.get_policy_loss_fn("test_local_mean")(*torch.ones(4, 1, 1), "balanced", None)
    assert inspect.signature(core_algos.get_policy_loss_fn("vanilla")) == inspect.signature(
        core_algos.compute_policy_loss_vanilla
    )
