"""The child process that asks math-verify. `verl_ba.paper.scoring.math` starts it and speaks to it, one JSON value per line.

A process because sympy can take for ever in one C call that no exception interrupts (`9^{9^{9^9}}`), and math-verify's
own limit is an alarm that only a main thread can set. Here the kernel ends the process: the timers below are never
handled, so their signals kill, whatever sympy is doing and even when the parent is gone.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

CPU_SECONDS = 5.0
"""CPU time for one answer [s], math-verify's own default. CPU time, so that a busy machine does not change scores."""

_WALL_SECONDS = 60.0
_MEMORY = 2 << 30  # [bytes] of address space


def main(cpu_seconds: float) -> None:
    """Answer requests [gold, answer, relative, absolute] with true or false until standard input ends."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # math-verify warns that its own limit is off
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # The whole text is the answer: no second try with a number that stands somewhere inside it.
    # Its units are off: they include t, m, s, c, d, g, h, l, so that 3t would be 3. Ours are in math.py.
    reading = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    whole = [LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=reading)]

    no_limit: Any = None  # documented by math-verify, but not in its annotation

    def read(text: str) -> Any:
        parsed = parse(f"\\boxed{{{text}}}", whole, "no_fallback", "first_match", parsing_timeout=no_limit)
        return parsed[0] if parsed else None

    def equal(gold_text: str, answer_text: str, relative: float, absolute: float) -> bool:
        gold, answer = read(gold_text), read(answer_text)
        if gold is None or answer is None or contradicts_itself(answer):
            return False
        if verify(gold, answer, timeout_seconds=None):
            return True
        return (relative > 0 or absolute > 0) and near(gold, answer, relative, absolute)

    print("ready", flush=True)
    for line in sys.stdin:
        _set_timers(cpu_seconds, _WALL_SECONDS)
        try:
            result = equal(*json.loads(line))
        except (Exception, RecursionError, MemoryError):  # sympy raises anything; such an answer is not the gold one
            result = False
        _set_timers(0, 0)
        print(json.dumps(result), flush=True)


def near(gold: Any, answer: Any, relative: float, absolute: float) -> bool:
    """Are both numbers, and |answer − gold| ≤ max(relative·|gold|, absolute)?"""
    from sympy import Eq

    gold, answer = [side.rhs if isinstance(side, Eq) else side for side in (gold, answer)]
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    gold, answer = complex(gold.evalf(20)), complex(answer.evalf(20))
    return abs(answer - gold) <= max(relative * abs(gold), absolute) * (1 + 1e-9)


def contradicts_itself(answer: Any) -> bool:
    """Is it a chain with two different numbers, such as 6 = 5? math-verify would read the last side alone."""
    from sympy import Eq, preorder_traversal

    equations = [node for node in preorder_traversal(answer) if isinstance(node, Eq)]
    return any(
        getattr(side.lhs, "is_number", False)
        and getattr(side.rhs, "is_number", False)
        and not near(side.lhs, side.rhs, 1e-9, 1e-9)
        for side in equations
    )


def _set_timers(cpu: float, wall: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)
