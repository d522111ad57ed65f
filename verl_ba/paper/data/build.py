"""From a source's file to verl's parquet columns."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress

from verl_ba import __version__
from verl_ba.paper.data import fetch, overlap, prompts, records
from verl_ba.paper.data.errors import DataError, RowError
from verl_ba.paper.data.rows import Question
from verl_ba.paper.data.sources import SOURCES, Source

FORMAT = 1  # of the rows: raised when the same source gives other rows
NAMED = 20  # conflicts and unusable rows that a record names; all are counted

# One schema for all data sets: verl concatenates the files of a run.
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("split", pa.string()),
                    ("source_id", pa.string()),
                    ("difficulty", pa.string()),
                    ("tolerance", pa.string()),
                ]
            ),
        ),
    ]
)


@dataclass(frozen=True)
class Options:
    """folder: takes the source's file from there, not from the hub. revision: instead of the catalogue's.

    unverified: accept a source whose checksum or number of rows is not the catalogue's. drop_invalid: leave out rows
    that cannot be used. drop_overlap: leave out training questions that a benchmark has, too. rebuild: replace what was
    built from something else.
    """

    out: Path
    folder: Path | None = None
    revision: str | None = None
    unverified: bool = False
    drop_invalid: bool = False
    drop_overlap: bool = False
    rebuild: bool = False


@dataclass
class Tally:
    """What became of the rows of a source."""

    rows_read: int = 0
    duplicates_dropped: int = 0
    conflicts_dropped: int = 0
    invalid_dropped: int = 0
    not_part: int = 0  # rows that this data set leaves out by its definition
    overlap_dropped: int = 0
    conflicts: list[dict] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)


@dataclass
class Copies:
    """The rows that ask the same question."""

    first: Question
    count: int = 0
    answers: dict[Decimal | str, str] = field(default_factory=dict)  # by value, as first written


def build(source: Source, options: Options, console: Console) -> tuple[dict, bool]:
    """Build DIR/NAME.parquet and its record. Returns (record, False if a finished one was found)."""
    revision = options.revision or source.revision
    fetch.check_revision(revision)
    record = None if options.rebuild else records.read_record(options.out, source.name)
    wanted = {
        "format": FORMAT,
        "repository": source.repository,
        "file": " ".join(source.files),
        "revision": None if options.folder and options.unverified else revision,
        "template": prompts.TEMPLATES[source.ability],
        "unverified": options.unverified,
        "drop_invalid": options.drop_invalid,
        "drop_overlap": options.drop_overlap and source.split == "train",
    }
    paths = fetch.local_files(source, options.folder) if options.folder else None
    if record:
        record.setdefault("drop_overlap", False)  # as before there was the option
        fault = difference(record, wanted, records.file_sha256(*paths) if paths else None)
        fault = fault or records.file_fault(options.out, record)
        if fault:
            raise DataError(
                f"{source.name}: {options.out / source.name}.parquet is there already, and does not match: {fault}. Choose "
                "another folder with --out, ask for the same again, or replace it with --rebuild"
            )
        return record, False

    paths = paths or fetch.hub_files(source, revision)
    path, sha256, warnings = paths[0], records.file_sha256(*paths), []
    pinned = source.sha256 if revision == source.revision and not options.unverified else None
    if pinned and sha256 != pinned:
        raise DataError(
            f"{source.name}: {path} is not the file of {source.repository} at {revision}: expected sha256 {pinned}, got "
            f"{sha256}. Fetch it again: {fetch.download_command(source, revision)}; or name its commit with --revision, or "
            "take it as it is with --unverified"
        )
    if options.unverified:
        warnings.append("--unverified: neither the source's checksum nor its number of rows was checked")
    elif options.folder and not pinned:
        warnings.append("taken from a folder, and no checksum of this commit is known: its name is believed")

    questions, tally = select(source, paths, options.drop_invalid, console)
    for what, expected, got in (
        ("rows in the source", source.rows_read, tally.rows_read),
        ("rows to write", source.rows_written, len(questions)),
    ):
        if expected is None or expected == got or options.unverified:
            continue
        message = f"{what}: expected {expected}, got {got}"
        if revision == source.revision:
            raise DataError(
                f"{source.name}: {message} ({path}). The file is cut short, or not of {revision}; --unverified takes it as "
                "it is"
            )
        warnings.append(f"{message}, at another revision than the catalogue's {source.revision}")

    if not options.unverified and not pinned:
        new = records.check_source(options.out, source, revision, sha256, path)
        warnings += [f"no checksum of this file is published; {sha256} is recorded in checksums.json"] if new else []
    if wanted["drop_overlap"]:
        benchmarks = benchmark_problems(options.out)
        if missing := [s.name for s in SOURCES.values() if s.split != "train" and s.name not in benchmarks]:
            raise DataError(
                f"{source.name}: --drop-overlap needs the benchmarks in {options.out}; {', '.join(missing)} missing. Build "
                f"them first: verl-ba data {' '.join(missing)} --out {options.out}"
            )
        dropped = {o.question for o in overlap.find([q.problem for q in questions], benchmarks)}
        tally.overlap_dropped = len(dropped)
        questions = [question for number, question in enumerate(questions) if number not in dropped]
    rows = [verl_row(source, index, question) for index, question in enumerate(questions)]
    target, record_path = options.out / f"{source.name}.parquet", options.out / f"{source.name}.json"
    with records.written_whole(target) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial, compression="zstd")
        file_sha256 = records.file_sha256(partial)
        record_path.unlink(missing_ok=True)  # a record never stands beside another file than its own
    record = {
        "name": source.name,
        **wanted,
        "source_sha256": sha256,
        **asdict(tally),
        "rows_written": len(rows),
        "content_sha256": records.content_sha256(rows),
        "file_sha256": file_sha256,
        "warnings": warnings,
        "verl_ba": __version__,
    }
    with records.written_whole(record_path) as partial:
        partial.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return record, True


def benchmark_problems(folder: Path) -> dict[str, list[str]]:
    """The questions of each benchmark that was built in a folder."""
    built = [name for name in records.read_records(folder) if SOURCES[name].split != "train"]
    return {name: problems(folder, name) for name in built}


def problems(folder: Path, name: str) -> list[str]:
    rows = records.parquet_rows(folder / f"{name}.parquet")
    return [prompts.problem_of(row["prompt"][0]["content"]) for row in rows]


def overlaps(folder: Path, name: str) -> dict[str, list[overlap.Overlap]]:
    """Overlaps of a training set with each benchmark, of those that were built in a folder."""
    benchmarks = benchmark_problems(folder)
    found: dict[str, list[overlap.Overlap]] = {benchmark: [] for benchmark in benchmarks}
    for one in overlap.find(problems(folder, name), benchmarks):
        found[one.benchmark].append(one)
    return found


def difference(record: dict, wanted: dict, sha256: str | None) -> str | None:
    """Say in what a record is not what is wanted, None if it is. sha256: of the file in the folder, if there is one."""
    for key, value in wanted.items():
        if record.get(key) != value:
            return f"{key} was {record.get(key)!r} and is {value!r} now"
    if sha256 and sha256 != record["source_sha256"]:
        return f"{record['file']} had sha256 {record['source_sha256'][:12]}… and has {sha256[:12]}… now"
    return None


def select(source: Source, paths: list[Path], drop_invalid: bool, console: Console) -> tuple[list[Question], Tally]:
    """Read all rows; of equal questions keep the first, of a question with two different answers none."""
    tally, kept, seen = Tally(), [], {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        rows = ((path, row) for path in paths for row in source_rows(source, path))
        for path, row in progress.track(rows, source.rows_read, description=source.name):
            number = tally.rows_read
            tally.rows_read += 1
            try:
                question = source.question(row)
            except RowError as error:
                fault = f"row {number} (from 0): {error}"
                if not drop_invalid:
                    raise DataError(
                        f"{source.name}: {path}, {fault}. --drop-invalid leaves such rows out and counts them in the record"
                    ) from error
                tally.invalid_dropped += 1
                tally.invalid.append(fault)
                continue
            if question is None:
                tally.not_part += 1
                continue
            copies = seen.setdefault(question.problem if source.unique else number, Copies(question))
            copies.count += 1
            copies.answers.setdefault(answer_value(question.answer), question.answer)
    for copies in seen.values():
        if len(copies.answers) > 1:
            tally.conflicts_dropped += copies.count
            tally.conflicts.append({"problem": copies.first.problem, "answers": sorted(copies.answers.values())})
        else:
            tally.duplicates_dropped += copies.count - 1
            kept.append(copies.first)
    del tally.invalid[NAMED:], tally.conflicts[NAMED:]
    return kept, tally


def answer_value(answer: str) -> Decimal | str:
    """The number that an answer is, so that 7 and 7.0 are no conflict; else the answer itself."""
    try:
        return Decimal(answer)
    except InvalidOperation:
        return answer


def source_rows(source: Source, path: Path) -> Iterator[dict]:
    """Yield a source's rows with the columns that are needed, without holding the file in memory."""
    columns = {*source.columns, *source.optional}
    if path.suffix == ".parquet":
        try:
            file = pq.ParquetFile(path)
            need_columns(source, path, set(file.schema_arrow.names))
            present = [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(batch_size=4096, columns=present):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{source.name}: {path} is not a readable parquet file ({error}). Fetch it again"
            ) from error
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"it is a {type(row).__name__}")
            except ValueError as error:
                raise DataError(f"{source.name}: {path}, line {number}: expected a JSON object ({error})") from error
            need_columns(source, f"{path}, line {number}", set(row))
            yield row


def need_columns(source: Source, where: Path | str, present: set[str]) -> None:
    if missing := [name for name in source.columns if name not in present]:
        raise DataError(
            f"{source.name}: {where}: expected the columns {', '.join(source.columns)}; {', '.join(missing)} missing. Is "
            f"this {source.file} of {source.repository}?"
        )


def verl_row(source: Source, index: int, question: Question) -> dict:
    """A row in verl's columns. extra_info.index: the position in this file."""
    return {
        "data_source": source.data_source or source.name,
        "prompt": [{"role": "user", "content": question.prompt}],
        "ability": source.ability,
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {
            "index": index,
            "split": source.split,
            "source_id": question.source_id,
            "difficulty": question.difficulty,
            "tolerance": question.tolerance,
        },
    }
