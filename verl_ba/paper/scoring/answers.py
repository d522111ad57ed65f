"""Answers as texts: fewer ways to write the same, lists, tuples and sets part by part, numbers, words and percentages.

What texts cannot settle is handed to a *judge*, a function that says whether two single answers (no lists) are the same
mathematics: `grader.py` in a child process. Nothing here imports more than the standard library.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple


class Margin(NamedTuple):
    """How far a number may be from the ground truth's: max(relative·|gold|, absolute)."""

    relative: float | Fraction = 0.0
    absolute: float | Fraction = 0.0


Judge = Callable[[str, str, Margin], bool]


def equal(gold: str, answer: str, relative: float, tolerances: Sequence[float], judge: Judge) -> bool:
    """Is the answer the ground truth? For the arguments see `verl_ba.paper.scoring.math.equal`.

    ValueError: the number of tolerances is neither one nor that of the ground truth's answers.
    """
    gold, answer = clean(gold), clean(answer)
    if not tolerances:
        return same(gold, answer, Margin(relative), judge)
    golds, answers = _split(gold), _split(answer)
    if len(tolerances) not in (1, len(golds)):
        raise ValueError(
            f"olympiadbench: {len(tolerances)} tolerances for the {len(golds)} answers of {gold!r}; expected one, or one "
            "each. Build the data set again"
        )
    margins = itertools.cycle(Margin(relative, tolerance) for tolerance in tolerances)
    return _same_in_any_order(golds, answers, margins, judge)


# --------------------------------------------------------------------------------------------------------------------
# One way to write it
# --------------------------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "‐": "-", "‑": "-", "，": ",", "：": ":", "（": "(", "）": ")", "％": "%", "\u00a0": " "}
    | {"∞": r"\infty ", "π": r"\pi ", "°": r"^\circ ", "×": r"\times ", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge "}
    | {"∪": r"\cup ", "∈": r"\in ", "≠": r"\ne ", "±": r"\pm ", "∅": r"\emptyset ", "²": "^2", "³": "^3", "′": "'"}
    | {"⁻": "^-", "¹": "1", "\u2009": " ", "\u202f": " ", "µ": r"\mu ", "μ": r"\mu ", "Ω": r"\Omega "}
)


class Rewrite(NamedTuple):
    """gold, answer: a pair that gets its right value with this rewrite only; a test tries each without it."""

    pattern: str
    replacement: str
    gold: str
    answer: str


REWRITES = (
    Rewrite(
        r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|limits)(?![a-zA-Z])", "", r"(50\%, 1)", r"\left(0.5, 1\right)"
    ),
    Rewrite(r"(?<!\\)\\[()\[\]]|\\?\$|\*\*", "", "Yes", "**Yes**"),  # delimiters of mathematics, dollars, bold
    Rewrite(r"(?<!\\)\\! *|(?<=\d)(?:\\[,;:]|\{\\,\}) *(?=\d)", "", r"1,\!000\%", "10"),
    Rewrite(r"(?<!\\)\\(?:[,;: ]|$)|~|\\q?quad(?![a-zA-Z])", " ", "70", "70\\ "),
    Rewrite(r"(?<=\d)\{,\}(?=\d)", "", r"10{,}080\%", "100.8"),
    Rewrite(r"\{ *\\(?:rm|bf|it)(?![a-zA-Z]) *([^{}]*)\}", r"\\text{\1}", "5", r"5 {\rm km}"),
    Rewrite(r"\\(?:mathrm|mathit|textbf|textit|textrm|textnormal|mbox)\s*\{", r"\\text{", "Evelyn", r"\textbf{Evelyn}"),
    Rewrite(r"^\\text\{([^{}]*)\}$", r"\1", "Anna, Bob", r"\text{Bob and Anna}"),
    Rewrite(r"[,;]?\s*\\text\{\s*(?:and|or)\s*\}", ",", "1, 2", r"1, \text{ and } 2"),
    Rewrite(r"[,;]?\s+(?:and|or)\s+", ",", "1, 2", "2 and 1"),
    Rewrite(r";", ",", "1, 2", "2; 1"),
    Rewrite(r"(?<=\d)[eE]([+-]?\d+)(?!\w)", r"\\times 10^{\1}", "4.5e33", r"4.5 \times 10^{33}"),
    Rewrite(r"([_^])\{(\w)\}", r"\1\2", "4343_6", "4343_{6}"),
    Rewrite(r"^(-?\d+) (\d+) ?/ ?(\d+)$", r"\1\\frac{\2}{\3}", r"\frac{7}{2}", "3 1/2"),
)
_COMPILED = [(re.compile(rewrite.pattern), rewrite.replacement) for rewrite in REWRITES]

_WRAPPER = re.compile(
    r"\\(?:boldsymbol|bm|pmb|mathbf|underline|uline|ensuremath|boxed|fbox|(?:text)?color(?: *\{[^{}]*\}))(?![a-zA-Z]) *"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def braced(text: str, opening: int) -> str | None:
    """What stands between the brace at `opening` and the one that closes it, None if none does."""
    depth = 0
    for brace in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is a character
        if depth == 0:
            return text[opening + 1 : brace.start()]
    return None


def clean(text: str) -> str:
    """The same mathematics with fewer ways to write it."""
    text = _unwrapped(text.translate(_CHARACTERS).strip())
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,:").rstrip()
    if _THOUSANDS_OR_LIST.fullmatch(text):
        return text
    return _THOUSANDS.sub(lambda grouped: re.sub("[, ]", "", grouped[0]), text)


def _unwrapped(text: str) -> str:
    r"""Without what only changes the look, such as \boldsymbol{…}, \underline{…} and \textcolor{red}{…}."""
    start = 0
    while wrapper := _WRAPPER.search(text, start):
        content = braced(text, wrapper.end()) if text.startswith("{", wrapper.end()) else None
        behind = text[wrapper.end() :] if content is None else content + text[wrapper.end() + len(content) + 2 :]
        text, start = text[: wrapper.start()] + behind, wrapper.start()
    return text


# --------------------------------------------------------------------------------------------------------------------
# Lists, tuples, sets, intervals
# --------------------------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?(?=$| ?(?:\\?%|\\text|[a-zA-Z]))")
_THOUSANDS_OR_LIST = re.compile(r"[1-9]\d\d(?:,[1-9]\d\d)+")
r"""`105,210` is two numbers or one. In a ground truth it is two: data sets write one as 105210, 105{,}210 or 105,\!210. In
an answer it is what the ground truth is."""
_NAMED = re.compile(r"(\(?[a-zA-Z](?:_?\w)?(?: ?, ?[a-zA-Z](?:_?\w)?)*\)?) ?(?:=|\\in(?![a-zA-Z])) ?(?=[(\[]|\\\{)")
_TOKEN = re.compile(r"\\.|[()\[\]{},]", re.DOTALL)
_LIST, _SET = "list", r"\{\}"


def same(gold: str, answer: str, margin: Margin, judge: Judge) -> bool:
    """Is a cleaned answer the cleaned ground truth? Lists and sets in any order, tuples and intervals part by part."""
    if key(gold) == key(answer):
        return True
    if not answer:
        return False
    (gold_name, gold_group, golds), (answer_name, answer_group, answers) = _parts(gold), _parts(answer)
    if len(golds) == 1 and _THOUSANDS_OR_LIST.fullmatch(answer):
        answers = [answer.replace(",", "")]
    if len(golds) == len(answers) == 1:
        return _same_single(golds[0], answers[0], margin, judge)
    if gold_name and answer_name and key(gold_name) != key(answer_name):
        return False
    loose = {_LIST, _SET}
    if gold_group in loose and answer_group in loose:
        in_order = _are_named(golds) and not _are_named(answers)  # x = 1, y = 2 and the answer 1, 2
    elif gold_group == _LIST and answer_group == "()":
        in_order = _are_named(golds)
    elif gold_group == answer_group or (gold_group == "()" and answer_group == _LIST):
        in_order = True
    elif {gold_group, answer_group} == {_LIST, "interval"} or _LIST in (gold_group, answer_group):
        return min(len(golds), len(answers)) == 1 and judge(gold, answer, margin)  # x < 3 and an interval
    else:
        return False
    if len(golds) != len(answers):
        return "\\" in gold + answer and min(len(golds), len(answers)) == 1 and judge(gold, answer, margin)
    if in_order:
        return all(same(one, other, margin, judge) for one, other in zip(golds, answers, strict=True))
    return _same_in_any_order(golds, answers, itertools.repeat(margin), judge)


def _same_in_any_order(golds: list[str], answers: list[str], margins: Iterable[Margin], judge: Judge) -> bool:
    """Pair each answer with one of the ground truth's that it equals, each once."""
    left = list(answers)
    if len(golds) != len(left):
        return False
    for gold, margin in zip(golds, margins, strict=False):
        match = next((answer for answer in left if same(gold, answer, margin, judge)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _parts(text: str) -> tuple[str, str, list[str]]:
    """Return the name that the text is given (`x` of `x ∈ (1, 2)`), its kind of bracket or _LIST, and its parts."""
    named = _NAMED.match(text)
    name, bare = (named[1], text[named.end() :]) if named else ("", text)
    opening = re.match(r"\\\{|[(\[]", bare)
    if opening and _closes_at_the_end(bare):
        closing = r"\}" if bare.endswith(r"\}") else bare[-1]
        parts = _split(bare[len(opening[0]) : len(bare) - len(closing)])
        if len(parts) > 1 or (opening[0] == r"\{" and "mid" not in bare and "|" not in bare and ":" not in bare):
            return name, opening[0] + closing, [part for whole in parts for part in _both_signs(whole)]
    return "", _LIST, [part for whole in _split(text) for part in _both_signs(whole)]


def _closes_at_the_end(text: str) -> bool:
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in ("(", "[", "{", r"\{")) - (token[0] in (")", "]", "}", r"\}"))
        if depth == 0 and token[0] != ",":
            return token.end() == len(text)
    return False


def _split(text: str) -> list[str]:
    """The parts between commas that stand outside all brackets; an empty part between two commas is none."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in ("(", "[", "{", r"\{")) - (token[0] in (")", "]", "}", r"\}"))
        if token[0] == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part] or [""]


def _both_signs(text: str) -> list[str]:
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return [text]
    signs = {"pm": "+-", "mp": "-+"}
    return [re.sub(r"\\(pm|mp)(?![a-zA-Z])", lambda sign, i=i: signs[sign[1]][i], text) for i in (0, 1)]


def _are_named(parts: list[str]) -> bool:
    return all(re.search(r"(?<![<>!\\])=", part) for part in parts)


# --------------------------------------------------------------------------------------------------------------------
# One answer
# --------------------------------------------------------------------------------------------------------------------

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*|[Nn]o")
_DECIMAL = r"(\d{1,300}\.?\d{0,300}|\.\d{1,300})"
_NUMBER = re.compile(rf"([+-]?){_DECIMAL}(?:\\(?:times|cdot)10\^\{{?([+-]?\d{{1,3}})\}}?)?")
_POWER_OF_TEN = re.compile(r"([+-]?)10\^\{?([+-]?\d{1,3})\}?")
_FRACTION = re.compile(r"([+-]?)(\d{0,300})\\frac\{([+-]?\d{1,300})\}\{([+-]?\d{1,300})\}")
_SLASH = re.compile(r"([+-]?)(\d{1,300}) ?/ ?(\d{1,300})")
_REPEATING = re.compile(r"([+-]?)(\d{0,99})\.(\d{0,99})\\overline\{?(\d{1,99})\}?")
_BASE = re.compile(r"\d+_\{?\d+\}?")
# math-verify would read `5 6` as a mixed number.
_NOT_ONE_NUMBER = re.compile(r"\d [\d.]")
_SIGNIFICANT = 6


def key(text: str) -> str:
    """What is compared as text: without blanks and \\text; a choice without its parentheses; names in one case."""
    text = _TEXT.sub(r"\1", text).strip(" \"'")
    choice = re.fullmatch(r"\(?([A-Za-z])\)?\.?", text)
    if choice:
        return choice[1].upper()
    words = " ".join(text.split())
    return words.casefold() if _WORDS.fullmatch(words) else words.replace(" ", "")


def _is_words(text: str) -> bool:
    return bool(_WORDS.fullmatch(_TEXT.sub(r"\1", text).strip()))


def _same_single(gold: str, answer: str, margin: Margin, judge: Judge) -> bool:
    (gold, gold_percent), (answer, answer_percent) = _without_percent(gold), _without_percent(answer)
    if gold_percent == answer_percent:
        return same_value(gold, answer, margin, judge)
    # 50% is 0.5; and where a question asks for a percentage, the sign may be left out.
    return same_value(gold, answer, margin, judge) or (
        same_value(rf"\frac{{{gold}}}{{100}}", answer, margin, judge)
        if gold_percent
        else same_value(gold, rf"\frac{{{answer}}}{{100}}", margin, judge)
    )


def same_value(gold: str, answer: str, margin: Margin, judge: Judge) -> bool:
    """Compare two single answers: as texts, as words, as numbers, else by the judge."""
    if key(gold) == key(answer):
        return True
    if _is_words(gold) or _NOT_ONE_NUMBER.search(answer) or not answer:
        return False
    rounded = max(_half_a_place(gold), _half_a_place(answer))
    margin = Margin(margin.relative, max(margin.absolute, rounded))
    gold_number, answer_number = number(gold), number(answer)
    if gold_number is not None and answer_number is not None:
        allowed = max(Fraction(margin.relative) * abs(gold_number), Fraction(margin.absolute))
        return abs(answer_number - gold_number) <= allowed * Fraction("1.000000001")
    if _BASE.fullmatch(gold) and _BASE.fullmatch(answer):
        return False  # math-verify drops the base
    return judge(gold, answer, margin)


def _half_a_place(text: str) -> Fraction:
    """Half of the last place of a decimal with six significant digits or more, which stands for what rounds to it; else 0.

    So 0.333333 is 1/3, as in math-verify, and 0.0000001 is not 0.0000004.
    """
    match = re.fullmatch(r"[+-]?(\d*)\.(\d+)", text.replace(" ", ""))
    if not match or len((match[1] + match[2]).lstrip("0")) < _SIGNIFICANT:
        return Fraction(0)
    return Fraction(1, 2 * 10 ** len(match[2]))


def _without_percent(text: str) -> tuple[str, bool]:
    bare = re.sub(r"\s*(?:\\?%|(?<=[\d\s}])(?:per ?cent|\\text\{ *(?:per ?cent|\\?%) *\}))$", "", text)
    return bare, bare != text


def number(text: str) -> Fraction | None:
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
    if match := _REPEATING.fullmatch(text):
        sign, whole, once, again = match.groups()
        fixed = int(whole + once or 0)
        value = Fraction(int(f"{fixed}{again}") - fixed, 10 ** len(once) * (10 ** len(again) - 1))
        return -value if sign == "-" else value
    return None


def _mixed(sign: str, whole: str, over: str, under: str) -> Fraction | None:
    if int(under) == 0:
        return None
    value = int(whole or 0) + Fraction(int(over), int(under))
    return -value if sign == "-" else value
