"""Every recipe × arm × cluster × sharding: composed, given to verl's config classes, and compared with each other."""

import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from recipes import manifest, plan, runs
from verl_ba.tools.analysis.modes import ALIASES, in_full, short
from verl_ba.tools.analysis.modes import ARM_MODES as ARMS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "config"
MODELS, DATASETS = ("qwen2.5_math_7b", "qwen3_1.7b"), ("dapo17k", "polaris")
RECIPES = [f"{model}_{dataset}" for model, dataset in itertools.product(MODELS, DATASETS)]
OTHERS = {
    "qwen2.5_math_7b_dapo17k_verl": "8x8x80gb",
    "qwen2.5_0.5b_gsm8k": "1x1x24gb",
    "qwen2.5_math_1.5b_math": "1x1x80gb",
}
"""The recipes that are not the paper's, with the cluster that each names."""
CLUSTERS = ("1x8x80gb", "2x8x80gb", "4x8x80gb", "1x4x80gb", "1x1x141gb")
SMALL = ("1x4x80gb", "1x1x141gb")  # for the 1.7B model


@pytest.fixture(scope="module")
def composed():
    """Config of each combination, resolved, composed once."""
    configs = {}

    def get(recipe, arm="balanced", cluster="1x8x80gb", sharding="fsdp", *overrides):
        key = (recipe, arm, cluster, sharding, *overrides)
        if key not in configs:
            chosen = [f"arm={arm}", f"cluster={cluster}", f"sharding={sharding}", *overrides]
            configs[key] = plan.compose(recipe, chosen)
        return configs[key]

    return get


def leaves(config):
    return manifest.flatten(OmegaConf.to_container(config, resolve=True), "")


def differing(one, other):
    one, other = leaves(one), leaves(other)
    return {key.lstrip(".") for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


NAMES = {"arm_name", "run_dir", "trainer.experiment_name", "trainer.default_local_dir", "trainer.rollout_data_dir"}
NAMES |= {"trainer.validation_data_dir", "actor_rollout_ref.rollout.trace.experiment_name"}


@pytest.mark.parametrize("recipe", [*RECIPES, *OTHERS])
def test_arms_differ_in_one_key(composed, recipe):
    modes, cluster = {}, OTHERS.get(recipe, "1x8x80gb")
    for arm in ARMS:
        modes[arm] = composed(recipe, arm, cluster).actor_rollout_ref.actor.loss_agg_mode
        different = differing(composed(recipe, "balanced", cluster), composed(recipe, arm, cluster)) - NAMES
        # the critic's key follows by interpolation, and GRPO has no critic
        assert different <= {"actor_rollout_ref.actor.loss_agg_mode", "critic.loss_agg_mode"}
    assert modes == ARMS


def test_the_arms_are_the_table_of_short_names():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (CONFIG / "arm").glob("*.yaml")}
    assert {arm: file["actor_rollout_ref"]["actor"]["loss_agg_mode"] for arm, file in files.items()} == ARMS
    assert {in_full(arm) for arm in ARMS} == set(ARMS.values())
    assert set(ALIASES.values()) <= set(ARMS.values())


@pytest.mark.parametrize("mode", ARMS.values())
def test_an_arm_may_be_named_by_its_mode(composed, mode, tmp_path):
    assert composed(RECIPES[0], mode) == composed(RECIPES[0], short(mode))
    assert str(runs.run_folder(RECIPES[0], mode, ["seed=3"], tmp_path)).endswith(f"/{short(mode)}-seed3")


LINE = '{{"step": {}, "data": {{"actor/pg_loss": {}, "x": 1}}}}\n'


def test_a_run_gives_its_training_steps_with_all_starts_merged(tmp_path):
    run = runs.Run(tmp_path)
    assert run.steps() == []
    (tmp_path / "metrics").mkdir()
    validation = '{"step": 0, "data": {"val-core/a": 0.5}}\n'
    (tmp_path / "metrics" / "1.jsonl").write_text(validation + LINE.format(1, 1.0) + LINE.format(2, 2.0))
    second, cut = tmp_path / "metrics" / "2.jsonl", LINE.format(4, 4)[:20]
    second.write_text(LINE.format(2, 3.0) + LINE.format(3, "null") + cut + "\n")
    with pytest.raises(runs.runs.RunError, match=r"2.jsonl:3: expected a line"):
        run.steps()
    second.write_text(LINE.format(2, 3.0) + LINE.format(3, "null") + cut)  # the run may be writing it now
    # step 3: a number that is not finite is not read, and nothing else of it is the actor's
    assert [step["actor/pg_loss"] for step in run.steps()] == [1.0, 3.0]
    assert run.logged()[0] == {"val-core/a": 0.5}
    for written in ("", "{", cut):  # a start that has just begun
        (tmp_path / "metrics" / "3.jsonl").write_text(written)
        assert len(run.steps()) == 2


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo the end; exit 3", r"exit status 3(.|\n)*the end"),
        ("echo only two", r"2 of 3 steps(.|\n)*only two"),
        ("sleep 60", "stopped after its time"),
    ],
)
def test_a_run_that_fails_says_so_with_the_end_of_its_log(tmp_path, monkeypatch, script, message):
    (tmp_path / "launch.sh").write_text(f"""
mkdir -p "$RESULTS_DIR/x/metrics"
printf '%s\\n' '{LINE.format(1, 0).strip()}' '{LINE.format(2, 0).strip()}' >"$RESULTS_DIR/x/metrics/1.jsonl"
{script}
""")
    monkeypatch.setattr(runs, "HERE", tmp_path)
    arguments = [f"run_dir={tmp_path / 'x'}"]
    with pytest.raises(runs.RunFailed, match=message):
        runs.launch("demo", "token", arguments, results=tmp_path, log=tmp_path / "log", steps=3, timeout=3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_clusters_and_shardings_change_no_mathematics(composed, recipe):
    base = composed(recipe)
    for cluster in CLUSTERS:
        expected = {"trainer.nnodes", "trainer.n_gpus_per_node", "gpu.memory_gb", "gpu.tb_per_s"}
        different = {key for key in differing(base, composed(recipe, cluster=cluster)) if "n_gpus_per_node" not in key}
        assert different <= expected
    different = differing(base, composed(recipe, sharding="fsdp2"))
    assert different
    assert all(key.rpartition(".")[2] == "strategy" for key in different)


def test_recipes_of_one_model_differ_in_data_and_batch_only(composed):
    for model in MODELS:
        different = differing(composed(f"{model}_dapo17k"), composed(f"{model}_polaris"))
        named = {
            key for key in different if key in NAMES or key in ("run_name", "dataset_name", "trainer.project_name")
        }
        named |= {key for key in different if key.endswith("project_name")}
        batch = ("data.train_batch_size", "ppo_mini_batch_size", "rollout.n", "rollout_n", "total_training_steps")
        rest = different - named - {"data.train_files", "reward.reward_kwargs.overlong_buffer_cfg.enable"}
        assert all(key.endswith(batch) for key in rest), rest


def check_combination(config, sharding) -> None:
    """By verl's dataclasses, its own check of the whole config, and ours."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.loss_agg_mode == config.actor_rollout_ref.actor.loss_agg_mode
    assert actor.strategy == sharding
    for part in (config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(part)
    assert not need_critic(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
    assert plan.problems(config, files=False) == []
    assert plan.memory_problems(config) == []


def clusters_of(recipe):
    if recipe in OTHERS:
        return [OTHERS[recipe]]
    return CLUSTERS if recipe.startswith("qwen3") else [c for c in CLUSTERS if c not in SMALL]


@pytest.mark.parametrize("recipe", [*RECIPES, *OTHERS])
@pytest.mark.slow
def test_verl_accepts_every_arm_every_cluster_and_every_sharding(composed, recipe):
    """Arms differ in one key and clusters change no mathematics (above), so one of each at a time is enough here."""
    first, *rest = clusters_of(recipe)
    for arm in ARMS:
        check_combination(composed(recipe, arm, first), "fsdp")
    for cluster in rest:
        check_combination(composed(recipe, "balanced", cluster), "fsdp")
    check_combination(composed(recipe, "balanced", first, "fsdp2"), "fsdp2")


@pytest.mark.parametrize("recipe", [*RECIPES, *OTHERS])
@pytest.mark.slow
@pytest.mark.deep
def test_verl_accepts_every_combination(composed, recipe):
    for arm, cluster in itertools.product(ARMS, clusters_of(recipe)):
        for sharding in ("fsdp", "fsdp2"):
            check_combination(composed(recipe, arm, cluster, sharding), sharding)


def test_the_reward_is_this_packages_and_verl_can_load_it(composed):
    from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

    config = composed(RECIPES[0])
    scorer = get_custom_reward_fn(config)
    assert scorer is not None
    score = scorer(
        data_source="math500", solution_str=r"so \boxed{\frac12}", ground_truth=r"\frac{1}{2}", extra_info={}
    )
    assert score["score"] == 1.0
    assert resolve_reward_manager_cls(config).__name__ == "DAPORewardManager"


PROMPT, LIMIT = 8, 8192
GROUP = {"right short": (4, 500, True), "right long": (4, LIMIT, True), "wrong short": (8, 500, False)}
"""How many responses of a group of 16, their length [tokens], and whether they are right."""


def advantages(config, right: float, wrong: float) -> dict[str, float]:
    """The advantage of each kind of response, by verl's own DAPO reward manager and verl's own GRPO."""
    import asyncio

    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    rows = [(length, right if good else wrong) for count, length, good in GROUP.values() for _ in range(count)]
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    reward = torch.zeros(len(rows), LIMIT)

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return ""

    for row, (length, score) in enumerate(rows):
        manager = resolve_reward_manager_cls(config)(config, Tokenizer(), lambda score=score, **_: score)
        mask = (torch.arange(PROMPT + LIMIT) < PROMPT + length).long()
        tensors = {"responses": torch.zeros(1, LIMIT, dtype=torch.long), "attention_mask": mask[None]}
        named = {"data_source": np.array(["x"]), "reward_model": np.array([{"ground_truth": "1"}])}
        result = loop.run_until_complete(manager.run_single(DataProto.from_dict(tensors, named)))
        reward[row, length - 1] = result["reward_score"]
    loop.close()
    valid = torch.stack([(torch.arange(LIMIT) < length).float() for length, _ in rows])
    advantage, _ = compute_grpo_outcome_advantage(reward, valid, np.array(["one prompt"] * len(rows)))
    ends = np.cumsum([count for count, _, _ in GROUP.values()]) - 1
    return {kind: round(float(advantage[end, 0]), 2) for kind, end in zip(GROUP, ends, strict=True)}


@pytest.mark.parametrize(
    ("recipe", "override", "scores", "expected"),
    [
        # DAPO's own scale, and ours, which must give the same: rewards of 1 and 0 are half as far apart as 1 and -1.
        ("qwen2.5_math_7b_dapo17k_verl", [], (1.0, -1.0), (1.46, 0.29, -0.88)),
        ("qwen2.5_math_7b_dapo17k", [], (1.0, 0.0), (1.46, 0.29, -0.88)),
        # DAPO's factor on rewards of 1 and 0: right answers of full length get the advantage of wrong ones.
        (
            "qwen2.5_math_7b_dapo17k",
            ["reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0"],
            (1.0, 0.0),
            (1.68, -0.56, -0.56),
        ),
        # Polaris has no penalty.
        ("qwen3_1.7b_polaris", [], (1.0, 0.0), (0.97, 0.97, -0.97)),
    ],
)
def test_the_overlong_penalty_leaves_right_answers_their_sign(composed, recipe, override, scores, expected):
    config = composed(recipe, "balanced", OTHERS.get(recipe, "1x8x80gb"), "fsdp", *override)
    assert tuple(advantages(config, *scores).values()) == expected


def test_verls_own_setting_differs_from_ours_in_the_keys_of_its_file_only(composed):
    """So that recipes/README.md and the file itself say all of it."""
    ours = composed("qwen2.5_math_7b_dapo17k", "verl-token", "8x8x80gb")
    verls = composed("qwen2.5_math_7b_dapo17k_verl", "verl-token", "8x8x80gb", "verl_dapo")
    files = [CONFIG / "qwen2.5_math_7b_dapo17k_verl.yaml", CONFIG / "sharding" / "verl_dapo.yaml"]
    contents = [yaml.safe_load(file.read_text()) for file in files]
    named = {name for content in contents for name in manifest.flatten({**content, "defaults": {}}, "")}
    derived = {key for key in differing(ours, verls) if str(leaves(verls).get("." + key, "")).find("-verl") >= 0}
    different = {f".{key}" for key in differing(ours, verls) - derived - NAMES}
    assert {key for key in different if not key.startswith(".data.val_files")} <= named
    assert verls.reward.custom_reward_function.path is None


def test_the_table_of_costs_is_printed_by_its_command():
    from recipes import costs

    assert costs.table() in (ROOT / "recipes" / "README.md").read_text()


def test_every_value_says_where_it_comes_from():
    """In the files that hold the paper's settings each value has 'paper' or 'ours' beside it, or above it."""
    structure = {"defaults", "run_name", "model_name", "dataset_name", "model_shape", "expected_response_length"}
    unmarked = []
    for file in [
        CONFIG / "paper.yaml",
        CONFIG / "one_gpu.yaml",
        *(CONFIG / "model").iterdir(),
        *(CONFIG / "dataset").iterdir(),
    ]:
        marked = None  # indentation of the mark that covers what follows
        for line in file.read_text().splitlines():
            indent, alone = len(line) - len(line.lstrip()), line.lstrip().startswith("#")
            if re.search(r"# (paper|ours)\b", line):
                # Beside a key it covers what is nested below that key; on its own line the next key as well.
                marked = indent - alone
            elif not alone and not (marked is not None and indent > marked):
                marked = None
                value = re.match(r" *([\w.]+): *([^ #$].*)", line)  # not what refers to another key
                if value and value[1] not in structure and "# no limit" not in line:
                    unmarked.append(f"{file.name}: {line.strip()}")
    assert unmarked == []


@pytest.mark.parametrize("recipe", ["qwen2.5_math_7b_dapo17k", "qwen3_1.7b_dapo17k", *OTHERS])
def test_parameters_are_those_of_the_real_architecture(composed, recipe):
    """The estimate's count, against transformers' own model built without memory."""
    import torch
    import transformers

    shape = composed(recipe, "balanced", OTHERS.get(recipe, "1x8x80gb")).model_shape
    family = "Qwen2" if "qwen2" in recipe else "Qwen3"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        real = getattr(transformers, f"{family}ForCausalLM")(config)
    assert plan.parameters(shape) == real.num_parameters()


def test_a_model_that_does_not_fit_is_said_to(composed):
    assert plan.memory_problems(composed("qwen2.5_math_7b_dapo17k", cluster="1x1x141gb"))
    kept = composed("qwen2.5_math_7b_dapo17k", "balanced", "1x8x80gb", "fsdp", *KEEP)
    assert any("offload it" in problem for problem in plan.memory_problems(kept))


KEEP = [f"actor_rollout_ref.actor.fsdp_config.{part}_offload=False" for part in ("param", "optimizer")]
KEEP += ["actor_rollout_ref.rollout.gpu_memory_utilization=0.9"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_response_length=40000", "expected at least data.max_prompt_length + max_response_length = 42048"),
        ("data.train_batch_size=500", "expected a multiple of actor_rollout_ref.actor.ppo_mini_batch_size=32"),
        ("actor_rollout_ref.rollout.n=3", None),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "does not divide trainer.n_gpus_per_node=8"),
        ("trainer.logger=[console,wandb]", "expected 'file' among them"),
        ("trainer.n_gpus_per_node=7", "do not divide over 7 data-parallel ranks"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "Give verl-token as the arm instead"),
        ("arm_name=token", "the run is named after the arm token, which is group-mean-token-mean"),
        ("actor_rollout_ref.actor.loss_agg_mode=blanced", "expected one of balanced, group-mean-token-mean"),
        ("arm_name=mine", None),
    ],
)
def test_a_config_that_would_fail_late_is_named_early(composed, override, message):
    found = plan.problems(composed(RECIPES[0], "balanced", "1x8x80gb", "fsdp", override), files=False)
    assert [message in problem for problem in found] == ([True] if message else [])


def launch(*arguments, **environment):
    import os

    return subprocess.run(
        ["bash", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shell_recipe_without_arguments_prints_its_usage(recipe):
    result = launch(f"recipes/{recipe}.sh")
    assert result.returncode == 2
    assert "ARM" in result.stdout
    assert "--dry-run" in result.stdout
    assert "--cluster NAME" in result.stdout


def test_a_dry_run_shows_arithmetic_and_command_and_writes_nothing(tmp_path):
    result = launch(
        "recipes/qwen3_1.7b_dapo17k.sh",
        "balanced",
        "--dry-run",
        "--cluster",
        "1x4x80gb",
        "seed=7",
        RESULTS_DIR=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "would stop: flash_attn can be imported: no." in result.stderr
    assert " arm=balanced " in result.stdout
    for text in ("512 prompts × 16 = 8,192", "loss_agg_mode=balanced", "P = 1.72e9", "of 80 in an update"):
        assert text in result.stderr
    assert "would stop: data.train_files=" in result.stderr
    assert "verl.trainer.main_ppo" in result.stdout
    assert "seed=7" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["balanced", "--cluster", "9x9"], "no cluster 9x9. Clusters: 1x1x141gb"),
        (["balanced", "--via", "pigeon"], "--via pigeon: expected here, slurm or ray"),
        (["balanced", "--dryrun"], "unknown option --dryrun"),
        (["balanced", "actor_rollout_ref.actor.los_agg_mode=x"], "los_agg_mode"),
        (["balanced"], "verl-ba data dapo17k"),
    ],
)
def test_a_bad_call_ends_before_anything_starts(tmp_path, arguments, message):
    result = launch("recipes/qwen3_1.7b_dapo17k.sh", *arguments, RESULTS_DIR=str(tmp_path), DATA_DIR=str(tmp_path))
    assert result.returncode == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_keeps_every_start_and_says_what_changed(composed, tmp_path, capsys):
    data = tmp_path / "d.parquet"
    data.write_bytes(b"rows")
    config = OmegaConf.create(OmegaConf.to_container(composed(RECIPES[0]), resolve=True))
    assert isinstance(config, DictConfig)
    config.run_dir, config.data.train_files, config.data.val_files = str(tmp_path / "run"), str(data), [str(data)]
    begun = manifest.write(config, RECIPES[0], ["arm=balanced"])
    path = manifest.manifest_path(config)
    assert manifest.metrics_file(config).name == "2.jsonl"
    assert "since the previous start" not in capsys.readouterr().err
    config.actor_rollout_ref.actor.optim.lr = 2e-6
    manifest.write(config, RECIPES[0], ["arm=balanced"])
    assert "config.actor_rollout_ref.actor.optim.lr was 1e-06, is 2e-06" in capsys.readouterr().err
    starts = json.loads(path.read_text())["starts"]
    assert len(starts) == 2
    assert starts[0]["started"] == begun
    assert starts[0]["data"] == {str(data): hashlib.sha256(b"rows").hexdigest()}
    assert re.fullmatch("[0-9a-f]{40}", starts[0]["git"]["revision"])
    assert starts[0]["versions"]["verl"] == "0.9.1"
    assert starts[0]["hardware"]["cores"] >= 1


# ---------------------------------------------------------------------------------------------------------- evaluation


def write_dump(path, scores, drop=0):
    """verl's validation dump for {benchmark: [[scores of one question]]}."""
    lines = [
        {"uid": f"{name}-{q}_{k}_0", "benchmark": name, "acc": score, "score": score}
        for name, questions in scores.items()
        for q, answers in enumerate(questions)
        for k, score in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[: len(lines) - drop]))


def test_scores_are_read_by_question_and_missing_ones_are_an_error(tmp_path):
    from recipes import evaluate

    dump = tmp_path / "0.jsonl"
    scores = {"aime24": [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], "minerva": [[1.0, 1.0]]}
    write_dump(dump, scores)
    read = evaluate.read_scores(dump, {"aime24": 2, "minerva": 1}, {"aime24": 3, "minerva": 2})
    assert {name: sorted(map(sorted, values.tolist())) for name, values in read.items()} == {
        name: sorted(map(sorted, values)) for name, values in scores.items()
    }
    write_dump(dump, scores, drop=1)
    with pytest.raises(evaluate.Incomplete, match=r"minerva: 1 of 1 questions, 1 of them without 2 responses"):
        evaluate.read_scores(dump, {"aime24": 2, "minerva": 1}, {"aime24": 3, "minerva": 2})
    with pytest.raises(evaluate.Incomplete, match=r"aime25: 0 of 30 questions"):
        evaluate.read_scores(dump, {"aime25": 30}, {"aime25": 32})


def test_standard_errors_are_those_of_the_sampling_they_name():
    """Against the spread of many simulated evaluations: new questions for one, the same questions for the other."""
    from recipes import evaluate

    rng = np.random.default_rng(0)
    questions, k, repeats = 60, 8, 3000
    one = rng.beta(0.5, 0.7, questions)
    same = np.array([evaluate.result((rng.random((questions, k)) < one[:, None]) * 1.0).mean for _ in range(repeats)])
    fresh = np.array(
        [(rng.random((questions, k)) < rng.beta(0.5, 0.7, questions)[:, None]).mean() for _ in range(repeats)]
    )
    results = [evaluate.result((rng.random((questions, k)) < one[:, None]) * 1.0) for _ in range(300)]
    assert np.mean([r.sampling_error for r in results]) == pytest.approx(same.std(), rel=0.05)
    drawn = [
        evaluate.result((rng.random((questions, k)) < rng.beta(0.5, 0.7, questions)[:, None]) * 1.0) for _ in range(300)
    ]
    assert np.mean([r.standard_error for r in drawn]) == pytest.approx(fresh.std(), rel=0.05)


def test_one_question_or_one_response_gives_no_error_bar():
    from recipes import evaluate

    single = evaluate.result(np.array([[1.0]]))
    assert single.mean == single.best == 1.0
    assert math.isnan(single.standard_error)
    assert math.isnan(single.sampling_error)


def test_what_is_no_checkpoint_is_named(tmp_path):
    result = launch("recipes/evaluate.sh", str(tmp_path / "nothing"), "--recipe", RECIPES[0], "--out", str(tmp_path))
    assert result.returncode == 2
    assert "no such folder" in result.stdout
    (tmp_path / "config.json").write_text("{}")
    result = launch("recipes/evaluate.sh", str(tmp_path))
    assert "the recipe is not known" in result.stdout


def test_the_table_of_evaluation_covers_the_benchmarks_of_training(composed):
    config = composed(RECIPES[0], "balanced", "1x8x80gb", "fsdp", "+evaluation=table", "run_dir=out")
    trained = composed(RECIPES[0])
    assert [Path(f).name for f in config.data.val_files] == [Path(f).name for f in trained.data.val_files]
    assert dict(config.evaluation.responses) == {Path(f).stem: 32 if "aime" in f else 4 for f in trained.data.val_files}
    assert yaml.safe_load((CONFIG / "evaluation" / "table.yaml").read_text())["trainer"]["val_only"] is True
