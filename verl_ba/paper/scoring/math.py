"""Mathematics: find the answer of a response, and compare it with the ground truth.

The answer is what stands in the last `\\boxed{…}`, or on the last line that begins with "Answer:" (DAPO's prompt asks for
it), whichever comes later. Nothing else is searched, so a response cannot collect answers: the last one counts, even if
it is empty or its braces never close, and all of it is compared, never a part of it.

Most answers are settled here, by equal text or as numbers. The rest goes to math-verify in child processes
(`verl_ba.paper.scoring.grader`) that the kernel ends when one answer takes too long; that answer scores 0.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import queue
import re
import subprocess
import sys
from fractions import Fraction

from verl_ba.paper.scoring import grader

RESPONSE_TAIL = 20_000
"""Only this much of a response's end is searched for an answer [characters]."""

ANSWER_LIMIT = 1_000
"""A longer answer is compared as text alone [characters]; the longest ground truth of the six benchmarks is shorter."""

CHILDREN = min(4, os.cpu_count() or 1)
"""Processes with math-verify that one process (a reward worker) starts at most, each when it is first needed."""

MINERVA_RELATIVE_TOLERANCE = 1e-4
"""Relative error allowed in Minerva-MATH, as Qwen2.5-Math's evaluation (grader.py, numeric_equal)."""


def score(data_source: str, response: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1.0 if the response's answer is the ground truth, else 0.0.

    Minerva-MATH allows MINERVA_RELATIVE_TOLERANCE. OlympiadBench allows extra_info["tolerance"] (its field `error`): an
    absolute error, or several separated by commas, one for each answer; None or "" where the data set has none.
    Safe to call from any thread. Errors: ImportError without math-verify.
    """
    answer = extract_answer(response)
    if answer is None:
        return 0.0
    relative = MINERVA_RELATIVE_TOLERANCE if data_source == "minerva" else 0.0
    tolerance = (extra_info or {}).get("tolerance") if data_source == "olympiadbench" else None
    if tolerance in (None, ""):
        return float(equal(ground_truth, answer, relative))
    return float(_equal_within(ground_truth, answer, _tolerances(tolerance)))


# --------------------------------------------------------------------------------------------------------------------
# The answer of a response
# --------------------------------------------------------------------------------------------------------------------

_ANSWER_LINE = re.compile(
    r"^[ \t>#*_]*(?:final )?answer[ \t*_]*[:：][ \t*_]*\n?(?:the final answer is:? )?(.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def extract_answer(response: str) -> str | None:
    """The content of the last \\boxed{…}, or the rest of the last "Answer:" line if that comes later; None without."""
    tail = response[-RESPONSE_TAIL:]
    box = tail.rfind("\\boxed")
    line = None
    for line in _ANSWER_LINE.finditer(tail):  # noqa: B007
        pass
    if line is not None and line.start(1) > box:
        return line[1].removesuffix(" I hope it is correct.").strip() or None  # Minerva's prompt ends so
    return _boxed(tail, box + len("\\boxed")) if box >= 0 else None


def _boxed(text: str, start: int) -> str | None:
    """What stands in the braces that open at `start`, None if they do not open there or never close."""
    if not text[start:].lstrip().startswith("{"):
        return None
    depth = 0
    opening = text.index("{", start)
    for brace in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is a character
        if depth == 0:
            return text[opening + 1 : brace.start()].strip() or None
    return None


# --------------------------------------------------------------------------------------------------------------------
# Are two answers the same?
# --------------------------------------------------------------------------------------------------------------------


def equal(gold: str, answer: str, relative: float = 0.0, absolute: float = 0.0) -> bool:
    """Is the answer the ground truth? Cheap comparisons first; the others once per different pair (cached).

    relative, absolute: numbers may differ by max(relative·|gold|, absolute).
    """
    if len(answer) > ANSWER_LIMIT:
        return answer == gold
    gold, answer = _clean(gold), _clean(answer)
    if _key(gold) == _key(answer):
        return True
    if not answer:
        return False
    (gold, gold_percent), (answer, answer_percent) = _without_percent(gold), _without_percent(answer)
    if gold_percent == answer_percent:
        return _equal_clean(gold, answer, relative, absolute)
    # 50% is 0.5; and where a question asks for a percentage, the sign may be left out.
    return _equal_clean(gold, answer, relative, absolute) or (
        _equal_clean(rf"\frac{{{gold}}}{{100}}", answer, relative, absolute)
        if gold_percent
        else _equal_clean(gold, rf"\frac{{{answer}}}{{100}}", relative, absolute)
    )


def _equal_clean(gold: str, answer: str, relative: float, absolute: float) -> bool:
    if _key(gold) == _key(answer):
        return True
    if _is_words(gold):
        return False
    gold_number, answer_number = _number(gold), _number(answer)
    if gold_number is not None and answer_number is not None:
        if gold_number == answer_number:
            return True
        if relative or absolute:
            margin = max(Fraction(relative) * abs(gold_number), Fraction(absolute)) * Fraction("1.000000001")
            return abs(answer_number - gold_number) <= margin
        if "." not in gold + answer:
            return False
    bases = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if all(bases):
        return False  # math-verify drops the base
    if _NOT_ONE_ANSWER.search(answer) or (_ORDERED.fullmatch(gold) and _SET.fullmatch(answer)):
        return False
    return _ask_child(gold, answer, relative, absolute)


def _tolerances(value: object) -> list[float]:
    try:
        tolerances = [float(part) for part in str(value).split(",")]
        if all(0 <= tolerance < float("inf") for tolerance in tolerances):
            return tolerances
    except ValueError:
        pass
    raise ValueError(
        f"olympiadbench: extra_info['tolerance'] must be a number or numbers separated by commas, none negative, got "
        f"{value!r}. Build the data set again"
    )


def _equal_within(gold: str, answer: str, tolerances: list[float]) -> bool:
    """Pair each answer with one of the ground truth's that it equals within that one's tolerance, in any order."""
    golds, answers = _split(_clean(gold)), _split(_clean(answer))
    if len(tolerances) not in (1, len(golds)):
        raise ValueError(
            f"olympiadbench: {len(tolerances)} tolerances for the {len(golds)} answers of {gold!r}; expected one, or one "
            "each. Build the data set again"
        )
    if len(golds) != len(answers):
        return False
    for one, tolerance in zip(golds, itertools.cycle(tolerances), strict=False):
        match = next((other for other in answers if equal(one, other, absolute=tolerance)), None)
        if match is None:
            return False
        answers.remove(match)
    return True


def _split(text: str) -> list[str]:
    """The parts between commas that stand outside all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


# --------------------------------------------------------------------------------------------------------------------
# Reading one answer
# --------------------------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "‐": "-", "‑": "-", "，": ",", "：": ":", "（": "(", "）": ")", "％": "%", "\u00a0": " "}
    | {"∞": r"\infty ", "π": r"\pi ", "°": r"^\circ ", "×": r"\times ", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge "}
    | {"∪": r"\cup ", "∈": r"\in ", "≠": r"\ne ", "±": r"\pm ", "∅": r"\emptyset ", "²": "^2", "³": "^3"}
)
_UNITS = (  # of two letters and more: one letter may be a variable
    "cm|mm|km|kg|ft|mph|inch(?:es)?|feet|miles?|met(?:er|re)s?|units?|degrees?|radians?|dollars?|cents?|seconds?|"
    "minutes?|hours?|days?|years?"
)
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|limits|rm)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[()\[\]]|\\?\$|\*\*", ""),  # delimiters of mathematics, dollars, bold
        (r"(?<!\\)\\! *|(?<!\\)\\[,;:]|\{\\,\}", ""),
        (r"(?<!\\)\\ |~|\\q?quad(?![a-zA-Z])", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|textnormal|mbox)\s*\{", r"\\text{"),
        (r"\\text\{([a-zA-Z])\}", r"\1"),
        (r"\\text\{\s*(?:and|or)\s*\}", ","),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})", ""),
        (r"(?<=\d)[eE]([+-]?\d+)(?!\w)", r"\\times 10^{\1}"),
        (r"(?<=[\d}])\s*\\text\{[^{}\d]*\}(?:\^\{?\d\}?)?$", ""),  # a unit
        (rf"(?<=[\d}}]) ?(?:(?:square|cubic) )?(?:{_UNITS})(?:\^\{{?\d\}}?)?\.?$", ""),
        (r"\\(?:inf|infinity)(?![a-zA-Z])", r"\\infty"),
        (r"\s+", " "),
        (r"([_^])\{(\w)\}", r"\1\2"),
        (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
        (r"^(-?\d+) (\d+) ?/ ?(\d+)$", r"\1\\frac{\2}{\3}"),
    )
]
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_DECIMAL = r"(\d{1,300}\.?\d{0,300}|\.\d{1,300})"
_NUMBER = re.compile(rf"([+-]?){_DECIMAL}(?:\\(?:times|cdot)10\^\{{?([+-]?\d{{1,3}})\}}?)?")
_POWER_OF_TEN = re.compile(r"([+-]?)10\^\{?([+-]?\d{1,3})\}?")
_FRACTION = re.compile(r"([+-]?)(\d{0,300})\\frac\{([+-]?\d{1,300})\}\{([+-]?\d{1,300})\}")
_SLASH = re.compile(r"([+-]?)(\d{1,300}) ?/ ?(\d{1,300})")
_BASE = re.compile(r"\d+_\{?\d+\}?")
_ORDERED = re.compile(r"\(.*\)")
_SET = re.compile(r"\\\{.*\\\}")
# math-verify would read `5 6` as a mixed number. What \text still holds is neither a unit nor a separator.
_NOT_ONE_ANSWER = re.compile(r"\d [\d.]|\\text")


def _clean(text: str) -> str:
    """The same mathematics with fewer ways to write it."""
    text = text.translate(_CHARACTERS).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").rstrip()
    return re.sub("[, ]", "", text) if _THOUSANDS.fullmatch(text) else text


def _key(text: str) -> str:
    """What is compared as text: without blanks and \\text; a choice without its parentheses; names in one case."""
    text = _TEXT.sub(r"\1", text).strip(" \"'")
    choice = re.fullmatch(r"\(?([A-Za-z])\)?\.?", text)
    if choice:
        return choice[1].upper()
    words = " ".join(text.split())
    return words.casefold() if _WORDS.fullmatch(words) else words.replace(" ", "")


def _is_words(text: str) -> bool:
    return bool(_WORDS.fullmatch(_TEXT.sub(r"\1", text).strip()))


def _without_percent(text: str) -> tuple[str, bool]:
    bare = re.sub(r"\s*(?:\\?%|(?<=[\d\s}])per ?cent)$", "", text)
    return bare, bare != text


def _number(text: str) -> Fraction | None:
    """The value of a plain number: integer, decimal, fraction, mixed number, power of ten. Exponents are bounded."""
    if match := _SLASH.fullmatch(text):
        return _mixed(match[1], "", match[2], match[3])
    text = text.replace(" ", "")
    if match := _NUMBER.fullmatch(text):
        sign, digits, exponent = match.groups()
        return Fraction(f"{sign}{digits.rstrip('.')}e{exponent or 0}")
    if match := _POWER_OF_TEN.fullmatch(text):
        return Fraction(f"{match[1]}1e{match[2]}")
    if match := _FRACTION.fullmatch(text):
        return _mixed(*match.groups())
    return None


def _mixed(sign: str, whole: str, over: str, under: str) -> Fraction | None:
    if int(under) == 0:
        return None
    value = int(whole or 0) + Fraction(int(over), int(under))
    return -value if sign == "-" else value


# --------------------------------------------------------------------------------------------------------------------
# math-verify, in child processes
# --------------------------------------------------------------------------------------------------------------------


class _Child:
    """One process of `verl_ba.paper.scoring.grader`; started when first asked, and again after it was ended."""

    _process: subprocess.Popen[str] | None = None

    def ask(self, request: list) -> bool:
        """The child's answer; False if it was ended by its limits of time and memory."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process = None
            _close(process)
            return False
        return json.loads(line)

    def stop(self) -> None:
        """End the process, if one runs, and close the pipes to it; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _close(process)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from verl_ba.paper.scoring.grader import main; main({grader.CPU_SECONDS})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(
                f"math-verify's process could not start: exit status {_close(process)}, its own words are on stderr. "
                "Try: python -c 'import math_verify'"
            )
        self._process = process
        return process


def _close(process: subprocess.Popen[str]) -> int:
    """Close the pipes to a process that ends, and return its exit status."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # a question that it no longer read
            if pipe is not None:
                pipe.close()
    return process.wait()


_children: queue.LifoQueue[_Child] = queue.LifoQueue()  # last in, first out: no more are started than are busy at once
for _ in range(CHILDREN):
    _children.put(_Child())


@functools.lru_cache(maxsize=8192)
def _ask_child(gold: str, answer: str, relative: float, absolute: float) -> bool:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            "this answer needs math-verify, which is not installed. Run on every node, in a checkout of verl_ba: "
            "pip install '.[paper]'"
        )
    child = _children.get()
    try:
        return child.ask([gold, answer, relative, absolute])
    finally:
        _children.put(child)
