"""`verl-ba data`: every source in its own format, what is refused, what is recorded, and what verl reads."""

import contextlib
import errno
import hashlib
import http.server
import json
import math
import pickle
import random
import re
import subprocess
import sys
import threading
import zlib
from base64 import b64encode
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from recipes import small_data
from verl_ba.paper.data import build, overlap, prompts, records, rows
from verl_ba.paper.data.errors import RowError
from verl_ba.paper.data.sources import SOURCES
from verl_ba.tools.cli import app

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def run(*arguments):
    """Run `verl-ba data …`. Returns (exit status, what it printed, as one line)."""
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"DATA_DIR": None})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def sources(tmp_path):
    small_data.write_small_sources(tmp_path / "sources")
    return tmp_path / "sources"


@pytest.fixture
def small(tmp_path, sources):
    """(folder with the small sources, folder with all data sets built from them)"""
    status, output = run("all", "--from", sources, "--out", tmp_path / "data", "--unverified")
    assert status == 0, output
    return sources, tmp_path / "data"


@pytest.fixture
def pin(monkeypatch, tmp_path):
    """Make the catalogue expect exactly these rows of a source. Returns the folder for --from."""

    def pin(name, source_rows, written=None):
        path = small_data.write_source(name, source_rows, tmp_path / "sources")
        pinned = replace(
            SOURCES[name],
            sha256=records.file_sha256(path),
            rows_read=len(source_rows),
            rows_written=len(source_rows) if written is None else written,
        )
        monkeypatch.setitem(SOURCES, name, pinned)
        return tmp_path / "sources"

    return pin


def built_rows(folder, name):
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def refused(tmp_path, name, source_rows, *arguments):
    """Build rows that cannot be built. Returns the complaint; nothing may have been written."""
    small_data.write_source(name, source_rows, tmp_path / "sources")
    status, output = run(name, "--from", tmp_path / "sources", "--out", tmp_path / "out", "--unverified", *arguments)
    assert status == 1
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    return output


def test_all_sources_are_built_from_a_folder(small):
    _, out = small
    raw = small_data.small_rows()
    unique = {name: len({json.dumps(row) for row in source_rows}) for name, source_rows in raw.items()}
    for name, source in SOURCES.items():
        table = pq.read_table(out / f"{name}.parquet")
        assert table.schema.equals(build.SCHEMA)
        assert len(table) == (unique[name] if name != "math" else 42)
        for index, row in enumerate(table.to_pylist()):
            assert row["data_source"] == (source.data_source or name)
            assert row["ability"] == source.ability
            assert [message["role"] for message in row["prompt"]] == ["user"]
            assert row["reward_model"]["style"] == "rule"
            assert row["reward_model"]["ground_truth"]
            assert row["extra_info"]["index"] == index
            assert row["extra_info"]["split"] == source.split
    assert len({str(pq.read_schema(out / f"{name}.parquet")) for name in SOURCES}) == 1, "verl concatenates files"


def test_mathematics_is_asked_with_one_template_and_the_published_answer(small):
    _, out = small
    for name, seed in {"dapo17k": 1, "polaris": 2, "math500": 3, "aime24": 4, "aime25": 5, "minerva": 7}.items():
        for row, (problem, answer) in zip(built_rows(out, name), small_data.questions(seed, 1000), strict=False):
            assert row["prompt"][0]["content"] == (
                f"{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
            )
            assert row["reward_model"]["ground_truth"] == answer
    assert built_rows(out, "polaris")[3]["extra_info"]["difficulty"] == "3/8"
    assert built_rows(out, "math500")[2]["extra_info"]["source_id"] == "test/prealgebra/2.json"
    first, second = built_rows(out, "olympiadbench")[:2]
    (problem, answer), (second_problem, _) = small_data.questions(6, 2)
    assert first["prompt"][0]["content"].startswith(problem)
    assert first["reward_model"]["ground_truth"] == answer, "without the dollars around it"
    assert second["prompt"][0]["content"].startswith(f"All numbers are integers.\n\n{second_problem}")
    assert (first["extra_info"]["tolerance"], second["extra_info"]["tolerance"]) == (None, "1e-1")


def test_programs_are_asked_with_starter_code_or_standard_input(small):
    _, out = small
    by_title = {row["extra_info"]["source_id"]: row for row in built_rows(out, "livecodebench")}
    stdin, starter = (by_title[title]["prompt"][0]["content"] for title in ("sum", "addTwo"))
    assert "standard input" in stdin
    assert "class Solution" not in stdin
    assert "class Solution:\n    def addTwo(self, a: int, b: int) -> int:\n```" in starter
    assert "standard input" not in starter
    for prompt in (stdin, starter):
        assert "```python code block" in prompt
        assert "{" not in prompt
    assert json.loads(by_title["sum"]["reward_model"]["ground_truth"]) == {
        "inputs": ["1 2\n", "-5 5\n"],
        "outputs": ["3\n", "0\n"],
        "fn_name": None,
    }
    assert json.loads(by_title["addTwo"]["reward_model"]["ground_truth"])["fn_name"] == "addTwo"


def test_dapos_wrapper_is_taken_off_and_its_absence_is_an_error():
    problem = "Solve for $x$:\n\n$x + 1 = 3$. The last line is a trap: Answer: $Answer"
    assert prompts.without_dapo_wrapper(small_data.DAPO_WRAPPER.format(problem)) == problem
    with pytest.raises(RowError, match=r"expected a problem between .*got 'What is 1 \+ 1\?'"):
        prompts.without_dapo_wrapper("What is 1 + 1?")


def test_copies_are_built_once_and_conflicting_answers_not_at_all(pin, tmp_path):
    source_rows = small_data.dapo_rows(1, 10, copies=3)
    source_rows[13] = {**source_rows[13], "reward_model": {"ground_truth": "-1", "style": "rule"}}  # of question 3
    folder = pin("dapo17k", source_rows, written=9)
    status, output = run("dapo17k", "--from", folder, "--out", tmp_path / "out")
    assert status == 0, output
    assert "9 of 30 rows (left out: 18 duplicates, 3 with conflicting answers)" in output
    problem, answer = small_data.questions(1, 10)[3]
    record = records.read_records(tmp_path / "out")["dapo17k"]
    assert (record["rows_read"], record["duplicates_dropped"], record["conflicts_dropped"]) == (30, 18, 3)
    assert record["conflicts"] == [{"problem": problem, "answers": sorted(["-1", answer])}]
    assert problem not in str(built_rows(tmp_path / "out", "dapo17k"))


AIME = (
    "Let $ABC$ be a triangle with $AB = 13$ and $BC = 14$. Find the number of points inside it with whole distances from all "
    "of its sides; the answer is $\\frac{m}{n}$, where m and n are relatively prime positive integers. Find $m + n$."
)
TAIL = "The answer is $\\frac{m}{n}$, where m and n are relatively prime positive integers. Find $m + n$."


@pytest.mark.parametrize(
    ("question", "how"),
    [
        (AIME, "same text"),
        (AIME.upper().replace("$", "").replace(".", " ."), "same text"),  # LaTeX and punctuation
        (AIME.replace("13", "１３"), "same text"),  # full-width digits
        (f"Solve this. {AIME} Give an integer.", "n-grams"),  # the benchmark's question within another
        (AIME.replace("Find $m + n$", "What is $m + n$"), "n-grams"),
        (AIME.replace("14", "15"), "n-grams"),  # other numbers: the same question to a model that has seen it
        (AIME[:160], "n-grams"),
        ("What is $1 + 1$?", "same text"),  # short ones are compared whole
        ("What is 1 + 2?", None),
        (
            f"On a 5 by 7 board a rook stands in a corner, and moves 6 times, each time to a square chosen evenly. {TAIL}",
            None,
        ),  # 13 common words, no more
        ("", None),
        ("Let $ABC$ be a triangle with $AB = 13$.", None),
        (" ".join(reversed(AIME.split())), None),
    ],
)
def test_an_overlap_is_the_same_text_or_thirteen_words_and_most_of_the_rest(question, how):
    found = overlap.find([question], {"aime24": [AIME, "what is 1 + 1"], "minerva": ["Nothing alike."]})
    assert [(o.question, o.benchmark, o.how) for o in found] == ([] if how is None else [(0, "aime24", how)])


def test_the_longest_common_subsequence_is_the_textbooks():
    rng = random.Random(0)
    for _ in range(200):
        a, b = ([rng.choice("abcd") for _ in range(rng.randint(0, 12))] for _ in range(2))
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
        assert overlap.common(a, b) == table[-1][-1]


def test_overlap_is_reported_and_left_out_by_one_option(small, tmp_path):
    sources, out = small
    raw = small_data.small_rows()["polaris"]
    raw[0]["problem"] = AIME
    small_data.write_source("polaris", raw, sources)
    test = small_data.small_rows()["minerva"]
    test[3]["question"] = AIME + "!"
    small_data.write_source("minerva", test, sources)
    arguments = "--from", sources, "--unverified"
    assert run("minerva", *arguments, "--out", out, "--rebuild")[0] == 0
    status, output = run("polaris", *arguments, "--out", out, "--rebuild")
    assert status == 0, output
    assert re.search(r"overlap with benchmarks: math500 \d+, .*minerva [1-9]", output)
    assert "--drop-overlap --rebuild leaves these questions out" in output
    assert AIME in str(built_rows(out, "polaris")[0]).replace("\\\\", "\\")
    status, output = run("polaris", *arguments, "--out", out, "--drop-overlap")
    assert status == 1, "what was built with another option is not taken for it"
    status, output = run("polaris", *arguments, "--out", out, "--drop-overlap", "--rebuild")
    assert status == 0, output
    record = records.read_records(out)["polaris"]
    assert record["overlap_dropped"] == 32 - record["rows_written"] > 0
    assert "of a benchmark" in output
    assert re.search(r"overlap with benchmarks: (\w+ 0,? ?)+", output)
    status, output = run("polaris", *arguments, "--out", tmp_path / "empty", "--drop-overlap")
    assert status == 1
    assert re.search(r"--drop-overlap needs the benchmarks .*math500, aime24.* missing\. Build them first", output)


def test_a_checksum_that_nobody_published_is_recorded_and_compared_from_then_on(sources, tmp_path, monkeypatch):
    rows_ = small_data.small_rows()["minerva"]
    monkeypatch.setitem(SOURCES, "minerva", replace(SOURCES["minerva"], rows_read=20, rows_written=20))
    arguments = "minerva", "--from", sources, "--out", tmp_path / "out"
    path = small_data.write_source("minerva", rows_[:-1], sources)
    assert run(*arguments)[0] == 1, "a file of the wrong size is not the first"
    assert not (tmp_path / "out" / "checksums.json").exists()
    path = small_data.write_source("minerva", rows_, sources)
    status, output = run(*arguments)
    assert status == 0, output
    sha256 = records.file_sha256(path)
    assert f"{sha256} is recorded in checksums.json" in output
    assert list(json.loads((tmp_path / "out" / "checksums.json").read_text()).values()) == [sha256]
    status, output = run(*arguments, "--rebuild")
    assert (status, "is recorded" in output) == (0, False)
    small_data.write_source("minerva", [{**row, "answer": "1"} for row in rows_], sources)
    status, output = run(*arguments, "--rebuild")
    assert status == 1
    assert re.search(
        rf"is not the file that was built first .*expected sha256 {sha256}, as recorded in .*; got ", output
    )
    assert run(*arguments, "--rebuild", "--unverified")[0] == 0


@pytest.mark.parametrize(
    ("answers", "kept"),
    [
        (("7", "7.0"), "7"),  # equal numbers: the first way of writing counts
        (("7.0", "7"), "7.0"),
        (("007", "7"), "007"),
        (("-0", "0"), "-0"),
        (("1e3", "1000"), "1e3"),
        (("7", " 7 "), "7"),  # blanks
        (("x+1", "x+1"), "x+1"),
        (("7", "8"), None),
        (("7", "-7"), None),
        (("0.3333", "0.3334"), None),
        (("7", "seven"), None),
        (("\\frac{1}{2}", "0.5"), None),  # equal, but only a grader can say so: neither is trusted
    ],
)
def test_answers_that_are_equal_numbers_are_no_conflict(pin, tmp_path, answers, kept):
    source_rows = small_data.small_rows()["polaris"][:2]
    source_rows += [{**source_rows[1], "answer": answer} for answer in answers]
    source_rows.pop(1)
    folder = pin("polaris", source_rows, written=1 if kept is None else 2)
    status, output = run("polaris", "--from", folder, "--out", tmp_path / "out")
    assert status == 0, output
    truths = [row["reward_model"]["ground_truth"] for row in built_rows(tmp_path / "out", "polaris")]
    assert truths[1:] == ([] if kept is None else [kept])


def test_a_benchmark_keeps_the_rows_it_publishes(pin, tmp_path):
    source_rows = small_data.small_rows()["minerva"] * 2
    status, output = run("minerva", "--from", pin("minerva", source_rows), "--out", tmp_path / "out")
    assert status == 0, output
    assert len(built_rows(tmp_path / "out", "minerva")) == 40


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("polaris", {"answer": "\t"}, r"row 5 \(from 0\): answer: expected text, got '\\t'"),
        ("polaris", {"answer": None}, r"row 5 \(from 0\): answer: expected text, got None"),
        (
            "polaris",
            {"answer": math.nan},
            r"row 5 \(from 0\): answer: expected text, got nan, which stands for a missing",
        ),
        ("polaris", {"answer": "NaN "}, r"row 5 \(from 0\): answer: expected text, got 'NaN ', which stands for a"),
        ("polaris", {"answer": -math.inf}, r"row 5 \(from 0\): answer: expected text, got -inf"),
        ("polaris", {"answer": True}, r"row 5 \(from 0\): answer: expected text, got True"),
        ("minerva", {"answer": math.nan}, r"row 5 \(from 0\): answer: expected text, got nan"),
        ("olympiadbench", {"final_answer": ["nan"]}, r"row 5 .*final_answer: expected text, got 'nan'"),
        ("polaris", {"problem": ""}, r"row 5 \(from 0\): problem: expected text, got ''"),
        ("dapo17k", {"prompt": []}, r"row 5 \(from 0\): prompt: expected a list of one message .*got '\[\]'"),
        ("dapo17k", {"prompt": None}, r"row 5 \(from 0\): prompt: expected a list of one message .*got 'None'"),
        ("dapo17k", {"reward_model": None}, r"row 5 \(from 0\): answer: expected text, got None"),
        ("olympiadbench", {"final_answer": None}, r"row 5 .*final_answer: expected a list of strings, got None"),
        ("olympiadbench", {"final_answer": []}, r"row 5 .*answer: expected text, got ''"),
        ("livecodebench", {"public_test_cases": "nothing"}, r"row 5 .*public_test_cases: expected a JSON list"),
        ("livecodebench", {"metadata": "[]"}, r"row 5 .*metadata: expected a JSON dict, .*it is a list"),
        ("livecodebench", {"metadata": "{}"}, r"row 5 .*test 0: expected .*testtype 'stdin'"),
        ("livecodebench", {"private_test_cases": "%"}, r"row 5 .*private_test_cases: expected base64 of zlib"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, name, change, complaint):
    source_rows = small_data.small_rows()[name]
    source_rows[5] = {**source_rows[5], **change}
    assert re.search(complaint + r".*--drop-invalid", refused(tmp_path, name, source_rows))


def test_unusable_rows_are_left_out_only_on_request_and_then_counted(tmp_path):
    source_rows = small_data.small_rows()["polaris"]
    source_rows[5]["answer"] = ""
    refused(tmp_path, "polaris", source_rows)
    arguments = "--from", tmp_path / "sources", "--out", tmp_path / "out", "--unverified", "--drop-invalid"
    status, output = run("polaris", *arguments)
    assert status == 0, output
    assert "31 of 32 rows (left out: 1 unusable)" in output
    record = records.read_records(tmp_path / "out")["polaris"]
    assert record["invalid"] == ["row 5 (from 0): answer: expected text, got ''"]


@pytest.mark.parametrize(("name", "column"), [("polaris", "answer"), ("dapo17k", "reward_model")])
def test_a_missing_column_is_named(tmp_path, name, column):
    source_rows = small_data.small_rows()[name]
    for row in source_rows[1:2] if name == "polaris" else source_rows:
        row.pop(column, None)
    output = refused(tmp_path, name, source_rows[1:2])
    assert re.search(rf"expected the columns .*; {column} missing\. Is this .* of {SOURCES[name].repository}\?", output)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("dapo17k", b"PAR1 and then nothing", "is not a readable parquet file"),
        ("minerva", b'{"question": "1?", "answer": "1"}\n{"question":', "line 2: expected a JSON object"),
        ("minerva", b'["1?", "1"]\n', "line 1: expected a JSON object (it is a list)"),
        ("minerva", b'{"question": "\xff", "answer": "1"}\n', "line 1: expected a JSON object"),
    ],
)
def test_a_broken_file_is_named(tmp_path, sources, name, content, complaint):
    path = sources / SOURCES[name].repository / SOURCES[name].file
    path.write_bytes(content)
    status, output = run(name, "--from", sources, "--out", tmp_path / "out", "--unverified")
    assert status == 1
    assert str(path) in output
    assert complaint in output


def test_a_missing_file_says_where_it_belongs_and_how_to_get_it(tmp_path):
    status, output = run("math500", "--from", tmp_path, "--out", tmp_path / "out")
    assert status == 1
    assert f"{tmp_path}/HuggingFaceH4/MATH-500/test.jsonl is missing" in output
    _, listed = run("math500", "--list-files")
    command = listed[listed.index("hf download") :].replace("DIR/", f"{tmp_path}/")
    assert command in output, "--list-files and the error agree"


def test_a_pickle_that_could_run_code_is_refused_and_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return open, (str(tmp_path / "attacked"), "w")

    source_rows = small_data.small_rows()["livecodebench"]
    source_rows[2]["private_test_cases"] = b64encode(zlib.compress(pickle.dumps(Attack()))).decode()
    output = refused(tmp_path, "livecodebench", source_rows)
    assert re.search(r"row 2 .*the pickle names .*open, which could run code; refused", output)
    assert not (tmp_path / "attacked").exists()
    with pytest.raises(RowError, match="expected a pickled string, got a list"):
        rows.private_tests(b64encode(zlib.compress(pickle.dumps([1]))).decode())


def test_the_catalogues_checksum_and_row_counts_are_checked(pin, tmp_path, monkeypatch):
    source_rows = small_data.small_rows()["math500"]
    folder = pin("math500", source_rows)
    status, output = run("math500", "--from", folder, "--out", tmp_path / "out")
    assert status == 0, output
    record = records.read_records(tmp_path / "out")["math500"]
    assert record["revision"] == SOURCES["math500"].revision
    assert record["source_sha256"] == SOURCES["math500"].sha256
    assert not record["warnings"]

    for counts in ({"rows_read": 25}, {"rows_written": 25}):
        monkeypatch.setitem(SOURCES, "math500", replace(SOURCES["math500"], **counts))
        status, output = run("math500", "--from", folder, "--out", tmp_path / "other")
        assert status == 1
        assert re.search(r"rows (in the source|to write): expected 25, got 24", output)

    small_data.write_source("math500", source_rows[:-1], folder)
    status, output = run("math500", "--from", folder, "--out", tmp_path / "other")
    assert status == 1
    assert f"expected sha256 {SOURCES['math500'].sha256}, got " in output
    assert not (tmp_path / "other").exists()

    status, output = run("math500", "--from", folder, "--out", tmp_path / "other", "--revision", COMMIT)
    assert status == 0, output
    record = records.read_records(tmp_path / "other")["math500"]
    assert record["revision"] == COMMIT
    assert "rows in the source: expected 25, got 23" in str(record["warnings"])
    assert "its name is believed" in str(record["warnings"])


def test_a_finished_data_set_is_left_alone(pin, tmp_path):
    folder = pin("aime25", small_data.small_rows()["aime25"])
    arguments = "aime25", "--from", folder, "--out", tmp_path / "out"
    assert run(*arguments)[0] == 0
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").iterdir()}
    status, output = run(*arguments)
    assert status == 0
    assert "finished before, 20 rows" in output
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "out").iterdir()} == before


def test_a_finished_data_set_is_replaced_only_on_request(small, pin):
    folder, out = small
    before = (out / "aime25.parquet").read_bytes()
    pin("aime25", small_data.small_rows()["aime25"])
    status, output = run("aime25", "--from", folder, "--out", out)
    assert status == 1, "small data must not pass for the benchmark"
    assert re.search(r"is there already, and does not match: revision was None and is '563b.*--rebuild", output)

    small_data.write_source("aime25", small_data.small_rows()["aime25"][:7], folder)
    status, output = run("aime25", "--from", folder, "--out", out, "--unverified")
    assert status == 1
    assert re.search(r"test\.jsonl had sha256 .* and has .* now", output)
    assert (out / "aime25.parquet").read_bytes() == before

    with open(out / "aime25.parquet", "rb") as reader:
        status, output = run("aime25", "--from", folder, "--out", out, "--unverified", "--rebuild")
        assert reader.read() == before, "who reads the old file keeps it whole"
    assert status == 0, output
    assert len(built_rows(out, "aime25")) == 7
    assert run("--check", out)[0] == 0


def test_a_damaged_data_set_is_not_taken_for_finished(small):
    folder, out = small
    (out / "aime25.parquet").write_bytes(b"")
    status, output = run("aime25", "--from", folder, "--out", out, "--unverified")
    assert status == 1
    assert "aime25.parquet: sha256" in output
    assert "--rebuild" in output


def test_check_compares_files_with_their_records(small, tmp_path):
    _, out = small
    status, output = run("--check", out)
    assert status == 0
    assert output.count("✓") == len(SOURCES)

    table = pq.read_table(out / "aime24.parquet")
    pq.write_table(table, out / "aime24.parquet", compression="snappy")
    pq.write_table(table.slice(1), out / "aime25.parquet")
    (out / "math500.parquet").unlink()
    (out / "minerva.json").unlink()
    (out / "polaris.json").write_text("{")
    (out / "dapo17k.parquet").write_bytes(b"nothing")
    status, output = run("--check", out)
    assert status == 1
    assert re.search(r"aime24\.parquet: sha256 .*the rows are the same, so another library wrote it", output)
    assert re.search(r"aime25\.parquet: sha256 .*the rows differ, too", output)
    assert re.search(r"math500\.parquet: missing, but its record is there", output)
    assert re.search(r"minerva\.parquet: no record", output)
    assert re.search(r"polaris\.json: expected the record that `verl-ba data polaris` writes", output)
    assert re.search(r"dapo17k\.parquet: sha256 .*not a readable parquet file", output)
    assert output.count("✓") == len(SOURCES) - 6
    assert run("--check", tmp_path / "empty")[0] == 1


def test_records_are_read_by_name(small, tmp_path):
    _, out = small
    found = records.read_records(out)
    assert list(found) == list(SOURCES)
    for name, record in found.items():
        assert record["file_sha256"] == hashlib.sha256((out / f"{name}.parquet").read_bytes()).hexdigest()
        assert record["rows_written"] == len(built_rows(out, name))
        assert record["template"] == prompts.TEMPLATES[SOURCES[name].ability]
    assert records.read_records(tmp_path / "nowhere") == {}


def test_the_checksum_of_the_content_ignores_how_parquet_is_written_but_not_the_rows(small, tmp_path):
    _, out = small
    table = pq.read_table(out / "aime25.parquet")
    pq.write_table(table, tmp_path / "other.parquet", compression="none", row_group_size=3)
    record = records.read_records(out)["aime25"]
    assert records.content_sha256(records.parquet_rows(tmp_path / "other.parquet")) == record["content_sha256"]
    assert records.content_sha256(table.to_pylist()[::-1]) != record["content_sha256"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("finished", [False, True])
def test_an_interrupted_build_leaves_nothing_half_written(sources, tmp_path, monkeypatch, error, finished):
    arguments = "aime25", "--from", sources, "--out", tmp_path / "out", "--unverified"
    if finished:
        assert run(*arguments)[0] == 0

    def fail(table, path, **_):
        path.write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(build.pq, "write_table", fail)
        status, output = run(*arguments, "--rebuild")
    assert status != 0
    if isinstance(error, OSError):
        assert re.search(r"aime25\.parquet: cannot be written \(No space left on device\); nothing was left", output)
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == (["aime25.json", "aime25.parquet"] if finished else [])
    assert run(*arguments)[0] == 0
    assert run("--check", tmp_path / "out")[0] == 0


def test_a_file_without_its_record_is_built_again(sources, tmp_path, monkeypatch):
    arguments = "aime25", "--from", sources, "--out", tmp_path / "out", "--unverified"
    assert run(*arguments)[0] == 0
    with monkeypatch.context() as patch:
        patch.delattr(build, "asdict")  # stops after the data, before the record
        with pytest.raises(NameError):
            run(*arguments, "--rebuild")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["aime25.parquet"], "no record of another file"
    assert run(*arguments)[0] == 0
    assert run("--check", tmp_path / "out")[0] == 0


def test_wrong_names_and_revisions_are_refused(tmp_path):
    for arguments, complaint in (
        (["aime26"], r"expected data sets out of dapo17k, .*got aime26"),
        ([], r"expected data sets out of .*got none"),
        (["aime24", "aime25", "--revision", COMMIT], r"--revision is the commit of one data set, got 2"),
        (["aime24", "--revision", "main"], r"--revision main: expected a commit of 40 hexadecimal digits"),
    ):
        status, output = run(*arguments, "--out", tmp_path)
        assert status != 0
        assert re.search(complaint, output)


def test_one_data_set_that_fails_does_not_stop_the_others(sources, tmp_path):
    (sources / "math-ai" / "aime25" / "test.jsonl").unlink()
    status, output = run("all", "--from", sources, "--out", tmp_path / "out", "--unverified")
    assert status == 1
    assert output.count("✓") == len(SOURCES) - 1
    assert output.count("✗") == 1


def test_the_catalogue_pins_every_source():
    for source in SOURCES.values():
        assert re.fullmatch("[0-9a-f]{40}", source.revision)
        assert source.sha256 is None or re.fullmatch("[0-9a-f]{64}", source.sha256)
        assert source.found
        assert source.rows_written is None or source.rows_written <= source.rows_read


def test_the_command_line_loads_nothing_heavy():
    code = (
        "import sys, verl_ba.tools.cli; print([m for m in ('pyarrow', 'huggingface_hub', 'verl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_verl_reads_all_files_as_one_data_set(small, tmp_path, monkeypatch):
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    from recipes.demo import prepare

    _, out = small
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    expected = [row for name in SOURCES for row in built_rows(out, name)]
    tokenizer = prepare.make_tokenizer([row["prompt"][0]["content"] for row in expected], 400)
    config = OmegaConf.create({"max_prompt_length": 4096, "filter_overlong_prompts_workers": 1})
    files = [str(out / f"{name}.parquet") for name in SOURCES]
    dataset = RLHFDataset(files, tokenizer=tokenizer, config=config)
    assert len(dataset) == len(expected)
    batch = collate_fn([dataset[index] for index in range(len(dataset))])
    assert batch["raw_prompt"].tolist() == [row["prompt"] for row in expected]
    assert batch["reward_model"].tolist() == [row["reward_model"] for row in expected]
    assert batch["extra_info"].tolist() == [row["extra_info"] for row in expected]
    assert batch["index"].tolist() == [row["extra_info"]["index"] for row in expected]


def test_every_ground_truth_scores_1_and_another_answer_0(small):
    from verl.utils.reward_score import default_compute_score

    from verl_ba.paper.scoring import compute_score

    _, out = small
    for name, source in SOURCES.items():
        for row in built_rows(out, name):
            truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
            if source.ability == "code":
                right = f"```python\n{small_data.SOLUTIONS[extra['source_id']]}\n```"
                wrong = "```python\nprint(0)\n```"
            elif source.ability == "gsm8k":  # verl's own data_source, which has verl's own reward
                assert default_compute_score(row["data_source"], f"So it is\n#### {truth}", truth) == 1.0
                assert default_compute_score(row["data_source"], f"So it is\n#### {int(truth) + 1}", truth) == 0.0
                continue
            else:
                right, wrong = f"So it is \\boxed{{{truth}}}.", f"So it is \\boxed{{{int(truth) + 1}}}."
            assert compute_score(name, right, truth, extra) == 1.0, row
            assert compute_score(name, wrong, truth, extra) == 0.0, row


def test_gsm8k_is_verls_own_form_and_math_has_levels_3_to_5(small):
    """As verl's examples/data_preprocess/gsm8k.py writes it."""
    _, out = small
    for name, seed in (("gsm8k", 8), ("gsm8k_test", 9)):
        for row, (problem, answer) in zip(built_rows(out, name), small_data.questions(seed, 1000), strict=False):
            asked = f'{problem} Let\'s think step by step and output the final answer after "####".'
            assert row["prompt"] == [{"role": "user", "content": asked}]
            assert row["reward_model"]["ground_truth"] == answer
    record = records.read_records(out)["math"]
    assert (record["rows_read"], record["not_part"], record["rows_written"]) == (70, 28, 42)
    assert {row["extra_info"]["difficulty"] for row in built_rows(out, "math")} == {"3", "4", "5"}


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}} end", r"\frac{1}{2}"),
        (r"\fbox{x^{2}}", "x^{2}"),
        (r"\boxed{never closed", None),
        ("no box", None),
    ],
)
def test_the_answer_of_math_is_in_the_last_box(solution, answer):
    assert rows.last_box(solution) == answer


class Hub:
    """Enough of the hub for one file: HEAD and GET of /datasets/<repository>/resolve/<commit>/<file>."""

    def __init__(self, content, commit):
        self.content, self.commit = content, commit
        self.cuts = []  # bytes after which the next connections are lost; 0: the answer is 503
        self.refuse = None  # (status, the hub's error code)
        self.requests = []

    def answer(self, request):
        self.requests.append((request.command, request.path, request.headers.get("Range")))
        found = f"/resolve/{self.commit}/" in request.path
        status, code = self.refuse or ((200, None) if found else (404, "RevisionNotFound"))
        body, ranged = self.content, re.match(r"bytes=(\d+)-", request.headers.get("Range") or "")
        cut = self.cuts.pop(0) if request.command == "GET" and found and self.cuts else None
        if cut == 0:
            status = 503
        if status == 200 and ranged:
            status, body = 206, body[int(ranged[1]) :]
        request.send_response(status)
        request.send_header("ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
        request.send_header("X-Repo-Commit", self.commit)
        if code:
            request.send_header("X-Error-Code", code)
        if status == 206:
            start = len(self.content) - len(body)
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        body = body if status in (200, 206) else b""
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body[:cut])
            request.close_connection = cut is not None


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve the small MATH-500, which the catalogue then expects, in the hub's place."""
    from huggingface_hub import constants

    path = small_data.write_source("math500", small_data.small_rows()["math500"], tmp_path / "served")
    source = replace(SOURCES["math500"], sha256=records.file_sha256(path), rows_read=24, rows_written=24)
    monkeypatch.setitem(SOURCES, "math500", source)
    served = Hub(path.read_bytes(), source.revision)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(BrokenPipeError):
                served.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    yield served
    server.shutdown()
    server.server_close()


def test_the_pinned_commit_is_downloaded_once(hub, tmp_path):
    status, output = run("math500", "--out", tmp_path / "out")
    assert status == 0, output
    assert len(built_rows(tmp_path / "out", "math500")) == 24
    path = f"/datasets/HuggingFaceH4/MATH-500/resolve/{SOURCES['math500'].revision}/test.jsonl"
    assert {asked for _, asked, _ in hub.requests if "/resolve/" in asked} == {path}
    before = len(hub.requests)
    assert run("math500", "--out", tmp_path / "out")[0] == 0, "finished"
    assert run("math500", "--out", tmp_path / "again")[0] == 0, "from the hub's cache"
    assert len(hub.requests) == before


def test_a_lost_connection_is_taken_up_where_it_broke(hub, tmp_path):
    hub.cuts = [1000, 500]
    status, output = run("math500", "--out", tmp_path / "out")
    assert status == 0, output
    gets = [ranged for method, asked, ranged in hub.requests if method == "GET" and "/resolve/" in asked]
    assert gets == [None, "bytes=1000-", "bytes=1500-"]
    assert run("--check", tmp_path / "out")[0] == 0


def test_a_download_that_fails_leaves_nothing_and_works_the_next_time(hub, tmp_path):
    hub.cuts = [1000, 0]
    status, output = run("math500", "--out", tmp_path / "out")
    assert status == 1
    assert re.search(r"the download failed .*503.*Run the same command again", output)
    assert not (tmp_path / "out").exists()
    status, output = run("math500", "--out", tmp_path / "out")
    assert status == 0, output
    assert run("--check", tmp_path / "out")[0] == 0


def test_what_the_hub_refuses_is_said_with_a_way_out(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    status, output = run("math500", "--out", tmp_path / "out", "--revision", COMMIT)
    assert status == 1
    assert re.search(rf"MATH-500 at {COMMIT}: the hub has no such commit", output)
    for refuse, complaint in (
        ((403, "GatedRepo"), r"the owners give access on request.*HF_TOKEN"),
        ((404, "RepoNotFound"), r"the data set does not exist, or .* may not see it"),
        ((404, "EntryNotFound"), r"that commit has no such file"),
        ((500, None), r"the hub at http://127.* did not answer.*--from DIR"),
    ):
        hub.refuse = refuse
        status, output = run("math500", "--out", tmp_path / "out")
        assert status == 1
        assert re.search(complaint, output), output
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    status, output = run("math500", "--out", tmp_path / "out")
    assert status == 1
    assert re.search(r"not in the hub's cache, and HF_HUB_OFFLINE is set.*--from DIR", output)
    assert not (tmp_path / "out").exists()


def test_a_download_that_is_not_the_pinned_file_is_refused(hub, tmp_path):
    hub.content = b"".join(hub.content.splitlines(keepends=True)[:-1])
    status, output = run("math500", "--out", tmp_path / "out")
    assert status == 1
    assert "is not the file of HuggingFaceH4/MATH-500" in output
    arguments = "math500", "--out", tmp_path / "out", "--revision", SOURCES["math500"].revision
    status, output = run(*arguments, "--unverified")
    assert status == 0, output
    assert "! --unverified: neither the source's checksum nor its number of rows was checked" in output
    status, output = run(*arguments)
    assert status == 1, "what was not verified does not become so"
    assert "unverified was True and is False now" in output


def test_only_the_columns_that_are_needed_are_read(tmp_path):
    rows_ = small_data.dapo_rows(1, 20, copies=1)
    path = tmp_path / "wide.parquet"
    pq.write_table(pa.Table.from_pylist([{**row, "embedding": [0.0] * 100} for row in rows_]), path)
    read = list(build.source_rows(SOURCES["dapo17k"], path))
    assert [set(row) for row in read] == [{"prompt", "reward_model", "extra_info"}] * 20
