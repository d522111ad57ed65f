"""The demo's parts, without training: task, scoring, summary, and what its configs differ in."""

import math
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes import plan
from recipes.demo import chain_sum, prepare, summary
from recipes.manifest import flatten
from verl_ba.tools.analysis.modes import ARM_MODES

ROOT = Path(__file__).parents[2]
PATHS = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
ARMS = tuple(ARM_MODES)


def entries(size=30):
    return chain_sum.questions(0, size, **prepare.Settings().task)


def test_careful_demonstrations_are_right_and_rambling_ones_are_longer_and_wrong():
    rng = random.Random(0)
    lengths = {0: [], 1: []}
    for entry in entries():
        for rambling in (0, 1):
            text = chain_sum.demonstration(entry, rng, rambling=rambling)
            assert chain_sum.compute_score("", text, entry["answer"]) == 1 - rambling, text
            assert text.startswith(chain_sum.OPENING) == bool(rambling)
            lengths[rambling].append(len(text))
    assert sum(lengths[1]) > sum(lengths[0])


@pytest.mark.parametrize(
    ("response", "extra", "score"),
    [
        ("7+2=9\n<answer>9</answer>", None, 1.0),
        ("<answer>8</answer> no, <answer>9</answer>", None, 1.0),
        ("<answer>-9</answer>", None, 0.0),
        ("it is 9", None, 0.0),
        ("it is 9", {"answer_format": "number"}, 1.0),
        ("1,009 is wrong", {"answer_format": "number"}, 0.0),
        ("no number", {"answer_format": "number"}, 0.0),
        ("", None, 0.0),
    ],
)
def test_scores(response, extra, score):
    assert chain_sum.compute_score("reasoning_gym/chain_sum", response, "9", extra) == score


def test_a_model_path_without_a_model_is_one_clear_error(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"MODEL=.*expected a folder with a Hugging Face chat model.*no such folder"
    ):
        prepare.prepare(tmp_path, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config.json is missing there"):
        prepare.prepare(tmp_path, tmp_path)
    command = [sys.executable, "-m", "recipes.demo.run", "--arms", "ballanced"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "unknown arm ballanced" in result.stderr


def test_two_calls_at_the_same_time_make_the_data_once(tmp_path, monkeypatch):
    """Two workers of a clean clone's tests, or two demos, start together: neither deletes what the other one reads."""
    made = []

    def write(path, *_):
        made.append(path.name)
        time.sleep(0.1)
        path.touch()

    monkeypatch.setattr(prepare, "write_parquet", write)
    (tmp_path / "config.json").touch()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: prepare.prepare(tmp_path / "cache", tmp_path), range(2))
    assert first == second
    assert all(path.exists() for path in first.values())
    assert made == ["train.parquet", "validation.parquet"]


def test_prepared_questions_have_verls_columns(tmp_path):
    import datasets

    path = tmp_path / "train.parquet"
    prepare.write_parquet(path, 1, 5, prepare.Settings().task, " Please.", "number")
    row = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path))[0]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["prompt"][0]["content"].endswith(" Please.")
    assert row["reward_model"]["ground_truth"].lstrip("-").isdigit()


def test_the_tokenizer_round_trips_and_keeps_digits_apart():
    texts = [f"user\n{e['question']}\nassistant\n{e['answer']}" for e in entries(200)]
    tokenizer = prepare.make_tokenizer(texts, 400)
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    assert len(tokenizer.encode("123")) == 3
    assert len(tokenizer.encode("\n")) == 1  # transformers rebuilds Qwen's tokenizer around this
    ids = prepare.chat(tokenizer, "hello")
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_summary_of_a_run(tmp_path):
    lengths = {"balance/length/positive": 2.0, "balance/length/negative": 4.0}
    steps = [{"critic/score/mean": s, "actor/pg_loss": -1e-3, "timing_s/step": 2.0, **lengths} for s in (0.2, 0.4, 0.9)]
    steps[0].pop("balance/length/negative")  # a step in which no response has this sign
    runs = {"token": steps, "balanced": steps}
    table = summary.table(runs)
    assert table.rows[0] == ("token", "group-mean-token-mean", "0.500", "0.500", "1.0e-03", "2.0", "4.0", "2.00")
    assert table.markdown().count("\n") == 6
    summary.draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_step_without_mixed_groups_has_no_length():
    assert math.isnan(summary.mean_of([]))
    assert summary.mean_of([1.0, math.nan, 3.0]) == 2.0


def compose(config, arm):
    return OmegaConf.to_container(plan.compose(config, [f"arm={arm}", *PATHS]), resolve=True)


@pytest.mark.parametrize("config", ["demo", "demo_chat"])
def test_arms_differ_in_one_key_and_in_their_names(config):
    base = flatten(compose(config, "balanced"), "")
    for arm in ARMS[1:]:
        other = flatten(compose(config, arm), "")
        differs = {key for key in base.keys() | other.keys() if base.get(key) != other.get(key)}
        named = {k for k in differs if "balanced-seed1" in str(base[k]) or k == ".arm_name"}
        # the critic inherits the mode by interpolation; it is not used under GRPO
        assert differs - named == {".actor_rollout_ref.actor.loss_agg_mode", ".critic.loss_agg_mode"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "balenced"], "Arms: balanced sequence token verl-token"),
        (["nothing", "balanced"], "Recipes: demo"),
        ([], "bash recipes/launch.sh RECIPE ARM"),
        (["demo", "balanced", *PATHS, "data.train_files=no.parquet"], "data.train_files=no.parquet: no such file from"),
        (
            ["demo", "token", *PATHS, "actor_rollout_ref.model.path=./no"],
            "actor_rollout_ref.model.path=./no: no such folder",
        ),
        (["demo", "token", "data.train_files=a", "actor_rollout_ref.model.path=m"], "data.val_files"),
    ],
)
def test_the_launcher_names_what_it_does_not_know(arguments, message):
    result = subprocess.run(
        ["bash", str(ROOT / "recipes" / "launch.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert result.returncode == 2
    assert message in result.stdout + result.stderr


def test_an_interpreter_without_verl_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    launcher = str(ROOT / "recipes" / "launch.sh")
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": ""}
    result = subprocess.run(["bash", launcher, "demo", "token"], capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert f"no verl in {python}" in result.stderr
