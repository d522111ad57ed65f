"""Updates drawn from a model of lengths, and what a rule makes of them: the ground of the null model and of the map.

The model: prompt j has an accuracy q_j and a mean length; k of its G responses are correct (reward 1, the others 0); the
lengths of its right and wrong responses differ by a factor (`gap`) and are otherwise independent of correctness.
Advantages are verl's GRPO: (reward - mean)/(std + 1e-6), std with one degree of freedom lost, 0 in groups that are all right
or all wrong. Loss at ratio 1, every token's gradient alike.

Two things are measured in each group, for a rule with mean lengths ℓ̄ (a response weighs T/ℓ̄, each of its tokens 1/ℓ̄):

    push   (1/G) Σ_i A_i · s_i / ℓ̄_i · mean length     s: the score of "be long", with mean 0 in every cell
    drift  (1/G) Σ_i A_i · T_i / ℓ̄_i                   minus the loss at ratio 1; 0 if the group is balanced

and the relative push, with the true mean length of the response's prompt and sign in place of the mean of all: it leaves out
that a rule weighs the tokens of short responses more on purpose, and is the push wherever all have one mean.

The score is the derivative of the log probability of the length by the parameter that makes responses long: 1{long} - p for
two lengths, the standardised log length within the prompt and sign for log-normal ones. It has mean 0 whatever the sign, so
a push is a bias: the data say nothing about it. With a gap the push leaves out what the gap itself teaches.

Shape suffixes: U updates, P prompts (groups), B responses (P·G, the groups one after another).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import comb, inf, log, sqrt

import numpy as np
import torch

from studies.rules import Batch, State, fit
from verl_ba.tools.analysis.weighing import advantages

SHORT, LONG, P_LONG = 9, 43, 0.6
"""The two lengths [tokens] and the probability of the longer."""

LOCAL = (
    "seq-mean-token-mean",
    "group-mean-token-mean",
    "balanced",
    "leave-one-out",
    "constant",
    "delta-l-1",
    "delta-l-.75",
)
"""Rules whose ℓ̄ in a group depends on that group alone (and on a constant): an update may hold any number of groups."""

BURN_IN = 30
"""Updates before the first that counts: `doubly-averaged` remembers about ten."""


@dataclass(frozen=True)
class Setting:
    """What updates are drawn from.

    Attributes:
        size: G, responses of a group.
        prompts: P, groups of an update.
        variation: standard deviation over mean of the lengths within a prompt and sign (log-normal); None: two lengths.
        gap: mean length of the wrong over that of the right responses to the same prompt.
        accuracy, concentration: of the prompts, Beta(accuracy·concentration, (1 - accuracy)·concentration); infinite:
            all prompts alike. The default is uniform: every k from 0 to G is equally likely.
        prompt_variation: as `variation`, of the prompts' mean lengths.
        harder: a prompt of accuracy 0 is e^harder times as long as one of accuracy 1.
        mean: mean length [tokens] of a right response to a prompt of accuracy 1/2, in a log-normal setting. Nothing depends
            on it as long as no response is shorter than a token.
        advantage: one of `verl_ba.tools.analysis.weighing.ADVANTAGES`.
    """

    size: int = 8
    prompts: int = 64
    variation: float | None = None
    gap: float = 1.0
    accuracy: float = 0.5
    concentration: float = 2.0
    prompt_variation: float = 0.0
    harder: float = 0.0
    mean: float = 1000.0
    advantage: str = "grpo"


@dataclass(frozen=True)
class Update:
    """One drawn update. Arrays [B] but for `correct` [P]; all float64 but the integers of `batch`."""

    batch: Batch
    advantage: np.ndarray
    score: np.ndarray
    expected: np.ndarray  # the mean of the response's length given prompt and sign [tokens]
    correct: np.ndarray

    @property
    def size(self) -> int:
        return len(self.advantage) // len(self.correct)

    def per_group(self, value_B: np.ndarray) -> np.ndarray:
        return value_B.reshape(-1, self.size).mean(axis=1)

    def push(self, mean_length_B: np.ndarray) -> np.ndarray:
        """[P], before the factor of the mean length [1/tokens]."""
        return self.per_group(self.advantage * self.score / mean_length_B)

    def relative_push(self, mean_length_B: np.ndarray) -> np.ndarray:
        """[P]."""
        return self.per_group(self.advantage * self.score * self.expected / mean_length_B)

    def drift(self, mean_length_B: np.ndarray) -> np.ndarray:
        return self.per_group(self.advantage * self.batch.length.numpy() / mean_length_B)


def sigma(variation: float) -> float:
    """Standard deviation of the logarithm of a log-normal variable with this coefficient of variation."""
    return sqrt(log(1 + variation**2))


def variation(sigma: float) -> float:
    return sqrt(np.expm1(sigma**2))


def expected_length(setting: Setting) -> float:
    """Mean length of a response where sign and prompt do not matter [tokens]."""
    return SHORT + (LONG - SHORT) * P_LONG if setting.variation is None else setting.mean


def draw(setting: Setting, rng: np.random.Generator, correct: np.ndarray | None = None) -> Update:
    """One update; `correct` [P]: the number of right responses of each group, drawn if None."""
    size = setting.size
    if correct is None:
        accuracy = np.full(setting.prompts, setting.accuracy)
        if setting.concentration < inf:
            a = setting.accuracy * setting.concentration
            accuracy = rng.beta(a, setting.concentration - a, setting.prompts)
        correct = rng.binomial(size, accuracy)
    else:
        accuracy = correct / size
    right = np.arange(size) < correct[:, None]
    if setting.variation is None:
        long = rng.random(right.shape) < P_LONG
        return assemble(right, np.where(long, LONG, SHORT), long - P_LONG, expected_length(setting), setting.advantage)
    prompt_sigma, own_sigma = sigma(setting.prompt_variation), sigma(setting.variation)
    prompt = setting.mean * np.exp(
        setting.harder * (0.5 - accuracy) + prompt_sigma * rng.standard_normal(len(correct)) - prompt_sigma**2 / 2
    )
    expected = prompt[:, None] * np.where(right, 1.0, setting.gap)
    noise = rng.standard_normal(right.shape)
    length = expected * np.exp(own_sigma * noise - own_sigma**2 / 2)
    if length.min() < 1:
        raise ValueError(f"drawn lengths: expected at least one token; got {length.min():g}; raise the setting's mean")
    return assemble(right, length, noise, expected, setting.advantage)


def assemble(right: np.ndarray, length, score, expected, advantage: str = "grpo") -> Update:
    """An update from arrays [P, G]."""
    groups, size = right.shape
    group = np.repeat(np.arange(groups), size)
    value = advantages(right.ravel().astype(np.float64), group, advantage)
    columns = (torch.from_numpy(c) for c in (np.ravel(length), group, np.sign(value).astype(np.int64)))
    expected = np.broadcast_to(expected, right.shape)
    return Update(Batch(*columns), value, np.ravel(score), expected.ravel(), right.sum(axis=1))


def enumerate_groups(size: int, correct: Sequence[int]) -> tuple[Update, np.ndarray]:
    """Every group of two-point lengths with one of these numbers of right responses, up to the order of its responses; and
    the probability of each given its number of right ones [P]."""
    rows, chance = [], []
    for k in correct:
        for j in range(k + 1):
            for i in range(size - k + 1):  # j long right ones, i long wrong ones
                rows.append((k, j, i))
                chance.append(_binomial(k, j) * _binomial(size - k, i))
    k, j, i = (column[:, None] for column in np.array(rows).T)
    place = np.arange(size)
    right = place < k
    long = (place < j) | ((place >= k) & (place < k + i))
    return assemble(right, np.where(long, LONG, SHORT), long - P_LONG, SHORT + (LONG - SHORT) * P_LONG), np.array(
        chance
    )


def _binomial(n: int, j: int) -> float:
    return comb(n, j) * P_LONG**j * (1 - P_LONG) ** (n - j)


def mean_lengths(update: Update, rules: Iterable[str], states: dict[str, State]) -> dict[str, np.ndarray]:
    """ℓ̄ [B] [tokens] of the update under each rule. `states` is updated in place."""
    return {rule: fit(rule, update.batch, states[rule]).numpy() for rule in rules}


def new_states(setting: Setting, rules: Iterable[str]) -> dict[str, State]:
    """The rules' memories. The constant of `constant` and of ΔL is the expected length, not that of a first update."""
    return {rule: {"divisor": expected_length(setting)} for rule in rules}


@dataclass(frozen=True)
class Draws:
    """What many updates gave. Arrays [U, P] by rule.

    Attributes:
        correct: k [U, P].
        push, relative_push, drift: of each group, see above; the push with its factor.
        control: push and relative push under weights that know the true mean of every prompt and sign [2, U, P]. Their mean
            is 0, their noise much like the rules'.
        mean_length: over all responses of all updates [tokens].
    """

    correct: np.ndarray
    push: dict[str, np.ndarray]
    relative_push: dict[str, np.ndarray]
    drift: dict[str, np.ndarray]
    control: np.ndarray
    mean_length: float

    def mixed(self, setting: Setting) -> np.ndarray:
        return (self.correct > 0) & (self.correct < setting.size)


def simulate(
    setting: Setting,
    rules: Sequence[str],
    updates: int,
    rng: np.random.Generator,
    on_update: Callable[[], object] = lambda: None,
    watch: Callable[[Update, dict[str, np.ndarray]], object] = lambda update, mean: None,
) -> Draws:
    """Draw updates one after another and apply every rule, each with its own memory.

    Args:
        on_update: called after each update.
        watch: sees each update that counts and ℓ̄ by rule.
    """
    states = new_states(setting, rules)
    k, control, total = [], [], 0.0
    push, relative_push, drift = ({rule: [] for rule in rules} for _ in range(3))
    burn_in = BURN_IN if "doubly-averaged" in rules else 0
    for number in range(-burn_in, updates):
        update = draw(setting, rng)
        if number < 0:
            mean_lengths(update, ["doubly-averaged"], states)
            continue
        means = mean_lengths(update, rules, states)
        for rule, mean in means.items():
            push[rule].append(update.push(mean))
            relative_push[rule].append(update.relative_push(mean))
            drift[rule].append(update.drift(mean))
        control.append(controls(update))
        k.append(update.correct)
        total += float(update.batch.length.mean())
        watch(update, means)
        on_update()
    mean_length = expected_length(setting) if setting.variation is None else total / updates
    return Draws(
        np.array(k),
        {rule: np.array(values) * mean_length for rule, values in push.items()},
        {rule: np.array(values) for rule, values in relative_push.items()},
        {rule: np.array(values) for rule, values in drift.items()},
        np.stack(control, axis=1),
        mean_length,
    )


@dataclass(frozen=True)
class Mean:
    """A mean, its standard error (0: enumerated), and the standard deviation of what was averaged."""

    value: float
    error: float
    spread: float

    def text(self, scale: float = 1000) -> str:
        """'-177' if enumerated, '-177 ± 2.1'."""
        value = f"{round(self.value * scale):+d}" if round(self.value * scale) else "0"
        return value if self.error == 0 else f"{value} ± {self.error * scale:.1f}"


def controls(update: Update) -> np.ndarray:
    """See `Draws.control` [2, P]."""
    return np.stack([update.push(update.expected), update.relative_push(update.expected)])


def mean_with_control(value_UP: np.ndarray, control_CUP: np.ndarray, chosen_UP: np.ndarray, blocks: int = 100) -> Mean:
    """The mean of the chosen groups' values, by regression on controls whose means are 0 (C may be 0).

    The standard error is over blocks of consecutive updates: groups of one update share what the update says, and a rule
    with a memory shares it between updates.
    """
    updates = len(value_UP)
    block = np.broadcast_to((np.arange(updates) * min(blocks, updates) // updates)[:, None], chosen_UP.shape)[chosen_UP]
    value, control = value_UP[chosen_UP], control_CUP[:, chosen_UP].T
    if len(value) < 2:
        return Mean(np.nan, np.nan, np.nan)
    slope = np.linalg.lstsq(control - control.mean(axis=0), value - value.mean(), rcond=1e-9)[0]
    rest = value - control @ slope
    sums = np.bincount(block, weights=rest - rest.mean(), minlength=min(blocks, updates))
    error = sqrt((sums**2).sum() * len(sums) / (len(sums) - 1)) / len(rest) if len(sums) > 1 else np.nan
    return Mean(float(rest.mean()), error, float(value.std()))


def exact(update: Update, chance: np.ndarray, rule: str, mean_length: float) -> dict[int, Mean]:
    """k -> the push of an enumerated rule."""
    states = {rule: {"divisor": mean_length}}
    push = update.push(mean_lengths(update, [rule], states)[rule]) * mean_length
    out = {}
    for k in np.unique(update.correct):
        of_k = update.correct == k
        mean = float(chance[of_k] @ push[of_k])
        out[int(k)] = Mean(mean, 0.0, sqrt(max(chance[of_k] @ push[of_k] ** 2 - mean**2, 0)))
    return out


def at_accuracy(setting: Setting, accuracy: float) -> Setting:
    """The same with all prompts alike."""
    return replace(setting, accuracy=accuracy, concentration=inf)
