"""Which training questions are a benchmark's, too.

Texts are compared as words: lower case, letters and digits only, so that LaTeX's spacing and punctuation do not matter. Two
questions overlap if their words are the same, or if they share 13 words in a row *and* their longest common subsequence
of words is at least 0.6 of the shorter question. 13 is the length of GPT-3 (arXiv 2005.14165, appendix C) and of
EleutherAI's evaluation harness; 13 with 0.6 is the rule of Qwen2.5-Math (arXiv 2409.12122) and Qwen2.5 (arXiv 2412.15115),
made for such data: "where m and n are relatively prime positive integers, find m + n" stands in a hundred different
questions. A question that was put into other words is not found; a short one that shares such a sentence may be found
wrongly.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

N = 13
SHARE = 0.6


@dataclass(frozen=True)
class Overlap:
    """A training question that a benchmark has: its place among the questions, the benchmark, the place there, and how."""

    question: int
    benchmark: str
    other: int
    how: str  # 'same text' or 'n-grams'


def find(questions: Iterable[str], benchmarks: Mapping[str, Iterable[str]]) -> list[Overlap]:
    """The first overlap of each training question with the questions of each benchmark."""
    others = {(name, i): words(text) for name, texts in benchmarks.items() for i, text in enumerate(texts)}
    same: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    grams: dict[tuple[str, ...], set[tuple[str, int]]] = {}
    for key, text in others.items():
        same.setdefault(tuple(text), []).append(key)
        for gram in ngrams(text):
            grams.setdefault(gram, set()).add(key)
    found = []
    for number, question in enumerate(questions):
        text = words(question)
        how = dict.fromkeys(same.get(tuple(text), []), "same text")
        for key in sorted({key for gram in ngrams(text) for key in grams.get(gram, ())} - how.keys()):
            if common(text, others[key]) >= SHARE * min(len(text), len(others[key])):
                how[key] = "n-grams"
        first = {name: (name, other) for name, other in reversed(how)}  # one for each benchmark
        found += [Overlap(number, *key, how[key]) for key in sorted(first.values())]
    return found


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())


def ngrams(text: list[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(text[i:] for i in range(N)), strict=False)


def common(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, with the bits of a number for the places of `a` (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    row = (1 << len(a)) - 1
    for word in b:
        matched = row & places.get(word, 0)
        row = (row + matched) | (row - matched)
    return len(a) - (row & ((1 << len(a)) - 1)).bit_count()
