"""`verl-ba check`: one real update of every mode through verl's own worker, on CPU ranks, against the float64 reference."""

import pytest
from typer.testing import CliRunner

from verl_ba.tools import audit, check
from verl_ba.tools.check import Case, reference
from verl_ba.tools.cli import app

pytestmark = pytest.mark.slow

FSDP2 = ["actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.model.use_remove_padding=True"]
SDPA = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"


def compose(*overrides):
    check.device_of_this_machine()
    return audit.compose([*FSDP2, *overrides])


def run(*arguments):
    result = CliRunner().invoke(app, ["check", *arguments])
    return result.exit_code, result.output


def test_the_command_prints_every_modes_errors_and_they_are_those_of_float32():
    status, output = run("--nproc", "2", "--float32", *FSDP2, SDPA)
    assert status == 0, output
    assert "✓ every mode trains what it says on these ranks" in output
    assert "fsdp2, 2 data-parallel ranks, CPU, float32" in output
    assert all(mode in output for mode in check.MODES)


CASES = (
    Case("balanced"),
    Case("balanced", by_token=True, dynamic=40),
    Case("group-mean-token-mean", mini_batches=2),
    Case("token-mean", micro=3),
)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([], id="data", marks=pytest.mark.deep),
        pytest.param(["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], id="Ulysses"),
    ],
)
def test_four_ranks_with_and_without_ulysses(sizes):
    """A rank's part of a response, whole groups over four ranks, two mini-batches, micro-batches by rows and by tokens."""
    report = check.check(compose(*sizes), 4, float32=True, cases=CASES)
    assert [result.case for result in report.results] == list(CASES)
    for result in report.results:
        assert result.worst < 1e-5, result
        assert result.nearest > 0.05, result  # so an error of another mode would be seen
    assert report.faults == []


def test_a_mode_that_trains_something_else_is_a_fault(monkeypatch):
    """The reference takes another mode's weights for balanced, so what the ranks computed is wrong in its eyes."""
    weights = reference.token_weights
    monkeypatch.setattr(
        reference,
        "token_weights",
        lambda mode, update, batch: weights("group-mean-token-mean" if mode == "balanced" else mode, update, batch),
    )
    report = check.check(compose(), 2, float32=True, cases=[Case("balanced"), Case("token-mean")])
    assert [result.case.mode for result in report.faults] == ["balanced"]
    assert report.faults[0].gradient_error > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--nproc", "3", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
            "--nproc 3: expected a multiple of 2",
        ),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", SDPA], "in every mode and without a word"),
        (["actor_rollout_ref.actor.strategy=veomni"], "docs/support.md says what is known of others"),
        (["actor_rollout_ref.model.path=/nowhere"], "expected a folder with config.json"),
        (["--model", "/nowhere"], "expected a folder with a small model"),
        (["--config", "none.yaml", "x=1"], "--config is complete"),
        (["actor_rollout_ref.actor.no_such_key=1"], "cannot be composed"),
    ],
)
def test_bad_input_is_one_clear_error_before_any_process_starts(arguments, message):
    status, output = run(*arguments)
    assert status == 2
    assert message in output
