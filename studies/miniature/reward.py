"""The reward of the miniature tasks for verl, which loads `compute_score` from this file by its path."""

import json

from studies.miniature.tasks import FAMILIES, LIMIT


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """1.0 for a right answer, 0.0 for a wrong one or a response that was cut, as `train.score_rollout`.

    Args:
        data_source: the family.
        solution_str: the response without its end; one of LIMIT characters was cut.
        ground_truth: the entry, JSON.
    """
    if len(solution_str) >= LIMIT:
        return 0.0
    return float(FAMILIES[data_source].score(solution_str, json.loads(ground_truth)))
