"""What is logged under `balance/`, through verl's own update path in one process; several ranks: test_ranks."""

import math
import types

import pytest
import torch
import verl  # noqa: F401  loads the plugin, as in any verl process
from verl.utils.metric import Metric, reduce_metrics

from tests.support import verl_harness as harness
from verl_ba import aggregation, hooks, say
from verl_ba.hooks import log
from verl_ba.metrics import APPLIED_RESIDUAL, METRICS, SIGN_METRICS, SIGN_NAMES, balance_metrics, record

pytestmark = pytest.mark.usefixtures("one_process")

hooks.load_seam_modules()
from verl.trainer.ppo import core_algos, ray_trainer  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.utils import py_functional  # noqa: E402

CONSTANT_DIVISOR = ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LOSSES = ("gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo", "dppo_tv")
EVERY_MODE = (*aggregation.ALL_MODES, *CONSTANT_DIVISOR)


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    say.forget()


def logged(
    rollouts, mode, *, config=None, micro=None, mini_batches=1, epochs=1, layout="nested", change=None, **kwargs
):
    """What verl would log of one update, its gradients, and verl's policy loss before it is reduced."""
    config = config or harness.make_actor_config(mode, entropy_coeff=0.01, **kwargs)
    worker = harness.make_worker(rollouts, config, micro, max_tokens=24)
    data = harness.to_tensordict(rollouts, list(range(len(rollouts))), layout)
    if change:
        change(data)
    size = len(rollouts) // mini_batches
    torch.manual_seed(0)  # clip_cov picks tokens at random
    metrics = harness.update(worker, data, size, epochs, shuffle=mini_batches > 1)
    return reduce_metrics(py_functional.rename_dict(metrics, "actor/")), worker.engine.gradients


def live_metrics(mode) -> set[str]:
    """What only the losses of an update show."""
    live = (APPLIED_RESIDUAL, *SIGN_METRICS) if mode in aggregation.MODES else SIGN_METRICS
    return {f"balance/{m.name}" for m in live}


def by_sign(metrics, name) -> dict[str, float]:
    return {s: metrics[key] for s in SIGN_NAMES if (key := f"balance/{name}/{s}") in metrics}


# ---- by sign


@pytest.mark.parametrize("form", ["response", "token"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("vanilla", mode) for mode in EVERY_MODE),
        *((name, mode) for name in LOSSES for mode in ("balanced", "token-mean")),
    ],
)
def test_the_parts_of_the_policy_loss_add_up_to_what_verl_logs(name, mode, form):
    rollouts = harness.make_rollouts(3, groups=4, size=4, form=form)
    got, _ = logged(rollouts, mode, mini_batches=2, policy_loss=harness_policy_loss(name))
    parts = by_sign(got, "pg_loss")
    assert set(parts) == set(SIGN_NAMES)
    assert sum(parts.values()) == pytest.approx(got["actor/pg_loss"], rel=1e-6, abs=1e-12)
    assert abs(parts["positive"]) > 1e-6 < abs(parts["negative"])


def harness_policy_loss(name):
    from verl.workers.config import PolicyLossConfig

    return PolicyLossConfig(loss_mode=name)


@pytest.mark.parametrize(
    ("mini_batches", "micro", "epochs", "layout"), [(1, 16, 1, "padded"), (1, 4, 1, "nested"), (2, None, 2, "padded")]
)
@pytest.mark.parametrize("mode", aggregation.ALL_MODES)
@pytest.mark.parametrize("form", ["response", "token"])
def test_loss_clip_fraction_and_entropy_of_each_sign_are_the_references(
    form, mode, mini_batches, micro, epochs, layout
):
    from tests.support import reference

    rollouts = harness.make_rollouts(4, groups=4, size=4, form=form)
    config = harness.make_actor_config(mode, entropy_coeff=0.01)
    got, _ = logged(rollouts, mode, config=config, micro=micro, mini_batches=mini_batches, epochs=epochs, layout=layout)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    loss = reference.ppo_token_loss(rollouts.theta, rollouts.old, rollouts.advantage, low, high, config.clip_ratio_c)
    part = harness.token_weights(rollouts, mode) * torch.where(rollouts.mask, loss, 0.0)
    for sign, name in zip(aggregation.SIGNS, SIGN_NAMES, strict=True):
        clipped, entropy, tokens, total = 0, 0.0, 0, 0.0
        for i, t in rollouts.mask.nonzero().tolist():
            if reference.sign_of(rollouts.advantage_BT[i, t]) != sign:
                continue
            ratio = math.exp(rollouts.theta[i, t] - rollouts.old[i, t])
            clipped += (sign > 0 and ratio > 1 + high) or (sign < 0 and ratio < 1 - low)
            entropy += harness.ENTROPY_SLOPE * rollouts.theta[i, t].item()
            total += part[i, t].item()
            tokens += 1
        assert tokens > 0
        assert got[f"balance/clip_fraction/{name}"] == pytest.approx(clipped / tokens, abs=1e-12)
        assert got[f"balance/entropy/{name}"] == pytest.approx(entropy / tokens, rel=1e-12)
        if mode != "token-mean" or mini_batches == 1:  # verl's token-mean counts the tokens of a mini-batch
            # verl's token-mean divides by tokens, not by responses: empty ones do not count in it
            expected = total / (int(rollouts.mask.any(1).sum()) if mode == "token-mean" else len(rollouts))
            assert got[f"balance/pg_loss/{name}"] == pytest.approx(expected, rel=1e-7, abs=1e-12)
    assert 0 < got["balance/clip_fraction/positive"] != got["balance/clip_fraction/negative"] > 0


def test_clip_fractions_are_verls_own_split_by_sign():
    rollouts = harness.make_rollouts(5, groups=4, size=4)
    got, _ = logged(rollouts, "token-mean", micro=16)
    tokens = dict.fromkeys(SIGN_NAMES, 0)
    for sign, length in zip(rollouts.sign, rollouts.mask.sum(1).tolist(), strict=True):
        tokens[SIGN_NAMES[sign + 1]] += length
    total = sum(fraction * tokens[s] for s, fraction in by_sign(got, "clip_fraction").items())
    assert total / sum(tokens.values()) == pytest.approx(got["actor/pg_clipfrac"], rel=1e-6)


@pytest.mark.parametrize("name", ["gspo", "cispo", "clip_cov"])
def test_a_policy_loss_with_another_clip_has_no_clip_fraction(name):
    got, _ = logged(harness.make_rollouts(3, 4, 4), "token-mean", policy_loss=harness_policy_loss(name))
    assert by_sign(got, "clip_fraction") == {}
    assert len(by_sign(got, "entropy")) == 3


def test_a_policy_loss_that_goes_past_agg_loss_has_no_parts_under_verls_own_modes():
    got, _ = logged(harness.make_rollouts(3, 4, 4), "token-mean", policy_loss=harness_policy_loss("geo_mean"))
    assert not any(by_sign(got, name) for name in ("pg_loss", "clip_fraction", "entropy"))
    assert "balance/length/positive" in got


def test_a_policy_loss_that_aggregates_twice_has_no_parts_and_it_is_said(capfd, monkeypatch):
    def twice(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        arguments = dict(loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
        return sum(core_algos.agg_loss(loss_mat=-advantages * log_prob, **arguments) for _ in range(2)), {}

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "twice", twice)
    got, _ = logged(harness.make_rollouts(3, 4, 4), "balanced", policy_loss=harness_policy_loss("twice"))
    assert by_sign(got, "pg_loss") == {}
    assert len(by_sign(got, "entropy")) == 3
    assert "policy loss 'twice' aggregates several matrices" in capfd.readouterr().err


# ---- of whole groups


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_the_rest_is_of_the_whole_batch_whatever_the_split(mode, sessions):
    rollouts = harness.make_rollouts(7, groups=4, size=6)
    if sessions:
        seen: dict = {}
        rollouts.session = [
            seen.setdefault((u, s), len(seen)) for u, s in zip(rollouts.uid, rollouts.sign, strict=True)
        ]
    got, _ = logged(rollouts, mode, mini_batches=2)
    active = mode if mode in aggregation.ALL_MODES else "token-mean"
    expected = balance_metrics(
        rollouts.mask.sum(1),
        rollouts.uid,
        torch.where(rollouts.mask.any(1), rollouts.advantage.sign(), 0),
        rollouts.advantage,
        rollouts.session or None,
        active_mode=active,
    )
    assert len(expected) > 40
    assert {k: got[k] for k in expected} == pytest.approx(expected, abs=1e-12)
    assert {k for k in got if k.startswith("balance/")} - set(expected) == live_metrics(mode)


def test_modes_with_a_constant_divisor_give_each_sign_what_token_mean_does():
    rollouts = harness.make_rollouts(8, groups=4, size=4, empties=False)
    rollouts.old = rollouts.theta.clone()  # on policy: the loss of a token is minus its advantage
    got = {mode: logged(rollouts, mode, loss_scale_factor=9)[0] for mode in ("token-mean", *CONSTANT_DIVISOR)}
    for mode in CONSTANT_DIVISOR:
        parts = by_sign(got[mode], "pg_loss")
        share = abs(parts["negative"]) / (abs(parts["negative"]) + abs(parts["positive"]))
        assert got[mode]["balance/active/gradient_share_negative"] == pytest.approx(share, rel=1e-6)
        assert got[mode]["balance/active/moved"] == got["token-mean"]["balance/active/moved"] == 0


@pytest.mark.parametrize("mode", ["balanced", "seq-mean-token-mean", "token-mean"])
def test_the_active_share_is_that_of_the_loss_that_is_optimised(mode):
    """On policy the loss of a token is minus its advantage, so the parts of verl's own loss show the weights."""
    rollouts = harness.make_rollouts(8, groups=4, size=4)
    rollouts.old = rollouts.theta.clone()
    got, _ = logged(rollouts, mode)
    parts = by_sign(got, "pg_loss")
    share = parts["negative"] / (parts["negative"] - parts["positive"])
    assert got["balance/active/gradient_share_negative"] == pytest.approx(share, rel=1e-6)


def test_advantages_that_change_sign_within_a_response_leave_whole_responses_out_and_it_is_said_once(capfd):
    rollouts = harness.make_rollouts(4, groups=4, size=4, form="token")
    for _ in range(2):
        got, _ = logged(rollouts, "balanced")
        assert {k for k in got if k.startswith("balance/")} == live_metrics("balanced")
    said = "[verl_ba] no balance/… metrics of whole groups: advantages change sign within a response"
    assert capfd.readouterr().err.count(said) == 1


def test_a_session_whose_rows_differ_in_sign_leaves_whole_responses_out(capfd):
    rollouts = harness.make_rollouts(4, groups=4, size=4, empties=False)
    rollouts.session = [0] * len(rollouts)
    got, _ = logged(rollouts, "balanced")
    assert "balance/responses" not in got
    assert "advantages change sign within a response" in capfd.readouterr().err


# ---- nothing changes, nothing breaks


@pytest.mark.parametrize("form", ["response", "token"])
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_losses_and_gradients_are_the_same_bits_with_and_without_metrics(monkeypatch, mode, form):
    rollouts = harness.make_rollouts(9, groups=4, size=4, form=form)
    runs = []
    for switch in ("1", "0"):
        monkeypatch.setenv("VERL_BA_METRICS", switch)
        runs.append(logged(rollouts, mode, mini_batches=2, use_kl_loss=True))
    (on, gradients_on), (off, gradients_off) = runs
    assert all(torch.equal(a, b) for a, b in zip(gradients_on, gradients_off, strict=True))
    assert any(gradient.any() for gradient in gradients_on)
    assert not any(k.startswith("balance/") for k in off)
    same = set(off) - {k for k in off if "perf/" in k or "mfu" in k}
    assert {k: on[k] for k in same} == {k: off[k] for k in same}
    assert set(on) - set(off) == {k for k in on if k.startswith("balance/")} != set()


@pytest.mark.parametrize("field", ["uid", "advantages"])
def test_a_batch_without_a_field_trains_under_verls_own_modes_and_says_once_what_is_missing(capfd, field):
    rollouts = harness.make_rollouts(1, groups=4, size=4)
    rows_of = record.rows_of

    def without(data):
        return rows_of(data.exclude(field))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "rows_of", without)
        for _ in range(2):
            got, gradients = logged(rollouts, "token-mean")
    _, expected = logged(rollouts, "token-mean")
    assert torch.equal(gradients[0], expected[0])
    assert "balance/responses" not in got
    assert "balance/pg_loss/positive" in got
    error = capfd.readouterr().err
    assert error.count("no balance/… metrics of whole groups: ") == 1
    assert f"needs {field} in the batch" in error


@pytest.mark.parametrize("mode", ["balanced", "token-mean"])
def test_a_fault_in_the_metrics_costs_only_metrics(monkeypatch, capfd, mode):
    rollouts = harness.make_rollouts(1, groups=4, size=4)
    expected, gradients = logged(rollouts, mode, micro=4)
    calls = []

    def fail(arguments):  # in one micro-batch only: ranks and micro-batches must still agree on the names
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of paper")
        return torch.zeros_like(arguments["advantages"], dtype=torch.bool)

    monkeypatch.setattr(record, "clipped_tokens", fail)
    monkeypatch.setattr("verl_ba.metrics.record.balance_metrics", lambda *args, **kwargs: 1 / 0)
    got, after = logged(rollouts, mode, micro=4)
    assert len(calls) > 2
    assert torch.equal(gradients[0], after[0])
    assert got["actor/pg_loss"] == expected["actor/pg_loss"]
    assert not any("sum/" in key or (isinstance(v, float) and math.isnan(v)) for key, v in got.items())
    assert not by_sign(got, "clip_fraction")
    error = capfd.readouterr().err
    assert "no balance/… metrics by the sign of the advantage: out of paper" in error
    assert "no balance/… metrics of whole groups: division by zero" in error


def test_losses_outside_of_an_update_are_not_recorded():
    from tests.hooks import test_hooks

    _, metrics, _ = test_hooks.loss_through_verl(harness.make_rollouts(0, 2, 4), "balanced", "nested")
    assert not any(key.startswith("balance/") for key in metrics)


# ---- names


def test_the_trainers_keep_our_names_and_prefix_their_own():
    for module in (trainer_base, ray_trainer):
        got = module.rename_dict({"balance/groups": 1, "loss": 2, "actor/pg_loss": 3}, "actor/")
        assert got == {"balance/groups": 1, "actor/loss": 2, "actor/pg_loss": 3}


def test_verls_reduction_leaves_every_value_as_it_is():
    """It takes names apart: 'max', 'min', and in asynchronous trainers 'sum' choose how several values become one."""
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    names = {
        f"balance/{m.name.replace('<mode>', mode)}" for m in METRICS for mode in ("active", *aggregation.ALL_MODES)
    }
    values = {name: float(i) for i, name in enumerate(sorted(names))}
    assert reduce_metrics(dict(values)) == values
    aggregator = MetricsAggregator()
    for shift in (0.0, 2.0):
        aggregator.add_step_metrics({name: value + shift for name, value in values.items()}, sample_count=8)
    for name, value in aggregator.get_aggregated_metrics().items():
        how = 2 if name.endswith("weight_max") else 0 if name.endswith("weight_min") else 1
        assert value == values[name] + how, name


def test_a_metric_is_of_verls_class_and_reduced_like_the_policy_loss():
    recorded = record.Record(record.Training("balanced", ranks=1), entropy_expected=False)
    like = Metric(value=1.0, aggregation="sum")
    metrics = recorded.metrics(like)
    assert metrics.pop("balance/sum/share") == [0.0, 0.0]  # once in an update: this rank has metrics
    assert "balance/sum/share" not in recorded.metrics(like)
    assert len(metrics) == len(record.SUMS) * 3
    assert all(isinstance(m, Metric) and m.aggregation == like.aggregation for m in metrics.values())


def test_a_clipped_token_is_one_that_verl_counts_however_far_the_policies_are_apart():
    """verl bounds the log-ratio at 20 before it clips: with a clip range beyond that nothing is clipped."""
    rollouts = harness.make_rollouts(3, groups=4, size=4, empties=False)
    rollouts.old = rollouts.theta - 30.0
    for high in (1e9, 0.28):
        config = harness.make_actor_config("token-mean", clip_ratio_high=high)
        got, _ = logged(rollouts, "token-mean", config=config, micro=16)  # verl averages over micro-batches
        clipped = sum(
            got[f"balance/clip_fraction/{sign}"] * int(rollouts.mask[rollouts.advantage.sign() == number].sum())
            for number, sign in ((-1, "negative"), (0, "zero"), (1, "positive"))
            if f"balance/clip_fraction/{sign}" in got
        )
        assert clipped / int(rollouts.mask.sum()) == pytest.approx(got["actor/pg_clipfrac"], abs=1e-6)
        assert (clipped > 0) == (high < 1)


# ---- dumps of rollouts


def test_the_legacy_dump_has_uids_and_the_lengths_of_the_final_mask():
    seen = {}

    def original(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir):
        seen.update(reward_extra_infos_dict)

    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    batch = types.SimpleNamespace(batch={"response_mask": mask}, non_tensor_batch={"uid": ["uid_sample_0_7"] * 2})
    extra = {"acc": [1.0, 0.0]}
    log.wrap_log_rollout_data_legacy(original)(None, batch, extra, {}, "folder")
    uid = ["uid_sample_0_7_0_0", "uid_sample_0_7_1_0"]  # in the v1 trainer's form: <uid>_<session>_<row>
    assert seen == {"acc": [1.0, 0.0], "response_length": [2, 0], "uid": uid}
    assert extra == {"acc": [1.0, 0.0]}  # the trainer goes on to use it


def test_a_dump_without_lengths_is_still_written(monkeypatch, capfd):
    written = []

    class Trainer:
        def _dump_generations(self, inputs, reward_extra_infos_dict, dump_path):
            written.append(reward_extra_infos_dict)

        def _log_rollout_data(self, batch, timing_raw, rollout_data_dir):
            self._dump_generations(
                inputs=[], reward_extra_infos_dict={"uid": ["b_0_0", "a_0_0"]}, dump_path=rollout_data_dir
            )

    batch = types.SimpleNamespace(keys=["a_0_0", "b_0_0"], partition_id="train")
    dump = log.wrap_log_rollout_data(Trainer._log_rollout_data)
    monkeypatch.setattr(log, "lengths_in_queue", lambda batch: [3, 4])
    trainer = Trainer()
    dump(trainer, batch, {}, "folder")
    assert written.pop() == {"uid": ["b_0_0", "a_0_0"], "response_length": [4, 3]}
    monkeypatch.setattr(log, "lengths_in_queue", lambda batch: 1 / 0)
    dump(trainer, batch, {}, "folder")
    assert written.pop() == {"uid": ["b_0_0", "a_0_0"]}
    assert "no balance/… metrics in the dump of rollouts: division by zero" in capfd.readouterr().err
    assert "_dump_generations" not in vars(trainer)
