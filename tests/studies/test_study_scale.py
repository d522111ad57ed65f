"""The map of where a rule's bias matters, and runs placed in it from what `verl-ba analyze` wrote."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from studies import _results, scale
from studies.rules import RULES
from studies.simulated import Mean, Setting, assemble, draw, mean_lengths
from verl_ba.metrics import balance_metrics
from verl_ba.tools.cli import app as verl_ba

TRUE = Setting(
    size=8, prompts=40, variation=0.6, gap=1.6, accuracy=0.3, concentration=3.0, prompt_variation=0.4, mean=800
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """`analyze.json`, written by the analyser from twelve updates drawn from `TRUE`."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(2)
    with (folder / "dump.jsonl").open("w") as file:
        for step in range(1, 13):
            update = draw(TRUE, rng)
            for i, (length, group) in enumerate(
                zip(update.batch.length.tolist(), update.batch.group.tolist(), strict=True)
            ):
                right = i % TRUE.size < update.correct[group]
                record = {"prompt": "p", "response": "r", "uid": f"{step}-{group}", "step": step}
                file.write(json.dumps({**record, "score": float(right), "length": max(1, round(length))}) + "\n")
    result = CliRunner().invoke(
        verl_ba, ["analyze", str(folder / "dump.jsonl"), "--out", str(folder / "out"), "--resamples", "200"]
    )
    assert result.exit_code == 0, result.output
    return folder / "out" / "analyze.json"


def command(*arguments):
    app = typer.Typer()
    app.command()(scale.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_tilt_and_starving_are_those_that_a_run_logs():
    update = draw(TRUE, np.random.default_rng(4))
    rules = [name for name, rule in RULES.items() if rule.mode and name != "constant"]
    found = scale.weighing(update, mean_lengths(update, rules, {rule: {} for rule in rules}))
    assert found.keys() == set(rules)
    for rule in rules:
        mode = RULES[rule].mode or rule
        metrics = balance_metrics(
            update.batch.length, update.batch.group, update.batch.sign, update.advantage.tolist(), active_mode=mode
        )
        assert found[rule]["tilt"] == pytest.approx(metrics[f"balance/{mode}/tilt"], abs=1e-12)
        assert found[rule]["starving"] == pytest.approx(metrics[f"balance/{mode}/long_to_short"], rel=1e-12)


def test_tilt_and_starving_of_a_group_worked_by_hand():
    # two right of 10 tokens, two wrong of 30, |A| alike: a token mean gives the wrong ones 60 of 80 tokens
    right = np.array([[True, True, False, False]])
    update = assemble(right, np.where(right, 10, 30), np.zeros(right.shape), 20.0)
    found = scale.weighing(update, {"constant": np.full(4, 20.0), "sequence": update.batch.length.numpy()})
    assert found["constant"] == pytest.approx({"tilt": 0.25, "starving": 1.0})
    assert found["sequence"] == pytest.approx(
        {"tilt": 0.0, "starving": 1 / 3}
    )  # a token of 30 weighs a third of one of 10
    nothing = assemble(np.ones((1, 4), dtype=bool), np.array([[1, 2, 3, 4]]), np.zeros((1, 4)), 2.0)
    assert np.isnan(scale.weighing(nothing, {"constant": np.ones(4)})["constant"]["tilt"])


def test_updates_until_a_bias_stands_out():
    assert scale.updates_until(Mean(0.1, 0.01, 0.5)) == pytest.approx(25)
    assert scale.deviations(Mean(0.1, 0.01, 0.5), 100) == pytest.approx(2)
    assert scale.updates_until(Mean(0.1, 0.04, 0.5)) == float("inf")  # within three standard errors of 0
    assert scale.deviations(Mean(0.0, 0.0, 0.0)) == 0
    # what it means: after n updates the sum of the noise has the size of the sum of the bias
    sums = (0.1 + 0.5 * np.random.default_rng(0).standard_normal((20_000, 25))).sum(axis=1)
    assert sums.mean() == pytest.approx(sums.std(), rel=0.03)


@pytest.mark.parametrize(("accuracy", "concentration"), [(0.5, 2.0), (0.1, 1.0), (0.85, 6.0)])
def test_the_accuracies_of_prompts_come_back_from_two_shares(accuracy, concentration):
    rng = np.random.default_rng(0)
    a = accuracy * concentration
    correct = rng.binomial(8, rng.beta(a, concentration - a, 400_000))
    mixed = (correct > 0) & (correct < 8)
    found = scale.fit_accuracy(mixed.mean(), correct[mixed].mean() / 8, 8)
    assert found[0] == pytest.approx(accuracy, abs=0.02)
    assert found[1] == pytest.approx(concentration, rel=0.1)


@pytest.mark.slow
def test_a_report_of_the_analyser_gives_the_setting_it_was_drawn_from(report):
    run = scale.read_report(report)
    assert (run.setting.size, run.setting.prompts, run.steps) == (8, 40, 12)
    assert run.setting.gap == pytest.approx(TRUE.gap, rel=0.1)
    assert run.setting.variation == pytest.approx(TRUE.variation, rel=0.05)
    assert run.setting.accuracy == pytest.approx(TRUE.accuracy, abs=0.05)
    assert run.setting.prompt_variation == pytest.approx(TRUE.prompt_variation, abs=0.12)
    assert run.setting.advantage == "grpo"
    assert set(run.measured) == {rule.mode for rule in RULES.values() if rule.mode} - {RULES["constant"].mode}


@pytest.mark.slow
def test_a_run_is_placed_and_the_model_gives_what_was_measured(report, tmp_path):
    run = scale.read_report(report)
    found = scale.place(run, updates=100)
    assert set(found) == set(RULES)
    for rule in ("seq-mean-token-mean", "group-mean-token-mean", "token-mean", "balanced"):
        for name, estimate in run.measured[rule].items():
            assert scale._agrees(found[rule][name], estimate), (rule, name)
    sentences = scale.run_sentences(run, found)
    assert any(s.startswith("group-mean-token-mean: moves") and "to the negatives" in s for s in sentences)
    assert any(s.startswith("seq-mean-token-mean: pushes shorter") for s in sentences)
    assert any(s.startswith("balanced: pushes shorter") for s in sentences)
    assert not any("does not give what was measured" in s for s in sentences)


@pytest.mark.slow
def test_a_run_that_the_model_does_not_describe_is_told_so(report, tmp_path):
    record = json.loads(report.read_text())
    for bound in ("value", "low", "high"):
        record["weighing"]["overall"]["token-mean/tilt"][bound] += 0.2
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    run = scale.read_report(other)
    sentences = scale.run_sentences(run, scale.place(run, updates=60))
    assert "does not give what was measured in: token-mean tilt." in sentences[-1]


@pytest.mark.slow
def test_the_command_places_a_run_and_draws_it(report, tmp_path):
    result = command("--from", report, "--out", tmp_path, "--updates", 30)
    assert result.exit_code == 0, result.output
    assert "| pooled-4 |" in result.output
    assert (tmp_path / "figures" / "scale_run.png").stat().st_size > 10_000
    written = json.loads((tmp_path / "results" / "scale_run.json").read_text())
    assert written["setting"]["size"] == 8
    assert set(written["effects"]) == set(RULES)


@pytest.mark.slow
def test_what_is_not_a_report_is_refused_by_name(report, tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    record = json.loads(report.read_text())
    record["weighing"]["overall"]["length_gap/ratio"] = {"value": None, "low": None, "high": None}
    unmixed = tmp_path / "unmixed.json"
    unmixed.write_text(json.dumps(record))
    for path, message in (
        (empty, "expected the JSON of `verl-ba analyze --out FOLDER`"),
        (tmp_path / "absent.json", "expected the JSON of `verl-ba analyze --out FOLDER`"),
        (unmixed, "no group has responses of both signs"),
    ):
        result = command("--from", path)
        assert result.exit_code == 1
        assert message in result.stderr
        assert path.name in result.stderr


def test_the_committed_maps_give_the_tables_that_lie_beside_them():
    assert scale.table_markdown() == (_results.HERE / "results" / "scale.md").read_text()


def test_in_the_committed_maps_balanced_pushes_away_from_the_rarer_sign_and_the_token_modes_tilt():
    maps = _results.committed(scale.NAME)
    for accuracy, by_size in maps["accuracy_size"].items():
        for size, by_rule in by_size.items():
            push = by_rule["balanced"]["push"]
            assert accuracy == "0.5" or np.sign(push.value) == (1 if float(accuracy) > 0.5 else -1), (accuracy, size)
            assert abs(by_rule["balanced"]["tilt"].value) < 1e-6
    for gap, by_variation in maps["gap_variation"].items():
        for by_rule in by_variation.values():
            assert gap == "1.0" or np.sign(by_rule["group-mean-token-mean"]["tilt"].value) == (
                1 if float(gap) > 1 else -1
            )
