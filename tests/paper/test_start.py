"""How a run starts: what is tried first, who may have its folder, and what a path, a manifest or a disk may do to it."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recipes import manifest, start
from recipes.cpu_site import prefork
from recipes.demo import prepare
from verl_ba.tools import preflight
from verl_ba.tools.preflight import Needs

ROOT = Path(__file__).parents[2]
STAND_IN = '''
"""In place of verl's trainer: writes down what it was given, with Hydra itself, and stays if it is told to."""
import json, os, time
import hydra
from omegaconf import OmegaConf

@hydra.main(version_base=None)
def main(config):
    given = config.ray_kwargs.ray_init.runtime_env.env_vars
    with open(os.environ["GIVEN"], "w") as file:
        json.dump({"run_dir": config.run_dir, "process": os.getpid(), **given}, file)
    time.sleep(float(os.environ.get("STAYS", 0)))
main()
'''


@pytest.fixture
def run(tmp_path):
    """Everything that a run of the demo's recipe needs, but for the trainer; starts it, and gives process and answer."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    for name in ("train", "validation"):
        prepare.write_parquet(tmp_path / f"{name}.parquet", 1, 4, prepare.Settings().task, "", "number")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    paths = [f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/validation.parquet"]
    started = []

    def begin(results: Path, *overrides: str, **environment: str) -> subprocess.Popen:
        command = ["bash", str(ROOT / "recipes" / "launch.sh"), "demo", "balanced", *paths]
        variables = {**os.environ, "PYTHON": sys.executable, "RESULTS_DIR": str(results), "VERL_TRAINER": "stand_in"}
        variables |= {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}", prefork.ALSO: "stand_in"}
        process = subprocess.Popen(
            [*command, f"actor_rollout_ref.model.path={model}", *overrides],
            env=variables | {"GIVEN": str(tmp_path / "given"), **environment},
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with process:  # closes its pipe
            process.kill()


def given(tmp_path) -> dict:
    end = time.monotonic() + 60
    while not (tmp_path / "given").exists() or not (text := (tmp_path / "given").read_text()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return json.loads(text)


@pytest.mark.slow
def test_one_process_at_a_time_trains_into_a_folder_and_a_dead_one_leaves_it_free(run, tmp_path):
    first = run(tmp_path / "results", STAYS="60")
    owner = given(tmp_path)
    second = run(tmp_path / "results")
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "this run is going on: process" in output
    assert f"on {os.uname().nodename}" in output
    assert len(manifest_of(tmp_path)["starts"]) == 1
    assert json.loads((tmp_path / "results/demo/balanced-seed1" / start.LOCK).read_text())["process"] > 0
    os.kill(owner["process"], signal.SIGKILL)  # of what took the launcher's place
    first.communicate(timeout=60)
    third = run(tmp_path / "results")
    output, _ = third.communicate(timeout=60)
    assert third.returncode == 0, output
    assert len(manifest_of(tmp_path)["starts"]) == 2


def manifest_of(tmp_path) -> dict:
    return json.loads((tmp_path / "results/demo/balanced-seed1/manifest.json").read_text())


NAMES = ("with spaces", "it's", "a $HOME of", "Größe", 'q"uote', "back\\slash", "{a: b}, [c]", "x\\'y", "ends in \\\\")


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_a_value_of_any_characters_comes_through_hydra(name):
    (override,) = OverridesParser.create().parse_overrides([f"++x={start.quoted(name)}"])
    assert OmegaConf.create({"x": override.value()}).x == name


@pytest.mark.slow
def test_a_folder_of_any_name_works(run, tmp_path):
    results = tmp_path / " and ".join(NAMES)
    process = run(results)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    folder = f"{results}/demo/balanced-seed1"
    assert given(tmp_path)["run_dir"] == folder
    assert given(tmp_path)["VERL_FILE_LOGGER_PATH"] == f"{folder}/metrics/1.jsonl"
    assert (Path(folder) / "manifest.json").exists()


def test_a_name_that_hydra_would_read_is_refused_before_anything_is_written(run, tmp_path):
    process = run(tmp_path / "${run_name}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "a path may not hold '${'" in output
    assert not (tmp_path / "given").exists()
    assert not list(tmp_path.glob("$*"))


@pytest.mark.slow
def test_help_is_printed_wherever_it_is_asked_for():
    for script, *arguments in (("launch.sh", "--help"), ("qwen3_1.7b_polaris.sh", "balanced", "--help")):
        result = subprocess.run(["bash", str(ROOT / "recipes" / script), *arguments], capture_output=True, text=True)
        assert result.returncode == 0
        assert "--cluster NAME" in result.stdout
        assert "Arms: balanced" in result.stdout
    version = subprocess.run([sys.executable, "-m", "verl_ba", "--version"], capture_output=True, text=True)
    assert version.stdout.startswith("verl_ba ")


# ---- the manifest


def config_in(folder: Path):
    return OmegaConf.create({"run_dir": str(folder), "data": {"train_files": "none", "val_files": []}})


@pytest.mark.parametrize("text", ["", "[]", '{"starts": 3}', '{"starts": [1]}', '{"starts": [{"config": {}}]}', "\x00"])
def test_a_manifest_that_is_none_is_one_clear_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(
        manifest.BadManifest, match=r"manifest\.json: expected \{\"starts\": \[…\]\}.*Move the file away"
    ):
        manifest.starts(config_in(tmp_path))
    assert (tmp_path / "manifest.json").read_text() == text


@pytest.mark.slow
def test_the_launcher_says_so_in_one_line(run, tmp_path):
    folder = tmp_path / "results/demo/balanced-seed1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("[]")
    process = run(tmp_path / "results")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in output
    assert "error: " in output
    assert 'manifest.json: expected {"starts"' in output
    assert not (tmp_path / "given").exists()


def test_a_full_disk_leaves_the_manifest_as_it_was(tmp_path, monkeypatch):
    config = config_in(tmp_path)
    manifest.write(config, "demo", [])
    before = (tmp_path / "manifest.json").read_text()
    write = Path.write_text

    def full(path, text, *arguments, **options):
        write(path, text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(manifest.BadManifest, match=r"cannot be written \(No space left on device\)"):
        manifest.write(config, "demo", [])
    assert (tmp_path / "manifest.json").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "metrics"]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(start.CannotStart, match=r"running\.json: Not a directory. Choose another RESULTS_DIR"):
        start.lock(tmp_path / "file" / "run")


# ---- what is tried first


def data_file(folder: Path, columns=("prompt", "data_source", "reward_model"), truth="ground_truth") -> str:
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "math500", "reward_model": {truth: "1"}}
    pq.write_table(pa.Table.from_pylist([{name: row[name] for name in columns}]), path := folder / "d.parquet")
    return str(path)


def model_folder(folder: Path, **files: str) -> str:
    model = folder / "m"
    model.mkdir()
    for name, text in {
        "config.json": '{"model_type": "x"}',
        "a.safetensors": "",
        "tokenizer.json": "",
        **files,
    }.items():
        if text is not None:
            (model / name).write_text(text)
    return str(model)


COLUMNS = ("prompt", "data_source", "reward_model")


def faults(needs: Needs) -> list[str]:
    return [f"{tried.what}: {tried.fault}" for tried in preflight.check(needs) if tried.fault]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: {"files": (data_file(f),)}, None),
        (lambda f: {"files": (str(f / "none.parquet"),)}, "no such file"),
        (lambda f: {"files": (data_file(f, ("prompt", "reward_model")),)}, "expected the columns prompt, data_source"),
        (lambda f: {"files": (data_file(f, truth="answer"),)}, "expected reward_model to have a field ground_truth"),
        (
            lambda f: {"files": (str((f / "x.parquet").write_text("no") and f / "x.parquet"),)},
            "cannot be read as Parquet",
        ),
        (lambda f: {"model": model_folder(f)}, None),
        (lambda f: {"model": str(f / "none")}, "no such folder"),
        (
            lambda f: {"model": model_folder(f, **{"config.json": "{"})},
            "expected a Hugging Face model with config.json",
        ),
        (lambda f: {"model": model_folder(f, **{"config.json": "[]"})}, "names no model_type"),
        (lambda f: {"model": model_folder(f, **{"a.safetensors": None})}, "expected weights"),
        (lambda f: {"model": model_folder(f, **{"tokenizer.json": None})}, "expected a tokenizer"),
        (
            lambda f: {
                "model": model_folder(f, **{"model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}'})
            },
            "1 of 1 files of weights are missing: b.safetensors",
        ),
        (lambda f: {"folder": str(f / "new" / "run"), "checkpoint": 1e3}, None),
        (lambda f: {"folder": str(f / "new" / "run"), "checkpoint": 1e18}, "one checkpoint takes 1000000000 GB"),
        (lambda f: {"flash_attention": True}, "No module named 'flash_attn'"),
        (lambda f: {"scoring": ("math500", "livecodebench")}, None),
    ],
)
def test_what_a_run_needs_is_tried(tmp_path, make, message):
    found = faults(Needs(columns=COLUMNS, **make(tmp_path)))
    assert [message in fault for fault in found] == ([True] if message else []), found


def test_an_engine_that_would_train_wrong_is_a_fault_of_the_configuration(tmp_path):
    from recipes import plan

    wrong = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    config = plan.compose("demo", ["arm=balanced", "cluster=cpu", wrong, "data.train_files=[]", "data.val_files=[]"])
    found = faults(dataclasses.replace(Needs.of(config), model=None))
    assert [wrong in fault for fault in found] == [True], found


def test_a_small_shared_memory_is_named_with_dockers_option(monkeypatch):
    usage = preflight.shutil.disk_usage("/")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage._replace(total=64_000_000))
    (fault,) = faults(Needs(gpus=8))
    assert "--shm-size=10g" in fault
    assert faults(Needs(gpus=1)) == []


def test_a_scorer_that_scores_wrongly_is_a_fault(monkeypatch):
    from verl_ba.paper import scoring

    monkeypatch.setattr(scoring, "compute_score", lambda source, response, truth: 1.0)
    found = faults(Needs(scoring=("aime24", "livecodebench")))
    assert len(found) == 2
    assert "expected the score 0.0, got 1.0" in found[0]


def test_needs_are_those_of_the_configuration(tmp_path):
    from recipes import plan

    file = data_file(tmp_path)
    overrides = [f"data.train_files={file}", f"data.val_files=[{file}]", "actor_rollout_ref.model.path='~/m'"]
    needs = Needs.of(plan.compose("qwen3_1.7b_polaris", ["arm=balanced", *overrides]), checkpoint=5.0)
    assert needs == Needs(
        scoring=("math500",),
        flash_attention=True,
        gpus=8,
        files=(file, file),
        columns=COLUMNS,
        model=str(Path.home() / "m"),
        folder=needs.folder,
        checkpoint=5.0,
    )
    sdpa = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    other = [
        sdpa,
        "reward.custom_reward_function.path=mine.py",
        "trainer.save_freq=-1",
        "actor_rollout_ref.model.path=Q/m",
    ]
    needs = Needs.of(plan.compose("qwen3_1.7b_polaris", ["arm=balanced", *overrides[:2], *other]), checkpoint=5.0)
    assert (needs.scoring, needs.flash_attention, needs.model, needs.folder, needs.checkpoint) == (
        (),
        False,
        None,
        None,
        0,
    )
