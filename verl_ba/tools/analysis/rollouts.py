"""Read dumps of rollouts into columns: one pass over the lines, nothing kept of the text unless it is asked for.

    verl, v1 trainer (0.9)       input, output, gts, score, step, uid = '<uid>_<session>_<row>'
    verl, legacy trainer (0.8 …) input, output, gts, score, step, and what the reward function returned; no uid
    either, with this package    also response_length [tokens], and a uid of the first form
    plain                        prompt, response, score; uid and step if there are any

(`_write_generations` of verl/trainer/ppo/v1/trainer_base.py and ray_trainer.py; validation dumps have the same form.)
Without a uid, the responses to the same prompt in the same step are one group. What is wrong with a line, a group or a step
is counted under a name, with the places of the first few. `_Reader.take` judges lines. `_Reader.rollouts` judges what shows
only when all lines are there: copies, steps that a start abandoned, prompts that a step has twice, groups and steps that are
too short.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Optional

import msgspec
import numpy as np

LENGTH_FIELDS = ("response_length", "length")
"""Where lengths are looked for when neither a tokenizer nor a field is named."""

_BLOCK = 1 << 20  # bytes of whole lines that are taken together
_PLACES = 3  # places kept of each problem
_LABEL = 60  # characters of a prompt that stand for its group

_NO_SCORE = "no score (expected a finite number in 'score' or 'reward')"
_NO_TEXT = "no response text (expected a string in 'output' or 'response')"
_COPY = "a copy of an earlier line (the same uid in its step, or the same line in another file)"
_ABANDONED = "a step that a later start of the run took again, or one after it"
_SEVERAL = "a prompt that its step seems to have several times, without a uid to tell the groups apart"
_NO_PROMPT = "no text of the prompt (expected a string in 'input' or 'prompt')"
_SHORT_STEP = "step with fewer responses than the other steps; used all the same"
_ALONE = "group of one response: no other to compare it with; used all the same"
_SHORT_GROUP = "group with fewer responses than the other groups; used all the same"


@dataclass
class Problems:
    """What was wrong with the input: counts by name, and the first places of each."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, *places: str, times: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + times
        kept = self.places.setdefault(name, [])
        kept += places[: _PLACES - len(kept)]


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
        keep_text: keep every prompt and response. Lines that lack one of them are then left out.

    Raises:
        NoRollouts: no line could be used; the message names what was wrong with them. Or text is to be kept and a response
            has several rows: the prompts of the later ones are not in a dump.
    """
    reader = _Reader(list(files), count_tokens, length_field, keep_text)
    for file, path in enumerate(reader.files):
        number, step = 1, _file_step(path)
        with path.open("rb", buffering=_BLOCK) as stream:
            while lines := stream.readlines(_BLOCK):
                reader.take(lines, file, number, step)
                number += len(lines)
                on_bytes(sum(map(len, lines)))
    return reader.rollouts()


def _file_step(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


def _decoder(length_fields: Sequence[str]) -> msgspec.json.Decoder:
    """Decoder of the fields that are needed. It passes over the others, and finds texts without building them."""
    lengths = {f"length_{i}": name for i, name in enumerate(length_fields)}
    fields = [
        *((name, float | bool | None, None) for name in ("score", "reward")),
        *((name, Optional[_Count], None) for name in ("step", *lengths)),  # noqa: UP045  # `|` fails on Annotated
        ("uid", str | int | None, None),
        *((name, msgspec.Raw, None) for name in ("output", "response", "input", "prompt")),
    ]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename=lengths, gc=False))


def _value(raw: Any) -> Any:
    """The value of a field that was found and not built; None if there is none, or it cannot be decoded."""
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _label(raw: bytes) -> str:
    """A prompt as it is shown."""
    value = _value(raw)
    return value if isinstance(value, str) else raw.decode(errors="replace")


@dataclass
class _Rows:
    """Columns over lines that could be used, in the order of reading."""

    length: np.ndarray  # [tokens]
    score: np.ndarray
    group: np.ndarray  # numbered in the order in which groups were met
    session: np.ndarray  # -1 without one
    row: np.ndarray  # of the session
    file: np.ndarray
    number: np.ndarray  # of the line, from 1
    content: np.ndarray  # hash of the line where copies are told by it, else 0
    text: np.ndarray  # place in the list of texts, if they are kept

    def __getitem__(self, which: np.ndarray) -> "_Rows":
        return _Rows(*(column[which] for column in vars(self).values()))


class _Reader:
    """Judges lines, and what they add up to."""

    def __init__(
        self,
        files: list[Path],
        count_tokens: Callable[[list[str]], list[int]] | None,
        length_field: str | None,
        keep_text: bool = False,
    ) -> None:
        self.files = files
        self.count_tokens = count_tokens
        self.length_fields = (length_field,) if length_field else LENGTH_FIELDS
        names = "' or '".join(self.length_fields)
        self.no_length = f"no length (expected a number of tokens, 0 or more, in '{names}')"
        self.get_lengths = [attrgetter(f"length_{i}") for i in range(len(self.length_fields))]
        self.decode = _decoder(self.length_fields).decode
        self.problems = Problems()
        self.texts: list[tuple[str, str]] | None = [] if keep_text else None
        self.lines = 0
        self.form: str | None = None  # of the first line
        self.blocks: list[_Rows] = []
        self.group_number: dict[tuple[int, Any], int] = {}
        self.group_step: list[int] = []
        self.group_label: list[str] = []
        self.group_place: list[str] = []
        self.group_named: list[bool] = []  # by a uid

    def wrong(self, name: str, file: Any, number: Any) -> None:
        self.problems.add(name, self.place(file, number))

    def place(self, file: Any, number: Any) -> str:
        return f"{self.files[file].name}:{number}"

    def take(self, lines: list[bytes], file: int, number: int, fallback_step: int) -> None:
        """Take lines that follow each other in a file; the first has this number."""
        numbers = np.arange(number, number + len(lines))
        try:
            records: list[Any] = list(map(self.decode, lines))
            self.lines += len(lines)
        except (msgspec.DecodeError, RecursionError):  # one of them: line by line
            self.lines += sum(not line.isspace() for line in lines)
            parsed = [self.parse(line, file, number + i) for i, line in enumerate(lines)]
            good = [i for i, record in enumerate(parsed) if record is not None]
            records, lines, numbers = [parsed[i] for i in good], [lines[i] for i in good], numbers[good]
        if not records:
            return
        score = np.array([r.reward if r.score is None else r.score for r in records], dtype=np.float64)
        usable = np.ones(len(records), dtype=bool)

        def need(condition: np.ndarray, name: str) -> None:
            for i in np.flatnonzero(usable & ~condition):
                self.wrong(name, file, numbers[i])
            usable[~condition] = False

        need(np.isfinite(score), _NO_SCORE)
        texts: list[Any] = []
        prompts: list[Any] = []
        length = np.full(len(records), np.nan)
        if self.count_tokens or self.texts is not None:
            texts = [_value(r.response if r.output is None else r.output) for r in records]
            need(np.array([isinstance(text, str) for text in texts]), _NO_TEXT)
        if self.texts is not None:
            prompts = [_value(r.prompt if r.input is None else r.input) for r in records]
            need(np.array([isinstance(prompt, str) for prompt in prompts]), _NO_PROMPT)
        if not self.count_tokens:
            for get in self.get_lengths:
                if np.isnan(length).any():
                    length = np.where(np.isnan(length), np.array(list(map(get, records)), dtype=np.float64), length)
            need(~np.isnan(length), self.no_length)
        group, session, row = self.groups(records, file, numbers, usable, fallback_step)
        need(group >= 0, "neither a uid nor a prompt to tell the group by")
        content = np.zeros(len(records), dtype=np.int64)
        if len(self.files) > 1:
            for i in np.flatnonzero(session < 0):
                content[i] = hash(lines[i].rstrip())
        if self.count_tokens and usable.any():
            length[usable] = self.count_tokens([texts[i] for i in np.flatnonzero(usable)])
        text = np.zeros_like(numbers)
        if self.texts is not None:
            text = len(self.texts) + np.arange(len(records))
            self.texts += zip(prompts, texts, strict=True)
        rows = _Rows(length, score, group, session, row, np.full_like(numbers, file), numbers, content, text)
        self.blocks.append(rows if usable.all() else rows[usable])

    def groups(
        self, records: list[Any], file: int, numbers: np.ndarray, usable: np.ndarray, fallback_step: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Group, session and row of each record that is usable so far. The group is -1 where nothing tells it."""
        groups, sessions, rows = ([-1] * len(records) for _ in range(3))
        for i in np.flatnonzero(usable).tolist():
            record, raw = records[i], b""
            form = "plain" if record.output is None else "verl"
            if form != self.form:
                self.form = self.form or form
                if form != self.form:
                    name = f"another form ({form}) than the first line's ({self.form}); used all the same"
                    self.wrong(name, file, numbers[i])
            if (uid := record.uid) is not None:
                key = label = str(uid)
                if form == "verl":
                    try:
                        name, session, row = label.rsplit("_", 2)
                        sessions[i], rows[i], key, label = int(session), int(row), name, name
                    except ValueError:
                        pass  # a uid of another form: the line is a response
            else:
                raw = bytes((record.prompt if record.input is None else record.input) or b"null")
                if raw == b"null":
                    continue
                key, label = hash(raw), None  # 64 bits: the chance that two of a million prompts have the same is 3e-8
            step = fallback_step if record.step is None else record.step
            group = groups[i] = self.group_number.setdefault((step, key), len(self.group_step))
            if group == len(self.group_step):
                self.group_step.append(step)
                self.group_label.append((label or _label(raw))[:_LABEL])
                self.group_place.append(self.place(file, numbers[i]))
                self.group_named.append(uid is not None)
        return np.array(groups), np.array(sessions), np.array(rows)

    def parse(self, line: bytes, file: int, number: int) -> Any:
        """The fields of a line; None where there are none. What Python writes besides JSON, such as NaN, costs its
        field only, and half a surrogate pair becomes a question mark.
        """
        if line.isspace():
            return None
        try:
            try:
                return self.decode(line)
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                record = json.loads(line, parse_constant=lambda name: None)
                return self.decode(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
        except msgspec.ValidationError as error:  # "Expected …, got … - at `$.score`"
            field = str(error).rpartition("`$")[2].strip(".`")
            name = {
                "score": _NO_SCORE,
                "reward": _NO_SCORE,
                "step": "the step is not a whole number",
                "uid": "the uid is neither text nor a whole number",
            }.get(field, self.no_length if field in self.length_fields else "not a JSON object")
        except (ValueError, RecursionError):
            cut = not line.endswith(b"\n")
            name = "the last line is cut: the run was killed while it wrote" if cut else "not JSON"
        self.wrong(name, file, number)
        return None

    def rollouts(self) -> Rollouts:
        """What is left when all lines are taken, and judged together."""
        if not any(len(block.score) for block in self.blocks):
            found = "; ".join(
                f"{n} × {name}, {self.problems.places[name][0]}" for name, n in self.problems.counts.items()
            )
            raise NoRollouts(f"none of {self.lines} lines could be used: {found or 'the files are empty'}")
        rows = _Rows(*map(np.concatenate, zip(*(vars(block).values() for block in self.blocks), strict=True)))
        step, named = np.array(self.group_step), np.array(self.group_named)
        rows = self.without(rows, _copies(rows, step), _COPY)
        if self.form == "verl":
            rows = self.without(rows, _abandoned(rows, step, named), _ABANDONED)
        unfolded, rows = len(rows.score), _fold(rows)
        if self.texts is not None and len(rows.score) < unfolded:
            raise NoRollouts(
                f"{unfolded} rows are {len(rows.score)} responses (multi-turn). Expected one row for each: the gradient of "
                "several rows cannot be taken from a dump's text"
            )
        self.short_steps(rows, step)
        rows = self.distinct_prompts(rows, named)
        self.short_groups(rows)
        left, group = np.unique(rows.group, return_inverse=True)
        return Rollouts(
            rows.length,
            rows.score,
            group,
            step[left],
            [self.group_label[i] for i in left],
            [self.group_place[i] for i in left],
            self.problems,
            self.lines,
            None if self.texts is None else [self.texts[i] for i in rows.text],
        )

    def without(self, rows: _Rows, which: np.ndarray, name: str) -> _Rows:
        at = np.flatnonzero(which)
        if len(at) == 0:
            return rows
        places = (self.place(rows.file[i], rows.number[i]) for i in at[:_PLACES])
        self.problems.add(name, *places, times=len(at))
        return rows[~which]

    def short_steps(self, rows: _Rows, step: np.ndarray) -> None:
        """A file that was cut between two lines looks whole, but its step has fewer responses than others."""
        steps, first, size = np.unique(step[rows.group], return_index=True, return_counts=True)
        usual = _usual(size)
        for i in np.flatnonzero(size < usual):
            place = self.place(rows.file[first[i]], rows.number[first[i]])
            self.problems.add(_SHORT_STEP, f"{place} (step {steps[i]}: {size[i]} of {usual})")

    def distinct_prompts(self, rows: _Rows, named: np.ndarray) -> _Rows:
        """A prompt that a step has twice is one group without a uid: nothing says which responses belong together.

        verl's dumps have a fixed number of responses, so there it shows, and such prompts are left out. In a plain file
        the responses to one prompt are one group by definition.
        """
        size = np.bincount(rows.group, minlength=len(named))
        unnamed = ~named & (size > 0)
        usual = _usual(size[unnamed])
        several = unnamed & (usual > 1) & (size > 1.5 * usual)
        drop = self.form == "verl"
        for group in np.flatnonzero(several):
            name = _SEVERAL if drop else f"{_SEVERAL}; used all the same"
            self.problems.add(name, f"{self.group_place[group]} ({size[group]} responses, other groups {usual})")
        return rows[~several[rows.group]] if drop else rows

    def short_groups(self, rows: _Rows) -> None:
        # A group of empty responses alone is verl's padding of the batch.
        size = np.bincount(rows.group) * (np.bincount(rows.group, weights=rows.length) > 0)
        usual = _usual(size[size > 0])
        for group in np.flatnonzero(size == 1):
            self.problems.add(_ALONE, self.group_place[group])
        for group in np.flatnonzero((size > 1) & (size < usual)):
            self.problems.add(_SHORT_GROUP, f"{self.group_place[group]} ({size[group]} of {usual})")


def _usual(sizes: np.ndarray) -> int:
    """The most frequent of these sizes, and the larger of two that are as frequent; 0 where fewer than a third have it."""
    counts = np.bincount(sizes, minlength=1)
    usual = len(counts) - 1 - int(counts[::-1].argmax())
    return usual if 3 * counts[usual] >= len(sizes) else 0


def _copies(rows: _Rows, step: np.ndarray) -> np.ndarray:
    """Rows that are in the input already: the same row of a session, or without one the same line in an earlier file.

    Within a file, two lines without a session may be two equal responses.
    """
    named = rows.session >= 0
    key = np.stack(
        (
            named,
            np.where(named, rows.group, step[rows.group]),
            np.where(named, rows.session, rows.content),
            rows.row,
        )
    )
    order = np.lexsort(key)  # stable: equal keys stay in the order of reading
    new = np.append(True, (key[:, order[1:]] != key[:, order[:-1]]).any(axis=0))
    first = np.empty_like(order)
    first[order] = order[np.flatnonzero(new)][np.cumsum(new) - 1]
    return (first != np.arange(len(order))) & (named | (rows.file > rows.file[first]))


def _abandoned(rows: _Rows, step: np.ndarray, named: np.ndarray) -> np.ndarray:
    """Rows of steps that a later start of the run took again, and of the steps after those.

    The lines of a step stand together in one file. A step that comes again begins another start, unless its rows have uids
    that were met before. As in `verl-ba compare`, a start discards what earlier ones did from its first step on.
    """
    step_of_row = step[rows.group]
    begin = np.flatnonzero(np.append(True, (np.diff(step_of_row) != 0) | (np.diff(rows.file) != 0)))
    met = np.maximum.accumulate(rows.group)[np.maximum(begin - 1, 0)]
    goes_on = named[rows.group[begin]] & (np.minimum.reduceat(rows.group, begin) <= met)
    start, first = [], [step_of_row.max()]
    seen: set[int] = set()
    for value, same in zip(step_of_row[begin].tolist(), goes_on.tolist(), strict=True):
        if value in seen and not same:
            seen = set()
            first.append(value)
        seen.add(value)
        first[-1] = min(first[-1], value)
        start.append(len(first) - 1)
    # the first step of any later start
    later = np.append(np.minimum.accumulate(first[::-1])[::-1][1:], np.iinfo(np.int64).max)
    return np.repeat(step_of_row[begin] >= later[start], np.diff(np.append(begin, len(step_of_row))))


def _fold(rows: _Rows) -> _Rows:
    """Rows of one session are one response: as long as all of them, with the score of the last."""
    if not (rows.session >= 0).any():
        return rows
    session = np.where(rows.session >= 0, rows.session, rows.session.max() + 1 + np.arange(len(rows.session)))
    order = np.lexsort((rows.row, session, rows.group))
    key = np.stack((rows.group, session))[:, order]
    starts = np.flatnonzero(np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0)))
    last = np.append(starts[1:] - 1, len(order) - 1)
    folded = rows[order[last]]
    folded.length = np.add.reduceat(rows.length[order], starts)
    return folded
