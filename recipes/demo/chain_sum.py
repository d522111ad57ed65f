"""The demo's task: sums of several terms, from reasoning-gym, answered step by step between <answer> tags.

verl loads `compute_score` from this file by its path. A demonstration works the sum out from left to right and, at random,
repeats a line to check it, so responses to one prompt differ in length whether they are right or wrong.
"""

import random
import re

TASK = "chain_sum"
TRAIN_SEED, VALIDATION_SEED, DEMONSTRATION_SEED = 1, 2, 3


def questions(seed: int, size: int, **settings):
    """reasoning-gym entries: 'question', 'answer', and the terms in 'metadata'."""
    import reasoning_gym

    return reasoning_gym.create_dataset(TASK, seed=seed, size=size, **settings)


def demonstration(entry: dict, rng: random.Random, check: float = 0.3) -> str:
    """A right, worked answer; each line is written again with probability `check`."""
    first, *rest = re.findall(r"[+-]? ?\d+", entry["metadata"]["expression"])
    total, lines = int(first), []
    for term in rest:
        operator, value = term[0], int(term[1:])
        result = total + value if operator == "+" else total - value
        lines.append(f"{total}{operator}{value}={result}")
        while rng.random() < check:
            lines.append(lines[-1])
        total = result
    return "\n".join([*lines, f"<answer>{total}</answer>"])


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """1.0 if reasoning-gym's scorer accepts the answer, else 0.0.

    The answer is what stands between the last <answer> tags. A chat model may not know the tags (extra_info
    'answer_format' is 'number'): there the last whole number of the response counts.
    """
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(solution_str)
    if answer is None and (extra_info or {}).get("answer_format") == "number":
        numbers = re.findall(r"-?\d+", solution_str.replace(",", ""))
        answer = numbers[-1] if numbers else None
    score = reasoning_gym.get_score_answer_fn(TASK)(answer, {"answer": ground_truth})
    return float(score == 1.0)
