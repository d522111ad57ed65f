"""The child process that asks math-verify and pint. `pool.py` starts it and speaks to it, one JSON value per line.

A process because sympy can take for ever in one C call that no exception interrupts, and math-verify's own limit is an
alarm that only a main thread can set. Here the kernel ends the process: the timers below are never handled, so their
signals kill, whatever sympy is doing and even when the parent is gone.

Texts are parsed as math-verify parses them (latex2sympy2_extended), except that M and m stay two names. Numbers,
equations, lists and quantities are compared here, where math-verify says that wrong answers are right (`1/3000000` and
`0.0`, `a + b = 0` and `0`); all else is for math-verify's `verify`.
"""

import itertools
import json
import logging
import math
import re
import resource
import signal
import sys
from collections.abc import Iterable
from typing import Any, cast

from verl_ba.paper.scoring import answers, units
from verl_ba.paper.scoring.answers import Margin

CPU_SECONDS = 1.5
"""CPU time for one answer [s]. CPU time, so that a busy machine does not change scores."""

_WALL_SECONDS = 60.0
_MEMORY = 2 << 30  # [bytes] of address space
_DIGITS = 100_000
"""A number with more digits is not computed."""

_EQUAL = 1e-20
"""Two irrational numbers are equal if they differ by no more than this share, evaluated to 30 digits."""


def main(cpu_seconds: float) -> None:
    """Answer questions [number, gold, answer, relative, tolerances, physics] with [number, true or false]."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    for limit in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(limit, signal.SIG_DFL)  # a parent may have ignored or blocked them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)  # math-verify warns that its own limit is off
    units.load()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin:
        _set_timers(cpu_seconds, _WALL_SECONDS)
        number, gold, answer, relative, tolerances, physics = json.loads(line)
        result = answers.equal(gold, answer, relative, tolerances, judge(physics))
        _set_timers(0, 0)
        print(json.dumps([number, result]), flush=True)


def judge(physics: bool) -> answers.Judge:
    """What compares two single answers in this process. physics: see `units.read`."""

    def compare(gold: str, answer: str, margin: Margin) -> bool:
        try:
            (gold_value, gold_unit), (value, unit) = units.read(gold, physics), units.read(answer, physics)
            if gold_unit is not None and unit is not None and gold_unit != unit:
                return _same_quantity(read(gold_value), gold_unit, read(value), unit, margin)
            if (gold_value, value) != (gold, answer):
                return answers.same_value(gold_value, value, margin, symbolic)
            return symbolic(gold, answer, margin)
        except Exception:  # sympy raises anything; such an answer is not the gold one
            return False

    return compare


def _same_quantity(gold: Any, gold_unit: Any, answer: Any, unit: Any, margin: Margin) -> bool:
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    _refuse_what_is_too_large(gold)
    _refuse_what_is_too_large(answer)
    value, expected = units.convert(float(answer.evalf()), unit, gold_unit), float(gold.evalf())
    return value is not None and abs(value - expected) <= max(margin.relative, 1e-9) * abs(expected)


def symbolic(gold_text: str, answer_text: str, margin: Margin) -> bool:
    """Is one answer, without unit and percent sign, the same mathematics as the ground truth?"""
    if "\\text" in answer_text and not answers.key(answer_text).isalpha():
        return False  # what is left of \text is neither a unit nor a separator
    gold, answer = read(gold_text), read(answer_text)
    for node in (gold, answer):
        _refuse_what_is_too_large(node)
    if _is_infinite(gold, gold_text) or _is_infinite(answer, answer_text) or contradicts_itself(answer):
        return False
    return _same(gold, answer, margin)


# --------------------------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------------------------


def read(text: str) -> Any:
    """Parse one answer. Decimals become exact fractions; an error if it cannot be read."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    text = re.sub(r"\\text ?\{ ?([a-zA-Z]) ?\}", r"\1", text)
    # γ is a function for the parser, and it drops primes: γ and f' become names of their own.
    text = re.sub(r"\\([gG])amma(?![a-zA-Z])(?:_(\w|\{[^{}]*\}))?", _name_of_gamma, text)
    text = re.sub(
        r"([a-zA-Z])(?:_(\w|\{[^{}]*\}))?((?:\^ ?\{? ?(?:\\prime ?)+\}?)|'+)",
        _name_with_primes,
        text,
    )
    text = re.sub(
        r"(\d+(?:\.\d+)?) ?\^ ?(?:\\circ(?![a-zA-Z])|\{ ?\\circ ?\})", r"{(\1 \\cdot \\frac{\\pi}{180})}", text
    )
    # The whole text is the answer. Units are off: math-verify's include t, m, s, c, d, g, h, l, so that 3t would be 3.
    text = normalize_latex(text, NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none"))
    parsed: Any = latex2sympy(
        text,
        is_real=not should_treat_as_complex(text),
        convert_degrees=False,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    # In `dy/dx` y is a symbol, and sympy would say that its derivative is 0.
    parsed = parsed.replace(
        lambda node: isinstance(node, sympy.Derivative) and node.expr.is_Symbol,
        lambda node: sympy.Function("derivative")(node.expr, *itertools.chain(*node.variable_count)),
    )
    floats = parsed.atoms(sympy.Float)
    return parsed.xreplace({number: sympy.Rational(str(number)) for number in floats}) if floats else parsed


_PRIME = "prime"


def _name_with_primes(match: re.Match[str]) -> str:
    primes = match[3].count("prime") + match[3].count("'")
    return f"{match[1]}_{{{(match[2] or '').strip('{}')}{_PRIME}{primes}}}"


def _name_of_gamma(match: re.Match[str]) -> str:
    return f"{match[1]}_{{gamma{(match[2] or '').strip('{}')}}}"


def _refuse_what_is_too_large(expression: Any) -> None:
    """OverflowError before sympy would compute a number with more than _DIGITS digits, such as 9^{9^{9^9}}."""
    from sympy import factorial, postorder_traversal

    for node in cast("Iterable[Any]", postorder_traversal(expression)):
        if getattr(node, "func", None) is factorial and node.args[0].is_number and float(node.args[0]) > 20_000:
            raise OverflowError("a factorial that is too large")
        if getattr(node, "is_Pow", False) and node.is_number and node.base.is_number:
            size = abs(complex(node.base.evalf()))  # evaluated before: the traversal begins at the leaves
            if size > 0 and abs(complex(node.exp.evalf())) * abs(math.log10(size)) > _DIGITS:
                raise OverflowError("a power that is too large")


def _is_infinite(expression: Any, text: str) -> bool:
    from sympy import nan, oo, zoo

    if expression.has(nan, zoo):
        return True
    return expression.has(oo, -oo) and "inf" not in text


# --------------------------------------------------------------------------------------------------------------------
# Comparing
# --------------------------------------------------------------------------------------------------------------------


def _same(gold: Any, answer: Any, margin: Margin) -> bool:
    from math_verify import verify
    from sympy import FiniteSet, Tuple, nan, zoo

    gold_sides, sides = _sides(gold), _sides(answer)
    if gold_sides and sides:
        return _same_equation(gold_sides, sides, margin)
    if gold_sides:
        return _names_a_value(gold_sides[0]) and _same(gold_sides[-1], answer, margin)
    if sides:
        return (len(sides) > 2 or not _is_special(sides[0]) or _names_a_value(sides[0])) and _same(
            gold, sides[-1], margin
        )
    if isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet):
        left = list(answer.args)
        for one in gold.args:
            match = next((other for other in left if _same(one, other, margin)), None)
            if match is None:
                return False
            left.remove(match)
        return not left
    if isinstance(gold, Tuple) and isinstance(answer, Tuple):
        return len(gold) == len(answer) and all(_same(*pair, margin) for pair in zip(gold, answer, strict=True))
    if getattr(gold, "is_number", False) and getattr(answer, "is_number", False):
        if gold.doit().has(nan, zoo) or answer.doit().has(nan, zoo):
            return False
        return near(gold, answer, margin.relative, margin.absolute)
    if getattr(gold, "is_number", False) and not getattr(answer, "free_symbols", True):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))


def near(gold: Any, answer: Any, relative: Any, absolute: Any) -> bool:
    """Are both numbers, and |answer − gold| ≤ max(relative·|gold|, absolute)? Only zero is near zero without `absolute`."""
    from sympy import Eq, oo

    gold, answer = [side.rhs if isinstance(side, Eq) else side for side in (gold, answer)]
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    if gold.has(oo) or answer.has(oo):
        return bool(gold.doit() == answer.doit())
    gold, answer = gold.doit(), answer.doit()
    if not relative and not absolute and gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    difference, size = (answer - gold).evalf(30), gold.evalf(30)
    relative = relative or _EQUAL
    return bool(abs(difference) <= max(relative * abs(size), absolute) * (1 + 1e-9))


def contradicts_itself(answer: Any) -> bool:
    """Is it a chain with two different numbers, such as 6 = 5? math-verify would read the last side alone."""
    from sympy import Eq, preorder_traversal

    equations: list[Any] = [node for node in preorder_traversal(answer) if isinstance(node, Eq)]
    return any(
        getattr(side.lhs, "is_number", False)
        and getattr(side.rhs, "is_number", False)
        and not near(side.lhs, side.rhs, 1e-9, 1e-9)
        for side in equations
    )


def _sides(expression: Any) -> list[Any]:
    """The sides of an equation or a chain of them, the named one first; empty for what is no equation."""
    from sympy import And, Eq

    if isinstance(expression, Eq):
        sides = [expression.lhs, expression.rhs]
    elif isinstance(expression, And) and all(isinstance(part, Eq) for part in expression.args):
        chain: Any = getattr(expression, "_unsorted_args", expression.args)
        sides = [chain[0].lhs, *[part.rhs for part in chain]]
    else:
        return []
    return sides[::-1] if _names_a_value(sides[-1]) and not _names_a_value(sides[0]) else sides


def _names_a_value(side: Any) -> bool:
    """Is it what a value is called: x, f(x), dy/dx, (x, y), or a product of capitals such as the segment AB?"""
    from sympy import Tuple
    from sympy.core.function import AppliedUndef, Derivative

    if isinstance(side, Tuple):
        return all(_names_a_value(part) for part in side)
    if getattr(side, "is_Symbol", False) or isinstance(side, (AppliedUndef, Derivative)):
        return True
    if getattr(side, "is_Mul", False) or getattr(side, "is_Pow", False):
        names = [symbol.name for symbol in side.free_symbols]
        return (
            bool(names)
            and all(name[0].isupper() or len(name) > 1 for name in names)
            and not side.atoms().difference(side.free_symbols, {-1})
        )
    return False


def _is_special(expression: Any) -> bool:
    """Does it hold an applied function, a derivative or a prime? Solving for those says nothing."""
    from sympy.core.function import AppliedUndef, Derivative

    return expression.has(AppliedUndef, Derivative) or any(
        _PRIME in symbol.name or "dot{" in symbol.name for symbol in expression.free_symbols
    )


def _same_equation(gold: list[Any], answer: list[Any], margin: Margin) -> bool:
    """The same name with the same value, or left minus right equal up to a factor, or the same solutions.

    An identity such as 0 = 0 is no answer, and solutions are not asked for where functions or derivatives are unknown.
    """
    from math_verify.grader import sympy_solve_and_compare
    from sympy import Eq, Expr, simplify, solve

    equations: list[Any]

    if _names_a_value(gold[0]) and gold[0] == answer[0]:
        return _same(gold[-1], answer[-1], margin)
    if not all(isinstance(side, Expr) for side in (gold[0], gold[-1], answer[0], answer[-1])):
        return False
    differences = [simplify(side[0] - side[-1]) for side in (gold, answer)]
    if 0 in differences:
        return False
    ratio = simplify(differences[0] / differences[1])
    if ratio.is_number:
        return bool(ratio.is_finite) and ratio != 0
    equations = [Eq(side[0], side[-1], evaluate=False) for side in (gold, answer)]
    if any(_is_special(equation) for equation in equations):
        return False
    if not all(solve(equation, equation.free_symbols) for equation in equations):
        return False  # no solutions at all: nothing to compare
    try:
        return bool(sympy_solve_and_compare(equations[0], equations[1], 6, 15))
    except ValueError:  # another number of solutions
        return False


def _set_timers(cpu: float, wall: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)
