"""Draw docs/figures/weights.png, the README's picture: python docs/figures/weights.py

One prompt has four responses with advantages of equal size. The share of the gradient weight that each of them has under
each mode follows from `verl_ba.pool_mean_length` alone.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle

import verl_ba

LENGTH, SIGN = [10, 1000, 1000, 1000], [1, 1, -1, -1]
LABELS = ("right, 10 tokens", "right, 1,000 tokens", "wrong, 1,000 tokens", "wrong, 1,000 tokens")
COLOURS = ("#08519c", "#6baed6", "#fdae6b", "#e6550d")


def shares(mode: str) -> list[float]:
    """The share of the gradient weight of each response: w_i = T_i / ℓ̄_pool(i), divided by the sum of all."""
    weight = torch.tensor(LENGTH) / verl_ba.pool_mean_length(mode, LENGTH, ["prompt"] * len(LENGTH), SIGN)
    return (weight / weight.sum()).tolist()


def main() -> None:
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    for row, mode in enumerate(verl_ba.ALL_MODES):
        left = 0.0
        for share, colour in zip(shares(mode), COLOURS, strict=True):
            axes.barh(row, share, left=left, color=colour, edgecolor="white", height=0.7)
            if share > 0.05:
                ink = "white" if colour == COLOURS[0] else "black"
                axes.text(left + 0.01, row, f"{share:.1%}", va="center", color=ink)
            else:
                axes.annotate(f"{share:.1%}", (share, row), (2, 0), textcoords="offset points", va="center", fontsize=8)
            left += share
    axes.axvline(0.5, color="black", linestyle="--", linewidth=1)
    axes.set(yticks=range(len(verl_ba.ALL_MODES)), xlim=(0, 1), xticks=[0, 0.25, 0.5, 0.75, 1])
    axes.set_yticklabels(verl_ba.ALL_MODES, family="monospace")
    axes.set_xticklabels(["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("share of the gradient weight; right and wrong responses are equal at the dashed line")
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    figure.legend(handles, LABELS, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
