"""The catalogue: where each data set comes from, at which commit, and how many rows it must give."""

from collections.abc import Callable
from dataclasses import dataclass

from verl_ba.paper.data import rows


@dataclass(frozen=True)
class Source:
    """A data set on the hub.

    revision: the commit that is built; found: where that hash is written in public.
    file: the file that is read, parquet or JSON lines, and more_files that follow it; sha256: the first one's checksum,
    None if none was found in public.
    columns: what `question` reads of a row; those in optional may be missing. unique: the source repeats its rows, on
    purpose or by accident, so equal questions are built once; the other benchmarks stay as published.
    rows_read, rows_written: what the pinned files give, before and after; None if no number was found in public.
    data_source: what rows are called in verl's column, by which rewards are chosen; the name unless given.
    """

    name: str
    repository: str
    revision: str
    found: str
    file: str
    sha256: str | None
    columns: tuple[str, ...]
    question: Callable[[dict], rows.Question | None]
    rows_read: int
    rows_written: int | None
    split: str = "test"
    ability: str = "math"
    unique: bool = False
    optional: tuple[str, ...] = ()
    more_files: tuple[str, ...] = ()
    data_source: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return self.file, *self.more_files


_DAPO_COLUMNS = ("prompt", "reward_model", "extra_info")

SOURCES = {
    source.name: source
    for source in (
        # Each of about 17,900 rows stands there 100 times. Of the 17,398 different prompts (open-r1's processed copy has
        # as many) 7 come with two different answers, 17,405 pairs in all (the hub's discussion 3): neither is trusted.
        Source(
            name="dapo17k",
            repository="BytedTsinghua-SIA/DAPO-Math-17k",
            revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            found="`hf download … --revision` in the README of verl's Nemotron 3.5 Lightning example; a dozen others",
            file="data/dapo-math-17k.parquet",
            sha256="534375d6bb8630d22ab46a56e11f2ffec1d288d8f7d04099bc82d68948705941",
            columns=_DAPO_COLUMNS,
            question=rows.dapo,
            rows_read=1_791_700,
            rows_written=17_391,
            split="train",
            unique=True,
        ),
        Source(
            name="polaris",
            repository="POLARIS-Project/Polaris-Dataset-53K",
            revision="296f8e34132e63f4a1d70e0dcc8bddebb43f03e4",
            found="POLARIS_REVISION of a public verifiers environment; REVISION of a public preparation script for MaxRL",
            file="polaris-data-53K.jsonl",
            sha256=None,
            columns=("problem", "answer", "difficulty"),
            question=rows.polaris,
            rows_read=53_291,
            rows_written=None,
            split="train",
            unique=True,
        ),
        Source(
            name="math500",
            repository="HuggingFaceH4/MATH-500",
            revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            found="pinned in more than ten public repositories, with the file's checksum",
            file="test.jsonl",
            sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
            columns=("problem", "answer", "unique_id", "level"),
            question=rows.math500,
            rows_read=500,
            rows_written=500,
        ),
        # Each problem stands there 32 times, for avg@32; verl's val_kwargs.n does that.
        Source(
            name="aime24",
            repository="BytedTsinghua-SIA/AIME-2024",
            revision="aa49075e24ad594b79fdf0bdcefa735c2181be67",
            found="`hf download … --revision` in the README of verl's Nemotron 3.5 Lightning example; eight others",
            file="data/aime-2024.parquet",
            sha256="12154e38a716d12db5731f9a022ae69a610c4f7d0e0dcc04e902887a686877e7",
            columns=_DAPO_COLUMNS,
            question=rows.dapo,
            rows_read=960,
            rows_written=30,
            unique=True,
        ),
        # This copy is a single file of 30 rows with plain integers as answers, and it is pinned more often than the
        # others; opencompass/AIME2025 (two files) writes one answer as 336^\circ.
        Source(
            name="aime25",
            repository="math-ai/aime25",
            revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
            found="pinned in more than ten public repositories, with the file's checksum",
            file="test.jsonl",
            sha256="b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
            columns=("problem", "answer", "id"),
            question=rows.aime25,
            rows_read=30,
            rows_written=30,
        ),
        # The 674 open-ended, English, text-only questions of the mathematics competitions (Hothan/OlympiadBench's
        # OE_TO_maths_en_COMP; Qwen2.5-Math's evaluation has 675), in one file.
        Source(
            name="olympiadbench",
            repository="math-ai/olympiadbench",
            revision="4faaf1e6ec17d11a4218a9bf4c049ecaf954dd84",
            found="pinned in five public repositories, with file name and row count",
            file="test.parquet",
            sha256=None,
            columns=("id", "question", "final_answer"),
            optional=("context", "error"),
            question=rows.olympiadbench,
            rows_read=674,
            rows_written=674,
        ),
        Source(
            name="minerva",
            repository="math-ai/minervamath",
            revision="ee46ddc498933b1977577953250ca5c66be64f96",
            found="pinned in five public repositories, with the row count",
            file="test.jsonl",
            sha256=None,
            columns=("question", "answer"),
            question=rows.minerva,
            rows_read=272,
            rows_written=272,
        ),
        # What release_v6 added to release_v5: 175 problems of contests from January to April 2025. The paper names no
        # version; this window is the newest one, and one file of 134 MB instead of six of 4.5 GB.
        Source(
            name="livecodebench",
            repository="livecodebench/code_generation_lite",
            revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
            found="pinned in more than ten public repositories, with the file's checksum",
            file="test6.jsonl",
            sha256="bb4c364f71921c4495a6ad15abe1a927350b720009f4933e2e71f8af0f6fd1f5",
            columns=(
                "question_content",
                "question_id",
                "difficulty",
                "starter_code",
                "public_test_cases",
                "private_test_cases",
                "metadata",
            ),
            question=rows.livecodebench,
            rows_read=175,
            rows_written=175,
            ability="code",
        ),
        # For the recipes on one GPU: prompt and answer as verl prepares them (examples/data_preprocess/gsm8k.py).
        *(
            Source(
                name=name,
                repository="openai/gsm8k",
                revision="740312add88f781978c0658806c59bc2815b9866",
                found="pinned in more than ten public repositories, with file names",
                file=f"main/{split}-00000-of-00001.parquet",
                sha256=sha256,
                columns=("question", "answer"),
                question=rows.gsm8k,
                rows_read=count,
                rows_written=count,
                split=split,
                ability="gsm8k",
                data_source="openai/gsm8k",
            )
            for name, split, count, sha256 in (
                ("gsm8k", "train", 7_473, None),
                ("gsm8k_test", "test", 1_319, "ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59"),
            )
        ),
        # The training half of MATH, levels 3 to 5. MATH-500 is of the other half.
        Source(
            name="math",
            repository="EleutherAI/hendrycks_math",
            revision="21a5633873b6a120296cce3e2df9d5550074f4a3",
            found="pinned in seven public repositories, with file names",
            file="algebra/train-00000-of-00001.parquet",
            more_files=tuple(
                f"{subject}/train-00000-of-00001.parquet"
                for subject in (
                    "counting_and_probability",
                    "geometry",
                    "intermediate_algebra",
                    "number_theory",
                    "prealgebra",
                    "precalculus",
                )
            ),
            sha256=None,
            columns=("problem", "solution", "level"),
            question=rows.math_level3to5,
            rows_read=7_500,
            rows_written=None,
            split="train",
            unique=True,
        ),
    )
}
