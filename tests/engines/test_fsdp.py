"""verl's own worker on FSDP ranks, packed and under Ulysses, against the float64 reference; and what must be refused."""

import pytest
from omegaconf import OmegaConf

from dev.engines import LAYOUTS, OURS, control, run
from recipes import plan
from verl_ba import support
from verl_ba.tools import audit


@pytest.mark.deep  # `make test` has tests/tools/test_check.py, of which these are more layouts
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_the_reference_in_every_layout(name):
    results = run(LAYOUTS[name])
    assert len(results) == len(LAYOUTS[name].cases)
    for result in results:
        assert result.worst < 1e-5, result
        logged = [metrics for metrics in result.metrics if metrics is not None]
        # verl gives metrics to the first sequence-parallel rank of each data-parallel one
        assert len(logged) == LAYOUTS[name].ranks // LAYOUTS[name].sequence
        for metrics in logged:
            assert all(f"balance/pg_loss/{sign}" in metrics for sign in ("negative", "zero", "positive"))
            if result.case.mode in OURS:
                assert metrics["balance/active/applied_residual"] < 1e-6


def config(attention, size=2, where="actor", strategy="fsdp", key="ulysses_sequence_parallel_size"):
    node = {"strategy": strategy, "fsdp_config": {}}
    node |= {key: size} if key != "fsdp_config" else {"fsdp_config": {"ulysses_sequence_parallel_size": size}}
    return OmegaConf.create(
        {"actor_rollout_ref": {where: node, "model": {"override_config": {"attn_implementation": attention}}}}
    )


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"attention": "sdpa"}, "actor"),
        ({"attention": "eager"}, "actor"),
        ({"attention": "flex_attention", "strategy": "fsdp2"}, "actor"),
        ({"attention": "sdpa", "where": "ref"}, "ref"),  # log-probabilities of the KL term
        ({"attention": "sdpa", "key": "fsdp_config"}, "actor"),  # verl's newer key
        ({"attention": "sdpa", "size": 1}, None),
        ({"attention": "packed"}, None),
        ({"attention": "flash_attention_2"}, None),
        ({"attention": None}, None),  # verl's default is flash_attention_2
        ({"attention": "sdpa", "strategy": "veomni"}, None),  # an engine with a Ulysses of its own
    ],
)
def test_ulysses_is_refused_with_an_attention_that_goes_past_verls_exchange(settings, where):
    fault = support.ulysses_fault(config(**settings))
    assert (fault is None) == (where is None)
    if fault:
        assert f"actor_rollout_ref.{where}.ulysses_sequence_parallel_size=2 with " in fault


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"data_parallel_replicate_size": 2}, "data_parallel_replicate_size"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"data_parallel_shard_size": 2, "data_parallel_replicate_size": 1, "context_parallel_size": 1}, None),
    ],
)
def test_torchtitan_is_refused_where_verl_scales_its_gradients(sizes, refused):
    actor = {"strategy": "torchtitan", "torchtitan": sizes}
    fault = support.engine_fault(OmegaConf.create({"actor_rollout_ref": {"actor": actor}}))
    assert (f"actor_rollout_ref.actor.torchtitan.{refused}=2: " in fault) if fault else refused is None


WRONG = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"


def test_the_auditor_refuses_what_the_engine_would_train_wrong():
    sdpa = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    report = audit.audit(audit.compose([WRONG, sdpa]))
    assert [finding.kind for finding in report.faults if WRONG in finding.message] == ["refused"]


def test_the_plan_refuses_what_the_engine_would_train_wrong():
    config = plan.compose("demo", ["arm=balanced", "cluster=cpu", WRONG])  # the demo's attention is sdpa
    assert any(WRONG in problem for problem in plan.problems(config, files=False))


@pytest.mark.deep
def test_the_control_ulysses_with_sdpa_trains_wrong_without_a_word():
    """Why it is refused."""
    assert control().gradient_error > 0.1
