"""`verl-ba check`: the command, on real ranks, with a mode that is right and one that is not."""

import os
import re
import subprocess
import sys

import pytest

FSDP2 = ("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.use_dynamic_bsz=True")


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-m", "verl_ba", "check", "actor_rollout_ref.rollout.name=vllm", *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2_in_float32_is_exact_in_every_mode(ranks):
    done = run("--nproc", str(ranks), "--float32", *FSDP2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ ([\w-]+) +│ (\S+) +│ (\S+) +│ (\S+) +│ (\S+)", done.stdout)
    assert [row[0] for row in rows][:3] == ["balanced", "group-mean-token-mean", "token-mean"]
    assert len(rows) == 7
    assert max(float(number) for row in rows for number in row[1:4]) < 1e-5
    assert min(float(row[4]) for row in rows) > 0.1
    assert f"fsdp2, {ranks} data-parallel ranks, CPU, float32" in done.stdout


@pytest.mark.slow
def test_a_wrong_mode_is_reported_in_the_precision_of_the_configuration():
    """bfloat16, whose tolerance is wide."""
    done = run("--nproc", "2", *FSDP2, "actor_rollout_ref.model.external_lib=tests.support.wrong_balanced")
    assert done.returncode == 1, done.stdout + done.stderr
    faults = [line for line in done.stdout.splitlines() if line.startswith("✗")]
    assert len(faults) == 1
    assert faults[0].startswith("✗ loss_agg_mode=balanced: off by 0.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc", "3", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"), "expected a multiple of 2"),
        (("actor_rollout_ref.model.path=/nowhere",), "path=/nowhere: expected a folder with config.json"),
        (("actor_rollout_ref.actor.strategy=veomni",), "strategy=veomni: expected fsdp, fsdp2, megatron"),
    ],
)
def test_what_cannot_be_checked_is_an_error_of_the_input(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
