"""What of verl works under this package's modes: one table, which the refusals in hooks/ read and the docs print.

`python -m verl_ba.support` prints docs/support.md.
"""

from dataclasses import dataclass
from typing import Any, Literal

from verl_ba.aggregation import MODES

MODE_KEY = "actor_rollout_ref.actor.loss_agg_mode"
"""The key of the mode in verl's configuration, for messages."""


@dataclass(frozen=True)
class Support:
    """A part of verl, and what becomes of it.

    Attributes:
        verdict: 'exact': verl passes the mode on, and value and gradient equal the formula under every split.
            'made exact': verl names another mode there; the aggregation is ours and the rest verl's.
            'refused': an error.
        why: what a user needs to know; for a refusal, a clause that follows 'cannot follow loss_agg_mode'.
        per_micro_batch: the per-token losses hold statistics of the micro-batch. They depend on its size under every
            mode, verl's own included; the weights of these per-token losses are exact.
    """

    verdict: Literal["exact", "made exact", "refused"]
    why: str
    per_micro_batch: bool = False


POLICY_LOSSES = {
    "vanilla": Support("exact", "PPO clipping with dual clip"),
    "dppo_tv": Support("exact", "the mask of trusted tokens is a token's own"),
    "dppo_kl": Support("exact", "the mask of trusted tokens is a token's own"),
    "gspo": Support(
        "made exact",
        "the sequence ratio is verl's; releases before 0.9.1 name seq-mean-token-mean there, 0.9.1 passes the mode on",
    ),
    "sapo": Support("made exact", "the gates are verl's; verl names seq-mean-token-mean there"),
    "gpg": Support("exact", "no ratio, no clipping"),
    "clip_cov": Support(
        "exact", "covariances and the number of clipped tokens are the micro-batch's (verl, in every mode)", True
    ),
    "kl_cov": Support(
        "exact", "covariances and the number of penalised tokens are the micro-batch's (verl, in every mode)", True
    ),
    "geo_mean": Support(
        "refused",
        "it has one loss per response, the geometric mean of its ratios, so there are no per-token losses to weigh; verl "
        "averages it over each micro-batch",
    ),
    "dro": Support("exact", "the quadratic penalty is a token's own (since verl 0.9.0)"),
    "cispo": Support("exact", "the clipped ratio is a token's own"),
    "bypass_mode": Support(
        "exact",
        "with loss_type ppo_clip or reinforce; rollout_rs is refused (below); rollout_is_batch_normalize divides by the "
        "micro-batch's mean weight, and a micro-batch without a valid token is an error (verl, in every mode)",
    ),
}
"""verl's registry, by `policy_loss.loss_mode`. A loss that is not here is checked when it runs (hooks/policy_loss.py)."""

BYPASS_REJECTION = Support(
    "refused",
    "in bypass mode tokens are rejected inside the loss, after the lengths were taken. Use bypass_mode=False (rejection "
    "then happens before the update), or rollout_rs=null",
)

ESTIMATORS = {
    "grpo": "response",
    "grpo_vectorized": "response",
    "grpo_passk": "response",
    "gdpo": "response",
    "rloo": "response",
    "rloo_vectorized": "response",
    "opo": "response",
    "gpg": "response",
    "reinforce_plus_plus_baseline": "response",
    "reinforce_plus_plus": "token",
    "remax": "token",
    "gae": "token",
    "optimal_token_baseline": "token",
    "tir_optimal_token_baseline": "token",
}
"""`algorithm.adv_estimator` of verl and the form it may need. 'token': advantages may change sign within a response."""

OTHER = {
    "rollout importance weights (`rollout_is`)": Support("exact", "they multiply the per-token losses"),
    "rejection before the update (`rollout_rs`)": Support("exact", "lengths come from the mask that is left"),
    "rejection in bypass mode (`bypass_mode=True` with `rollout_rs`)": BYPASS_REJECTION,
    "entropy and KL terms": Support("exact", "same weights as the policy term, as in verl's modes"),
    "distillation": Support(
        "exact", "its per-token losses get the weights of the trainer's advantages, as entropy does"
    ),
    "critic": Support("exact", "values have no sign: token-mean over the global batch, and a line that says so"),
    "LoRA": Support("exact", "the loss is the same function of the log-probabilities"),
    "continuous or several rewards": Support("exact", "only the sign of the advantage matters"),
    "a registered policy loss of your own": Support(
        "exact",
        "if it returns `agg_loss(…, **config.global_batch_info)` of its per-token losses; else an error names it",
    ),
    "a registered policy loss that takes means of its own": Support(
        "refused", "at its first call: a loss must pass its per-token losses to `agg_loss` with the mode it was given"
    ),
}


# --------------------------------------------------------------------------------------------------------------------
# Engines
# --------------------------------------------------------------------------------------------------------------------

WITHOUT_ULYSSES = ("sdpa", "eager", "flex_attention")
"""Values of `attn_implementation` that never reach verl's exchange between sequence-parallel ranks."""


def ulysses_size(node: Any) -> int:
    """Sequence-parallel ranks of an FSDP actor, reference policy or critic, from its section of verl's configuration.

    verl has two keys: the older one counts where it is greater than 1.
    """
    old = node.get("ulysses_sequence_parallel_size") or 1
    engine = node.get("fsdp_config") or (node.get("model") or {}).get("fsdp_config") or {}
    return old if old > 1 else engine.get("ulysses_sequence_parallel_size") or 1


def ulysses_fault(config: Any) -> str | None:
    """Why Ulysses would train wrong with this configuration of verl, in every mode and without a word; None if it would not.

    In verl 0.9.1 the exchange of tokens for heads is in transformers' flash attention alone. With another attention each
    rank attends to its own part of every sequence only: the gradient is off by .63 (`python -m dev.engines`).

    Args:
        config: the composed configuration of a trainer; sections that are missing are left out.
    """
    policy, critic = config.get("actor_rollout_ref") or {}, config.get("critic") or {}
    has_critic = critic.get("enable") or (
        critic.get("enable") is None and (config.get("algorithm") or {}).get("adv_estimator") == "gae"
    )
    parts = [
        (f"actor_rollout_ref.{name}", policy.get(name) or {}, "actor_rollout_ref.model", policy.get("model") or {})
        for name in ("actor", "ref")
    ]
    if has_critic:
        parts.append(("critic", critic, "critic.model", critic.get("model") or {}))
    for where, node, model_key, model in parts:
        attention = (model.get("override_config") or {}).get("attn_implementation")
        size = ulysses_size(node) if node.get("strategy") in ("fsdp", "fsdp2") else 1
        if size > 1 and attention in WITHOUT_ULYSSES:
            return (
                f"{where}.ulysses_sequence_parallel_size={size} with {model_key}.override_config.attn_implementation="
                f"{attention}: verl exchanges tokens for heads in transformers' flash attention only, so each rank would "
                "attend to its own part of every sequence, in every mode and without a word. Use flash_attention_2 or "
                "flash_attention_3 (on the CPU: packed), or ulysses_sequence_parallel_size=1"
            )
    return None


def torchtitan_fault(config: Any) -> str | None:
    """Why verl 0.9.1's torchtitan engine would train wrong with these sizes, in every mode; None if it would not."""
    actor = (config.get("actor_rollout_ref") or {}).get("actor") or {}
    engine = actor.get("torchtitan") or {} if actor.get("strategy") == "torchtitan" else {}
    for key, what in (
        ("data_parallel_replicate_size", "verl 0.9.1 multiplies every gradient by it"),
        ("context_parallel_size", "verl 0.9.1 deals rows and gathers log-probabilities as if there were none"),
    ):
        if (size := engine.get(key) or 1) > 1:
            return (
                f"actor_rollout_ref.actor.torchtitan.{key}={size}: {what}, in every mode and without a word "
                f"(docs/engines.md). Set it to 1; data_parallel_shard_size is exact"
            )
    return None


def engine_fault(config: Any) -> str | None:
    """Why verl's engine itself would train wrong with this composed configuration; None if nothing is known against it."""
    return ulysses_fault(config) or torchtitan_fault(config)


@dataclass(frozen=True)
class Trainer:
    """A way verl trains, and what was run of it with our modes.

    Attributes:
        groups: how whole groups reach the update.
        test: what checks it, a test's name from the root of the repository.
        not_run: why verl itself was not run; empty if it was.
        ran: what was run of it.
    """

    groups: str
    test: str
    not_run: str = ""
    ran: str = "a few steps on the CPU"


_RUNS = "tests/trainer/test_trainers.py::"
_GROUPS = "tests/hooks/test_parallel_groups.py::"
_NOT_HERE = "the package is not in the environment; verl registers the engine for cuda and npu"
_PEERS = f"{_GROUPS}test_weights_are_the_whole_batchs_whatever_peers_hold_the_same_rows"

TRAINERS = {
    "`main_ppo`, `trainer.v1.trainer_mode=sync` (the default)": Trainer(
        "samples by prompt; a step is one update of whole groups",
        "tests/trainer/test_trainer.py::test_v1_trainer_balanced_is_zero_on_policy",
    ),
    "`main_ppo`, `trainer.v1.trainer_mode=colocate_async`": Trainer(
        "samples by prompt, once all of its rollouts have ended; dynamic sampling (`filter_groups`) replaces whole groups",
        f"{_RUNS}test_colocate_async_with_dynamic_sampling",
    ),
    "`main_ppo`, `trainer.v1.trainer_mode=separate_async`": Trainer(
        "samples by prompt; each of the parameter_sync_step updates of a step has whole groups of its own. With "
        "hybrid_engine=False it needs VERL_LOGGING_LEVEL=WARNING: a call of verl 0.9.1 that logs at INFO fails",
        f"{_RUNS}test_separate_async",
    ),
    "`main_ppo`, `trainer.use_v1=False`": Trainer(
        "generates whole groups in one batch",
        "tests/trainer/test_trainer.py::test_balanced_is_zero_on_policy_beside_a_kl_term",
    ),
    "`verl.experimental.one_step_off_policy`": Trainer(
        "generates whole groups in one batch, a step ahead. Needs trainer.rollout_data_dir=null: the trainer of verl 0.9.1 "
        "cannot dump rollouts",
        f"{_RUNS}test_one_step_off_policy",
    ),
    "`verl.experimental.fully_async_policy`": Trainer(
        "an entry of its queue is a prompt with all of its responses",
        f"{_RUNS}test_fully_async_policy_with_an_overlong_penalty",
    ),
    "sessions of several rows, failed sessions, prompts with different n, padding rows (v1)": Trainer(
        "rows with the same uid and session_id are one response; padding rows are empty and in a group of their own",
        f"{_RUNS}test_sessions_of_several_rows_with_failures_and_different_n",
    ),
    "engine FSDP2": Trainer(
        "every rank is data-parallel", "tests/trainer/test_trainer.py::test_balanced_is_zero_on_policy_beside_a_kl_term"
    ),
    "engine FSDP with Ulysses": Trainer(
        "the group excludes sequence-parallel peers, which hold the same rows. With attn_implementation sdpa, eager or "
        "flex_attention verl's Ulysses trains wrong in every mode (the gradient is off by .63): refused by `verl-ba "
        "audit` and by the recipes' plan",
        "tests/trainer/test_ulysses.py::test_ulysses_with_packed_rows_is_zero_on_policy",
    ),
    "engine Megatron": Trainer(
        "the group excludes tensor-, pipeline- and context-parallel peers, which hold the same rows; with dynamic context "
        "parallelism it is one rank, which holds the whole batch. With calculate_per_token_loss and context parallelism, "
        "verl 0.9.1 makes every gradient too large by one factor, in every mode (docs/upstream-megatron.md)",
        "tests/engines/test_megatron.py::test_gradients_and_norms_equal_the_reference",
        ran="verl's worker on CPU ranks (docs/engines.md); Transformer Engine, Megatron-Bridge and dynamic context "
        "parallelism were not run",
    ),
    "engine VeOmni": Trainer(
        "as FSDP, with or without Ulysses",
        _PEERS,
        f"{_NOT_HERE}; docs/engines.md has what a prototype measured",
    ),
    "engine torchtitan": Trainer(
        "data_parallel_shard_size alone is exact. With data_parallel_replicate_size=2 verl 0.9.1 doubles every gradient, in "
        "token-mean as well; with context parallelism it cannot train RL: both are refused by `verl-ba audit` and by the "
        "recipes' plan",
        _PEERS,
        f"{_NOT_HERE}; docs/engines.md has what a prototype measured",
    ),
    "Tinker's worker (`engine_workers_tinker`)": Trainer(
        "refused at the first loss: forward_backward goes past update_actor, so nobody sees whole groups",
        f"{_GROUPS}test_a_worker_that_goes_past_update_actor_raises",
        "verl 0.9.1 has the worker, but nothing that drives it",
    ),
}
"""verl 0.9.1's trainers, engines and kinds of batches."""


def trainers_table() -> list[tuple[str, str, str, str]]:
    """Rows of the table: what, how groups are whole, what was run, what checks it."""
    return [
        (name, t.groups, f"not run: {t.not_run}; a stand-in" if t.not_run else t.ran, f"`{t.test}`")
        for name, t in TRAINERS.items()
    ]


def markdown() -> str:
    """docs/support.md."""
    forms = {"response": "one sign per response", "token": "the sign may change within a response: token-level form"}
    sections = [
        (
            "Policy losses",
            "`actor_rollout_ref.actor.policy_loss.loss_mode`",
            ("loss", "under our modes", "what to know"),
            [(f"`{name}`", s.verdict, s.why) for name, s in POLICY_LOSSES.items()],
        ),
        (
            "Advantage estimators",
            "`algorithm.adv_estimator`; all are exact. A batch in which some response really has two signs takes the "
            "token-level form, every other batch the response form",
            ("estimator", "form"),
            [(f"`{name}`", forms[form]) for name, form in ESTIMATORS.items()],
        ),
        (
            "Everything else that meets the loss",
            "",
            ("part", "under our modes", "what to know"),
            [(name, s.verdict, s.why) for name, s in OTHER.items()],
        ),
        (
            "Trainers and engines of verl 0.9.1",
            "Pool lengths are exact if the ranks of an update together hold whole groups",
            ("trainer, engine or batch", "how groups are whole", "run", "checked by"),
            trainers_table(),
        ),
    ]
    lines = [
        "# What works under " + " and ".join(f"`{mode}`" for mode in MODES),
        "",
        "Written by `python -m verl_ba.support`: the refusals read these tables, and each row has a test on verl's own code.",
        "*exact*: value and gradient equal the formula under every split over ranks, mini- and micro-batches. *made exact*:",
        "verl names another mode there; the aggregation is ours, the rest verl's. *refused*: an error, before the first",
        "training step where the configuration shows it. Nothing is ignored.",
    ]
    for title, intro, header, rows in sections:
        lines += ["", f"## {title}", ""] + ([intro + ".", ""] if intro else [])
        lines += [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
