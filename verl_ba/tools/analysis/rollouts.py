"""Read dumps of rollouts into columns: one pass over the lines, nothing kept of the text.

    verl, v1 trainer (0.9)       input, output, gts, score, step, uid = '<uid>_<session>_<row>'
    verl, legacy trainer (0.8 …) input, output, gts, score, step, and what the reward function returned; no uid
    either, with this package    also response_length [tokens], and a uid of the first form
    plain                        prompt, response, score; uid and step if there are any

(`_write_generations` of verl/trainer/ppo/v1/trainer_base.py and ray_trainer.py; validation dumps have the same form.)
Without a uid, the responses to the same prompt in the same step are one group. What is wrong in a line is counted under
a name, with the places of the first few; the line is left out.
"""

import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

LENGTH_FIELDS = ("response_length", "length")
"""Where lengths are looked for when neither a tokenizer nor a field is named."""

_V1_UID = re.compile(r"(.+)_(\d+)_(\d+)")
_BATCH = 1024  # responses that are tokenised together
_PLACES = 3  # places kept of each problem
_LABEL = 60  # characters of a prompt that stand for its group


@dataclass
class Problems:
    """What was wrong with the input: counts by name, and the first places of each."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, place: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        places = self.places.setdefault(name, [])
        if len(places) < _PLACES:
            places.append(place)


@dataclass
class Rollouts:
    """Columns over responses [R] and groups [G], in the order in which groups were met."""

    length: np.ndarray  # [tokens] [R]
    score: np.ndarray  # [R]
    group: np.ndarray  # 0 … G-1 [R]
    group_step: np.ndarray  # training step [G]
    group_label: list[str]  # uid, or how the prompt begins [G]
    group_place: list[str]  # file:line of the first response [G]
    problems: Problems
    lines: int
    text: list[tuple[str, str]] | None = None  # prompt and response, if they were asked for [R]


class NoRollouts(ValueError):
    """There is nothing to analyse at the path; the message says what was found instead."""


def find_files(path: Path) -> list[Path]:
    """The JSONL files at a path, in the order of their steps."""
    if path.is_file():
        return [path]
    files = [file for file in path.glob("*.jsonl") if file.is_file()] if path.is_dir() else []
    if not files:
        found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing" if path.is_dir() else "no such path"
        raise NoRollouts(
            f"{path}: expected a JSONL file, or a folder of them (verl: trainer.rollout_data_dir); got {found}"
        )
    return sorted(files, key=lambda file: (_file_step(file), file.name))


def read_rollouts(
    files: Iterable[Path],
    count_tokens: Callable[[list[str]], list[int]] | None = None,
    length_field: str | None = None,
    on_bytes: Callable[[int], Any] = lambda number: None,
    keep_text: bool = False,
) -> Rollouts:
    """Read dumps of any of the forms above.

    Args:
        count_tokens: lengths [tokens] of a list of response texts; None: lengths come from a field.
        length_field: the field that holds the length; None: the first of `LENGTH_FIELDS` that a line has.
        on_bytes: called with numbers of bytes that have been read.
        keep_text: keep every prompt and response. Lines without a prompt's text are then left out.

    Raises:
        NoRollouts: no line could be used; the message names what was wrong with them. Or text is to be kept and a response
            has several rows: their prompts are not in the dump.
    """
    reader = _Reader(length_field, wants_text=count_tokens is not None, keep_text=keep_text)
    texts: list[str] = []
    lengths = array("q")
    for place, line, fallback_step in _lines(files, on_bytes):
        text = reader.add(place, line, fallback_step)
        if text is not None and count_tokens is not None:
            texts.append(text)
            if len(texts) == _BATCH:
                lengths.extend(count_tokens(texts))
                texts.clear()
    if texts and count_tokens is not None:
        lengths.extend(count_tokens(texts))
    return reader.columns(lengths if count_tokens is not None else reader.length)


def _lines(files: Iterable[Path], on_bytes: Callable[[int], Any]) -> Iterator[tuple[tuple[str, int], bytes, int]]:
    for path in files:
        step, unreported = _file_step(path), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                unreported += len(line)
                if number % 4096 == 0:
                    on_bytes(unreported)
                    unreported = 0
                if line.strip():
                    yield (path.name, number), line, step
        on_bytes(unreported)


def _file_step(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


class _Reader:
    """Parses lines and collects columns; one entry per line that could be used."""

    def __init__(self, length_field: str | None, wants_text: bool, keep_text: bool = False) -> None:
        self.text: list[tuple[str, str]] | None = [] if keep_text else None
        self.length_fields = (length_field,) if length_field else LENGTH_FIELDS
        self.wants_text = wants_text
        self.problems = Problems()
        self.lines = 0
        self.form: str | None = None
        self.length, self.score = array("q"), array("d")
        self.group, self.session, self.row = array("q"), array("q"), array("q")
        self.group_number: dict[tuple[int, Any], int] = {}
        self.group_step: list[int] = []
        self.group_label: list[str] = []
        self.group_place: list[str] = []

    def add(self, place: tuple[str, int], line: bytes, fallback_step: int) -> str | None:
        """Take a line; its response's text if that is to be tokenised."""
        self.lines += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return self._wrong("not JSON (a line that was cut, or another format)", place)
        if not isinstance(record, dict):
            return self._wrong("not a JSON object", place)
        form = "verl" if "output" in record else "plain"
        self.form = self.form or form
        if form != self.form:
            self._wrong(f"another form ({form}) than the first line's ({self.form}); used all the same", place)

        score = record.get("score", record.get("reward"))
        if not isinstance(score, int | float) or not math.isfinite(score):
            return self._wrong("no score (expected a finite number in 'score' or 'reward')", place)
        text, length = record.get("output", record.get("response")), 0
        if self.wants_text:
            if not isinstance(text, str):
                return self._wrong("no response text (expected a string in 'output' or 'response')", place)
        else:
            length = next((record[name] for name in self.length_fields if name in record), None)
            if not isinstance(length, int) or length < 0:
                names = "' or '".join(self.length_fields)
                return self._wrong(f"no length (expected a number of tokens, 0 or more, in '{names}')", place)

        step = record.get("step", fallback_step)
        if not isinstance(step, int):
            return self._wrong("the step is not a whole number", place)
        uid, prompt = record.get("uid"), record.get("input", record.get("prompt"))
        if self.text is not None and not (isinstance(prompt, str) and isinstance(text, str)):
            return self._wrong("no text of prompt and response (expected strings)", place)
        session, row = -1, 0
        if uid is not None:
            uid = str(uid)
            if "gts" in record and (match := _V1_UID.fullmatch(uid)):
                uid, session, row = match[1], int(match[2]), int(match[3])
            key, label = uid, uid
        elif prompt is not None:
            label = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            key = blake2b(label.encode("utf-8", "replace"), digest_size=16).digest()
        else:
            return self._wrong("neither a uid nor a prompt to tell the group by", place)

        number = self.group_number.setdefault((step, key), len(self.group_step))
        if number == len(self.group_step):
            self.group_step.append(step)
            self.group_label.append(label[:_LABEL])
            self.group_place.append(f"{place[0]}:{place[1]}")
        if self.text is not None:
            self.text.append((str(prompt), str(text)))
        self.group.append(number)
        self.session.append(session)
        self.row.append(row)
        self.score.append(score)
        self.length.append(length)
        return text

    def _wrong(self, name: str, place: tuple[str, int]) -> None:
        self.problems.add(name, f"{place[0]}:{place[1]}")

    def columns(self, lengths: array) -> Rollouts:
        if not self.score:
            found = "; ".join(
                f"{n} × {name}, {self.problems.places[name][0]}" for name, n in self.problems.counts.items()
            )
            raise NoRollouts(f"none of {self.lines} lines could be used: {found or 'the files are empty'}")
        group, session = np.asarray(self.group), np.asarray(self.session)
        length, score = np.asarray(lengths, dtype=np.float64), np.asarray(self.score)
        if (session >= 0).any():
            responses = len(length)
            length, score, group, place = self._fold(length, score, group, session, np.asarray(self.row))
            if self.text is not None and len(length) < responses:
                raise NoRollouts(
                    "a response of several rows (multi-turn): its gradient cannot be taken from a dump's text"
                )
            if self.text is not None:
                self.text = [self.text[i] for i in place]
        # A group of empty responses alone is verl's padding of the batch.
        for number in np.flatnonzero((np.bincount(group) == 1) & (np.bincount(group, weights=length) > 0)):
            self.problems.add(
                "group of one response: no other to compare it with; used all the same", self.group_place[number]
            )
        return Rollouts(
            length,
            score,
            group,
            np.asarray(self.group_step),
            self.group_label,
            self.group_place,
            self.problems,
            self.lines,
            self.text,
        )

    def _fold(self, length, score, group, session, row):
        """Rows of one session are one response: as long as all of them, with the score of the last, whose place is given."""
        session = np.where(session >= 0, session, session.max() + 1 + np.arange(len(session)))
        order = np.lexsort((row, session, group))
        key = np.stack((group, session, row))[:, order]
        same = key[:, 1:] == key[:, :-1]
        for number in group[order[1:][same.all(axis=0)]]:
            self.problems.add("the same uid a second time in one step; used all the same", self.group_place[number])
        starts = np.flatnonzero(np.append(True, ~same[:2].all(axis=0)))
        last = np.append(starts[1:] - 1, len(order) - 1)
        return np.add.reduceat(length[order], starts), score[order[last]], group[order[last]], order[last]
