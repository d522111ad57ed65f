"""The training study: its sampler, its loss against verl's own modes, its tasks, its bookkeeping and its statistics."""

import json
import random
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from studies import jobs
from studies.miniature import outcome, runner, train
from studies.miniature.model import CHARACTERS, END, PAD, encode, sample
from studies.miniature.tasks import FAMILIES, LIMIT, Cell, demonstration, score
from studies.rules import fit
from verl_ba import loss_agg
from verl_ba.tools.analysis.modes import in_full

pytestmark = pytest.mark.usefixtures("one_thread")

CELLS = {
    "negatives": Cell("n", "mod7", "negatives", (4, 4), 0.2, wrong=0.6, warm_steps=3),
    "independent": Cell("i", "reversal", "independent", (3, 5), 0.2, warm_steps=3),
    "prompts": Cell("p", "sorting", "prompts", (2, 7), 0.2, warm_steps=3),
}
SMALL = train.Settings(steps=2, prompts=3, group=4, evaluations=2, evaluation_prompts=8, probes=1, pool=20)


def rollout(model, rows=24, limit=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, len(CHARACTERS), (rows, 6), generator=generator)
    return prompts, sample(model, prompts, torch.rand(rows, limit, generator=generator, dtype=torch.float64))


def an_update(model, seed=0, groups=6, size=4):
    """Sampled responses in whole groups, with random rewards and verl's advantages."""
    prompts, sampled = rollout(model, groups * size, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(2, (groups * size,), generator=generator).float()
    group = torch.arange(groups).repeat_interleave(size)
    mask = sampled.mask_BT.float()
    last = torch.nn.functional.one_hot(sampled.mask_BT.sum(1) - 1, mask.shape[1])
    advantage_of, _ = train.verl_functions()
    advantage, _ = advantage_of(last * reward[:, None], mask, group.numpy())
    return train.Update(prompts, sampled, reward, group, advantage.double())


# --- the sampler ----------------------------------------------------------------------------------------------------


def test_the_sampler_with_its_cache_equals_a_full_forward_pass(small_model):
    prompts, sampled = rollout(small_model)
    lengths = sampled.mask_BT.sum(1)
    assert len(set(lengths.tolist())) > 5  # rows left the batch at different times
    full = small_model.log_probs(prompts, sampled.response_BT)
    torch.testing.assert_close(sampled.log_prob_BT, torch.where(sampled.mask_BT, full, 0.0), rtol=1e-10, atol=1e-10)


def test_every_character_is_the_one_whose_share_of_the_distribution_holds_the_noise(small_model):
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, len(CHARACTERS), (10, 6), generator=generator)
    noise = torch.rand(10, 20, generator=generator, dtype=torch.float64)
    sampled = sample(small_model, prompts, noise)
    for row, length in enumerate(sampled.mask_BT.sum(1).tolist()):
        ids = torch.cat([prompts[row], sampled.response_BT[row]])
        for t in range(length):
            logits = small_model.head(small_model.hidden(ids[None, : 6 + t]))[0, -1]
            upper = logits.softmax(0).cumsum(0)[ids[6 + t]]
            lower = upper - logits.softmax(0)[ids[6 + t]]
            assert lower - 1e-9 <= noise[row, t] <= upper + 1e-9


def test_a_response_ends_with_its_newline_or_is_cut(small_model):
    _, sampled = rollout(small_model, rows=60)
    cut = 0
    for row, mask, is_cut in zip(sampled.response_BT, sampled.mask_BT, sampled.cut_B, strict=True):
        length = int(mask.sum())
        assert mask.tolist() == [True] * length + [False] * (len(mask) - length)
        assert (row[:length] == END).sum() == (0 if is_cut else 1)
        assert bool(is_cut) == (int(row[length - 1]) != END)
        assert (row[length:] == PAD).all()
        cut += bool(is_cut)
    assert 0 < cut < 60


# --- the loss -------------------------------------------------------------------------------------------------------


def own_loss(model, update, rows, mode):
    """A row-by-row twin of the modes: the paper's sums, nothing of verl or of this package."""
    log_prob = model.log_probs(update.prompt_BP, update.rollout.response_BT)
    total = 0.0
    group, sign, length = update.group_B.tolist(), update.advantage_B.sign().tolist(), update.length_B.tolist()
    for i in rows.tolist():
        pool = {
            "balanced": [j for j in range(len(group)) if (group[j], sign[j]) == (group[i], sign[i])],
            "group-mean-token-mean": [j for j in range(len(group)) if group[j] == group[i]],
            "seq-mean-token-mean": [i],
        }[mode]
        mean_length = sum(length[j] for j in pool) / len(pool)
        ratio = (log_prob[i, : length[i]] - update.rollout.log_prob_BT[i, : length[i]]).exp()
        a = update.advantage_B[i]
        low, high = ratio * a, ratio.clamp(0.8, 1.28) * a
        objective = torch.minimum(low, high)
        if a < 0:
            objective = torch.maximum(objective, 3.0 * a)  # verl's dual clip
        total = total - objective.sum() / mean_length
    return total / len(rows)


@pytest.mark.parametrize(
    ("rule", "mode"),
    [("balanced", "balanced"), ("token", "group-mean-token-mean"), ("sequence", "seq-mean-token-mean")],
)
def test_a_rules_loss_and_gradient_are_those_of_its_mode(small_model, rule, mode):
    update = an_update(small_model)
    with torch.no_grad():
        for parameter in small_model.parameters():  # ratios away from 1, so that the clips matter
            parameter.add_(0.03 * torch.randn(parameter.shape, dtype=parameter.dtype))
    rows = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:12]
    mean_length = fit(rule, update.batch(), {})
    config = train.actor_config(SMALL)
    for parameter in small_model.parameters():
        parameter.grad = None
    train.backward(small_model, update, rows, mean_length, len(rows), config)
    mine = [parameter.grad.clone() for parameter in small_model.parameters()]
    loss = train.policy_loss(small_model, update, rows, mean_length, len(rows), config)

    twin = own_loss(small_model, update, rows, mode)
    assert isinstance(twin, torch.Tensor)
    torch.testing.assert_close(loss, twin, rtol=1e-10, atol=1e-12)
    for gradient, expected in zip(mine, torch.autograd.grad(twin, list(small_model.parameters())), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)

    config = train.actor_config(SMALL, mode)
    column = torch.zeros(24)  # verl's own mode reads none
    if mode != "seq-mean-token-mean":  # the plugin's: by its own hook
        data = {
            "uid": update.group_B.tolist(),
            "advantages": update.advantage_BT,
            "response_mask": update.rollout.mask_BT,
        }
        column = loss_agg.column(mode, loss_agg.gather(data))
    real = train.policy_loss(small_model, update, rows, column, len(rows), config)
    torch.testing.assert_close(loss, real, rtol=1e-7 if mode == "seq-mean-token-mean" else 1e-12, atol=1e-9)
    gradient = torch.autograd.grad(real, list(small_model.parameters()))
    for one, other in zip(mine, gradient, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)  # verl adds 1e-8 to a length


def test_drift_is_the_loss_at_ratio_one_and_zero_under_balanced_and_sequence(small_model):
    update = an_update(small_model, seed=2)
    config = train.actor_config(SMALL)
    every = torch.arange(24)
    for rule in ("balanced", "sequence", "token", "pooled-4"):
        mean_length = fit(rule, update.batch(), {})
        drift, share = train.weights_of_signs(update, mean_length)
        loss = train.policy_loss(small_model, update, every, mean_length, 24, config)
        assert drift == pytest.approx(loss.item(), abs=1e-12)
        assert (abs(drift) < 1e-7) == (rule in ("balanced", "sequence")), rule  # verl's advantages are float32
        assert 0.2 < share < 0.8
        assert (abs(share - 0.5) < 1e-6) == (rule in ("balanced", "sequence"))


def test_the_gradients_of_the_signs_add_up_to_that_of_the_update(small_model):
    update = an_update(small_model, seed=4)
    mean_length, config = fit("token", update.batch(), {}), train.actor_config(SMALL)
    parts = []
    for advantage in (update.advantage_BT.clamp(min=0), update.advantage_BT.clamp(max=0), update.advantage_BT):
        loss = train.policy_loss(small_model, update, torch.arange(24), mean_length, 24, config, advantage)
        parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(small_model.parameters()))]))
    torch.testing.assert_close(parts[0] + parts[1], parts[2], rtol=1e-9, atol=1e-12)
    expected = float(parts[0] @ parts[1] / parts[0].norm() / parts[1].norm())
    assert train.sign_cosine(small_model, update, mean_length, config) == pytest.approx(expected, abs=1e-9)


# --- the tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_careful_answer_is_right_and_a_changed_one_wrong(family):
    cell = Cell("x", family, "prompts", (4, 6), weak=0.0, slip=0.0)
    rng = random.Random(0)
    for entry in FAMILIES[family].entries(7, 40, cell.steps):
        text = demonstration(cell, entry, rng)
        answer = text.rpartition("=")[2]
        assert score(cell, text, entry)
        assert score(cell, f"A.=9=={answer}", entry)  # only what follows the last '=' counts
        for wrong in (text[:-1], text + answer[-1], text.replace("=", ""), "", "=", text[:-1] + "~"):
            assert not score(cell, wrong, entry), wrong
        prompt = FAMILIES[family].pad(FAMILIES[family].prompt(entry), FAMILIES[family].width(6))
        assert len(prompt) == FAMILIES[family].width(6)
        assert encode(prompt + text)


def test_mod7_is_scored_by_an_independent_evaluation():
    from studies.miniature.tasks import FUNCTIONS

    cell = Cell("x", "mod7", "prompts", (3, 3), weak=0.0)
    entry = {"first": 5, "letters": "bad", "answer": "?"}
    value = 5
    for letter in "bad":
        m, k = FUNCTIONS[letter]
        value = (m * value + k) - 7 * ((m * value + k) // 7)
    made = FAMILIES["mod7"].entries(3, 200, (3, 3))
    assert {e["answer"] for e in made} == set("0123456")
    for e in made:
        v = e["first"]
        for letter in e["letters"]:
            v = (FUNCTIONS[letter][0] * v + FUNCTIONS[letter][1]) % 7
        assert score(cell, f"={v}", e)
        assert not score(cell, f"={(v + 1) % 7}", e)
    assert score(cell, f"={value}", entry | {"answer": str(value)})


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_have_the_promised_relation_of_length_and_correctness(family):
    rng = random.Random(1)

    def ratio(relation, **more):
        cell = Cell("x", family, relation, (4, 4) if relation != "prompts" else (2, 7), 0.1, slip=0.05, **more)
        entries = FAMILIES[family].entries(11, 1500, cell.steps)
        texts = [demonstration(cell, entry, rng) for entry in entries]
        right = np.array([score(cell, text, entry) for text, entry in zip(texts, entries, strict=True)])
        length = np.array([len(text) + 1 for text in texts])
        sizes = np.array([len(FAMILIES[family].prompt(entry)) for entry in entries])
        assert 0.1 < right.mean() < 0.9
        with_prompt = np.corrcoef(sizes, length)[0, 1] if sizes.std() else 0.0
        return length[~right].mean() / length[right].mean(), with_prompt, length

    wrong_to_right, _, _ = ratio("negatives", wrong=0.9)
    assert wrong_to_right > 1.15
    wrong_to_right, _, length = ratio("independent")
    assert 0.93 < wrong_to_right < 1.07
    assert length.std() / length.mean() > 0.3
    wrong_to_right, with_prompt, _ = ratio("prompts")
    assert wrong_to_right > 1.03
    assert with_prompt > 0.6


def test_weak_facts_are_a_fixed_share_and_err_in_one_way():
    cell = Cell("x", "mod7", "prompts", (1, 1), weak=0.3, weak_slip=0.9, slip=0.0)
    wrong, seen, answers = Counter(), Counter(), {}
    rng = random.Random(2)
    for entry in FAMILIES["mod7"].entries(5, 4000, (1, 1)):
        fact = f"{entry['letters']}{entry['first']}"
        text = demonstration(cell, entry, rng)
        seen[fact] += 1
        wrong[fact] += not score(cell, text, entry)
        answers.setdefault(fact, set()).add(text.rpartition("=")[2])
    assert {len(a) for fact, a in answers.items() if wrong[fact]} == {2}  # the right one and the habit
    assert {len(a) for fact, a in answers.items() if not wrong[fact]} == {1}
    shares = {fact: wrong[fact] / seen[fact] for fact in seen}
    assert {round(share) for share in shares.values()} == {0, 1}
    assert 0.1 < np.mean([share > 0.5 for share in shares.values()]) < 0.5


# --- a run ----------------------------------------------------------------------------------------------------------


def small_run(tmp_path, rule="balanced", seed=0, cell="negatives", settings=SMALL):
    row = train.run(CELLS[cell], rule, 1e-3, seed, settings, tmp_path)
    return without_times(row)


def without_times(row):
    return {name: value for name, value in row.items() if not name.endswith("_s")}


def test_the_same_run_gives_the_same_row_and_another_seed_or_rule_another(tmp_path):
    settings = replace(SMALL, steps=4, prompts=8, group=8)
    cell = replace(CELLS["negatives"], weak=0.0, slip=0.0, wrong=0.0, warm_steps=60)
    torch.manual_seed(1)
    first = train.run(cell, "token", 1e-2, 0, settings, tmp_path)
    torch.manual_seed(2)  # no global state matters
    again = train.run(cell, "token", 1e-2, 0, settings, tmp_path)
    assert without_times(first) == without_times(again)
    assert train.run(cell, "token", 1e-2, 1, settings, tmp_path)["curves"] != first["curves"]
    assert train.run(cell, "sequence", 1e-2, 0, settings, tmp_path)["curves"] != first["curves"]


def test_a_row_is_small_and_has_a_value_for_every_evaluation_and_stretch(tmp_path):
    row = small_run(tmp_path, settings=replace(SMALL, steps=13, evaluations=13, probes=4))
    assert len(json.dumps(row)) < 2500
    assert {len(row["curves"][name]) for name in ("accuracy", "length", "cut", "entropy")} == {13}
    assert {len(row["curves"][name]) for name in ("reward", "drift", "negative_share", "length_+", "length_-")} == {12}
    assert len(row["curves"]["cosine"]) == 4
    assert row["auc"] == pytest.approx(np.mean(row["curves"]["accuracy"]), abs=1e-4)


def test_rules_of_one_seed_see_the_same_start_prompts_and_noise(tmp_path):
    rows = [small_run(tmp_path, rule) for rule in ("balanced", "sequence", "pooled-4")]
    assert len({(row["curves"]["accuracy"][0], row["curves"]["length"][0]) for row in rows}) == 1
    assert len({row["curves"]["entropy"][0] for row in rows}) == 1


def test_seeds_take_the_warm_starts_in_turn(tmp_path):
    cell = replace(CELLS["prompts"], warm_starts=2)
    a, b, c = (train.warm_start(cell, seed, SMALL, tmp_path).head.weight for seed in (0, 1, 2))
    assert torch.equal(a, c)
    assert not torch.equal(a, b)


def test_a_response_that_was_cut_scores_nothing(small_model):
    cell = CELLS["negatives"]
    entry = {"first": 1, "letters": "a", "answer": "3"}
    text = torch.tensor([encode("A3=3\n"), encode("A3=3.")])
    text[1, 4] = encode("3")[0]
    full = train.Rollout(text, torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 5), 0.0)
    full.response_BT[1] = torch.tensor(encode("..A=3"))
    assert train.score_rollout(cell, [entry, entry], full).tolist() == [1.0, 0.0]


# --- the bookkeeping ------------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A stage of four quick runs in a folder of its own."""
    screening = tmp_path / "screening.toml"
    screening.write_text(
        """
[quick]
cells = ["n"]
rules = ["balanced", "token"]
lr = 1e-3
seeds = [0, 1]
[quick.settings]
steps = 1
prompts = 2
group = 2
evaluations = 2
evaluation_prompts = 4
probes = 1
pool = 10
[cells.n]
family = "mod7"
relation = "negatives"
steps = [2, 2]
weak = 0.2
warm_steps = 2
"""
    )
    monkeypatch.setattr(runner, "SCREENING", screening)
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "CACHE", tmp_path / "cache")
    (tmp_path / "results").mkdir()
    return tmp_path


class SameProcess:
    """An executor without processes, so that tests can count and break runs."""

    def __init__(self, *args):
        self._processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def shutdown(self, **_):
        pass

    def submit(self, function, *args):
        from concurrent.futures import Future

        future = Future()
        future.set_result(function(*args))
        return future


def test_finished_runs_are_not_run_again_and_failed_ones_are(study, monkeypatch):
    ran = []

    def fake(cell, rule, lr, seed, settings, cache):
        ran.append((rule, seed))
        if broken and (rule, seed) == ("group-mean-token-mean", 1):
            raise ZeroDivisionError("no seed one")
        return {"auc": 0.5}

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", SameProcess)
    monkeypatch.setattr(runner, "run", fake)
    broken = True
    with pytest.raises(
        jobs.StudyError,
        match=r"1 of 4 runs failed(.|\n)*n group-mean-token-mean lr 0.001 seed 1: ZeroDivisionError: no s",
    ):
        runner.run_stage("quick")
    assert len(ran) == 4
    rows = jobs.read_rows(runner.results_path("quick"))
    assert [row.get("error", "")[:17] for row in rows].count("ZeroDivisionError") == 1
    ran.clear()
    broken = False
    assert len(runner.run_stage("quick")) == 4
    assert ran == [("group-mean-token-mean", 1)]
    ran.clear()
    assert len(runner.run_stage("quick")) == 4
    assert ran == []
    text = runner.SCREENING.read_text().replace("weak = 0.2", "weak = 0.3")  # another setting is another run
    runner.SCREENING.write_text(text)
    runner.run_stage("quick")
    assert len(ran) == 4


@pytest.mark.slow
def test_two_processes_write_the_rows_that_one_call_gives(study):
    rows = {jobs.key_of(row): row for row in runner.run_stage("quick")}
    assert len(rows) == 4
    job = runner.plan("quick")[3]
    alone = train.run(job.cell, job.rule, job.lr, job.seed, job.settings, study / "elsewhere")
    for name in ("auc", "curves"):
        assert rows[job.key][name] == alone[name]
    assert len(jobs.read_rows(runner.results_path("quick"))) == 4


def test_a_damaged_line_is_named(study):
    path = runner.results_path("quick")
    path.write_text('{"stage": "quick"}\n{"stage": "qui')
    with pytest.raises(jobs.StudyError, match=r"quick.jsonl:2: not a row"):
        jobs.read_rows(path)


def test_a_rule_or_cell_that_does_not_exist_is_named(study):
    text = runner.SCREENING.read_text()
    runner.SCREENING.write_text(text.replace('"token"', '"tokens"'))
    with pytest.raises(jobs.StudyError, match="no rule tokens"):
        runner.plan("quick")
    runner.SCREENING.write_text(text.replace('cells = ["n"]', 'cells = ["m"]'))
    with pytest.raises(jobs.StudyError, match="no cell m"):
        runner.plan("quick")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with a committed protocol."""
    protocol = tmp_path / "studies/miniature/protocol.toml"
    protocol.parent.mkdir(parents=True)
    protocol.write_text("[confirmation]\n")
    protocol.with_suffix(".md").write_text("prose\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "GUARDED", (protocol, protocol.with_suffix(".md")))
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return protocol


def git_commit(folder: Path) -> None:
    name = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *name, "commit", "-qam", "protocol"], cwd=folder, check=True)


def test_the_confirmation_is_refused_unless_its_protocol_is_committed_and_unchanged(repository, tmp_path):
    with pytest.raises(jobs.StudyError, match="commit before the confirmation"):
        runner.guard([])
    git_commit(tmp_path)
    digest = runner.guard([])
    assert runner.guard([{"protocol": digest}]) == digest
    with pytest.raises(jobs.StudyError, match="rows of another protocol, 0123"):
        runner.guard([{"protocol": digest}, {"protocol": "0123"}])
    prose = repository.with_suffix(".md")
    prose.write_text("other prose\n")
    with pytest.raises(jobs.StudyError, match=r"commit before the confirmation(.|\n)*protocol.md"):
        runner.guard([])
    git_commit(tmp_path)
    assert runner.guard([]) != digest
    subprocess.run(["git", "rm", "-q", "--cached", str(prose)], cwd=tmp_path, check=True)
    git_commit(tmp_path)
    with pytest.raises(jobs.StudyError, match=r"ls-files(.|\n)*protocol.md"):
        runner.guard([])


def test_the_protocols_plan_has_at_most_six_arms_at_least_twenty_new_seeds_and_an_unseen_task():
    jobs, screening = runner.plan("confirmation"), runner.plan("screening")
    assert len({job.rule for job in jobs}) <= 6
    per_cell = Counter((job.cell.name, job.rule) for job in jobs)
    assert set(per_cell.values()) == {len({job.seed for job in jobs})}
    assert min(per_cell.values()) >= 20
    assert not {job.seed for job in jobs} & {job.seed for job in screening}
    assert {job.cell.family for job in jobs} - {job.cell.family for job in screening}
    assert {"pooled-4", "balanced", "group-mean-token-mean", "seq-mean-token-mean"} <= {job.rule for job in jobs}
    for claim in runner.read_toml(runner.PROTOCOL)["claims"]:
        assert {in_full(claim["a"]), in_full(claim["b"])} <= {job.rule for job in jobs}
        assert set(claim["cells"]) <= {job.cell.name for job in jobs}
    assert len({job.key for job in jobs}) == len(jobs)


# --- the statistics -------------------------------------------------------------------------------------------------


def rows_of(effect: dict[str, float], seeds=20, cells=("a", "b"), spread=0.02, paired=0.05):
    rng = np.random.default_rng(5)
    rows = []
    for cell in cells:
        for seed in range(seeds):
            common = rng.normal(0.6, paired)
            for rule, value in effect.items():
                rows.append(
                    {
                        "cell": cell,
                        "rule": rule,
                        "lr": 1e-3,
                        "seed": seed,
                        "auc": common + value + rng.normal(0, spread),
                    }
                )
    return rows


def test_a_planted_difference_is_found_and_none_is_not():
    rows = rows_of({"x": 0.03, "y": 0.0, "z": 0.0})
    scores = outcome.Scores(rows, "auc", 1e-3)
    found = outcome.family(scores, [("x", "y", "all", ("a", "b")), ("y", "z", "all", ("a", "b")), ("y", "x", "a", "a")])
    assert [c.verdict for c in found] == ["held", "undecided", "failed"]
    assert found[0].difference.low < 0.03 < found[0].difference.high
    assert found[0].difference.value == pytest.approx(
        np.mean([r["auc"] for r in rows if r["rule"] == "x"]) - np.mean([r["auc"] for r in rows if r["rule"] == "y"])
    )
    assert found[0].p <= found[0].adjusted < 0.01
    # the spread between seeds, .05, is taken out by pairing
    assert found[0].difference.high - found[0].difference.low < 0.03


def test_intervals_and_tests_err_as_often_as_they_say():
    rng = np.random.default_rng(1)
    low = wrong = 0
    for _ in range(300):
        scores = rng.normal(0, 1, (20, 2, 2))
        estimate = outcome.Bootstrap(300, 0).estimates(
            scores, lambda s: (s[..., 0] - s[..., 1]).mean((-2, -1))[..., None]
        )[0]
        wrong += not estimate.low <= 0 <= estimate.high
        low += outcome.p_value(scores) < 0.05 if _ < 100 else 0
    assert 0.02 < wrong / 300 < 0.11
    assert low / 100 < 0.12


def test_holm_on_a_worked_example_and_against_its_definition():
    assert outcome.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert outcome.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.random(6) ** 3
        adjusted = outcome.holm(p.tolist())
        for level in (0.01, 0.05, 0.2):  # Holm's step-down procedure itself
            rejected = set()
            for i, j in enumerate(np.argsort(p)):
                if p[j] > level / (len(p) - i):
                    break
                rejected.add(int(j))
            assert rejected == {j for j in range(6) if adjusted[j] <= level}


def test_within_a_margin_of_the_best_is_judged_by_the_interval():
    rows = rows_of({"x": -0.001, "s": 0.0, "t": -0.1}, cells=("a",), spread=0.002)
    best = outcome.against_the_best(outcome.Scores(rows, "auc", 1e-3).array(["a"], ("x", "s", "t")))
    assert outcome.within(best, 0.005) == "held"
    assert outcome.within(best, 0.0) in ("failed", "undecided")
    rows = rows_of({"x": -0.05, "s": 0.0, "t": -0.1}, cells=("a",), spread=0.002)
    best = outcome.against_the_best(outcome.Scores(rows, "auc", 1e-3).array(["a"], ("x", "s", "t")))
    assert outcome.within(best, 0.005) == "failed"
    assert outcome.within(outcome.Estimate(-0.001, -0.02, 0.01), 0.005) == "undecided"
    assert outcome.within(outcome.Estimate(-0.009, -0.02, 0.01), 0.005) == "undecided"


def test_a_difference_needs_its_interval_and_its_corrected_p():
    def verdict(low, high, adjusted):
        estimate = outcome.Estimate((low + high) / 2, low, high)
        return outcome.Comparison("a", "b", "all", 20, estimate, 0.001, adjusted).verdict

    assert verdict(0.01, 0.03, 0.04) == "held"
    assert verdict(0.01, 0.03, 0.06) == "undecided"
    assert verdict(-0.01, 0.03, 0.04) == "undecided"
    assert verdict(-0.03, -0.01, 0.04) == "failed"
    assert verdict(-0.03, -0.01, 0.06) == "undecided"


def test_only_seeds_that_every_rule_has_are_paired():
    rows = [row for row in rows_of({"x": 0.0, "y": 0.0}) if (row["rule"], row["seed"]) != ("y", 3)]
    rows.append({"cell": "a", "rule": "y", "lr": 1e-3, "seed": 3, "error": "ValueError"})
    assert outcome.Scores(rows, "auc", 1e-3).array(["a"], ("x", "y")).shape == (19, 1, 2)
    assert outcome.Scores(rows, "auc", 1e-2).array(["a"], ("x", "y")).shape == (0, 1, 2)


def test_the_limit_of_a_response_holds_every_careful_demonstration():
    for cell in CELLS.values():
        rng = random.Random(0)
        long = [len(demonstration(cell, e, rng)) for e in FAMILIES[cell.family].entries(1, 500, cell.steps)]
        assert np.mean(np.array(long) >= LIMIT) < 0.05


# --- the report -----------------------------------------------------------------------------------------------------


def test_a_verdict_of_several_needs_all_and_fails_with_one():
    from studies import report

    assert report._all(["held", "held"], 2) == "held"
    assert report._all(["held"], 2) == "undecided"
    assert report._all(["held", "undecided"], 2) == "undecided"
    assert report._all(["held", "failed", "undecided"], 3) == "failed"
    assert report._all([], 0) == "undecided"


def test_a_push_is_judged_at_every_k_by_two_standard_errors():
    from studies.report import judge_pushes

    def pushes(*values, error=0.0):
        return {k: SimpleNamespace(value=v, error=error) for k, v in zip((1, 4, 7), values, strict=True)}

    balanced = pushes(-0.2, 0.0, 0.2)
    assert judge_pushes(pushes(-0.018, 0.5, 0.01), balanced) == ("held", "0.09, k = 1")  # k = 4 asks for nothing
    assert judge_pushes(pushes(-0.01, 0.0, 0.03), balanced) == ("failed", "0.15, k = 7")
    assert judge_pushes(pushes(-0.01, 0.0, 0.021, error=0.001), balanced)[0] == "undecided"
    assert judge_pushes(pushes(-0.01, 0.0, 0.019, error=0.001), balanced)[0] == "undecided"
    assert judge_pushes(pushes(-0.01, 0.0, 0.018, error=0.0009), balanced)[0] == "held"


def test_the_docs_table_and_differences_are_those_of_the_committed_runs():
    from studies import report

    rows = list(jobs.finished(jobs.read_rows(runner.HERE.parent / "results" / "miniature-confirmation.jsonl")).values())
    document = runner.read_toml(runner.HERE / "protocol.toml")
    table = document["confirmation"]
    assert len(rows) == len(table["cells"]) * len(table["rules"]) * len(table["seeds"])

    def mean(rule, measure):
        return np.mean([report._values(rows, cell, rule, table["lr"], measure).mean() for cell in table["cells"]])

    text = (runner.ROOT / "docs" / "which-aggregation.md").read_text()
    lines = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    arms = ("balanced", "token", "sequence")
    for title, form, measure in (
        ("area under the accuracy, mean of four tasks", ".3f", "auc"),
        ("last length [characters]", ".1f", "length"),
    ):
        numbers = " | ".join(f"{mean(in_full(rule), measure):{form}}".removeprefix("0") for rule in arms)
        assert lines[f"| {title}"] == f"| {title} | {numbers} |"
    assert (
        f"{mean('group-mean-token-mean', 'drift'):.3f}".removeprefix("0") in lines["| loss at ratio 1, away from 0 by"]
    )
    assert max(mean(rule, "drift") for rule in ("balanced", "seq-mean-token-mean")) < 1e-4
    for a, b, said in (
        ("pooled-4", "balanced", "+.0025 [.0000, .0051]"),
        ("group-mean-token-mean", "balanced", ".0037 [.0011, .0066]"),
    ):
        array = outcome.Scores(rows, "auc", table["lr"]).array(table["cells"], (a, b))
        found = outcome.difference(array)
        numbers = [float(number) for number in re.findall(r"[.\d]+", said)]
        assert numbers == pytest.approx([found.value, found.low, found.high], abs=5.5e-5)  # as printed, to four digits
        assert said in text


def test_the_screening_chooses_by_its_rule():
    from studies import report

    table = {"cells": ["a", "b"], "lr": 1e-3, "sweep": {"rules": ["x", "y"], "lr": [1e-2]}}

    def rows(**effect):
        pooled = {"pooled-1": 0.0, "pooled-4": 0.0, "pooled-16": 0.0, "pooled-auto": 0.0, "x": 0.0, "y": 0.0}
        found = rows_of({**pooled, **{k.replace("_", "-"): v for k, v in effect.items()}}, seeds=4, spread=0.0)
        other = [row | {"lr": 1e-2, "auc": row["auc"] + 0.01} for row in found if row["rule"] in ("x", "y")]
        return found + other

    assert report.choice(rows(pooled_16=0.001), table) == (1e-2, "pooled-4")
    assert report.choice(rows(pooled_16=0.003), table) == (1e-2, "pooled-16")
    assert report.choice([row for row in rows() if row["lr"] == 1e-3], table) is None


@pytest.mark.filterwarnings(
    "ignore:Precision loss occurred in moment calculation"
)  # seeds of known rows differ by nothing
def test_the_report_of_known_rows_says_what_they_carry_and_nothing_without_them(study, monkeypatch):
    from studies import report

    monkeypatch.setattr(runner, "SCREENING", runner.HERE / "screening.toml")
    monkeypatch.setattr(outcome, "BOOTSTRAP", outcome.Bootstrap(300, 0))
    monkeypatch.setattr(outcome, "PERMUTATIONS", 499)
    page, tables, figures = report.build()
    assert tables.count("Not run.") >= 2
    assert "The confirmation was not run: nothing is claimed." in page
    assert not figures

    rng = np.random.default_rng(0)
    table = runner.read_toml(runner.PROTOCOL)["confirmation"]
    worse = next(rule for rule in table["rules"] if rule not in (table["candidate"], *table["against"]))
    effect = {"pooled-4": 0.04, "group-mean-token-mean": -0.05, worse: -0.03}
    for job in runner.plan("confirmation"):
        auc = 0.6 + effect.get(job.rule, 0.0) + rng.normal(0, 0.01)
        curves = {name: [0.1 * i for i in range(13)] for name in ("accuracy", "length", "cut", "entropy")}
        curves |= {name: [0.1] * 12 for name in ("reward", "drift", "negative_share", "length_+")}
        curves |= {"length_-": [3.0, None], "cosine": [0.1, None]}
        curves["drift"] = [rng.normal(0.3 if job.rule == "group-mean-token-mean" else 0.1, 0.01)]
        curves["length"][-1] = rng.normal(10 if job.rule == "group-mean-token-mean" else 9, 0.1)
        numbers = {"auc": auc, "last": auc, "drop": 0.0, "curves": curves, "wall_s": 1.0}
        jobs.append_row(runner.results_path("confirmation"), job.row(protocol="other", commit="abc") | numbers, study)
    page, tables, figures = report.build()
    assert "**The protocol was changed after these runs" in tables
    held, rest = page.split("Held:")[1].split("Failed:")
    failed, undecided = rest.split("Undecided by these runs:")
    assert "group-mean-token-mean's loss drifts further from 0 than balanced's: +0." in held
    assert (
        "balanced ends with longer responses than group-mean-token-mean where lengths vary, as its push foretells: -"
        in failed
    )
    assert (
        "group-mean-token-mean falls further behind its best evaluation than balanced: +0.0000 [+0.0000, +0.0000]"
        in undecided
    )
    for other in ("balanced", "group-mean-token-mean", "seq-mean-token-mean"):
        assert f"pooled-4 is better than {other} over all cells: +0.0" in held
    assert (
        "pooled-4 is within 0.005 of the better of group-mean-token-mean and seq-mean-token-mean in every cell" in held
    )
    assert f"{worse} is within 0.005" in failed
    assert f"{worse} reaches the goal" in failed
    assert f"{worse}'s push in the null model" in held + failed + undecided
    assert len(figures) == 2
    trade = tables.split("## What trades against what")[1]
    row = next(line for line in trade.splitlines() if line.startswith("| pooled-4 |"))
    assert "| 0.25, k = 3 |" in row
    assert row.count("+0.04") == 1  # no screening here
    assert "| balanced | 1 |" in trade
    lines = runner.results_path("confirmation").read_text().splitlines(keepends=True)
    runner.results_path("confirmation").write_text("".join(lines[1:]))
    assert "**Incomplete:" in report.build()[1]
