"""The null model of the studies: where lengths do not know correctness, which rules push on length."""

import itertools
from math import sqrt

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from studies import _results, null_length_bias, simulated
from studies.rules import RULES, Batch, fit
from studies.simulated import LOCAL, LONG, P_LONG, SHORT, Setting, draw, enumerate_groups, exact, mean_with_control

UNBIASED = ("seq-mean-token-mean", "group-mean-token-mean", "doubly-balanced")
KS = range(1, 8)


def push_of(rule: str, settings: Setting, updates: int, seed: int) -> dict[int, simulated.Mean]:
    draws = simulated.simulate(settings, [rule], updates, np.random.default_rng(seed))
    return {k: mean_with_control(draws.push[rule], draws.control, draws.correct == k) for k in KS}


@pytest.fixture(scope="module")
def drawn() -> dict[str, dict[int, simulated.Mean]]:
    """Pushes with two lengths; updates of 256 prompts, since in small ones the signs' effect brings a little push back."""
    rules = (*UNBIASED, "balanced", "pooled-1", "pooled-4", "pooled-16")
    draws = simulated.simulate(Setting(prompts=256), rules, 100, np.random.default_rng(11))
    return {
        rule: {k: mean_with_control(draws.push[rule], draws.control, draws.correct == k) for k in KS} for rule in rules
    }


def is_null(pushes: dict[int, simulated.Mean]) -> bool:
    return all(abs(push.value) < 3 * push.error + 1e-12 for push in pushes.values())


def naive_push(size: int, k: int) -> float:
    """The push of `balanced` as a sum over all 2^G outcomes, from the definition."""
    reward = [1.0] * k + [0.0] * (size - k)
    std = np.std(reward, ddof=1)
    total = 0.0
    for long in itertools.product((0, 1), repeat=size):
        length = [LONG if x else SHORT for x in long]
        chance = np.prod([P_LONG if x else 1 - P_LONG for x in long])
        for i in range(size):
            own = [length[j] for j in range(size) if reward[j] == reward[i]]
            advantage = (reward[i] - k / size) / std
            total += chance * advantage * (long[i] - P_LONG) / np.mean(own) / size
    return float(total * (LONG * P_LONG + SHORT * (1 - P_LONG)))


def test_the_enumeration_is_the_sum_over_every_outcome():
    groups, chance = enumerate_groups(6, range(1, 6))
    found = exact(groups, chance, "balanced", simulated.expected_length(Setting()))
    for k in range(1, 6):
        assert chance[groups.correct == k].sum() == pytest.approx(1, rel=1e-12)
        assert found[k].value == pytest.approx(naive_push(6, k), rel=1e-5)  # verl's 1e-6 beside the standard deviation


def test_balanced_shortens_where_few_are_right_and_lengthens_where_few_are_wrong():
    # an independent simulation of 200,000 groups each, standard error below .9, advantages over the population's std
    simulated_elsewhere = {
        8: dict(zip(KS, (-189, -92, -37, 1, 38, 92, 190), strict=True)),
        16: dict(zip((1, 2, 4, 8, 12, 14, 15), (-145, -82, -32, 0, 33, 83, 145), strict=True)),
    }
    for size, table in simulated_elsewhere.items():
        groups, chance = enumerate_groups(size, list(table))
        found = exact(groups, chance, "balanced", simulated.expected_length(Setting()))
        for k, value in table.items():
            assert 1000 * found[k].value * sqrt(size / (size - 1)) == pytest.approx(value, abs=3 * 0.9)


def test_every_other_rule_that_looks_at_one_group_pushes_nowhere():
    groups, chance = enumerate_groups(8, KS)
    for rule in LOCAL:
        pushes = exact(groups, chance, rule, simulated.expected_length(Setting()))
        assert all(abs(push.value) < 1e-12 for push in pushes.values()) == (rule != "balanced"), rule


@pytest.mark.parametrize("rule", RULES)
def test_exactly_the_rules_called_local_read_no_other_group(rule):
    update = draw(Setting(prompts=6), np.random.default_rng(1), np.array([1, 2, 3, 5, 6, 7]))
    state = {"divisor": 20.0}
    whole = fit(rule, update.batch, dict(state))
    alone = torch.cat(
        [
            fit(
                rule,
                Batch(update.batch.length[own], torch.zeros(8, dtype=torch.int64), update.batch.sign[own]),
                dict(state),
            )
            for own in (update.batch.group == g for g in range(6))
        ]
    )
    assert torch.allclose(whole, alone, rtol=1e-12, atol=0) == (rule in LOCAL)


@pytest.mark.slow
def test_sequence_token_and_doubly_balanced_push_nowhere_and_balanced_does(drawn):
    for rule in UNBIASED:
        assert is_null(drawn[rule]), rule
        assert all(push.error < 1e-3 for push in drawn[rule].values())  # a thousandth would be seen
    assert not is_null(drawn["balanced"])


@pytest.mark.slow
def test_partial_pooling_lies_between_and_falls_with_its_strength(drawn):
    for k in (1, 2, 6, 7):
        sizes = [abs(drawn[rule][k].value) for rule in ("balanced", "pooled-1", "pooled-4", "pooled-16")]
        errors = [drawn[rule][k].error for rule in ("balanced", "pooled-1", "pooled-4", "pooled-16")]
        assert all(a > b for a, b in itertools.pairwise(sizes)), k
        assert sizes[1] > 3 * errors[1]
        assert np.sign(drawn["pooled-1"][k].value) == (1 if k > 4 else -1)


@pytest.mark.slow
def test_draws_agree_with_the_enumeration_and_their_errors_are_honest(drawn):
    groups, chance = enumerate_groups(8, KS)
    truth = exact(groups, chance, "balanced", simulated.expected_length(Setting()))
    for k in KS:
        assert abs(drawn["balanced"][k].value - truth[k].value) < 4 * drawn["balanced"][k].error
        assert drawn["balanced"][k].spread == pytest.approx(truth[k].spread, rel=0.1)


@pytest.mark.slow
def test_a_small_update_brings_the_push_back_through_the_signs_effect():
    rare = simulated.at_accuracy(Setting(prompts=8), 0.05)
    draws = simulated.simulate(rare, ["doubly-balanced"], 500, np.random.default_rng(3))
    small = mean_with_control(draws.push["doubly-balanced"], draws.control, draws.correct == 1)
    assert small.value < -3 * small.error


def test_standard_errors_cover():
    rng = np.random.default_rng(5)
    off = 0
    for _ in range(300):
        shared = rng.normal(size=(40, 1))  # what the groups of one update have in common
        control = rng.normal(size=(2, 40, 6))
        value = shared + control[0] - 2 * control[1] + rng.normal(size=(40, 6))
        mean = mean_with_control(value, control, np.ones((40, 6), dtype=bool))
        off += abs(mean.value) > 1.96 * mean.error
    assert 4 <= off <= 35  # 5% of 300 and a little more: the slope is fitted


def test_a_seed_decides_every_draw():
    setting = Setting(variation=0.5, gap=2.0, prompt_variation=0.3, harder=1.0, prompts=5)
    a, b, c = (draw(setting, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert torch.equal(a.batch.length, b.batch.length)
    assert (a.correct == b.correct).all()
    assert not torch.equal(a.batch.length, c.batch.length)


def test_a_length_below_one_token_is_refused():
    with pytest.raises(ValueError, match=r"expected at least one token; got 0\.[0-9]+; raise the setting's mean"):
        draw(Setting(variation=1.0, mean=2.0), np.random.default_rng(0))


def test_lengths_have_the_means_and_the_variation_of_the_setting():
    setting = Setting(variation=0.7, gap=1.8)
    update = draw(setting, np.random.default_rng(0), np.full(40_000, 4))
    length, sign = update.batch.length.numpy(), update.batch.sign.numpy()
    right, wrong = length[sign > 0], length[sign < 0]
    assert right.mean() == pytest.approx(1000, rel=0.02)
    assert wrong.mean() == pytest.approx(1800, rel=0.02)
    for of_sign in (right, wrong):
        assert of_sign.std() / of_sign.mean() == pytest.approx(0.7, rel=0.03)


@pytest.mark.slow
def test_the_command_writes_tables_numbers_and_figure_and_the_tables_come_back_from_the_numbers(tmp_path):
    import typer

    app = typer.Typer()
    app.command()(null_length_bias.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--scale", "0.02"])
    assert result.exit_code == 0, result.output
    numbers = (tmp_path / "results" / "null_length_bias.json").read_text()
    read = _results.from_json(numbers)
    assert _results.to_json(read) == numbers
    assert null_length_bias.table_markdown(read) == (tmp_path / "results" / "null_length_bias.md").read_text()
    assert (tmp_path / "figures" / "null_length_bias.png").stat().st_size > 10_000


def test_the_committed_numbers_are_those_of_the_enumeration():
    committed = _results.committed(null_length_bias.NAME)
    for size, by_rule in committed["two_point"].items():
        again = null_length_bias.two_point(size, 0, np.random.default_rng(0), lambda: None)
        for rule, by_k in again.items():
            for k, mean in by_k.items():
                assert by_rule[rule][k].value == pytest.approx(mean.value, abs=2e-6)
    assert set(committed["two_point"][8]) == set(RULES)
