"""The names, units and meanings of everything that is logged under `balance/`: one table, which code, docs and tests read.

`python -m verl_ba.metrics` prints it as docs/metrics.md has it.
"""

from dataclasses import dataclass

PREFIX = "balance/"
"""The names in verl's log that are this package's begin with this."""

SIGN_NAMES = ("negative", "zero", "positive")
"""The signs of an advantage, in the order of `loss_agg.SIGNS`."""


@dataclass(frozen=True)
class Metric:
    """One logged number: `<mode>` in the name stands for `active` and for each of the four modes."""

    name: str
    unit: str
    meaning: str
    healthy: str


SIGN_METRICS = tuple(
    metric
    for sign, advantage in (
        ("positive", "positive advantage"),
        ("negative", "negative advantage"),
        ("zero", "advantage 0"),
    )
    for metric in (
        Metric(
            f"pg_loss/{sign}",
            "loss",
            f"part of `actor/pg_loss` that comes from tokens with {advantage}; the three parts add up to it",
            "0" if sign == "zero" else "minus the other sign's under `balanced` and sequence-mean, on policy",
        ),
        Metric(
            f"clip_fraction/{sign}",
            "share",
            f"tokens with {advantage} whose ratio is clipped (`actor/pg_clipfrac`); with PPO's clip, `loss_mode=vanilla`",
            "0" if sign == "zero" else "small, and alike for both signs",
        ),
        Metric(
            f"entropy/{sign}",
            "nats",
            f"mean entropy of the policy at tokens with {advantage}; where verl computes it (`calculate_entropy`)",
            "neither falling to 0 nor rising; a falling positive one: sure of what is right",
        ),
    )
)
"""Of tokens, from the losses of an update: logged by a training run, and not known to `balance_metrics`."""

REWARD_ERRORS = Metric(
    "reward_errors",
    "responses",
    "responses that are missing because their reward raised since the last step; with verl's v1 trainer",
    "0; the log has the exceptions",
)
"""Logged by the driver, which alone knows of them."""
APPLIED_RESIDUAL = Metric(
    "active/applied_residual",
    "ratio",
    "under our modes: the weights that `agg_loss` really applied, summed over micro-batches, ranks and mini-batches as the "
    "losses are; |their sum − rows that are not empty| over the latter",
    "below 1e-6, in bfloat16 below 0.06: else the log warns, and `VERL_BA_STRICT=1` ends the run",
)
"""Of the losses of an update, too."""

METRICS = (
    Metric("responses", "responses", "responses with at least one valid token", "constant"),
    Metric(
        "empty_responses",
        "responses",
        "fully masked responses, verl's padding rows among them: they weigh nothing",
        "0, or what the filters remove",
    ),
    Metric("groups", "groups", "prompts with a response that is not empty", "the configured batch size"),
    Metric("groups_mixed", "share", "groups with both signs: only these can be tilted", "not falling to 0"),
    Metric("groups_without_variance", "share", "groups whose advantages are all equal", "not rising to 1"),
    Metric(
        "lone_responses",
        "share",
        "of the responses of mixed groups, those alone with their sign: `balanced` treats them as sequence-mean does",
        "small; large where most prompts are very hard or very easy",
    ),
    Metric("response_share/positive", "share", "responses with positive advantage", "neither 0 nor 1"),
    Metric("response_share/negative", "share", "responses with negative advantage", "neither 0 nor 1"),
    Metric("response_share/zero", "share", "responses with advantage 0", "that of the groups without variance"),
    Metric("length/positive", "tokens", "mean length of the responses with positive advantage", "stable"),
    Metric("length/negative", "tokens", "mean length of the responses with negative advantage", "stable"),
    Metric(
        "length_gap/tokens",
        "tokens",
        "mean over mixed groups of (mean length of negatives − mean length of positives)",
        "near 0; if not, token modes tilt",
    ),
    Metric(
        "length_gap/ratio",
        "ratio",
        "the same two means, averaged over mixed groups, divided",
        "near 1; above 1.2, say, token modes tilt towards the negatives",
    ),
    Metric(
        "length_variation",
        "ratio",
        "standard deviation over mean of the lengths within a group and sign, pooled over all of these",
        "below 0.3, say; if above, sequence-mean starves long responses",
    ),
    Metric(
        "<mode>/gradient_share_positive",
        "share",
        "Σ|A|·w of the positive responses over that of all",
        "the positives' share of Σ|A|: 0.5 with group-centred advantages",
    ),
    Metric("<mode>/gradient_share_negative", "share", "the same for the negative responses", "1 − the other"),
    Metric(
        "<mode>/tilt",
        "share",
        "gradient_share_negative minus the negatives' share of Σ|A|: what lengths alone have moved",
        "0 under `balanced` and sequence-mean with binary rewards",
    ),
    Metric(
        "<mode>/long_to_short",
        "ratio",
        "weight of a token in the longest quarter of the responses over that of one in the shortest quarter",
        "1 under token-mean; well below 1: long responses are starved",
    ),
    Metric(
        "<mode>/moved",
        "share",
        "½Σ|A|·|w − w of the active mode| over Σ|A|·w of the active mode: what switching to this mode would move",
        "near 0: the choice does not matter here",
    ),
    Metric("<mode>/weight_max", "ratio", "largest weight of a response", "no single response rules"),
    Metric("<mode>/weight_min", "ratio", "smallest weight of a response that is not empty", "above 0"),
    Metric(
        "active/weight_residual",
        "ratio",
        "|Σw over the rows − rows that are not empty| over the latter",
        "below 1e-9: the weights are a true weighted mean",
    ),
    REWARD_ERRORS,
    APPLIED_RESIDUAL,
    *SIGN_METRICS,
)
"""Every metric that is logged, without the prefix `balance/`; `balance_metrics` returns all but those above."""


def metrics_markdown() -> str:
    """The table of `METRICS` as Markdown."""
    lines = ["| metric | unit | meaning | a healthy run |", "| --- | --- | --- | --- |"]
    for m in METRICS:
        cells = (f"`balance/{m.name}`", m.unit, m.meaning, m.healthy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
