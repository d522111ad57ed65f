"""Mathematics: find the answer of a response, and compare it with the ground truth.

The answer is what stands in the last `\\boxed{…}`, which our prompts ask for, or on a later line that begins with "Answer:"
(DAPO's prompt asks for it). Nothing else is searched, so a response cannot collect answers: the last one counts, even if
it is empty or its braces never close, and all of it is compared, never a part of it. The thinking part of a response is
searched like the rest, as in verl's own scorers: a box in it counts if none follows.

Most answers are settled here, by equal text or as numbers (`answers.py`). The rest goes to math-verify in child processes
(`pool.py`, `grader.py`) that the kernel ends when one answer takes too long; that answer scores 0.
"""

import functools
import importlib.util
import re

from verl_ba.paper.scoring import answers, pool

RESPONSE_TAIL = 20_000
"""Only this much of a response's end is searched for an answer [characters]."""

ANSWER_LIMIT = 1_000
"""A longer answer is compared as text alone [characters]; the longest ground truth of the six benchmarks is shorter."""

MINERVA_RELATIVE_TOLERANCE = 1e-4
"""Relative error allowed in Minerva-MATH, as Qwen2.5-Math's evaluation (grader.py, numeric_equal)."""


def score(data_source: str, response: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1.0 if the response's answer is the ground truth, else 0.0.

    Minerva-MATH allows MINERVA_RELATIVE_TOLERANCE, and reads `9.6 J` as a quantity; elsewhere a bare letter may be a
    variable. OlympiadBench allows extra_info["tolerance"] (its field `error`): an absolute error, or several separated by
    commas, one for each answer; None or "" where the data set has none. Safe to call from any thread, under a caller's
    alarm and after a fork. Errors: ImportError without math-verify or pint, RuntimeError if their process dies.
    """
    answer = extract_answer(response)
    if answer is None:
        return 0.0
    minerva = data_source == "minerva"
    tolerance = (extra_info or {}).get("tolerance") if data_source == "olympiadbench" else None
    tolerances = () if tolerance in (None, "") else _tolerances(tolerance)
    return float(equal(ground_truth, answer, MINERVA_RELATIVE_TOLERANCE if minerva else 0.0, tolerances, minerva))


def equal(
    gold: str, answer: str, relative: float = 0.0, tolerances: tuple[float, ...] = (), physics: bool = False
) -> bool:
    """Is the answer the ground truth? Text and numbers are compared here; a child decides the rest, once (cached).

    relative: numbers may differ by this share of the ground truth's. tolerances: they may differ by this much; one for
    all answers, or one for each. physics: `9.6 J` is a quantity; else J may be a variable.
    """
    if len(answer) > ANSWER_LIMIT:
        return answer == gold
    try:
        return answers.equal(gold, answer, relative, tolerances, _undecided)
    except _UndecidedError:
        return _ask_child(gold, answer, relative, tolerances, physics)


class _UndecidedError(Exception):
    """Two texts that only a computer algebra system can compare."""


def _undecided(gold: str, answer: str, margin: answers.Margin) -> bool:
    raise _UndecidedError


@functools.lru_cache(maxsize=8192)
def _ask_child(gold: str, answer: str, relative: float, tolerances: tuple[float, ...], physics: bool) -> bool:
    missing = [package for package in ("math_verify", "pint") if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"this answer needs {' and '.join(missing)}, not installed here. Run on every node, in a checkout of verl_ba: "
            "pip install '.[paper]'"
        )
    return pool.ask(gold, answer, relative, tolerances, physics)


def _tolerances(value: object) -> tuple[float, ...]:
    try:
        tolerances = tuple(float(part) for part in str(value).split(","))
        if all(0 <= tolerance < float("inf") for tolerance in tolerances):
            return tolerances
    except ValueError:
        pass
    raise ValueError(
        f"olympiadbench: extra_info['tolerance'] must be a number or numbers separated by commas, none negative, got "
        f"{value!r}. Build the data set again"
    )


# --------------------------------------------------------------------------------------------------------------------
# The answer of a response
# --------------------------------------------------------------------------------------------------------------------

_ANSWER_LINE = re.compile(
    r"^[ \t>#*_]*(final )?answer[ \t*_]*[:：][ \t*_]*\n?(?:the final answer is:? )?(.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}[ ,]+[a-zA-Z]{2,}")  # two words side by side
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")


def extract_answer(response: str) -> str | None:
    """The content of the last \\boxed{…}, or the rest of an "Answer:" line; None without.

    Behind a box, only a line that begins with "Answer:" counts, and only if no sentence follows: the heading "Final
    Answer:" and remarks such as "Answer: the sum is five" repeat in words what the box has said.
    """
    tail = response[-RESPONSE_TAIL:]
    box = line = None
    for box in _BOX.finditer(tail):  # noqa: B007
        pass
    for line in _ANSWER_LINE.finditer(tail):  # noqa: B007
        pass
    if line is not None:
        text = line[2].removesuffix(" I hope it is correct.").strip()  # Minerva's prompt ends so
        if box is None or (line.start(2) > box.start() and not line[1] and not _SENTENCE.search(text)):
            return text or None
    if box is None or not tail[box.end() :].lstrip().startswith("{"):
        return None
    content = answers.braced(tail, tail.index("{", box.end()))
    return content.strip() or None if content is not None else None
