"""Read the runs of a demo: one row per arm, and a picture of the curves."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WINDOW = 5
"""Steps at either end over which the table averages."""


@dataclass(frozen=True)
class Run:
    """One arm: the steps of verl's file logger, and mean lengths from its rollout dumps."""

    arm: str
    mode: str
    steps: list[dict]
    length: dict[int, list[float]]  # sign of the advantage -> mean length of such responses at each step [tokens]

    def series(self, key: str) -> list[float]:
        return [step[key] for step in self.steps]


def read_steps(log: Path) -> list[dict]:
    """The metrics of each training step in a file of verl's `file` logger."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line["data"] for line in lines if "actor/pg_loss" in line["data"]]


def read_lengths(rollouts: Path, count_tokens: Callable[[str], int]) -> dict[int, list[float]]:
    """Mean length of the responses with positive and with negative advantage, at each step; nan where there is none.

    GRPO's advantage has the sign of score minus the group's mean. verl's dump numbers a row '<uid>_<session>_<row>'.
    """
    length: dict[int, list[float]] = {1: [], -1: []}
    for path in sorted(rollouts.glob("*.jsonl"), key=lambda p: int(p.stem)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        groups: dict[str, list[dict]] = {}
        for row in rows:
            groups.setdefault(row["uid"].rsplit("_", 2)[0], []).append(row)
        of_sign: dict[int, list[int]] = {1: [], -1: []}
        for group in groups.values():
            mean = sum(row["score"] for row in group) / len(group)
            for row in group:
                if row["score"] != mean:
                    of_sign[1 if row["score"] > mean else -1].append(count_tokens(row["output"]))
        for sign, lengths in of_sign.items():
            length[sign].append(mean_of(lengths))
    return length


def mean_of(values) -> float:
    values = [v for v in values if v == v]
    return sum(values) / len(values) if values else float("nan")


HEADER = ("arm", "loss_agg_mode", "score, first", "score, last", "abs pg_loss", "length +", "length −", "s/step")
CAPTION = (
    f"first, last: mean of {WINDOW} steps; abs pg_loss: mean of all steps; length in tokens of the responses "
    f"with positive and negative advantage: last {WINDOW} steps"
)


def row(run: Run) -> tuple[str, ...]:
    score = run.series("critic/score/mean")
    seconds = run.series("timing_s/step")
    return (
        run.arm,
        run.mode,
        f"{mean_of(score[:WINDOW]):.3f}",
        f"{mean_of(score[-WINDOW:]):.3f}",
        f"{mean_of(map(abs, run.series('actor/pg_loss'))):.1e}",
        f"{mean_of(run.length[1][-WINDOW:]):.1f}",
        f"{mean_of(run.length[-1][-WINDOW:]):.1f}",
        f"{mean_of(seconds[1:] or seconds):.2f}",  # the first step also starts the agent loop
    )


def markdown(runs: list[Run]) -> str:
    table = [HEADER, tuple("---" for _ in HEADER), *(row(run) for run in runs)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table) + "\n"


def draw(runs: list[Run], path: Path) -> None:
    """Score, |pg_loss| and lengths by sign against the step; one colour and one line style per arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Colours of the Okabe-Ito palette, told apart in greyscale by the line style as well.
    looks: dict[str, tuple[str, str]] = dict(
        zip(
            ("balanced", "token", "sequence", "verl-token"),
            (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", ":"), ("#CC79A7", "-.")),
            strict=True,
        )
    )
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for run in runs:
        colour, line = looks.get(run.arm, ("#000000", "-"))
        steps = range(1, len(run.steps) + 1)
        style = {"color": colour, "linestyle": line, "linewidth": 2}
        axes[0].plot(steps, smooth(run.series("critic/score/mean")), label=run.arm, **style)
        axes[1].plot(steps, [max(abs(x), 1e-10) for x in run.series("actor/pg_loss")], label=run.arm, **style)
        axes[2].plot(steps, smooth(run.length[-1]), **style)
        axes[2].plot(steps, smooth(run.length[1]), **{**style, "linewidth": 1})
    axes[0].set(title=f"Score (mean of {WINDOW} steps)", xlabel="step", ylabel="mean score", ylim=(0, 1))
    axes[1].set(title="|actor/pg_loss| on policy", xlabel="step", ylabel="|loss|", yscale="log")
    axes[2].set(title="Length: negatives thick, positives thin", xlabel="step", ylabel="tokens", ylim=(0, None))
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(values: list[float]) -> list[float]:
    """Mean of the last WINDOW values, fewer at the start."""
    return [mean_of(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]
