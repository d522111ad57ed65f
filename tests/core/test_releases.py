"""The table of releases: consistent with the seams and the docs; what is not in it is untested."""

import shutil
from pathlib import Path

import pytest

from verl_ba import hooks, releases
from verl_ba.tools import cli, doctor

ROOT = Path(__file__).parents[2]


def test_the_docs_hold_the_generated_table():
    assert "\n".join(releases.support_table()) in (ROOT / "docs" / "releases.md").read_text(), (
        "docs/releases.md is old: replace its table by what `python -m verl_ba.releases` prints"
    )


def test_every_cell_of_the_table_says_something():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in releases.support_table()]
    assert len({len(row) for row in rows}) == 1
    assert all(cell for row in rows for cell in row)


def test_every_release_has_its_checksums_and_every_seam_a_release():
    for release in releases.RELEASES:
        assert len(bytes.fromhex(release.wheel)) == 32
        assert len(bytes.fromhex(release.sources)) == 8
    for seam in hooks.SEAMS:
        assert any(seam.is_in(version) for version in releases.BY_VERSION), seam.name
        assert {seam.since, seam.before} <= {None, *releases.BY_VERSION}, seam.name


@pytest.mark.parametrize("version", ["0.7.0", "0.6.1.dev3", "?"])
def test_a_verl_that_is_older_than_all_is_refused_with_the_tested_releases(monkeypatch, version):
    monkeypatch.setattr(releases, "verl_version", lambda: version)
    with pytest.raises(releases.UnsupportedVerlError) as error:
        releases.current()
    assert f"verl {version} is not supported" in str(error.value)
    assert "tested releases: 0.7.1 (experimental), 0.8.0, 0.9.0, 0.9.1" in str(error.value)


@pytest.mark.parametrize(
    ("version", "like"),
    [
        ("0.7.2", "0.7.1"),
        ("0.8.1", "0.8.0"),
        ("0.9.1.post1", "0.9.1"),
        ("0.9.2", "0.9.1"),
        ("0.10.0.dev0", "0.9.1"),  # ten is more than nine
        ("1.0rc1", "0.9.1"),
        ("1", "0.9.1"),
    ],
)
def test_another_version_is_taken_for_the_nearest_older_release(monkeypatch, version, like):
    monkeypatch.setattr(releases, "verl_version", lambda: version)
    got = releases.current()
    assert got.version == version
    for name in ("layouts", "entry_points", "global_critic", "legacy_workers", "trainers"):
        assert getattr(got, name) == getattr(releases.BY_VERSION[like], name)
    monkeypatch.setattr(releases, "verl_version", lambda: like)
    expected = hooks.seams()
    monkeypatch.setattr(releases, "verl_version", lambda: version)
    assert hooks.seams() == expected


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A copy of the sources of this process's verl, which is what `untested` looks at."""
    installed = releases._verl_folder()
    assert installed is not None
    folder = tmp_path / "verl"
    for pattern in ("version/version", *releases.SOURCES):
        for path in installed.glob(pattern):
            (folder / path.relative_to(installed)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.relative_to(installed))
    monkeypatch.setattr(releases, "_verl_folder", lambda: folder)
    releases.untested.cache_clear()
    yield folder
    releases.untested.cache_clear()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("", ""),
        ("workers/engine/fsdp/transformer_impl.py", "differs from verl 0.9.1 as it was released"),
        ("utils/reward_score/mine.py", ""),  # a reward of one's own: no update goes through it
        ("workers/mine.py", "differs from verl 0.9.1 as it was released"),
        ("version/version", "tested releases: "),
    ],
)
def test_a_fork_is_known_by_its_sources_and_not_by_its_name(fork, change, why):
    if change == "version/version":
        (fork / change).write_text("0.9.2\n")
    elif change:
        (fork / change).parent.mkdir(parents=True, exist_ok=True)
        with (fork / change).open("a") as file:
            file.write("# a line of the fork\n")
    assert releases.untested() == "" if not why else why in releases.untested()


@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda release: release.version)
def test_the_seams_are_those_of_the_release(monkeypatch, release):
    monkeypatch.setattr(releases, "verl_version", lambda: release.version)
    modules = {seam.module for seam in hooks.seams()}
    assert ("verl.trainer.ppo.v1.trainer_base" in modules) == (release.version >= "0.9")
    assert ("verl.trainer.main_ppo_sync" in modules) == (release.version == "0.8.0")
    assert ("verl.workers.actor.dp_actor" in modules) == release.legacy_workers
    assert "verl.trainer.ppo.core_algos" in modules


def test_nodes_with_different_versions_are_named():
    same = doctor.Report("1.0", "0.9.1", "3.11.7", [])
    other = doctor.Report("1.0", "0.9.0", "3.11.7", [])
    assert cli.version_differences({"node a": same, "node b": same}) == []
    assert cli.version_differences({"node a": same, "node b": other, "node c": same}) == [
        "verl differs: 0.9.1 on node a, node c; 0.9.0 on node b. Install one version on every node"
    ]
