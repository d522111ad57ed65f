"""`python -m verl_ba.metrics` prints the tables of docs/which-aggregation.md and docs/metrics.md."""

import torch

from verl_ba.metrics.definitions import metrics_markdown
from verl_ba.metrics.weights import fold, response_weights

EXAMPLE = {"length": (10, 1000, 1000, 1000), "sign": (1, 1, -1, -1)}
"""One prompt, four responses: a short and a long right one, two long wrong ones."""


def example_markdown() -> str:
    """The weights of the responses of `EXAMPLE` under each mode, as a Markdown table."""
    one_prompt = torch.zeros(len(EXAMPLE["length"]), dtype=torch.int64)
    responses = fold(EXAMPLE["length"], one_prompt, EXAMPLE["sign"])
    names = [
        f"{'right' if sign > 0 else 'wrong'}, {length:,} tokens"
        for length, sign in zip(EXAMPLE["length"], EXAMPLE["sign"], strict=True)
    ]
    lines = [f"| mode | {' | '.join(names)} | share of the wrong |", "| --- |" + " --- |" * (len(names) + 1)]
    for mode, weight in response_weights(responses).items():
        wrong = weight[responses.sign < 0].sum() / weight.sum()
        lines.append(f"| `{mode}` | {' | '.join(f'{w:.3f}' for w in weight)} | {wrong:.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(example_markdown(), metrics_markdown(), sep="\n", end="")
