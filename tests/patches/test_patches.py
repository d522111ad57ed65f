"""The patches of patches/: what they say of themselves, applying them, and 0.9.1 patched offline from the installed verl.

`make patches-check` does the rest: every release, 1,000 updates to the bit, verl's own tests.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl

from patches import patches
from verl_ba import hooks, releases
from verl_ba.tools import doctor

ROOT = Path(__file__).resolve().parents[2]

INSTALLED = Path(verl.__file__).parent
RELEASE = "0.9.1"


def copy_of_verl(folder: Path) -> Path:
    shutil.copytree(INSTALLED, folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def command(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "patches.patches", *map(str, arguments)], text=True, capture_output=True
    )


@pytest.fixture
def tree(tmp_path) -> Path:
    """Only the files that the patch changes, and the version."""
    for name in [*patches.changed_files(RELEASE), "verl/version/version"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED.parent / name, tmp_path / name)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_patch_says_what_it_is_and_exports_to_the_byte(tree):
    assert all((patches.HERE / f"verl-{release}.patch").exists() for release in releases.BY_VERSION)
    assert patches.faults_of(RELEASE, tree) == []


def test_a_header_that_lies_is_a_fault(tree, monkeypatch, tmp_path):
    path = tmp_path / f"verl-{RELEASE}.patch"
    text = patches.patch_of(RELEASE).read_text()
    text = text.replace(patches.checksum(RELEASE), "sha256:0").replace("Drop-When:", "Drop:")
    path.write_text(text.replace("index ", "index 0", 1))
    monkeypatch.setattr(patches, "HERE", tmp_path)
    few = dataclasses.replace(releases.BY_VERSION[RELEASE], changed_lines=10)
    monkeypatch.setitem(releases.BY_VERSION, RELEASE, few)
    faults = "\n".join(patches.faults_of(RELEASE, tree))
    assert f"verl-{RELEASE}.patch: no Drop-When in the header" in faults
    assert f"Applies-To must name verl {RELEASE} and its wheel's sha256:" in faults
    assert f"verl-{RELEASE}.patch: an export of it differs" in faults
    assert re.search(r"\d+ changed lines, at most 10", faults)


@pytest.mark.parametrize("release", patches.RELEASES)
def test_changed_lines_stay_within_the_limit_and_are_those_of_git(release, tmp_path):
    counts = [0, 0]
    for line in patches.git(tmp_path, "apply", "--numstat", str(patches.patch_of(release))).stdout.splitlines():
        added, removed, name = line.split("\t")
        assert name.startswith("verl/")
        counts = [counts[0] + int(added), counts[1] + int(removed)]
    assert tuple(counts) == patches.changed_lines(release)
    assert sum(counts) <= releases.BY_VERSION[release].changed_lines


@pytest.mark.parametrize("release", patches.RELEASES)
def test_added_lines_keep_verls_length_and_every_file_is_one_that_verl_has(release):
    added = re.findall(r"(?m)^\+(?!\+\+ b/)(.*)$", patches.body(release))
    assert max(len(line) for line in added) <= 120
    assert "--- /dev/null" not in patches.body(release)  # new files are copied


def test_the_file_in_a_patched_verl_is_the_plugins_byte_for_byte(tree):
    assert command("apply", tree).returncode == 0
    assert (tree / "verl/trainer/ppo/loss_agg.py").read_bytes() == (ROOT / "verl_ba/loss_agg.py").read_bytes()
    assert not (tree / "verl/trainer/ppo/loss_agg.py").is_symlink()


def test_applying_twice_says_so_and_changes_nothing(tree):
    result = command("apply", tree / "verl")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"verl {RELEASE}: applied verl-{RELEASE}.patch, verl/trainer/ppo/loss_agg.py" in result.stdout
    before = content(tree)
    assert not (tree / "tests").exists()  # an installed package gets the source only
    result = command("apply", tree)
    assert result.returncode == 0
    assert "has the patch already" in result.stdout
    assert content(tree) == before


def test_a_checkout_gets_tests_and_docs_and_what_is_missing_is_completed(tree):
    assert patches.apply_to(tree, RELEASE, checkout=False) == [f"verl-{RELEASE}.patch", "verl/trainer/ppo/loss_agg.py"]
    (tree / "tests").mkdir()
    (tree / "docs").mkdir()
    (tree / "verl/trainer/ppo/loss_agg.py").unlink()
    new = "docs/algo/loss_agg.md, tests/trainer/ppo/test_loss_agg_on_cpu.py, verl/trainer/ppo/loss_agg.py"
    assert f"verl {RELEASE}: applied {new}\n" in command("apply", tree).stdout
    for name in new.split(", "):
        assert (tree / name).read_bytes() == (patches.NEW / name).read_bytes()


def test_a_hunk_that_does_not_fit_is_named_with_release_and_remedy_and_nothing_is_changed(tree):
    path = tree / "verl" / "workers" / "config" / "actor.py"
    path.write_text(path.read_text().replace("if self.loss_agg_mode not in", "if self.loss_agg_mode.lower() not in"))
    before = content(tree)
    result = command("apply", tree / "verl")
    assert result.returncode == 1
    for said in (
        f"verl {RELEASE}: verl-{RELEASE}.patch does not apply to verl/workers/config/actor.py, line ",
        '-            raise ValueError(f"Invalid loss_agg_mode: {self.loss_agg_mode}")',  # the hunk
        f"pip install --force-reinstall --no-deps verl=={RELEASE}",
        "Nothing was changed",
    ):
        assert said in result.stdout, result.stdout
    assert content(tree) == before


def test_another_file_in_the_place_of_loss_agg_is_refused_and_nothing_is_changed(tree):
    (tree / "verl/trainer/ppo/loss_agg.py").write_text("# verl's own, one day\n")
    before = content(tree)
    result = command("apply", tree / "verl")
    assert result.returncode == 1
    assert "verl/trainer/ppo/loss_agg.py is there already, and differs from patches/new/" in result.stdout
    assert "Nothing was changed" in result.stdout
    assert content(tree) == before


def test_another_release_and_another_folder_are_named(tree, tmp_path_factory):
    (tree / "verl" / "version" / "version").write_text("0.6.1\n")
    assert "verl 0.6.1 has no patches; there are some for 0.7.1, 0.8.0, 0.9.0, 0.9.1" in command("apply", tree).stdout
    assert "expected verl's package directory" in command("apply", tmp_path_factory.mktemp("empty")).stdout


def test_a_later_version_takes_the_newest_patch_and_is_told_to_run_its_tests(tree):
    (tree / "verl" / "version" / "version").write_text("0.10.0.dev\n")
    result = command("apply", tree)
    assert result.returncode == 0, result.stdout
    assert f"verl 0.10.0.dev: applied verl-{RELEASE}.patch" in result.stdout
    assert "is none of the tested releases" in result.stdout


def test_a_refresh_writes_the_patch_of_a_release_that_has_none_yet(tree, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("patches")
    shutil.copy(patches.patch_of(RELEASE), folder)
    new = releases.Release("0.9.2", wheel="0" * 64)
    monkeypatch.setattr(patches, "HERE", folder)
    monkeypatch.setattr(releases, "RELEASES", (*releases.RELEASES, new))
    monkeypatch.setitem(releases.BY_VERSION, new.version, new)
    monkeypatch.setattr(patches, "pristine", lambda release: tree)
    text = patches.exported(tree, new.version, fuzz=True)
    assert text == patches.body(RELEASE)
    monkeypatch.setattr(patches, "RELEASES", [new.version, RELEASE])
    patches.refresh()
    assert sorted(path.name for path in folder.iterdir()) == [f"verl-{RELEASE}.patch", "verl-0.9.2.patch"]
    header = (folder / "verl-0.9.2.patch").read_text().partition("\n---\n")[0]
    assert f"verl 0.9.2, its wheel verl-0.9.2-py3-none-any.whl sha256:{new.wheel}" in header


def test_a_refresh_from_a_tree_takes_its_last_commit_without_the_new_files(tree, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("patches")
    shutil.copy(patches.patch_of(RELEASE), folder)
    patches.git(tree, "init", "-q")
    patches.commit(tree)
    patches.apply_to(tree, RELEASE, checkout=True)
    path = tree / "verl/workers/utils/losses.py"
    path.write_text(path.read_text() + "# a line more\n")
    patches.commit(tree)
    before = patches.changed_lines(RELEASE)
    monkeypatch.setattr(patches, "HERE", folder)
    patches.refresh(tree=tree)
    assert patches.changed_lines(RELEASE) == (before[0] + 1, before[1])
    assert not set(patches.changed_files(RELEASE)) & set(patches.new_files())
    assert patches.checksum(RELEASE) in patches.patch_of(RELEASE).read_text()


def test_the_plugin_sees_a_patched_tree_and_hooks_nothing_in_it(tree, monkeypatch):
    spec = SimpleNamespace(origin=str(tree / "verl" / "__init__.py"))
    monkeypatch.setattr(releases.importlib.util, "find_spec", lambda name: spec)
    assert hooks.seams()
    patches.apply_to(tree, RELEASE, checkout=False)
    assert releases.is_patched()
    assert hooks.seams() == []
    report = doctor.examine()
    assert not report.faults
    assert "stands aside" in report.seams[0][2]


def test_the_text_for_verl_names_the_newest_patchs_lines():
    assert f"and {sum(patches.changed_lines(RELEASE))} changed lines that call it" in patches.HERE.joinpath(
        "UPSTREAM.md"
    ).read_text().replace("\n", " ")


def test_the_readmes_table_is_the_scripts():
    assert "\n".join(patches.table_rows()) in (patches.HERE / "README.md").read_text()


BROKEN = {
    "twice the data-parallel factor": (
        "verl/trainer/ppo/core_algos.py",
        "pool_mean_length, global_batch_size, dp_size\n",
        "pool_mean_length, global_batch_size, dp_size * dp_size\n",
    ),
    "the lengths of another mode": (
        "verl/workers/engine_workers.py",
        "compute_pool_mean_length(self.config.actor.loss_agg_mode, data, dp_group)",
        'compute_pool_mean_length("group-mean-token-mean", data, dp_group)',
    ),
}
"""Call sites that are wrong: the file, what stands there, and what is put there."""


@pytest.mark.slow
def test_patched_and_hooked_verl_are_equal_to_the_bit_and_a_broken_patch_is_seen(tmp_path):
    from tests.patches import test_patched_verl

    hooked = test_patched_verl.updates(tmp_path / "hooked", str(INSTALLED.parent), True, "20")
    tree = copy_of_verl(tmp_path)
    patches.apply_to(tree, RELEASE, checkout=False)
    patched = test_patched_verl.updates(tmp_path / "patched", str(tree), False, "20")
    assert test_patched_verl.different(patched, hooked) == []
    for fault, (name, old, new) in BROKEN.items():
        path, right = tree / name, (tree / name).read_text()
        assert right.count(old) == 1, fault
        path.write_text(right.replace(old, new))
        broken = test_patched_verl.updates(tmp_path / fault, str(tree), False, "20")
        assert test_patched_verl.different(broken, hooked), fault
        path.write_text(right)


@pytest.mark.trainer
def test_the_real_trainer_in_a_patched_verl_is_zero_on_policy_without_the_plugin(prepared, tmp_path):
    from tests.support.trainer_run import launch, pg_losses

    tree, seen = copy_of_verl(tmp_path / "site"), tmp_path / "seen"
    seen.mkdir()
    assert command("apply", tree / "verl").returncode == 0
    result, steps = launch(
        prepared,
        tmp_path,
        "balanced",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        PYTHONPATH=os.pathsep.join(map(str, (tree, ROOT))),
        VERL_USE_EXTERNAL_PLUGINS="verl_cpu",
        VERL_USE_EXTERNAL_MODULES="tests.support.which_verl",
        WHICH_VERL=str(seen),
    )
    assert max(pg_losses(result, steps)) <= 1e-6
    assert "attached:" not in result.stdout  # the plugin would say what is
    imported = [path.read_text() for path in seen.iterdir()]
    assert len(imported) >= 4  # the driver, the trainer's process, two ranks, …
    assert set(imported) == {str(tree / "verl" / "__init__.py")}
