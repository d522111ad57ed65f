"""What a driver refuses or says before any process starts, on stand-ins for a release of verl."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from verl_ba import releases
from verl_ba.hooks import config as seam


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
