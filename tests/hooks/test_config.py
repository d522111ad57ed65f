"""What a driver refuses or says before any process starts, on stand-ins for a release of verl."""

import dataclasses
import functools

import pytest
import verl  # noqa: F401  loads the plugin, as in any verl process
from omegaconf import OmegaConf

from tests.support import verl_harness as harness
from verl_ba import hooks, loss_agg, releases
from verl_ba.hooks import config as seam
from verl_ba.loss_agg import aggregate
from verl_ba.metrics import record


def validate(monkeypatch, **release):
    """`validate_config` under `balanced`, in a release that differs from the newest by these fields."""
    pretended = dataclasses.replace(releases.RELEASES[-1], **release)
    monkeypatch.setattr(releases, "current", lambda: pretended)
    settings = {"actor_rollout_ref": {"actor": {"loss_agg_mode": "balanced"}}, "algorithm": {}, "trainer": {}}
    passed_on = []

    def original(config, use_reference_policy, use_critic):
        passed_on.append(config)

    seam.wrap_validate_config(original)(OmegaConf.create(settings), use_reference_policy=False, use_critic=False)
    return passed_on


def test_the_driver_refuses_legacy_workers_and_says_that_a_release_is_experimental(monkeypatch, capfd):
    assert len(validate(monkeypatch)) == 1
    assert capfd.readouterr().err == ""
    assert len(validate(monkeypatch, experimental="only a few steps were run")) == 1
    newest = releases.RELEASES[-1].version
    said = f"[verl_ba] support of verl {newest} is experimental: only a few steps were run\n"
    assert capfd.readouterr().err == said
    with pytest.raises(ValueError, match=r"use_legacy_worker_impl=auto selects the legacy workers.*drop uid"):
        validate(monkeypatch, legacy_workers=True)


# ---- a verl that is none of the tested releases


@pytest.fixture
def untested(monkeypatch):
    """This process's verl, as if it were not known; `validate_config` as it is hooked."""
    hooks.load_seam_modules()
    monkeypatch.setattr(releases, "untested", lambda: "a fork")
    from verl.utils.config import validate_config

    return lambda: validate_config(harness.compose_trainer_config(), use_reference_policy=False, use_critic=False)


def test_an_untested_verl_that_fits_runs_and_says_so_loudly(untested, capfd):
    untested()
    assert (
        capfd.readouterr().err.count("is UNTESTED with verl_ba (a fork). Every seam fits, and its losses passed") == 1
    )


def test_an_untested_verl_whose_seam_changed_is_refused_with_what_differs(untested, monkeypatch):
    name = "verl.workers.utils.losses.ppo_loss"
    monkeypatch.setitem(hooks.attachment.problems, name, "signature changed: expected ('config',), got ('cfg',)")
    with pytest.raises(hooks.SeamError, match=rf"{name}: signature changed"):
        untested()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda loss, mask, length, n, dp_size=1: aggregate(loss, mask, length, n, 1),
        lambda loss, mask, length, n, dp_size=1: (loss * mask).sum() / mask.sum(),
    ],
    ids=["no data-parallel size", "a mean of the micro-batch"],
)
def test_an_untested_verl_whose_losses_do_something_else_is_refused(untested, monkeypatch, wrong):
    monkeypatch.setattr(loss_agg, "aggregate", wrong)
    with pytest.raises(ValueError, match=r"is untested \(a fork\), and its losses do not do what .*=balanced says"):
        untested()


def test_an_untested_verl_that_scales_the_policy_loss_is_refused(untested, monkeypatch):
    from verl.workers.utils import losses

    original = losses.ppo_loss

    def scaled(*args, **kwargs):
        value, metrics = original(*args, **kwargs)
        return 2 * value, metrics

    monkeypatch.setattr(losses, "ppo_loss", functools.update_wrapper(scaled, original))
    with pytest.raises(ValueError, match="its losses do not do what"):
        untested()


@pytest.mark.parametrize(("asked", "expected"), [(None, True), ("0", False), ("1", True)])
def test_an_untested_verl_is_strict_unless_it_is_told_not_to_be(monkeypatch, asked, expected):
    monkeypatch.setattr(record, "untested", lambda: "a fork")
    monkeypatch.delenv("VERL_BA_STRICT", raising=False)
    if asked is not None:
        monkeypatch.setenv("VERL_BA_STRICT", asked)
    assert record.strict() is expected
