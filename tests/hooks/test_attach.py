"""The machinery of the hooks on stub modules: it is handed seams and knows nothing of verl."""

import functools
import sys
import types

import pytest

from verl_ba.hooks.attach import MARK, Attachment, Seam


def double(original):
    @functools.wraps(original)
    def replacement(*args):
        return 2 * original(*args)

    return replacement


@pytest.fixture
def package(monkeypatch):
    """Two modules: one defines `loss`, the other has copied it by name."""
    home, user = types.ModuleType("stub_home"), types.ModuleType("stub_user")
    home.loss = lambda value, mask: value
    user.loss = user.another_name = home.loss
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(home=home, user=user)


def seam(attribute="loss", parameters=("value", "mask"), **settings):
    return Seam("stub_home", attribute, parameters, double, "to double it", "it is doubled", **settings)


def attach(*seams):
    reports = []
    attachment = Attachment(lambda seam, problem: reports.append(f"{seam.name} {problem}"))
    attachment.install(seams)
    return attachment, reports


def test_every_by_name_copy_is_rebound(package):
    attachment, reports = attach(seam())
    assert (package.home.loss(1, 0), package.user.loss(1, 0), package.user.another_name(1, 0)) == (2, 2, 2)
    assert getattr(package.home.loss, MARK) == "stub_home.loss"
    assert attachment.faults() == reports == []


def test_a_name_that_is_replaced_in_its_module_only_stays_elsewhere(package):
    attachment, _ = attach(seam(everywhere=False))
    assert (package.home.loss(1, 0), package.user.loss(1, 0)) == (2, 1)
    assert attachment.faults() == []


def test_a_module_that_is_loaded_later_is_patched_when_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stub_later.py").write_text("def loss(value, mask):\n    return value\n")
    later = Seam("stub_later", "loss", ("value", "mask"), double, "why", "until")
    attachment, _ = attach(later)
    assert attachment.fault(later) == "its module is not loaded"
    import stub_later  # pyright: ignore[reportMissingImports]  # written above

    assert stub_later.loss(1, 0) == 2
    monkeypatch.delitem(sys.modules, "stub_later")


def test_a_copy_that_is_made_afterwards_from_the_original_is_stale(package):
    original = package.home.loss
    attachment, _ = attach(seam())
    package.user.loss = original
    assert attachment.stale_bindings() == [("stub_user.loss", "stub_home.loss")]
    assert attachment.faults() == ["stub_user.loss: still verl's own stub_home.loss"]


def test_a_changed_signature_is_reported_and_nothing_is_replaced(package):
    changed = seam(parameters=("value",))
    attachment, reports = attach(changed)
    assert reports == ["stub_home.loss signature changed: expected ('value',), got ('value', 'mask')"]
    assert package.home.loss(1, 0) == 1
    assert attachment.fault(changed) == reports[0].removeprefix("stub_home.loss ")


def test_a_missing_name_is_reported(package):
    gone = seam("gone")
    attachment, reports = attach(gone)
    (report,) = reports
    assert report.startswith("stub_home.gone missing: ")
    assert attachment.faults() == [f"stub_home.gone: {report.removeprefix('stub_home.gone ')}"]


def test_a_lost_seam_that_only_logs_is_no_fault(package):
    attachment, reports = attach(seam("gone", logs=True))
    assert reports
    assert attachment.faults() == []


def test_another_wrapper_around_ours_is_accepted_and_one_in_its_place_is_not(package):
    ours_seam = seam()
    attachment, _ = attach(ours_seam)
    ours = package.home.loss
    package.home.loss = functools.wraps(ours)(lambda *args: ours(*args))
    assert attachment.fault(ours_seam) is None
    package.home.loss = lambda value, mask: value
    assert attachment.fault(ours_seam) == "replaced by something else after verl_ba attached"


def test_installing_twice_attaches_once(package):
    attachment, _ = attach(seam())
    attachment.install([seam()])
    assert package.home.loss(1, 0) == 2


def test_before_installation_everything_is_a_fault():
    (fault,) = Attachment(lambda *_: None).faults()
    assert "install() was not called in this process" in fault


@pytest.mark.parametrize(
    ("since", "before", "releases"),
    [
        (None, None, ["0.7.1", "0.8.0", "0.9.1", "0.10.0"]),
        ("0.8.0", None, ["0.8.0", "0.9.1", "0.10.0"]),
        (None, "0.8.0", ["0.7.1"]),
        ("0.8.0", "0.9.0", ["0.8.0"]),
    ],
)
def test_a_seam_is_in_a_range_of_releases_that_is_open_where_nothing_is_said(since, before, releases):
    ranged = seam(since=since, before=before)
    assert [version for version in ("0.7.1", "0.8.0", "0.9.1", "0.10.0") if ranged.is_in(version)] == releases
