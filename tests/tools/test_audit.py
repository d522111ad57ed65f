"""`verl-ba audit`: each kind of finding on a configuration that has it, and none on those that do not.

Configurations are composed as verl's own command does, and verl's real losses run. What the auditor assumes of the v1
trainer, that rejection leaves `loss_mask` as it was, is checked on the trainer's own method.
"""

import functools
import json
import shlex
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf, open_dict
from typer.testing import CliRunner

from verl_ba import aggregation, loss_agg
from verl_ba.tools import audit, cli
from verl_ba.tools.audit import batch as batches

ACTOR = "actor_rollout_ref.actor"
REJECTION = (
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
)
THIRD_PARTY = textwrap.dedent(
    """
    import torch
    from verl.trainer.ppo import core_algos
    from verl.utils.torch_functional import masked_mean


    def token_loss(old_log_prob, log_prob, advantages):
        return -advantages * (log_prob - old_log_prob).exp()


    @core_algos.register_policy_loss("test_local")
    def local(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        return masked_mean(token_loss(old_log_prob, log_prob, advantages), response_mask), {}


    def aggregated(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, **info):
        loss = token_loss(old_log_prob, log_prob, advantages)
        return core_algos.agg_loss(loss, response_mask, loss_agg_mode, **info)


    @core_algos.register_policy_loss("test_exact")
    def exact(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        batch = old_log_prob, log_prob, advantages, response_mask
        return aggregated(*batch, loss_agg_mode, **config.global_batch_info), {}


    @core_algos.register_policy_loss("test_mixed")
    def mixed(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        batch = old_log_prob, log_prob, advantages, response_mask
        loss = aggregated(*batch, loss_agg_mode, **config.global_batch_info)
        return loss + 0.01 * masked_mean(log_prob, response_mask), {}


    @core_algos.register_policy_loss("test_one_rank")
    def one_rank(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        batch = old_log_prob, log_prob, advantages, response_mask
        return aggregated(*batch, loss_agg_mode, **{**config.global_batch_info, "dp_size": 1}), {}


    def of_lengths(name, length):
        # it divides by another length than that of the mask, and else does what the mode asks for

        @core_algos.register_policy_loss(name)
        def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
            share = response_mask.sum(1, keepdim=True) / length(response_mask).clamp(min=1)
            info = config.global_batch_info
            return aggregated(old_log_prob, log_prob, advantages * share, response_mask, loss_agg_mode, **info), {}

        return loss


    def span(mask):
        return (mask * (1 + torch.arange(mask.shape[1]))).amax(1, keepdim=True)


    of_lengths("test_span", span)
    of_lengths("test_half", lambda mask: 2 * mask.sum(1, keepdim=True))


    def beside(name, extra):
        # it does what the mode asks for, and adds something of the masked tokens

        @core_algos.register_policy_loss(name)
        def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
            info = config.global_batch_info
            mean = aggregated(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, **info)
            there = span(response_mask) > torch.arange(response_mask.shape[1])
            hidden = there & (response_mask == 0)
            return mean + info["dp_size"] * extra(log_prob, advantages, hidden.float()), {}

        return loss


    beside("test_penalty", lambda log_prob, advantages, hidden: 0.01 * (log_prob * hidden).sum())
    beside("test_tool_tokens", lambda log_prob, advantages, hidden: -(advantages * log_prob * hidden).sum() / 40)
    beside("test_value_only", lambda log_prob, advantages, hidden: 0.01 * (log_prob.detach() * hidden).sum())


    @core_algos.register_policy_loss("test_reweighted")
    def reweighted(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        advantages = advantages * (-(old_log_prob**2)).exp()
        batch = old_log_prob, log_prob, advantages, response_mask
        return aggregated(*batch, loss_agg_mode, **config.global_batch_info), {}
    """
)


@pytest.fixture(scope="module", autouse=True)
def third_party(tmp_path_factory):
    """A file of policy losses, imported as `--import` does."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    path = tmp_path_factory.mktemp("audit") / "third_party.py"
    path.write_text(THIRD_PARTY)
    before = set(POLICY_LOSS_REGISTRY)
    audit.import_losses(str(path))
    yield path
    for name in set(POLICY_LOSS_REGISTRY) - before:
        del POLICY_LOSS_REGISTRY[name]


@functools.cache
def audited(*overrides, estimator="grpo"):
    """The report of verl's ppo_trainer with these overrides; a key without a dot is the actor's."""
    overrides = [o if "." in o.split("=")[0] else f"{ACTOR}.{o}" for o in overrides]
    changes = OmegaConf.from_dotlist([f"algorithm.adv_estimator={estimator}", *overrides])
    with open_dict(config := ppo_trainer().copy()):
        config.merge_with(changes)
    return audit.audit(config)


@functools.cache
def ppo_trainer():
    return audit.compose([])


def loss(name):
    return f"{ACTOR}.policy_loss.loss_mode={name}"


def kinds(report):
    """(term, kind) of every fault."""
    return {(finding.term, finding.kind) for finding in report.faults}


def row(report, term="policy loss"):
    (found,) = [row for row in report.terms if row.term == term]
    return found


def message(report, kind):
    (found,) = [finding.message for finding in report.findings if finding.kind == kind]
    return found


# ---- clean


@pytest.mark.parametrize(
    ("mode", "formula"),
    [
        ("token-mean", "Σ m·ℓ / N"),
        ("token-sum", "Σ m·ℓ / 1"),
        ("seq-mean-token-mean", "Σ m·ℓ / (B·T_i)"),
        ("seq-mean-token-sum", "Σ m·ℓ / B"),
        ("group-mean-token-mean", "Σ m·ℓ / (B·ℓ̄_group)"),
        ("balanced", "Σ m·ℓ / (B·ℓ̄_group,sign)"),
    ],
)
def test_vanilla_is_clean_under_every_mode_and_its_denominator_is_recognised(mode, formula):
    report = audited(f"loss_agg_mode={mode}")
    assert not report.faults
    assert (row(report).formula, row(report).micro_batch, row(report).rank) == (formula, "no", "no")


def test_balanced_is_clean_where_the_sign_changes_within_a_response():
    report = audited("loss_agg_mode=balanced", estimator="reinforce_plus_plus")
    assert not report.faults
    assert row(report).formula == "Σ m·ℓ / (B·ℓ̄_group,sign)"


def test_a_third_party_loss_that_aggregates_by_the_mode_is_clean():
    assert not audited(loss("test_exact"), "loss_agg_mode=balanced").faults


def test_a_loss_that_reweighs_advantages_is_no_fault_and_said_to_follow_no_known_rule():
    report = audited(loss("test_reweighted"), "loss_agg_mode=balanced")
    assert not report.faults
    assert row(report).denominator == "unknown: no rule fits"
    assert "may reweigh advantages" in message(report, "rule")


# ---- what depends on the split


def test_geo_mean_averages_over_the_micro_batch_and_ignores_the_mode():
    report = audited(loss("geo_mean"))
    assert kinds(report) == {("policy loss", "split"), ("policy loss", "ignored")}
    assert row(report).denominator == "responses of the micro-batch × own tokens, averaged over ranks"
    assert row(report).micro_batch == row(report).rank == "value and gradient"


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_choice_of_tokens_in_each_micro_batch_is_seen_at_verls_default_settings(name):
    report = audited(loss(name))
    assert kinds(report) == {("policy loss", "split")}
    assert row(report).formula == "Σ m·ℓ / N"


def test_a_third_party_loss_with_a_local_mean_is_seen():
    report = audited(loss("test_local"))
    assert kinds(report) == {("policy loss", "split"), ("policy loss", "ignored")}
    assert row(report).denominator == "tokens of the micro-batch, averaged over ranks"
    assert "third_party.local" in message(report, "split")


def test_what_the_check_at_run_time_refuses_is_refused_here():
    report = audited(loss("test_local"), "loss_agg_mode=balanced")
    assert kinds(report) == {("policy loss", "refused")}
    assert "never called agg_loss" in message(report, "refused")


def test_a_local_mean_beside_the_mode_is_refused_under_our_modes():
    report = audited(loss("test_mixed"), "loss_agg_mode=balanced")
    assert kinds(report) == {("policy loss", "refused")}
    assert "does not come from what agg_loss returned alone" in message(report, "refused")


def test_a_local_mean_beside_verls_mode_is_seen():
    report = audited(loss("test_mixed"))
    assert kinds(report) == {("policy loss", "split"), ("policy loss", "rule")}
    assert row(report).formula.endswith(" + 0.01 · Σ m·ℓ / N_micro / R")
    assert "adds 0.01 × a mean by tokens of the micro-batch" in message(report, "rule")


def test_a_missing_dp_size_is_seen_between_ranks_only():
    report = audited(loss("test_one_rank"))
    assert kinds(report) == {("policy loss", "split"), ("policy loss", "rule")}
    assert (row(report).micro_batch, row(report).rank) == ("no", "value and gradient")
    assert row(report).denominator == "tokens of the global mini-batch, averaged over ranks"


def test_the_constant_divisor_is_the_longest_response_of_the_micro_batch_unless_it_is_set():
    mode = "loss_agg_mode=seq-mean-token-sum-norm"
    assert row(audited(mode)).formula == "Σ m·ℓ / (B·T_max_micro)"
    assert f"Set {ACTOR}.loss_scale_factor" in message(audited(mode), "split")
    assert not audited(mode, "trainer.use_v1=False").faults  # padded to one length
    report = audited(mode, "loss_scale_factor=50")
    assert not report.faults
    assert row(report).formula == "Σ m·ℓ / (B·S)"


def test_counts_of_the_micro_batch_in_agg_loss_are_seen(monkeypatch):
    """The auditor must not take our own hooks' word for it."""

    def local(loss_mat, loss_mask, pool_mean_length, global_batch_size, dp_size=1):
        length = loss_mask.sum(1).double()
        sign = [int(row[mask].sum().sign()) for row, mask in zip(loss_mat.detach(), loss_mask.bool(), strict=True)]
        mean = aggregation.pool_mean_length("balanced", length, list(range(len(length))), sign)
        return aggregation.aggregate(loss_mat, loss_mask, mean.clamp(min=1), len(loss_mask), dp_size)

    monkeypatch.setattr(loss_agg, "aggregate", local)
    report = audited.__wrapped__("loss_agg_mode=balanced", "entropy_coeff=0.01")
    assert {("policy loss", "split"), ("entropy", "split")} <= kinds(report)
    assert "_micro" in row(report).formula


# ---- what stands behind the mask, and constant factors


def test_the_batch_has_holes_with_numbers_behind_them():
    batch = batches.make_batch(ppo_trainer())
    hidden = (torch.arange(batches.WIDTH)[None] < batch.length[:, None]) & (batch.mask == 0)
    assert int(hidden.sum()) == 7
    for column in (batch.advantage, batch.policy, batch.old, batch.moved, batch.reference):
        assert (column[hidden] != 0).all()
    assert (batch.mask.gather(1, (batch.length - 1).clamp(min=0)[:, None])[batch.length > 0] == 1).all(), "no shorter"


@pytest.mark.parametrize("trainer", ["True", "False"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("test_penalty", "token-mean"),  # under balanced both are refused, as their gradient goes past agg_loss
        ("test_tool_tokens", "token-mean"),
        ("test_value_only", "balanced"),
    ],
)
def test_masked_tokens_with_weight_are_a_fault(name, mode, trainer):
    report = audited(loss(name), f"loss_agg_mode={mode}", f"trainer.use_v1={trainer}")
    assert ("policy loss", "masked") in kinds(report)
    assert "tool output, have weight" in message(report, "masked")


def test_a_loss_that_divides_by_the_span_is_a_fault():
    report = audited(loss("test_span"), "loss_agg_mode=seq-mean-token-mean")
    assert kinds(report) == {("policy loss", "rule")}
    assert row(report).formula == "Σ m·ℓ / (B·T_span)"
    assert "own tokens, masked ones included" in message(report, "rule")


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "group-mean-token-mean", "balanced"])
def test_an_extra_constant_factor_is_a_fault(mode):
    report = audited(loss("test_half"), f"loss_agg_mode={mode}")
    assert kinds(report) == {("policy loss", "factor")}
    assert "it is 0.5 times what" in message(report, "factor")


def test_empty_responses_change_the_scale_against_token_mean_and_that_is_said():
    """Two responses of twelve are empty: B counts them, so the loss is 10/12 of what the other ten alone would give."""
    for mode in ("balanced", "group-mean-token-mean"):
        assert "here 1 of 12" in message(audited(f"loss_agg_mode={mode}"), "empty")
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert not [finding for finding in audited(f"loss_agg_mode={mode}").findings if finding.kind == "empty"]


# ---- stale counts


def test_token_mean_with_rejection_counts_the_rejected_tokens_in_v1():
    report = audited(*REJECTION, "use_kl_loss=True")
    assert kinds(report) == {("policy loss, KL to the reference", "stale")}
    assert row(report).formula == "Σ m·ℓ / N_before"
    assert "46 tokens are counted and 39 are left" in message(report, "stale")


@pytest.mark.parametrize("overrides", [("trainer.use_v1=False",), ("loss_agg_mode=balanced",)])
def test_rejection_is_clean_in_the_legacy_trainer_and_under_modes_that_count_no_tokens(overrides):
    assert not audited(*REJECTION, *overrides).faults


def test_the_v1_trainer_rejects_in_response_mask_and_leaves_loss_mask(monkeypatch):
    """verl's own method, with a dictionary for TransferQueue; and so does the auditor's batch."""
    from verl.trainer.ppo.v1 import trainer_base

    config = audit.compose(["algorithm.adv_estimator=grpo", *REJECTION])
    batch = batches.make_batch(audit.compose(["algorithm.adv_estimator=grpo"]))
    rows = list(range(batches.ROWS))
    store = batch.micro_batch(rows)
    rollout = batch.old.clone()
    rollout[4] -= 3.0
    spans = batch.spans(rows)
    store["rollout_log_probs"] = batches.jagged([r[:n] for r, n in zip(rollout, spans, strict=True)])
    store["rm_scores"] = batches.jagged([a[:n] for a, n in zip(batch.advantage, spans, strict=True)])
    before = store["loss_mask"].values().sum()

    def put(keys, partition_id, fields):
        for name in fields.keys():  # noqa: SIM118  iterating a TensorDict gives its rows
            store[name] = fields[name]

    present = lambda names: store.select(*[n for n in names if n in store])  # noqa: E731
    queue = SimpleNamespace(
        kv_batch_get=lambda keys, partition_id, select_fields: present(select_fields), kv_batch_put=put
    )
    monkeypatch.setattr(trainer_base, "tq", queue)
    keys = [f"{uid}_{i}_0" for i, uid in enumerate(batch.uid)]
    meta = type("Meta", (), {"keys": keys, "partition_id": "train", "__len__": lambda self: len(keys)})()
    base = next(c for c in vars(trainer_base).values() if hasattr(c, "_compute_advantage"))
    base._compute_advantage(SimpleNamespace(config=config), meta, {})
    assert store["response_mask"].values().sum() < before
    assert store["loss_mask"].values().sum() == before
    mine = batches.make_batch(config)
    assert mine.mask.sum() < mine.counted.sum()


def test_rejection_inside_the_loss_is_seen_to_leave_the_count_as_it_was():
    inside = f"{ACTOR}.policy_loss.rollout_correction={{rollout_rs: token_k1, rollout_rs_threshold: '0.5_2.0'}}"
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    report = audited(*REJECTION, bypass, loss("bypass_mode"), inside)
    assert ("policy loss", "stale") in kinds(report)
    assert "without a valid token" in message(report, "refused")


# ---- what is ignored


def test_sapo_ignores_the_mode_unless_it_is_the_one_it_names_or_ours():
    report = audited(loss("sapo"))
    assert kinds(report) == {("policy loss", "ignored")}
    assert "divides by responses of the global mini-batch × own tokens" in message(report, "ignored")
    for mode in ("seq-mean-token-mean", "balanced"):
        assert not audited(loss("sapo"), f"loss_agg_mode={mode}").faults


@pytest.mark.parametrize(
    ("setting", "unused", "used"),
    [
        ("loss_scale_factor=100", loss("vanilla"), "loss_agg_mode=seq-mean-token-sum-norm"),
        ("clip_ratio=0.3", loss("vanilla"), f"{ACTOR}.clip_ratio_low=null"),
        ("clip_ratio_c=5.0", loss("gpg"), loss("vanilla")),
        ("clip_ratio_high=4e-4", loss("gpg"), loss("gspo")),
        ("tau_neg=1.2", loss("vanilla"), loss("sapo")),
        (f"{ACTOR}.policy_loss.clip_cov_ratio=0.1", loss("vanilla"), loss("clip_cov")),
        ("kl_loss_coef=0.01", loss("vanilla"), "use_kl_loss=True"),
    ],
)
def test_a_number_that_changes_nothing_is_named_and_where_it_is_used_it_is_not(setting, unused, used):
    named = f"{ACTOR}.{setting.split('=')[0].removeprefix(f'{ACTOR}.')}="
    faults = [[f for f in audited(setting, other).faults if f.message.startswith(named)] for other in (unused, used)]
    assert [len(found) for found in faults] == [1, 0]
    assert faults[0][0].kind == "ignored"


def test_rejection_in_bypass_mode_that_never_reaches_the_loss_is_named():
    report = audited(*REJECTION, "algorithm.rollout_correction.bypass_mode=True")
    assert kinds(report) == {("policy loss", "ignored")}
    assert "rollout_rs=token_k1 changes nothing: with bypass_mode" in message(report, "ignored")


def test_rejection_without_rollout_log_probabilities_is_named():
    report = audited(*REJECTION, "actor_rollout_ref.rollout.calculate_log_probs=False")
    assert "calculate_log_probs=True" in message(report, "ignored")


# ---- notes


def test_kl_and_entropy_follow_the_mode_and_by_how_much_is_said():
    report = audited("use_kl_loss=True", "entropy_coeff=0.01", "loss_agg_mode=seq-mean-token-mean")
    assert not report.faults
    notes = {finding.term: finding.message for finding in report.findings if finding.kind == "follows"}
    assert set(notes) == {"entropy", "KL to the reference"}
    # 46 tokens in 12 responses, the shortest of 1 and the longest of 8 tokens: 46/12/1 and 46/12/8
    assert all("0.48 to 3.8 times" in note for note in notes.values())
    report = audited("use_kl_loss=True", "entropy_coeff=0.01")
    assert not [finding for finding in report.findings if finding.kind == "follows"]


def test_a_critic_that_inherits_the_mode_is_named_with_what_it_really_divides_by():
    for mode, formula in (("seq-mean-token-mean", "Σ m·ℓ / (B·T_i)"), ("balanced", "Σ m·ℓ / N")):
        report = audited(f"loss_agg_mode={mode}", estimator="gae")
        assert not report.faults
        assert row(report, "value loss").formula == formula
        assert f"inherits the actor's mode, {mode}" in message(report, "inherits")
    report = audited("loss_agg_mode=balanced", "critic.loss_agg_mode=token-mean", estimator="gae")
    assert not [finding for finding in report.findings if finding.kind == "inherits"]


def test_groups_that_straddle_mini_batches_are_a_note():
    sizes = ("data.train_batch_size=64", "ppo_mini_batch_size=16")
    assert "train_batch_size=64" in message(audited(*sizes, "loss_agg_mode=balanced"), "groups")
    assert not audited(*sizes, "loss_agg_mode=token-mean").findings


@pytest.mark.parametrize(("mode", "policy_gradient"), [("k3", True), ("k3", False), ("forward_kl_topk", False)])
def test_distillation_is_a_term_with_the_modes_weights(mode, policy_gradient):
    report = audited(
        "distillation.enabled=True",
        f"distillation.distillation_loss.loss_mode={mode}",
        f"distillation.distillation_loss.use_policy_gradient={policy_gradient}",
        "distillation.distillation_loss.distillation_loss_coef=0.3",
        "loss_agg_mode=seq-mean-token-mean",
    )
    assert row(report, "distillation").formula == "Σ m·ℓ / (B·T_i)"
    assert row(report, "distillation").micro_batch == "no"


def test_a_module_that_verls_workers_import_may_register_the_loss(monkeypatch, third_party):
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    monkeypatch.syspath_prepend(third_party.parent)
    monkeypatch.delitem(POLICY_LOSS_REGISTRY, "test_local")
    report = audited.__wrapped__("actor_rollout_ref.model.external_lib=third_party", loss("test_local"))
    assert ("policy loss", "split") in kinds(report)


# ---- the command


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["audit", *arguments])


def test_the_command_says_the_same_in_json_and_by_its_exit_status(third_party):
    clean = invoke("--json", "algorithm.adv_estimator=grpo")
    assert clean.exit_code == 0
    assert json.loads(clean.stdout)["terms"][0]["formula"] == "Σ m·ℓ / N"
    faulty = invoke("--json", "--import", str(third_party), "algorithm.adv_estimator=grpo", loss("test_local"))
    assert faulty.exit_code == 1
    assert [f["kind"] for f in json.loads(faulty.stdout)["findings"]] == ["split", "ignored"]


def test_a_composed_file_and_a_runs_manifest_give_what_the_overrides_give(tmp_path):
    overrides = ["algorithm.adv_estimator=gae", f"{ACTOR}.loss_agg_mode=balanced"]
    config = audit.compose(overrides)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    resolved = OmegaConf.to_container(config, resolve=True)
    (tmp_path / "manifest.json").write_text(json.dumps({"starts": [{"config": {}}, {"config": resolved}]}))
    expected = audit.audit(config)
    assert audit.audit(audit.load(tmp_path / "config.yaml")) == expected
    assert audit.audit(audit.load(tmp_path / "manifest.json")).terms == expected.terms


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["actor_rollout_ref.actor.loss_agg=balanced"], "loss_agg"),
        ([f"{ACTOR}.loss_agg_mode=balance"], "Expected one of verl's own"),
        ([loss("geo_mean"), f"{ACTOR}.loss_agg_mode=balanced"], "geo_mean cannot follow"),
        ([loss("mine")], "loss_mode=mine is not registered. Expected one of vanilla"),
        (["--import", "no_such_module"], "no_such_module cannot be imported: ModuleNotFoundError"),
        (["--config", "no_such_file.yaml"], "no_such_file.yaml"),
        (["--config", "x.yaml", "a=b"], "--config is complete"),
        (["--config-path", "/nowhere"], "--config-path /nowhere: expected a folder"),
    ],
)
def test_bad_input_is_named_with_status_2(arguments, expected):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_file_that_is_no_trainers_configuration_is_named(tmp_path):
    (tmp_path / "other.yaml").write_text("model: x\n")
    with pytest.raises(audit.AuditError, match=r"without actor_rollout_ref.actor.loss_agg_mode, .*with model"):
        audit.audit(audit.load(tmp_path / "other.yaml"))


def test_the_documentations_output_is_what_the_command_prints(monkeypatch):
    """Each block of docs/audit.md that begins with the command, without the table's frame."""
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    blocks = [block for block in text.split("```")[1::2] if block.strip().startswith("$ verl-ba audit")]
    assert len(blocks) == 5
    for block in blocks:
        command, printed = block.strip().split("\n", 1)
        result = invoke(*shlex.split(command)[3:])
        assert result.stdout.split() == printed.split(), command
