"""Ranks that do not agree on metrics, or of which one lacks the package: nobody waits, and everything trains as before."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import verl  # noqa: F401  loads the plugin, as in any verl process

from tests.support import verl_harness as harness
from verl_ba import hooks

hooks.load_seam_modules()
from verl.utils.metric import reduce_metrics  # noqa: E402
from verl.workers import engine_workers  # noqa: E402


def run_rank(rank: int, folder: str, mode: str, other: str) -> None:
    """Two ranks; on the second, metrics are switched off or the package is missing."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    if rank == 1 and other == "switched off":
        os.environ["VERL_BA_METRICS"] = "0"
    if rank == 1 and other == "missing":
        originals = hooks.attachment.originals
        engine_workers.ActorRolloutRefWorker.update_actor = originals[
            "verl.workers.engine_workers.ActorRolloutRefWorker.update_actor"
        ]
    rollouts = harness.make_rollouts(3, groups=4, size=4)
    worker = harness.make_worker(rollouts, harness.make_actor_config(mode), 2, max_tokens=24)
    for _ in range(2):
        data = harness.to_tensordict(rollouts, list(range(16))[rank::2], "padded")
        metrics = reduce_metrics(harness.update(worker, data, 8))
    Path(folder, f"{rank}").write_text("\n".join(key for key in metrics if "balance/" in key))
    torch.save([float(metrics["actor/pg_loss"]), *worker.engine.gradients], Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


def two_ranks(folder: Path, mode: str, other: str) -> list[list[str]]:
    """The names under `balance/` that each rank has at its last update. Nobody may wait for long."""
    fork = multiprocessing.get_context("fork")  # what takes time is importing verl
    ranks = [fork.Process(target=run_rank, args=(rank, str(folder), mode, other)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, "a rank waits for the other"
    assert [process.exitcode for process in ranks] == [0, 0]
    return [Path(folder, f"{rank}").read_text().split("\n") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "other"), [("token-mean", "switched off"), ("token-mean", "missing"), ("balanced", "switched off")]
)
def test_ranks_that_do_not_agree_on_metrics_train_and_say_so(tmp_path, capfd, mode, other):
    names = two_ranks(tmp_path, mode, other)
    assert names[0] == [""]
    said = capfd.readouterr().err
    assert said.count("no balance/… metrics at all: of 2 data-parallel ranks 1 sent theirs") == 1
    if other == "switched off":
        assert names[1] == [""]
    else:  # a rank without the package logs means that mean nothing, and goes on
        assert all(name.startswith("balance/sum/") for name in names[1])
    (tmp_path / "agreed").mkdir()
    agreed = two_ranks(tmp_path / "agreed", mode, "")
    assert "balance/groups" in agreed[0]
    assert agreed[0] == agreed[1]
    for rank in range(2):  # and trains the same
        one, two = (torch.load(folder / f"{rank}.pt") for folder in (tmp_path, tmp_path / "agreed"))
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, two, strict=True))
