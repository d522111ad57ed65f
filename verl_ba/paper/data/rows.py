"""One row of each source, as it is published, to one question."""

import base64
import binascii
import io
import json
import math
import pickle
import zlib
from dataclasses import dataclass
from typing import Any

from verl_ba.paper.data import prompts
from verl_ba.paper.data.errors import RowError
from verl_ba.paper.scoring import answers


@dataclass(frozen=True)
class Question:
    """problem: without our template, and what makes two rows the same question. prompt: what the model is asked.

    tolerance: the absolute error that the answer allows, as OlympiadBench writes it.
    """

    problem: str
    prompt: str
    answer: str
    source_id: str | None = None
    difficulty: str | None = None
    tolerance: str | None = None


def math_question(problem: Any, answer: Any, **extra: Any) -> Question:
    problem, answer = text(problem, "problem"), text(answer, "answer")
    return Question(problem, prompts.math(problem), answer, **{key: optional(value) for key, value in extra.items()})


def dapo(row: dict) -> Question:
    """DAPO-Math-17k and AIME-2024: verl's own columns, each row many times, in DAPO's wrapper."""
    messages = row["prompt"]
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict):
        raise RowError(f"prompt: expected a list of one message with role and content, got {str(messages)[:120]!r}")
    problem = prompts.without_dapo_wrapper(text(messages[0].get("content"), "prompt"))
    reward, extra = row["reward_model"] or {}, row["extra_info"] or {}
    return math_question(problem, reward.get("ground_truth"), source_id=extra.get("index"))


def polaris(row: dict) -> Question:
    """Polaris-53K. difficulty: the share of eight answers of DeepSeek-R1-Distill-Qwen-7B that were right, as "3/8"."""
    return math_question(row["problem"], row["answer"], difficulty=row["difficulty"])


def math500(row: dict) -> Question:
    return math_question(row["problem"], row["answer"], source_id=row["unique_id"], difficulty=row["level"])


def aime25(row: dict) -> Question:
    return math_question(row["problem"], row["answer"], source_id=row["id"])


def gsm8k(row: dict) -> Question:
    """GSM8K, in verl's form: the answer is what follows the last "#### ", without commas."""
    problem, solution = text(row["question"], "question"), text(row["answer"], "answer")
    _, found, answer = solution.rpartition("#### ")
    if not found:
        raise RowError(f'answer: expected a solution that ends in "#### " and a number, got {solution[-80:]!r}')
    return Question(problem, prompts.gsm8k(problem), text(answer.replace(",", ""), "answer"))


def math_level3to5(row: dict) -> Question | None:
    """MATH: the answer is in the solution's last box. None for the easier levels, and where the level is not known."""
    level = text(row["level"], "level").removeprefix("Level ")
    if level not in ("3", "4", "5"):
        return None
    answer = last_box(text(row["solution"], "solution"))
    if answer is None:
        raise RowError(f"solution: expected an answer in \\boxed{{}}, got {row['solution'][-120:]!r}")
    return math_question(row["problem"], answer, difficulty=level)


def last_box(solution: str) -> str | None:
    """What stands in the last \\boxed{…} or \\fbox{…}; None if there is none, or it is not closed."""
    start = max(solution.rfind(f"\\{name}{{") for name in ("boxed", "fbox"))
    if start < 0:
        return None
    return answers.braced(solution, solution.index("{", start))


def minerva(row: dict) -> Question:
    return math_question(row["question"], row["answer"])


def olympiadbench(row: dict) -> Question:
    """OlympiadBench's English text-only mathematics. Several final answers are one ground truth, joined by commas."""
    answers = row["final_answer"]
    if not isinstance(answers, list):
        raise RowError(f"final_answer: expected a list of strings, got {answers!r}")
    parts = [(row.get("context") or "").strip(), text(row["question"], "question")]
    answer = ", ".join(without_dollars(text(part, "final_answer")) for part in answers)
    problem = "\n\n".join(filter(None, parts))
    return math_question(problem, answer, source_id=row["id"], tolerance=row.get("error"))


def livecodebench(row: dict) -> Question:
    """LiveCodeBench's code generation. The ground truth is its public and private tests, encoded as one string."""
    from verl_ba.paper.scoring.code import encode_tests

    problem = text(row["question_content"], "question_content")
    tests = parse_json(row["public_test_cases"], "public_test_cases") + private_tests(row["private_test_cases"])
    function = parse_json(row["metadata"], "metadata", dict).get("func_name")
    kind = "functional" if function else "stdin"
    for number, test in enumerate(tests):
        if not isinstance(test, dict) or not {"input", "output"} <= test.keys() or test.get("testtype") != kind:
            raise RowError(
                f"test {number}: expected input, output and testtype {kind!r} (metadata.func_name is {function!r}), got "
                f"{str(test)[:120]}"
            )
    try:
        answer = encode_tests([test["input"] for test in tests], [test["output"] for test in tests], function)
    except (TypeError, ValueError) as error:
        raise RowError(str(error)) from error
    prompt = prompts.code(problem, row["starter_code"] or "")
    return Question(problem, prompt, answer, optional(row["question_id"]), optional(row["difficulty"]))


def private_tests(packed: Any) -> list[dict]:
    """Return the tests of a `private_test_cases` field: JSON, or base64 of zlib of a pickled string of JSON.

    A pickle that holds anything but one string is refused: loading it could run code.
    """
    packed = text(packed, "private_test_cases")
    if packed.startswith("["):
        return parse_json(packed, "private_test_cases")
    try:
        loaded = OnlyBuiltinValues(io.BytesIO(zlib.decompress(base64.b64decode(packed, validate=True)))).load()
    except (binascii.Error, zlib.error, EOFError, pickle.UnpicklingError) as error:
        raise RowError(f"private_test_cases: expected base64 of zlib of a pickled string ({error})") from error
    if not isinstance(loaded, str):
        raise RowError(f"private_test_cases: expected a pickled string, got a {type(loaded).__name__}")
    return parse_json(loaded, "private_test_cases")


class OnlyBuiltinValues(pickle.Unpickler):
    """Loads strings, numbers and containers of them; whatever names a class or a function is an error."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"the pickle names {module_name}.{global_name}, which could run code; refused")


def text(value: Any, field: str) -> str:
    """Return value as a string without outer blanks; RowError if it is empty, nan, or neither text nor a number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"{field}: expected text, got {value!r}")
    # what pandas and Python write in the place of a value that is missing
    if str(value).strip().lower() == "nan" or (isinstance(value, float) and not math.isfinite(value)):
        raise RowError(f"{field}: expected text, got {value!r}, which stands for a missing value")
    if not (stripped := str(value).strip()):
        raise RowError(f"{field}: expected text, got {value!r}")
    return stripped


def optional(value: Any) -> str | None:
    return None if value is None else str(value)


def parse_json(value: Any, field: str, kind: type = list) -> Any:
    try:
        parsed = json.loads(value)
        if not isinstance(parsed, kind):
            raise ValueError(f"it is a {type(parsed).__name__}")
    except (TypeError, ValueError) as error:
        raise RowError(f"{field}: expected a JSON {kind.__name__}, got {str(value)[:120]!r} ({error})") from error
    return parsed


def without_dollars(answer: str) -> str:
    inner = answer[1:-1].strip()
    return inner if answer.startswith("$") and answer.endswith("$") and inner and "$" not in inner else answer
