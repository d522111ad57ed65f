"""The patches of patches/: what they say of themselves, applying them, and 0.9.1 patched offline from the installed verl.

`make patches-check` does the rest: every release, 1,000 updates to the bit, verl's own tests.
"""

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
    """Only the files that the patches touch, and the version."""
    names = [*patches.files_of(patches.series(RELEASE)), "verl/version/version"]
    for name in names:
        source = INSTALLED.parent / name
        if source.exists() and name.startswith("verl/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tmp_path / name)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_patches_say_what_they_are_and_export_to_the_byte(tree):
    assert patches.RELEASES == ["0.7.1", "0.8.0", "0.9.0", "0.9.1"]
    assert patches.faults_of(RELEASE, tree) == []


def test_a_header_that_lies_is_a_fault(tree, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("patches")
    shutil.copytree(patches.HERE / RELEASE, folder / RELEASE)
    monkeypatch.setattr(patches, "HERE", folder)
    monkeypatch.setattr(patches, "CHANGED_LINES", {RELEASE: 10})
    path = folder / RELEASE / "0002-balanced.patch"
    text = path.read_text().replace(patches.checksum(RELEASE), "sha256:0").replace("Drop-When:", "Drop:")
    path.write_text(text.replace("index ", "index 0", 1))
    faults = "\n".join(patches.faults_of(RELEASE, tree))
    assert "0002-balanced.patch: no Drop-When in the header" in faults
    assert "Applies-To must name verl 0.9.1 and its wheel's sha256:" in faults
    assert "0002-balanced.patch: an export of it differs" in faults
    assert re.search(r"\d+ changed lines of source, at most 10", faults)


@pytest.mark.parametrize("release", patches.RELEASES)
def test_changed_lines_stay_within_the_limit_and_are_those_of_git(release, tmp_path):
    sources = [patch for patch in patches.series(release) if patches.is_source(patch)]
    assert len(sources) == 2
    counts = [0, 0]
    for patch in sources:
        for line in patches.git(tmp_path, "apply", "--numstat", str(patch)).stdout.splitlines():
            added, removed, name = line.split("\t")
            assert name.startswith("verl/")
            counts = [counts[0] + int(added), counts[1] + int(removed)]
    assert tuple(counts) == patches.changed_lines(release)
    assert sum(counts) <= (210 if release == "0.7.1" else 160)


@pytest.mark.parametrize("release", patches.RELEASES)
def test_added_lines_keep_verls_length_and_tests_and_docs_are_new_files(release):
    for patch in patches.series(release):
        added = re.findall(r"(?m)^\+(?!\+\+ b/)(.*)$", patches.body(patch))
        assert max(len(line) for line in added) <= 120 or patch.name.endswith("-docs.patch")
        if not patches.is_source(patch):
            assert patches.body(patch).count("diff --git") == patches.body(patch).count("--- /dev/null")


def test_applying_twice_says_so_and_changes_nothing(tree):
    result = command("apply", tree / "verl")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "verl 0.9.1: applied 0001-loss-agg-registry.patch, 0002-balanced.patch" in result.stdout
    before = content(tree)
    assert not (tree / "tests").exists()  # an installed package gets the source only
    result = command("apply", tree)
    assert result.returncode == 0
    assert "has the patches already" in result.stdout
    assert content(tree) == before


def test_a_checkout_gets_tests_and_docs_and_half_a_series_is_completed(tree):
    patches.apply_series(tree, RELEASE, patches.series(RELEASE)[:1])
    (tree / "tests").mkdir()
    (tree / "docs").mkdir()
    result = command("apply", tree)
    assert "applied 0001-loss-agg-registry-tests.patch, 0002-balanced.patch" in result.stdout
    assert (tree / "docs/algo/loss_agg.md").exists()


def test_a_hunk_that_does_not_fit_is_named_with_release_and_remedy_and_nothing_is_changed(tree):
    path = tree / "verl" / "workers" / "config" / "actor.py"
    path.write_text(path.read_text().replace("if self.loss_agg_mode not in", "if self.loss_agg_mode.lower() not in"))
    before = content(tree)
    result = command("apply", tree / "verl")
    assert result.returncode == 1
    for said in (
        "verl 0.9.1: 0001-loss-agg-registry.patch does not apply to verl/workers/config/actor.py, line ",
        '-            raise ValueError(f"Invalid loss_agg_mode: {self.loss_agg_mode}")',  # the hunk
        "pip install --force-reinstall --no-deps verl==0.9.1",
        "Nothing was changed",
    ):
        assert said in result.stdout, result.stdout
    assert content(tree) == before


def test_another_release_and_another_folder_are_named(tree, tmp_path_factory):
    (tree / "verl" / "version" / "version").write_text("0.6.1\n")
    assert "verl 0.6.1 has no patches; there are some for 0.7.1, 0.8.0, 0.9.0, 0.9.1" in command("apply", tree).stdout
    assert "expected verl's package directory" in command("apply", tmp_path_factory.mktemp("empty")).stdout


def test_the_plugin_sees_a_patched_tree_and_hooks_nothing_in_it(tree, monkeypatch):
    spec = SimpleNamespace(origin=str(tree / "verl" / "__init__.py"))
    monkeypatch.setattr(releases.importlib.util, "find_spec", lambda name: spec)
    everything = patches.series(RELEASE)
    seams = hooks.seams()
    assert seams
    patches.apply_series(tree, RELEASE, everything[:1])
    assert hooks.seams() == seams  # half of the series: agg_loss has another signature, which the seams report
    patches.apply_series(tree, RELEASE, everything)
    assert releases.is_patched()
    assert hooks.seams() == []
    report = doctor.examine()
    assert not report.faults
    assert "stands aside" in report.seams[0][2]


def test_the_readmes_table_is_the_scripts():
    assert "\n".join(patches.table_rows()) in (patches.HERE / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["", "balanced pools of the group", "twice the data-parallel factor"])
def test_patched_and_hooked_verl_are_equal_to_the_bit_and_a_broken_patch_is_seen(tmp_path, monkeypatch, hooked, broken):
    from tests.patches import test_patched_verl

    tree = copy_of_verl(tmp_path)
    patches.apply_series(tree, RELEASE, [patch for patch in patches.series(RELEASE) if patches.is_source(patch)])
    path = tree / "verl" / "trainer" / "ppo" / "core_algos.py"
    old, new = {
        "": ("", ""),
        "balanced pools of the group": ("group[:, None] * 3 + torch.arange(3)", "group[:, None].expand_as(count)"),
        "twice the data-parallel factor": (
            "loss = (loss * weight).sum() / global_batch_size * dp_size",
            "loss = (loss * weight).sum() / global_batch_size * dp_size * dp_size",
        ),
    }[broken]
    assert path.read_text().count(old) == 1 or not broken
    path.write_text(path.read_text().replace(old, new) if broken else path.read_text())
    patched = test_patched_verl.updates(tmp_path / "patched", str(tree), False, "20")
    assert bool(test_patched_verl.different(patched, hooked)) == bool(broken)


@pytest.fixture(scope="module")
def hooked(tmp_path_factory) -> Path:
    """The updates of the installed verl with the plugin."""
    from tests.patches import test_patched_verl

    return test_patched_verl.updates(tmp_path_factory.mktemp("hooked") / "out", str(INSTALLED.parent), True, "20")


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
