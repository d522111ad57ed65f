r"""Quantities: the unit at the end of an answer, read by pint, which knows names, symbols, prefixes and conversions.

A missing unit is no fault: the question states it. That is the rule of the benchmark's authors, who take units off both
sides before they compare (Minerva, arXiv 2206.14858, appendix D.1, normalize_final_answer; for its 272 physics questions
lm_eval/tasks/ocw_courses.py, normalize_numeric, in their evaluation harness). Where both sides have a unit we compare:
1000 g is 1 kg, and 12 m is not 12 cm. What pint does not know, such as `\text{ students}`, is taken off like theirs.
"""

import re
from functools import cache
from typing import Any

_DEFINITIONS = (  # pint 0.25 has none of these, or another meaning; nominal values of IAU 2015 B3, CODATA and IAU 2012 B2
    "solar_mass = 1.98841e30 kg = M_sun",
    "solar_radius = 6.957e8 m = R_sun",
    "solar_luminosity = 3.828e26 W = L_sun",
    "earth_mass = 5.9722e24 kg = M_earth",
    "earth_radius = 6.3781e6 m = R_earth",
    "jansky = 1e-26 W / m**2 / Hz = Jy",
    "@alias astronomical_unit = AU",
)
_NO_UNITS = re.compile(
    r"(?<![a-zA-Z])(?:units?|pi|e|i|x|y|z|n)(?![a-zA-Z])"
)  # u-nit is a unit for pint, and pi a constant
_SHORT = {
    "cm",
    "mm",
    "km",
    "nm",
    "kg",
    "mg",
    "ml",
    "mL",
    "ft",
    "in",
    "lb",
    "oz",
    "mi",
    "hr",
    "eV",
    "Hz",
    "Pa",
    "kJ",
    "kW",
}
"""Outside physics, bare letters that are a unit and no product of variables; three letters and more need no list."""

_POWER = r"(?: ?\^ ?(?:\{ ?[+-]?\d+ ?\}|[+-]?\d))?"
_TEXT = r"\\(?:text|operatorname) ?\{(?:[^{}]|\{[^{}]*\})*\}"
_SYMBOL = r"\\(?:mu|Omega|ohm|AA|degree|circ)(?![a-zA-Z])"
_SOLAR = r"[MRL]_ ?\{? ?\\(?:odot|oplus|text\{sun\}) ?\}?"
_DEGREE = r"(?:\{\})? ?\^ ?(?:\\circ(?![a-zA-Z])|\{ ?\\circ ?\}) ?(?:\\text\{ ?[CFK] ?\}|[CFK](?![a-zA-Z]))?"
_BARE = r"[a-zA-Z]+"
_ATOM = rf"(?:{_TEXT}|{_SOLAR}|{_SYMBOL}|{_BARE}){_POWER}"
_GROUP = rf"(?:{_ATOM}(?: ?(?:\\cdot|\\times|[/*.])? ?{_ATOM})*)"
_QUOTIENT = rf"\\frac ?\{{ ?(?:{_GROUP}|1) ?\}} ?\{{ ?{_GROUP} ?\}}"
_ONE = rf"(?:{_QUOTIENT}|\( ?{_GROUP} ?\){_POWER}|\[ ?{_GROUP} ?\]|{_ATOM})"
_SUFFIX = re.compile(rf"(?:{_DEGREE}|(?:\\cdot|\\times|/)? ?{_ONE}(?: ?(?:\\cdot|\\times|[/*.])? ?{_ONE})*)$")
_PLAIN_VALUE = re.compile(r"[-+]?(?:[\d.\s+*/(){}^,-]|\\(?:frac|sqrt|times|cdot|pi|approx|sim)(?![a-zA-Z]))*[\d)}]\s*")
_ANGLE_OF_A_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")


@cache
def _registry() -> Any:
    import pint

    registry = pint.UnitRegistry()
    for definition in _DEFINITIONS:
        registry.define(definition)
    return registry


def load() -> None:
    """Read pint's definitions, so that the first answer does not wait for them."""
    _registry()


def read(text: str, physics: bool) -> tuple[str, Any]:
    """Split `9.6 \\text{J}` into its value as text and its unit, None if it has none that pint knows.

    physics: a single bare letter behind a number is a unit, too.
    """
    for start in range(len(text)):
        match = _SUFFIX.match(text, start)
        if not match or not text[:start].strip() or _splits_a_word(text, start):
            continue
        value, suffix = text[:start].strip(), match[0]
        degrees = bool(re.fullmatch(_DEGREE, suffix))
        if degrees and _ANGLE_OF_A_FUNCTION.search(value):
            return text, None
        marked = degrees or not re.search("[a-zA-Z]", re.sub(rf"{_TEXT}|{_SOLAR}|{_SYMBOL}|{_QUOTIENT}", "", suffix))
        if not marked and not _PLAIN_VALUE.fullmatch(value):
            continue
        unit = _parse(suffix)
        if unit is not None and (marked or _is_bare_unit(suffix, physics)):
            return value, unit
        if unit is None and re.search(r"[\d})]$|\\pi$", value) and _is_noun(suffix):
            return value, None
    return text, None


def _splits_a_word(text: str, start: int) -> bool:
    return bool(re.search(r"\\[a-zA-Z]*$", text[:start]) and text[start].isalpha()) or (
        text[start].isalpha() and text[start - 1].isalpha()
    )


def _is_bare_unit(suffix: str, physics: bool) -> bool:
    words = re.findall(r"[a-zA-Z]+", suffix)
    return physics or all(len(word) >= 3 or word in _SHORT for word in words)


def _is_noun(suffix: str) -> bool:
    words = re.sub(rf"\\text ?\{{([^{{}}]*)\}}{_POWER}", r"\1", suffix).strip(" .")
    return bool(re.fullmatch(r"[^\W\d_]+(?:[ ,.'-]+[^\W\d_]+)*", words)) and (
        suffix.startswith("\\text") or all(len(word) >= 3 for word in words.split())
    )


def _parse(suffix: str) -> Any:
    """The suffix as one of pint's units, None if pint does not know it."""
    if _NO_UNITS.search(re.sub(r"\\[a-zA-Z]+", " ", suffix)):
        return None
    text = suffix
    if re.match(rf"{_DEGREE}$", text):
        scale = re.search(r"[CFK](?=\W*$)", text)
        text = {"C": "degC", "F": "degF", "K": "kelvin"}[scale[0]] if scale else "degree"
    text = re.sub(r"([MRL])_ ?\{? ?(?:\\odot|\\text\{sun\}) ?\}?", r"\1_sun ", text)
    text = re.sub(r"([MRL])_ ?\{? ?\\oplus ?\}?", r"\1_earth ", text)
    text = re.sub(r"\\mu(?![a-zA-Z]) ?(?:\\text ?\{ ?)?([a-zA-Z])", r"{micro\1", text)
    text = re.sub(r"\\frac ?\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\} ?\{", r"(\1)/{", text)
    text = re.sub(r"\\(?:text|operatorname) ?", " ", text)
    text = re.sub(r"\\(?:Omega|ohm)", " ohm ", text)
    text = re.sub(r"\\AA|Å", " angstrom ", text)
    text = re.sub(r"\\degree|\^ ?\{? ?\\circ ?\}?", " degree ", text)
    text = re.sub(r"\\(?:cdot|times)", "*", text)
    text = re.sub(r"\^ ?\{? ?([+-]?\d+) ?\}?", r"**\1 ", text)
    text = re.sub(r"(?<=[a-zA-Z])-?\d(?![\d*])", lambda digit: f"**{digit[0]}", text)  # m2, s-1
    text = re.sub(r"\bsq\b\.?", "square", text)
    text = re.sub(r"\bcu\b\.?", "cubic", text)
    text = re.sub(r"\bunit\w*", "", text).replace("{", " ").replace("}", " ").replace("[", "(").replace("]", ")")
    text = re.sub(r"(?<=[a-zA-Z])\.(?=\s*[a-zA-Z])", "*", text).strip(" .*~")
    if text.startswith("/"):
        text = "1 " + text
    text = re.sub(r"\(\s+", "(", re.sub(r"\s+\)", ")", re.sub(r"\s+", " ", text)))
    if not re.search(r"[a-zA-Z]", text):
        return None
    try:
        unit = _registry().parse_expression(text)
        return getattr(unit, "units", None)
    except Exception:  # pint's parser raises anything on what is no unit
        return None


def convert(value: float, unit: Any, into: Any) -> float | None:
    """The value in another unit; None if the two measure different things."""
    import pint

    try:
        return float(_registry().Quantity(value, unit).to(into).magnitude)
    except (pint.DimensionalityError, OverflowError):
        return None
