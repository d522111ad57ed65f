"""Every trainer of verl 0.9.1 that runs on a CPU, for a few real steps, and batches as untidy as verl makes them.

A probe in the workers (trainer_probe.py) writes down what each rank was given and the mean lengths that it computed. They are
compared with the literal reference, over all ranks: groups are whole, no group comes twice, and every number is right.
"""

from collections import Counter

import datasets
import pytest

from tests.support.trainer_run import (
    STEPS,
    check_updates,
    launch_with_probe,
    logged_again,
    pg_losses,
)

pytestmark = pytest.mark.trainer

SPLIT = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256"  # micro-batches small enough to split every rank's share
)
OWN_ROLLOUT_POOL = (
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tests.support.file_checkpoint_engine",
    "ray_kwargs.ray_init.num_gpus=3",
    "ray_kwargs.ray_init.num_cpus=40",  # slots; the experimental trainers ask for ten and for twenty
)
"""Two logical devices train, a third one generates."""


def check_run(result, steps, updates, on_policy: bool) -> None:
    losses = pg_losses(result, steps)
    check_updates(updates)
    for step, update in zip(steps, updates, strict=True):
        assert step["actor/pg_loss"] == pytest.approx(logged_again(update), abs=1e-6)
    if on_policy:
        assert max(losses) <= 1e-6


@pytest.mark.deep
def test_colocate_async_with_dynamic_sampling(prepared, tmp_path):
    """A batch is ahead, but log-probabilities are taken anew before each update, so the ratio is 1.

    Groups that are all right or all wrong are left out, and others generated in their place.
    """
    result, steps, updates = launch_with_probe(
        prepared,
        tmp_path,
        "balanced",
        "trainer.v1.trainer_mode=colocate_async",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        SPLIT,
    )
    check_run(result, steps, updates, on_policy=True)
    assert sum(step.get("training/filter_groups/evicted_samples", 0) for step in steps) > 0
    for update in updates:
        assert len(update.groups) == 8
        assert all(len(update.advantages(uid)) == 2 for uid in update.groups)  # right and wrong


@pytest.mark.deep
def test_separate_async(prepared, tmp_path):
    """Two updates between two transfers of weights: an update is half a batch, and still of whole groups.

    With a rollout pool alone, a call of verl 0.9.1 that would log at INFO fails.
    """
    result, steps, updates = launch_with_probe(
        prepared,
        tmp_path,
        "balanced",
        *OWN_ROLLOUT_POOL,
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        SPLIT,
        VERL_LOGGING_LEVEL="WARNING",
    )
    pg_losses(result, steps)
    assert len(updates) == 2 * STEPS
    check_updates(updates)
    # The first update after a transfer is on policy, the second (log-probabilities of before the first) is not.
    for step, first, second in zip(steps, updates[::2], updates[1::2], strict=True):
        assert abs(logged_again(first)) <= 1e-6 < abs(logged_again(second))
        assert step["actor/pg_loss"] == pytest.approx((logged_again(first) + logged_again(second)) / 2, abs=1e-6)


@pytest.mark.deep
def test_one_step_off_policy(prepared, tmp_path):
    """Generation is a step behind; log-probabilities are taken anew. The trainer of verl 0.9.1 cannot dump rollouts."""
    run = launch_with_probe(
        prepared,
        tmp_path,
        "balanced",
        *OWN_ROLLOUT_POOL,
        "+rollout={nnodes:1,n_gpus_per_node:1}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "trainer.rollout_data_dir=null",
        SPLIT,
        VERL_TRAINER="verl.experimental.one_step_off_policy.main_ppo",
    )
    check_run(*run, on_policy=True)


@pytest.mark.deep
def test_fully_async_policy_with_an_overlong_penalty(prepared, tmp_path):
    """As it is shipped, in bypass mode: the ratio is to the policy that generated.

    Rewards are fractions: length costs, and a long right answer may lose against a short wrong one.
    """
    result, steps, updates = launch_with_probe(
        prepared,
        tmp_path,
        "balanced",
        *OWN_ROLLOUT_POOL,
        "+rollout={nnodes:1,n_gpus_per_node:1,n:8,total_rollout_steps:32}",
        "+async_training={staleness_threshold:0.5,trigger_parameter_sync_step:1,require_batches:1,partial_rollout:True,"
        "use_trainer_do_validate:False,use_dynamic_resource_scheduling:False,concurrent_samples_per_replica:16}",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "+actor_rollout_ref.actor.use_rollout_log_probs=True",
        "algorithm.rollout_correction.bypass_mode=True",
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs={max_resp_len:80,overlong_buffer_cfg:{enable:True,len:60,penalty_factor:2.0,log:False}}",
        SPLIT,
        VERL_TRAINER="verl.experimental.fully_async_policy.fully_async_main",
    )
    check_run(result, steps, updates[:STEPS], on_policy=False)
    assert len(updates) == STEPS + 1  # what the last one measures is not logged by verl 0.9.1
    check_updates(updates)
    assert any(len(update.advantages(uid)) > 2 for update in updates for uid in update.groups)


@pytest.mark.deep
def test_sessions_of_several_rows_with_failures_and_different_n(prepared, tmp_path):
    """Two-turn rollouts (agent_loops.py): rows of one session are one response. Then padding fills the second mini-batch.

    The learning rate is 0, so both mini-batches are on policy and their losses cancel to 0 together.
    """
    questions = datasets.Dataset.from_parquet(str(prepared["train"])).select(range(100))
    questions = questions.add_column("__rollout_n__", [4 + 2 * (i % 3) for i in range(100)])
    questions.to_parquet(str(train := tmp_path / "train.parquet"))
    loop = tmp_path / "loop.yaml"
    loop.write_text("- name: two_turns\n  _target_: tests.support.agent_loops.TwoTurnLoop\n")
    result, steps, updates = launch_with_probe(
        prepared,
        tmp_path,
        "balanced",
        f"data.train_files={train}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns",
        "data.max_prompt_length=192",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.actor.optim.lr=0",
    )
    check_run(result, steps, updates, on_policy=True)
    for update in updates:
        sessions = {uid: Counter(update.session[i] for i in update.rows(uid)) for uid in update.groups}
        assert {rows for counts in sessions.values() for rows in counts.values()} == {1, 2}
        assert len({len(counts) for counts in sessions.values()}) > 1  # prompts with different n
        padding = [i for i, uid in enumerate(update.uid) if uid.startswith("pad")]
        assert padding
        assert not any(update.length[i] for i in padding)
        assert len(update.uid) == 128
    assert "is out of order" in result.stdout  # some sessions failed; their groups came with the others
    assert any(1 not in update.session_ids(uid) for update in updates for uid in update.groups)
