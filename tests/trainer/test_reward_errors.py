"""Rewards that raise, in verl's real trainer: one odd answer costs that answer, a missing package ends the run."""

import pytest

from tests.support.trainer_run import launch

pytestmark = pytest.mark.trainer

REWARD = '''
"""64 responses a step: one raises in the first step; in the second, whatever needs the package that is not there does."""
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with CALLS.open("a") as file:
        file.write("x")
    call = CALLS.stat().st_size
    if call == 5:
        raise ValueError("this answer cannot be parsed")
    if call > 64 and call % 4 == 0:
        import a_package_that_is_not_there
    return float(call % 2)
'''


def test_an_odd_answer_is_counted_and_a_missing_package_ends_the_run(prepared, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    result, steps = launch(prepared, tmp_path, "balanced", f"reward.custom_reward_function.path={reward}")
    assert result.returncode not in (0, None)
    assert "MissingForReward: a reward could not be computed" in result.stdout, result.stdout[-4000:]
    assert "No module named 'a_package_that_is_not_there'" in result.stdout
    assert len(steps) == 1  # the second step's update was not made
    assert steps[0]["balance/reward_errors"] == 1
    assert steps[0]["balance/responses"] == 63
