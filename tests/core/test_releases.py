"""The table of releases: consistent with the seams, the pins and the docs; everything else refused by version."""

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


def test_every_release_has_its_pin_and_every_seam_a_release():
    pins = {path.stem: path.read_text() for path in (ROOT / "requirements" / "versions").glob("*.txt")}
    assert set(pins) == set(releases.BY_VERSION)
    for version, pin in pins.items():
        assert pin.startswith(f"verl=={version} --hash=sha256:")
    for seam in hooks.SEAMS:
        assert any(seam.is_in(version) for version in releases.BY_VERSION), seam.name
        assert {seam.since, seam.before} <= {None, *releases.BY_VERSION}, seam.name


@pytest.mark.parametrize("version", ["0.7.0", "0.9.2", "0.10.0.dev", "1.0"])
def test_another_release_is_refused_with_the_supported_ones(monkeypatch, version):
    monkeypatch.setattr(releases, "verl_version", lambda: version)
    with pytest.raises(releases.UnsupportedVerlError) as error:
        releases.current()
    assert f"verl {version} is not supported" in str(error.value)
    assert "supported: 0.7.1 (experimental), 0.8.0, 0.9.0, 0.9.1" in str(error.value)
    assert "balanced" in str(error.value)


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
