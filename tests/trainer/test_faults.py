"""Faults in verl's real trainer: processes that are killed, rewards that raise, and what a start after them finds."""

import psutil
import pytest
import torch

from tests.support.trainer_run import check_updates, metrics_of, read_probe, start_with_probe

pytestmark = pytest.mark.trainer

END_S = 120  # within this time a run that lost a process is over [s]
SAVED = (
    "trainer.save_freq=1",
    "trainer.total_training_steps=9",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",  # small enough to split every rank's share
)
OPTIMIZER = "demo/balanced-seed1/checkpoints/global_step_3/actor/optim_world_size_2_rank_0.pt"
REWARD = '''
"""64 responses a step. One raises in the first step; after two steps more, whatever needs a package that is not there."""
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with CALLS.open("a") as file:
        file.write("x")
    call = CALLS.stat().st_size
    again = CALLS.with_name("again").exists()
    if not again and call == 5:
        raise ValueError("this answer cannot be parsed")
    if again and call > 128 and call % 4 == 0:
        import a_package_that_is_not_there
    return float(call % 2)
'''


@pytest.mark.first
def test_a_killed_trainer_resumes_an_odd_answer_is_counted_and_a_missing_package_ends_the_run(prepared, tmp_path):
    """SIGKILL to the trainer in the middle of an update; a start that goes on from its checkpoint, until rewards fail."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    overrides = (*SAVED, f"reward.custom_reward_function.path={reward}")

    with start_with_probe(prepared, tmp_path / "first", tmp_path, "balanced", *overrides) as run:
        run.wait_for_update(2)
        assert len(run.children) > 8  # its ranks, vLLM's servers, Ray's own: none is overlooked below
        run.process.kill()  # launch.sh has become verl's process
        run.process.wait()
        _, alive = psutil.wait_procs(run.children, timeout=END_S)
        assert not alive
    (step,) = metrics_of(tmp_path, "balanced", start=1)
    assert step["training/global_step"] == 1
    assert step["balance/reward_errors"] == 1
    assert step["balance/responses"] == 63  # an odd answer costs that answer

    (tmp_path / "calls").unlink()
    (tmp_path / "again").touch()
    with start_with_probe(prepared, tmp_path / "second", tmp_path, "balanced", *overrides) as run:
        assert run.process.wait(600) != 0
        assert "MissingForReward: a reward could not be computed" in run.output(), run.output()[-4000:]
        assert "No module named 'a_package_that_is_not_there'" in run.output()
    assert all(step["balance/reward_errors"] == 0 for step in check_resumed(tmp_path))


@pytest.mark.deep
def test_a_killed_rank_ends_the_run_and_leaves_its_checkpoint(prepared, tmp_path):
    with start_with_probe(prepared, tmp_path / "first", tmp_path, "balanced", *SAVED) as run:
        run.wait_for_update(2)
        run.process.kill()
        run.process.wait()
    with start_with_probe(prepared, tmp_path / "second", tmp_path, "balanced", *SAVED) as run:
        run.wait_for_update(3)
        run.named("ray::WorkerDict").kill()
        assert run.process.wait(END_S) != 0
    check_resumed(tmp_path)


def check_resumed(results) -> list[dict]:
    """The second start has trained steps 2 and 3, each on policy and of whole groups, with one optimiser over both starts."""
    steps = metrics_of(results, "balanced", start=2)
    assert [step["training/global_step"] for step in steps] == [2, 3]
    assert all(abs(step["actor/pg_loss"]) <= 1e-6 and step["actor/grad_norm"] > 0 for step in steps)
    check_updates(read_probe(results / "second" / "probe"))
    moments = torch.load(results / OPTIMIZER, weights_only=False)["state"]
    assert {int(state["step"]) for state in moments.values()} == {3}
    return steps
