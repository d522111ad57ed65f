"""The program of a response: which of its fenced blocks counts."""

import re
import textwrap

RESPONSE_TAIL = 200_000
"""Only this much of a response's end is searched for a program [characters]."""

_FENCE = re.compile("`{3,}")
_PYTHON = re.compile(r"(?:python|py)(?:\d[\d.]*)?(?=\W|$)", re.IGNORECASE)
"""What an info string (the words behind an opening fence) begins with if the block is Python: `python3.11`, `py title=a`."""


def extract_program(response: str) -> str | None:
    """Return the program of a response, None if it has none.

    LiveCodeBench takes the lines between the last two lines with a fence (lcb_runner/utils/extraction_utils.py). Our
    prompts ask for a ```python block, so the last closed block that says it is Python comes first: an example of output
    behind it does not replace it. Else the last closed block without a language counts. Where fences do not come in
    pairs, because one was left open, LiveCodeBench's rule decides. A program behind `</think>` comes before any other.
    """
    tail = response[-RESPONSE_TAIL:].replace("\r\n", "\n")
    _, thought, final = tail.rpartition("</think>")
    program = _program(final)
    return _program(tail) if thought and program is None else program


def _program(text: str) -> str | None:
    closed: list[tuple[str, str]] = []  # (info string, text) of each block
    opened: str | None = None  # the info string of the block that is open
    lines: list[str] = []  # since the last fence
    behind_fence = False
    last_two = None  # the text between the last two fences
    for line in text.split("\n"):
        fences = list(_FENCE.finditer(line))
        if len(fences) != 1:  # a line with two quotes something
            lines.append(line)
            continue
        before, info = line[: fences[0].start()], line[fences[0].end() :].strip()
        if behind_fence:
            last_two = _dedent(
                [*lines, before] if before.strip() else lines
            )  # the fence may stand right behind the code
        if opened is None or _PYTHON.match(info):
            opened = info  # a Python block opens even where another was left open
        else:
            closed.append((opened, last_two or ""))
            opened = None
        lines, behind_fence = [], True
    if opened == "" and last_two is not None:
        return last_two
    for is_wanted in (_PYTHON.match, lambda info: not info):
        programs = [program for info, program in closed if is_wanted(info)]
        if programs:
            return programs[-1]
    return None


def _dedent(lines: list[str]) -> str:
    return textwrap.dedent("".join(line + "\n" for line in lines))
