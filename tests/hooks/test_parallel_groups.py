"""Engines whose ranks are not all data-parallel: what the hook gathers over the groups that they hand it.

FSDP with Ulysses and Megatron run in tests/engines, in verl's own worker. Here, four gloo ranks stand in for the engines
that do not run on a CPU. Ranks 0, 1 and ranks 2, 3 are model-parallel peers (tensor,
pipeline, context or sequence parallel) and hold the same rows, as verl dispatches them.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from verl.utils import tensordict_utils as tu

from tests.support import reference
from tests.support import verl_harness as harness
from verl_ba import support
from verl_ba.loss_agg import token_mean_length

ROOT = Path(__file__).parents[2]
WORLD, PEERS, MODE = 4, 2, "balanced"
FORMS = ("response", "token", "sessions")
GROUPS = {
    "data parallel, without peers": "VeOmni and torchtitan; Megatron and Ulysses, which tests/engines runs",
    "none": "torchtitan with one data-parallel rank: no group, all ranks hold all rows",
    "with context peers": "torchtitan's 'loss' mesh: rows come once per context-parallel peer",
    "one rank": "Megatron with dynamic context parallelism: a group of one rank, all ranks hold all rows",
}


def make_rollouts(form: str) -> harness.Rollouts:
    rollouts = harness.make_rollouts(seed=11, groups=6, size=4, form="token" if form == "token" else "response")
    if form == "sessions":
        rollouts.session = [i % 3 for i in range(len(rollouts))]
    return rollouts


def group_and_rows(name: str, rank: int, rows: int):
    """The process group of this rank under this kind of parallelism, and the rows that verl would dispatch to it."""
    mesh = init_device_mesh("cpu", (WORLD // PEERS, PEERS), mesh_dim_names=("dp", "peers"))
    share = list(range(rows))[rank // PEERS :: WORLD // PEERS]
    return {
        "data parallel, without peers": (mesh.get_group("dp"), share),
        "none": (None, list(range(rows))),
        "with context peers": (torch.distributed.group.WORLD, share),
        "one rank": (init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("a", "b")).get_group("b"), list(range(rows))),
    }[name]


def error_on_this_rank(name: str, form: str, rank: int) -> float:
    """The largest relative error of a token's weight against the literal reference of the whole batch."""
    rollouts = make_rollouts(form)
    group, rows = group_and_rows(name, rank, len(rollouts))
    data = harness.to_tensordict(rollouts, rows, "nested")
    column = harness.pool_lengths(MODE, data, group)
    assert len(column) == len(rows)
    if column.ndim == 1:
        column = column[:, None].expand(-1, 3)
    got = token_mean_length(column, rollouts.advantage_BT[rows], torch.zeros(len(rows)))
    expected = harness.token_weights(rollouts, MODE)[rows]
    valid = rollouts.mask[rows]
    return (1 / got - expected)[valid].abs().div(expected[valid]).max().item()


def run_rank(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    errors = {f"{name}/{form}": error_on_this_rank(name, form, rank) for name in GROUPS for form in FORMS}
    Path(folder, f"{rank}.json").write_text(json.dumps(errors))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (str(folder),), nprocs=WORLD)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GROUPS)
def test_weights_are_the_whole_batchs_whatever_peers_hold_the_same_rows(errors, name, form):
    assert max(rank[f"{name}/{form}"] for rank in errors) <= 1e-12


def test_a_rank_without_its_data_parallel_peers_would_be_seen():
    """The control: half of the batch has other mean lengths."""
    rollouts = make_rollouts("response")
    rows = list(range(len(rollouts)))[::2]
    got = harness.pool_lengths(MODE, harness.to_tensordict(rollouts, rows, "nested"))
    expected = reference.token_weights(MODE, rollouts.advantage_BT.tolist(), rollouts.mask.tolist(), rollouts.uid, None)
    wrong = [abs(1 / g - max(expected[i])) / max(expected[i]) for g, i in zip(got.tolist(), rows, strict=True) if g]
    assert max(wrong) > 0.01


def test_a_worker_that_goes_past_update_actor_raises(tmp_path):
    """Tinker's split training: forward_backward sees one call's rows, never whole groups."""
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        rollouts = make_rollouts("response")
        worker = harness.make_worker(rollouts, harness.make_actor_config(MODE), micro_batch=4, max_tokens=64)
        worker.__class__ = TinkerTrainingWorker
        data = harness.to_tensordict(rollouts, list(range(len(rollouts))), "nested")
        tu.assign_non_tensor(data, global_batch_size=len(rollouts))
        with pytest.raises(ValueError, match="was called without pool_mean_length"):
            worker.forward_backward(data)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", support.TRAINERS)
def test_what_the_table_of_trainers_names_exists_and_has_the_right_mark(name):
    row = support.TRAINERS[name]
    path, _, test = row.test.partition("::")
    text = (ROOT / path).read_text()
    assert f"\ndef {test}(" in text
    runs_the_trainer = "\npytestmark = pytest.mark.trainer\n" in text
    assert runs_the_trainer == (row.ran == "a few steps on the CPU" and not row.not_run)
