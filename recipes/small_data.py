"""Small files in each source's own format, with easy questions: for tests, and for trying the whole pipeline out."""

import base64
import json
import pickle
import random
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ba.paper.data.sources import SOURCES

DAPO_WRAPPER = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its own line "
    'after "Answer:".'
)
# (title, statement, starter code, tests, a program that passes); without starter code a program reads standard input.
PROGRAMS = (
    ("sum", "Print the sum of the two integers on one line.", "", [("1 2\n", "3\n"), ("-5 5\n", "0\n")],
     "a, b = map(int, input().split())\nprint(a + b)"),
    ("longest", "Print the length of the longest word of the line.", "", [("a bcd ef\n", "3\n"), ("x\n", "1\n")],
     "print(max(map(len, input().split())))"),
    ("even", "The first line is n, the second has n integers. Print how many are even.", "",
     [("3\n1 2 4\n", "2\n"), ("1\n7\n", "0\n")], "input()\nprint(sum(int(x) % 2 == 0 for x in input().split()))"),
    ("reverse", "Print the line backwards.", "", [("abc\n", "cba\n"), ("level\n", "level\n")], "print(input()[::-1])"),
    ("squares", "Given n, print the squares of 1 to n, one on each line.", "", [("3\n", "1\n4\n9\n"), ("1\n", "1\n")],
     "for i in range(1, int(input()) + 1):\n    print(i * i)"),
    ("addTwo", "Return the sum of a and b.", "class Solution:\n    def addTwo(self, a: int, b: int) -> int:\n        ",
     [("1\n2", "3"), ("-1\n1", "0")], "class Solution:\n    def addTwo(self, a: int, b: int) -> int:\n        return a + b"),
    ("maxOf", "Return the largest number of nums.",
     "class Solution:\n    def maxOf(self, nums: List[int]) -> int:\n        ", [("[1, 3, 2]", "3"), ("[-4]", "-4")],
     "class Solution:\n    def maxOf(self, nums):\n        return max(nums)"),
    ("shout", "Return s in capital letters.", "class Solution:\n    def shout(self, s: str) -> str:\n        ",
     [('"abc"', '"ABC"'), ('""', '""')], "class Solution:\n    def shout(self, s):\n        return s.upper()"),
)  # fmt: skip
SOLUTIONS = {title: program for title, _, _, _, program in PROGRAMS}


def questions(seed: int, size: int) -> list[tuple[str, str]]:
    """Different questions of arithmetic and geometry with whole numbers as answers."""
    rng, found = random.Random(seed), {}
    while len(found) < size:
        a, b, c = (rng.randint(2, 30) for _ in range(3))
        found.update(
            [
                rng.choice(
                    [
                        (f"What is ${a} + {b} - {c}$?", a + b - c),
                        (f"What is ${a} \\cdot {b}$?", a * b),
                        (f"A rectangle has sides {a} and {b}. What is its perimeter?", 2 * (a + b)),
                        (f"A triangle has base {2 * a} and height {b}. What is its area?", a * b),
                        (f"What is the remainder when {a * b + c} is divided by {a}?", (a * b + c) % a),
                    ]
                )
            ]
        )
    return [(problem, str(answer)) for problem, answer in found.items()]


def packed_tests(tests: list[dict]) -> str:
    """`private_test_cases` as LiveCodeBench writes them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def dapo_rows(seed: int, size: int, copies: int) -> list[dict]:
    return [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": DAPO_WRAPPER.format(problem), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{seed}-{number}"},
        }
        for number, (problem, answer) in enumerate(questions(seed, size))
    ] * copies


def gsm8k_rows(seed: int, size: int) -> list[dict]:
    return [
        {"question": problem, "answer": f"It is {answer}.\n#### {int(answer):,}"}
        for problem, answer in questions(seed, size)
    ]


def code_rows() -> list[dict]:
    rows = []
    for title, statement, starter, tests, _ in PROGRAMS:
        kind = "functional" if starter else "stdin"
        cases = [{"input": given, "output": expected, "testtype": kind} for given, expected in tests]
        rows.append(
            {
                "question_title": title,
                "question_content": statement,
                "platform": "leetcode" if starter else "atcoder",
                "question_id": title,
                "contest_id": "small",
                "contest_date": "2025-02-01T00:00:00",
                "starter_code": starter,
                "difficulty": "easy",
                "public_test_cases": json.dumps(cases[:1]),
                "private_test_cases": packed_tests(cases[1:]),
                "metadata": json.dumps({"func_name": title} if starter else {}),
            }
        )
    return rows


def small_rows() -> dict[str, list[dict]]:
    """Rows of every source, in its own columns."""
    return {
        "dapo17k": dapo_rows(1, 32, copies=3),
        "polaris": [
            {"problem": problem, "answer": answer, "difficulty": f"{number % 8}/8"}
            for number, (problem, answer) in enumerate(questions(2, 32))
        ],
        "math500": [
            {
                "problem": problem,
                "solution": f"\\boxed{{{answer}}}",
                "answer": answer,
                "subject": "Prealgebra",
                "level": 1,
                "unique_id": f"test/prealgebra/{number}.json",
            }
            for number, (problem, answer) in enumerate(questions(3, 24))
        ],
        "aime24": dapo_rows(4, 20, copies=2),
        "aime25": [
            {"problem": problem, "answer": answer, "id": str(number)}
            for number, (problem, answer) in enumerate(questions(5, 20))
        ],
        "olympiadbench": [
            {
                "id": number,
                "question": problem,
                "solution": [answer],
                "final_answer": [f"${answer}$"],
                "context": "All numbers are integers." if number % 2 else None,
                "error": "1e-1" if number % 3 else None,
                "modality": "Text-only",
                "language": "English",
            }
            for number, (problem, answer) in enumerate(questions(6, 20))
        ],
        "minerva": [{"question": problem, "answer": answer} for problem, answer in questions(7, 20)],
        "livecodebench": code_rows(),
        "gsm8k": gsm8k_rows(8, 32),
        "gsm8k_test": gsm8k_rows(9, 20),
        "math": [
            {
                "problem": problem,
                "solution": f"So it is \\boxed{{{answer}}}.",
                "level": f"Level {1 + n % 5}",
                "type": "Algebra",
            }
            for n, (problem, answer) in enumerate(questions(10, 70))
        ],
    }


def write_source(name: str, rows: list[dict], folder: Path) -> Path:
    """Write rows as the files that `verl-ba data NAME --from folder` reads, in equal parts; the first one's path."""
    files = SOURCES[name].files
    for part, file in enumerate(files):
        path = folder / SOURCES[name].repository / file
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = rows[part * len(rows) // len(files) : (part + 1) * len(rows) // len(files)]
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(chosen), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    return folder / SOURCES[name].repository / files[0]


def write_small_sources(folder: Path | str) -> None:
    """Write small files for all sources. Build them with: verl-ba data all --from FOLDER --out DIR --unverified"""
    for name, rows in small_rows().items():
        write_source(name, rows, Path(folder))
