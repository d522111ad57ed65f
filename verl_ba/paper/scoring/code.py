"""LiveCodeBench: the tests of a problem, and whether a response's program passes all of them."""

import base64
import json
import zlib
from decimal import Decimal, InvalidOperation
from itertools import zip_longest

from verl_ba.paper.scoring import sandbox
from verl_ba.paper.scoring.fences import extract_program

TEST_SECONDS = 6
"""CPU time per test [s]. LiveCodeBench's runner has the default timeout=6 (lcb_runner/evaluation/testing_util.py, run_test),
an alarm on the wall clock around each test; on a machine with nothing else to do, that is CPU time and sleep."""

_PLAIN_LIMIT = 4096  # characters: above it, tests are mostly repetitive numbers that compress five times and more
_PACKED = "zlib:"


def encode_tests(inputs: list[str], outputs: list[str], fn_name: str | None = None) -> str:
    """Return the `ground_truth` of a LiveCodeBench problem: JSON, or `zlib:` and base64 of the compressed JSON.

    inputs, outputs: one string per test. With fn_name (a functional problem) an input holds one JSON value per line,
    the arguments, and an output one JSON value; else they are standard input and standard output. The same tests give
    the same string on every machine.
    """
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"LiveCodeBench tests: expected as many inputs as outputs and at least one, got {len(inputs)} inputs and "
            f"{len(outputs)} outputs"
        )
    for kind, texts in (("input", inputs), ("output", outputs)):
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"LiveCodeBench tests: {kind} {i} is a {type(text).__name__}, expected a string")
    text = json.dumps({"inputs": inputs, "outputs": outputs, "fn_name": fn_name or None}, ensure_ascii=False)
    if len(text) <= _PLAIN_LIMIT:
        return text
    return _PACKED + base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_tests(ground_truth: str) -> tuple[list[str], list[str], str | None]:
    """Return (inputs, outputs, fn_name) of what `encode_tests` wrote; ValueError if it is not that."""
    try:
        text = ground_truth
        if text.startswith(_PACKED):
            text = zlib.decompress(base64.b64decode(text.removeprefix(_PACKED), validate=True)).decode()
        tests = json.loads(text)
        inputs, outputs, fn_name = tests["inputs"], tests["outputs"], tests["fn_name"]
        if not inputs or len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise ValueError(
            f"ground truth of livecodebench: expected what verl_ba.paper.scoring.code.encode_tests returns, got "
            f"{str(ground_truth)[:80]!r} ({type(error).__name__}: {error}). Build the data set again"
        ) from error
    return inputs, outputs, fn_name


def score(response: str, ground_truth: str) -> float:
    """Return 1.0 if the program in the response passes every test, else 0.0; stops at the first failure.

    The rules are those of LiveCodeBench's runner (lcb_runner/evaluation/testing_util.py), as far as docs/sandbox.md does not
    say otherwise. A test allows TEST_SECONDS of CPU time. LiveCodeBench's second limit, 7n + 5 s of wall-clock time for n
    tests together, is never reached by programs that keep to the first, and a busy machine would reach it.
    Errors: ValueError for a ground truth that `encode_tests` did not write; SandboxError without a sandbox; MachineFault if
    the machine could not run the program to its end.
    """
    inputs, outputs, fn_name = decode_tests(ground_truth)
    code = extract_program(response)
    if code is None:
        return 0.0
    program = _whole_program(code, fn_name)
    passes = _same_output if fn_name is None else _same_value
    for test_input, expected in zip(inputs, outputs, strict=True):
        outcome = sandbox.run(program, test_input, TEST_SECONDS)
        if not outcome.ok or not passes(outcome.stdout, expected):
            return 0.0
    return 1.0


# LiveCodeBench's runner has these names ready: LeetCode's starter code uses List without importing it. Its limits on
# recursion and on the digits of an integer are these, too.
_IMPORTS = """
import sys
for _name in ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
              "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"):
    exec(f"from {_name} import *\\nimport {_name}")
sys.setrecursionlimit(50000)
sys.set_int_max_str_digits(50000)
"""

# A program may end itself, with any status: what it has printed counts.
_RUN = """
try:
    {run}
except SystemExit:
    pass
"""

# The value goes to what was standard output; whatever the program itself prints goes nowhere. The module has a name of its
# own, so that an example call under `if __name__ == "__main__"` is not run. The value counts only if it equals its own
# JSON: LiveCodeBench compares it with the expected JSON value by ==, after a tuple has become a list; numpy's numbers
# may be equal, a tuple inside a list or a dict with keys that are no strings is not.
_CALL = """
import json as _json, os as _os, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin.read().split("\\n") if line.strip()]
_result = _os.fdopen(_os.dup(1), "w")
_os.dup2(_os.open(_os.devnull, _os.O_WRONLY), 1)
_sys.modules["solution"] = _sys.modules["__main__"]
__name__ = "solution"
{run}
_function = getattr(Solution(), {fn_name!r}) if "Solution" in globals() else globals()[{fn_name!r}]
_value = _function(*_arguments)
_value = list(_value) if isinstance(_value, tuple) else _value
_text = _json.dumps(_value, default=lambda value: value.tolist() if hasattr(value, "tolist") else float(value))
if _json.loads(_text) == _value:
    _result.write(_text)
_result.close()
"""


def _whole_program(code: str, fn_name: str | None) -> str:
    # Compiled on its own, so that its `from __future__ import` may stand first.
    run = f"exec(compile({code!r}, 'solution.py', 'exec', dont_inherit=True), globals())"
    return _IMPORTS + (_RUN.format(run=run) if fn_name is None else _CALL.format(run=run, fn_name=fn_name))


def _same_output(got: str, expected: str) -> bool:
    """As LiveCodeBench's grade_stdio: line by line without outer blanks; a line may be equal as decimal numbers."""
    return all(
        a is not None and b is not None and (a.strip() == b.strip() or _same_numbers(a, b))
        for a, b in zip_longest(got.strip().split("\n"), expected.strip().split("\n"))
    )


def _same_numbers(a: str, b: str) -> bool:
    try:
        return [Decimal(word) for word in a.split()] == [Decimal(word) for word in b.split()]
    except InvalidOperation:
        return False


def _same_value(got: str, expected: str) -> bool:
    """As LiveCodeBench's grade_call_based: equal as JSON values."""
    try:
        value = json.loads(expected)
    except ValueError as error:
        raise ValueError(
            f"ground truth of livecodebench: the output of a functional test must be JSON, got {expected[:80]!r}. Build "
            "the data set again"
        ) from error
    try:
        return json.loads(got) == value
    except (ValueError, RecursionError):
        return False
