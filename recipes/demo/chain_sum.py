"""The demo's task: sums of several terms, from reasoning-gym, answered step by step between <answer> tags.

verl loads `compute_score` from this file by its path. The demonstrations of the warm start come from two writers: a careful
one, and one that rambles (an opening line, lines written again and again) and then gives a wrong number. So responses to
one prompt differ in length, wrong ones are longer, and there is something for reinforcement learning to find out.
"""

import random
import re

TASK = "chain_sum"
OPENING = "Hm, let me see."
TRAIN_SEED, VALIDATION_SEED, DEMONSTRATION_SEED = 1, 2, 3


def questions(seed: int, size: int, **settings):
    """reasoning-gym entries: 'question', 'answer', and the terms in 'metadata'."""
    import reasoning_gym

    return reasoning_gym.create_dataset(TASK, seed=seed, size=size, **settings)


def demonstration(entry: dict, rng: random.Random, rambling: float = 0.5, again: float = 0.15) -> str:
    """A worked answer: right, or with probability `rambling` an answer that rambles and ends on a wrong number.

    Each line is written again with probability `again`, and three times as often by the rambling writer.
    """
    first, *rest = re.findall(r"[+-]? ?\d+", entry["metadata"]["expression"])
    rambles = rng.random() < rambling
    total, lines = int(first), [OPENING] if rambles else []
    for term in rest:
        operator, value = term[0], int(term[1:])
        result = total + value if operator == "+" else total - value
        lines.append(f"{total}{operator}{value}={result}")
        while rng.random() < again * (3 if rambles else 1):
            lines.append(lines[-1])
        total = result
    if rambles:
        total += rng.choice([-2, -1, 1, 2])
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
    score = reasoning_gym.get_score_answer_fn(TASK)(answer, {"answer": ground_truth})  # pyright: ignore[reportCallIssue]  # its annotation is wrong
    return float(score == 1.0)
