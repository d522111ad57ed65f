"""The program of a response, as models write it. No program is run here."""

import time

import pytest

from verl_ba.paper.scoring import code
from verl_ba.paper.scoring.fences import RESPONSE_TAIL, extract_program

RIGHT = "print(7)\n"
BLOCK = f"```python\n{RIGHT}```"

FOUND = [
    (BLOCK, "the form that the prompt asks for"),
    (f"```Python\n{RIGHT}```", "capital letters"),
    (f"```py\n{RIGHT}```", "short name"),
    (f"```python3.11\n{RIGHT}```", "a version"),
    (f"```python 3\n{RIGHT}```", "two words"),
    (f'```python title="main file.py"\n{RIGHT}```', "attributes"),
    (f"```python {{.numberLines}}\n{RIGHT}```", "attributes in braces"),
    (f"````python\n{RIGHT}````", "four backticks"),
    (f"```\n{RIGHT}```", "no language"),
    (f"{BLOCK} That is it.", "text behind the closing fence"),
    (f"```\n{RIGHT}``` That is it.", "the same without a language"),
    (f"```python\n{RIGHT.strip()}```", "the closing fence right behind the code"),
    (f"1. Here it is: {BLOCK}", "text before the opening fence"),
    (f"1. Do this:\n   ```python\n   {RIGHT}   ```", "in a list, indented"),
    (BLOCK.replace("\n", "\r\n"), "Windows' line ends"),
    (f"```c++\nint main() {{}}\n```\n{BLOCK}", "after a block whose language is not one word of letters"),
    (f"```c++\nint main() {{}}\n```\n```\n{RIGHT}```", "the same, and the program names no language"),
    (f"```sample input\n3 4\n```\n{BLOCK}", "after a block with two words"),
    (f"```sample input\n3 4\n```\n```\n{RIGHT}```", "the same, and the program names no language"),
    (f"```python\nfirst\n```\nBetter:\n{BLOCK}", "the last of two programs"),
    (f"{BLOCK}\nIt prints\n```\n7\n```", "an output behind it, which LiveCodeBench would take for the program"),
    (f"{BLOCK}\nIt prints\n```text\n7\n```", "an output that says what it is"),
    (f"```\n{RIGHT}```\nIt prints\n```text\n7\n```", "the same behind a block without a language"),
    (f"{BLOCK}\nCalled as ```main()```.", "a quotation behind it"),
    (f"{BLOCK}\nOr shorter:\n```python\nprint(", "the next block is cut off"),
    (f"<think>\n```python\nfirst try, wait\n</think>\n{BLOCK}", "a fence left open while thinking"),
    (f"<think>\n```\nfirst try, wait\n</think>\n```\n{RIGHT}```", "the same, no languages"),
    (f"<think>\n```python\nfirst try, wait\n</think>\n```\n{RIGHT}```", "the same, a language in the thinking only"),
    (f"```python\nfirst try, wait.\nAgain.\n{BLOCK}", "a fence left open, without </think>"),
    (f"```cpp\nfirst try, wait.\nAgain.\n```\n{RIGHT}```", "a fence left open: LiveCodeBench's rule"),
    (f"<think>\n{BLOCK}\n</think>\nThe program above solves it.", "in the thinking alone, as LiveCodeBench has it"),
]
NOT_FOUND = [
    ("print(7)", "no fence: the prompt asks for a block"),
    ("", "nothing"),
    ("```python\nprint(7)", "cut off"),
    ("```", "a fence alone"),
    ("```cpp\nint main() {}\n```", "another language"),
    ("```c++\nint main() {}\n```", "another language"),
    ("```pycon\n>>> 7\n```", "a session is no program"),
    ("```text\n7\n```", "an output"),
    ("Use ```print(7)``` here.", "a quotation in a line"),
    ("`print(7)`", "one backtick"),
    ("~~~python\nprint(7)\n~~~", "tildes: LiveCodeBench does not know them either"),
]
OTHERS = [
    (f"{BLOCK}\nNo, this:\n```python\nprint(8)\n```", "print(8)\n", "the last program counts, right or wrong"),
    (f"<think>\n{BLOCK}\n</think>\n```python\nprint(8)\n```", "print(8)\n", "the final part counts, not the thinking"),
    (f"<think>\n{BLOCK}\n</think>\n```\nprint(8)\n```", "print(8)\n", "the same without a language"),
    ("```python\n```", "", "an empty program"),
    ("```python\nx = 1\n```\n```python\n\n```", "\n", "the last one is empty"),
    ("  ```python\n  if x:\n    y\n  ```", "if x:\n  y\n", "indented as a whole"),
    ("```python\ns = '''\n# ~~~\n'''\n```", "s = '''\n# ~~~\n'''\n", "a string over several lines"),
]


@pytest.mark.parametrize(("response", "reason"), FOUND)
def test_the_program_is_found(response, reason):
    assert extract_program(response) == RIGHT, reason


@pytest.mark.parametrize(("response", "reason"), NOT_FOUND)
def test_there_is_no_program(response, reason):
    assert extract_program(response) is None, reason


@pytest.mark.parametrize(("response", "program", "reason"), OTHERS)
def test_this_is_the_program_and_no_other(response, program, reason):
    assert extract_program(response) == program, reason


def test_the_scorer_uses_it():
    assert code.extract_program is extract_program


def test_only_the_end_of_a_long_response_is_searched():
    assert extract_program(BLOCK + "\n" + "." * (RESPONSE_TAIL - len(BLOCK) - 1)) == RIGHT
    assert extract_program(BLOCK + "\n" + "." * RESPONSE_TAIL) is None


@pytest.mark.parametrize("text", ["```\n" * 50_000, "`" * 200_000, "```python\n" * 20_000, "</think>" * 25_000])
def test_a_strange_response_is_read_quickly(text):
    started = time.process_time()
    extract_program(text)
    assert time.process_time() - started < 2
