"""The tasks: prompts with checkable answers, and writers whose demonstrations fix how length and correctness go together.

A response writes, for each step of its prompt, a label A, B, C, …, the step's result, and then any number of fillers '.',
which say nothing: `A4..B2.C5=5`. Only what follows the last '=' is scored. Two writers give the demonstrations of the warm
start: a careful one, and one that rambles (it opens with '~' and writes more fillers). Both know a fixed share of all facts
wrongly: at these *weak* facts they mostly write the same wrong result, which is what the model has to unlearn. Elsewhere they
slip now and then.

Families:
    mod7      a value and letters, each a function v -> (m·v + k) mod 7, applied in turn; scored here
    sorting   reasoning-gym's number_sorting (digits, up or down), scored by reasoning-gym
    reversal  reasoning-gym's spell_backward, scored by reasoning-gym

The model sees what differs between the prompts of a family, not reasoning-gym's English around it.

Relations:
    negatives    wrong answers are longer: the rambling writer mostly changes its answer to a wrong one
    positives    right answers are longer: the careful writer mostly changes its answer to a wrong one
    independent  lengths vary, and the two writers are right equally often; all fillers stand before the first step, since
                 between two steps they make it harder to find the last result
    prompts      one writer; prompts have few or many steps, so that the hard ones are the long ones
"""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

LABELS = "ABCDEFGHIJ"
LIMIT = 48
"""Of a response [characters]."""


@dataclass(frozen=True)
class Cell:
    """A task at one difficulty.

    Attributes:
        family, relation: see above.
        steps: fewest and most steps of a prompt.
        weak: share of weak facts. There writers err with probability `weak_slip`, always in the same way; elsewhere with
            probability `slip`, in any way.
        ramble: share of the rambling writer.
        wrong: probability that a response ends on a wrong answer; in the relation `negatives` the rambling writer's, in
            `positives` the careful writer's.
        fillers: mean number after a step, of the careful and of the rambling writer.
        warm_steps: of the supervised warm start.
        warm_starts: how many there are; a run with seed s starts from number s mod warm_starts.
    """

    name: str
    family: str
    relation: str
    steps: tuple[int, int]
    weak: float
    weak_slip: float = 0.75
    slip: float = 0.08
    ramble: float = 0.5
    wrong: float = 0.0
    fillers: tuple[float, float] = (0.3, 3.0)
    warm_steps: int = 600
    warm_starts: int = 2


Slip = Callable[[str, Sequence[str]], str]
"""(fact, its right result and then the wrong ones) -> the result that is written."""


@dataclass(frozen=True)
class Family:
    """How to make prompts, work them out, and score.

    Attributes:
        entries: (seed, size, steps) -> reasoning-gym entries or alike, JSON.
        prompt: the entry in the model's characters.
        work: (entry, slip) -> results of the steps, and the answer that follows from them.
        score: (response, entry) -> whether the answer is right.
        width: longest prompt of so many steps [characters].
        pad: where a shorter prompt gets its spaces, so that step k is read at the same place in every prompt.
    """

    entries: Callable[[int, int, tuple[int, int]], list[dict]]
    prompt: Callable[[dict], str]
    work: Callable[[dict, Slip], tuple[list[str], str]]
    score: Callable[[str, dict], bool]
    width: Callable[[int], int]
    pad: Callable[[str, int], str] = str.ljust


def _answer(response: str) -> str | None:
    return response.rpartition("=")[2] if "=" in response else None


# --------------------------------------------------------------------------------------------------------------------

FUNCTIONS = {letter: (1 + (3 * i + 1) % 6, (5 * i + 2) % 7) for i, letter in enumerate("abcdef")}
"""Of mod7: letter x stands for v -> (multiplier · v + addend) mod 7."""


def _mod7_entries(seed: int, size: int, steps: tuple[int, int]) -> list[dict]:
    rng = random.Random(seed)
    entries = []
    for _ in range(size):
        first, letters = rng.randrange(7), "".join(rng.choices(list(FUNCTIONS), k=rng.randint(*steps)))
        value = first
        for letter in letters:
            value = _apply(letter, value)
        entries.append({"first": first, "letters": letters, "answer": str(value)})
    return entries


def _apply(letter: str, value: int) -> int:
    multiplier, addend = FUNCTIONS[letter]
    return (multiplier * value + addend) % 7


def _mod7_work(entry: dict, slip: Slip) -> tuple[list[str], str]:
    value, results = entry["first"], []
    for letter in entry["letters"]:
        right = _apply(letter, value)
        results.append(slip(f"{letter}{value}", [str((right + i) % 7) for i in range(7)]))
        value = int(results[-1])
    return results, str(value)


# --------------------------------------------------------------------------------------------------------------------


@functools.cache
def _gym_scorer(dataset: str) -> Callable:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)


def _gym_entries(dataset: str, seed: int, size: int, **settings) -> list[dict]:
    import reasoning_gym

    rows = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **settings)
    kept = ("original_numbers", "direction", "word")
    return [
        {"answer": row["answer"], "metadata": {k: v for k, v in row["metadata"].items() if k in kept}} for row in rows
    ]


def _digits(entry: dict) -> list[int]:
    return [int(float(number)) for number in entry["metadata"]["original_numbers"]]


def _sorting_entries(seed: int, size: int, steps: tuple[int, int]) -> list[dict]:
    numbers = {"min_numbers": steps[0], "max_numbers": steps[1], "min_value": 0.0, "max_value": 9.0}
    return _gym_entries("number_sorting", seed, size, min_decimals=0, max_decimals=0, **numbers)


def _sorting_prompt(entry: dict) -> str:
    return ("<" if entry["metadata"]["direction"] == "ascending" else ">") + "".join(map(str, _digits(entry)))


def _sorting_work(entry: dict, slip: Slip) -> tuple[list[str], str]:
    direction = entry["metadata"]["direction"]
    before, results = direction[0], []  # wrong digits are 3 and more off: the scorer takes a sorted list that is 1 off
    for digit in sorted(_digits(entry), reverse=direction != "ascending"):
        results.append(slip(f"{before}{digit}", [str((digit + i) % 10) for i in (0, 5, 3, 4, 6, 7)]))
        before = str(digit)
    return results, "".join(results)


def _sorting_score(response: str, entry: dict) -> bool:
    answer = _answer(response)
    return answer is not None and _gym_scorer("number_sorting")(json.dumps([f"{d}.0" for d in answer]), entry) == 1.0


# --------------------------------------------------------------------------------------------------------------------


def _reversal_entries(seed: int, size: int, steps: tuple[int, int]) -> list[dict]:
    return _gym_entries("spell_backward", seed, size, min_word_len=steps[0], max_word_len=steps[1])


def _reversal_work(entry: dict, slip: Slip) -> tuple[list[str], str]:
    results, before = [], ""
    for letter in reversed(entry["metadata"]["word"].lower()):
        at = ascii_lowercase.index(letter)
        results.append(slip(f"{before}{letter}", ascii_lowercase[at:] + ascii_lowercase[:at]))
        before = letter
    return results, "".join(results)


def _reversal_score(response: str, entry: dict) -> bool:
    return _gym_scorer("spell_backward")(_answer(response), entry) == 1.0


# --------------------------------------------------------------------------------------------------------------------

FAMILIES = {
    "mod7": Family(
        _mod7_entries,
        lambda entry: f"{entry['first']}{entry['letters']}",
        _mod7_work,
        lambda response, entry: _answer(response) == entry["answer"],
        lambda steps: 1 + steps,
    ),
    "sorting": Family(_sorting_entries, _sorting_prompt, _sorting_work, _sorting_score, lambda steps: 1 + steps),
    "reversal": Family(
        _reversal_entries,
        lambda entry: entry["metadata"]["word"].lower(),
        _reversal_work,
        _reversal_score,
        lambda steps: steps,
        str.rjust,
    ),
}
"""Every family, by name."""


@functools.cache
def _place(fact: str) -> float:
    """A number in [0, 1) that depends on nothing else."""
    return int.from_bytes(hashlib.sha256(fact.encode()).digest()[:4], "big") / 2**32


def demonstration(cell: Cell, entry: dict, rng: random.Random) -> str:
    """A response as one of the two writers gives it, without the newline."""
    rambles = cell.relation != "prompts" and rng.random() < cell.ramble

    def slip(fact: str, results: Sequence[str]) -> str:
        weak = _place(f"{cell.family} {fact}") < cell.weak
        if rng.random() >= (cell.weak_slip if weak else cell.slip):
            return results[0]
        return results[1] if weak else rng.choice(results[1:])

    results, answer = FAMILIES[cell.family].work(entry, slip)
    slips_at_the_end = not rambles if cell.relation == "positives" else rambles
    if slips_at_the_end and rng.random() < cell.wrong:
        place = rng.randrange(len(answer))
        others = [c for c in (ascii_lowercase if answer.isalpha() else "0123456") if c != answer[place]]
        answer = answer[:place] + rng.choice(others) + answer[place + 1 :]
    more = 1 - 1 / (1 + cell.fillers[rambles])  # of a geometric number of fillers
    parts = []
    for label, result in zip(LABELS, results, strict=False):
        parts.append(label + result)
        while rng.random() < more:
            parts.append(".")
    if cell.relation == "independent":
        parts.sort(key=lambda part: part != ".")  # fillers first
    return "~" * rambles + "".join(parts) + "=" + answer


def score(cell: Cell, response: str, entry: dict) -> bool:
    return FAMILIES[cell.family].score(response, entry)
