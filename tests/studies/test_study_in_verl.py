"""The loop's model, tokens and rewards in verl's terms, and how the two kinds of run are compared."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes import runs
from studies import in_verl
from studies.miniature import runner, train
from studies.miniature.model import CHARACTERS, END, Model, Shape, encode, sample
from studies.miniature.reward import compute_score
from studies.miniature.tasks import FAMILIES, LIMIT, demonstration
from studies.rules import RULES


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Model(LIMIT + 6, Shape(width=64, layers=2, heads=2, head_bias=False))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or a part that is left out goes unseen
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.head.weight.mul_(4)
    return model.double()


def test_the_checkpoint_is_the_same_function_with_the_same_gradients(model):
    other = in_verl.as_opt(model).double()
    ids = torch.randint(len(CHARACTERS) - 10, (5, 30))  # not the padding, whose embedding gets no gradient there
    mine, theirs = model.head(model.hidden(ids)), other(ids).logits
    torch.testing.assert_close(theirs, mine, rtol=1e-10, atol=1e-10)
    mine.cos().sum().backward()
    theirs.cos().sum().backward()
    torch.testing.assert_close(other.lm_head.weight.grad, model.head.weight.grad, rtol=1e-8, atol=1e-8)
    own = torch.cat([block.qkv.weight.grad for block in model.blocks])
    parts = [getattr(layer.self_attn, f"{n}_proj") for layer in other.model.decoder.layers for n in "qkv"]
    torch.testing.assert_close(torch.cat([part.weight.grad for part in parts]), own, rtol=1e-8, atol=1e-8)


def test_an_output_bias_is_refused():
    with pytest.raises(ValueError, match="without bias"):
        in_verl.as_opt(Model(10))


def test_the_tokenizer_that_transformers_loads_has_the_models_characters(tmp_path):
    from transformers import AutoTokenizer

    in_verl.tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(random.Random(0).choices(CHARACTERS.replace("\n", "").replace(in_verl.PAD_CHARACTER, ""), k=300))
    assert loaded.encode(text, add_special_tokens=False) == encode(text)
    assert loaded.decode([*encode(text), END], skip_special_tokens=True) == text
    assert (len(loaded), loaded.eos_token_id) == (len(CHARACTERS), END)
    prompt = [{"role": "user", "content": "  abc "}]
    ids = loaded.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == encode("  abc ")


def test_the_reward_is_the_loops(model):
    for cell in runner.cells(runner.read_toml(runner.PROTOCOL)["cells"]).values():
        family, rng = FAMILIES[cell.family], random.Random(1)
        entries = family.entries(1, 40, cell.steps)
        texts = [demonstration(cell, entry, rng)[: LIMIT - 1] for entry in entries]
        rewards = [compute_score(cell.family, t, json.dumps(e)) for t, e in zip(texts, entries, strict=True)]
        assert {0.0, 1.0} == set(rewards)
        assert rewards == [float(family.score(t, e)) for t, e in zip(texts, entries, strict=True)]
        right = texts[rewards.index(1.0)]
        cut = "." * (LIMIT - len(right)) + right
        assert compute_score(cell.family, cut, json.dumps(entries[rewards.index(1.0)])) == 0.0
    # a response that the loop calls cut is one of LIMIT characters
    sampled = sample(model.float(), torch.zeros(8, 4, dtype=torch.long), torch.rand(8, LIMIT))
    for text, cut in zip(sampled.texts(), sampled.cut_B.tolist(), strict=True):
        assert cut == (len(text) >= LIMIT)


def test_the_plan_can_be_run_in_verl():
    table, cells, settings = in_verl.specification()
    assert set(cells) <= set(runner.read_toml(runner.PROTOCOL)["confirmation"]["cells"])
    assert len(cells) == 2
    assert len(table["seeds"]) >= 3
    assert all(RULES[rule].mode for rule in table["rules"])
    assert settings.shape.width // settings.shape.heads >= 32
    assert not set(table["seeds"]) & set(runner.read_toml(runner.PROTOCOL)["confirmation"]["seeds"])
    jobs = in_verl.planned(table, cells, settings)
    assert len({job.key for job in jobs}) == len(jobs)


def test_a_loop_run_has_a_value_for_every_tenth(tmp_path):
    _, cells, settings = in_verl.specification()
    cell = replace(next(iter(cells.values())), warm_steps=3)
    small = replace(settings, steps=10, prompts=2, group=4, evaluation_prompts=2, pool=20)
    threads = torch.get_num_threads()
    row = in_verl.run_in_loop(cell, "group-mean-token-mean", 200, 1e-3, small, tmp_path)
    torch.set_num_threads(threads)
    assert set(row) == set(in_verl.MEASURES)
    assert {len(values) for values in row.values()} == {10}
    assert train.setup_digest(cell, small) != train.setup_digest(cell, settings)


def test_tenths_are_means_of_the_steps_that_have_a_value():
    assert in_verl.tenths([*range(20)]) == [0.5 + 2 * i for i in range(10)]
    assert in_verl.tenths([None, 4.0] * 10) == [4.0] * 10
    assert in_verl.tenths([None] * 20) == [None] * 10


def rows_of(differences):
    """(where, cell, rule, seed) -> row, where token's reward is above balanced's by the given amounts."""
    rows = {}
    for where, values in differences.items():
        for seed, value in enumerate(values):
            for rule, reward in (("balanced", 0.3 + seed), ("group-mean-token-mean", 0.3 + seed + value)):
                rows[where, "c", rule, seed, 1e-3, "setup"] = {name: [reward] * 10 for name in in_verl.MEASURES}
    return rows


def test_agreement_is_paired_and_widens_with_the_spread():
    rows = rows_of({"loop": [0.1, 0.11, 0.09, 0.1], "verl": [0.1, 0.12, 0.08]})
    loop, verl = (in_verl.values(rows, w, "c", "group-mean-token-mean", "balanced", "reward") for w in ("loop", "verl"))
    np.testing.assert_allclose((loop.mean(), verl.mean()), 0.1)
    gap = in_verl.agreement(loop, verl)
    assert gap.low < 0 < gap.high < 0.1
    apart = in_verl.agreement(loop, verl - 0.3)
    assert apart.high < 0
    assert apart.value == pytest.approx(-0.3)


def test_the_table_counts_signs_and_agreements(tmp_path, monkeypatch):
    table, cells, settings = in_verl.specification()
    first, *_, last = table["rules"]

    def write(offset):
        path = tmp_path / "rows.jsonl"
        path.unlink(missing_ok=True)
        for job in in_verl.planned(table, cells, settings):
            where, cell, rule, seed, *_ = job.key
            up = (rule == first) * (1.0 if where == "loop" else offset) + 0.01 * random.Random(
                f"{where}{cell}{rule}{seed}"
            ).random()
            row = job.row() | {name: [up] * 10 for name in in_verl.MEASURES}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        monkeypatch.setattr(in_verl, "RESULTS", path)
        return " ".join(in_verl.table_markdown().split())

    agree, differ = write(1.0), write(-1.0)
    assert f"| {first} − {last} |" in agree
    clear = 2 * len(in_verl.SUMMARIES)  # the first rule's, in two cells
    counts = []
    for text in (agree, differ):
        found = re.search(
            r"contains zero in (\d+) of (\d+) rows.* Of the (\d+) differences .*, (\d+) ha(?:ve|s) the same sign", text
        )
        assert found, text
        counts.append([int(n) for n in found.groups()])
    assert [c[2:] for c in counts] == [[clear, clear], [clear, 0]]
    assert counts[0][0] >= 0.8 * counts[0][1]
    assert counts[1][0] <= counts[0][0] - 1.6 * clear  # the first rule's levels, and the differences


def test_without_runs_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(in_verl, "RESULTS", tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError):
        in_verl.table_markdown()


def test_a_whole_run_is_read_again_and_one_that_was_cut_is_an_error_with_the_logs_end(tmp_path, monkeypatch):
    _, cells, settings = in_verl.specification()
    cell, folder = next(iter(cells.values())), tmp_path / "cell" / "token-200"
    started = []

    def launcher(steps):
        def call(command, log, environment, *_):
            started.append(command)
            log.write_text("the log's end\n")
            metrics = Path(next(part for part in command if part.startswith("run_dir=")).partition("=")[2]) / "metrics"
            metrics.mkdir()
            lines = [{"step": 0, "data": {"val": 1}}]
            lines += [{"step": i + 1, "data": {"actor/pg_loss": 0.0, "n": i}} for i in range(steps)]
            (metrics / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            return 1 if steps < settings.steps else 0

        monkeypatch.setattr(runs, "call", call)

    def train_once(lr=1e-3):
        return in_verl.train_in_verl(cell, "group-mean-token-mean", 200, lr, settings, folder)

    launcher(settings.steps - 1)
    with pytest.raises(
        runs.RunFailed, match=rf"{settings.steps - 1} of {settings.steps} steps, exit status 1(.|\n)*the log's end"
    ):
        train_once()
    launcher(settings.steps)
    assert [step["n"] for step in train_once()] == list(range(settings.steps))
    assert len(started) == 2
    train_once()
    assert len(started) == 2  # read again
    train_once(lr=2e-3)
    assert len(started) == 3
    assert started[0][1:3] == ["demo", "group-mean-token-mean"]
