"""Which mode's updates agree best with each other: split halves of a bank of score gradients.

On policy the gradient of an update under a mode is (1/B)·Σ_i (A_i/ℓ̄_i)·S_i. The prompts are cut into updates at random; two
updates have no prompt in common, so their noise is independent. The more their gradients agree, the more of each is signal:

    half     mean cosine of two updates
    signal   |E g|² / (E|g|² - |E g|²), the signal to noise of one update
    turn     mean cosine of an update with the same update under the current mode: 1 if switching changes nothing

No true gradient is needed. What two updates have in common need not be the gradient of the reward: a bias that a mode has in
every update counts as signal. Intervals are t intervals from a jackknife over the updates of a cut, averaged over cuts.
"""

from dataclasses import dataclass

import numpy as np
import torch

from verl_ba.aggregation import ALL_MODES, pool_mean_length
from verl_ba.tools.analysis.estimate import Estimate, jackknife_variance, t_interval
from verl_ba.tools.analysis.weighing import advantages

FEWEST = 4
"""Updates from which there are intervals worth the name."""


@dataclass(frozen=True)
class Measured:
    """Attributes: by mode; `gain`: half less that of the current mode; `useful`: groups with different scores."""

    current: str
    updates: int
    prompts: int
    useful: int
    half: dict[str, Estimate]
    signal: dict[str, Estimate]
    gain: dict[str, Estimate]
    turn: dict[str, Estimate]

    @property
    def favoured(self) -> str | None:
        """The mode with the largest half whose gain is clear of zero; None if there is none."""
        clear = [mode for mode, gain in self.gain.items() if mode != self.current and gain.low > 0]
        return max(clear, key=lambda mode: self.half[mode].value, default=None)


def coefficients(length: np.ndarray, score: np.ndarray, group: np.ndarray, advantage: str) -> np.ndarray:
    """A/ℓ̄ of every mode for one update: [modes, B]; 0 for an empty response."""
    _, local = np.unique(group, return_inverse=True)
    value = advantages(score, local, advantage)
    sign = np.sign(value).astype(np.int64)
    rows = []
    for mode in ALL_MODES:
        mean = pool_mean_length(mode, torch.from_numpy(length), torch.from_numpy(local), torch.from_numpy(sign)).numpy()
        rows.append(np.divide(value, mean, out=np.zeros_like(value), where=mean > 0))
    return np.stack(rows)


def measure(
    score_gradient: np.ndarray,
    length: np.ndarray,
    score: np.ndarray,
    group: np.ndarray,
    current: str = "token-mean",
    prompts: int = 8,
    advantage: str = "grpo",
    cuts: int = 20,
    seed: int = 0,
) -> Measured:
    """Compare the modes of `ALL_MODES`.

    Args:
        score_gradient: [R, K].
        length, score, group: of the responses [R]; the groups are numbered from 0.
        prompts: of an update. Groups of equal scores have no gradient and are left out, so these are prompts that count.
        cuts: random cuts of the prompts into updates, over which the results are averaged.

    Raises ValueError if there are fewer than `FEWEST` updates.
    """
    value = advantages(score, group, advantage)
    useful = np.unique(group[value != 0])
    updates = len(useful) // prompts
    if updates < FEWEST:
        raise ValueError(
            f"expected at least {FEWEST * prompts} prompts whose responses differ in score ({FEWEST} updates of {prompts}); "
            f"got {len(useful)} of {group.max() + 1}. Give more rollouts, or a smaller --prompts"
        )
    rng, at = np.random.default_rng(seed), ALL_MODES.index(current)
    gram = score_gradient.astype(np.float64) @ score_gradient.astype(np.float64).T
    values, variances = [], []
    for _ in range(cuts):
        parts = rng.permutation(useful)[: updates * prompts].reshape(updates, prompts)
        members = [np.flatnonzero(np.isin(group, part)) for part in parts]
        weight = np.zeros((len(ALL_MODES), updates, len(group)))
        for u, rows in enumerate(members):
            weight[:, u, rows] = coefficients(length[rows], score[rows], group[rows], advantage) / len(rows)
        inner = np.stack([w @ gram @ w.T for w in weight])  # [modes, updates, updates]
        with_current = np.einsum("mur,rs,us->mu", weight, gram, weight[at], optimize=True)
        square = np.einsum("muu->mu", inner)
        turn = with_current / np.sqrt(square * square[at])

        def of(kept: np.ndarray, inner=inner, square=square, turn=turn) -> np.ndarray:
            """[4, modes]: half, signal, gain, turn."""
            chosen, diagonal = inner[:, kept][:, :, kept], square[:, kept]
            n = len(kept)
            off = ~np.eye(n, dtype=bool)
            cosine = chosen / np.sqrt(diagonal[:, :, None] * diagonal[:, None, :])
            half, cross = cosine[:, off].mean(1), chosen[:, off].mean(1)
            noise = diagonal.mean(1) - cross
            return np.stack([half, cross / noise, half - half[at], turn[:, kept].mean(1)])

        every = np.arange(updates)
        left = np.stack([of(np.delete(every, i)) for i in every])
        values.append(of(every))
        variances.append(jackknife_variance(left))
    value, error = np.mean(values, axis=0), np.sqrt(np.mean(variances, axis=0))

    def estimates(i: int) -> dict[str, Estimate]:
        return {
            mode: t_interval(float(value[i, m]), float(error[i, m]), updates - 1) for m, mode in enumerate(ALL_MODES)
        }

    return Measured(current, updates, prompts, len(useful), *(estimates(i) for i in range(4)))
