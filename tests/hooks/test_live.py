"""What an update says of itself: the weights that were applied."""

import pytest
import torch
import verl  # noqa: F401  loads the plugin, as in any verl process

from tests.support import verl_harness as harness
from verl_ba import hooks, loss_agg
from verl_ba.metrics import record

hooks.load_seam_modules()
from verl.utils.metric import reduce_metrics  # noqa: E402

RESIDUAL = "balance/active/applied_residual"


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(record, "_judged", set())


def update(mode="balanced", form="response", mini_batches=2, micro=None, epochs=2, change=None, dtype=torch.float64):
    rollouts = harness.make_rollouts(3, groups=4, size=4, form=form)
    rollouts.theta, rollouts.old = rollouts.theta.to(dtype), rollouts.old.to(dtype)
    worker = harness.make_worker(rollouts, harness.make_actor_config(mode), micro, max_tokens=24)
    if change:
        change(worker)
    data = harness.to_tensordict(rollouts, list(range(16)), "nested")
    return reduce_metrics(harness.update(worker, data, 16 // mini_batches, epochs, shuffle=True))


# ---- the weights that were applied


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("mode", ["balanced", "group-mean-token-mean"])
@pytest.mark.parametrize("form", ["response", "token"])
@pytest.mark.parametrize(("mini_batches", "micro", "epochs"), [(1, 16, 1), (2, 2, 1), (2, None, 3)])
def test_the_applied_weights_add_up_to_the_responses_under_every_split(mode, form, mini_batches, micro, epochs):
    assert update(mode, form, mini_batches, micro, epochs)[RESIDUAL] < 1e-12


@pytest.mark.usefixtures("one_process")
def test_float32_stays_below_the_bound(capfd):
    assert update(dtype=torch.float32)[RESIDUAL] < 1e-6
    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.usefixtures("one_process")
def test_verls_own_modes_promise_no_sum_of_weights():
    assert RESIDUAL not in update("token-mean")


def twice_the_ranks(worker):
    """An engine that scales by one data-parallel rank too many."""
    loss = worker.loss_fn

    def wrong(*args, data, **kwargs):
        harness.tu.assign_non_tensor(data, dp_size=2)
        return loss(*args, data=data, **kwargs)

    wrong.__dict__["keywords"] = loss.keywords
    worker.loss_fn = wrong


def a_lost_micro_batch(worker):
    """An engine that leaves the last micro-batch of each mini-batch out."""
    engine, seen = worker.engine, []
    step = engine.forward_step

    def forward_step(micro_batch, loss_function, forward_only):
        seen.append(len(micro_batch))
        loss, output = step(micro_batch, loss_function, forward_only)
        if sum(seen) % 8 == 0:
            output["metrics"] = {}
        return loss, output

    engine.forward_step = forward_step


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("fault", "least"), [(twice_the_ranks, 0.99), (a_lost_micro_batch, 0.05)])
def test_an_engine_that_scales_or_splits_wrongly_is_said_once_and_ends_a_strict_run(fault, least, capfd, monkeypatch):
    for _ in range(2):
        assert update(change=fault, micro=2)[RESIDUAL] > least
    said = capfd.readouterr().err
    assert said.count(f"WARNING: {RESIDUAL} is ") == 1
    monkeypatch.setenv("VERL_BA_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"do not add up to the number of responses.*VERL_BA_STRICT=1"):
        update(change=fault, micro=2)


@pytest.mark.usefixtures("one_process")
def test_a_strict_run_without_metrics_is_refused(monkeypatch):
    monkeypatch.setenv("VERL_BA_STRICT", "1")
    update()  # exact: it runs
    monkeypatch.setenv("VERL_BA_METRICS", "0")
    with pytest.raises(ValueError, match="VERL_BA_STRICT=1 needs the metrics"):
        update()


@pytest.mark.usefixtures("one_process")
def test_a_strict_run_whose_weights_are_not_known_ends(monkeypatch):
    def a_nameless_size(worker):
        monkeypatch.setattr(record, "_setting", lambda data, name: None)

    assert RESIDUAL not in update(change=a_nameless_size)
    monkeypatch.setenv("VERL_BA_STRICT", "1")
    with pytest.raises(RuntimeError, match="is not known"):
        update(change=a_nameless_size)


# ---- what ranks tell each other


def test_rows_survive_their_way_as_numbers():
    rollouts = harness.make_rollouts(3, groups=4, size=4, form="token")
    rollouts.session = list(range(16))
    share = loss_agg.rows_of(harness.to_tensordict(rollouts, list(range(16)), "padded"))
    first, missing, second = record.decode([*record.encode(share), *record.encode(None), *record.encode(share)])
    assert missing is None
    assert first is not None
    assert first == second
    assert {name: first[name] for name in ("count", "size", "largest", "session_set")} == {
        name: share[name] for name in ("count", "size", "largest", "session_set")
    }
    for name in ("uid", "session_id"):
        assert torch.equal(loss_agg.number(name, first[name]), loss_agg.number(name, share[name]))
