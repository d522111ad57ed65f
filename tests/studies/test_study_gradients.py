"""The gradient study: score gradients against autograd, the measures by hand, the jackknife, and the rules."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from studies.gradient_quality import bank, estimates, measure, plan, trainings, verdicts
from studies.gradient_quality.rules import ALL, Responses, baseline, coefficients
from studies.jobs import Job
from studies.miniature import runner, train
from studies.miniature.model import CHARACTERS, sample
from studies.miniature.outcome import FAILED, HELD, UNDECIDED
from studies.miniature.tasks import FAMILIES, Cell, demonstration, score
from verl_ba.aggregation import pool_mean_length

pytestmark = pytest.mark.usefixtures("one_thread")

CELL = Cell("g", "mod7", "negatives", (4, 4), 0.2, wrong=0.6, warm_steps=3)
SMALL = bank.Sizes(
    steps=1,
    prompts=4,
    group=4,
    pool=40,
    evaluation_prompts=4,
    true_prompts=8,
    parts=2,
    responses=4,
    blocks=2,
    block_prompts=8,
    draws=3,
    adam_draws=2,
    clipped=1,
    shapes=(bank.Shape(2, 4), bank.Shape(3, 2, False)),
)


def rollout(model, rows=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, len(CHARACTERS), (rows, 5), generator=generator)
    return prompts, sample(model, prompts, torch.rand(rows, 20, generator=generator, dtype=torch.float64))


def responses(seed=0, groups=6, size=5) -> Responses:
    """Random ones, of which the first group is all right, in a shuffled order."""
    g = torch.Generator().manual_seed(seed)
    n = groups * size
    group = torch.arange(groups).repeat_interleave(size)
    reward = torch.where(group == 0, 1.0, torch.randint(2, (n,), generator=g).double())
    length = torch.randint(1, 60, (n,), generator=g).double()
    order = torch.randperm(n, generator=g)
    square = torch.rand(n, generator=g).double() + 0.1
    return Responses(reward[order], length[order], group[order], torch.rand(n, generator=g) * 5, square)


# --- score gradients and the true gradient --------------------------------------------------------------------------


def test_score_gradients_are_those_of_autograd_response_by_response(small_model):
    prompts, sampled = rollout(small_model, seed=9)
    assert len(set(sampled.mask_BT.sum(1).tolist())) > 3
    small_model = small_model.float()
    found = bank.score_gradients(small_model, prompts, sampled.response_BT, sampled.mask_BT, chunk=5)
    for i in range(len(prompts)):
        log_prob = small_model.log_probs(prompts[i : i + 1], sampled.response_BT[i : i + 1])[0]
        gradient = torch.autograd.grad(log_prob[sampled.mask_BT[i]].sum(), list(small_model.parameters()))
        expected = torch.cat([g.flatten() for g in gradient])
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=2e-5)


def test_the_true_gradient_is_unbiased(small_model):
    """E over two samples of Σ_i (r_i - r_j)·S_i/2, summed over all outcomes of a short response, is ∇E[r]."""
    prompt = torch.tensor([[2, 3, 4, 5, 6]])
    every = torch.arange(len(CHARACTERS))[:, None]  # responses of one character
    reward = (every[:, 0] % 3 == 0).double()
    parameters = list(small_model.parameters())
    p = small_model.log_probs(prompt.expand(len(every), -1), every)[:, 0].exp()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad((p * reward).sum(), parameters, retain_graph=True)])
    n = len(every)
    a, b = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    pairs = torch.stack([a, b], 1).flatten()
    weight = (p[a] * p[b]).detach().repeat_interleave(2)
    coefficient = bank.others(reward[pairs], 2) / 2 * weight
    log_prob = small_model.log_probs(prompt.expand(n, -1), every)[:, 0]
    gradient = torch.autograd.grad((coefficient * log_prob[pairs]).sum(), parameters)
    torch.testing.assert_close(torch.cat([g.flatten() for g in gradient]), expected, rtol=1e-9, atol=1e-12)


def test_directions_are_the_weighted_sums_of_score_gradients(tmp_path):
    settings = replace(SMALL, warm_batch=8)
    model = train.warm_start(CELL, 0, settings, tmp_path)
    prompts, _ = train.load_entries(CELL, settings, tmp_path)
    noise = torch.Generator().manual_seed(0)
    update = bank.sampled(model, CELL, prompts, torch.arange(6), noise, 4)
    update = replace(update, reward_B=torch.arange(24) % 5 // 3 * 1.0)
    found = bank.directions(model, update, 4)
    score_BD = bank.score_gradients(model, update.prompt_BP, update.rollout.response_BT, update.rollout.mask_BT)
    for value, direction in zip((update.reward_B, update.length_B.double().log()), found, strict=True):
        total = torch.zeros(score_BD.shape[1])
        for i in range(24):
            rest = [j for j in range(24) if j // 4 == i // 4 and j != i]
            total += (float(value[i]) - float(value[rest].double().mean())) * score_BD[i] / 24
        torch.testing.assert_close(direction, total, rtol=1e-3, atol=1e-5)


def test_the_effective_length_counts_surprise():
    log_prob = torch.tensor([[1.0, 0.5, 0.25], [0.5, 1.0, 1.0]]).log()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert bank.effective_length(log_prob, mask).tolist() == pytest.approx([0.25 + 0.5625, 0.25])


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["balanced", "group-mean-token-mean", "token-mean", "seq-mean-token-mean"])
def test_a_modes_coefficient_is_the_advantage_over_its_length(mode):
    r = responses()
    sign = r.advantage.sign().long()
    expected = r.advantage / pool_mean_length(mode, r.length, r.group, sign)
    torch.testing.assert_close(coefficients(r, {}, [mode])[0], expected, rtol=1e-12, atol=0)


def test_every_rule_is_literal():
    """The rules that are no modes, written out response by response."""
    r = responses(3)
    divisor = 20.0
    names = [n for n, rule in ALL.items() if rule.kind != "length"]
    found = dict(zip(names, coefficients(r, {n: {"divisor": divisor} for n in names}, names), strict=True))

    def scaled(mean):
        return mean * sum(T[j] / mean[j] for j in range(n)) / n

    n, u, T, R, sq = len(r.reward), r.effective, r.length, r.reward, r.square
    sign = r.advantage.sign()
    pools = [[k for k in range(n) if r.group[k] == r.group[j] and sign[k] == sign[j]] for j in range(n)]
    same = torch.stack([u[pool].mean() for pool in pools])
    for i in range(n):
        group = [j for j in range(n) if r.group[j] == r.group[i]]
        rewards = R[group]
        if rewards.min() == rewards.max():
            assert all(found[name][i] == 0 for name in names)
            continue
        rest, std = [j for j in group if j != i], rewards.std() + 1e-6
        advantage = (R[i] - rewards.mean()) / std

        def mean(weight, of):
            return sum(weight[j] * R[j] for j in of) / sum(weight[j] for j in of)

        expected = {
            "opo": (R[i] - mean(T, group)) / std / divisor,
            "opo-others": (R[i] - mean(T, rest)) / std / divisor,
            "score": (R[i] - mean(sq, group)) / std / divisor,
            "score-others": (R[i] - mean(sq, rest)) / std / divisor,
            "effective-opo": (R[i] - mean(u, group)) / std / divisor,
            "effective-root": advantage / scaled(u.sqrt())[i],
            "effective-shrunk": (R[i] - mean(u, rest)) / std / scaled(u + u.mean())[i],
            "effective-balanced": advantage / scaled(same)[i],
        }
        for name, value in expected.items():
            assert float(found[name][i]) == pytest.approx(float(value), rel=1e-6), name


@pytest.mark.parametrize("size", [4, 8, 16])
def test_balanced_is_opos_baseline_times_a_random_scale(size):
    """With rewards 0 and 1: A/ℓ̄_sign = (r - Σ T·r/ΣT) · ℓ̄/(σ·ℓ₊·ℓ₋), with the lengths of the group's own sample."""
    r = responses(size, size=size)
    found = coefficients(r, {}, ["balanced"])[0]
    mean, right = r.mean_in_group(r.length), r.reward
    of_right = r.mean_in_group(r.length * right) / r.mean_in_group(right).clamp(min=1e-9)
    of_wrong = r.mean_in_group(r.length * (1 - right)) / r.mean_in_group(1 - right).clamp(min=1e-9)
    mixed = r.advantage != 0
    expected = (right - baseline(r, r.length)) * mean / (r.spread * of_right * of_wrong)
    assert mixed.sum() >= 10
    torch.testing.assert_close(found[mixed], expected[mixed], rtol=1e-9, atol=0)


def test_a_rule_that_needs_the_score_says_so_without_it():
    r = responses()
    with pytest.raises(ValueError, match="needs `square`"):
        coefficients(replace_square(r), {}, ["score"])


def replace_square(r: Responses) -> Responses:
    return Responses(r.reward, r.length, r.group, r.effective)


# --- measures -------------------------------------------------------------------------------------------------------


def a_block(score: torch.Tensor, true: torch.Tensor, length_direction: torch.Tensor, lengths, rewards) -> bank.Block:
    """A block of made-up score gradients [B, D]; its update has lengths and rewards only."""
    update = train.Update.__new__(train.Update)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    filled = train.Rollout(mask.long(), mask, torch.zeros(mask.shape), 0.0)
    for name, value in {"rollout": filled, "reward_B": torch.tensor(rewards)}.items():
        object.__setattr__(update, name, value)
    return bank.Block(
        update,
        score,
        score @ score.T,
        (score @ true.T).double(),
        (score @ length_direction).double(),
        mask.sum(1) / 2.0,
    )


def test_numbers_of_an_update_by_hand():
    """Two responses in the plane: g = (c₁·S₁ + c₂·S₂)/2; a third is the rest of the block."""
    score = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
    block = a_block(score, torch.tensor([[1.0, 0.0], [0.0, 4.0]]), torch.tensor([0.0, 1.0]), [1, 2, 3], [1.0, 0.0, 1.0])
    c = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    found = measure.update_numbers(c, block, torch.tensor([0, 1]))
    g = np.array([1.0, -1.0])  # (2·(1, 0) - (0, 2))/2
    assert found["square"].tolist() == pytest.approx([2.0])
    assert found["dot"].tolist() == [pytest.approx([1.0]), pytest.approx([-4.0])]
    assert found["cos"][0].tolist() == pytest.approx([1 / np.sqrt(2)])
    assert found["push"].tolist() == pytest.approx([-1 / np.sqrt(2)])
    assert found["fisher"].tolist() == pytest.approx([float(g @ [3, 1]) ** 2])


def a_row(blocks=6, parts=3, seed=0, rules=("token-mean", "balanced")):
    """Random sums of a bank."""
    rng = np.random.default_rng(seed)
    r = len(rules)
    one = {k: rng.uniform(1, 2, (blocks, r)).tolist() for k in ("square", "push", "fisher", "half")}
    one |= {k: rng.uniform(1, 2, (blocks, parts, r)).tolist() for k in ("dot", "cos")}
    one["cross"] = rng.uniform(0.1, 0.2, (blocks, r)).tolist()
    direction = rng.normal(size=(parts, 40)) + 1
    along = rng.normal(size=(parts, 40)) * 0.3 + 0.5
    return {
        "cell": "c",
        "about": {"steps": 0},
        "shapes": {"2x4": one | {"rules": list(rules)}},
        "adam": {"rules": list(rules), "gain": one["dot"], "push": one["push"]},
        "clipped": {"2": {"rules": list(rules), "dot": one["dot"], "square": one["square"]}},
        "true": (direction @ direction.T).tolist(),
        "true_length": (direction @ along.T).tolist(),
        "length_length": (along @ along.T).tolist(),
    }


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(1).normal(size=(9, 4))
    value, error = estimates.jackknife(lambda b, p: values[b].mean(0), 9, 1)
    np.testing.assert_allclose(value, values.mean(0))
    np.testing.assert_allclose(error, values.std(0, ddof=1) / 3)
    _, both = estimates.jackknife(lambda b, p: values[b][:, p].mean(keepdims=True).ravel(), 9, 4)
    blocks, parts = values.mean(1).std(ddof=1) / 3, values.mean(0).std(ddof=1) / 2
    np.testing.assert_allclose(both, [np.hypot(blocks, parts)])


def test_the_cosine_and_its_ratio_by_hand():
    row = a_row()
    m, sums = estimates.Measured(row), row["shapes"]["2x4"]
    true = np.array(row["true"])
    norm = np.sqrt((true.sum() - np.trace(true)) / 6)
    cos = np.array(sums["cos"]).mean((0, 1))
    assert m.numbers("cosine", against=None)["balanced"].value == pytest.approx(cos[1] / norm)
    ratio = m.numbers("cosine")
    assert ratio["balanced"].value == pytest.approx(cos[1] / cos[0] - 1)
    assert ratio["token-mean"].value == pytest.approx(0, abs=1e-12)
    assert ratio["token-mean"].error == pytest.approx(0, abs=1e-12)
    cross, square = (np.array(sums[k]).mean(0) for k in ("cross", "square"))
    assert m.numbers("signal", against=None)["balanced"].value == pytest.approx(cross[1] / (square - cross)[1])
    interval = ratio["balanced"].interval()
    assert interval.high - interval.low == pytest.approx(
        2 * 2.5706 * ratio["balanced"].error, rel=1e-4
    )  # t, 5 freedoms


@pytest.mark.parametrize("name", ["cosine", "bias", "signal", "per_kl", "adam", "push", "net", "half", "clipped-2"])
def test_every_measure_has_a_value_and_an_error_for_every_rule(name):
    found = estimates.Measured(a_row()).numbers(name)
    assert all(np.isfinite([n.value, n.error]).all() for n in found.values())
    assert found["balanced"].error > 0


@pytest.mark.slow
def test_a_small_bank_has_all_its_numbers_and_is_the_same_again(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "score_rollout", lambda cell, entries, rollout: (rollout.mask_BT.sum(1) % 2).float())
    job = Job("g", CELL, "token-mean", 3e-4, 0, SMALL)
    rows = [measure.measure(job, tmp_path) for _ in range(2)]
    for row in rows:
        assert row.pop("wall_s") > 0
        assert row.pop("cpu_s") > 0
    assert rows[0] == rows[1]
    row = rows[0]
    assert list(row["shapes"]) == ["2x4", "3x2"]
    assert np.array(row["shapes"]["2x4"]["cos"]).shape == (2, 2, len(ALL))
    assert np.array(row["clipped"]["4"]["dot"]).shape == (2, 2, len(measure.MAIN))
    with pytest.raises(ValueError, match="the bank needs 48 prompts"):
        bank.make_bank(CELL, 0, 3e-4, replace(SMALL, blocks=5), tmp_path)


# --- trainings ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["balanced", "token-mean"])
def test_a_mode_trained_by_coefficients_has_the_gradient_of_the_mode(rule, tmp_path):
    """verl's loss with c·ℓ as advantage and ℓ as ℓ̄, and with A and the mode's own ℓ̄."""
    settings = replace(SMALL, warm_batch=8)
    model = train.warm_start(CELL, 0, settings, tmp_path)
    prompts, _ = train.load_entries(CELL, settings, tmp_path)
    trainer = train.Trainer(model, CELL, 0, 3e-4, settings)
    update = trainer.draw(prompts)
    update = replace(update, reward_B=torch.arange(16) % 3 // 2 * 1.0)
    r = Responses(update.reward_B, update.length_B, update.group_B, update.length_B)
    advantage = r.advantage[:, None].expand_as(update.advantage_BT).float()
    update = replace(update, advantage_BT=advantage)
    rows = torch.arange(16)
    gradients = []
    for u, mean_length in (
        (update, train.fit(rule, update.batch(), {})),
        (trainings.weighed(update, rule, 17.0, {}), torch.full((16,), 17.0)),
    ):
        loss = train.policy_loss(model, u, rows, mean_length, 16, trainer.config)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-7)


def test_the_temperature_for_an_entropy_is_found(small_model):
    prompts, sampled = rollout(small_model, rows=64)
    noise = torch.rand(64, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = 0.6 * sampled.entropy
    assert trainings.at_entropy(small_model, prompts, noise, wanted).entropy == pytest.approx(wanted, rel=0.15)
    greedy = sample(trainings.sharpened(small_model, trainings.GREEDY), prompts, noise)
    again = sample(trainings.sharpened(small_model, trainings.GREEDY), prompts, 1 - noise)
    assert np.mean([a == b for a, b in zip(greedy.texts(), again.texts(), strict=True)]) > 0.9  # all but ties


def test_right_answers_are_longer_where_the_careful_writer_errs():
    cell = replace(CELL, relation="positives", wrong=0.9, weak=0.0, fillers=(0.2, 4.0))
    entries = FAMILIES["mod7"].entries(5, 400, (4, 4))
    rng = random.Random(0)
    lengths = {True: [], False: []}
    for entry in entries:
        text = demonstration(cell, entry, rng)
        lengths[bool(score(cell, text, entry))].append(len(text))
    assert np.mean(lengths[True]) > 1.3 * np.mean(lengths[False])


# --- verdicts -------------------------------------------------------------------------------------------------------


def statements(*values, error=0.01, above=0.0):
    return [verdicts.Statement("c", estimates.Number(value, error, 11), above) for value in values]


@pytest.mark.parametrize(
    ("found", "planned", "verdict"),
    [
        (statements(0.05, 0.03), 2, HELD),
        (statements(0.05, 0.03), 3, UNDECIDED),  # one was not run
        (statements(0.05, 0.01), 2, UNDECIDED),
        (statements(0.05, -0.1), 2, FAILED),
        (statements(0.05, -0.025), 1, FAILED),
        (statements(0.05, -0.025), 20, UNDECIDED),  # the interval for a failure is wider, for so many statements
        (statements(-0.02, error=0.001, above=-0.01), 1, FAILED),
        (statements(-0.005, error=0.001, above=-0.01), 1, HELD),
        ([], 5, UNDECIDED),
    ],
)
def test_a_statement_about_every_checkpoint(found, planned, verdict):
    assert verdicts.judge(found, planned) == verdict


def test_the_difference_of_two_rules_is_that_of_their_ratios():
    m = estimates.Measured(a_row(rules=("token-mean", "balanced", "batch-signs")))
    ratio = m.numbers("cosine")
    found = verdicts.less(m, "batch-signs", "balanced")
    assert found.value == pytest.approx(ratio["batch-signs"].value - ratio["balanced"].value)


def test_the_area_is_the_mean_of_the_curve():
    row = {"at": [0, 2, 4, 8], "curves": {"accuracy": [0.0, 0.2, 0.4, 0.4]}}
    assert verdicts.area(row, 4) == pytest.approx(0.2)
    assert verdicts.area(row, 8) == pytest.approx((4 * 0.2 + 4 * 0.4) / 8)


def test_trainings_that_follow_the_gradient_are_foretold():
    rules = tuple(measure.MAIN)
    row = a_row(rules=rules)
    row["shapes"]["2x4"]["cos"] = [[[1 + 0.1 * i for i in range(len(rules))]] * 3] * 6
    measured = [estimates.Measured(row)]
    rows = [
        {"cell": "c", "rule": rule, "seed": seed, "at": [0, 12], "curves": {"accuracy": [0.3, 0.3 + 0.01 * i]}}
        for seed in range(4)
        for i, rule in enumerate(rules)
    ]
    found = verdicts.foretold(measured, rows, ["c"], 12)
    assert found.value == pytest.approx(1)
    assert verdicts.foretold(measured, rows[: len(rules)], ["c"], 12) is None  # one seed


def test_the_protocols_seeds_and_cells_were_never_used_before():
    table = plan.document()
    earlier = runner.read_toml(runner.PROTOCOL), runner.read_toml(runner.SCREENING)
    assert not set(table["cells"]) & {name for document in earlier for name in document["cells"]}
    seeds = {job.seed for stage in plan.STAGES for job in plan.jobs_of(stage)}
    assert not seeds & {job.seed for stage in ("screening", "confirmation") for job in runner.plan(stage)}
    for kind in ("negatives_longer", "independent", "rare"):
        assert set(table["claims"][kind]) <= set(table["gradients"]["cells"])
    assert {job.settings.steps for job in plan.jobs_of(plan.BANKS)} == {0, 8}
