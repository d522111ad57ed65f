"""The prompts: one template for mathematics, two for code (with and without code to complete).

The paper does not state its template. MATH is the instruction that the model cards of Qwen2.5-Math and Qwen3 recommend
for mathematics. DAPO's files carry another one ("Answer: $Answer"): it is taken off, so that all data sets ask alike.
"""

import itertools
import re

from verl_ba.paper.data.errors import RowError

MATH = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE_END = "Reason step by step, then give the complete program in one ```python code block; the last block counts."
CODE_STDIN = (
    "{problem}\n\nWrite a Python program that reads its input from standard input and prints the answer. " + _CODE_END
)
CODE_STARTER = (
    "{problem}\n\nComplete this Python code, keeping its class and function names:\n\n```python\n{starter}\n```\n\n"
    + _CODE_END
)
GSM8K = '{problem} Let\'s think step by step and output the final answer after "####".'
"""verl's own, from examples/data_preprocess/gsm8k.py: its reward for GSM8K looks for the "####"."""

TEMPLATES = {"math": [MATH], "code": [CODE_STDIN, CODE_STARTER], "gsm8k": [GSM8K]}

_DAPO_WRAPPER = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"\$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s+(.*\S)\s+"
    r'Remember to put your answer on its own line after "Answer:"\.',
    re.DOTALL,
)


def math(problem: str) -> str:
    return MATH.format(problem=problem)


def gsm8k(problem: str) -> str:
    return GSM8K.format(problem=problem)


def code(problem: str, starter: str) -> str:
    """starter: the code to complete; empty if the program is to read standard input."""
    if starter.strip():
        return CODE_STARTER.format(problem=problem, starter=starter.rstrip())
    return CODE_STDIN.format(problem=problem)


def problem_of(prompt: str) -> str:
    """The problem in a prompt that one of the templates made; the prompt itself if none did."""
    for template in itertools.chain(*TEMPLATES.values()):
        tail = template.partition("{problem}")[2].partition("{starter}")[0].replace("{{}}", "{}")
        head, found, _ = prompt.rpartition(tail)
        if found:
            return head
    return prompt


def without_dapo_wrapper(text: str) -> str:
    """Return the problem between the two sentences that DAPO's files put around it; RowError if they are not there."""
    match = _DAPO_WRAPPER.fullmatch(text.strip())
    if not match:
        raise RowError(
            'prompt: expected a problem between "Solve the following math problem step by step. …" and "Remember to put '
            f'your answer on its own line after "Answer:".", got {text[:120]!r}'
        )
    return match.group(1)
